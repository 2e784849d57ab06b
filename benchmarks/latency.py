"""Latency from ingress to egress at a steady rate: rows pass a keyed stage and arrive at a sink in another worker.

Each row carries the time at which it was due, whether or not the source was late, so that a stall counts in full. The
keyed stage emits the newest time per key after every step ("update"); the sink takes the difference to its clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.data import KEYS
from benchmarks.operating import await_any_progress
from benchmarks.timeline import Report, of_progress
from spark_integration.query.output import fetch_all
from spark_integration.query.start import start_query

SCHEMA = pa.schema([("key", pa.int64()), ("due_ns", pa.int64()), ("amount", pa.int64()), ("value", pa.float64())])
#: Rows become due in groups, one every tick. The source emits the rows that are due whenever it is asked.
TICK_S = 0.001
#: Rows that are made at a time, before they are due, because the work of the source should not be part of the measurement.
MADE_ROWS = 8192
#: Width of the buckets in which latencies are kept.
BUCKET_US = 50
BUCKETS = 200_000
#: The first seconds are not counted: connections are made, pages are touched for the first time.
WARM_UP_S = 2.0


def paced(rate: float, seconds: float, partitions: int):  # type: ignore[no-untyped-def]
    """Make a source of ``rate`` rows per second over all partitions, for ``seconds`` seconds."""

    def read_paced(partition: int) -> Iterator[pa.RecordBatch | None]:
        random = np.random.default_rng(partition)
        mine = rate / partitions
        start = time.time()
        sent, total = 0, round(mine * (seconds + WARM_UP_S))
        first = end = 0  # the made rows
        made: Any = None
        while sent < total:
            due = min(int((time.time() - start) // TICK_S * TICK_S * mine), total)
            if due <= sent:
                yield None
                continue
            if sent == end:
                first, end = sent, sent + MADE_ROWS
                number = np.arange(first, end)
                counted = number >= mine * WARM_UP_S
                due_ns = np.where(counted, (start * 1e9 + number / mine * 1e9).astype(np.int64), 0)
                columns = [random.integers(0, KEYS, MADE_ROWS), due_ns, number, number.astype(np.float64)]
                made = pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=SCHEMA)
            due = min(due, end)
            yield made.slice(sent - first, due - sent)
            sent = due

    return read_paced


class Newest(flux.Aggregate):
    rows = flux.count()
    due_ns = flux.max("due_ns")


class Arrivals(flux.Operator):
    """A sink that keeps a histogram of the age of arriving rows, and emits it at the end."""

    schema = pa.schema([("bucket", pa.int64()), ("rows", pa.int64())])

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.buckets = np.zeros(BUCKETS, np.int64)

    def process(self, batch: pa.RecordBatch) -> None:
        now = time.time_ns()
        due = batch.column("due_ns").to_numpy()
        age_us = (now - due[due > 0]) // 1000
        np.add.at(self.buckets, np.clip(age_us // BUCKET_US, 0, BUCKETS - 1), 1)

    def snapshot(self) -> Any:
        return self.buckets

    def restore(self, snapshot: Any) -> None:
        self.buckets = snapshot

    def finish(self) -> Iterator[pa.RecordBatch]:
        used = np.flatnonzero(self.buckets)
        yield pa.RecordBatch.from_arrays([pa.array(used), pa.array(self.buckets[used])], schema=self.schema)


def run(rate: int, seconds: float, workers: int, partitions: int, console: Console, **options: Any) -> Report:
    spark, startup = session.start(workers, 2, idle_jvm=True)
    try:
        result: dict[str, Any] = {
            "benchmark": "latency",
            "rate": rate,
            "seconds": seconds,
            "workers": workers,
            "partitions": partitions,
        }
        reports: list[dict[str, Any]] = []
        result |= {"spark_startup_s": round(startup, 2)}
        result |= _measure(spark, rate, seconds, workers, partitions, console, reports, **options)
        return Report(result, [of_progress("rows", reports, 1)], "latency of steps, p99 (ms)")
    finally:
        spark.stop()


def _measure(
    spark: SparkSession,
    rate: int,
    seconds: float,
    workers: int,
    partitions: int,
    console: Console,
    reports: list[dict[str, Any]],
    **options: Any,
) -> dict[str, Any]:
    newest = flux.stage(key="key", partitions=partitions, output_mode="update")(Newest)
    source = flux.source(paced(rate, seconds, workers), SCHEMA, partitions=workers)
    sink = flux.stage(key="key", partitions=workers)(Arrivals)
    query = start_query([sink(newest(source))], "latency", spark, keep_output=True, workers=workers, **options)
    try:
        progress = None
        while (progress := await_any_progress(query, progress, 30)) is not None and query.phase in (
            "starting",
            "running",
        ):
            reports.append(progress)
            console.print(
                f"  {progress['totalInputRows']:>12,} rows in, {progress['inputRowsPerSecond']:>10,.0f} rows/s, "
                f"latency of the last steps (p50, p99) {progress['stages'][1]['latencyMs']} ms"
            )
        query.wait_for_output()
        last = query.lastProgress
        assert last is not None
        rows = fetch_all(query).collect()
    finally:
        query.stop()
    histogram = np.zeros(BUCKETS, np.int64)
    for row in rows:
        histogram[row.bucket] += row.rows
    if not histogram.sum():
        raise AssertionError("no row arrived")
    return {
        "rows": last["totalInputRows"],
        "rows_per_s": round(last["totalInputRows"] / (last["finishedAt"] - last["firstRowAt"])),
        "arrived": int(histogram.sum()),
        "p50_ms": _percentile(histogram, 0.50),
        "p99_ms": _percentile(histogram, 0.99),
        "max_ms": _percentile(histogram, 1.0),
        "peak_log_bytes": last["peakLogBytes"],
    }


def _percentile(histogram: np.ndarray, share: float) -> float:
    """Return the upper end of the bucket in which the percentile lies, in milliseconds."""
    reached = np.searchsorted(np.cumsum(histogram), share * histogram.sum())
    return round((float(reached) + 1) * BUCKET_US / 1e3, 3)
