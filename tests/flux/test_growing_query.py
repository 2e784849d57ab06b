"""``query.add`` without Spark: the checks in the program, and its requests to the controller."""

from __future__ import annotations

import builtins
import importlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.course.plan_requests import FailedStage, PlanHasChanged
from controller.course.removals import removal
from controller.planning.checks import check_failures_of_stages
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.compiler import compiled_plan
from controller.planning.steps import Resolvers
from flux.dataflow.plan import ById, Plan
from flux.dataflow.plan_change import PlanChange, decode_change
from flux.dataflow.source import DataFrameSource, StreamSource
from flux.errors import QueryFailed, QueryTimeout, UsageError
from flux.expressions.steps import MapRows, RowSteps
from flux.joins.lookup import LookupTable
from flux.settings import Settings
from spark_integration.growing import added_flows
from spark_integration.growing.additions import GrowingQuery, flows_of
from spark_integration.growing.running_plan import RunningPlan
from spark_integration.query.output import OpenIterators
from spark_integration.settings import OtherQueries

SECRET = b"secret"
ROWS = pa.schema([("k", pa.int64()), ("x", pa.int64())])


@flux.stage(key="k", partitions=4, replicas=2, output_mode="update")
class Totals(flux.Aggregate):
    total = flux.sum("x")


