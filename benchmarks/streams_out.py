"""The output of a query as a stream of Spark's, beside a Python data source that gives the same rows without Flux.

A row carries its due time; its age is taken in a function of ``foreachBatch``. Both streams run one after the other in the same
session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

import flux

PARTITIONS = 2
ROWS = pa.schema([("number", pa.int64()), ("due", pa.float64())])
#: Triggers at the beginning that do not count: processes start, and Spark's own code is compiled.
WARM_UP = 15
#: Time for a stream to give the rows that are still to come.
WAIT_S = 120.0


def rows_between(partition: int, first: int, below: int, began: float, rate: int) -> pa.RecordBatch:
    """Make rows of one partition: row n of all rows is due n / rate after the beginning, and partitions take turns."""
    numbers = np.arange(first, below, dtype=np.int64) * PARTITIONS + partition
    return pa.record_batch([pa.array(numbers), pa.array(began + numbers / rate)], schema=ROWS)


def due_by_now(partition: int, began: float, rate: int, total: int) -> int:
    """Count the rows of a partition that are due."""
    return max(min(int((time.time() - began) * rate), total) - partition + PARTITIONS - 1, 0) // PARTITIONS


class Paced(DataSource):  # type: ignore[misc]
    @classmethod
    def name(cls) -> str:
        return "paced"

    def schema(self) -> str:
        return "number BIGINT, due DOUBLE"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        return Bare(float(self.options["began"]), int(self.options["rate"]), int(self.options["total"]))


class Bare(DataSourceStreamReader):  # type: ignore[misc]
    def __init__(self, began: float, rate: int, total: int) -> None:
        self.began, self.rate, self.total = began, rate, total

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {str(partition): 0 for partition in range(PARTITIONS)}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        return {str(p): due_by_now(p, self.began, self.rate, self.total) for p in range(PARTITIONS)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((int(p), start[p], end[p])) for p in start if start[p] < end[p]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        number, first, below = partition.value
        yield rows_between(number, first, below, self.began, self.rate)


@flux.stage(partitions=PARTITIONS)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def paced(began: float, rate: int, total: int) -> flux.Source:
    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        given, last = 0, (total - partition + PARTITIONS - 1) // PARTITIONS
        while given < last:
            due = due_by_now(partition, began, rate, total)
            if due > given:
                yield rows_between(partition, given, due, began, rate)
                given = due
            else:
                yield None
        while True:  # until the output is read, and the query is stopped
            yield None

    return flux.source(read, schema=ROWS, partitions=PARTITIONS, name="paced")


class Seen:
    """The rows that have come: ages by trigger, and the number of times of each row."""

    def __init__(self, total: int) -> None:
        self.ages: list[np.ndarray] = []
        self.times = np.zeros(total, dtype=np.int64)

    def take(self, frame: Any, number: int) -> None:
        table = frame.toArrow()
        if table.num_rows:
            self.ages.append(time.time() - table.column("due").to_numpy())
            np.add.at(self.times, table.column("number").to_numpy(), 1)

    def percentiles_ms(self) -> tuple[float, float]:
        counted = np.concatenate(self.ages[WARM_UP:] or self.ages)
        p50, p99 = np.percentile(counted, [50, 99])
        return float(p50) * 1e3, float(p99) * 1e3


def bare(spark: SparkSession, rate: int, total: int) -> Seen:
    spark.dataSource.register(Paced)
    options = {"began": str(time.time()), "rate": str(rate), "total": str(total)}
    return _read(spark.readStream.format("paced").options(**options).load(), total)


def through_flux(spark: SparkSession, rate: int, total: int) -> Seen:
    query = passed(paced(time.time(), rate, total)).to_readers().start("bench-out", spark=spark, workers=1)
    try:
        query.wait_until_running(WAIT_S)
        return _read(spark.readStream.format("flux").option("query", "bench-out").load(), total)
    finally:
        query.stop()


def _read(frame: Any, total: int) -> Seen:
    seen = Seen(total)
    running = frame.writeStream.foreachBatch(seen.take).start()
    batches, end = 0, time.monotonic() + WAIT_S
    try:
        while not seen.times.all() and time.monotonic() < end:  # rows that are missing then are lost
            if not running.isActive:
                raise RuntimeError(f"the stream has ended: {running.exception()}")
            if len(seen.ages) > batches:
                batches, end = len(seen.ages), time.monotonic() + WAIT_S
            time.sleep(0.05)
    finally:
        running.stop()
    return seen
