"""A plan that grows: the time of an addition, the quiet of other stages meanwhile, and the cost of many stages in one plan.

Rows pass a keyed stage, which numbers the rows of each key, and arrive at a sink. First a calm time, in which one added stage
reads all rows of the keyed stage. Then, for as long, an addition each second: a stage that reads all rows takes the place of the
one before, which is removed. So both times have the same load. Each added stage keeps the first and the last number of each key
and counts the rows between them: a number that is missing was lost, one too many was doubled.

Then a second query, with few rows, gets ``stages`` stages, and an addition and a removal are timed again and again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.arrivals import Seen, Span, collect, percentile, sink
from benchmarks.operating import until
from benchmarks.paced import END, SCHEMA, START, Script
from benchmarks.small import ages
from benchmarks.timeline import Line, Mark, Report, of_arrivals
from spark_integration.query.query import Query
from spark_integration.query.start import start_query

WORKERS, KEYS, PARTITIONS = 2, 1000, 4
#: Time between two additions, and time before the calm time.
EVERY_S, WARM_UP_S = 1.0, 3.0
#: Rows per second of the query with many stages, and time between two batches: each batch goes to every stage.
FEW_ROWS, FEW_EVERY_S = 200, 0.5
#: Stages of one addition while the plan is filled, and additions that are timed in the full plan.
TOGETHER, TIMED = 25, 20
#: Longest time of an addition, and until a removed stage has written its counts.
LIMIT_S = 60.0
NUMBERED = pa.schema([(name, pa.int64()) for name in ("key", "due_ns", "n", "rows")])
#: A number above all that a key gets.
NEVER = np.iinfo(np.int64).max


class Numbered(flux.Operator):
    """Rows with their number among the rows of their key, from 1 on."""

    schema = NUMBERED

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.before = np.zeros(KEYS, np.int64)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        keys = batch.column("key").to_numpy()
        numbers = self.before[keys] + ranks(keys)
        self.before += np.bincount(keys, minlength=KEYS)
        columns = [batch.column("key"), batch.column("due_ns"), pa.array(numbers), pa.array(np.ones_like(numbers))]
        return pa.RecordBatch.from_arrays(columns, schema=NUMBERED)


def ranks(keys: np.ndarray) -> np.ndarray:
    """Return for each row its number among the rows of the same key, from 1 on."""
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
    found = np.empty(len(keys), np.int64)
    found[order] = np.arange(len(keys)) - np.repeat(begins, np.diff(begins, append=len(keys))) + 1
    return found


class Added(flux.Operator):
    """A stage that comes while rows flow: the sink of all rows of ``Numbered`` since then. It writes the time of its first row
    at once, and its counts when it is closed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.first, self.last = np.full(KEYS, NEVER), np.zeros(KEYS, np.int64)
        self.rows = np.zeros(KEYS, np.int64)
        self.begun = False

    def process(self, batch: pa.RecordBatch) -> None:
        if not self.begun:
            self.begun = True
            self._file("first").write_text(str(time.time()))
        keys, numbers = batch.column("key").to_numpy(), batch.column("n").to_numpy()
        np.minimum.at(self.first, keys, numbers)
        np.maximum.at(self.last, keys, numbers)
        self.rows += np.bincount(keys, minlength=KEYS)

    def close(self) -> None:
        written = self._file("new")
        with written.open("wb") as file:
            np.save(file, np.stack([self.first, self.last, self.rows]))
        written.rename(self._file("counts"))

    def _file(self, kind: str) -> Path:
        return Path(self.folder, f"{self.context.stage}.{self.context.partition}.{os.getpid()}.{kind}")


@dataclass(frozen=True)
class Addition:
    """An addition in the growing time: its request, its answer, and the answer to the removal of the stage before, in seconds
    since 1970."""

    name: str
    asked: float
    confirmed: float
    removed: float


class Counts(NamedTuple):
    """Rows of added stages that are missing, and rows that came twice."""

    lost: int
    doubled: int


def run(rate: int, stages: int, seconds: float, replicas: int, console: Console, **options: Any) -> Report:
    spark, startup = session.start(WORKERS, 2, 1024, idle_jvm=True)
    try:
        figures: dict[str, Any] = {"benchmark": "grow", "rate": rate, "seconds": seconds, "replicas": replicas}
        figures["spark_startup_s"] = round(startup, 2)
        with tempfile.TemporaryDirectory(prefix="flux-bench-") as folder:
            measured, line = _grow(spark, folder, rate, seconds, replicas, console, **options)
            if stages:
                measured |= _fill(spark, folder, stages, replicas, console, **options)
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()
    wrong = measured["lost"] or measured["doubled"]
    return Report(figures | measured, [line], failed="rows were lost or doubled" if wrong else None)