@flux.stage(name="Alarm", partitions=2)
def alarm(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Shown(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: Any) -> None: ...


class Prepared(Shown):
    """A sink of which the stage has a copy."""

    def prepare(self, partitions: int, kept: Any) -> None: ...


def ticks(partition: int) -> Iterator[pa.RecordBatch]:
    return iter(())


def flights(name: str = "flights") -> Any:
    return flux.source(ticks, ROWS, 2, name)


class StubServer:
    """The controller's part: it takes changes, or raises the next of ``errors``."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.failed: dict[str, FailedStage] = {}
        plans = SimpleNamespace(failed=self.failed, newest=self.newest)
        self.core = SimpleNamespace(places=SimpleNamespace(wanted=3), plans=plans)
        self.started = threading.Event()
        self.started.set()
        self.asked: list[tuple[PlanChange, bytes]] = []
        self.errors: list[Exception] = []
        self.over = False

    def add(self, change: PlanChange, encoded: bytes, timeout: float) -> Plan:
        if self.errors:
            raise self.errors.pop(0)
        self.asked.append((change, encoded))
        self.plan = change.applied_to(self.plan)
        return self.plan

    def newest(self) -> tuple[Plan, int]:
        if self.over:
            raise UsageError("cannot add to the query: it has ended")
        return self.plan, self.plan.version + 1

    def look(self, at: Any) -> Any:
        return at()

    def fail(self, name: str) -> None:
        """Take a stage out of the plan, and all that depends on it."""
        before = self.plan
        self.remove(name, True, 1.0)
        for stage in before.stages:
            if stage.id not in self.plan.stages:
                self.failed[stage.name] = FailedStage(stage.name, stage.id, 0.0, name, "boom")

    def remove(self, name: str, cascade: bool, timeout: float) -> Plan:
        self.plan = removal(self.plan, self.plan.version + 1, name, cascade).applied_to(self.plan)
        return self.plan


class Growing(GrowingQuery):
    """A query without anything that runs."""

    def __init__(self, compiled: CompiledPlan) -> None:
        super().__init__()
        self.stub = StubServer(compiled.plan)
        self._server = self.stub  # type: ignore[assignment]
        self._running = RunningPlan(compiled, lambda: self.stub.plan)
        configuration = SimpleNamespace(get=lambda key, default=None: default)
        self._spark = SimpleNamespace(  # type: ignore[assignment]
            conf=configuration, sparkContext=SimpleNamespace(_conf=configuration, master="spark://host:7077")
        )
        self.grown: list[Any] = []
        need = SimpleNamespace(workers=3)
        self._run = SimpleNamespace(need=need, grow=self._grow, shrink=self._shrink, keeper=None)  # type: ignore[assignment]

    def _grow(self, compiled: CompiledPlan, added: Any) -> None:
        self._running.take(compiled)
        self.grown.append(sorted(source.name for source in added.values()))

    def _shrink(self) -> None:
        self._running.take(self._running.compiled)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)
    monkeypatch.setattr(added_flows, "live_slots", lambda spark: 4)
    monkeypatch.setattr(added_flows.running_queries, "others", lambda than=None: OtherQueries({"q": 3}))
    monkeypatch.setattr(added_flows, "resolvers", lambda spark, tables: Resolvers(lambda schema: schema))


def started(*flows: Any, **settings: Any) -> Growing:
    resolvers = Resolvers(lambda schema: schema)
    return Growing(compiled_plan(flows, Settings.of(None, **settings), resolvers, "q", SECRET))


def test_an_addition_is_given_to_the_controller_and_then_is_the_plan() -> None:
    query = started(Totals(flights()).to(Shown()))
    query.add(alarm(query["Totals"]).to(Shown()), Totals(flights("more")).withStage(name="More").to(Shown()))
    ((change, encoded),) = query.stub.asked
    assert [stage.name for stage in change.stages] == ["Alarm", "More"]
    assert [stage.name for stage in decode_change(encoded, SECRET).stages] == ["Alarm", "More"]
    assert all(edge.log_bytes for edge in change.edges)
    assert query.grown == [["more"]]
    query.add(query["Alarm"].to(Shown()), alarm(query["More"]).withStage(name="B").to(Shown()))
    assert [stage.name for stage in query._plan.stages] == ["Totals", "Alarm", "More", "B", "Alarm.sink"]
    assert query._plan.version == 2


@pytest.mark.parametrize(
    "error", [UsageError("worker 2 cannot take it"), QueryTimeout("late"), QueryFailed("it failed")]
)
def test_nothing_is_left_of_an_addition_that_is_refused(error: Exception) -> None:
    query = started(Totals(flights()).to(Shown()))
    before, query.stub.errors = query._plan, [error]
    with pytest.raises(type(error), match=str(error)):
        query.add(alarm(query["Totals"]).to(Shown()))
    assert query._plan is before
    assert query.grown == []
    with pytest.raises(UsageError, match="no stage 'Alarm'"):
        query["Alarm"]
    query.add(alarm(query["Totals"]).to(Shown()))
    assert query._plan.stages[1].name == "Alarm"


def test_an_addition_is_compiled_again_if_the_plan_has_changed_meanwhile() -> None:
    query = started(Totals(flights()).to(Shown()))
    query.stub.errors = [PlanHasChanged("no"), PlanHasChanged("no")]
    query.add(alarm(query["Totals"]).to(Shown()))
    assert [stage.name for stage in query._plan.stages] == ["Totals", "Alarm"]
    query.stub.errors = [PlanHasChanged(f"no {number}") for number in range(1000)]
    with pytest.raises((UsageError, QueryTimeout), match=r"no |is over"):  # it ends between two checks, or in one
        query.add(alarm(query["Totals"]).withStage(name="B").to(Shown()), timeout=0.1)


def test_a_stage_is_removed_and_its_name_is_free_again() -> None:
    query = started(Totals(flights()).to(Shown()))
    query.add(alarm(query["Totals"]).to(Shown()))
    query.add(alarm(query["Alarm"]).withStage(name="Second").to(Shown()))
    with pytest.raises(UsageError, match=r"Second"):
        query.remove("Alarm")
    query.remove("Alarm", cascade=True)
    assert [stage.name for stage in query._plan.stages] == ["Totals"]
    query.add(alarm(query["Totals"]).to(Shown()))
    assert query._plan.stages[3].name == "Alarm"
    with pytest.raises(UsageError, match="takes the name of a stage, got int"):
        query.remove(3)  # type: ignore[arg-type]


def test_of_two_additions_of_one_name_at_once_one_is_refused() -> None:
    query = started(Totals(flights()).to(Shown()))
    ready, refused = threading.Barrier(2), []

    def add() -> None:
        flow = alarm(query["Totals"]).to(Shown())
        ready.wait(10)
        try:
            query.add(flow)
        except UsageError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=add) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert len(refused) == 1
    assert "a stage of that name runs" in refused[0]
    assert len(query.stub.asked) == 1


def test_the_same_call_for_a_second_time_says_what_is_there() -> None:
    query = started(Totals(flights()).to(Shown()))
    flow = alarm(query["Totals"]).to(Shown())
    query.add(flow)
    with pytest.raises(UsageError, match="is that of stage Alarm already, so the output would be there twice"):
        query.add(flow)
    handle = query["Totals"].to(Prepared())
    query.add(handle)
    with pytest.raises(UsageError, match=r"is that of stage Totals\.sink already"):
        query.add(handle)
    query.remove("Totals.sink")
    query.remove("Alarm")
    with pytest.raises(UsageError, match="cannot remove Alarm: there is no such stage"):
        query.remove("Alarm")
    query.add(flow)
    assert [stage.name for stage in query._plan.stages] == ["Totals", "Alarm"]


def test_parts_that_were_removed_from_outside_are_not_there_any_more() -> None:
    query = started(Totals(flights()).to(Shown()))
    query.add(alarm(query["Totals"]).to(Shown()))
    gone = PlanChange(2, removed_stages=(1,), removed_edges=(1,))
    query.stub.plan = gone.applied_to(query.stub.plan)
    assert [stage.name for stage in query._plan.stages] == ["Totals"]
    assert query._plan.stages[0].edges_out == ()
    with pytest.raises(UsageError, match="no stage 'Alarm'"):
        query["Alarm"]
    query.add(alarm(query["Totals"]).to(Shown()))
    assert (query._plan.version, query._plan.stages[2].name) == (3, "Alarm")


def circle(query: Growing) -> Any:
    first = alarm(query["Totals"])
    second = flux.stage(name="Second", partitions=1)(lambda batch: batch)(first)
    first.connect(second)
    return second.to(Shown())


def of_another_query(query: Growing) -> Any:
    other = Growing(
        compiled_plan([Totals(flights()).to(Shown())], Settings.of(), Resolvers(lambda s: s), "other", SECRET)
    )
    return alarm(other["Totals"]).to(Shown())


def of_a_removed_stage(query: Growing) -> Any:
    query.add(alarm(query["Totals"]).to(Shown()))
    handle = query["Alarm"]
    query.remove("Alarm")
    query.stub.asked.clear()
    return alarm(handle).withStage(name="Behind").to(Shown())


def of_a_dataframe_that_is_read(query: Growing) -> Any:
    query.add(alarm(DataFrameSource("DataFrame", ROWS)).to(Shown()))
    query.stub.asked.clear()
    return alarm(query.source("DataFrame")).withStage(name="Behind").to(Shown())


def wide(query: Growing) -> Any:
    """Add four edges of 4096 streams each: the 256 MB of log of each of three workers are less than 64 KB a stream."""
    first = alarm(query["Totals"]).withStage(partitions=4096, name="First")
    return tuple(alarm(first).withStage(name=f"Last{number}").to(Shown()) for number in range(4))


def unpicklable(query: Growing) -> Any:
    lock = threading.Lock()
    return flux.stage(name="Locked")(lambda batch: (lock, batch)[1])(query["Totals"]).to(Shown())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda query: None, "expected a flow"),
        (lambda query: alarm(query["Totals"]), r"nothing takes: .* or to_readers\(\)\. toDF\(\) and keep_output are for flows"),
        (lambda query: Totals(flights("other")).to(Shown()), "a stage of that name runs"),
        (lambda query: query["Totals"], "nothing takes|nothing is added"),
        (lambda query: flux.stage(key="nope", name="K")(lambda b: b)(query["Totals"]).to(Shown()), "'nope'"),
        (lambda query: Totals(alarm(query["Totals"])).withStage(name="Again").to(Shown()), "counted again"),
        (circle, "has a cycle"),
        (of_another_query, r"is of query other, .* parts of one query"),
        (of_a_removed_stage, "Alarm has been removed from the query"),
        (of_a_dataframe_that_is_read, "give the stage the DataFrame itself, and a Spark job of its own reads it"),
        (wide, r"of log each, and .* left: remove other stages, use fewer partitions, or start the query with a larger"),
        (unpicklable, "stage Locked cannot be sent to the executors"),
        (lambda query: alarm(StreamSource("clicks", ROWS)).to(Shown()), "source clicks is micro-batches"),
        (lambda query: alarm(query["Totals"]).withStage(replicas=3, name="T").union(alarm(query["Totals"])).to(Shown()), ""),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_the_controller_hears_of_them(make: Any, said: str) -> None:
    query = started(Totals(flights()).to(Shown()))
    if not said:
        query.stub.core.places.wanted = 2
        said = "stage T wants replicas=3"

    def add() -> None:
        flows = make(query)
        query.add(*flows if isinstance(flows, tuple) else (flows,))

    with pytest.raises(flux.FluxError, match=said):
        add()
    assert query.stub.asked == []


def test_a_dataframe_needs_a_task_slot_for_the_job_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    query = started(Totals(flights()).to(Shown()))
    query.add(alarm(DataFrameSource("DataFrame", ROWS)).to(Shown()))
    assert query.grown == [["DataFrame"]]
    monkeypatch.setattr(added_flows, "live_slots", lambda spark: 3)
    with pytest.raises(UsageError, match="no task slot is free for it: 3 exist, and workers hold 3"):
        query.add(Totals(DataFrameSource("DataFrame", ROWS)).withStage(name="More").to(Shown()))


def test_nothing_is_asked_for_without_flows() -> None:
    with pytest.raises(UsageError, match="takes flows, as in"):
        started(Totals(flights()).to(Shown())).add()


def test_no_operator_is_made_for_a_query_that_has_ended() -> None:
    made: list[int] = []

    @flux.stage(key="k", partitions=2)
    class Slow(flux.Operator):
        schema = ROWS

        def __init__(self) -> None:
            made.append(1)

        def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            return batch

    query = started(Totals(flights()).to(Shown()))
    flow = Slow(query["Totals"]).to(Shown())
    made.clear()
    query.stub.over = True
    with pytest.raises(UsageError, match="it has ended"):
        query.add(flow)
    assert not made
    query.stub.over = False
    query.add(flow)
    assert made, "an addition makes its operators once, as a check"


def test_one_change_waits_for_another_no_longer_than_its_limit() -> None:
    query = started(Totals(flights()).to(Shown()))
    with query._one_at_a_time, pytest.raises(QueryTimeout, match=r"after 0.01 s another change"):
        query.add(alarm(query["Totals"]).to(Shown()), timeout=0.01)


def late_flows(query: Growing) -> Any:
    return [alarm(query["Totals"]).to(Shown())]


nothing = 3


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module:flow", "No module named 'no_such_module'"),
        (f"{__name__}:flow", "has no attribute 'flow'"),
        (f"{__name__}:nothing", "is no flow: .* got int"),
        (f"{__name__}:alarm", "is no flow: .* got Stage"),
        (f"{__name__}:started", "cannot be had in the program"),
        (__name__, "expected MODULE:FLOW"),
    ],
)
def test_a_flow_of_a_module_is_found_or_the_reason_is_told(target: str, said: str) -> None:
    query = started(Totals(flights()).to(Shown()))
    query._add_named(f"{__name__}:late_flows")  # as the controller calls it for `flux add`
    assert query._plan.stages[1].name == "Alarm"
    with pytest.raises(UsageError, match=said):
        flows_of(target, query)


def test_a_refused_addition_leaves_no_new_folder(tmp_path: Path) -> None:
    query = started(Totals(flights()).to(Shown()))
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        query.stub.errors = [UsageError("worker 1 cannot take it")]
        with pytest.raises(UsageError, match="worker 1 cannot take it"):
            query.add(alarm(query["Totals"]).to_parquet(str(tmp_path / name)))
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "a folder that was there may be another writer's"
    query.add(alarm(query["Totals"]).to_parquet(str(tmp_path / "new")))
    assert (tmp_path / "new").is_dir()


MODULE = """
import flux
import pyarrow as pa

class Limit(flux.Operator):
    schema = pa.schema([("k", pa.int64()), ("x", pa.int64())])
    def process(self, batch):
        return batch.slice(0, 1)

def limit(query):
    return flux.stage(name="{name}", key="k", partitions=2)(Limit)(query["Totals"]).to(SINK)
"""


@pytest.mark.parametrize("by_name", [True, False])
def test_an_addition_from_a_file_that_has_changed_is_refused(
    by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"limits_{by_name}"
    file = tmp_path / f"{module}.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    file.write_text(MODULE.format(name="First"))
    query = started(Totals(flights()).to(Shown()))

    def add() -> None:
        if by_name:
            query._add_named(f"{module}:limit")
        else:
            query.add(importlib.import_module(module).limit(query))

    monkeypatch.setattr(builtins, "SINK", Shown(), raising=False)
    add()
    query.remove("First")
    file.touch()
    add()
    query.remove("First")
    file.write_text(MODULE.format(name="Second"))
    with pytest.raises(UsageError, match=rf"{module}\.py has changed since module {module} was imported"):
        add()
    assert "First" not in [stage.name for stage in query._plan.stages]
    file.write_text(MODULE.format(name="First"))
    add()


def test_a_failed_stage_begins_anew_with_the_stages_that_depended_on_it() -> None:
    query = started(Totals(flights()).to(Shown()), alarm(flights("b")).withStage(name="Other").to(Shown()))
    query.add(alarm(query["Totals"]).to(Shown()))
    query.add(alarm(query["Alarm"]).withStage(name="Page").to(Shown()), query["Alarm"].to(Shown()))
    query.add(alarm(query["Alarm"]).withStage(name="Gone").to(Shown()))
    query.remove("Gone")
    query.stub.fail("Alarm")
    with pytest.raises(UsageError, match="stage Page depends on Alarm, which has failed: restart Alarm"):
        query.restart("Page")
    with pytest.raises(UsageError, match=r"stage 'Totals' has not failed; failed: Alarm, Page, Alarm.sink"):
        query.restart("Totals")
    query.restart("Alarm")
    plan = query._plan
    sinks = [stage.name for stage in plan.stages if stage.sink is not None]
    assert sorted(sinks) == ["Alarm.sink", "Alarm.sink#2", "Other", "Page", "Totals"], "not the one that was removed"
    of = {stage.name: stage for stage in plan.stages}
    assert [plan.origin(plan.edges[of[name].edges_in[0]]).name for name in ("Alarm", "Page")] == ["Totals", "Alarm"]
    assert [edge.since for edge in plan.edges if edge.consumer in (of["Alarm"].id, of["Page"].id)] == [plan.version] * 2
    query.stub.failed.clear()
    with pytest.raises(UsageError, match="stage 'Alarm' has not failed; none has failed"):
        query.restart("Alarm")


def test_names_of_stages_are_texts() -> None:
    query = started(Totals(flights()).to(Shown()))
    for name in (["Totals"], {}, None, 1):
        for call, what in ((query.restart, "restart"), (query.remove, "remove"), (query.failure_of, "failure_of")):
            with pytest.raises(UsageError, match=f"{what} takes the name of a stage.*, got {type(name).__name__}"):
                call(name)  # type: ignore[operator]


def test_a_failed_stage_of_the_start_begins_anew_too_once_it_is_gone() -> None:
    given = [Totals(flights()).to(Shown()), alarm(flights("b")).withStage(name="Other").to(Shown())]
    query = started(*given)
    query._ends.take(given, query._running.compiled)
    query.stub.failed["Other"] = FailedStage("Other", 1, 0.0, "Other", "boom")
    with pytest.raises(QueryTimeout, match=r"after 0.05 s Other, which has failed, is still being removed"):
        query.restart("Other", timeout=0.05)
    query.stub.fail("Other")
    query.restart("Other")
    assert [(stage.id, stage.name) for stage in query._plan.stages] == [(0, "Totals"), (2, "Other")]
    assert query.grown == [["b"]], "its source is read anew"


class Settles(Shown):
    def prepare(self, partitions: int, kept: Any) -> Any:
        return {"partitions": partitions, "kept": kept}


def test_the_facts_of_an_addition_are_kept_with_its_version() -> None:
    query = started(Totals(flights()).to(Shown()))
    query._running.take(query._running.compiled.with_plan(replace(query._plan, durable=True)))
    settled: list[Any] = []
    query._run.keeper = SimpleNamespace(settle=settled.append)  # type: ignore[assignment]
    query.add(alarm(query["Totals"]).to(Settles()))
    assert settled == [{"sources": {}, "sinks": {"Alarm": {"partitions": 2, "kept": None}}}]


def looking_up(plan: Plan) -> Plan:
    """Have the rows of each edge look up a table."""
    table = LookupTable(pa.table({"k": [1], "name": ["a"]}), [0], ["k", "name", "found"], ["k"], "names")
    out = ROWS.append(pa.field("name", pa.string()))
    steps = RowSteps.of(ROWS, [MapRows(table, ROWS, out)], out)
    return replace(plan, durable=True, edges=ById(replace(edge, steps=steps) for edge in plan.edges))


def test_tables_of_a_location_stay_those_of_the_start() -> None:
    plan = looking_up(started(Totals(flights()).to(Shown()), alarm(flights("b")).to(Shown()))._plan)
    with pytest.raises(UsageError, match=r"cannot remove Alarm: rows look up a table on their way to Alarm"):
        removal(plan, 1, "Alarm", False)
    assert removal(replace(plan, durable=False), 1, "Alarm", False).removed_stages == (1,)
    check_failures_of_stages(plan)
    failing = replace(plan, settings=replace(plan.settings, on_failure="stage"))
    with pytest.raises(UsageError, match="onFailure=stage, and rows look up a table on their way to Totals"):
        check_failures_of_stages(failing)


@flux.stage(name="Slow", partitions=2)
class SlowToMake(flux.Operator):
    schema = ROWS

    def __init__(self) -> None:
        time.sleep(0.02)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


def test_an_addition_whose_check_takes_all_its_time_is_asked_of_no_worker() -> None:
    query = started(Totals(flights()).to(Shown()))
    with pytest.raises(
        QueryTimeout,
        match=r"the addition of Slow is over: its check .* has taken \d+\.\d s\. Let the __init__ of Slow do less",
    ):
        query.add(SlowToMake(query["Totals"]).to(Shown()), timeout=0.01)
    assert query.stub.asked == []
    query.add(SlowToMake(query["Totals"]).to(Shown()))
    assert len(query.stub.asked) == 1


def test_rows_of_a_stage_that_has_failed_raise_its_error() -> None:
    query = started(Totals(flights()).to(Shown()), alarm(flights("others")).to_readers(), on_failure="stage")
    query.stub.fail("Alarm")
    seen = SimpleNamespace(plan=query.stub.plan, failure_of=query.failure_of, exception=lambda: None)
    with pytest.raises(QueryFailed, match="stage Alarm has failed: boom"):
        OpenIterators(seen).rows("Alarm")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="keeps no output for readers"):
        OpenIterators(seen).rows("Totals")  # type: ignore[arg-type]
