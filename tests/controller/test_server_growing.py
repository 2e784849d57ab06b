"""Stages that come and go in a query of real workers, asked for by other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from harness import LIMIT_S, ThreadQuery

import flux
from controller.course.plan_phases import PlanPhase
from controller.course.plan_requests import PlanRequest, VersionToKeep, WorkersAreMissing
from flux.dataflow.plan_change import PlanChange, encode_change
from flux.errors import QueryFailed, QueryTimeout, UsageError
from flux.shell.worker_loop import WorkerLoop
from tests.controller.growing import copy_of

SCHEMA = pa.schema([("x", pa.int64())])
#: By number of a stage: the rows that its partitions have seen. Workers are threads of this process.
SEEN: dict[int, list[int]] = {}
GO_ON = threading.Event()
#: By number of a stage: ``open`` waits for this.
SLOW: dict[int, threading.Event] = {}


def read(partition: int) -> Iterator[pa.RecordBatch | None]:
    number = 0
    while not GO_ON.is_set():
        yield pa.record_batch([pa.array([number], pa.int64())], SCHEMA)
        number += 1
        time.sleep(0.002)


@flux.stage(partitions=1, schema=SCHEMA)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(partitions=1)
class Kept(flux.Operator):
    def open(self, context: flux.Context) -> None:
        number = int(context.stage.removeprefix("Kept").removeprefix("Bad") or 0)
        if number in SLOW:
            SLOW[number].wait(LIMIT_S)
        self.seen = SEEN.setdefault(number, [])

    def process(self, batch: pa.RecordBatch) -> None:
        self.seen.extend(batch.column(0).to_pylist())


@pytest.fixture
def query() -> Iterator[ThreadQuery]:
    SEEN.clear()
    GO_ON.clear()
    flow = Kept(passed(flux.source(read, SCHEMA, 1, "numbers")))
    with ThreadQuery(flow, operate=False, replicas=1) as query:
        yield query.started()
        GO_ON.set()


def add(query: ThreadQuery, name: str, timeout: float = LIMIT_S) -> None:
    plan, version = query.server.look(query.server.core.plans.newest)
    change = replace(copy_of(plan, name, like="Kept", version=version), base=plan.version)
    query.server.add(change, encode_change(change, plan.secret), timeout)


def rows(number: int, at_least: int) -> list[int]:
    end = time.monotonic() + LIMIT_S
    while len(SEEN.get(number, ())) < at_least:
        assert time.monotonic() < end, {stage: len(seen) for stage, seen in SEEN.items()}
        time.sleep(0.005)
    return list(SEEN[number])


def test_a_stage_that_comes_gets_each_row_from_there_on_once_and_goes_again(query: ThreadQuery) -> None:
    rows(0, 5)
    add(query, "Kept1")
    seen = rows(1, 20)
    assert seen == list(range(seen[0], seen[0] + len(seen)))
    assert query.server.plan.version == 1
    query.server.remove("Kept1", cascade=False, timeout=LIMIT_S)
    assert [stage.name for stage in query.server.plan.stages] == ["passed", "Kept"]
    others = rows(0, len(SEEN[0]) + 20)
    assert others == list(range(len(others)))
    with pytest.raises(UsageError, match="cannot remove Kept1: there is no such stage"):
        query.server.remove("Kept1", cascade=False, timeout=LIMIT_S)


def test_an_addition_waits_for_workers_that_are_expected() -> None:
    SEEN.clear()
    GO_ON.clear()
    flow = Kept(passed(flux.source(read, SCHEMA, 1, "numbers")))
    with ThreadQuery(flow, operate=False, replicas=1, replicas_allow_same_executor=True) as query:
        try:
            server = query.started().server
            server.look(lambda: server.core.places.grow(3))
            change = copy_of(server.plan, "Kept1", like="Kept")
            change = replace(change, stages=(replace(change.stages[0], replicas=3),))
            encoded = encode_change(change, server.plan.secret)
            with pytest.raises(WorkersAreMissing, match=r"after 0\.2 s: .*replicas=3.* 2 of 3 workers are there"):
                server.add(change, encoded, 0.2)
            late = threading.Timer(
                0.2, lambda: query._run("worker 2", lambda: WorkerLoop(query.plan, query.rendezvous).run(2, 2, "here"))
            )
            late.start()
            assert server.add(change, encoded, LIMIT_S).version == 1
            late.join()
            assert server.look(lambda: {len(copies) for copies in server.core.table.stages[2]}) == {3}
            rows(1, 3)
        finally:
            GO_ON.set()


@pytest.mark.long
def test_an_added_stage_that_is_slow_to_open_costs_no_worker_and_no_row() -> None:
    SEEN.clear()
    GO_ON.clear()
    flow = Kept(passed(flux.source(read, SCHEMA, 1, "numbers")))
    with ThreadQuery(flow, operate=False, replicas=1, heartbeat_timeout="200ms") as query:
        query.started()
        rows(0, 5)
        SLOW[4] = threading.Event()
        threading.Timer(1.0, SLOW[4].set).start()
        began = time.monotonic()
        add(query, "Kept4")
        assert time.monotonic() - began > 0.9
        for number in (0, 4):
            seen = rows(number, len(SEEN[number]) + 20)
            assert seen == list(range(seen[0], seen[0] + len(seen)))
        assert not [event for event in query.server.core.repairs.history if event.kind == "loss"]
        GO_ON.set()


class Unloadable:
    """An operator whose code is not there, as of a module that workers do not have."""

    def __reduce__(self) -> object:
        return _not_there, ()


def _not_there() -> None:
    raise ModuleNotFoundError("no module named alarms")


def test_code_that_a_worker_cannot_load_is_a_refusal_and_the_next_change_is_well(query: ThreadQuery) -> None:
    plan, version = query.server.look(query.server.core.plans.newest)
    bad = copy_of(plan, "Kept2", like="Kept", version=version)
    bad = replace(bad, stages=(replace(bad.stages[0], make=Unloadable()),))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"addition of Kept2: worker \d cannot take it: .*no module named alarms"):
        query.server.add(bad, encode_change(bad, plan.secret), LIMIT_S)
    assert query.server.plan.version == 0
    change = copy_of(plan, "Kept3", like="Kept")
    assert change.version == version, "the number of the version that was taken back"
    made = query.server.add(change, encode_change(change, plan.secret), LIMIT_S)
    assert made.version == version + 1
    assert rows(3, 5)


def test_a_location_that_does_not_answer_in_time_leaves_nothing_behind(query: ThreadQuery) -> None:
    orders: list[VersionToKeep] = []

    def keep(order: VersionToKeep) -> None:
        orders.append(order)
        if order.plan.version == 0:
            query.server.kept(order)

    query.server.keep_versions(keep)
    with pytest.raises(
        QueryTimeout, match=r"the checkpoint location did not keep it within 0\.2 s\. Nothing was changed"
    ):
        add(query, "Kept4", timeout=0.2)
    assert [order.plan.version for order in orders] == [1, 0]
    assert query.server.plan.version == 0
    query.server.keep_versions(query.server.kept)
    add(query, "Kept5")
    assert rows(5, 5)


def test_an_addition_to_a_query_that_ends_meanwhile(query: ThreadQuery) -> None:
    query.server.keep_versions(lambda order: query.server.stop())
    with pytest.raises(Exception, match="the query has ended meanwhile, nothing was changed"):
        add(query, "Kept6")
    with pytest.raises(UsageError, match="the query is ended"):
        add(query, "Kept7")


def test_an_addition_whose_query_ends_while_it_begins_does_not_say_that_nothing_was_changed(query: ThreadQuery) -> None:
    query.server.stop()
    asked = PlanRequest("addition of Kept6", lambda _, __: PlanChange(1), 0.0, phase=PlanPhase.LISTED)
    with pytest.raises(QueryFailed, match="addition of Kept6: the query has ended meanwhile, while it began"):
        query.server._wait_for(asked, LIMIT_S)


def test_an_empty_change_is_none(query: ThreadQuery) -> None:
    change = PlanChange(1)
    assert query.server.add(change, encode_change(change, query.plan.secret), LIMIT_S).version == 1
    query.server.seal()
    with pytest.raises(UsageError, match="sealed"):
        add(query, "Kept8")


# ---- stages that fail


@flux.stage(partitions=2, replicas=2)
class Bad(flux.Operator):
    """An operator that fails at a row, with all its replicas."""

    def process(self, batch: pa.RecordBatch) -> None:
        if max(batch.column(0).to_pylist()) >= 10:
            raise ValueError("boom")


class Refusing(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: object) -> None:
        if max(batch.column(0).to_pylist()) >= 10:
            raise ValueError("the outside says no")


def until(there: object, limit_s: float = LIMIT_S) -> None:
    assert callable(there)
    end = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_stage_whose_code_fails_ends_alone_and_begins_anew_under_its_name() -> None:
    SEEN.clear()
    GO_ON.clear()
    numbers = passed(flux.source(read, SCHEMA, 1, "numbers"))
    with ThreadQuery(
        Kept(numbers), Bad(numbers), operate=False, on_failure="stage", replicas_allow_same_executor=True
    ) as query:
        query.started()
        core = query.server.core
        until(lambda: "Bad" in core.plans.failed and query.server.plan.version == 1)
        failed = core.plans.failed["Bad"]
        assert "stage Bad" in failed.error
        assert "process() raised ValueError: boom" in failed.error
        assert "raise ValueError" in failed.traceback
        assert "Traceback" not in failed.error
        assert [stage.name for stage in query.server.plan.stages] == ["passed", "Kept"]
        assert [event.stage for event in core.repairs.history if event.kind == "stage failed"] == ["Bad"]
        others = rows(0, len(SEEN[0]) + 20)
        assert others == list(range(len(others))), "the other stage has noticed nothing"
        add(query, "Bad")
        assert not core.plans.failed
        GO_ON.set()


def test_a_sink_that_gives_up_ends_its_stage_alone() -> None:
    SEEN.clear()
    GO_ON.clear()
    numbers = passed(flux.source(read, SCHEMA, 1, "numbers"))
    with ThreadQuery(Kept(numbers), numbers.to(Refusing()), operate=False, on_failure="stage", replicas=1) as query:
        query.started()
        core = query.server.core
        until(lambda: core.plans.failed and query.server.plan.version == 1)
        (failed,) = core.plans.failed.values()
        assert "the outside says no" in failed.error
        others = rows(0, len(SEEN[0]) + 20)
        assert others == list(range(len(others)))
        GO_ON.set()


def test_an_error_in_all_stages_ends_the_query() -> None:
    GO_ON.clear()
    with ThreadQuery(
        Bad(passed(flux.source(read, SCHEMA, 1, "numbers"))), operate=False, replicas_allow_same_executor=True
    ) as query:
        assert "boom" in str(query.error())
        GO_ON.set()
