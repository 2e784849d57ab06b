"""Keys of every type, and their nulls, group as in Spark."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pytest
from against_spark import ByK, F, assert_same

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

KEYED = [
    ("whole", "integer"), ("small", "short"), ("word", "string"), ("flag", "boolean"), ("day", "date"),
    ("moment", "timestamp"), ("wall", "timestamp_ntz"), ("money", "decimal(12,2)"), ("huge", "decimal(38,10)"),
    ("real", "double"), ("raw", "binary"),
]  # fmt: skip


def keyed(spark: Any, n: int = 300) -> Any:
    """Make rows in which every column has nulls and about ten values."""
    start = datetime.datetime(2024, 3, 31, 0, 30)

    def some(i: int, value: Any) -> Any:
        return None if i % 11 == 10 else value

    made = [
        (
            some(i, i % 9 - 4),
            some(i + 1, (i % 7 - 3) * 10_000),
            some(i + 2, ["", "a", "été", "a longer one, beyond eight bytes", "a "][i % 5]),
            some(i + 3, i % 2 == 0),
            some(i + 4, start.date() + datetime.timedelta(days=i % 8 - 20_000)),
            some(i + 5, start + datetime.timedelta(minutes=30 * (i % 9), microseconds=i % 2)),
            some(i + 6, start - datetime.timedelta(hours=i % 6, days=30_000)),
            some(i + 7, Decimal(i % 10 - 5) / 4),
            some(i + 8, Decimal(i % 10 - 5).scaleb(20)),
            some(i + 9, [0.0, -0.0, float("nan"), 1.5, float("-inf")][i % 5]),
            some(i + 10, bytes([i % 3, 0, i % 2])),
            i,
        )
        for i in range(n)
    ]
    schema = ", ".join(f"{name} {kind}" for name, kind in KEYED) + ", v bigint"
    return spark.createDataFrame(made, schema).repartition(3)


#: Columns that the keys of several columns have.
TOGETHER = ("word", "flag", "day", "money", "real")


@pytest.mark.parametrize(
    "key",
    [(name,) for name, _ in KEYED if name not in TOGETHER]
    + [("word", "whole"), ("flag", "day", "money", "real")]
    # Alone they are columns of test_aggregate_matches_spark.py, too.
    + [pytest.param((name,), marks=pytest.mark.long) for name in TOGETHER],
    ids="+".join,
)
def test_keys_of_every_type_and_their_nulls_group_as_in_spark(spark: Any, key: tuple[str, ...]) -> None:
    df = keyed(spark)

    @flux.stage(key=key, partitions=4)
    class Total(flux.Aggregate):
        n = flux.count()
        total = flux.sum("v")

    theirs = df.groupBy(*key).agg(F.count("*").alias("n"), F.sum("v").alias("total"))
    assert_same(Total(df).toDF(), theirs)


@pytest.mark.parametrize("zone", ["America/New_York", pytest.param("+05:30", marks=pytest.mark.long)])
def test_timestamps_keep_their_instant_in_any_session_time_zone(spark: Any, zone: str) -> None:
    df = keyed(spark)

    @flux.stage(key=("moment", "wall", "day"), partitions=4)
    class Moments(flux.Aggregate):
        n = flux.count()
        last = flux.max("moment")
        last_wall = flux.max("wall")

    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        theirs = df.groupBy("moment", "wall", "day").agg(
            F.count("*").alias("n"), F.max("moment").alias("last"), F.max("wall").alias("last_wall")
        )
        ours = Moments(df).toDF()
        assert_same(ours, theirs)
        shown = [f"cast({name} as string) as {name}" for name in ours.columns]
        assert_same(ours.selectExpr(*shown), theirs.selectExpr(*shown))
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_keys_that_are_all_null_form_one_group(spark: Any) -> None:
    df = spark.range(0, 100, 1, 3).selectExpr("cast(null as string) as k", "cast(id as double) as v")
    (row,) = ByK(df).toDF().collect()
    assert row.asDict() == {"k": None, "n": 100, "total": 4950.0}


def test_column_names_may_be_anything_that_spark_allows(spark: Any) -> None:
    df = spark.range(0, 50, 1, 2).selectExpr("id % 3 as `a key.with dots`", "id as `größe (m²)`")

    @flux.stage(key="a key.with dots", partitions=2)
    class Odd(flux.Aggregate):
        n = flux.sum("größe (m²)")

    assert_same(Odd(df).toDF(), df.groupBy("`a key.with dots`").agg(F.sum("`größe (m²)`").alias("n")))
