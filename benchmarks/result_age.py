"""Age of a window's result at a sink: time from the moment at which the row that moves the watermark past the window is due,
until the result is there.

Rows come at a steady rate, and carry the time at which they are due as their event time. The watermark has no delay, so a window
is final when each partition of the source has given its first row behind it: the age is that of the end of the window.
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
from benchmarks.operating import await_any_progress
from spark_integration.query.output import fetch_all
from spark_integration.query.start import start_query

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
KEYS, SIZE, SIZE_US = 1000, "200 milliseconds", 200_000
TICK_S = 0.001
#: The first seconds are not counted: connections are made, pages are touched for the first time.
WARM_UP_S = 3.0
PARTITIONS, REPLICAS = 8, 2


def paced(rate: float, seconds: float, partitions: int) -> Any:
    """Make a source of ``rate`` rows per second over all partitions, for ``seconds`` seconds."""

    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        random, mine = np.random.default_rng(partition), rate / partitions
        start, sent, total = time.time(), 0, round(mine * (seconds + WARM_UP_S))
        while sent < total:
            due = min(int((time.time() - start) // TICK_S * TICK_S * mine), total)
            if due <= sent:
                yield None
                continue
            times = ((start + np.arange(sent, due) / mine) * 1e6).astype(np.int64)
            columns = [pa.array(random.integers(0, KEYS, due - sent)), pa.array(times).view(SCHEMA.field(1).type)]
            yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
            sent = due

    return read


class Count(flux.Aggregate):
    n = flux.count()


class Ages(flux.Operator):
    """A sink that notes for each window the age of the last of its results, and gives them at the end."""

    schema = pa.schema([("end_us", pa.int64()), ("age_us", pa.int64()), ("n", pa.int64())])

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.ages: dict[int, tuple[int, int]] = {}

    def process(self, batch: pa.RecordBatch) -> None:
        now = time.time_ns() // 1000
        ends = batch.column("window_end").view(pa.int64()).to_numpy()
        for end in np.unique(ends).tolist():
            n = int(batch.column("n").to_numpy()[ends == end].sum())
            self.ages[end] = now - end, self.ages.get(end, (0, 0))[1] + n

    def snapshot(self) -> Any:
        return self.ages

    def restore(self, snapshot: Any) -> None:
        self.ages = snapshot

    def finish(self) -> Iterator[pa.RecordBatch]:
        rows = [{"end_us": end, "age_us": age, "n": n} for end, (age, n) in self.ages.items()]
        yield pa.RecordBatch.from_pylist(rows, self.schema)


def measure_age(
    spark: SparkSession, rate: int, seconds: float, workers: int, console: Console, **options: Any
) -> dict[str, Any]:
    """Measure the age of the results of windows of 200 ms, with two replicas of each partition."""
    source: Any = flux.source(paced(rate, seconds, workers), SCHEMA, partitions=workers)
    window = flux.window("ts", SIZE)
    counts = flux.stage(key="key", window=window, partitions=PARTITIONS, replicas=REPLICAS)(Count)
    sink = flux.stage(partitions=1)(Ages)
    flow = sink(counts(source.withWatermark("ts", "0 seconds")))
    query = start_query([flow], "age", spark, keep_output=True, workers=workers, **options)
    try:
        progress, end = None, time.monotonic() + seconds + 120
        while (progress := await_any_progress(query, progress, 30)) is not None and time.monotonic() < end:
            if query.phase not in ("starting", "running"):
                break
        query.wait_for_output()
        rows = fetch_all(query).collect()
        last = query.lastProgress
        assert last is not None
    finally:
        query.stop()
    return ages([(row.end_us, row.age_us, row.n) for row in rows], last["totalInputRows"], rate, console)


def ages(results: list[tuple[int, int, int]], given: int, rate: int, console: Console) -> dict[str, Any]:
    """Return the figures: ``results`` has end, age and rows of each window. AssertionError: not each row is in one window."""
    counted = sum(n for _, _, n in results)
    if counted != given:
        raise AssertionError(f"the windows have {counted:,} rows, and {given:,} were given")
    ends = np.array([end for end, _, _ in results])
    # Without the beginning, and without windows that the end of the input has closed.
    inner = (ends >= ends.min() + WARM_UP_S * 1e6) & (ends < ends.max() - 2 * SIZE_US)
    found = np.array([age for _, age, _ in results])[inner] / 1e3
    if not len(found):
        raise AssertionError("no window was measured")
    p50, p99 = (round(float(np.percentile(found, share)), 2) for share in (50, 99))
    console.print(f"results of windows: p50 {p50} ms, p99 {p99} ms after the end of the window ({len(found)} windows)")
    return {"age_rate": rate, "age_windows": len(found), "age_p50_ms": p50, "age_p99_ms": p99}
