"""``union``: rows of several flows, with the same columns by position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.checks import check_ends
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import FromSource, FromStage, Plan
from flux.errors import SchemaError, UsageError
from flux.expressions.tree import Column, FunctionCall, Literal
from flux.settings import Settings
from tests.flux import harness
from tests.flux.resolved import to_steps

LONG, TIME = pa.int64(), pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("k", LONG), ("x", LONG), ("ts", TIME)])
OTHER = pa.schema([("key", LONG), ("value", LONG), ("time", TIME)])
X = Column("x", LONG)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


class Sums(flux.Aggregate):
    total = flux.sum("x")


class Counts(flux.Aggregate):
    n = flux.count()


@flux.stage(partitions=1)
class Keep(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


class Reads:
    def __init__(self, schema: pa.Schema, endless: bool) -> None:
        self.schema, self.endless = schema, endless

    def __call__(self, partition: int) -> Iterator[pa.RecordBatch]:
        for number in range(10):
            ids = pa.array(range(100 * number, 100 * number + 100), LONG)
            keys = pa.array([each % 7 for each in ids.to_pylist()], LONG)
            yield pa.RecordBatch.from_arrays([keys, ids, ids.cast(pa.timestamp("us")).cast(TIME)], schema=self.schema)


def source(schema: pa.Schema = SCHEMA, name: str = "one", endless: bool = False) -> Any:
    return flux.source(Reads(schema, endless), schema, 1, name)


def compiled(*flows: Any) -> Plan:
    return compile_plan(flows, Settings.of(), lambda schema: schema, "q", b"", to_steps=to_steps)


def above(limit: int, of: Any = X) -> Any:
    return FunctionCall("greater", (of, Literal(limit, LONG)), pa.bool_())


def sums(given: Any) -> Any:
    return flux.stage(key="k", partitions=2)(Sums)(given)


def windows(given: Any) -> Any:
    return flux.stage(key="k", window=flux.window("ts", "1 minute"))(Counts)(given)


def test_an_aggregate_reads_the_flows_of_a_union_itself() -> None:
    plan = compiled(sums(source().where(above(3)).union(source(OTHER, "two")).where(above(5))))
    assert [stage.name for stage in plan.stages] == ["Sums"]
    assert [edge.input for edge in plan.edges] == [0, 1]
    assert [edge.schema.names for edge in plan.edges] == [["k", "x"], ["k", "x"]]
    assert str(plan.edges[1].steps).startswith("where greater(`value`, 5:BIGINT)")


def test_elsewhere_a_stage_passes_the_rows_on() -> None:
    union = source().union(source(OTHER, "two"))
    plan = compiled(Keep(union.where(above(5))), Keep(union), sums(union))
    assert [stage.name for stage in plan.stages] == ["union", "Keep", "Keep#2", "Sums"]
    assert [type(edge) for edge in plan.edges] == [FromSource, FromSource, FromStage, FromStage, FromStage]
    assert plan.stages[0].output_schema == SCHEMA
    plan = compiled(union.foreach_batch(lambda batch, position: None))
    assert [stage.name for stage in plan.stages] == ["union"]
    plan = compiled(
        union.where(above(5)).withStage(name="both", partitions=3).foreach_batch(lambda batch, position: None)
    )
    assert [(stage.name, stage.partitions) for stage in plan.stages] == [("both", 3)]


def test_an_operator_of_ones_own_gets_one_input() -> None:
    class Own(flux.Aggregate):
        n = flux.count()

        def process(self, batch: pa.RecordBatch) -> Any:
            return super().process(batch)

    plan = compiled(flux.stage(key="k")(Own)(source().union(source(OTHER, "two"))))
    assert [stage.name for stage in plan.stages] == ["union", "Own"]


def test_unions_of_unions_and_of_a_flow_with_itself() -> None:
    one = source()
    plan = compiled(sums(one.union(one).unionAll(source(OTHER, "two").union(one))))
    assert len(plan.sources) == 2
    assert [edge.input for edge in plan.edges] == [0, 1, 2, 3]


def test_a_column_may_be_null_if_it_may_be_in_any_flow() -> None:
    never = pa.schema([pa.field("k", LONG, nullable=False), ("x", LONG), ("ts", TIME)])
    plan = compiled(Keep(source(never).union(source(OTHER, "two"))))
    assert plan.stages[0].output_schema == SCHEMA


def test_a_union_has_a_watermark_if_all_have_one() -> None:
    one = source(endless=True).withWatermark("ts", "1 second")
    two = source(OTHER, "two", endless=True).withWatermark("time", "1 minute")
    plan = compiled(Keep(windows(one.union(two))))
    assert plan.stages[0].timed_inputs == (0, 1)
    assert [edge.states for edge in plan.edges] == [True, True, True]
    check_ends(plan)
    union = one.union(two)
    plan = compiled(Keep(union), Keep(windows(union)))
    assert [stage.timed_inputs for stage in plan.stages] == [(0, 1), (0,), (0,), (0,)]
    check_ends(plan)
    with pytest.raises(UsageError, match=r"source two has no watermark.*two.withWatermark"):
        check_ends(compiled(Keep(windows(one.union(source(OTHER, "two", endless=True))))))
    with pytest.raises(UsageError, match="withWatermark behind stage union"):
        union.withWatermark("ts", "1 second")


def test_other_columns_are_refused() -> None:
    with pytest.raises(
        SchemaError, match=r"union: expected the same columns by position, got 3 \(k, x, ts\) and 1 \(a\)"
    ):
        compiled(Keep(source().union(source(pa.schema([("a", LONG)]), "two"))))
    with pytest.raises(
        UsageError, match="union: the types of its columns are resolved by Spark, and there is no session"
    ):
        compile_plan(
            [Keep(source().union(source(pa.schema([("k", pa.int32()), ("x", LONG), ("ts", TIME)]), "two")))],
            Settings.of(), lambda schema: schema, "q", b"",
        )  # fmt: skip
    with pytest.raises(UsageError, match="an input must be a DataFrame, a flow or a source, got int"):
        source().union(5)
    with pytest.raises(UsageError, match="this flow is a union: call union"):
        source().union(source()).connect(source())


def test_a_query_gives_the_rows_of_both() -> None:
    seen, passed = harness.Rows(), harness.Rows()
    union = source().where(above(899)).union(source(OTHER, "two"))
    flows = seen.stage(sums(union)), passed.stage(union.where(above(949)))
    with harness.ThreadQuery(*flows, to_steps=to_steps) as query:
        query.wait()
    wanted = [*range(900, 1000), *range(1000)]
    assert sorted(row["x"] for row in passed) == sorted(x for x in wanted if x > 949)
    totals = {row["k"]: row["total"] for row in seen}
    assert totals == {key: sum(x for x in wanted if x % 7 == key) for key in range(7)}
