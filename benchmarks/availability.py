"""``flux bench availability``: results while a source partition is silent, and their corrections when it is back.

Three partitions of a source give 1,500 rows a second each, with the time at which a row is due as its event time. Rows are
counted per key and window of 100 ms, and go through further stages that pass them on (``--chain``) to a sink, which notes when
each result came. Partition 0 is silent for some seconds, and then gives the rows of that time as fast as it can. This is the
set-up of the authors of DPC (Balazinska and others, TODS 2008), with one bound X from the row to the result however many stages
there are. ``soak`` runs the same without a failure, and fails at the first tentative result.

Figures go by windows. A window is new from its first row on; ``first_tentative_s`` counts from the end of the first window that
lacks rows, because a window without an end has no result. The stable answer is compared with the rows of the source.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.operating import await_any_progress, until
from benchmarks.timeline import Report
from spark_integration.query.query import Query
from spark_integration.query.start import start_query

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
OUTPUT = "key BIGINT, window_start TIMESTAMP, window_end TIMESTAMP, n BIGINT"
SOURCES, RATE, KEYS = 3, 1_500, 20
SILENT_PARTITION = 0
#: The bound X, and the quantum of results.
BOUND_S, SIZE_S, SIZE_US = 3.0, 0.1, 100_000
#: By the rules D1 and D3: the share of X that the first tentative result waits, and the seconds that later ones wait with the
#: policy "process".
ALPHA, PROCESS_S = 0.9, 0.35
#: Seconds before the failure, and behind it at least: the correction is seen to its end.
BEFORE_S, BEHIND_S = 4.0, 5.0
#: Seconds between two lines of a soak, and options of its query: a worker that is given up on a busy machine would end it,
#: because its source cuts batches by the clock.
SAID_S = 60.0
LONG = {"workers_timeout": "110s", "heartbeat_timeout": "30s"}
TICK_S = 0.01
#: The peer takes a partition for idle after this time.
IDLE = "1 second"
PARTITIONS, REPLICAS, WORKERS = 2, 2, 2
#: Rows of one run at full speed, and rows of a batch.
FAST_ROWS, FAST_BATCH = 6_000_000, 16_384
STABLE, TENTATIVE, UNDO, CORRECTED = "stable", "tentative", "undo", "corrected"


@dataclass(frozen=True)
class Failure:
    """The script of one run. Times are in seconds since the epoch, and multiples of the quantum."""

    start: float
    seconds: float
    #: A partition that is silent says so; the peer's says that it has no rows.
    tells: bool = True
    #: Seconds of rows behind the failure, at least.
    behind: float = BEHIND_S

    @property
    def begins(self) -> float:
        return self.start + BEFORE_S

    @property
    def heals(self) -> float:
        return self.begins + self.seconds

    @property
    def ends(self) -> float:
        return self.heals + max(self.behind, self.seconds / 10)

    def times(self) -> np.ndarray:
        """Return the event times of all rows of one partition, in microseconds."""
        rows = np.arange(round((self.ends - self.start) * RATE))
        return np.round((self.start + rows / RATE) * 1e6).astype(np.int64)

    def truth(self) -> dict[int, int]:
        """Return the rows of each window, by its end in microseconds."""
        ends, counts = np.unique(self.times() // SIZE_US * SIZE_US + SIZE_US, return_counts=True)
        return dict(zip(ends.tolist(), (counts * SOURCES).tolist(), strict=True))


class Noted(NamedTuple):
    """A call of the sink."""

    at: float
    partition: int
    kind: str
    #: Rows that were counted in each window, by its end in microseconds.
    counts: dict[int, int]


def paced(folder: str) -> Any:
    """Make a source of the script that the driver writes to this folder when all workers are there."""

    def read(partition: int) -> Iterator[Any]:
        script = Path(folder, "script")
        while not script.exists():
            yield None
        failure = Failure(**json.loads(script.read_text()))
        times, sent = failure.times(), 0
        while sent < len(times):
            now = time.time()
            if partition == SILENT_PARTITION and failure.begins <= now < failure.heals:
                due = rows_before(failure.begins, times)
            else:
                due = rows_before(now // TICK_S * TICK_S, times)
            if due > sent:
                keys = np.arange(sent, due) % KEYS
                columns = [pa.array(keys), pa.array(times[sent:due]).view(SCHEMA.field(1).type)]
                yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
                sent = due
            elif partition == SILENT_PARTITION and failure.tells and failure.begins <= now < failure.heals:
                yield flux.SILENT
            else:
                yield None

    return read


def rows_before(moment: float, times: np.ndarray) -> int:
    """Return the number of event times before a moment.

    The moment is an integer of microseconds, as the times are: a number of another type would make numpy convert all times of
    an hour for each batch.
    """
    return int(np.searchsorted(times, round(moment * 1e6)))


class Count(flux.Aggregate):
    n = flux.count()


class CountByCopy(Count):
    """Counts of windows by a class with a method, which may keep state of its own: a shadow has to make a copy."""

    def process(self, batch: pa.RecordBatch) -> Any:
        return super().process(batch)


def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Notes(flux.Sink):
    """A sink that notes each call in a file of this machine."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def open(self, context: Any) -> None:
        self._partition = context.partition
        self._file = open(Path(self._folder, f"notes-{context.partition}-{os.getpid()}"), "a")  # noqa: SIM115

    def _note(self, kind: str, counts: dict[int, int]) -> None:
        self._file.write(json.dumps([time.time(), self._partition, kind, list(counts.items())]) + "\n")
        self._file.flush()

    def write(self, batch: pa.RecordBatch, position: Any) -> None:
        self._note(STABLE, counted(batch))

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self._note(TENTATIVE, counted(batch))

    def undo(self, start: int | None, end: int | None) -> None:
        self._note(UNDO, {})

    def corrected(self, through: int) -> None:
        self._note(CORRECTED, {through: 0})

    def close(self) -> None:
        self._file.close()


