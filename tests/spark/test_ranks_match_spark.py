"""Ranks and duplicates of batch DataFrames: the rows of Spark's own ROW_NUMBER, RANK and dropDuplicates."""

from __future__ import annotations

from typing import Any

import pytest
from against_spark import assert_same

import flux

pytestmark = pytest.mark.spark

F = pytest.importorskip("pyspark.sql.functions")


def bids(spark: Any) -> Any:
    """Bids with equal prices, prices that are null or NaN, and times out of order, before and after 1970."""
    return spark.range(0, 4_000, 1, 3).selectExpr(
        "id % 17 as auction",
        "CASE WHEN id % 23 = 0 THEN null WHEN id % 29 = 0 THEN double('NaN') ELSE double(id * 31 % 11) END as price",
        "timestamp_millis((id * 7919 % 4000) * 50 - 40000) as ts",
        "if(id % 7 = 0, null, string(id % 5)) as channel",
        "named_struct('x', id % 3, 'y', array(id % 2)) as more",
    )


def numbered(df: Any, partition: str, order: str, function: str = "ROW_NUMBER") -> Any:
    return df.selectExpr("*", f"{function}() OVER (PARTITION BY {partition} ORDER BY {order}) AS rank")


def test_ranks_and_duplicates_are_those_of_spark(spark: Any) -> None:
    df = bids(spark)
    rows = flux.batch(df).withWatermark("ts", "10 seconds")

    best = flux.top(
        rows, 3, key="auction", by="price % 4 DESC NULLS LAST, channel", window=F.window("ts", "20 seconds")
    )
    windows = df.withColumn("w", F.window("ts", "20 seconds")).selectExpr(
        *df.columns, "w.start AS window_start", "w.end AS window_end"
    )
    order = "price % 4 DESC NULLS LAST, channel, auction, price, ts, more"
    theirs = numbered(windows, "auction, window_start", order).where("rank <= 3")
    assert_same(best.withStage(replicas=2).toDF(batch_max_rows=300), theirs)

    counts = rows.groupBy(F.window("ts", "10 seconds", "5 seconds"), "auction").agg(F.count("*").alias("bids"))
    hot = flux.top(counts, 1, within="window", by=[F.desc("bids")], ties=True).select(
        "window.end", "auction", "bids", "rank"
    )
    spark_counts = df.groupBy(F.window("ts", "10 seconds", "5 seconds"), "auction").agg(F.count("*").alias("bids"))
    theirs = numbered(spark_counts, "window", "bids DESC", "RANK").where("rank = 1")
    assert_same(hot.toDF(), theirs.select("window.end", "auction", "bids", "rank"))

    changes = flux.top(rows, 5, key="auction", by="price DESC, ts").toDF(batch_max_rows=300)
    whole = "price DESC, ts, auction, channel, more"
    kept = numbered(changes.withColumnRenamed("rank", "place"), "auction, place", whole).where(
        "rank = 1"
    )  # the last of each
    theirs = numbered(df, "auction", whole).where("rank <= 5")
    assert_same(kept.drop("rank").withColumnRenamed("place", "rank"), theirs)

    once = flux.dedup(rows, key=("auction", "channel"), ttl="1 day")
    assert_same(once.toDF().select("auction", "channel"), df.select("auction", "channel").dropDuplicates())
    with pytest.raises(flux.UsageError, match="UNRESOLVED_COLUMN"):
        flux.top(rows, 1, by="prize DESC")
    with pytest.raises(flux.UsageError, match="PARSE_SYNTAX_ERROR"):
        flux.top(rows, 1, by="price DESCENDING")


def test_an_as_of_join_is_that_of_spark_by_ranks(spark: Any) -> None:
    orders = bids(spark).where("auction < 3").selectExpr("auction", "ts", "channel")
    prices = spark.range(0, 300, 1, 2).selectExpr(
        "id % 4 as auction", "timestamp_millis(id * 1000 - 60000) as at", "id as price"
    )
    ours = flux.asof_join(
        flux.batch(orders).withWatermark("ts", "0 seconds"), flux.batch(prices).withWatermark("at", "0 seconds"),
        on="auction", tolerance="2 seconds", how="left",
    )  # fmt: skip
    fits = (F.col("p.auction") == F.col("o.auction")) & F.expr("p.at BETWEEN o.ts - INTERVAL 2 SECONDS AND o.ts")
    pairs = orders.alias("o").join(prices.alias("p"), fits, "left").selectExpr("o.*", "p.at", "p.price")
    theirs = numbered(pairs, "auction, ts, channel", "at DESC").where("rank = 1").drop("rank")
    assert_same(ours.toDF(), theirs)
