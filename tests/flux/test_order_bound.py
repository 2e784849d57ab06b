"""The bound on order logs, told as stories: primaries that a slow replica holds back, and the end of that."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from scripted import OTHER, SCHEMA, STREAM, feed, made, pair, told, work

import flux
from flux.reach.starvation import Starvation
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.worker.report import behind, unapplied
from partitioning.table import ReplicaAt

STEPS_MAX = 10


class Plain(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Any:
        yield batch


def bounded() -> tuple[Replica, Replica]:
    """Make a primary and its secondary, with thirty batches each. Each batch is a step."""
    primary, secondary = pair(Plain, order_max_steps=STEPS_MAX, step_max_rows=1)
    for sequence in range(30):
        feed(primary, sequence, sequence)
        feed(secondary, sequence, sequence)
    return primary, secondary


def test_a_primary_orders_no_more_than_the_log_may_hold_until_the_other_replica_has_applied() -> None:
    primary, secondary = bounded()
    told(primary, secondary)
    assert work(primary, 1.0) == STEPS_MAX
    told(primary, secondary)
    assert primary.order.committed == STEPS_MAX, "all is received"
    assert (work(primary, 1.0), primary.held_back) == (0, True)
    assert work(secondary, 1.0, most=4) == 4
    told(primary, secondary)
    assert work(primary, 1.0) == 4
    assert max(len(primary.order), len(secondary.order)) <= STEPS_MAX


def test_what_is_ordered_ahead_is_bounded_too() -> None:
    primary, _ = bounded()
    primary.decide_ahead(1.0)
    assert primary.order.end == STEPS_MAX
    assert work(primary, 1.0) == STEPS_MAX, "what is ordered goes on"
    primary.decide_ahead(1.0)
    assert primary.order.end == STEPS_MAX, "the other has answered nothing yet"


def test_a_new_primary_is_not_held_back_by_replicas_that_have_not_answered_it_yet() -> None:
    primary, secondary = bounded()
    work(primary, 1.0)
    told(primary, secondary)
    work(secondary, 1.0)
    secondary.lead(1, [ReplicaAt(OTHER, 0, True)])
    assert secondary.order.peers[OTHER].applied == 0
    assert work(secondary, 1.0) == STEPS_MAX


def test_a_replica_that_is_lost_holds_back_nobody() -> None:
    primary, secondary = bounded()
    work(primary, 1.0)
    told(primary, secondary)
    assert not primary.ready(1.0)
    primary.lead(1, [])
    assert work(primary, 1.0) == 20


def test_orders_that_are_kept_for_a_copy_under_way_are_bounded_as_well() -> None:
    primary = made(Plain, 2, order_max_steps=STEPS_MAX, step_max_rows=1)
    primary.lead(0, [ReplicaAt(OTHER, 5, False)])
    for sequence in range(30):
        feed(primary, sequence, sequence)
    assert work(primary, 1.0, most=15) == 15, "nothing is kept for it before its state is copied"
    primary.order.note_copy(OTHER, primary.applied)
    assert work(primary, 1.0) == STEPS_MAX


def test_rows_are_let_in_for_a_starving_replica_where_a_primary_is_held_back_by_its_other_replica() -> None:
    """Let rows in at once: two workers could else starve each other's replicas, where each primary holds the credit
    that the replica beside it needs."""
    primary, _ = bounded()
    work(primary, 1.0)
    starving: Any = type("Starving", (), {"partition": 1, "primary": False, "missing": lambda self: [STREAM]})()
    starvation = Starvation(resend_s=1.0)
    for now in (1.0, 1.25):
        found = starvation.look([primary, starving], lambda stream, partition: 7, now)
    assert found[STREAM].urgent, "at once, and not after two time-outs"


def test_what_a_worker_says_of_replicas_that_lag_is_steps_seconds_and_who_is_in_the_way() -> None:
    primary, secondary = pair(Plain, step_max_rows=1, replicas_max_steps_behind=16, replicas_max_replay="100s")
    for sequence in range(12):
        feed(primary, sequence, sequence)
        feed(secondary, sequence, sequence)
    work(primary, 1.0)
    primary.busy_s = 6.0
    core: Any = type("Core", (), {"replicas": {(0, 0): primary}})()
    core.plan = type("Plan", (), {"settings": primary.limits})()
    primary.order.on_seen(OTHER, 0, 5)
    assert behind(core) == [(0, 0, OTHER, 0, 12, 6.0, 0, False)], "it has not heard all"
    told(primary, secondary)
    assert behind(core) == [(0, 0, OTHER, 0, 12, 6.0, 0, True)]
    primary.order.committed = 0
    assert behind(core)[0][-1] is False, "a third replica has not"
    primary.order.committed = 12
    work(secondary, 1.0, most=11)
    told(primary, secondary)
    for sequence in range(12, 40):
        feed(primary, sequence, sequence)
    primary.decide_ahead(1.0)
    assert behind(core) == [], (
        "one step is nothing, nor half a second of a hundred, and what is only ordered is ahead of both"
    )
    assert behind(core) == [(0, 0, OTHER, 0, 1, 0.5, 11, False)], "but for one that has applied nothing since"
    primary.busy_s = 12 * 60.0
    told(primary, secondary)
    assert behind(core) == [(0, 0, OTHER, 0, 1, 60.0, 11, True)], "one long step is"


def test_a_worker_says_of_its_own_secondaries_which_have_much_to_apply() -> None:
    primary, secondary = bounded()
    work(primary, 1.0)
    told(primary, secondary)
    core: Any = type("Core", (), {"replicas": {(0, 0): secondary}})()
    core.plan = type("Plan", (), {"settings": Settings.of(replicas_max_steps_behind=2 * STEPS_MAX - 4)})()
    assert unapplied(core) == [(0, 0, 0)]
    work(secondary, 1.0, most=2)
    assert unapplied(core) == []
    core.replicas = {(0, 0): primary}
    assert unapplied(core) == []