# ---- additions while rows flow


def _grow(
    spark: SparkSession, folder: str, rate: int, seconds: float, replicas: int, console: Console, **options: Any
) -> tuple[dict[str, Any], Line]:
    script = Script(rate, WORKERS, KEYS)
    arrived = flux.stage(key="key", partitions=WORKERS, name="Arrivals")(sink(KEYS, PARTITIONS, newest=False))
    query = start_query([arrived(_numbered(script, replicas))], "grow", spark, keep_output=True, **_given(options))
    try:
        query.wait_until_running(120)
        script.say(START, time.time() + 0.5)
        query.add(_added("Added0", folder, query, replicas), timeout=LIMIT_S)
        time.sleep(0.5 + WARM_UP_S)
        calm = Span(time.time(), time.time() + seconds)
        console.print(f"  {seconds:g} s without an addition")
        time.sleep(seconds)
        console.print(f"  {seconds:g} s with an addition each second")
        additions = _add_and_remove(query, folder, replicas, seconds)
        growing = Span(additions[0].asked, max(time.time(), additions[-1].removed))
        query.seal()
        script.say(END, script.batch_due_at(time.time() + 0.5))
        seen, expected = collect(query, script), script.expected()
    finally:
        query.stop()
        script.clear()
    names = ["Added0", *(each.name for each in additions)]
    until(lambda: not _without_counts(folder, names), LIMIT_S, f"{', '.join(names)} have written their counts")
    marks = [Mark(each.asked, each.removed, "addition and removal") for each in additions]
    line = of_arrivals("rows", seen, marks, calm.start, growing.end)
    found = summary(seen, additions, firsts(folder), calm, growing)
    exact, counts = seen.exactness(expected), counted(counts_in(folder))
    found |= {
        "rows": exact["rows"],
        "lost": exact["lost"] + counts.lost,
        "doubled": exact["duplicated"] + counts.doubled,
    }
    console.print(f"  {found}")
    return found, line


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {"workers": WORKERS, "balance_enabled": False} | options


def _numbered(script: Script, replicas: int) -> Any:
    source = flux.source(script.read, SCHEMA, partitions=WORKERS)
    return flux.stage(key="key", partitions=PARTITIONS, replicas=replicas, name="Numbered")(Numbered)(source)


def _added(name: str, folder: str, query: Query, replicas: int) -> Any:
    return flux.stage(key="key", partitions=1, replicas=replicas, name=name)(Added)(folder)(query["Numbered"])


def _add_and_remove(query: Query, folder: str, replicas: int, seconds: float) -> list[Addition]:
    begin, done, before = time.time(), [], "Added0"
    for number in range(max(int(seconds / EVERY_S), 1)):
        time.sleep(max(begin + number * EVERY_S - time.time(), 0.0))
        name, asked = f"Added{number + 1}", time.time()
        query.add(_added(name, folder, query, replicas), timeout=LIMIT_S)
        confirmed = time.time()
        query.remove(before, timeout=LIMIT_S)
        done.append(Addition(name, asked, confirmed, time.time()))
        before = name
    time.sleep(EVERY_S)
    return done


# ---- many stages in one plan


def _fill(
    spark: SparkSession, folder: str, stages: int, replicas: int, console: Console, **options: Any
) -> dict[str, Any]:
    script = Script(FEW_ROWS, WORKERS, KEYS, tick_s=FEW_EVERY_S)
    flow = flux.stage(key="key", partitions=1, name="Arrivals")(Added)(folder)(_numbered(script, replicas))
    query = start_query([flow], "grow-many", spark, **_given(options))
    try:
        query.wait_until_running(120)
        script.say(START, time.time())
        time.sleep(WARM_UP_S)
        before = _memory(query)
        names = [f"Many{number}" for number in range(stages - len(query.plan.stages))]
        for start in range(0, len(names), TOGETHER):
            some = [_added(name, folder, query, replicas) for name in names[start : start + TOGETHER]]
            query.add(*some, timeout=LIMIT_S)
            console.print(f"  {len(query.plan.stages)} stages")
        timed = [_timed(query, folder, number, replicas) for number in range(TIMED)]
        memory = _memory(query)
    finally:
        query.stop()
        script.clear()
    additions, epochs = zip(*timed, strict=True)
    found = {
        "stages": stages,
        "stages_add_p50_ms": percentile(additions, 50),
        "stages_add_p99_ms": percentile(additions, 99),
        "epoch_p50_ms": percentile(epochs, 50),
        "epoch_p99_ms": percentile(epochs, 99),
        "memory_before_bytes": before,
        "memory_bytes": memory,
    }
    console.print(f"  {found}")
    return found


