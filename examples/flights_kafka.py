"""The second job: the flights of 2013 through a topic of Kafka, and the delays of each carrier at each airport as they add up.

The job starts a broker. The flights are produced into a topic while the query runs; a stage with two replicas keeps running
delays, which go out as parquet files. Half-way the job kills one of its own workers. Each row of the files is compared with
the result of Spark's window functions over the same flights; the exit code is 0 only if all are equal.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as datasets
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.flights import HEARTBEAT_TIMEOUT, console, kill_a_worker, options_of, read_flights, start_spark
from tests.kafka.broker import Broker, create_topic, missing

TOPIC, PARTITIONS = "flights", 4
KEY = ["dest", "carrier"]
#: Flights per second, so that there is a half-way at which to kill a worker.
RATE = 30_000
WAIT_S = 240.0
#: The columns of the output: for each flight, the number of flights until then, and the sum of their delays.
ROW = pa.schema(
    [
        ("id", pa.int64()),
        ("dest", pa.string()),
        ("carrier", pa.string()),
        ("flights", pa.int64()),
        ("delay", pa.int64()),
    ]
)


@flux.stage(key=("dest", "carrier"), partitions=8, replicas=2)
class RunningDelays(flux.Operator):
    """The number and the summed delays of a carrier's flights to an airport, after each of these flights."""

    schema = "id BIGINT, dest STRING, carrier STRING, flights BIGINT, delay BIGINT"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.known = pd.DataFrame(columns=[*KEY, "flights", "delay"]).set_index(KEY)

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = batch.to_pandas()
        of_key = rows.groupby(KEY, sort=False)
        before = self.known.reindex(pd.MultiIndex.from_frame(rows[KEY])).fillna(0).astype("int64")
        rows["flights"] = before.flights.to_numpy() + of_key.cumcount() + 1
        rows["delay"] = before.delay.to_numpy() + of_key.arr_delay.cumsum()
        newest = rows.groupby(KEY, sort=False)[["flights", "delay"]].last()
        kept = self.known[~self.known.index.isin(newest.index)]
        self.known = pd.concat([kept, newest]) if len(kept) else newest
        yield pa.RecordBatch.from_pandas(rows[ROW.names], schema=ROW, preserve_index=False)

    def snapshot(self) -> pd.DataFrame:
        return self.known

    def restore(self, snapshot: pd.DataFrame) -> None:
        self.known = snapshot


def produce(address: str, flights: pd.DataFrame) -> None:
    """Send the flights to the topic: all flights of a carrier to an airport go into one partition, in order."""
    producer = Producer(
        {"bootstrap.servers": address, "linger.ms": 5, "queue.buffering.max.messages": len(flights) + 1}
    )
    partitions = [
        zlib.crc32(f"{dest} {carrier}".encode()) % PARTITIONS
        for dest, carrier in zip(flights.dest, flights.carrier, strict=True)
    ]
    began = time.monotonic()
    for number, (line, partition) in enumerate(
        zip(flights.to_json(orient="records", lines=True).splitlines(), partitions, strict=True)
    ):
        producer.produce(TOPIC, line, partition=partition)
        if number % 1000 == 0:
            producer.poll(0)
            time.sleep(max(began + number / RATE - time.monotonic(), 0))
    producer.flush()


def by_spark(flights: DataFrame) -> DataFrame:
    """Return Spark's own answer."""
    until_then = Window.partitionBy(*KEY).orderBy("id").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    flights_so_far, delay = F.count("*").over(until_then), F.sum("arr_delay").over(until_then)
    return flights.select("id", *KEY, flights_so_far.alias("flights"), delay.alias("delay"))


def rows_in(folder: Path) -> int:
    files = [str(path) for path in folder.glob("part-*.parquet")]
    return int(datasets.dataset(files).count_rows()) if files else 0


def run(spark: SparkSession, broker: Broker, folder: Path, workers: int) -> int:
    given = read_flights(spark).select(*KEY, "arr_delay").toPandas()
    given["arr_delay"] = given.arr_delay.fillna(0).astype("int64")
    given.insert(0, "id", range(len(given)))
    console.print(f"{len(given):,} flights, {RATE:,} a second, into topic {TOPIC} at {broker.address}")
    create_topic(broker.address, TOPIC, PARTITIONS)
    columns = "id BIGINT, dest STRING, carrier STRING, arr_delay BIGINT"
    source = flux.kafka(TOPIC, broker.address, group=TOPIC, format="json", schema=columns)
    query = RunningDelays(source).to_parquet(folder, roll_every="500ms").start(
        workers=workers, progress_interval="200ms", heartbeat_timeout=HEARTBEAT_TIMEOUT
    )  # fmt: skip
    while query.isActive and query.phase == "starting":  # flights are to come while it runs
        time.sleep(0.05)
    threading.Thread(target=produce, args=(broker.address, given), daemon=True).start()
    threading.Thread(target=kill_a_worker, args=(query, len(given) // 2), daemon=True).start()
    try:
        end, shown = time.monotonic() + WAIT_S, 0.0
        while query.isActive and rows_in(folder) < len(given) and time.monotonic() < end:
            time.sleep(0.2)
            report = query.lastProgress
            if report and time.monotonic() >= shown + 1:
                shown, lag = time.monotonic(), report["sources"][0].get("lag", {}).get("records", 0)
                console.print(
                    f"  {report['totalInputRows']:,} flights read, {lag:,} wait, {rows_in(folder):,} rows out"
                )
        take_overs = sum(event.kind == "take-over" for event in query.events())
    finally:
        query.stop()
    if (error := query.exception()) is not None:
        raise error
    expected = by_spark(spark.createDataFrame(pa.Table.from_pandas(given, preserve_index=False))).toPandas()
    files = [str(path) for path in folder.glob("part-*.parquet")]
    got = datasets.dataset(files).to_table(columns=ROW.names).to_pandas() if files else pd.DataFrame(columns=ROW.names)
    expected, got = (frame.sort_values(["id", "flights"], ignore_index=True) for frame in (expected, got))
    equal = got.equals(expected.astype(got.dtypes))
    console.print(f"{take_overs} partitions were taken over by other replicas after the kill")
    console.print(f"{len(got):,} running delays; Spark's batch answer: {'equal' if equal else 'DIFFERENT'}")
    return 0 if equal and take_overs else 1


def main() -> int:
    arguments = options_of(__doc__).parse_args()
    if why := missing():
        console.print(f"Not run: {why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="flux-flights-") as folder, Broker() as broker:
        console.print(f"Starting Spark ({arguments.master})")
        spark = start_spark(arguments.master)
        try:
            return run(spark, broker, Path(folder) / "delays", arguments.workers)
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
