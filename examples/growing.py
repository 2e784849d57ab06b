"""A query that grows while it runs: stages and sinks come and go, and nothing is read twice.

The flights of 2013 come at a steady pace, through a topic of Kafka, if a broker can start here, and otherwise from files. The
query keeps the delays of each airport, on a checkpoint location. From a second terminal, by the commands that are shown, two
stages are added behind it: the worst carrier of each airport, with a table of PostgreSQL as its sink, if a server can start here,
and otherwise with files; and the flights of each airport. A third stage is a second consumer of the source itself. A worker is
killed during the first addition. The first stage is removed again. Then the query is stopped, and started again on its location
with the stages that are left.

Each row counts from one step of each partition on, so the output of each stage is compared with Spark's batch answer over the
flights from its beginning on. The exit code is 0 only if all are equal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psycopg
import pyarrow as pa
import pyarrow.dataset as datasets
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.flights import HEARTBEAT_TIMEOUT, console, may_lose_a_worker, options_of, read_flights, start_spark
from examples.postgres import Additions
from tests import postgres_server
from tests.kafka import broker as kafka

#: Flights in a second, partitions of the topic, and seconds between two deliveries.
RATE, PARTITIONS, EVERY_S = 15_000, 4, 0.1
TOPIC, WAIT_S = "flights", 240.0
FLIGHT = pa.schema([("id", pa.int64()), ("dest", pa.string()), ("carrier", pa.string()), ("arr_delay", pa.int64())])
COLUMNS = "id BIGINT, dest STRING, carrier STRING, arr_delay BIGINT"
#: Environment variables: the folder of the program's files, and the address of its database, "" without one. Both are set before
#: the functions below are called.
FOLDER, DATABASE = "FLUX_GROWING_FOLDER", "FLUX_GROWING_DATABASE"
#: Set when an addition begins.
adding = threading.Event()


# ---- the stages


@flux.stage(key="dest", partitions=4, replicas=2)
class Delays(flux.Operator):
    """The number of flights to an airport and the sum of their delays, after each flight."""

    schema = "id BIGINT, dest STRING, carrier STRING, arr_delay BIGINT, flights BIGINT, delay BIGINT"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.known = pd.DataFrame({"flights": [], "delay": []}, dtype="int64", index=pd.Index([], dtype="str"))

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = batch.to_pandas()
        of_airport = rows.groupby("dest", sort=False)
        before = self.known.reindex(rows.dest).fillna(0).astype("int64")
        rows["flights"] = before.flights.to_numpy() + of_airport.cumcount() + 1
        rows["delay"] = before.delay.to_numpy() + of_airport.arr_delay.cumsum()
        newest = rows.groupby("dest", sort=False)[["flights", "delay"]].last()
        self.known = newest.combine_first(self.known).astype("int64")
        yield pa.RecordBatch.from_pandas(rows, preserve_index=False)


#: State of a stage below for each airport: the first and the last flight, the number of flights, and the result until now.
WORST = pa.schema(
    {"dest": pa.string(), "first": pa.int64(), "last": pa.int64(), "flights": pa.int64()}
    | {"carrier": pa.string(), "delay": pa.int64()}
)


@flux.stage(key="dest", partitions=2, replicas=2)
class Worst(flux.Operator):
    """The carrier whose flights to an airport were late by the most minutes in all, since this stage began."""

    schema = "dest STRING, first BIGINT, last BIGINT, flights BIGINT, carrier STRING, delay BIGINT"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.known = pd.DataFrame(columns=["dest", "carrier", "first", "last", "flights", "delay"])

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = batch.to_pandas()
        news = pd.DataFrame(
            {"dest": rows.dest, "carrier": rows.carrier, "first": rows.id, "last": rows.id, "flights": 1}
            | {"delay": rows.arr_delay}
        )
        both = news if self.known.empty else pd.concat([self.known, news])
        sums = {"first": "min", "last": "max", "flights": "sum", "delay": "sum"}
        self.known = both.groupby(["dest", "carrier"], as_index=False).agg(sums)
        changed = self.known[self.known.dest.isin(set(rows.dest))]
        airports = changed.groupby("dest").agg({"first": "min", "last": "max", "flights": "sum"})
        worst = changed.sort_values(["delay", "carrier"], ascending=[False, True]).drop_duplicates("dest")
        found = airports.join(worst.set_index("dest")[["carrier", "delay"]]).reset_index()
        yield pa.RecordBatch.from_pandas(found, schema=WORST, preserve_index=False)


@flux.stage(key="dest", partitions=2, replicas=2, output_mode="update")
class Airports(flux.Aggregate):
    """Flights of each airport since this stage began."""

    first = flux.min("id")
    last = flux.max("id")
    flights = flux.count()
    longest = flux.max("arr_delay")


@flux.stage(key="dest", partitions=2, replicas=2, output_mode="update")
class Earliest(flux.Aggregate):
    """The arrival of each airport that was early by the most minutes, since this stage began: a second consumer of the source."""

    first = flux.min("id")
    last = flux.max("id")
    flights = flux.count()
    delay = flux.min("arr_delay")


class Newest(Additions):
    """A table with the newest row of each key."""

    def prepare(self, partitions: int, kept: Any) -> None:
        with psycopg.connect(self.address) as connection:
            connection.execute(f"DROP TABLE IF EXISTS {self.table}")
            connection.execute(
                f"CREATE TABLE {self.table} (dest text PRIMARY KEY, first bigint, last bigint, flights bigint, carrier text, "
                "delay bigint)"
            )
        super().prepare(partitions, kept)

    def open(self, context: flux.SinkContext) -> None:
        super().open(context)
        columns = [sql.Identifier(name) for name in WORST.names]
        self.add = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT (dest) DO UPDATE SET {}").format(
            sql.Identifier(self.table),
            sql.SQL(", ").join(columns),
            sql.SQL(", ").join([sql.Placeholder()] * len(columns)),
            sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(column) for column in columns[1:]),
        )

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        with self.connected().transaction():
            if self.advance(position):
                self.store([tuple(row.values()) for row in batch.to_pylist()], position)


# ---- additions: `flux add examples.growing:worst` calls the function in the program that has the query


def worst(query: flux.Query) -> Any:
    """Add the worst carrier of each airport behind the running stage Delays."""
    adding.set()
    flow = Worst(query["Delays"])
    if address := os.environ[DATABASE]:
        return flow.to(Newest(address, "worst", "dest", WORST.names[1:]))
    return kept(flow, "worst")


def airports(query: flux.Query) -> Any:
    """Add a second stage behind Delays: the topic is not read twice."""
    return kept(Airports(query["Delays"]), "airports")


def earliest(query: flux.Query) -> Any:
    """Add a stage behind the running source: the topic is not read twice here, either."""
    return kept(Earliest(query.source(TOPIC)), "earliest")


def kept(flow: Any, name: str) -> Any:
    return flow.to_parquet(Path(os.environ[FOLDER]) / name, roll_every="500ms")


# ---- the flights


class Feed:
    """A feed of flights at a steady pace into a topic or into files. All flights to an airport go into one partition."""

    def __init__(self, flights: pd.DataFrame, folder: Path, address: str) -> None:
        self.flights, self.folder, self.address = flights, folder, address
        self.partition = flights.dest.map(lambda dest: zlib.crc32(dest.encode()) % PARTITIONS)
        self.brought = 0
        #: Set when all stages are added. Two fifths of the flights come after that, even if the additions take long.
        self.added = threading.Event()
        for partition in range(PARTITIONS):
            (folder / str(partition)).mkdir(parents=True)
        if address:
            from confluent_kafka import Producer

            self._producer = Producer({"bootstrap.servers": address, "linger.ms": 5})

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        began, step = time.monotonic(), round(RATE * EVERY_S)
        for number, start in enumerate(range(0, len(self.flights), step)):
            time.sleep(max(began + number * EVERY_S - time.monotonic(), 0))
            if self.brought >= len(self.flights) * 3 // 5:
                self.added.wait(WAIT_S)
            rows = self.flights.iloc[start : start + step]
            for partition, some in rows.groupby(self.partition):
                self._bring(int(partition), number, some)
            self.brought = start + len(rows)

    def _bring(self, partition: int, number: int, rows: pd.DataFrame) -> None:
        if not self.address:
            hidden = self.folder / f".{partition}"
            rows.to_parquet(hidden, index=False)
            hidden.rename(self.folder / str(partition) / f"{number:06}.parquet")
            return
        for line in rows.to_json(orient="records", lines=True).splitlines():
            self._producer.produce(TOPIC, line, partition=partition)
        self._producer.flush(30)

    def source(self) -> Any:
        if self.address:
            return flux.kafka(TOPIC, self.address, format="json", schema=COLUMNS, name=TOPIC)
        folder = str(self.folder)

        def read(partition: int, start: str | None) -> Iterator[Any]:
            return followed(Path(folder) / str(partition), start or "")

        return flux.source(read, FLIGHT, PARTITIONS, TOPIC, positions=True)


def followed(folder: Path, newest: str) -> Iterator[Any]:
    """Yield the rows of the files of a folder behind ``newest``, as they come; None: there are none now."""
    while True:
        names = sorted(name for name in os.listdir(folder) if name > newest)
        for newest in names:
            for batch in datasets.dataset(folder / newest).to_table(columns=FLIGHT.names).cast(FLIGHT).to_batches():
                yield flux.Positioned(batch, newest)
        if not names:
            yield None


# ---- the run


def command(*words: str) -> None:
    """Run a command as in a second terminal, and show it."""
    console.print(f"[bold]$ flux {' '.join(words)}[/bold]")
    done = subprocess.run(
        [sys.executable, "-m", "flux", *words], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    for line in (done.stdout + done.stderr).strip().splitlines():
        console.print(f"  {line}")
    if done.returncode:
        raise RuntimeError(f"the command has ended with {done.returncode}")


def kill_during_an_addition(query: flux.Query) -> None:
    adding.wait(WAIT_S)
    worker, member = next(iter(query.members().items()))
    console.print(f"[bold]Killing worker {worker} (process {member.about.pid})[/bold]")
    os.kill(member.about.pid, signal.SIGKILL)


def until(reached: Callable[[], bool], query: flux.Query, what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        if (error := query.exception()) is not None:
            raise error
        if time.monotonic() > end:
            raise TimeoutError(f"after {WAIT_S:.0f} s still to come: {what}; {query.status['message']}")
        time.sleep(0.05)


def rows_of(folder: Path) -> pd.DataFrame:
    files = [str(path) for path in folder.glob("part-*.parquet")]
    return datasets.dataset(files).to_table().to_pandas() if files else pd.DataFrame()


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the row of each airport with the most flights: the last one given by its stage."""
    return rows if rows.empty else rows.sort_values("flights").drop_duplicates("dest", keep="last")


