"""Edges that begin at running sources: the first report of a beginning counts, and an addition waits for it (design:
edge-of-a-source)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from controller.decide.plan_changes import BORN_S
from controller.decide.request_book import State
from flux.dataflow.plan_change import PlanChange
from flux.errors import QueryFailed
from flux.wire.control import EdgeBorn, EdgeStored
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
