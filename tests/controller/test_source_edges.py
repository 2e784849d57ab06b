"""Edges that begin at running sources: the first report of a beginning counts, and an addition waits for it (design:
edge-of-a-source)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from controller.course.plan_phases import STORE_MAX_S
from controller.course.plan_requests import VersionToKeep
from controller.decide.plan_changes import BORN_S
from controller.decide.request_book import State
from flux.dataflow.plan_change import PlanChange
from flux.errors import QueryFailed
from flux.wire.control import EdgeBorn, EdgeStored, PlanSeen
from flux.wire.messages import Mark
from tests.controller.cluster import Cluster


def growing(**options: Any) -> Cluster:
    return Cluster(**{"slots": 3, "stages": 2, "partitions": 2, "readers": 2, **options})


def state(c: Cluster, request: int) -> str:
    return str(c.core.request(request).standing.state)


def behind_a_source(c: Cluster) -> int:
    """Ask for a stage behind the source, which workers 0 and 1 read."""
    edge = c.core.plan.edges[0]
    stage = replace(c.core.plan.stages[0], id=2, name="A", edges_in=(2,), edges_out=())
    return c.add(PlanChange(1, stages=(stage,), edges=(replace(edge, id=2, consumer=2, log_bytes=1 << 20),)))


def born(node: int, producer: int, number: int) -> EdgeBorn:
    return EdgeBorn(node=node, edge=2, producer=producer, number=number, mark=Mark(number - 1, 5))


def test_the_first_beginning_of_a_stream_counts_and_everybody_hears_of_it() -> None:
    c = growing()
    behind_a_source(c)
    assert c.table.sources[0] == (0, 1)
    c.report(1, born(1, 0, 5))
    assert not c.sent(EdgeStored), "worker 1 has read the partition before, and is anywhere in its rows"
    c.report(0, born(0, 0, 7))
    assert c.sent(EdgeStored) == [EdgeStored(edge=2, producer=0, number=7, mark=Mark(6, 5))] * 3
    c.lose(2)
    node = c.join(2, attempt=1)
    assert [each.number for each in c.told("w2.1") if isinstance(each, EdgeStored)] == [7]
    c.orders.clear()
    c.report(0, born(0, 0, 9))
    assert [each.number for each in c.sent(EdgeStored)] == [7], "the answer was lost"
    c.report(1, born(1, 1, 3))
    c.remove("A")
    c.orders.clear()
    c.report(node, born(node, 0, 9))
    c.report(0, born(0, 0, 9))
    assert not c.sent(EdgeStored), "the edge is gone"


def test_an_addition_behind_a_source_is_done_when_all_its_streams_have_begun() -> None:
    c = growing()
    request = behind_a_source(c)
    c.report(0, born(0, 0, 7))
    assert state(c, request) == State.UNDER_WAY, "rows of partition 1 that come now might not be for the stage"
    c.report(1, born(1, 1, 3))
    assert state(c, request) == State.DONE


def test_a_failure_does_not_wait_for_streams_that_have_not_begun() -> None:
    c = growing(on_failure="stage")
    request = behind_a_source(c)
    c.core.board.fail(QueryFailed("boom"), [2])
    c.tick(0.01)
    assert state(c, request) == State.DONE
    assert "A" in c.core.plans.failed
    later = growing()
    request = behind_a_source(later)
    later.tick(BORN_S + 0.1)
    assert state(later, request) == State.DONE, "each wait has a limit"


# ---- with a checkpoint location


def durable(**options: Any) -> tuple[Cluster, int]:
    """Ask for a stage behind the source of a query with a location, which has the version."""
    c = growing(**options)
    c.core.plans.keep_versions([])
    request = behind_a_source(c)
    (order,) = orders(c)
    assert isinstance(order, VersionToKeep)
    answer(c, order)
    assert state(c, request) == State.UNDER_WAY
    return c, request


def orders(c: Cluster) -> list[Any]:
    return c.core.plans.to_keep()


def answer(c: Cluster, order: Any, error: str = "") -> None:
    c.core.plans.kept(order, c.now, error)
    c.take(c.core.board.take())


def numbers(births: Any) -> dict[int, int]:
    return {each.producer: each.number for each in births}


def test_nothing_is_told_of_a_birth_before_the_location_has_it() -> None:
    c, request = durable()
    c.report(0, born(0, 0, 7))
    (order,) = orders(c)
    c.report(1, born(1, 1, 3))
    c.report(1, born(1, 1, 4))
    assert not c.sent(EdgeStored)
    assert not orders(c), "one order is under way"
    c.tick(BORN_S + 1.0)
    assert state(c, request) == State.UNDER_WAY, (
        "rows that come now might not be for the stage after a loss of everything"
    )
    answer(c, order)
    assert numbers(c.sent(EdgeStored)) == {0: 7}
    (order,) = orders(c)
    answer(c, order)
    assert numbers(c.sent(EdgeStored)) == {0: 7, 1: 3}, "the first report counts"
    assert state(c, request) == State.DONE


def test_a_location_that_cannot_keep_a_birth_is_asked_again_by_the_next_report() -> None:
    c, request = durable()
    c.report(1, born(1, 1, 3))
    (order,) = orders(c)
    answer(c, order, "no space left")
    assert not orders(c)
    c.report(1, born(1, 1, 3))
    (again,) = orders(c)
    answer(c, order)
    assert not c.sent(EdgeStored), "a late answer to the order before"
    answer(c, again)
    assert numbers(c.sent(EdgeStored)) == {1: 3}
    c.report(0, born(0, 0, 7))
    answer(c, *orders(c))
    assert state(c, request) == State.DONE


def test_a_location_that_keeps_no_birth_within_its_limit_ends_the_query_or_the_stage() -> None:
    c, _ = durable()
    c.report(0, born(0, 0, 7))
    answer(c, *orders(c), "no space left")
    c.tick(STORE_MAX_S + 1.0)
    assert "with which row of source" in str(c.core.error)
    assert str(c.core.error).endswith("stage A begins: no space left")
    other, request = durable(on_failure="stage")
    other.report(0, born(0, 0, 7))
    other.tick(STORE_MAX_S + 1.0)
    assert other.core.error is None
    assert other.core.plans.failed["A"].error.endswith("stage A begins: no answer came")
    assert state(other, request) == State.DONE


def test_versions_name_births_that_are_known_and_removed_streams_lose_theirs() -> None:
    c, _ = durable()
    c.report(0, born(0, 0, 7))
    (first,) = orders(c)
    answer(c, first)
    c.report(1, born(1, 1, 3))
    (second,) = orders(c)
    answer(c, second)
    c.deaf = {"w0.0"}
    c.remove("A")
    (version,) = orders(c)
    answer(c, version)
    c.report(0, PlanSeen(node=0, version=2, error="no"))
    (back,) = orders(c)
    assert numbers(back.births) == {0: 7, 1: 3}, "the version without the stream had none"
    answer(c, back)
    c.deaf = set()
    c.remove("A")
    answer(c, *orders(c))
    assert not c.core.plans.births.known


def test_a_start_on_a_location_tells_the_births_that_it_has() -> None:
    c = growing()
    kept = EdgeStored(edge=2, producer=0, number=7, mark=Mark(6, 5))
    c.core.plans.keep_versions([kept])
    c.lose(2)
    c.join(2, attempt=1)
    assert [each for each in c.told("w2.1") if isinstance(each, EdgeStored)] == [kept]
    assert not orders(c)
