"""Flows as they are written: names and columns, and the cost. Spark analyses each declaration once, and once more where settings
of the session have changed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import flux
from flux.connectors.files.parquet_sink import ParquetFiles
from flux.dataflow.row_operators import RowOperator
from flux.settings import Settings
from spark_integration.expressions import analyser_answers
from spark_integration.query import declarations
from spark_integration.query.declarations import compiled

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
        counting(analyser_answers, name)
    counting(RowOperator, "of")
    monkeypatch.setattr(declarations, "KNOWN", analyser_answers.Answers())
    return counted


def test_the_questions_to_spark_grow_with_the_length_of_a_flow(asks: Counter[str]) -> None:
    counts = []
    for rounds in (1, 2, 3):
        declarations.KNOWN.clear()
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
    known = compiled(spark, [flow], Settings.of({})).plan
    assert asks == {}
    declarations.KNOWN.clear()
    assert described(known) == described(compiled(spark, [flow], Settings.of({})).plan)
    assert asks["steps_of"] > 0


def test_answers_hold_for_the_settings_of_their_call(spark: Any) -> None:
    flow = read().where("K > 1").selectExpr("k", "v", "CAST(ts AS STRING) AS said")
    before = str(compiled(spark, [flow], Settings.of({})).plan.edges[0].steps)
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "Pacific/Apia")
        after = str(compiled(spark, [flow], Settings.of({})).plan.edges[0].steps)
        assert "Pacific/Apia" in after
        assert "Pacific/Apia" not in before
        spark.conf.set("spark.sql.caseSensitive", "true")
        with pytest.raises(flux.SchemaError, match="`K`"):
            flow.where("v > 1")
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
        spark.conf.unset("spark.sql.caseSensitive")
    assert str(compiled(spark, [flow.where("v > 1")], Settings.of({})).plan.edges[0].steps)
    assert str(compiled(spark, [flow], Settings.of({})).plan.edges[0].steps) == before


def test_spark_reads_folders_by_columns_as_it_reads_its_own(spark: Any, tmp_path: Any) -> None:
    """Folders are written by the sink alone: tests/flux shows the sink in a query."""
    values = (
        "(1, 'a', DATE'2013-01-01', true, 1.5D, 2.50BD, TIMESTAMP_NTZ'2013-01-01 05:30:00'), "
        "(2, NULL, NULL, NULL, NULL, NULL, NULL), "
        "(3, '', DATE'0099-12-31', false, 1e10D, -1.00BD, TIMESTAMP_NTZ'2013-01-01 05:30:00.5'), "
        "(4, '5:6/7=8 %[]{}^?*#\"\\\\', DATE'2013-01-01', true, double('NaN'), 0.10BD, TIMESTAMP_NTZ'1900-01-01 00:00:00')"
    )
    names = ["s", "d", "b", "f", "n", "t"]
    df = spark.sql(f"SELECT * FROM VALUES {values} AS rows(x, {', '.join(names)})").coalesce(1)
    df.write.partitionBy(names).parquet(str(tmp_path / "spark"))
    sink = ParquetFiles(str(tmp_path / "flux"), 0, names)
    sink.open(flux.SinkContext("q", 0, "last", 0, 1))
    (batch,) = df.toArrow().to_batches()
    sink.check(batch.schema)
    sink.write(batch, flux.Position(0, 0))
    sink.write(batch.slice(0, 0), flux.Position(0, 1))
    folders = [
        sorted(str(path.parent.relative_to(tmp_path / where)) for path in (tmp_path / where).rglob("part-*.parquet"))
        for where in ("spark", "flux")
    ]
    assert folders[0] == folders[1]
    for reader in (spark.read, spark.read.schema(df.schema)):
        theirs, ours = (reader.parquet(str(tmp_path / where)) for where in ("spark", "flux"))
        assert theirs.schema == ours.schema
        assert sorted(map(str, theirs.collect())) == sorted(map(str, ours.collect()))


def test_attributes_of_a_flow_behind_an_alias_are_those_of_the_alias(spark: Any) -> None:
    a, b = read().alias("a"), read().alias("b").where("v > 0")
    near = a.join(b, (a.k == b.k) & (a.ts >= b.ts) & (a["ts"] <= b.ts + F.expr("INTERVAL 1 MINUTE")), "left")
    text = flux.explain(same(near.where(a.v > b.v).select(a.k, b.ts)), spark=spark)
    assert "keys: left.k = right.k" in text
    assert "bounds: left.ts >= right.ts and left.ts <= right.ts + 1 minute" in text
    best = flux.top(a, 3, key="k", by=[a.v.desc(), a.ts], window=F.window("ts", "1 minute"))
    assert "v DESC" in flux.explain(best.where(best.v > 0), spark=spark)
    assert same(a).where(a.select("k").k > 3).columns == ["k", "v", "ts"]
    unnamed, other = read(), read()
    with pytest.raises(flux.UsageError, match=r"AMBIGUOUS_REFERENCE.*alias"):
        unnamed.join(other, unnamed.k == other.k, ttl="1 hour")
