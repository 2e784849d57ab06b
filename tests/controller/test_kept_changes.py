"""Changes of the plan of a query with a checkpoint location: told when the location has them, and taken back there first (design:
kept-versions)."""

from __future__ import annotations

from dataclasses import replace

from controller.decide.request_book import State
from flux.wire.control import PlanChanged, PlanSeen
from tests.controller.cluster import Cluster
from tests.controller.growing import copy_of
from tests.controller.test_plan_changes import growing, state, why


def durable() -> Cluster:
    c = growing()
    c.core.plans.keep_versions([])
    return c


def kept(c: Cluster, error: str = "") -> None:
    """Carry out the orders to the location, or fail to."""
    for order in c.core.plans.to_keep():
        c.core.plans.kept(order, c.now, error)
    c.take(c.core.board.take())


def test_nothing_is_told_before_the_location_has_it() -> None:
    c = durable()
    request = c.add(copy_of(c.core.plan, "A"))
    assert not c.sent(PlanChanged)
    (order,) = c.core.plans.to_keep()
    assert (order.version, order.plan.version, order.plan.stages.end) == (1, 1, c.core.plan.stages.end + 1)
    assert not c.core.plans.to_keep()
    c.core.plans.kept(order, c.now)
    c.take(c.core.board.take())
    assert state(c, request) == State.DONE


def test_a_version_that_is_taken_back_is_forgotten_by_the_location_before_the_refusal() -> None:
    c = durable()
    request = c.add(copy_of(c.core.plan, "A"))
    c.deaf = {"w0.0"}
    (first,) = c.core.plans.to_keep()
    c.core.plans.kept(first, c.now)
    c.take(c.core.board.take())
    c.report(0, PlanSeen(node=0, version=1, error="no"))
    assert state(c, request) == State.UNDER_WAY
    (order,) = c.core.plans.to_keep()
    assert (order.version, order.plan.version) == (1, 0)
    c.core.plans.kept(first, c.now)
    assert state(c, request) == State.UNDER_WAY, "a late answer to the order that kept it"
    c.core.plans.kept(order, c.now)
    assert state(c, request) == State.GIVEN_UP


def test_a_location_that_does_not_keep_it_or_does_not_answer() -> None:
    c = durable()
    request = c.add(copy_of(c.core.plan, "A"))
    kept(c, "no space left")
    assert [order.plan.version for order in c.core.plans.to_keep()] == [0], "a part of it may be there"
    c.tick(61.0)
    assert why(c, request).startswith(
        "the checkpoint location cannot keep it: no space left; and the checkpoint location did not"
    )
    late = c.add(replace(copy_of(c.core.plan, "A", version=2), base=0))
    c.tick(61.0)
    kept(c)
    assert why(c, late) == "the checkpoint location did not keep it within 60 s"
    again = c.add(replace(copy_of(c.core.plan, "A", version=3), base=0))
    kept(c, "no space left")
    kept(c, "it is read-only")
    assert "keep it: no space left; and the checkpoint location did not forget it (it is read-only)" in why(c, again)
    assert not c.sent(PlanChanged)
