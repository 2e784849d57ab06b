"""Flows that are added to a running plan: new parts behind those that run, which stay as they are."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.course.removals import removal
from controller.planning.additions import PlanAddition, check_addition, compiled_addition
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.compiler import compiled_plan
from controller.planning.explain import explain
from controller.planning.steps import Resolvers
from flux.dataflow.flow import StepsOperator
from flux.dataflow.plan import DataFrameSourcePlan, EdgePlan, FromSource, FromStage, Timed
from flux.dataflow.plan_change import PlanChange
from flux.dataflow.source import DataFrameSource, StreamSource
from flux.errors import FluxError, SchemaError, UsageError
from flux.expressions.tree import Column, FunctionCall, Literal
from flux.settings import Settings
from tests.flux.resolved import to_steps

LONG, TIME = pa.int64(), pa.timestamp("us", "UTC")
ROWS = pa.schema([("k", LONG), ("x", LONG), ("at", TIME), ("more", pa.string())])
X, K = Column("x", LONG), Column("k", LONG)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


class Reads(flux.SourceReader):
    schema, partitions, endless = ROWS, 3, True

    def read(self, partition: int, start: Any = None) -> Iterator[pa.RecordBatch]:
        return iter(())


class Shown(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: Any) -> None: ...


@flux.stage(key="k", partitions=4, replicas=2, output_mode="update")
class Totals(flux.Aggregate):
    total = flux.sum("x")


@flux.stage(key="k", window=flux.window("at", "10 seconds"))
class PerWindow(flux.Aggregate):
    n = flux.count()


@flux.stage(key="k", window=flux.window("window_end", "30 seconds"))
class PerLonger(flux.Aggregate):
    n = flux.sum("n")


@flux.stage(name="Alarm", partitions=2, replicas=2)
def alarm(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def source(name: str = "flights") -> Any:
    return flux.source(Reads(), name=name)


def started(*flows: Any, **settings: Any) -> CompiledPlan:
    resolvers = Resolvers(lambda schema: schema, to_steps)
    return compiled_plan(flows, Settings.of(None, **settings), resolvers, "q", b"secret")


def added(running: CompiledPlan, *flows: Any) -> PlanAddition:
    addition = compiled_addition(flows, running, Resolvers(lambda schema: schema, to_steps))
    check_addition(addition)
    return addition


def refusal(running: CompiledPlan, *flows: Any) -> str:
    with pytest.raises(FluxError) as raised:
        added(running, *flows)
    return str(raised.value)


def stage(running: CompiledPlan, name: str) -> Any:
    return running.stage(name, lambda: running)


def origin(running: CompiledPlan, name: str = "flights") -> Any:
    return running.source(name, lambda: running)


def edge_to(addition: PlanAddition, name: str) -> EdgePlan:
    (number,) = next(each.edges_in for each in addition.change.stages if each.name == name)
    return addition.made.plan.edges[number]


def test_a_stage_goes_behind_a_running_one_which_stays_as_it_is() -> None:
    running = started(Totals(source()).to(Shown()))
    addition = added(running, alarm(stage(running, "Totals")).to(Shown()))
    before, after = running.plan, addition.made.plan
    (new,) = addition.change.stages
    edge = edge_to(addition, "Alarm")
    assert (new.id, new.name, new.partitions, new.replicas) == (1, "Alarm", 2, 2)
    assert isinstance(edge, FromStage)
    assert (edge.id, edge.stage, edge.consumer, edge.producers) == (1, 0, 1, 4)
    assert after.version == 1
    assert after.stages[0] == replace(before.stages[0], edges_out=(1,), first_edges=())
    assert (after.sources, list(after.edges)[:1]) == (before.sources, list(before.edges))
    assert pickle.loads(pickle.dumps(addition.change.edges)) == addition.change.edges


def test_a_sink_behind_a_running_stage_is_a_stage_that_passes_rows_on() -> None:
    running = started(Totals(source()).to(Shown()))
    (passing,) = added(running, stage(running, "Totals").to(Shown())).change.stages
    assert (passing.name, passing.partitions, passing.replicas) == ("Totals.sink", 4, 2)
    assert passing.output_schema == running.plan.stages[0].output_schema
    # Also where the stage has nothing behind it until now.
    quiet = started(Totals(source()))
    (passing,) = added(quiet, stage(quiet, "Totals").to(Shown())).change.stages
    assert passing.name == "Totals.sink"


def test_a_second_sink_of_a_kind_has_a_name_of_its_own(tmp_path: Path) -> None:
    running = started(Totals(source()).to_parquet(tmp_path / "a"))
    assert [each.name for each in running.plan.stages] == ["Totals", "Totals.files"]
    change = added(running, stage(running, "Totals").to_parquet(tmp_path / "b")).change
    assert [each.name for each in change.stages] == ["Totals.files#2"]


def test_stages_that_flux_has_made_for_sinks_are_removed_with_their_stage(tmp_path: Path) -> None:
    running = started(Totals(source()).to(Shown()))
    alarms = alarm(stage(running, "Totals"))
    running = added(running, alarms.to_parquet(tmp_path), alarms.to(Shown())).made
    assert [each.name for each in running.plan.stages] == ["Totals", "Alarm", "Alarm.files", "Alarm.sink"]
    assert removal(running.plan, 2, "Alarm", cascade=False).removed_stages == (1, 2, 3)
    later = alarm(stage(running, "Alarm")).withStage(name="Later")
    running = added(running, later.to_parquet(tmp_path / "later")).made
    with pytest.raises(UsageError, match=r"cannot remove Alarm: Later, Later\.files depend on it"):
        removal(running.plan, 3, "Alarm", cascade=False)
    assert removal(running.plan, 3, "Later", cascade=False).removed_stages == (4, 5)


def test_conditions_and_columns_behind_a_running_stage_are_no_operator_of_it() -> None:
    running = started(Totals(source()).to(Shown()))
    big = stage(running, "Totals").where(FunctionCall("greater", (Column("total", LONG), Literal(9, LONG)), pa.bool_()))
    (rows,) = added(running, big.to(Shown())).change.stages
    assert rows.name == "Totals.rows"
    assert not isinstance(rows.make(), StepsOperator)
    assert added(running, alarm(big).to(Shown())).change.edges[0].steps is not None


def test_a_running_source_feeds_more_stages_and_is_not_read_twice() -> None:
    flights = source()
    running = started(Totals(flights).to(Shown()))
    for second in (origin(running), flights):  # also by the very object that the program has
        addition = added(running, alarm(second).to(Shown()))
        edge = edge_to(addition, "Alarm")
        assert not addition.change.sources
        assert isinstance(edge, FromSource)
        assert (edge.source, edge.timed, edge.states) == (0, Timed.ALL, False)


def test_explain_tells_the_version_of_the_plan_and_of_each_added_part() -> None:
    running = started(Totals(source()).to(Shown()))
    lines = explain(added(running, alarm(source("planes")).to(Shown())).made.plan).splitlines()
    assert lines[0] == "Flux plan, version 1: 2 sources, 2 stages"
    assert "source planes (since version 1)" in lines
    assert "stage Alarm (since version 1): function" in lines
    assert any(line.startswith("stage Totals: aggregate") for line in lines)
    assert explain(running.plan).splitlines()[0] == "Flux plan: 1 source, 1 stage"


def test_a_join_takes_running_and_new_inputs_in_one_addition() -> None:
    @flux.stage(name="Both", partitions=2)
    class Both(flux.Operator):
        schema = ROWS

        def process(self, batch: pa.RecordBatch) -> Any:
            return batch

    running = started(Totals(source()).to(Shown()))
    both = Both(stage(running, "Totals"), source("planes"), origin(running))
    addition = added(running, both.to(Shown()), alarm(both).to(Shown()))
    assert [each.name for each in addition.change.sources] == ["planes"]
    assert [each.name for each in addition.change.stages] == ["Both", "Alarm", "Both.sink"]
    assert [each.id for each in addition.change.edges] == [1, 2, 3, 4, 5]
    assert [type(each).__name__ for each in addition.change.edges] == ["FromStage", "FromSource", "FromSource"] + [
        "FromStage"
    ] * 2
    union = added(running, alarm(stage(running, "Totals").union(stage(running, "Totals"))).to(Shown()))
    assert [each.name for each in union.change.stages] == ["union", "Alarm"]


def test_watermarks_go_on_behind_a_running_stage_that_keeps_a_time() -> None:
    timed = source().withWatermark("at", "5 seconds")
    running = started(PerWindow(timed).to(Shown()))
    addition = added(running, PerLonger(stage(running, "PerWindow")).to(Shown()))
    edge = edge_to(addition, "PerLonger")
    assert edge.states
    assert edge.quantum == 30_000_000
    assert addition.change.stages[0].timed_inputs == (0,)
    # The steps at which running streams tell their watermarks stay as they are.
    assert addition.made.plan.edges[0] == running.plan.edges[0]


def test_a_running_source_with_a_watermark_gives_rows_on_time_or_late_ones() -> None:
    timed = source().withWatermark("at", "5 seconds")
    running = started(PerWindow(timed).to(Shown()))
    again = flux.stage(key="k", name="Again", window=flux.window("at", "1 minute"))
    again = again(type("Again", (flux.Aggregate,), {"n": flux.count()}))
    for on_time in (origin(running), timed):
        addition = added(running, again(on_time).to(Shown()))
        edge = edge_to(addition, "Again")
        assert isinstance(edge, FromSource)
        assert (edge.timed, edge.states, edge.quantum) == (Timed.ON_TIME, True, 60_000_000)
        assert [each.name for each in edge.schema] == ["k", "at"]
    late = added(running, alarm(origin(running).late).to(Shown()))
    assert edge_to(late, "Alarm").timed is Timed.LATE  # type: ignore[attr-defined]


def test_an_added_stage_may_look_at_any_column_of_a_source_with_a_watermark() -> None:
    running = started(PerWindow(source().withWatermark("at", "5 seconds")).to(Shown()))
    sums = flux.stage(key="more", name="Sums", output_mode="update")(
        type("Sums", (flux.Aggregate,), {"x": flux.sum("x")})
    )
    addition = added(running, sums(origin(running)).to(Shown()))
    assert edge_to(addition, "Sums").columns == (1, 3)
    assert addition.made.plan.sources[0].event_time == running.plan.sources[0].event_time


def test_columns_that_are_computed_before_a_watermark_are_those_that_were_wanted_at_the_start() -> None:
    both = source().select(("k", K), ("x", X), ("at", Column("at", TIME)), ("more", Column("more", pa.string())))
    running = started(PerWindow(both.withWatermark("at", "5 seconds")).to(Shown()))
    said = refusal(running, Totals(origin(running)).withStage(name="T").to(Shown()))
    assert "'x'" in said
    assert "k int64, at timestamp" in said or "k, at" in said


def test_a_dataframe_is_read_by_a_job_of_its_own_each_time() -> None:
    frame = DataFrameSource("DataFrame", ROWS)
    running = started(Totals(frame).to(Shown()))
    (new,) = added(running, alarm(frame).to(Shown())).change.sources
    assert isinstance(new, DataFrameSourcePlan)
    assert (new.id, new.name) == (1, "DataFrame#2")
    with pytest.raises(UsageError, match="a Spark job of its own reads it"):
        origin(running, "DataFrame")


def test_micro_batches_cannot_be_had_from_the_middle() -> None:
    stream = StreamSource("clicks", ROWS)
    running = started(Totals(stream).to(Shown()))
    with pytest.raises(UsageError, match="micro-batches"):
        origin(running, "clicks")
    assert "a source of that name runs" in refusal(running, alarm(stream).to(Shown()))


def test_ids_are_never_used_again() -> None:
    running = started(Totals(source()).to(Shown()))
    first = added(
        running, alarm(stage(running, "Totals")).to(Shown()), alarm(source("new")).withStage(name="B").to(Shown())
    )
    assert [each.id for each in first.change.stages] == [1, 2]
    gone = PlanChange(2, removed_sources=(1,), removed_stages=(1, 2), removed_edges=(1, 2)).applied_to(first.made.plan)
    left = first.made.with_plan(gone)
    assert list(left.flows) == [0]
    again = added(left, alarm(source("newer")).to(Shown()))
    assert (again.change.sources[0].id, again.change.stages[0].id, again.change.edges[0].id) == (2, 3, 3)
    assert again.made.plan.version == 3
    # The name of a removed stage is free again, but its handle is not valid any more.
    assert again.change.stages[0].name == "Alarm"
    handle = first.made.stage("Alarm", lambda: left)
    assert "has been removed" in refusal(left, Totals(handle).withStage(name="T").to(Shown()))


def test_shares_of_log_are_given_at_birth_and_old_ones_stay() -> None:
    running = started(Totals(source()).to(Shown()), log_max_bytes="16m")
    before = [running.plan.log_share(edge, 3) for edge in running.plan.edges]
    addition = added(running, alarm(stage(running, "Totals")).to(Shown())).with_log_shares(3)
    plan = addition.made.plan
    assert [plan.log_share(edge, 3) for edge in plan.edges][:1] == before
    assert edge_to(addition, "Alarm").log_bytes == (3 * 16 << 20) // 64 // 8
    small = started(Totals(source()).to(Shown()), log_max_bytes="1m", batch_max_bytes="64k", message_max_bytes="256k")
    wide = flux.stage(name="Wide", partitions=64)(lambda batch: batch)
    many = added(
        small,
        *(
            wide(alarm(origin(small)).withStage(name=f"A{n}", partitions=64)).withStage(name=f"W{n}").to(Shown())
            for n in range(2)
        ),
    )
    with pytest.raises(UsageError, match="of log each, and"):
        many.with_log_shares(1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda running: alarm(stage(running, "Totals")), "that nothing takes"),
        (lambda running: Totals(source("new")).to(Shown()), "a stage of that name runs"),
        (lambda running: alarm(source()).to(Shown()), "a source of that name runs"),
        (lambda running: alarm(stage(running, "Totals")).withStage(name="Totals").to(Shown()), "of that name runs"),
        (lambda running: alarm(source("new")).withStage(name="flights").to(Shown()), "a source of that name runs"),
        (lambda running: alarm(source("Totals")).to(Shown()), "a stage of that name runs"),
        (lambda running: alarm(source("new")).withStage(name="two\nlines").to(Shown()), "expected printable text"),
        (lambda running: flux.stage(key="nope")(lambda b: b)(stage(running, "Totals")).to(Shown()), "'nope'"),
        (lambda running: alarm(source("b").withWatermark("x", "1 second")).to(Shown()), "event time needs a TIMESTAMP"),
        (lambda running: alarm(origin(running).withWatermark("at", "1 second")).to(Shown()), "has none: declare it"),
        (lambda running: Totals(stage(running, "Totals")).withStage(name="T").to(Shown()), "counted again"),
        (lambda running: alarm(origin(running)).withStage(availability="3s").to(Shown()), "asks for availability"),
        (lambda running: PerWindow(origin(running)).to(Shown()), "has no watermark and may never end"),
    ],
)  # fmt: skip
def test_an_addition_that_does_not_fit_is_refused(make: Any, said: str) -> None:
    running = started(Totals(source()).to(Shown()))
    before = pickle.dumps((running.plan.sources, running.plan.edges))
    with pytest.raises(FluxError) as raised:
        added(running, make(running))
    assert said in str(raised.value)
    assert pickle.dumps((running.plan.sources, running.plan.edges)) == before


def test_the_advice_for_a_source_that_runs_is_not_refused_itself() -> None:
    running = started(Totals(source()).to(Shown()))
    assert "query.source('flights')" in refusal(running, alarm(source()).to(Shown()))
    (edge,) = [each for each in added(running, alarm(origin(running)).to(Shown())).change.edges if not each.from_stage]
    assert edge.source == 0


def test_a_cycle_and_a_flow_of_another_query_are_refused() -> None:
    running = started(Totals(source()).to(Shown()))
    first = alarm(stage(running, "Totals"))
    second = flux.stage(name="Second")(lambda batch: batch)(first)
    first.connect(second)
    assert "has a cycle" in refusal(running, second.to(Shown()))
    other = compiled_plan([alarm(source()).to(Shown())], Settings.of(), Resolvers(lambda s: s), "other", b"")
    assert "parts of one query" in refusal(running, Totals(stage(other, "Alarm")).withStage(name="T").to(Shown()))
    with pytest.raises(UsageError, match=r"query.add\(flow\)"):
        started(alarm(stage(running, "Totals")).to(Shown()))


def test_nothing_begins_behind_replicas_without_an_order() -> None:
    sums = flux.stage(key="k", name="Sums", replicas=2, order="marks", window=flux.window("at", "10 seconds"))
    sums = sums(type("Sums", (flux.Aggregate,), {"n": flux.count()}))
    running = started(sums(source().withWatermark("at", "5 seconds")).to(Shown()))
    assert "no common order of steps" in refusal(running, alarm(stage(running, "Sums")).to(Shown()))


def test_a_handle_cannot_be_changed_and_names_what_is_there() -> None:
    running = started(Totals(source()).to(Shown()))
    handle = stage(running, "Totals")
    with pytest.raises(UsageError, match="stage Totals runs"):
        handle.withStage(partitions=2)
    with pytest.raises(UsageError, match="stage Totals runs"):
        handle.connect(source("b"))
    with pytest.raises(UsageError, match="no stage 'Total'; there is Totals"):
        stage(running, "Total")
    assert repr(handle) == "query['Totals']"


def test_availability_of_the_query_does_not_reach_what_is_added_behind_running_stages() -> None:
    timed = source().withWatermark("at", "5 seconds")
    running = started(PerWindow(timed).to(Shown()), availability="1m")
    assert running.plan.stages[0].availability is not None
    (longer,) = added(running, PerLonger(stage(running, "PerWindow")).to(Shown())).change.stages
    assert longer.availability is None
    fresh = flux.stage(key="k", name="Fresh", window=flux.window("at", "10 seconds"))(
        type("Fresh", (flux.Aggregate,), {"n": flux.count()})
    )
    new = added(running, fresh(source("new").withWatermark("at", "5 seconds")).to(Shown()))
    assert new.change.stages[0].availability is not None
    assert new.change.sources[0].may_be_silent


def test_schema_errors_are_errors_of_the_user() -> None:
    running = started(Totals(source()).to(Shown()))
    with pytest.raises(SchemaError, match="stage Windows"):
        added(
            running,
            flux.stage(key="z", name="Windows")(type("W", (flux.Aggregate,), {"n": flux.count()}))(origin(running)).to(
                Shown()
            ),
        )