def _timed(query: Query, folder: str, number: int, replicas: int) -> tuple[float, float]:
    """Add a stage and remove it again. Return the time of the addition, and of its epoch alone, in ms."""
    began = time.perf_counter()
    query.add(_added(f"Timed{number}", folder, query, replicas), timeout=LIMIT_S)
    took = time.perf_counter() - began
    epoch_s = query._server.look(lambda: query._server.core.plans.versions[-1].followed_s)
    query.remove(f"Timed{number}", timeout=LIMIT_S)
    return took * 1e3, epoch_s * 1e3


def _memory(query: Query) -> int:
    """Return the resident bytes of the largest worker."""
    return max(int(psutil.Process(member.about.pid).memory_info().rss) for member in query.members().values())


# ---- outcome


def firsts(folder: str) -> dict[str, float]:
    """Return by stage the time at which its first row came to a replica, in seconds since 1970."""
    found: dict[str, float] = {}
    for path in Path(folder).glob("*.first"):
        name, at = path.name.partition(".")[0], float(path.read_text())
        found[name] = min(found.get(name, at), at)
    return found


def counts_in(folder: str) -> list[np.ndarray]:
    """Return the counts of each replica of the added stages: first number, last number and rows of each key."""
    return [np.load(path) for path in sorted(Path(folder).glob("Added*.counts"))]


def _without_counts(folder: str, names: Iterable[str]) -> list[str]:
    there = {path.name.partition(".")[0] for path in Path(folder).glob("*.counts")}
    return [name for name in names if name not in there]


def counted(counts: Iterable[np.ndarray]) -> Counts:
    """Compare the rows of added stages with the numbers from the first to the last of each key."""
    lost = doubled = 0
    for first, last, rows in counts:
        expected = np.where(rows > 0, last - np.where(rows > 0, first, 0) + 1, 0)
        lost += int(np.maximum(expected - rows, 0).sum())
        doubled += int(np.maximum(rows - expected, 0).sum())
    return Counts(lost, doubled)


def summary(
    seen: Seen, additions: Sequence[Addition], first_rows: dict[str, float], calm: Span, growing: Span
) -> dict[str, Any]:
    """Summarise the calm and the growing time.

    ``first_row_ms``: from the request to the first row at a replica of the new stage, the median. ``stall_ms_max``: the longest
    gap between arrivals of a partition in the growing time, less the median of the longest gaps in each second of the calm time;
    ``calm_stall_ms_max``: the same of the calm time, which is noise. ``ratio``: the 99th percentile of the age of rows in the
    growing time against that in the calm time."""
    late = [(first_rows[each.name] - each.asked) * 1e3 for each in additions if each.name in first_rows]
    usual = _gaps(seen, calm)
    calm_ages, growing_ages = ages(seen, *calm), ages(seen, *growing)
    adds = [(each.confirmed - each.asked) * 1e3 for each in additions]
    return {
        "additions": len(additions),
        "add_p50_ms": percentile(adds, 50),
        "add_p99_ms": percentile(adds, 99),
        "first_row_ms": percentile(late, 50),
        "first_row_p99_ms": percentile(late, 99),
        "remove_p50_ms": percentile([(each.removed - each.confirmed) * 1e3 for each in additions], 50),
        "stall_ms_max": percentile(np.maximum(_gaps(seen, growing) - np.median(usual), 0.0), 100),
        "calm_stall_ms_max": percentile(np.maximum(usual - np.median(usual), 0.0), 100),
        "p99_calm_ms": calm_ages["p99_ms"],
        "p99_growing_ms": growing_ages["p99_ms"],
        "ratio": round(growing_ages["p99_ms"] / calm_ages["p99_ms"], 3),
    }


def _gaps(seen: Seen, span: Span) -> np.ndarray:
    """Return the longest gap between arrivals of each partition in each second of this time, in ms."""
    begins = np.arange(span.start, max(span.end - EVERY_S, span.start) + 1e-3, EVERY_S)
    return np.array(
        [seen.longest_gap_ms(each, begin, begin + EVERY_S) for begin in begins for each in range(PARTITIONS)]
    )