def run(spark: SparkSession, feed: Feed, folder: Path, workers: int) -> int:
    total = len(feed.flights)
    where = f"topic {TOPIC} at {feed.address}" if feed.address else "files"
    console.print(f"{total:,} flights, {RATE:,} a second, through {where}")
    name = f"growing-{os.getpid()}"
    options: dict[str, Any] = {
        "queryName": name, "workers": workers, "workers_timeout": "3min", "progress_interval": "200ms",
        "heartbeat_timeout": HEARTBEAT_TIMEOUT, "checkpointLocation": folder / "location", "checkpoint_interval": "1s",
    }  # fmt: skip
    query = kept(Delays(feed.source()), "delays").start(**options)
    try:
        grow(query, feed, folder, name)
    finally:
        query.stop()
    console.print("[bold]Stopped. Starting again on the location, with the stages that were left[/bold]")
    source = feed.source()
    delays = Delays(source)
    flows = kept(delays, "delays"), kept(Airports(delays), "airports"), kept(Earliest(source), "earliest")
    query = flux.start(*flows, spark=spark, **options)
    try:
        go_on(query, feed, folder)
    finally:
        query.stop()
    flights = spark.createDataFrame(pa.Table.from_pandas(feed.flights, preserve_index=False))
    return 0 if all([*compared(flights, folder)]) else 1


