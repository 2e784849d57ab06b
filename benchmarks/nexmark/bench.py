"""``flux bench nexmark``: the queries of Nexmark one by one, with events a second, and each answer compared with the oracle.

A query is measured over all events, and its output is thrown away, as Nexmark does. The generator runs inside the workers, as
Flink's does, unless events come from files or a topic. The answer is compared in a run of its own over fewer events, out of order
and some of them late, whose output is kept. With ``chaos`` there is only the second kind of run, over all events, among faults.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.nexmark import chaos, checkout, origins, picture, spark_peer
from benchmarks.nexmark.outputs import KeptOutput, dropped, kept, late_rows
from benchmarks.timeline import Report

#: Events of the run that is compared with the oracle, which also warms up.
COMPARED_EVENTS = 200_000
#: Partitions of stages in a measured run.
PARTITIONS = 8
WAIT_S = 900.0
#: The longest wait for the last output of a query over a topic: windows of the clock have ten seconds.
LAST_OUTPUT_S = 30.0
#: The guarantees of a measured run.
FLUX = "each row counted once; one replica, no checkpoint location, state in memory"


@dataclass
class QueryFigures:
    """The figures of one query."""

    query: str
    events: int
    rows: int = 0
    seconds: float = 0.0
    events_per_s: int = 0
    late: int = 0
    kills: int = 0
    equal: bool | None = None
    peer_events_per_s: int | None = None
    ratio: float | None = None

    def shown(self) -> dict[str, Any]:
        """Return the figures by name, as they are printed."""
        return asdict(self) | {"seconds": round(self.seconds, 2)}


@dataclass
class _Run:
    """The session and the choices that all queries of a run share."""

    spark: Any
    events: int
    source: str
    workers: int
    peer: bool
    folder: Path
    console: Console
    told: list[str] = field(default_factory=list)


def run(
    queries: list[str], events: int, source: str, peer: bool, with_chaos: bool, workers: int, console: Console
) -> Iterator[QueryFigures | Report]:
    """Yield the line of each query as soon as it is known, and last a report of all together."""
    chosen = queries or list(checkout.QUERIES)
    settings: dict[str, Any] = {
        "spark.sql.session.timeZone": "UTC",
        "spark.executorEnv.PYTHONPATH": str(checkout.ROOT),
        "spark.task.maxFailures": "1000",
    }
    spark, _ = session.start(chaos.WORKERS if with_chaos else workers, 2, **settings)
    lines: list[QueryFigures] = []
    with tempfile.TemporaryDirectory(prefix="flux-bench-nexmark-") as folder:
        this = _Run(spark, events, source, workers, peer, Path(folder), console)
        try:
            for line in _among_faults(this, chosen) if with_chaos else _measured(this, chosen):
                lines.append(line)
                yield line
        finally:
            spark.stop()
    yield _report(lines, this, with_chaos)


def _report(lines: list[QueryFigures], this: _Run, with_chaos: bool) -> Report:
    wrong = [line.query for line in lines if not line.equal]
    cores, shown = len(os.sched_getaffinity(0)), [line.shown() for line in lines]
    figures: dict[str, Any] = {
        "benchmark": "nexmark",
        "events": this.events,
        "source": this.source,
        "chaos": with_chaos,
        "queries": shown,
        "equal": not wrong,
    }
    failed = f"answers differ from the oracle's: {', '.join(wrong)}" if wrong else None
    if this.told:
        failed = "; ".join([*([failed] if failed else []), *this.told])
    if with_chaos:
        return Report(figures, failed=failed)
    figures |= {
        "cores": cores,
        "flux": FLUX,
        "peer": spark_peer.ABOUT if this.peer else None,
        "flink": picture.FLINK_SOURCE,
    }
    for line in shown:
        line["events_per_s_per_core"] = line["events_per_s"] // cores
        line["flink_events_per_s_per_core"] = picture.flink_per_core(line["query"])
    return Report(figures, failed=failed, picture=picture.drawer(shown, cores))


# ---- measured runs


def _measured(this: _Run, names: list[str]) -> Iterator[QueryFigures]:
    options = chaos.options(COMPARED_EVENTS)
    oracle = checkout.oracle(checkout.events(COMPARED_EVENTS, chaos.SOURCES, **options))
    with origins.origin(this.source, this.folder) as offer:
        compared = offer("compared", COMPARED_EVENTS, chaos.SOURCES, **options)
        measured = offer("measured", this.events, this.workers)
        for name in names:
            line = QueryFigures(name, this.events)
            told, line.late = _compared(this, name, compared, oracle)
            line.equal = not told
            this.told += told
            line.rows, line.seconds = _timed(this, name, measured)
            line.events_per_s = round(this.events / line.seconds)
            this.console.print(
                f"{name}: {line.rows:,} rows in {line.seconds:.2f} s, {line.events_per_s:,} events/s, "
                f"{'equal' if line.equal else 'DIFFERENT'}"
            )
            if this.peer and name in spark_peer.QUERIES:
                line.peer_events_per_s = _peer(this, name)
            if line.peer_events_per_s is not None:
                line.ratio = round(line.events_per_s / line.peer_events_per_s, 2)
            yield line


def _timed(this: _Run, name: str, make: Callable[[], Any]) -> tuple[int, float]:
    """Run a query over all events. Return the rows that its last stage gave, and the seconds from the first row to the end."""
    query = _started(this, name, make, dropped, "500ms")
    ended_at = None
    if this.source == "kafka":  # a topic has no end: it is over when all of its records have been applied
        try:
            query.processAllAvailable(WAIT_S)
            ended_at = time.time()
        finally:
            query.stop()
    else:
        _until_the_end(query, name)
    progress = query.lastProgress
    assert progress is not None
    rows = progress["stages"][-1]["rowsOut"]
    return int(rows), float((ended_at or progress["finishedAt"]) - progress["firstRowAt"])


def _compared(this: _Run, name: str, make: Callable[[], Any], oracle: Any) -> tuple[list[str], int]:
    """Run a query over a part of the events. Return the differences to the oracle, and the late rows."""
    folder = this.folder / f"{name}-compared"
    query = _started(this, name, make, KeptOutput(folder), "100ms")

    def differences() -> list[str]:
        return list(oracle.differences(name, kept(folder, oracle.answer(name).schema)))

    if this.source == "kafka":
        _until_it_is_there(query, lambda: not differences())
    else:
        _until_the_end(query, name)
    late, told = late_rows(query), differences()
    shutil.rmtree(folder)
    if late != oracle.late():
        told.append(f"{name}: {late} late rows are counted, and {oracle.late()} are late")
    return told, late


def _started(this: _Run, name: str, make: Callable[[], Any], output: Any, progress_interval: str) -> Any:
    return flux.start(
        checkout.query(name, make()).foreach_batch(output),
        spark=this.spark,
        workers=this.workers,
        workers_timeout=f"{WAIT_S:g}s",
        partitions=PARTITIONS,
        progress_interval=progress_interval,
    )


def _until_the_end(query: Any, name: str) -> None:
    try:
        if not query.awaitTermination(WAIT_S):
            raise AssertionError(f"{name} has not ended after {WAIT_S:g} s")
    finally:
        query.stop()


def _until_it_is_there(query: Any, is_there: Callable[[], bool]) -> None:
    """Stop a query over a topic when its output is there, or cannot come any more: windows of the clock come last."""
    try:
        query.processAllAvailable(WAIT_S)
        until = time.monotonic() + LAST_OUTPUT_S
        while time.monotonic() < until and not is_there():
            time.sleep(0.5)
    finally:
        query.stop()


def _peer(this: _Run, name: str) -> int | None:
    """Return the rate of the peer; None: its rows are not those of the oracle, so it is no peer, or it cannot run."""
    began = time.monotonic()
    options = chaos.options(COMPARED_EVENTS) | {"late": 0.0}
    try:
        told = spark_peer.differences(this.spark, name, COMPARED_EVENTS, this.folder, **options)
        rate = None if told else spark_peer.rate(this.spark, name, this.events, this.folder)
    except PySparkException as error:  # such as a query that another release of Spark refuses
        told, rate = [f"{name}: Structured Streaming: {str(error).splitlines()[0][:300]}"], None
    this.told += told
    said = "gives no figure" if rate is None else f"{rate:,} events/s"
    this.console.print(f"{name}: Structured Streaming {said}, {time.monotonic() - began:.0f} s in all")
    return rate


# ---- runs among faults


def _among_faults(this: _Run, names: list[str]) -> Iterator[QueryFigures]:
    runs = chaos.Chaos(this.spark, this.events, this.folder)
    for name in names:
        line = QueryFigures(name, this.events)
        try:
            outcome = runs.run(name)
        except (AssertionError, flux.FluxError) as error:  # the other queries still have a run
            this.told.append(f"{name}: {error}")
            line.equal = False
            this.console.print(f"{name}: FAILED: {error}")
            yield line
            continue
        this.told += outcome.differences
        line.rows, line.seconds, line.late = outcome.rows, round(outcome.seconds, 1), outcome.late
        line.kills, line.equal = outcome.kills, not outcome.differences
        line.events_per_s = round(this.events / outcome.seconds)
        this.console.print(
            f"{name}: {line.rows:,} rows, {line.late:,} late events, {line.kills} kills and a restart, "
            f"{outcome.recovery}, {'equal' if line.equal else 'DIFFERENT'}"
        )
        yield line
