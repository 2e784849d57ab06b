"""The peer of ``benchmarks.restart``: Spark Structured Streaming with its RocksDB state store and its checkpoint, in a program
that is killed and run again in the same way.

A keyed aggregation keeps as many bytes of state, in as many partitions on as many executors. Micro-batches go through it one
after the other, and each is noted when all of it has been computed. The state is complete when every key has come once.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from benchmarks import session

PARTITIONS, WORKERS = 8, 3
#: Digests in a value, and bytes of a value. A key keeps one value: the text of digests, so that compression makes nothing
#: smaller.
DIGESTS, VALUE_BYTES = 16, 16 * 64
#: Rows of a micro-batch.
ROWS = 8_000
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def life(folder: str, state_mb: int) -> None:
    """Run the program. It prints the time at which it starts the query, and never ends."""
    conf: dict[str, Any] = {
        "spark.sql.shuffle.partitions": PARTITIONS,
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
    }
    spark, seconds = session.start(WORKERS, 1, 1024, **conf)
    keys = (state_mb << 20) // VALUE_BYTES
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
    key = (F.col("value") % keys).alias("key")
    value = F.concat(*(F.sha2(F.concat_ws(".", key, F.lit(each)), 256) for each in range(DIGESTS)))
    kept = (
        rows.select(key, value.alias("text")).groupBy("key").agg(F.max("text").alias("text"), F.count("*").alias("n"))
    )
    full_at = -(-keys // ROWS)
    print(json.dumps({"start_at": time.time(), "spark_s": seconds, "full_at": full_at}), flush=True)
    query = (
        kept.writeStream.outputMode("update")
        .foreachBatch(Shown(folder))
        .option("checkpointLocation", f"{folder}/location")
        .start()
    )
    query.awaitTermination()


class Shown:
    """Writer of a line for each micro-batch that the outside has not seen: time, number of the batch."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "shown" / "0"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.newest = int(lines[-1].split()[1]) if lines else -1

    def __call__(self, batch: DataFrame, number: int) -> None:
        batch.write.format("noop").mode("append").save()  # computes all of it
        if number > self.newest:
            self.newest = number
            with self.path.open("a") as file:
                file.write(f"{time.time()} {number}\n")


if __name__ == "__main__":
    life(sys.argv[1], int(sys.argv[2]))
