"""The cost of writing a flow: Spark analyses each declaration once, and once more where settings of the session have changed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import flux
from flux.dataflow.row_operators import RowOperator
from flux.settings import Settings
from spark_integration.expressions import remembered
from spark_integration.query import start

pytestmark = pytest.mark.spark

F = pytest.importorskip("pyspark.sql.functions")

SCHEMA = "k BIGINT, v DOUBLE, ts TIMESTAMP"
ASKS = ("steps_of", "groups_of", "order_of", "join_of")


@flux.stage
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def read() -> Any:
    return flux.source(lambda partition: iter(()), SCHEMA, 1, "rows").withWatermark("ts", "10 seconds")


def written(rounds: int) -> Any:
    """Write a flow, all of whose declarations are objects of its own, with Columns."""
    flow: Any = read()
    for number in range(rounds):
        flow = flow.withColumn("w", F.col("v") + number).where(F.col("w") > 0)
        flow = same(flow.where(F.col("w") < 9).drop(F.col("w")))
        flow = flow.groupBy(F.window("ts", "10 seconds"), F.col("k")).agg(F.max("v").alias("v"))
        flow = flow.select(F.col("k"), F.col("v"), F.col("window.start").alias("ts"))
        flow = flow.alias("a").join(read().alias("b"), F.expr("a.k = b.k"), ttl="1 hour")
        flow = flow.select(F.col("a.k"), F.col("b.v"), F.col("b.ts"))
    return flux.last(flow, key="k", by=F.col("ts"), ttl="1 day")


@pytest.fixture
def asks(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the questions to Spark, and the operators that are put behind DataFrames."""
    counted: Counter[str] = Counter()

    def counting(where: Any, name: str) -> None:
        ask = getattr(where, name)

        def counted_ask(*given: Any) -> Any:
            counted[name] += 1
            return ask(*given)

        monkeypatch.setattr(where, name, counted_ask)

    for name in ASKS:
        counting(remembered, name)
    counting(RowOperator, "of")
    monkeypatch.setattr(start, "KNOWN", remembered.Answers())
    return counted


def test_the_questions_to_spark_grow_with_the_length_of_a_flow(asks: Counter[str]) -> None:
    counts = []
    for rounds in (1, 2, 3):
        start.KNOWN.clear()
        asks.clear()
        written(rounds)
        counts.append(dict(asks))
    first, second, third = counts
    assert set(first) == {*ASKS, "of"}
    assert {name: second[name] - first[name] for name in first} == {name: third[name] - second[name] for name in first}
    assert third["order_of"] == 1 < third["join_of"] - second["join_of"]


def described(plan: Any) -> list[Any]:
    stages = [(each.name, each.key, each.schemas, each.output_schema, each.timed_inputs) for each in plan.stages]
    return [plan.sources, stages, [(each, str(each.steps)) for each in plan.edges]]


def test_a_flow_that_was_written_is_compiled_as_if_nothing_were_known(asks: Counter[str], spark: Any) -> None:
    flow = written(1)
    asks.clear()
    known = start._compiled(spark, [flow], Settings.of({}))
    assert asks == {}
    start.KNOWN.clear()
    assert described(known) == described(start._compiled(spark, [flow], Settings.of({})))
    assert asks["steps_of"] > 0


def test_answers_hold_for_the_settings_of_their_call(spark: Any) -> None:
    flow = read().where("K > 1").selectExpr("k", "v", "CAST(ts AS STRING) AS said")
    before = str(start._compiled(spark, [flow], Settings.of({})).edges[0].steps)
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "Pacific/Apia")
        after = str(start._compiled(spark, [flow], Settings.of({})).edges[0].steps)
        assert "Pacific/Apia" in after
        assert "Pacific/Apia" not in before
        spark.conf.set("spark.sql.caseSensitive", "true")
        with pytest.raises(flux.SchemaError, match="`K`"):
            flow.where("v > 1")
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
        spark.conf.unset("spark.sql.caseSensitive")
    assert str(start._compiled(spark, [flow.where("v > 1")], Settings.of({})).edges[0].steps)
    assert str(start._compiled(spark, [flow], Settings.of({})).edges[0].steps) == before
