"""Windows of batch DataFrames: the rows of Spark's own ``window`` and ``session_window``."""

from __future__ import annotations

from typing import Any

import pytest
from against_spark import assert_same

import flux

pytestmark = pytest.mark.spark

F = pytest.importorskip("pyspark.sql.functions")


def clicks(spark: Any) -> Any:
    """Make clicks of users 0 to 16 at times that are out of order, before and after 1970; some have no time."""
    return spark.range(0, 6_000, 1, 3).selectExpr(
        "id % 17 as user",
        "if(id % 101 = 0, null, timestamp_millis((id * 7919 % 6000) * 1700 - 4000000)) as ts",
        "id % 13 as amount",
    )


@flux.stage(key="user", partitions=3, window=flux.window("ts", "1 minute", "25 seconds", "5 seconds"), replicas=2)
class Spent(flux.Aggregate):
    n = flux.count()
    total = flux.sum("amount")


@flux.stage(partitions=1, window=flux.window("ts", "10 minutes"))
class All(flux.Aggregate):
    n = flux.count()
    most = flux.max("amount")


@flux.stage(key="user", partitions=3, window=flux.session_window("ts", "20 seconds"))
class Sessions(flux.Aggregate):
    n = flux.count()
    kinds = flux.count_distinct("amount")


def flat(df: Any, *columns: str) -> Any:
    return df.select(*columns[:-2], "window.start", "window.end", *columns[-2:]).withColumnsRenamed(
        {"start": "window_start", "end": "window_end"}
    )


def test_hopping_windows_are_those_of_spark(spark: Any) -> None:
    df = clicks(spark)
    window = F.window("ts", "1 minute", "25 seconds", "5 seconds")
    theirs = df.groupBy("user", window).agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    assert_same(Spent(df).toDF(), flat(theirs, "user", "n", "total"))


def test_windows_without_a_key_are_those_of_spark(spark: Any) -> None:
    df = clicks(spark)
    theirs = df.groupBy(F.window("ts", "10 minutes")).agg(F.count("*").alias("n"), F.max("amount").alias("most"))
    assert_same(All(df).toDF(), flat(theirs, "n", "most"))


@flux.stage(key="user", partitions=3, schema="user BIGINT, n BIGINT, until TIMESTAMP", replicas=2)
class UntilLast(flux.KeyedOperator):
    """The clicks of each user, given when the watermark has reached the last of them: at the end of a batch input."""

    state_schema = "n BIGINT, until TIMESTAMP"

    def on_rows(self, key: tuple, rows: list[Any], state: Any) -> None:
        times = [row.ts for row in rows if row.ts is not None]
        state.n = (state.n or 0) + len(rows)
        state.until = max([*times, *([] if state.until is None else [state.until])], default=None)
        state.event_timer = 0 if state.until is None else round(state.until.timestamp() * 1_000_000)

    def on_key_event_timer(self, key: tuple, state: Any) -> tuple:
        assert self.context.watermark == flux.END_OF_TIME
        return *key, state.n, state.until


def test_timers_of_event_time_fire_at_the_end_of_a_batch_input(spark: Any) -> None:
    df = clicks(spark)
    theirs = df.groupBy("user").agg(F.count("*").alias("n"), F.max("ts").alias("until"))
    assert_same(UntilLast(df).toDF(batch_max_rows=500), theirs)


def test_sessions_are_those_of_spark(spark: Any) -> None:
    df = clicks(spark)
    theirs = df.groupBy("user", F.session_window("ts", "20 seconds").alias("window")).agg(
        F.count("*").alias("n"), F.count_distinct("amount").alias("kinds")
    )
    assert_same(Sessions(df).toDF(), flat(theirs, "user", "n", "kinds"))