def counted(batch: pa.RecordBatch) -> dict[int, int]:
    ends, places = np.unique(batch.column("window_end").view(pa.int64()).to_numpy(), return_inverse=True)
    sums = np.bincount(places, batch.column("n").to_numpy(), len(ends)).astype(int)
    return dict(zip(ends.tolist(), sums.tolist(), strict=True))


def notes_in(folder: str) -> list[Noted]:
    """Return the calls of all sinks, in order of time."""
    lines = [line for path in Path(folder).glob("notes-*") for line in path.read_text().splitlines()]
    made = [Noted(at, partition, kind, dict(counts)) for at, partition, kind, counts in map(json.loads, lines)]
    return sorted(made, key=lambda note: note.at)


# ---- figures


@dataclass
class Shown:
    """Times at which one partition has shown a window."""

    first: float = math.inf
    stable: float = math.inf
    tentative: list[float] = field(default_factory=list)


def figures_of(notes: Iterable[Noted], failure: Failure) -> dict[str, Any]:
    """Return the figures of a run. Tentative windows are counted at the partition that has most of them."""
    shown: dict[tuple[int, int], Shown] = {}
    counts: dict[int, int] = {}
    for note in notes:
        for end, rows in note.counts.items() if note.kind in (STABLE, TENTATIVE) else ():
            seen = shown.setdefault((note.partition, end), Shown())
            seen.first = min(seen.first, note.at)
            if note.kind == STABLE:
                seen.stable = min(seen.stable, note.at)
                counts[end] = counts.get(end, 0) + rows
            else:
                seen.tentative.append(note.at)
    truth = failure.truth()
    missing = {end: truth.get(end, 0) - counts.get(end, 0) for end in truth.keys() | counts.keys()}
    early = failure.start * 1e6 + 2e6  # connections are made, and kernels loaded
    delays = [seen.first - end / 1e6 + SIZE_S for (_, end), seen in shown.items() if early < end < failure.ends * 1e6]
    again = {place: seen for place, seen in shown.items() if seen.tentative}
    partitions = {partition for partition, _ in again}
    first_end = failure.begins + SIZE_S
    corrected = [seen.stable - failure.heals for seen in again.values() if seen.stable < math.inf]
    found = {
        "first_tentative_s": min((seen.tentative[0] for seen in again.values()), default=math.inf) - first_end,
        "delay_max_s": max(delays, default=math.inf),
        "corrected_first_s": min(corrected, default=math.inf),
        "corrected_last_s": max(corrected, default=math.inf),
    }
    return {
        **{name: None if math.isinf(value) else round(value, 3) for name, value in found.items()},
        "tentative": max((sum(1 for each, _ in again if each == partition) for partition in partitions), default=0),
        "revised": sum(len(seen.tentative) - 1 for seen in again.values()),
        "never_corrected": sum(seen.stable == math.inf for seen in again.values()),
        "lost": sum(max(each, 0) for each in missing.values()),
        "doubled": sum(max(-each, 0) for each in missing.values()),
        "windows_wrong": sum(each != 0 for each in missing.values()),
    }


