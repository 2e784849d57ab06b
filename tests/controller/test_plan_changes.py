"""Changes of the plan: each phase with each fault, and nothing left behind after a refusal (design: change-of-plan, removal)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.balance.load import Move
from controller.course.newborns import grown_table
from controller.course.plan_phases import PlanPhase
from controller.course.plan_requests import PlanHasChanged, WorkersAreMissing
from controller.decide import plan_changes
from controller.decide.request_book import State
from controller.replicas.addition_limits import CONFIRM_MAX_S
from controller.text import duration
from flux.dataflow import plan_change
from flux.dataflow.plan import WorkerSourcePlan
from flux.dataflow.plan_change import PlanChange, decode_change
from flux.errors import QueryFailed, UsageError
from flux.wire.control import (
    Failure,
    GetPlan,
    Heartbeat,
    InStep,
    PartitionFinished,
    PlanChanged,
    PlanSeen,
    ReplicaCaughtUp,
    ReplicaDiverged,
    Stop,
    TableChanged,
    Unreached,
)
from flux.wire.statistics import Lag
from partitioning.ids import STANDBY
from tests.controller.cluster import Cluster, register
from tests.controller.growing import copy_of, without


def growing(**options: Any) -> Cluster:
    return Cluster(**{"slots": 3, "stages": 2, "partitions": 2, **options})


def state(c: Cluster, request: int) -> str:
    return str(c.core.request(request).standing.state)


def why(c: Cluster, request: int) -> str:
    return c.core.request(request).standing.why


def left_as_it_was(c: Cluster, epoch: int) -> None:
    """Check that nothing of a refused change is anywhere."""
    assert c.table.epoch == epoch
    assert c.table.plan == c.core.plan.version
    assert len(c.table.stages) == len(c.core.plan.stages)
    assert c.core.plans.current is None
    assert not c.core.plans.waiting
    assert not c.table.born


# ---- an addition


def test_a_stage_is_named_by_a_table_once_every_process_has_its_plan() -> None:
    c = growing()
    c.deaf = {"w1.0"}
    request = c.add(copy_of(c.core.plan, "A"))
    assert len(c.sent(PlanChanged)) == 3
    assert state(c, request) == State.UNDER_WAY
    assert c.table.plan == 0, "worker 1 would stand still at the step of the version"
    c.report(1, PlanSeen(node=1, version=1))
    assert (c.table.plan, c.core.plan.version) == (1, 1)
    assert [len(replicas) for replicas in c.table.stages[2]] == [2, 2]
    assert {replica.incarnation for row in c.table.stages[2] for replica in row} == {c.table.epoch}
    assert all(replica.live for row in c.table.stages[2] for replica in row)
    assert c.table.born == {2: c.table.epoch}
    assert state(c, request) == State.DONE
    assert [event.why for event in c.events("plan")] == ["version 1: addition of A"]


def test_a_change_is_running_when_every_process_goes_by_its_table() -> None:
    c = growing()
    c.mute = {"w2.0"}
    request = c.add(copy_of(c.core.plan, "A"))
    assert state(c, request) == State.UNDER_WAY
    assert c.core.plans.current is not None
    assert c.core.plans.current.phase == PlanPhase.LISTED
    c.confirm(2, c.table.epoch)
    assert state(c, request) == State.DONE


def test_a_new_stage_is_repaired_moved_drained_and_protected_like_others() -> None:
    c = growing(slots=4)
    c.add(copy_of(c.core.plan, "A"))
    lost = c.holders(0, 2)[0]
    c.lose(lost)
    assert lost not in c.all_holders()
    c.settle()
    assert all(len(c.holders(partition, 2)) == 2 for partition in range(2))
    source, *_ = c.holders(0, 2)
    target = next(worker for worker in c.core.members.workers if worker not in c.holders(0, 2))
    c.move_all(Move(2, 0, source, target))
    c.settle()
    assert target in c.holders(0, 2)
    request = c.protect(recovery=STANDBY, stage=2)
    for _ in range(10):
        c.settle()
        c.tick(0.3)
    assert c.has(0, 2) == "a s"
    assert state(c, request) == State.DONE
    c.join(4)
    c.scale(4)


def test_workers_that_leave_get_nothing_of_a_new_stage() -> None:
    c = growing(slots=4)
    c.drain(3)
    c.add(copy_of(c.core.plan, "A"))
    assert c.core.drains or 3 not in c.core.members.workers
    assert all(3 not in c.holders(partition, 2) for partition in range(2))


def test_nothing_is_added_while_all_workers_leave() -> None:
    c = growing(slots=3)
    c.add(copy_of(c.core.plan, "A"))
    table, plan = c.table, c.core.plan
    change = copy_of(plan, "B")
    leaving = c.core.board.placement()
    leaving.leaving = frozenset(table.endpoints)
    with pytest.raises(QueryFailed, match="all workers are leaving"):
        grown_table(table, change.applied_to(plan), change, leaving)
    gone = without(plan, plan.next_ids()[1] - 1)
    removal = PlanChange(gone.version, removed_stages=(2,), removed_edges=plan.stages[2].edges_in)
    assert not grown_table(table, gone, removal, leaving).stages[2], "a removal needs no place"


def test_a_new_source_is_dealt_to_workers_and_read_elsewhere_after_a_loss() -> None:
    c = growing(readers=2)
    pattern = c.core.plan.sources[0]
    assert isinstance(pattern, WorkerSourcePlan)
    way = replace(c.core.plan.edges[0], id=2, source=1, consumer=2, log_bytes=64 << 10)  # type: ignore[call-arg]
    first = replace(c.core.plan.stages[0], id=2, name="A", edges_in=(2,), edges_out=())
    c.add(PlanChange(1, sources=(replace(pattern, id=1, name="more", partitions=3),), stages=(first,), edges=(way,)))
    assert sorted(c.table.sources[1]) == [0, 1, 2]
    c.lose(1)
    assert 1 not in c.table.sources[1]
    c.remove("A")
    assert c.table.sources[1] == (), "nothing reads it any more"
    assert c.core.plan.sources.end == 1


# ---- refusals


def test_a_process_that_cannot_take_it_makes_it_fail_with_its_reason() -> None:
    c = growing()
    epoch, c.deaf = c.table.epoch, {"w0.0", "w1.0", "w2.0"}
    request = c.add(copy_of(c.core.plan, "A"))
    c.report(0, PlanSeen(node=0, version=1))
    c.report(1, PlanSeen(node=1, version=1, error="no module named alarms"))
    assert state(c, request) == State.GIVEN_UP
    assert why(c, request) == "worker 1 cannot take it: no module named alarms"
    left_as_it_was(c, epoch)
    assert [event.kind for event in c.core.repairs.history] == ["plan refused"]


def test_the_number_of_a_version_that_was_taken_back_is_not_given_again() -> None:
    c = growing()
    c.deaf = {"w1.0"}
    c.add(copy_of(c.core.plan, "A"))
    c.report(0, PlanSeen(node=0, version=1, error="no"))
    plan, version = c.core.plans.newest()
    assert (plan.version, version) == (0, 2)
    request = c.add(replace(copy_of(plan, "B", version=2), base=0))
    c.report(1, PlanSeen(node=1, version=1))
    assert state(c, request) == State.UNDER_WAY, "the answer is to the version that was taken back"
    c.report(1, PlanSeen(node=1, version=2))
    assert state(c, request) == State.DONE
    assert c.core.plan.stages[2].name == "B"


def test_one_that_does_not_confirm_in_time_is_named() -> None:
    c = growing()
    epoch, c.deaf = c.table.epoch, {"w2.0"}
    request = c.add(copy_of(c.core.plan, "A"))
    for _ in range(int(CONFIRM_MAX_S) + 1):
        c.tick(1.0)
    assert why(c, request) == f"worker 2 did not confirm it within {CONFIRM_MAX_S:g} s"
    left_as_it_was(c, epoch)
    assert 5 < len(c.sent(PlanChanged)) < 40, "it is repeated now and then"


def test_limits_are_written_without_digits_that_say_nothing() -> None:
    c = growing()
    c.deaf = {"w2.0"}
    request = c.add(copy_of(c.core.plan, "A"))
    assert c.core.plans.current is not None
    assert c.core.plans.give_up(c.core.plans.current, 0.996603, c.now)
    assert why(c, request) == "worker 2 did not confirm it within 1 s"
    assert (duration(0.04), duration(0.2)) == ("0.04 s", "0.2 s")


def test_a_worker_that_is_lost_is_not_waited_for() -> None:
    c = growing()
    c.deaf = {"w2.0"}
    request = c.add(copy_of(c.core.plan, "A"))
    c.lose(2)
    c.tick(0.01)
    assert state(c, request) == State.DONE
    assert all(2 not in c.holders(partition, 2) for partition in range(2))


def test_a_worker_that_joins_meanwhile_has_to_confirm_too() -> None:
    c = growing(slots=4)
    c.lose(3)
    c.deaf = {"w3.1"}
    c.deaf.add("w0.0")
    request = c.add(copy_of(c.core.plan, "A"))
    node = c.join(3, attempt=1)
    assert [each.version for each in c.told("w3.1") if isinstance(each, PlanChanged)] == [1]
    c.report(0, PlanSeen(node=0, version=1))
    assert state(c, request) == State.UNDER_WAY
    c.report(node, PlanSeen(node=node, version=1))
    assert state(c, request) == State.DONE


def test_a_worker_that_comes_later_gets_all_versions_that_tables_have_named() -> None:
    c = growing(slots=4)
    c.lose(3)
    c.deaf = {"w0.0"}
    c.add(copy_of(c.core.plan, "A"))
    c.report(0, PlanSeen(node=0, version=1, error="no"))
    c.deaf.clear()
    for name, version in (("B", 2), ("C", 3)):
        plan = c.core.plan
        c.add(replace(copy_of(plan, name, version=version), base=plan.version))
    c.deaf = {"w3.1"}
    node = c.join(3, attempt=1)
    assert not [each for each in c.told("w3.1") if isinstance(each, PlanChanged)]
    c.report(node, GetPlan(node=node, version=0))
    assert [each.version for each in c.told("w3.1") if isinstance(each, PlanChanged)] == [2, 3]
    c.report(node, GetPlan(node=node, version=2))
    assert [each.version for each in c.told("w3.1") if isinstance(each, PlanChanged)] == [2, 3, 3]


def test_a_worker_that_comes_later_gets_no_stages_that_are_gone() -> None:
    c = growing(slots=4)
    first = c.core.plan
    c.lose(3)
    c.add(copy_of(first, "Gone"))
    c.add(replace(copy_of(c.core.plan, "Stays", version=2), base=1))
    c.remove("Gone")
    c.deaf = {"w3.1"}
    node = c.join(3, attempt=1)
    c.report(node, GetPlan(node=node, version=0))
    (told,) = [each for each in c.told("w3.1") if isinstance(each, PlanChanged)]
    change = decode_change(told.change, first.secret)
    assert [stage.name for stage in change.stages] == ["Stays"]
    made, plan = change.applied_to(first), c.core.plan
    assert (made.version, made.next_ids(), made.first_streams) == (3, plan.next_ids(), plan.first_streams)
    assert [(part.id, part.since) for part in (*made.stages, *made.edges, *made.sources)] == [
        (part.id, part.since) for part in (*plan.stages, *plan.edges, *plan.sources)
    ]
    assert [(stage.edges_out, stage.edges_at_birth) for stage in made.stages] == [
        (stage.edges_out, stage.edges_at_birth) for stage in plan.stages
    ]


@pytest.mark.parametrize("bytes_max", [1 << 20, 2600])
def test_a_worker_that_lacks_more_than_is_kept_gets_the_plan_as_it_is(
    bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_changes, "TOLD_KEPT", 2)
    monkeypatch.setattr(plan_changes, "VERSIONS_KEPT", 3)
    c = growing(slots=4)
    first = c.core.plan
    c.lose(3)
    for number in range(6):
        c.add(replace(copy_of(c.core.plan, f"A{number}", version=number + 1), base=number))
    c.remove("A2")
    assert len(c.core.plans._told) == len(c.core.plans._changes) == 2
    assert len(c.core.plans.versions) == 3
    c.deaf = {"w3.1"}
    node = c.join(3, attempt=1)
    monkeypatch.setattr(plan_change, "HEADER_BYTES_MAX", bytes_max)
    c.report(node, GetPlan(node=node, version=0))
    told = [decode_change(each.change, first.secret) for each in c.told("w3.1") if isinstance(each, PlanChanged)]
    assert (len(told) > 1) == (bytes_max == 2600)
    made = first
    for change in told:
        made = change.applied_to(made)
    assert [(part.id, part.since) for part in (*made.stages, *made.edges)] == [
        (part.id, part.since) for part in (*c.core.plan.stages, *c.core.plan.edges)
    ]
    assert (made.version, made.next_ids()) == (7, c.core.plan.next_ids())
    assert made.version == c.core.plan.version


def test_a_later_worker_that_cannot_take_a_version_tells_the_reason_in_an_event() -> None:
    c = growing(slots=4)
    c.lose(3)
    c.add(copy_of(c.core.plan, "A"))
    c.deaf = {"w3.1"}
    node = c.join(3, attempt=1)
    for _ in range(2):
        c.report(node, PlanSeen(node=node, version=1, error="no module named alarms"))
    (event,) = c.events("plan refused")
    assert event.worker == node
    assert event.why == "cannot take part: version 1 of the plan cannot be had there: no module named alarms"


def test_a_process_on_a_new_connection_is_told_again() -> None:
    c = growing()
    c.deaf = {"w1.0", "again"}
    c.add(copy_of(c.core.plan, "A"))
    c.take(c.core.on_report("again", register(1, node=1), c.now))
    assert [each.version for each in c.told("again") if isinstance(each, PlanChanged)] == [1]


def test_an_ingress_task_that_has_done_its_work_need_not_confirm() -> None:
    c = growing()
    c.deaf = {"i"}
    c.take(c.core.on_report("i", register(0, "ingress"), c.now))
    request = c.add(copy_of(c.core.plan, "A"))
    assert state(c, request) == State.UNDER_WAY
    next(iter(c.core.members.ingress.values())).left = True
    c.tick(0.01)
    assert state(c, request) == State.DONE


@pytest.mark.parametrize(
    ("options", "change", "complaint"),
    [
        ({}, {"name": "Sums"}, "has a stage Sums already"),
        ({"replicas": 3, "executors": {1: "e0"}, "same_executor": True}, {}, ""),
    ],
)
def test_what_does_not_fit_is_refused_at_once(options: dict[str, Any], change: dict[str, Any], complaint: str) -> None:
    c = growing(**options)
    epoch = c.table.epoch
    made = copy_of(c.core.plan, **{"name": "A", **change})
    if not complaint:
        c.add(made)
        return
    with pytest.raises(UsageError, match=complaint):
        c.add(made)
    assert not c.sent(PlanChanged)
    left_as_it_was(c, epoch)


def test_replicas_that_the_workers_cannot_hold_are_refused() -> None:
    c = growing(replicas=2)
    made = copy_of(c.core.plan, "A")
    epoch = c.table.epoch
    three = replace(made, stages=(replace(made.stages[0], replicas=3),))
    c.lose(2)
    c.tick(1.0)
    epoch = c.table.epoch
    with pytest.raises(
        WorkersAreMissing, match=r"A wants replicas=3 on different executors, and the 2 w.*2 of 3 workers are there"
    ):
        c.add(three)
    left_as_it_was(c, epoch)
    c.scale(2)
    with pytest.raises(UsageError, match=r"A wants replicas=3 on different executors, and the 2 workers") as raised:
        c.add(three)
    assert raised.type is UsageError, "no more workers are expected"
    epoch = c.table.epoch
    left_as_it_was(c, epoch)


def test_workers_that_are_lost_meanwhile_may_be_too_many() -> None:
    c = growing()
    made = copy_of(c.core.plan, "A")
    c.deaf = {"w0.0"}
    request = c.add(replace(made, stages=(replace(made.stages[0], replicas=3),)))
    c.lose(2)
    c.report(0, PlanSeen(node=0, version=1))
    assert "A wants replicas=3" in why(c, request)
    assert "2 of 3 workers are there" in why(c, request)
    assert c.core.plan.version == 0


def test_an_addition_by_an_older_plan_is_to_be_compiled_again() -> None:
    c = growing()
    one, other = copy_of(c.core.plan, "A"), copy_of(c.core.plan, "B")
    c.add(one)
    with pytest.raises(PlanHasChanged, match="compiled by version 0 of the plan, and the newest is 1"):
        c.add(other)


def test_one_change_at_a_time_and_the_others_wait() -> None:
    c = growing()
    c.deaf = {"w0.0"}
    first = c.add(copy_of(c.core.plan, "A"))
    removed = c.remove("Sums")
    stale = c.add(replace(copy_of(c.core.plan, "B", version=2), base=0))
    assert [state(c, request) for request in (first, removed, stale)] == ["under way", "waiting", "waiting"]
    assert len(c.sent(PlanChanged)) == 3
    c.report(0, PlanSeen(node=0, version=1))
    assert [state(c, request) for request in (first, removed)] == ["done", "under way"]
    c.report(0, PlanSeen(node=0, version=2))
    assert state(c, removed) == State.DONE
    assert "compiled by version 0" in why(c, stale)
    assert [stage.name for stage in c.core.plan.stages] == ["s0", "A"]


def test_two_additions_of_one_name_at_once() -> None:
    c = growing()
    c.deaf = {"w0.0"}
    c.add(copy_of(c.core.plan, "A"))
    second = c.add(replace(copy_of(c.core.plan, "A", version=2), base=0))
    c.report(0, PlanSeen(node=0, version=1))
    assert state(c, second) == State.GIVEN_UP
    plan, version = c.core.plans.newest()
    with pytest.raises(UsageError, match="has a stage A already"):
        c.add(copy_of(plan, "A", version=version))


def test_a_query_that_has_ended_takes_nothing() -> None:
    c = growing()
    c.deaf = {"w0.0"}
    request = c.add(copy_of(c.core.plan, "A"))
    c.take(c.core.driver.on_stop())
    c.tick(1.0)
    assert "has come to its end" in why(c, request)
    with pytest.raises(UsageError, match="the query is ended"):
        c.core.plans.newest()


# ---- removals


def test_a_removed_stage_is_in_no_table_no_book_and_no_wish() -> None:
    c = growing(slots=5)
    c.add(copy_of(c.core.plan, "A"))
    c.protect(recovery=STANDBY, stage=2)
    source = c.holders(1, 2)[0]
    target = next(worker for worker in range(5) if worker not in c.holders(1, 2))
    c.move_all(Move(2, 1, source, target))
    assert c.core.repairs.under_way
    request = c.remove("A")
    assert state(c, request) == State.DONE
    assert c.table.stages[2] == ()
    assert not c.table.born
    assert [stage.name for stage in c.core.plan.stages] == ["s0", "Sums"]
    assert c.core.plan.stages[0].edges_out == (1,)
    assert not c.core.repairs.under_way
    assert not c.core.repairs.safety.unsafe
    assert not c.core.moving
    assert not c.core.board.wishes.open
    assert [event.kind for event in c.core.repairs.history if event.stage == "A"][-2:] == [
        "protect given up",
        "move given up",
    ]
    c.tick(1.0)
    assert c.core.report()["underReplicated"] == []


def test_a_stage_that_others_depend_on_goes_with_them_or_not_at_all() -> None:
    c = growing(stages=3)
    with pytest.raises(UsageError, match="cannot remove s1: Sums depends on it"):
        c.remove("s1")
    with pytest.raises(UsageError, match="s1, Sums depend on it"):
        c.remove("s0")
    with pytest.raises(UsageError, match="no stage would be left"):
        c.remove("s0", cascade=True)
    assert c.core.plan.version == 0
    c.remove("s1", cascade=True)
    assert [stage.name for stage in c.core.plan.stages] == ["s0"]
    assert [len(rows) for rows in c.table.stages] == [2, 0, 0]
    with pytest.raises(UsageError, match="there is no such stage or source; there are s0, rows"):
        c.remove("Sums")


def test_a_removal_meets_the_same_faults() -> None:
    c = growing(stages=3)
    c.deaf = {"w1.0"}
    request = c.remove("Sums")
    c.lose(1)
    c.tick(0.01)
    assert state(c, request) == State.DONE
    c.settle()
    assert [len(rows) for rows in c.table.stages] == [2, 2, 0]


def test_a_loss_after_a_removal_knows_nothing_of_the_stage() -> None:
    c = growing(stages=3)
    c.remove("Sums")
    c.lose(2)
    c.settle()
    c.join(2, attempt=1)
    c.tick(1.0)
    c.settle()
    assert [len(rows) for rows in c.table.stages] == [2, 2, 0]
    assert all(len(replicas) == 2 for rows in c.table.stages for replicas in rows)


def test_late_reports_about_a_stage_that_is_gone_change_nothing() -> None:
    c = growing()
    c.add(copy_of(c.core.plan, "A"))
    leader, other = c.replicas(0, 2)
    c.remove("A")
    table, node = c.table, leader.worker
    life = {"worker": other.worker, "incarnation": other.incarnation}
    at = {"node": node, "stage": 2, "partition": 0}
    c.report(node, ReplicaCaughtUp(**at, **life, safe=True))
    c.report(node, ReplicaDiverged(**at, **life, step=5))
    c.report(node, PartitionFinished(**at))
    c.report(node, InStep(**at, step=1, method="process"))
    c.report(node, Failure(node=node, stage=2, kind="UserCodeError", message="late"))
    behind = Lag(2, 0, other.worker, other.incarnation, 5000, 9.0, 1, True)
    work = {"at": 1.0, "replicas": [(2, 0, leader.incarnation, 1.0, 1, 1, 1, 1)]}
    c.report(node, Heartbeat(node=node, progress=1, stats={"behind": [behind], "load": work, "stages": [{"stage": 2}]}))
    primary, *_ = c.replicas(0, 0)
    c.report(
        node,
        Unreached(
            **at | {"stage": 0},
            primary=primary.worker,
            leader=primary.incarnation,
            **life,
            edge=2,
            producer=0,
            acks=True,
        ),
    )
    c.core.driver.on_job_failed("a job", "it failed", [2])
    c.tick(1.0)
    assert c.core.phase == "running"
    assert c.table is table
    assert not c.core.repairs.safety.doubtful()
    assert c.core.load_table() is not None


def test_a_spark_task_that_feeds_nothing_any_more_is_told_to_stop() -> None:
    c = growing()
    pattern, edge = c.core.plan.sources[0], replace(c.core.plan.edges[0], id=2, source=1, consumer=2, log_bytes=1 << 20)  # type: ignore[call-arg]
    first = replace(c.core.plan.stages[0], id=2, name="A", edges_in=(2,), edges_out=())
    c.add(PlanChange(1, sources=(replace(pattern, id=1, name="more"),), stages=(first,), edges=(edge,)))
    c.take(c.core.on_report("i", register(0, "ingress", edges=[2]), c.now))
    c.take(c.core.driver.on_edge_complete(2, [0]))
    c.remove("more", cascade=True)
    assert [stop.reason for stop in c.stops("i")] == ["nothing reads its source any more"]
    assert not c.core.members.ingress
    c.take(c.core.on_report("late", register(1, "ingress", edges=[2]), c.now))
    assert [stop.reason for stop in c.stops("late")] == ["nothing reads its source any more"]
    assert not c.core.members.ingress, "its death would hold up each later change"
    assert c.core.board.complete == {}


# ---- how a query that was added to finishes


def finish(c: Cluster, stage: int) -> None:
    for partition in range(2):
        leader = c.holders(partition, stage)[0]
        c.report(leader, PartitionFinished(node=leader, stage=stage, partition=partition))


def test_a_query_that_was_never_added_to_finishes_at_once() -> None:
    c = growing()
    finish(c, 1)
    assert c.core.phase == "ended"


def test_one_that_was_added_to_waits_for_the_time_of_a_report() -> None:
    c = growing()
    c.add(copy_of(c.core.plan, "A"))
    finish(c, 1)
    assert c.core.unfinished == {(2, 0), (2, 1)}
    finish(c, 2)
    c.tick(0.5)
    assert c.core.phase == "running"
    c.tick(0.6)
    assert c.core.phase == "ended"
    assert c.core.error is None


def test_a_sealed_one_does_not_wait_and_takes_no_more() -> None:
    c = growing()
    c.add(copy_of(c.core.plan, "A"))
    c.core.plans.seal()
    with pytest.raises(UsageError, match="sealed"):
        c.add(copy_of(c.core.plan, "B"))
    finish(c, 1)
    finish(c, 2)
    assert c.core.phase == "ended"


def test_a_query_does_not_finish_while_a_change_is_under_way() -> None:
    c = growing()
    c.deaf = {"w0.0"}
    c.add(copy_of(c.core.plan, "A"))
    finish(c, 1)
    c.tick(5.0)
    assert c.core.phase == "running"
    c.report(0, PlanSeen(node=0, version=1, error="no"))
    c.tick(0.01)
    assert c.core.phase == "ended"


def test_the_removal_of_the_last_unfinished_stage_finishes_the_query() -> None:
    c = growing()
    c.add(copy_of(c.core.plan, "A"))
    finish(c, 1)
    c.remove("A")
    assert not c.core.unfinished
    c.tick(1.1)
    assert c.core.phase == "ended"


def test_a_table_of_another_version_is_sent_as_its_differences() -> None:
    c = growing()
    c.add(copy_of(c.core.plan, "A"))
    newest = c.sent(TableChanged)[-1].change
    assert (newest.plan, newest.born, newest.stage_widths) == (1, [2], {2: 2})
    assert not c.sent(Stop)
