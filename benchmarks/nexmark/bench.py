"""``flux bench nexmark``: the queries of Nexmark one by one, with events a second, and each answer compared with the oracle.

A query is measured over all events, and its output is thrown away, as Nexmark does. The generator runs inside the workers, as
Flink's does, unless events come from files or a topic. The answer is compared in a run of its own over fewer events, out of order
and some of them late, whose output is kept. With ``chaos`` there is only the second kind of run, over all events, among faults.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import flux
from benchmarks import session
from benchmarks.nexmark import chaos, checkout, origins, picture, spark_peer
from benchmarks.nexmark.outputs import KeptOutput, dropped, kept, late_rows
from benchmarks.timeline import Report

#: Events of the run that is compared with the oracle, and of the run that warms up.
COMPARED_EVENTS, WARM_UP_EVENTS = 200_000, 200_000
#: Partitions of stages in a measured run.
PARTITIONS = 8
WAIT_S = 900.0


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
    figures: dict[str, Any] = {
        "benchmark": "nexmark",
        "events": this.events,
        "source": this.source,
        "chaos": with_chaos,
        "queries": [line.shown() for line in lines],
        "equal": not wrong,
    }
    failed = f"answers differ from the oracle's: {', '.join(wrong)}; {'; '.join(this.told)}" if wrong else None
    drawn = None if with_chaos else picture.drawer([line.shown() for line in lines])
    return Report(figures, failed=failed, picture=drawn)


# ---- measured runs


def _measured(this: _Run, names: list[str]) -> Iterator[QueryFigures]:
    reader = checkout.events(COMPARED_EVENTS, chaos.SOURCES, **chaos.options(COMPARED_EVENTS))
    oracle = checkout.oracle(reader)
    with origins.origin(this.source, this.events, this.workers, this.folder) as make:
        for name in names:
            line = QueryFigures(name, this.events)
            told, line.late = _compared(this, name, oracle)
            line.equal = not told
            this.told += told
            line.rows, line.seconds = _timed(this, name, make)
            line.events_per_s = round(this.events / line.seconds)
            this.console.print(
                f"{name}: {line.rows:,} rows in {line.seconds:.2f} s, {line.events_per_s:,} events/s, "
                f"{'equal' if line.equal else 'DIFFERENT'}"
            )
            if this.peer:
                line.peer_events_per_s = _peer(this, name)
                line.ratio = (
                    None if line.peer_events_per_s is None else round(line.events_per_s / line.peer_events_per_s, 2)
                )
            yield line


def _timed(this: _Run, name: str, make: Callable[[], Any]) -> tuple[int, float]:
    """Run a query over all events. Return the rows that its last stage gave, and the seconds from the first row to the end."""
    flow = checkout.query(name, make())
    query = flux.start(
        flow.foreach_batch(dropped),
        spark=this.spark,
        workers=this.workers,
        partitions=PARTITIONS,
        progress_interval="500ms",
    )
    ended_at = None
    if this.source == "kafka":  # a topic has no end: it is over when all of its records have been applied
        query.processAllAvailable(WAIT_S)
        ended_at = time.time()
        query.stop()
    else:
        _until_the_end(query, name)
    progress = query.lastProgress
    assert progress is not None
    rows = progress["stages"][-1]["rowsOut"]
    return int(rows), float((ended_at or progress["finishedAt"]) - progress["firstRowAt"])


def _compared(this: _Run, name: str, oracle: Any) -> tuple[list[str], int]:
    """Run a query over a part of the events. Return the differences to the oracle, and the late rows."""
    folder = this.folder / f"{name}-compared"
    nexmark = checkout.flows(checkout.generator(COMPARED_EVENTS, chaos.SOURCES, **chaos.options(COMPARED_EVENTS)))
    query = flux.start(
        checkout.query(name, nexmark).foreach_batch(KeptOutput(folder)),
        spark=this.spark,
        workers=this.workers,
        partitions=PARTITIONS,
        progress_interval="100ms",
    )
    _until_the_end(query, name)
    late = late_rows(query)
    found = kept(folder, oracle.answer(name).schema)
    shutil.rmtree(folder)
    told = list(oracle.differences(name, found))
    if late != oracle.late():
        told.append(f"{name}: {late} late rows are counted, and {oracle.late()} are late")
    return told, late


def _until_the_end(query: Any, name: str) -> None:
    try:
        if not query.awaitTermination(WAIT_S):
            raise AssertionError(f"{name} has not ended after {WAIT_S:g} s")
    finally:
        query.stop()


def _peer(this: _Run, name: str) -> int | None:
    began = time.monotonic()
    rate = spark_peer.rate(this.spark, name, this.events, this.folder)
    if rate is not None:
        this.console.print(f"{name}: Structured Streaming {rate:,} events/s, {time.monotonic() - began:.0f} s in all")
    return rate


# ---- runs among faults


def _among_faults(this: _Run, names: list[str]) -> Iterator[QueryFigures]:
    runs = chaos.Chaos(this.spark, this.events, this.folder)
    for name in names:
        outcome = runs.run(name)
        this.told += outcome.differences
        line = QueryFigures(name, this.events, outcome.rows, round(outcome.seconds, 1))
        line.late, line.kills, line.equal = outcome.late, outcome.kills, not outcome.differences
        line.events_per_s = round(this.events / outcome.seconds)
        this.console.print(
            f"{name}: {line.rows:,} rows, {line.late:,} late events, {line.kills} kills and a restart, "
            f"{'equal' if line.equal else 'DIFFERENT'}"
        )
        yield line
