"""Stages that fail, and go with all that depends on them while the query runs (design: stage-fails)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.course.plan_requests import failures
from controller.decide.request_book import State
from controller.replicas.addition_limits import CONFIRM_MAX_S
from controller.replicas.spread import closest
from controller.replicas.table_index import TableIndex
from flux.dataflow.plan import ById
from flux.dataflow.plan_change import PlanChange
from flux.errors import QueryFailed
from flux.wire.control import (
    PlanSeen,
)
from tests.controller.cluster import Cluster
from tests.controller.growing import copy_of


def growing(**options: Any) -> Cluster:
    return Cluster(**{"slots": 3, "stages": 2, "partitions": 2, **options})


def failing(**options: Any) -> Cluster:
    c = growing(on_failure="stage", stages=3, **options)
    c.add(copy_of(c.core.plan, "A", behind=0))
    return c


def test_a_stage_that_fails_goes_with_all_that_depends_on_it_and_stays_listed() -> None:
    c = failing()
    c.core.board.fail(QueryFailed("boom"), [1])
    c.tick(0.01)
    assert c.core.phase == "running"
    assert [stage.name for stage in c.core.plan.stages] == ["s0", "A"]
    assert {name: (stage.because_of, stage.error) for name, stage in c.core.plans.failed.items()} == {
        "s1": ("s1", "boom"),
        "Sums": ("s1", "boom"),
    }
    assert [(event.stage, event.why) for event in c.events("stage failed")] == [
        ("s1", "boom"),
        ("Sums", "it depends on s1, which has failed"),
    ]
    c.remove("Sums")
    assert list(c.core.plans.failed) == ["s1"], "it is not listed any more"
    c.add(copy_of(c.core.plan, "s1", like="A"))
    assert not c.core.plans.failed, "it began anew"


def test_without_being_asked_for_one_error_ends_the_query() -> None:
    c = growing()
    c.core.board.fail(QueryFailed("boom"), [1])
    assert c.core.phase == "ended"
    assert str(c.core.error) == "boom"


def test_the_loss_of_all_replicas_of_a_partition_ends_its_stage_alone() -> None:
    c = failing(replicas=1, slots=4)
    lost = c.holders(0, 3)[0]
    others = {stage for stage in range(3) for partition in range(2) if c.holders(partition, stage) == [lost]}
    c.lose(lost)
    c.tick(0.01)
    assert c.core.phase == "running"
    assert "A" in c.core.plans.failed
    assert c.table.stages[3] == ()
    assert {stage.id for stage in c.core.plan.stages} & (others | {3}) == set()


def test_the_loss_of_the_last_worker_ends_the_query() -> None:
    c = growing(on_failure="stage", slots=1, replicas=1, same_executor=True)
    c.lose(0)
    assert c.core.phase == "ended"
    assert "the only safe replica" in str(c.core.error)


def test_a_further_loss_while_failed_stages_are_still_there() -> None:
    c = failing(replicas=1, slots=4)
    c.deaf = {"w0.0", "w1.0", "w2.0", "w3.0"}
    first, *_ = c.holders(0, 3)
    c.lose(first)
    c.tick(0.1)
    other = next(worker for worker in c.core.members.workers if worker not in c.holders(0, 0) + c.holders(1, 0))
    c.lose(other)
    c.join(first, attempt=5)
    for _ in range(5):
        c.tick(0.3)
    c.deaf.clear()
    for _ in range(4):
        c.tick(1.0)
    assert c.core.phase == "running"
    assert [stage.name for stage in c.core.plan.stages] == ["s0"]
    assert set(c.core.plans.failed) == {"s1", "Sums", "A"}
    assert all(replicas for rows in c.table.stages for replicas in rows)


def test_a_failure_of_everything_ends_the_query() -> None:
    c = failing()
    c.core.board.fail(QueryFailed("boom"), [0])
    c.tick(0.01)
    assert c.core.phase == "ended"
    assert str(c.core.error) == "boom"


def apart(**options: Any) -> Cluster:
    """Make a cluster of two stages, each with a source of its own."""
    c = growing(on_failure="stage", stages=1, readers=2, **options)
    plan = c.core.plan
    way = replace(plan.edges[0], id=1, source=1, consumer=1, log_bytes=64 << 10)  # type: ignore[call-arg]
    other = replace(plan.stages[0], id=1, name="A", edges_in=(1,), edges_out=())
    c.add(PlanChange(1, sources=(replace(plan.sources[0], id=1, name="more"),), stages=(other,), edges=(way,)))
    return c


def test_failures_of_all_stages_at_once_end_the_query_with_an_error() -> None:
    c = apart()
    c.core.board.fail(QueryFailed("boom"), [0])
    c.core.board.fail(QueryFailed("boom too"), [1])
    for _ in range(5):
        c.tick(1.0)
    assert c.core.phase == "ended"
    assert str(c.core.error) == "boom"


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_last_stage_fails_while_the_others_are_being_removed(by_hand: bool) -> None:
    c = apart()
    c.deaf = {"w0.0"}
    if by_hand:
        c.remove("A")
    else:
        c.core.board.fail(QueryFailed("boom"), [1])
    c.tick(0.01)
    (last,) = (stage.id for stage in c.core.plan.stages if stage.name != "A")
    c.core.board.fail(QueryFailed("boom too"), [last])
    c.tick(0.01)
    assert c.core.phase == "running", "the removal before may still be refused"
    c.deaf.clear()
    for _ in range(5):
        c.tick(1.0)
    assert c.core.phase == "ended"
    assert str(c.core.error) == "boom too"


def test_replicas_of_a_plan_without_stages_share_nothing() -> None:
    c = growing()
    plan = replace(c.core.plan, stages=ById())
    assert closest(plan, TableIndex(plan), c.core.members.places) is None


def test_a_stage_that_reads_a_failing_one_and_comes_meanwhile_goes_too() -> None:
    c = failing()
    c.deaf = {"w0.0"}
    c.add(copy_of(c.core.plan, "B", behind=1))
    c.core.board.fail(QueryFailed("boom"), [1])
    c.tick(0.01)
    c.deaf.clear()
    c.report(0, PlanSeen(node=0, version=2))
    assert [stage.name for stage in c.core.plan.stages] == ["s0", "A"]
    c.tick(0.01)
    assert set(c.core.plans.failed) == {"s1", "Sums", "B"}
    assert failures(c.core.plans.report()["failedStages"]) == ["stage s1 has failed, and with it Sums, B: boom"]


def test_a_stage_that_is_removed_by_hand_while_it_fails_is_not_listed_nor_are_those_that_went_with_it() -> None:
    c = failing()
    c.deaf = {"w0.0"}
    c.core.board.fail(QueryFailed("boom"), [1])
    c.tick(0.01)
    request = c.remove("s1")
    c.deaf.clear()
    c.tick(3.0)
    assert c.core.request(request).standing.state == State.DONE
    assert not c.core.plans.failed, "Sums depended on s1, and cannot be begun anew without it"
    assert [event.why for event in c.events("plan")][-1] == "removal of s1, which went with the failure of s1"
    assert not c.events("plan refused")


def test_a_stage_that_fails_while_it_is_removed_by_hand_is_not_listed() -> None:
    c = failing()
    c.deaf = {"w0.0"}
    request = c.remove("A")
    c.core.board.fail(QueryFailed("boom"), [3])
    c.tick(0.01)
    c.deaf.clear()
    c.tick(3.0)
    assert c.core.request(request).standing.state == State.DONE
    assert not c.core.plans.failed


def test_a_removal_of_failed_stages_is_repeated_until_it_is_done() -> None:
    c = failing()
    c.deaf = {"w0.0"}
    c.core.board.fail(QueryFailed("boom"), [1])
    for _ in range(int(CONFIRM_MAX_S) + 2):
        c.tick(1.0)
    assert [stage.name for stage in c.core.plan.stages] == ["s0", "s1", "Sums", "A"]
    c.deaf.clear()
    c.tick(3.0)
    assert [stage.name for stage in c.core.plan.stages] == ["s0", "A"]
    assert ById([c.core.plan.stages[0], c.core.plan.stages[3]]) == c.core.plan.stages
