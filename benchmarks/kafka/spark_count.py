"""A running count in Spark Structured Streaming, in a process with executors of its own: ``--peer rtm`` and ``--peer micro``.

    python -m benchmarks.kafka.spark_count ADDRESS JARS INPUT OUTPUT rtm|micro|backlog [ROWS]

``rtm`` and ``micro`` go from topic to topic until the standard input ends; "running" is printed when the first batch is under
way. A query that fails is started again at once from its checkpoint, as a supervising program would do. ``backlog`` reads the
whole topic, twice, and prints the rows per second of the second time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from benchmarks import session

#: Sizes of Spark's own benchmark of its real-time mode: all tasks of a query run at once.
EXECUTORS, CORES, SHUFFLE = 3, 5, 5
BATCH = "30 seconds"


def main(arguments: list[str]) -> None:
    address, jars, given, out, mode, *rows = arguments
    conf: dict[str, Any] = {"spark.sql.shuffle.partitions": SHUFFLE}
    conf["spark.jars"] = ",".join(map(str, Path(jars).glob("*.jar")))
    spark, _ = session.start(EXECUTORS, CORES, 1024, **conf)
    spark.sparkContext.setLogLevel("OFF")
    try:
        with tempfile.TemporaryDirectory(prefix="flux-bench-") as folder:
            if mode == "backlog":
                say({"rows_per_s": backlog(spark, address, given, int(rows[0]), folder)})
            else:
                keep_running(started(spark, address, given, out, mode, f"{folder}/checkpoint"))
    finally:
        spark.stop()


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def read(spark: SparkSession, address: str, topic: str) -> DataFrame:
    stream = spark.readStream.format("kafka").option("kafka.bootstrap.servers", address).option("subscribe", topic)
    return stream.option("startingOffsets", "earliest").load()


def started(
    spark: SparkSession, address: str, given: str, out: str, mode: str, checkpoint: str
) -> tuple[DataStreamWriter, StreamingQuery]:
    rows = read(spark, address, given).selectExpr("CAST(key AS STRING) key", "CAST(CAST(value AS STRING) AS LONG) due")
    counts = rows.groupBy("key").agg(F.count("*").alias("n"), F.max("due").alias("due"))
    writer = (
        counts.selectExpr("key", "CONCAT(due, ',', n) value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("topic", out)
        .option("checkpointLocation", checkpoint)
        .outputMode("update")
    )
    writer = writer.trigger(realTime=BATCH) if mode == "rtm" else writer.trigger(processingTime="0 seconds")
    return writer, writer.start()


def keep_running(started: tuple[DataStreamWriter, StreamingQuery]) -> None:
    writer, query = started
    over = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    told, failures = False, 0
    while not over.wait(0.05):
        if not told and query.status["isTriggerActive"]:
            say({"running": True})
            told = True
        if not query.isActive:
            failures += 1
            say({"failed": str(query.exception())[:300]})
            if failures > 5:
                break
            query = writer.start()
    query.stop()


def backlog(spark: SparkSession, address: str, given: str, rows: int, folder: str) -> int:
    rate = 0.0
    for number in range(2):  # the first one warms up
        writer = read(spark, address, given).groupBy("key").count().writeStream.format("noop").outputMode("update")
        query = writer.option("checkpointLocation", f"{folder}/{number}").trigger(availableNow=True).start()
        end = time.monotonic() + 300
        while query.isActive and time.monotonic() < end:
            time.sleep(0.05)
        query.stop()
        batches = query.recentProgress
        taken = sum(batch["numInputRows"] for batch in batches)
        if taken != rows:
            raise RuntimeError(f"Spark has read {taken} of {rows} rows")
        # Planning and writing offsets do not count.
        rate = rows / sum(batch["durationMs"].get("addBatch", 0) for batch in batches) * 1000
    return round(rate)


if __name__ == "__main__":
    main(sys.argv[1:])