def formula(policy: str, seconds: float) -> int:
    """Return the number of windows that are tentative when a failure of some seconds heals: those whose wait is over."""
    first = ALPHA * BOUND_S
    if seconds <= first + SIZE_S:
        return 0
    if policy == "suspend":
        return 1
    wait = PROCESS_S if policy == "process" else first
    return int((seconds - wait) / SIZE_S + 1e-6)


# ---- runs


def flow_of(source: Any, chain: int, kind: str, availability: str | None) -> Any:
    """Return counts per window behind a source, through a chain of stages."""
    options: dict[str, Any] = {"partitions": PARTITIONS, "replicas": REPLICAS}
    measures = CountByCopy if kind == "fork" else Count
    made = flux.stage(key="key", window=flux.window("ts", f"{SIZE_US // 1000} milliseconds"), **options)(measures)(
        source
    )
    for number in range(1, chain):
        step = flux.stage(key="key", event_time="window_end", name=f"passed_{number}", schema=OUTPUT, **options)
        made = step(passed)(made)
    return made


def run(
    seconds: float, chain: int, policies: tuple[str, str], kind: str, peer: bool, fast_rows: int, console: Console
) -> Report:
    spark, _ = session.start(WORKERS, 2, idle_jvm=True)
    figures: dict[str, Any] = {
        "benchmark": "availability", "x_s": BOUND_S, "seconds": seconds, "chain": chain, "kind": kind,
        "failure": policies[0], "stabilization": policies[1],
    }  # fmt: skip
    try:
        notes, failure, found = measured(spark, seconds, chain, kind, policies)
        figures |= found | {"tentative_formula": formula(policies[0], seconds)}
        _tell(figures, console)
        if peer:
            figures |= {f"idle_{name}": value for name, value in measured(spark, seconds, chain, kind, None)[2].items()}
            console.print(
                f"with an idle time-out: longest delay {figures['idle_delay_max_s']} s; {figures['idle_lost']:,} rows are "
                f"lost for good, {figures['idle_windows_wrong']} windows wrong"
            )
        if fast_rows:
            figures |= throughput(spark, fast_rows, chain, kind, policies, console)
    finally:
        spark.stop()
    wrong = figures["lost"] or figures["doubled"] or figures["never_corrected"]
    failed = "the stable answer is not that of the source" if wrong else None
    return Report(figures, failed=failed, picture=lambda path: draw(notes, failure, path))


