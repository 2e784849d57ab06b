"""Age of a joined row at a sink: time from the moment at which the later of its two rows is due, until the pair is there.

Both sides have rows at a steady rate, with the time at which each is due as its event time. Every row has one partner, half a
second before or behind it on the other side: so either side completes pairs, and as many rows wait as come in a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from rich.console import Console

import flux
from benchmarks.operating import await_any_progress
from benchmarks.result_age import PARTITIONS, REPLICAS, WARM_UP_S
from spark_integration.query.output import fetch_all
from spark_integration.query.start import start_query

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
#: Seconds from a row to its partner, and those that it waits for one.
APART_S, BOUND = 0.5, "1 second"
#: Seconds of rows in a batch of a source. At one millisecond, four source partitions give 4,000 batches a second, and the
#: measure would be that of small batches (``flux bench small``).
TICK_S = 0.005
#: Microseconds of a bucket of the histogram of ages, and the number of buckets; the last one has all older pairs.
BUCKET_US, BUCKETS = 100, 100_000


def keys(rows: np.ndarray, side: int, apart: int, partition: int, partitions: int) -> np.ndarray:
    """Return the keys of rows of one partition by their numbers there. Left rows have their own numbers; right ones with even
    numbers those of earlier left rows, by ``apart`` rows, others those of later ones."""
    if side:
        rows = np.where(rows % 2, rows + apart, rows - apart)
    own: np.ndarray = rows * partitions + partition
    return own


def pairs(total: int, apart: int) -> int:
    """Count the pairs of one partition with ``total`` rows on each side."""
    even, odd = range(apart, total, 2), range(1, max(total - apart, 1), 2)
    return len(even) + len(odd)


def paced(side: int, rate: float, seconds: float, partitions: int) -> Any:
    """Make a source of one side with ``rate`` rows per second over all partitions."""

    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        mine = rate / partitions
        start, sent, total = time.time(), 0, total_rows(rate, seconds, partitions)
        while sent < total:
            due = min(int((time.time() - start) // TICK_S * TICK_S * mine), total)
            if due <= sent:
                yield None
                continue
            rows = np.arange(sent, due)
            times = ((start + rows / mine) * 1e6).astype(np.int64)
            columns = [
                pa.array(keys(rows, side, apart_rows(mine), partition, partitions)),
                pa.array(times).view(SCHEMA.field(1).type),
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
            sent = due

    return read


def apart_rows(rate: float) -> int:
    """Return the rows, an even number, between a row and its partner in a partition with this rate."""
    return round(rate * APART_S / 2) * 2


def total_rows(rate: float, seconds: float, partitions: int) -> int:
    """Return the rows of one partition of one side."""
    return round(rate / partitions * (seconds + WARM_UP_S))


class PairAges(flux.Operator):
    """A sink that keeps a histogram of the age of pairs, and gives it at the end with the number of all pairs. The pairs of the
    first seconds are not in it."""

    schema = pa.schema([("bucket", pa.int64()), ("pairs", pa.int64()), ("all", pa.int64())])

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.buckets, self.all, self.first_us = np.zeros(BUCKETS, np.int64), 0, 0

    def process(self, batch: pa.RecordBatch) -> None:
        now = time.time_ns() // 1000
        due = np.maximum(*(batch.column(name).view(pa.int64()).to_numpy() for name in ("left_ts", "right_ts")))
        self.all += batch.num_rows
        self.first_us = self.first_us or int(due.min())
        ages = now - due[due >= self.first_us + WARM_UP_S * 1e6]
        np.add.at(self.buckets, np.clip(ages // BUCKET_US, 0, BUCKETS - 1), 1)

    def snapshot(self) -> Any:
        return self.buckets, self.all, self.first_us

    def restore(self, snapshot: Any) -> None:
        self.buckets, self.all, self.first_us = snapshot

    def finish(self) -> Iterator[pa.RecordBatch]:
        used = np.flatnonzero(self.buckets)
        columns = [pa.array(used), pa.array(self.buckets[used]), pa.array(np.full(len(used), self.all))]
        yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


def measure_join_age(
    spark: SparkSession, rate: int, seconds: float, workers: int, console: Console, **options: Any
) -> dict[str, Any]:
    """Measure the age of pairs of an inner join with bounds, with two replicas of each partition and ``rate`` rows per second on
    each side. AssertionError: a pair is missing, or there is one too many."""
    left, right = (
        flux.source(paced(side, rate, seconds, workers), SCHEMA, partitions=workers, name=name).withWatermark(
            "ts", "0 seconds"
        )
        for side, name in enumerate(("left", "right"))
    )
    near = f"l.key = r.key AND l.ts BETWEEN r.ts - INTERVAL {BOUND} AND r.ts + INTERVAL {BOUND}"
    joined: Any = left.alias("l").join(right.alias("r"), F.expr(near))
    joined = joined.withStage(partitions=PARTITIONS, replicas=REPLICAS)
    given = joined.select(F.col("l.ts").alias("left_ts"), F.col("r.ts").alias("right_ts"))
    query = start_query(
        [flux.stage(partitions=1)(PairAges)(given)], "join age", spark, keep_output=True, workers=workers, **options
    )
    try:
        progress, end = None, time.monotonic() + seconds + 120
        while (progress := await_any_progress(query, progress, 30)) is not None and time.monotonic() < end:
            if query.phase not in ("starting", "running"):
                break
        query.wait_for_output()
        rows = fetch_all(query).collect()
    finally:
        query.stop()
    mine = rate / workers
    expected = workers * pairs(total_rows(rate, seconds, workers), apart_rows(mine))
    return pair_ages([(row.bucket, row.pairs, row.all) for row in rows], expected, rate, console)


def pair_ages(found: list[tuple[int, int, int]], expected: int, rate: int, console: Console) -> dict[str, Any]:
    """Return the figures: ``found`` has bucket, pairs in it, and all pairs."""
    given = found[0][2] if found else 0
    if given != expected:
        raise AssertionError(f"the join gave {given:,} pairs, and there are {expected:,}")
    counts = np.zeros(BUCKETS, np.int64)
    for bucket, count, _ in found:
        counts[bucket] = count
    cumulated = np.cumsum(counts)
    p50, p99 = (
        round((int(np.searchsorted(cumulated, share * cumulated[-1])) + 1) * BUCKET_US / 1e3, 2)
        for share in (0.5, 0.99)
    )
    console.print(f"pairs of a join: p50 {p50} ms, p99 {p99} ms after the later row ({cumulated[-1]:,} pairs)")
    return {"join_age_rate": rate, "join_age_pairs": int(cumulated[-1]), "join_age_p50_ms": p50, "join_age_p99_ms": p99}
