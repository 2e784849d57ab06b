"""The queries of Nexmark in Spark Structured Streaming, over the events in files, for those queries that it can express.

It has no ranks over a stream, no count of distinct values, no join behind a result in update mode and no state without a join or
an aggregate; so the others have no peer. A file has a stretch of the events, and files come in the order of the events: a row
counts only if the watermark of the micro-batch before has not passed it.

Each query is first compared with the oracle, over events of which none is late, and then measured. Only the execution of
micro-batches is counted, neither planning nor writing offsets.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.nexmark import checkout, origins

DELAY = "4 seconds"
#: Files of a measured run and of a compared one, and those of a micro-batch.
FILES, COMPARED_FILES, FILES_AT_ONCE = 20, 6, 2
#: Events of a measured run at most, because the rate of the peer does not rise with their number.
EVENTS_MAX = 2_000_000
SHUFFLE_PARTITIONS = 2
WAIT_S = 900
#: The guarantees of the peer.
ABOUT = (
    "Spark Structured Streaming over files, available-now: each row counted once, checkpoint of each micro-batch in a local "
    "folder, default state store"
)


class _Streams:
    """The flows of people, auctions and bids as DataFrames. They have the methods of ``examples.nexmark.flows.Nexmark``, so that
    queries that use nothing but those of DataFrames are the same here."""

    def __init__(self, events: DataFrame) -> None:
        self._events = events
        self._columns = checkout.module("examples.nexmark.generator").COLUMNS

    def person(self, *columns: str) -> DataFrame:
        return self._of(0, columns or self._columns["person"])

    def auction(self, *columns: str) -> DataFrame:
        return self._of(1, columns or self._columns["auction"])

    def bid(self, *columns: str) -> DataFrame:
        return self._of(2, columns or self._columns["bid"])

    def bidders(self) -> DataFrame:
        """Return the bidders of bids, without a watermark: a stream may have one only."""
        return self._events.where("kind = 2").select("bidder")

    def _of(self, kind: int, columns: tuple[str, ...]) -> DataFrame:
        return self._events.withWatermark("dateTime", DELAY).where(f"kind = {kind}").select(*columns)


def _same(name: str) -> Callable[[_Streams], DataFrame]:
    return lambda streams: checkout.query(name, streams)


def _q3(streams: _Streams) -> DataFrame:
    people = streams.person("id", "name", "city", "state").where("state IN ('OR', 'ID', 'CA')")
    auctions = streams.auction("id", "seller", "category").where("category = 10").withColumnRenamed("id", "auction")
    return auctions.join(people, F.expr("seller = id")).select("name", "city", "state", "auction")


def _q8(streams: _Streams) -> DataFrame:
    window = F.window("dateTime", "10 seconds")
    people = streams.person("id", "name", "dateTime").groupBy(window, "id", "name").count()
    sellers = streams.auction("seller", "dateTime").groupBy(window, "seller").count()
    people, sellers = people.alias("p"), sellers.alias("a")
    return people.join(sellers, F.expr("p.window = a.window AND p.id = a.seller")).select(
        "id", "name", "p.window.start"
    )


def _q12(streams: _Streams) -> DataFrame:
    clock = streams.bidders().withColumn("at", F.current_timestamp()).withWatermark("at", "0 seconds")
    counts = clock.groupBy("bidder", F.window("at", "10 seconds")).agg(F.count("*").alias("bid_count"))
    return counts.selectExpr("bidder", "bid_count", "window.start AS starttime", "window.end AS endtime")


def _q13(streams: _Streams) -> DataFrame:
    keys = checkout.module("examples.nexmark.q13").KEYS
    table = SparkSession.active().range(keys).selectExpr("id AS key", "concat('value-', id) AS value")
    bids = streams.bid("auction", "bidder", "price", "dateTime")
    joined = bids.join(F.broadcast(table), F.expr(f"auction % {keys} = key"))
    return joined.select("auction", "bidder", "price", "dateTime", "value")


def _q17(streams: _Streams) -> DataFrame:
    ranks = checkout.module("examples.nexmark.ranks")
    prices = [getattr(F, name)("price") for name in ("min", "max", "avg", "sum")]
    bids = streams.bid("auction", "price", "dateTime")
    return bids.groupBy("auction", F.date_format("dateTime", "yyyy-MM-dd")).agg(*ranks.bids(), *prices)


def _q20(streams: _Streams) -> DataFrame:
    bids = streams.bid().withColumnsRenamed({"dateTime": "bid_dateTime", "extra": "bid_extra"})
    auctions = streams.auction().where("category = 10")
    return bids.join(auctions, F.expr("auction = id")).select(
        "auction", "bidder", "price", "channel", "url", "bid_dateTime", "bid_extra", "itemName", "description",
        "initialBid", "reserve", "dateTime", "expires", "seller", "category", "extra",
    )  # fmt: skip


#: Queries whose last results come with the end of their windows.
WINDOWED = ("q8", "q11")
#: The query and its output mode.
QUERIES: dict[str, tuple[Callable[[_Streams], DataFrame], str]] = {
    **{name: (_same(name), "append") for name in ("q0", "q1", "q2", "q10", "q11", "q14", "q21", "q22")},
    "q3": (_q3, "append"),
    "q8": (_q8, "append"),
    "q12": (_q12, "append"),
    "q13": (_q13, "append"),
    "q17": (_q17, "update"),
    "q20": (_q20, "append"),
}


def differences(spark: SparkSession, name: str, events: int, folder: Path, **options: Any) -> list[str]:
    """Compare all rows of a query with the oracle, over events with these options of ``checkout.events``. Return differences in
    words."""
    generated, ends = checkout.events(events, 1, **options), name in WINDOWED
    where = _files(folder / f"peer-compared-{ends}", generated, COMPARED_FILES, ends)
    found: list[pa.Table] = []
    make, mode = QUERIES[name]
    if name == "q12":
        mode = "update"  # nothing comes that would close the last window of the clock
    with _streams(spark, where) as streams:
        writer = make(streams).writeStream.outputMode(mode).foreachBatch(lambda rows, _: found.append(rows.toArrow()))
        _run(writer)
    rows = pa.concat_tables(found)
    if name == "q12":
        counts = rows.group_by(["bidder", "starttime", "endtime"]).aggregate([("bid_count", "max")])
        rows = counts.rename_columns({"bid_count_max": "bid_count"}).select(rows.column_names)
    return [f"Structured Streaming, {each}" for each in checkout.oracle(generated).differences(name, rows)]


def rate(spark: SparkSession, name: str, events: int, folder: Path) -> int:
    """Return the events a second of the peer."""
    events = min(events, EVENTS_MAX)
    where = _files(folder / "peer-measured", checkout.events(events, 1), FILES)
    make, mode = QUERIES[name]
    with _streams(spark, where) as streams:
        query = _run(make(streams).writeStream.outputMode(mode).format("noop"))
    seconds: float = sum(progress["durationMs"].get("addBatch", 0) for progress in query.recentProgress) / 1e3
    return round(events / seconds)


def _files(folder: Path, generated: Any, count: int, ends: bool = False) -> Path:
    """Write the events of one partition into files, each a stretch of them. With ``ends`` there is another file, after which all
    windows are over. Spark takes files by the times at which they were written."""
    if folder.exists():
        return folder
    folder.mkdir()
    stretches = np.array_split(np.arange(generated.count(0)), count)
    batches = [map(generated.batch, [0] * len(stretch), stretch.tolist()) for stretch in stretches]
    for number, each in enumerate(chain(batches, [iter([_end()])] if ends else [])):
        path = folder / f"events-{number:04}.parquet"
        origins.write_file(path, each)
        os.utime(path, (1_000_000_000 + number,) * 2)
    return folder


def _end() -> pa.RecordBatch:
    """Make a row of each kind in the far future, of a person, a seller and a bidder, all different.

    Conditions on the kind, and that keys are not null, come in front of the watermark in Spark."""
    schema = checkout.module("examples.nexmark.generator").SCHEMA
    rows = [{"kind": 0, "id": -1}, {"kind": 1, "seller": -2}, {"kind": 2, "bidder": -3}]
    return pa.RecordBatch.from_pylist([row | {"dateTime": origins.END} for row in rows], schema)


@contextmanager
def _streams(spark: SparkSession, folder: Path) -> Iterator[_Streams]:
    before = spark.conf.get("spark.sql.shuffle.partitions", None)
    spark.conf.set("spark.sql.shuffle.partitions", str(SHUFFLE_PARTITIONS))
    try:
        stream = spark.readStream.schema(spark.read.parquet(str(folder)).schema)
        yield _Streams(stream.option("maxFilesPerTrigger", FILES_AT_ONCE).parquet(str(folder)))
    finally:
        if before is not None:
            spark.conf.set("spark.sql.shuffle.partitions", before)


def _run(writer: Any) -> Any:
    """Run a query to the end of its files."""
    checkpoint = tempfile.mkdtemp(prefix="flux-bench-peer-")
    try:
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        if not query.awaitTermination(WAIT_S):
            query.stop()
            raise AssertionError(f"the peer has not ended after {WAIT_S} s")
        return query
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