def _tell(figures: dict[str, Any], console: Console) -> None:
    console.print(
        f"X = {BOUND_S:g} s, silent for {figures['seconds']:g} s, {figures['chain']} stages, {figures['kind']}: first tentative "
        f"result {figures['first_tentative_s']} s after the end of the first window that lacks rows (0.9 X = "
        f"{ALPHA * BOUND_S:g}); longest delay of a new result {figures['delay_max_s']} s"
    )
    console.print(
        f"corrected {figures['corrected_first_s']} to {figures['corrected_last_s']} s behind the return; "
        f"{figures['tentative']} windows tentative (formula {figures['tentative_formula']}), given again "
        f"{figures['revised']} times; {figures['lost']} rows lost, {figures['doubled']} doubled"
    )


def soak(minutes: float, chain: int, kind: str, console: Console) -> Report:
    """Run for some minutes without a failure. Neither a tentative result nor a lost or doubled row is allowed."""
    spark, _ = session.start(WORKERS, 2, idle_jvm=True)
    try:
        notes, failure, found = measured(spark, 0.0, chain, kind, ("process", "process"), 60 * minutes, console, **LONG)
    finally:
        spark.stop()
    figures = {
        "benchmark": "availability", "soak_minutes": minutes, "x_s": BOUND_S, "chain": chain, "kind": kind,
        "rows": sum(failure.truth().values()), "tentative": sum(note.kind == TENTATIVE for note in notes),
        **{name: found[name] for name in ("delay_max_s", "lost", "doubled", "windows_wrong")},
    }  # fmt: skip
    console.print(
        f"{minutes:g} minutes without a failure: {figures['rows']:,} rows, {figures['tentative']} tentative results, longest "
        f"delay {figures['delay_max_s']} s; {figures['lost']} rows lost, {figures['doubled']} doubled"
    )
    return Report(figures, failed=unwanted(figures), picture=lambda path: draw(notes, failure, path))


def unwanted(figures: dict[str, Any]) -> str | None:
    """Return the reason why a soak has failed; None: it has not."""
    if figures["tentative"]:
        return f"{figures['tentative']} tentative results, and nothing was missing"
    wrong = figures["lost"] or figures["doubled"] or figures["windows_wrong"]
    return "the stable answer is not that of the source" if wrong else None


def measured(
    spark: SparkSession,
    seconds: float,
    chain: int,
    kind: str,
    policies: tuple[str, str] | None,
    behind: float = BEHIND_S,
    console: Console | None = None,
    **more: Any,
) -> tuple[list[Noted], Failure, dict[str, Any]]:
    """Run one failure. ``policies`` None: with an idle time-out and without availability. ``behind``: seconds of rows behind the
    failure, which the ``console`` hears of. ``more``: options of the query."""
    folder = tempfile.mkdtemp(prefix="flux-bench-")
    try:
        source: Any = flux.source(paced(folder), SCHEMA, partitions=SOURCES)
        source = source.withWatermark("ts", "0 seconds", **({} if policies else {"idle": IDLE}))
        made = flow_of(source, chain, kind, None)
        options: dict[str, Any] = {"workers": WORKERS, **more}
        if policies:
            options |= {
                "availability": f"{BOUND_S:g}s",
                "availability_failure": policies[0],
                "availability_stabilization": policies[1],
            }
        query = start_query([made.to(Notes(folder))], "availability", spark, **options)
        try:
            until(lambda: query.phase == "running", 120, "the query runs")
            start = math.ceil(time.time() + 1)
            failure = Failure(start, seconds, policies is not None, behind)
            new = Path(folder, "script.new")
            new.write_text(json.dumps(asdict(failure)))
            os.rename(new, Path(folder, "script"))
            growth = _memory_until(query, failure)
            await_end(query, failure.ends - time.time() + 120, console)
        finally:
            query.stop()
        notes = notes_in(folder)
        return notes, failure, {**figures_of(notes, failure), "memory_bytes": growth}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _memory_until(query: Query, failure: Failure) -> int | None:
    """Wait until the failure heals. Return by how many bytes the resident memory of all workers has grown meanwhile."""
    time.sleep(max(failure.begins - time.time(), 0))
    before = _resident(query)
    time.sleep(max(failure.heals - time.time(), 0))
    after = _resident(query)
    return None if before is None or after is None else max(after - before, 0)


