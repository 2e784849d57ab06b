"""``withStage``, ``spark.flux.replicas`` and ``alias``: stages of a flow that are changed after they were written."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import Plan
from flux.errors import UsageError
from flux.expressions.tree import Column, FunctionCall, Literal
from flux.settings import Settings
from tests.flux.resolved import to_steps

LONG = pa.int64()
SCHEMA = pa.schema([("k", LONG), ("x", LONG)])


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


@flux.stage(key="k")
class Sums(flux.Aggregate):
    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    total = flux.sum("x")


@flux.stage(partitions=4)
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def source() -> Any:
    return flux.source(lambda partition, start: iter(()), SCHEMA, 1, "rows")


def compiled(*flows: Any, **settings: Any) -> Plan:
    return compile_plan(flows, Settings.of(**settings), lambda schema: schema, "q", b"", to_steps=to_steps)


def above(limit: int) -> Any:
    return FunctionCall("greater", (Column("total", LONG), Literal(limit, LONG)), pa.bool_())


def test_a_flow_has_the_stage_that_it_was_given_and_the_flow_before_keeps_its_own() -> None:
    first = Sums(source())
    other = first.withStage(name="Spent", partitions=16, replicas=2, recovery="standby")
    plan = compiled(first, other)
    told = [(stage.name, stage.partitions, stage.replicas, stage.recovery) for stage in plan.stages]
    assert told == [("Sums", 32, 1, "active"), ("Spent", 16, 2, "standby")]
    assert isinstance(plan.stages[1].make(), Sums.target)
    again = other.withStage(partitions=3)
    assert (again.stage.name, again.stage.partitions, again.stage.replicas) == ("Spent", 3, 2)


def test_what_else_a_stage_has_stays() -> None:
    window = flux.stage(key="k", window=flux.window("t", "1 minute"), durable=False)(Sums.target)
    changed = window(source()).withStage(partitions=3).in_mode("update")
    assert (changed.stage.window, changed.stage.durable, changed.stage.output_mode) == (window.window, False, "update")
    assert changed.stage.partitions == 3
    made = Sums(factor=7)(source()).withStage(replicas=2).stage
    assert pickle.loads(pickle.dumps(made)).make().factor == 7
    assert made.make().factor == 7  # type: ignore[attr-defined]


def test_conditions_behind_a_stage_do_not_hide_it() -> None:
    plan = compiled(Sums(source()).where(above(3)).withStage(partitions=5, replicas=2).where(above(4)))
    (stage,) = plan.stages
    assert (stage.name, stage.partitions, stage.replicas) == ("Sums", 5, 2)


def test_the_stage_that_passes_on_the_rows_of_a_source_is_changed() -> None:
    flow = source().select(("x", Column("x", LONG))).withStage(name="out", partitions=2, replicas=3)
    (stage,) = compiled(flow.select(("x", Column("x", LONG)))).stages
    assert (stage.name, stage.partitions, stage.replicas) == ("out", 2, 3)


def test_stages_without_a_number_have_the_replicas_of_the_session() -> None:
    one = flux.stage(key="k", replicas=1, name="one")(Sums.target)
    plan = compiled(one(same(source())), source().select(("x", Column("x", LONG))), replicas=2)
    assert [stage.replicas for stage in plan.stages] == [2, 1, 2]
    standby = Sums(source()).withStage(recovery="standby")
    assert compiled(standby, replicas=2).stages[0].recovery == "standby"
    with pytest.raises(UsageError, match=r"give replicas=2 or more with it, or set spark\.flux\.replicas"):
        compiled(standby)
    with pytest.raises(UsageError, match="replicas"):
        Settings.of(replicas=4)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "expected at least one of name, partitions, replicas, recovery"),
        ({"partitions": 0}, "stage Sums: partitions must be a whole number from 1 to 4096, got 0"),
        ({"replicas": 4}, "stage Sums: replicas must be a whole number from 1 to 3, got 4"),
        ({"recovery": "fast"}, "recovery must be one of active, standby, upstream; got 'fast'"),
        ({"recovery": "standby", "replicas": 1}, "give replicas=2 or more"),
        ({"name": " "}, "name must be text"),
        ({"key": "x"}, "withStage has no option 'key'.*it has name, partitions, replicas, recovery"),
    ],
)
def test_bad_changes_are_refused(how: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Sums(source()).withStage(**how)


def test_a_source_has_no_stage() -> None:
    with pytest.raises(AttributeError, match=r"a source has no withStage\(\): call a stage with it first"):
        source().withStage(partitions=3)


def test_an_alias_is_a_name() -> None:
    with pytest.raises(UsageError, match="alias: expected a name, got 5"):
        source().alias(5)
    assert compiled(same(source().select(("x", Column("x", LONG))))).edges[0].steps is not None
