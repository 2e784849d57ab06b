"""The queries of Nexmark in Spark Structured Streaming, over the events in files, for those queries that it can express.

It has no ranks over a stream, no count of distinct values, no join behind a result in update mode and no state without a join or
an aggregate; so the others have no peer. Only the execution of micro-batches is counted, neither planning nor writing offsets.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.nexmark import checkout, origins

DELAY = "4 seconds"
#: Files of the peer, and those of a micro-batch; events at most, because its rate does not depend on their number.
FILES, FILES_AT_ONCE, EVENTS_MAX = 20, 2, 2_000_000
SHUFFLE_PARTITIONS = 2
WAIT_S = 900


class _Streams:
    """The flows of people, auctions and bids as DataFrames. They have the methods of ``examples.nexmark.flows.Nexmark``, so that
    queries that use nothing but those of DataFrames are the same here."""

    def __init__(self, events: DataFrame) -> None:
        self._events = events.withWatermark("dateTime", DELAY)
        self._columns = checkout.module("examples.nexmark.generator").COLUMNS

    def person(self, *columns: str) -> DataFrame:
        return self._of(0, columns or self._columns["person"])

    def auction(self, *columns: str) -> DataFrame:
        return self._of(1, columns or self._columns["auction"])

    def bid(self, *columns: str) -> DataFrame:
        return self._of(2, columns or self._columns["bid"])

    def _of(self, kind: int, columns: tuple[str, ...]) -> DataFrame:
        return self._events.where(f"kind = {kind}").select(*columns)


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
    clock = streams.bid("bidder").withColumn("at", F.current_timestamp()).withWatermark("at", "0 seconds")
    return clock.groupBy("bidder", F.window("at", "10 seconds")).count()


def _q17(streams: _Streams) -> DataFrame:
    ranks = checkout.module("examples.nexmark.ranks")
    prices = [getattr(F, name)("price") for name in ("min", "max", "avg", "sum")]
    bids = streams.bid("auction", "price", "dateTime")
    return bids.groupBy("auction", F.date_format("dateTime", "yyyy-MM-dd")).agg(*ranks.bids(), *prices)


def _q20(streams: _Streams) -> DataFrame:
    auctions = streams.auction().where("category = 10").withColumnRenamed("extra", "auction_extra")
    auctions = auctions.withColumnRenamed("dateTime", "opened")
    return streams.bid().join(auctions, F.expr("auction = id"))


#: The query and its output mode.
QUERIES: dict[str, tuple[Callable[[_Streams], DataFrame], str]] = {
    **{name: (_same(name), "append") for name in ("q0", "q1", "q2", "q10", "q11", "q14", "q21", "q22")},
    "q3": (_q3, "append"),
    "q8": (_q8, "append"),
    "q12": (_q12, "append"),
    "q13": (_same("q13"), "append"),
    "q17": (_q17, "update"),
    "q20": (_q20, "append"),
}


def rate(spark: SparkSession, name: str, events: int, folder: Path) -> int | None:
    """Return the events a second of the peer; None: it cannot express the query."""
    if name not in QUERIES:
        return None
    events = min(events, EVENTS_MAX)
    where = folder / f"peer-{events}"
    where.mkdir(exist_ok=True)
    paths = origins.write(events, FILES, where)
    before = spark.conf.get("spark.sql.shuffle.partitions", None)
    spark.conf.set("spark.sql.shuffle.partitions", str(SHUFFLE_PARTITIONS))
    checkpoint = tempfile.mkdtemp(prefix="flux-bench-peer-")
    try:
        stream = spark.readStream.schema(spark.read.parquet(paths[0]).schema)
        files: Any = stream.option("maxFilesPerTrigger", FILES_AT_ONCE).parquet(str(where))
        make, mode = QUERIES[name]
        writer = make(_Streams(files)).writeStream.outputMode(mode).format("noop")
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        if not query.awaitTermination(WAIT_S):
            query.stop()
            raise AssertionError(f"{name}: the peer has not ended after {WAIT_S} s")
        seconds: float = sum(progress["durationMs"].get("addBatch", 0) for progress in query.recentProgress) / 1e3
        return round(events / seconds)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
        if before is not None:
            spark.conf.set("spark.sql.shuffle.partitions", before)