def _resident(query: Query) -> int | None:
    found = [int(member.stats.get("rss_bytes", 0)) for member in query.members().values()]
    return sum(found) if all(found) else None


def await_end(query: Query, limit_s: float, console: Console | None = None) -> None:
    """Wait until the query has ended, and tell its status to the ``console`` every minute."""
    progress, now = None, time.monotonic()
    end, say_at = now + limit_s, now + SAID_S
    while (progress := await_any_progress(query, progress, 30)) is not None and time.monotonic() < end:
        if query.phase not in ("starting", "running"):
            return
        if console is not None and time.monotonic() > say_at:
            say_at += SAID_S
            console.print(f"  {time.strftime('%H:%M:%S')} {query.status['message']}", highlight=False)


# ---- nothing fails


def at_full_speed(rows: int) -> Any:
    """Make a source that gives rows as fast as possible, a million of them in a second of event time."""
    mine = rows // SOURCES

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        for first in range(0, mine, FAST_BATCH):
            numbers = np.arange(first, min(first + FAST_BATCH, mine))
            columns = [pa.array(numbers % KEYS), pa.array(numbers * SOURCES).view(SCHEMA.field(1).type)]
            yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    return read


def throughput(
    spark: SparkSession, rows: int, chain: int, kind: str, policies: tuple[str, str], console: Console, rounds: int = 3
) -> dict[str, Any]:
    """Measure rows per second with availability and without, in turn, while nothing fails."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for on in [False, *[True, False] * rounds]:  # the first run is for warmth
        folder = tempfile.mkdtemp(prefix="flux-bench-")
        try:
            source: Any = flux.source(at_full_speed(rows), SCHEMA, partitions=SOURCES)
            made = flow_of(source.withWatermark("ts", "0 seconds"), chain, kind, None)
            options: dict[str, Any] = (
                {"availability": f"{BOUND_S:g}s", "availability_failure": policies[0]} if on else {}
            )
            query = start_query([made.to(Notes(folder))], "availability", spark, workers=WORKERS, **options)
            try:
                until(lambda query=query: query.phase != "starting", 120, "the query runs")  # type: ignore[misc]
                start = time.monotonic()
                await_end(query, 300)
                rates[on].append(rows / (time.monotonic() - start))
            finally:
                query.stop()
            if tentative := sum(note.kind == TENTATIVE for note in notes_in(folder)):
                raise AssertionError(f"{tentative} tentative results, and nothing was missing")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    on_rate, off_rate = (float(np.median(each)) for each in (rates[True], rates[False][1:]))
    console.print(f"nothing fails: {on_rate:,.0f} rows/s with availability, {off_rate:,.0f} without")
    return {
        "on_rows_per_s": round(on_rate), "off_rows_per_s": round(off_rate), "ratio": round(on_rate / off_rate, 3)
    }  # fmt: skip


def draw(notes: list[Noted], failure: Failure, path: Path) -> None:
    """Draw when each window was shown: by its end, the seconds until its first and its stable result."""
    from matplotlib.figure import Figure  # without pyplot: no window, nothing global

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    for kind, color in ((TENTATIVE, "tab:orange"), (STABLE, "tab:blue")):
        points = [
            (end / 1e6 - failure.start, note.at - end / 1e6)
            for note in notes
            if note.kind == kind
            for end in note.counts
        ]
        axes.plot(*(zip(*points, strict=True) if points else ([], [])), ".", markersize=3, color=color, label=kind)
    axes.axvspan(
        failure.begins - failure.start, failure.heals - failure.start, alpha=0.15, label="one partition silent"
    )
    axes.axhline(BOUND_S, linestyle=":", color="tab:red", label="X")
    axes.set_xlabel("end of the window (s)")
    axes.set_ylabel("seconds until the result")
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=110)
