"""Phases are tables: an event that is not in them is an assertion, and every message that they list is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from controller.course import query_phases as queries
from controller.course.query_phases import QueryEvent, QueryPhase
from controller.replicas import additions, moves
from controller.replicas.addition_limits import CONFIRM_MAX_S, READY_MAX_S, SAFE_MAX_S
from controller.replicas.additions import AdditionEvent, Phase
from controller.replicas.moves import MoveEvent, MovePhase
from flux.wire.control import CopyState, PartitionFinished, ReplicaDiverged, TableChanged
from tests.controller.cluster import Cluster

TABLES: dict[str, tuple[type, type, Mapping[Any, Any], Callable[[Any, Any], Any], Any, set[Any]]] = {
    "addition": (Phase, AdditionEvent, additions.STEPS, additions.after, Phase.RETAIN, {Phase.SAFE, Phase.DROPPED}),
    "move": (MovePhase, MoveEvent, moves.STEPS, moves.after, MovePhase.WAITING, {MovePhase.DONE, MovePhase.GIVEN_UP}),
    "query": (QueryPhase, QueryEvent, queries.STEPS, queries.after, QueryPhase.STARTING, {QueryPhase.ENDED}),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_phase_can_be_reached_and_all_but_the_last_end(name: str) -> None:
    every, _, steps, _, first, last = TABLES[name]
    assert {first} | {step.to for step in steps.values()} == set(every)
    assert {phase for phase, _ in steps} == set(every) - last


@pytest.mark.parametrize("name", TABLES)
def test_whatever_is_not_in_the_table_is_an_assertion(name: str) -> None:
    every, events, steps, after, _, _ = TABLES[name]
    refused = [(phase, event) for phase in every for event in events if (phase, event) not in steps]
    assert refused
    for phase, event in refused:
        with pytest.raises(AssertionError, match=event.name):
            after(phase, event)


def test_no_phase_of_an_addition_lasts_for_ever() -> None:
    """Copies that fail end the phase of the copy after a number of them, and the controller itself ends the phase after it."""
    assert additions.LIMIT_S[Phase.RETAIN] == CONFIRM_MAX_S
    assert additions.LIMIT_S[Phase.READY] == READY_MAX_S
    assert additions.LIMIT_S[Phase.LIVE] == SAFE_MAX_S


def told(c: Cluster, act: Callable[[], Any]) -> set[type]:
    c.orders.clear()
    act()
    return {type(order) for _, order in c.orders}


def test_what_is_told_with_each_step_of_an_addition_is_what_the_table_says() -> None:
    c = Cluster(slots=4)
    c.mute = {f"w{slot}.0" for slot in range(4)}
    c.lose(c.holders()[1])
    addition = c.core.repairs.under_way[0, 0]

    def confirm() -> None:
        for node in list(c.table.endpoints):
            c.confirm(node, c.table.epoch)

    # No other replica is added: this one has its turn as soon as all have confirmed, and no table waits for others.
    for steps, act in [
        ([AdditionEvent.CONFIRMED, AdditionEvent.TURN], confirm),
        ([AdditionEvent.FOLLOWS, AdditionEvent.LISTED], lambda: c.caught_up(False)),
        ([AdditionEvent.COMPLETE], lambda: c.caught_up(True)),
    ]:
        phase, tells = addition.phase, set()
        orders = told(c, act)
        for heard in steps:
            step = additions.STEPS[phase, heard]
            phase, tells = step.to, tells | {step.tells}
        assert addition.phase == phase
        assert tells - {None} <= orders
        assert (CopyState in orders) == (phase == Phase.COPY)


def test_an_addition_that_is_dropped_is_out_of_the_table_that_is_told_with_it() -> None:
    c = Cluster(slots=4)
    c.lose(c.holders()[1])
    c.caught_up(False)
    addition = c.core.repairs.under_way[0, 0]
    diverged = ReplicaDiverged(
        node=c.holders()[0], stage=0, partition=0, worker=addition.worker, incarnation=addition.incarnation, step=1
    )
    assert TableChanged in told(c, lambda: c.report(c.holders()[0], diverged))
    assert addition.phase == Phase.DROPPED


def test_a_move_waits_is_under_way_and_is_done() -> None:
    c = Cluster(slots=4, partitions=2)
    source = c.holders()[0]
    target = next(worker for worker in c.table.endpoints if worker not in {*c.holders(0), *c.holders(1)})
    c.move(source, target)
    (job,) = c.core.moving.jobs()
    assert job.phase == MovePhase.UNDER_WAY
    assert TableChanged in told(c, lambda: c.complete())
    assert job.phase == MovePhase.DONE
    assert [event.kind for event in c.events("move")] == [
        moves.STEPS[MovePhase.UNDER_WAY, MoveEvent.SOURCE_DROPPED].event
    ]


def test_a_move_whose_target_is_lost_waits_again_or_is_given_up() -> None:
    c = Cluster(slots=4)
    source = c.holders()[0]
    target = next(worker for worker in c.table.endpoints if worker not in c.holders())
    c.move(source, target)
    (job,) = c.core.moving.jobs()
    c.lose(target)
    assert job.phase == MovePhase.GIVEN_UP
    assert [event.worker for event in c.events("move given up")] == [target]


def test_a_query_whose_output_is_kept_is_finished_before_it_ends() -> None:
    c = Cluster(slots=2, collect=1)
    assert c.core.phase == QueryPhase.RUNNING
    for stage, partition in sorted(c.core.unfinished):
        node = c.table.stages[stage][partition][0].worker
        c.report(node, PartitionFinished(node=node, stage=stage, partition=partition))
    assert c.core.phase == QueryPhase.FINISHED
    c.take(c.core.driver.on_stop())
    assert c.core.phase == QueryPhase.ENDED
    c.take(c.core.driver.on_stop())
    assert c.core.error is None, "to stop it again is nothing"


@pytest.mark.parametrize("both_have_it", [False, True])
def test_kept_output_whose_input_is_gone_is_shown_only_by_a_replica_that_has_all_of_it(both_have_it: bool) -> None:
    """Another safe replica knows the order of all rows, and would wait for ever for the rows."""
    c = Cluster(slots=4, stages=2, collect=1)
    before, collecting = c.holders(stage=0), c.holders(stage=2)
    assert not set(before) & set(collecting)
    for node in collecting if both_have_it else collecting[:1]:
        c.report(node, PartitionFinished(node=node, stage=2, partition=0))
    for node in before:
        c.lose(node)
    assert (c.core.phase, c.holders(stage=2)) == (QueryPhase.FINISHED, collecting)
    c.lose(collecting[0])
    if both_have_it:
        assert (c.core.phase, c.holders(stage=2)) == (QueryPhase.FINISHED, collecting[1:])
    else:
        assert "the only safe replica" in str(c.core.error)


@pytest.mark.parametrize("complete", [False, True])
def test_kept_output_that_waits_for_rows_that_were_lost_after_it_took_over_ends_the_query(complete: bool) -> None:
    """At the time of the take-over, there was still a replica that could have given the rows."""
    c = Cluster(slots=4, stages=2, collect=1, heartbeat_last_timeout=5.0)
    before, collecting = c.holders(stage=0), c.holders(stage=2)
    assert not set(before) & set(collecting)
    c.report(collecting[0], PartitionFinished(node=collecting[0], stage=2, partition=0))
    c.lose(collecting[0])
    for node in before:
        c.lose(node)
    c.tick(4.0)
    assert c.core.phase == QueryPhase.FINISHED, "it may have the rows already"
    if complete:
        c.report(collecting[1], PartitionFinished(node=collecting[1], stage=2, partition=0))
    c.tick(0.5)
    c.tick(6.0)
    if complete:
        assert (c.core.phase, c.core.error) == (QueryPhase.FINISHED, None)
    else:
        assert f"worker {collecting[1]} has a part of it" in str(c.core.error)