def grow(query: flux.Query, feed: Feed, folder: Path, name: str) -> None:
    """Add three stages while flights come, kill a worker, and remove a stage."""
    total = len(feed.flights)
    query.wait_until_running(WAIT_S)
    feed.start()
    threading.Thread(target=kill_during_an_addition, args=(query,), daemon=True).start()
    until(lambda: may_lose_a_worker(query, total // 5), query, "a fifth of the flights")
    command("add", "examples.growing:worst", "-q", name)
    until(lambda: feed.brought >= total * 2 // 5, query, "two fifths of the flights")
    command("add", "examples.growing:airports", "-q", name)
    until(lambda: feed.brought >= total // 2, query, "half of the flights")
    command("add", "examples.growing:earliest", "-q", name)
    feed.added.set()
    command("plan", "-q", name)
    until(lambda: feed.brought >= total * 3 // 5, query, "three fifths of the flights")
    # A removal drops rows that the stage has not applied yet. On a slow machine these would be nearly all.
    until(lambda: flights_of(worst_rows(folder)) >= total // 20, query, "a twentieth of the flights in Worst")
    command("remove", "Worst", "--cascade", "-q", name)
    query.explain()
    tell_events(query)


def go_on(query: flux.Query, feed: Feed, folder: Path) -> None:
    """Wait until all flights have come out of all stages."""
    total = len(feed.flights)
    last = feed.flights.groupby("dest").id.max()
    until(lambda: feed.brought == total, query, "all flights")
    query.processAllAvailable(WAIT_S)
    until(lambda: len(rows_of(folder / "delays")) == total, query, "all rows of Delays")
    for stage in ("airports", "earliest"):
        until(partial(has_last_rows, folder / stage, last), query, f"the last rows of {stage}")
    tell_events(query)


def has_last_rows(folder: Path, last: pd.Series[int]) -> bool:
    """Tell whether the newest row of each airport in a folder counts its last flight. ``last``: the id of this flight, by
    airport."""
    rows = newest(rows_of(folder))
    if rows.empty:
        return False
    given = rows.set_index("dest")["last"]
    return given.equals(last.loc[given.index])


def tell_events(query: flux.Query) -> None:
    for event in query.events():
        console.print(f"  {event}")


# ---- the comparison


def compared(flights: DataFrame, folder: Path) -> Iterator[bool]:
    """Compare the output of each stage with Spark's batch answer over the flights from its beginning on."""
    delays, worst_, airports_ = rows_of(folder / "delays"), worst_rows(folder), newest(rows_of(folder / "airports"))
    earliest_ = newest(rows_of(folder / "earliest"))
    of_all = flights.groupBy("dest").agg(F.count("*").alias("flights"), F.sum("arr_delay").alias("delay"))
    columns = ["dest", "flights", "delay"]
    yield equal("Delays", newest(delays)[columns], of_all) and delays.id.is_unique
    carriers = (
        since(flights, worst_).groupBy("dest", "carrier").agg(F.count("*").alias("n"), F.sum("arr_delay").alias("d"))
    )
    best = carriers.groupBy("dest").agg(
        F.sum("n").alias("flights"), F.min_by("carrier", F.struct(-F.col("d"), "carrier")).alias("carrier"),
        F.max("d").alias("delay"),
    )  # fmt: skip
    yield equal("Worst", worst_[["dest", "flights", "carrier", "delay"]], best)
    found = since(flights, airports_).groupBy("dest").agg(
        F.count("*").alias("flights"), F.max("arr_delay").alias("longest")
    )  # fmt: skip
    yield equal("Airports", airports_[["dest", "flights", "longest"]], found)
    found = since(flights, earliest_).groupBy("dest").agg(
        F.count("*").alias("flights"), F.min("arr_delay").alias("delay")
    )  # fmt: skip
    yield equal("Earliest", earliest_[["dest", "flights", "delay"]], found)


def worst_rows(folder: Path) -> pd.DataFrame:
    if not (address := os.environ[DATABASE]):
        return newest(rows_of(folder / "worst"))
    with psycopg.connect(address) as connection:
        rows: Sequence[Any] = connection.execute(f"SELECT {', '.join(WORST.names)} FROM worst").fetchall()
    return pd.DataFrame(rows, columns=WORST.names)


def flights_of(given: pd.DataFrame) -> int:
    """Return the number of flights that a stage has counted, of all airports."""
    return 0 if given.empty else int(given.flights.sum())


def since(flights: DataFrame, given: pd.DataFrame) -> DataFrame:
    """Return the flights from the first that a stage has counted of each airport to the last."""
    bounds = flights.sparkSession.createDataFrame(given[["dest", "first", "last"]])
    return flights.join(F.broadcast(bounds), "dest").where("id BETWEEN first AND last")


def equal(stage: str, given: pd.DataFrame, by_spark: DataFrame) -> bool:
    expected = by_spark.toPandas()
    given, expected = (each.sort_values("dest", ignore_index=True) for each in (given, expected[given.columns]))
    same = bool(len(given)) and given.equals(expected.astype(given.dtypes))
    console.print(
        f"{stage}: {len(given)} airports, {flights_of(given):,} flights; Spark's batch answer: {'equal' if same else 'DIFFERENT'}"
    )
    return same


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--flights", type=int, default=None, help="only so many flights (default: all 336,776)")
    arguments = parser.parse_args()
    server = None if postgres_server.missing() else postgres_server.Server()
    broker = None if kafka.missing() else kafka.Broker()
    with tempfile.TemporaryDirectory(prefix="flux-growing-") as place:
        folder = Path(place)
        os.environ[FOLDER], os.environ[DATABASE] = place, "" if server is None else server.address
        console.print(f"Starting Spark ({arguments.master})")
        spark = start_spark(arguments.master)
        try:
            given = read_flights(spark).select("dest", "carrier", "arr_delay").toPandas()
            given = given.head(arguments.flights) if arguments.flights else given
            given["arr_delay"] = given.arr_delay.fillna(0).astype("int64")
            given.insert(0, "id", range(len(given)))
            address = ""
            if broker is not None:
                broker.__enter__()
                address = broker.address
                kafka.create_topic(address, TOPIC, PARTITIONS)
            return run(spark, Feed(given, folder / "flights", address), folder, arguments.workers)
        finally:
            spark.stop()
            if broker is not None:
                broker.__exit__(None, None, None)
            if server is not None:
                server.close()


if __name__ == "__main__":
    from examples import growing  # the module that `flux add` and the executors find by its name

    sys.exit(growing.main())
