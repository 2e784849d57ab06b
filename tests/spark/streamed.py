"""A streaming DataFrame over files, two of them in a batch, that stands still in the middle of its second batch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812
from striking import SEEN, Seen

import flux
from spark_integration.query.query import Query

ROWS, KEYS = 1_000, 30
#: The file in whose middle the first attempt waits for the gate: the second one of the second batch.
HELD = 3
#: Rows of a batch, and bytes that each takes in pipes: more than these keep back. Spark reads those columns alone that stages
#: look at, so a query that is to have rows of a file that stands still looks at the padding.
FEW, PAD = 100, 1_000
WAIT_S = 120.0
COLUMNS = "key BIGINT, sequence BIGINT"

SEEN_OF_STREAM = flux.stage(key="key", partitions=4, schema=SEEN)(Seen)


def write_files(spark: Any, folder: Path, first: int, count: int) -> None:
    """Write files of ``ROWS`` rows each: sequence is 0, 1, 2, ... over all of them. They are written one after the other, and
    read in this order."""
    for number in range(first, first + count):
        rows = spark.range(number * ROWS, (number + 1) * ROWS, 1, 1).selectExpr(f"id % {KEYS} key", "id sequence")
        rows.write.mode("append").parquet(str(folder))


def held(gate: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        first = TaskContext.get().attemptNumber() == 0
        for batch in batches:
            for start in range(0, batch.num_rows, FEW):
                some = batch.slice(start, FEW)
                end = time.monotonic() + WAIT_S
                while first and in_the_middle(some) and not os.path.exists(gate) and time.monotonic() < end:
                    time.sleep(0.02)
                yield pa.record_batch(
                    [*some.columns, pa.array(["x" * PAD] * some.num_rows)], ["key", "sequence", "pad"]
                )

    return run


def in_the_middle(batch: pa.RecordBatch) -> bool:
    return bool((HELD + 0.5) * ROWS <= batch.column(1)[0].as_py() < (HELD + 1) * ROWS)


def stream(spark: Any, tmp_path: Path, **options: Any) -> Any:
    df = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 2).parquet(str(tmp_path / "in"))
    df = df.mapInArrow(held(str(tmp_path / "gate")), f"{COLUMNS}, pad STRING")
    return flux.stream(df, trigger={"availableNow": True}, **options)


@flux.stage(schema=COLUMNS)
def lean(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key", "sequence"])


def started(spark: Any, tmp_path: Path, workers: int = 2) -> Query:
    """Start the query with a checkpoint location, into files."""
    flow = SEEN_OF_STREAM(lean(stream(spark, tmp_path))).to_parquet(str(tmp_path / "rows"), roll_every="200ms")
    return flow.start(
        spark=spark, workers=workers, checkpointLocation=tmp_path / "location", checkpoint_interval="200ms", batch_max_rows=FEW
    )  # fmt: skip


#: Every tenth row is this much older than those around it; rows may be late by the delay. In seconds.
BACK, DELAY, WINDOW = 2_500, 100, 50
TIME = f"timestamp_seconds(sequence - IF(sequence % 10 = 0, {BACK}, 0))"


def timed(spark: Any, tmp_path: Path) -> Query:
    """Start a query of the same rows with times: windows, and late rows, into files, with a checkpoint location."""
    rows = stream(spark, tmp_path).selectExpr("sequence", f"{TIME} AS ts").withWatermark("ts", f"{DELAY} seconds")
    counts = rows.groupBy(F.window("ts", f"{WINDOW} seconds")).agg(F.count("*").alias("n"))
    flows = [
        counts.selectExpr("unix_timestamp(window.start) AS start", "n").to_parquet(str(tmp_path / "counts"), roll_every="200ms"),
        rows.late.select("sequence").to_parquet(str(tmp_path / "rows"), roll_every="200ms"),
    ]  # fmt: skip
    return flux.start(
        *flows, spark=spark, workers=2, checkpointLocation=tmp_path / "location", checkpoint_interval="200ms",
        batch_max_rows=FEW, partitions=1,
    )  # fmt: skip
