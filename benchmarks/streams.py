"""Streams in and out of a query, one case at a time, on this machine.

A case is a function of ``CASES``: it gets the options of the command, runs, and returns its figures. ``lost`` and
``duplicated`` count rows by comparison with the rows of the source.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import stream_sources
from benchmarks.data import NARROW, files
from benchmarks.session import start
from benchmarks.streams_out import bare, through_flux
from benchmarks.timeline import Report

WAIT_S = 600.0
#: Micro-batches at the beginning whose latency does not count: Spark's own code is compiled meanwhile.
WARM_UP = 15
#: Rounds of both sides in turn, after one that warms up.
ROUNDS = 3


@dataclass(frozen=True)
class Asked:
    """The options of the command: ``rows`` of the backlogs, ``seconds`` of the runs that measure latency, and their ``rate`` of
    rows a second."""

    rows: int
    seconds: float
    rate: int
    console: Console


@dataclass
class Figures:
    """The figures of a case. ``ratio`` is that of rows per second, or of latency where the case says so, to the other side;
    ``p50_ms`` and ``p99_ms`` are of the case's latency; ``p50_whole_ms`` is the median with Spark's own run of the
    micro-batch."""

    case: str
    rows_per_s: float | None = None
    ratio: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    lost: int = 0
    duplicated: int = 0
    p50_whole_ms: float | None = None


# ---- Structured Streaming in


@flux.stage(key="key", partitions=8)
class PerKey(flux.Aggregate):
    n = flux.count()
    total = flux.sum("amount")


@flux.stage(key="value", partitions=4)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def streaming_in(asked: Asked) -> Figures:
    """Measure a streaming DataFrame into a query.

    Latency counts from the moment when Spark has run a micro-batch to the call of a sink with its last row; it is negative if
    the row was there before Spark had finished. With Spark's run of the micro-batch it counts from the moment when a function
    of ``foreachBatch`` would be called. Rows per second are those of a backlog of parquet files in one micro-batch, against the
    same files as a DataFrame."""
    with session(1, 4) as spark:
        figures = Figures("in")
        _latency(spark, asked, figures)
        backlog = _backlog(spark, asked, figures)
        figures.rows_per_s, figures.ratio = backlog["stream"], backlog["stream"] / backlog["dataframe"]
        asked.console.print(f"in: rows/s {backlog}")
    return figures


def _latency(spark: SparkSession, asked: Asked, figures: Figures) -> None:
    """Measure latency. Rows are numbered, so that the batch of a row follows from the rows of each batch."""
    per_batch = max(asked.rate // 5, 1)  # five micro-batches a second, about
    with tempfile.TemporaryDirectory(prefix="flux-bench-streams-") as folder:
        notes = str(Path(folder) / "notes")
        Path(notes).mkdir()

        def note(batch: pa.RecordBatch, position: Any) -> None:
            now = time.time()
            values = batch.column("value").to_numpy()
            numbers, firsts = np.unique(values // per_batch, return_index=True)
            del firsts
            with open(f"{notes}/{position.partition}", "a") as out:
                out.writelines(f"{number} {(values // per_batch == number).sum()} {now}\n" for number in numbers)

        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", per_batch).option("numPartitions", 2)
        source = flux.stream(rows.load().select("value"))
        query = passed(source).foreach_batch(note).start(spark=spark, workers=1, queryName="bench-in")
        ran: dict[int, tuple[float, float]] = {}
        try:
            end = time.monotonic() + asked.seconds
            while time.monotonic() < end or len(ran) < 2 * WARM_UP:
                ran |= _ran(query)
                time.sleep(0.5)
            ran |= _ran(query)
            query._run.streams.stop()  # there are always more rows, and those that Spark has committed are applied
            query.processAllAvailable(WAIT_S)
        finally:
            query.stop()
        arrived, counts = _noted(Path(notes))
    for number in ran:
        figures.lost += max(per_batch - counts.get(number, 0), 0)
        figures.duplicated += max(counts.get(number, 0) - per_batch, 0)
    counted = [number for number in sorted(ran)[WARM_UP:] if number in arrived]
    whole, after = ([(arrived[number] - ran[number][end]) * 1e3 for number in counted] for end in (0, 1))
    figures.p50_ms, figures.p99_ms = float(np.percentile(after, 50)), float(np.percentile(after, 99))
    figures.p50_whole_ms = float(np.percentile(whole, 50))
    asked.console.print(
        f"in: {len(counted)} micro-batches of {per_batch} rows; Spark ran each in {figures.p50_whole_ms - figures.p50_ms:.0f} ms"
    )


def _ran(query: Any) -> dict[int, tuple[float, float]]:
    """Return the time of Spark's run of each batch: from the moment when its offsets are written and its plan is made until all
    its tasks have ended. Its commit is written after that."""
    found = {}
    for running in query._run.streams._running.values():
        for report in running.recentProgress:
            took = report["durationMs"]
            before = sum(took.get(part, 0) for part in ("latestOffset", "walCommit", "getBatch", "queryPlanning"))
            at = datetime.datetime.fromisoformat(report["timestamp"].replace("Z", "+00:00")).timestamp()
            if "addBatch" in took:
                begun = at + before / 1e3
                found[int(report["batchId"])] = (begun, begun + took["addBatch"] / 1e3)
    return found


def _noted(folder: Path) -> tuple[dict[int, float], dict[int, int]]:
    """Return the arrival of the last rows of each batch, and their number."""
    at: dict[int, float] = {}
    counts: dict[int, int] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            number, rows, when = line.split()
            at[int(number)] = max(at.get(int(number), 0.0), float(when))
            counts[int(number)] = counts.get(int(number), 0) + int(rows)
    return at, counts


def _backlog(spark: SparkSession, asked: Asked, figures: Figures) -> dict[str, float]:
    """Measure the rows per second of both sides, each the better of two runs in turn."""
    folder = str(Path(files(NARROW, asked.rows)[0]).parent)
    schema = spark.read.parquet(folder).schema

    def stream() -> Any:
        df = spark.readStream.schema(schema).option("pathGlobFilter", "*.parquet").parquet(folder)
        return flux.stream(df, trigger={"availableNow": True})

    per_key: Any = PerKey
    ways: list[tuple[str, Callable[[], Any]]] = [("dataframe", lambda: spark.read.parquet(folder)), ("stream", stream)]
    best = {"stream": 0.0, "dataframe": 0.0}
    for _ in range(2):
        for who, source in ways:
            query = per_key(source()).start(spark=spark, workers=1, keep_output=True)
            try:
                query.wait_for_output()
                progress = query.lastProgress or {}
                best[who] = max(best[who], asked.rows / (progress["finishedAt"] - progress["firstRowAt"]))
                counted = query.toDF().agg({"n": "sum"}).collect()[0][0]
            finally:
                query.stop()
            if who == "stream":
                figures.lost += max(asked.rows - counted, 0)
                figures.duplicated += max(counted - asked.rows, 0)
    return best


# ---- sources in the workers


def files_that_come(asked: Asked) -> Figures:
    """Measure files of 64 MB that keep coming into a folder, into a keyed count, against a reader that has the list of them."""
    with session(2, 2) as spark:
        return Figures("files", **stream_sources.files(spark, asked.rows, ROUNDS, asked.console)._asdict())


def datasource_batches(asked: Asked) -> Figures:
    """Measure a Python data source that gives record batches, into a keyed count, inside the workers against
    ``spark.read.format``."""
    with session(2, 2) as spark:
        found = stream_sources.datasource(spark, asked.rows, ROUNDS, False, asked.console)
        return Figures("datasource", **found._asdict())


def datasource_rows(asked: Asked) -> Figures:
    """Measure a Python data source that gives rows one by one, a tenth as many."""
    with session(2, 2) as spark:
        found = stream_sources.datasource(spark, asked.rows // 10, ROUNDS, True, asked.console)
        return Figures("datasource-rows", **found._asdict())


# ---- all cases

#: Cases by the name of ``--case``. Each is called with the options of the command, and makes a session of its own.
# ---- Structured Streaming out


def streaming_out(asked: Asked) -> Figures:
    """Measure the output of a query, read by Spark: the age of a row in ``foreachBatch``. ``ratio`` is the median age over that
    of the same rows from a Python data source without Flux; it should be small."""
    total = int(asked.seconds * asked.rate)
    with session(1, 4) as spark:
        runs = [(bare(spark, asked.rate, total), through_flux(spark, asked.rate, total)) for _ in range(2)]
    (bare_ms, _), (p50, p99) = (min(seen.percentiles_ms() for seen in each) for each in zip(*runs, strict=True))
    asked.console.print(f"out: median age {p50:.0f} ms, without Flux {bare_ms:.0f} ms")
    times = [read.times for _, read in runs]
    lost, doubled = sum(int((t == 0).sum()) for t in times), sum(int((t > 1).sum()) for t in times)
    return Figures("out", float(asked.rate), p50 / bare_ms, p50, p99, lost=lost, duplicated=doubled)


CASES: dict[str, Callable[[Asked], Figures]] = {
    "in": streaming_in,
    "out": streaming_out,
    "files": files_that_come,
    "datasource": datasource_batches,
    "datasource-rows": datasource_rows,
}


@contextmanager
def session(executors: int, cores: int, **conf: Any) -> Iterator[SparkSession]:
    spark, _ = start(executors, cores, **conf)
    try:
        yield spark
    finally:
        spark.stop()


def run(cases: list[str], rows: int, seconds: float, rate: int, console: Console) -> Report:
    """Run the named cases, or all."""
    asked = Asked(rows, seconds, rate, console)
    found = [CASES[case](asked) for case in cases or CASES]
    wrong = [each.case for each in found if each.lost or each.duplicated]
    figures = {"benchmark": "streams", "cases": [_rounded(each) for each in found]}
    return Report(figures, failed=f"rows were lost or came twice: {', '.join(wrong)}" if wrong else None)


def _rounded(figures: Figures) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in vars(figures).items()}
