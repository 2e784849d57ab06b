"""Stages, operators, functions and aggregates of users give the results of Spark's own batch operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from against_spark import F, assert_same, numbers

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]


@flux.stage(key="k", partitions=4)
class RunningMax(flux.Operator):
    """A row whenever the greatest value of a key grows."""

    schema = "k BIGINT, best BIGINT"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.best: dict[int, int] = {}

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        grown = []
        for row in batch.to_pylist():
            if row["k"] not in self.best or row["x"] > self.best[row["k"]]:
                self.best[row["k"]] = row["x"]
                grown.append({"k": row["k"], "best": row["x"]})
        if grown:
            yield pa.RecordBatch.from_pylist(grown)

    def snapshot(self) -> Any:
        return self.best

    def restore(self, snapshot: Any) -> None:
        self.best = dict(snapshot)


def test_a_stateful_operator_sees_the_rows_of_a_key_once_and_in_order(spark: Any) -> None:
    df = spark.range(0, 6_000, 1, 1).selectExpr("id", "id % 23 as k", "id * 7919 % 6007 as x")
    so_far = "max(x) over (partition by k order by id rows between unbounded preceding and 1 preceding)"
    theirs = df.selectExpr("k", "x as best", f"coalesce({so_far} < x, true) as grows").where("grows").drop("grows")
    assert_same(RunningMax(df.select("k", "x")).toDF(batch_max_rows=100), theirs)


def test_an_operator_can_be_tried_without_spark_and_goes_on_from_its_snapshot() -> None:
    batches = [pa.RecordBatch.from_pydict({"k": [1, 2, 1], "x": [i, 9 - i, 2 * i]}) for i in range(8)]
    one, two = RunningMax(), RunningMax()
    for operator in (one, two):
        operator.open(flux.Context("RunningMax", key=("k",), schemas=(batches[0].schema,)))
    before = [list(one.process(batch)) for batch in batches[:4]]
    two.restore(one.snapshot())
    assert [list(one.process(batch)) for batch in batches[4:]] == [list(two.process(batch)) for batch in batches[4:]]
    assert before[0][0].to_pylist() == [{"k": 1, "best": 0}, {"k": 2, "best": 9}]


@flux.stage
def even(batch: pa.RecordBatch) -> pa.RecordBatch | None:
    kept = batch.filter(pc.equal(pc.bit_wise_and(batch.column("id"), 1), 0))
    return kept if kept.num_rows else None


def test_a_function_decorated_without_parentheses_keeps_the_schema_and_filters(spark: Any) -> None:
    df = numbers(spark, 5_000)
    assert_same(even(df).toDF(), df.where("id % 2 = 0"))
    assert even(pa.RecordBatch.from_pydict({"id": [1, 2, 3]})).to_pydict() == {"id": [2]}  # usable by itself


def test_a_function_with_a_key_gets_every_row_of_the_key_in_one_partition(spark: Any) -> None:
    @flux.stage(key="k", partitions=6, schema="k BIGINT, id BIGINT, where BIGINT")
    class Where(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
            here = pa.array([self.context.partition] * batch.num_rows, pa.int64())
            half = batch.num_rows // 2  # several batches for one, some of them empty
            whole = pa.RecordBatch.from_arrays([batch.column("k"), batch.column("id"), here], ["k", "id", "where"])
            yield from (whole.slice(0, half), whole.slice(half), whole.slice(0, 0))

    @flux.stage(key=["k"], partitions=3)
    def same(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        return [batch]

    df = numbers(spark, 5_000).select("k", "id")
    ours = same(Where(df)).toDF()
    assert_same(ours.select("k", "id"), df)
    spread = ours.groupBy("k").agg(F.countDistinct("where").alias("places"))
    assert spread.where("places != 1").count() == 0
    assert ours.select("where").distinct().count() == 6


def test_update_mode_gives_changes_whose_last_is_the_result(spark: Any) -> None:
    @flux.stage(key="k", partitions=3, output_mode="update")
    class Growing(flux.Aggregate):
        n = flux.count()

    df = numbers(spark, 4_000)
    ours = Growing(df).toDF(batch_max_rows=500, step_max_rows=1)
    assert ours.count() > 97
    assert_same(ours.groupBy("k").agg(F.max("n").alias("n")), df.groupBy("k").agg(F.count("*").alias("n")))


def test_an_aggregate_without_a_key_in_one_partition_is_the_global_one(spark: Any) -> None:
    @flux.stage(partitions=1)
    class All(flux.Aggregate):
        n = flux.count()
        total = flux.sum("v")
        mean = flux.mean("v")

    df = numbers(spark, 4_000)
    theirs = [F.count("*").alias("n"), F.sum("v").alias("total"), F.mean("v").alias("mean")]
    assert_same(All(df).toDF(), df.agg(*theirs))
    assert_same(All(df.limit(0)).toDF(), df.limit(0).agg(*theirs))
