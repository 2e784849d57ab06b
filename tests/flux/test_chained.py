"""Two operators in the steps of one stage give the output of two stages, at any step where a copy takes over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from controller.planning.checks import check_ends
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.flow import StageWith
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource
from flux.errors import UsageError, UserCodeError
from flux.operators.operator import Chain, Chained, chain_of
from flux.settings import Settings
from flux.testing import apply
from spark_integration.query.checkpoint_location import description

ROWS = pa.schema([("k", pa.int64()), ("x", pa.int64())])
NUMBERED = ROWS.append(pa.field("n", pa.int64()))


class Numbers(flux.Operator):
    """An operator that numbers the rows that come by."""

    snapshot_classes = ()
    rows = 0

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        if not batch.num_rows:
            return None
        self.rows += batch.num_rows
        return batch.append_column("n", pa.array(range(self.rows - batch.num_rows, self.rows), pa.int64()))

    def output_schema(self, schemas: Any, key: Any) -> pa.Schema:
        return schemas[0].append(pa.field("n", pa.int64()))

    def snapshot(self) -> Any:
        return np.array([self.rows])

    def restore(self, snapshot: Any) -> None:
        (self.rows,) = snapshot.tolist()


class Late(flux.Operator):
    """An operator that gives rows when their time has come, and the rest at the end."""

    schema = ROWS

    def __init__(self) -> None:
        self.kept: list[dict[str, int]] = []

    def process(self, batch: pa.RecordBatch) -> None:
        self.kept += batch.to_pylist()
        self.context.set_timer(self.context.now + 2)

    def on_timer(self, name: str) -> pa.Table:
        return self.finish()

    def finish(self) -> pa.Table:
        given, self.kept = pa.Table.from_pylist(self.kept, ROWS), []
        return given

    def snapshot(self) -> Any:
        return self.kept

    def restore(self, snapshot: Any) -> None:
        self.kept = list(snapshot)


class Totals(flux.Aggregate):
    total = flux.sum("x")


late = flux.stage(partitions=2)(Late)
totals = flux.stage(key="k", output_mode="update", partitions=2)(Totals)


def behind(flow: Any) -> Any:
    numbers = StageWith(flux.stage(partitions=1, name=f"{flow.stage.name}.numbers")(Numbers), (), {})
    numbers.chained = True
    return numbers(flow)


def rows() -> Any:
    return DataFrameSource("rows", ROWS)


def compiled(*flows: Any, **given: Any) -> Plan:
    return compile_plan(list(flows), Settings.of(), lambda schema: schema, "q", b"", **given)


def both(stage: Any, schema: pa.Schema) -> Any:
    """Wrap the chain as a stage, for tests."""
    made = StageWith(stage, (), {})
    made.make = Chain(stage.make, Numbers, schema)  # type: ignore[method-assign]
    return made


def batches(sizes: list[int]) -> list[pa.RecordBatch]:
    ends = np.cumsum(sizes)
    xs = [range(end - size, end) for end, size in zip(ends.tolist(), sizes, strict=True)]
    return [pa.record_batch([[x % 3 for x in some], list(some)], schema=ROWS) for some in xs]


def numbered(table: pa.Table) -> list[dict[str, int]]:
    return [{**row, "n": n} for n, row in enumerate(table.to_pylist())]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
def test_it_gives_what_two_stages_would_wherever_another_takes_over(sizes: list[int], data: st.DataObject) -> None:
    given_batches = batches(sizes)
    restart = data.draw(st.integers(0, len(sizes)))
    for stage in (late, totals):
        plain = compiled(stage(rows())).stages[0].output_schema
        assert plain is not None
        wanted = numbered(apply(stage, given_batches))
        options: dict[str, Any] = {"restart_after": restart}
        if stage is totals:
            options["checkpoint_after"] = data.draw(st.integers(0, restart))
        assert apply(both(stage, plain), given_batches, **options).to_pylist() == wanted


def test_timers_of_the_first_fire_and_what_they_give_goes_on() -> None:
    got = apply(both(late, ROWS), batches([2, 3]), times=[0.0, 5.0, 5.0])
    assert [batch.num_rows for batch in got.to_batches()] == [2, 3]
    assert got.column("n").to_pylist() == [0, 1, 2, 3, 4]


def test_what_the_first_gives_has_the_schema_that_it_declares() -> None:
    @flux.stage(schema="k BIGINT, x BIGINT")
    def narrow(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(["k"])

    @flux.stage(schema="k BIGINT, x BIGINT")
    def encoded(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([batch["k"].dictionary_encode(), batch["x"]], names=["k", "x"])

    with pytest.raises(
        UserCodeError, match=r"stage narrow, partition 0: output of stage narrow: declared \(k int64, x int64\)"
    ):
        apply(both(narrow, ROWS), batches([2]))
    assert apply(both(encoded, ROWS), batches([2])).schema == NUMBERED


def test_classes_of_both_snapshots_may_travel_unless_one_may_hold_any() -> None:
    class Named(Late):
        snapshot_classes = (frozenset,)

    assert Chained(Named(), Numbers(), ROWS).snapshot_classes == (frozenset,)
    assert Chained(Late(), Numbers(), ROWS).snapshot_classes is None


def test_a_stage_that_feeds_no_other_gets_it_into_its_steps() -> None:
    (stage,) = compiled(behind(totals(rows()))).stages
    assert (stage.name, stage.partitions, stage.key) == ("Totals", 2, ("k",))
    assert [type(each) for each in chain_of(stage.make())] == [Totals, Numbers]
    assert stage.output_schema is not None
    assert stage.output_schema.names == ["k", "total", "n"]


@pytest.mark.parametrize(
    "flows",
    [
        lambda flow: [behind(flow), flow.foreach_batch(print, transient=OSError)],
        lambda flow: [behind(flow), behind(flow)],
        lambda flow: [behind(flow), late(flow)],
    ],
    ids=["a sink", "another chain", "a stage"],
)
def test_where_the_output_goes_elsewhere_too_it_is_a_stage_of_its_own(flows: Any) -> None:
    plan = compiled(*flows(totals(rows())))
    assert [chain_of(stage.make()) for stage in plan.stages if len(chain_of(stage.make())) > 1] == []
    assert "Totals.numbers" in [stage.name for stage in plan.stages]


def test_output_that_is_collected_besides_is_not_numbered() -> None:
    flow = totals(rows())
    names = [stage.name for stage in compiled(flow, behind(flow).to(Keeps()), collect=1).stages]
    assert names == ["Totals", "Totals.numbers", "Totals.toDF"]


class Keeps(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: Any) -> None: ...


def test_a_stage_with_replay_points_has_no_numbers_among_its_state() -> None:
    passed = flux.stage(partitions=1, replicas=2, recovery="upstream", name="passed")(lambda batch: batch)
    assert [stage.name for stage in compiled(behind(passed(rows()))).stages] == ["passed", "passed.numbers"]


def test_a_stage_without_output_is_refused_by_its_name() -> None:
    @flux.stage
    class Silent(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None: ...

    with pytest.raises(UsageError, match="stage Silent declares no schema"):
        compiled(behind(Silent(rows())))


def test_it_is_told_and_checked_as_the_users_stage() -> None:
    plan = compiled(behind(totals(rows())).to(Keeps()))
    assert "stage Totals: aggregate, total = sum(x), then Numbers in the same steps" in explain(plan)
    said = description(plan)["stages"]["Totals"]["operator"]
    assert said.endswith(".Totals, then test_chained.Numbers"), said
    endless = flux.source(lambda partition: iter(()), ROWS, 1, "clicks")
    endless.reader.endless = True  # type: ignore[attr-defined]
    whole = flux.stage(key="k", partitions=2, name="Whole")(Totals)
    with pytest.raises(UsageError, match='stage Whole has output_mode="complete"'):
        check_ends(compiled(behind(whole(endless)).to(Keeps())))
