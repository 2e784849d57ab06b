"""A sink gets each batch of a last stage's output when it is committed, and after a take-over goes on where it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from scripted import STREAM, feed, made, work

import flux
from flux.errors import QueryFailed
from flux.replica.order_exchange import outgoing
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.wire.control import PartitionFinished
from flux.wire.messages import OrderEntry
from flux.worker.effects import ToController
from flux.worker.output_delivery import OutputDelivery
from partitioning.table import ReplicaAt

OTHER, SCHEMA = 1, pa.schema([("x", pa.int64())])


class Echo(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Any:
        yield batch


class Kept:
    """An outside that has the positions below ``sure`` for good."""

    def __init__(self) -> None:
        self.sure = 0
        self.ended = 0
        self.begun: list[int] = []
        self.written: list[tuple[int, list[int]]] = []

    def has(self, stage: int, partition: int) -> int:
        return self.sure

    def begins(self, stage: int, partition: int, position: int, first: bool) -> None:
        self.begun.append(position)

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        self.written.append((position, batch.column("x").to_pylist()))

    def compared(self, stage: int, partition: int) -> bool:
        return False

    def ends(self, stage: int, partition: int) -> None:
        self.ended += 1


def leaving(*replicas: Replica, kept_max: str = "1m") -> tuple[OutputDelivery, Kept, list[Any]]:
    """Deliver output of replicas, each alone on its worker, to a sink. Return the delivery, the outside, and a list of
    messages and of replicas that are woken."""
    told: list[Any] = []
    outside = Kept()
    for replica in replicas:
        replica.outlets.clear()
        replica.stage = replace(replica.stage, sink=flux.Sink())
    plan = SimpleNamespace(
        stages=[replica.stage for replica in replicas], settings=Settings.of(sink_max_bytes=kept_max), durable=False
    )
    found = OutputDelivery(0, plan, {r.key: r for r in replicas}, told.append, told.append)  # type: ignore[arg-type]
    found.outside = outside
    for replica in replicas:
        found.open(replica)
    return found, outside, told


def follower(steps: int) -> tuple[Replica, OutputDelivery, Kept]:
    """Make a secondary that has applied ``steps`` committed steps of one row each."""
    replica = made(Echo, 2)
    found, sink, _ = leaving(replica)
    replica.follow()
    entries = [OrderEntry(1.0, 1.0, [(*STREAM, step)]) for step in range(steps)]
    replica.order.on_orders(0, 0, entries, steps, 0)
    for step in range(steps):
        feed(replica, step, step)
    work(replica, 1.0)
    return replica, found, sink


def test_a_sink_hears_where_it_begins_and_then_gets_each_batch_once() -> None:
    replica = made(Echo)
    found, sink, _ = leaving(replica)
    replica.lead(0, [])
    for step in range(2):
        feed(replica, step, step)
        work(replica, 1.0)
        found.flush(0.0)
    assert (sink.begun, sink.written) == ([0], [(0, [0]), (1, [1])])


def test_what_a_lost_primary_had_committed_and_not_handed_on_leaves_from_the_next_one() -> None:
    replica, found, sink = follower(steps=4)
    assert replica.output.exit is not None
    replica.output.exit.forget(2)  # its primary has said so; the rest was lost with it, or is not known to have come
    found.flush(0.0)
    assert sink.written == []
    replica.lead(1, [])
    found.flush(0.0)
    assert (sink.begun, sink.written) == ([2], [(2, [2]), (3, [3])])


def test_output_is_kept_until_the_primary_says_that_the_outside_has_it() -> None:
    replica, found, sink = follower(steps=4)
    sink.sure = 3
    found.flush(0.0)
    assert replica.output.exit is not None
    assert len(replica.output.exit) == 4, "what a sink here says is not about the primary elsewhere"
    replica.output.exit.forget(3)
    assert (len(replica.output.exit), replica.output.exit.left) == (1, 3)


def test_who_hears_of_what_has_left_before_it_has_come_so_far_does_not_keep_it() -> None:
    replica, _, _ = follower(steps=2)
    assert replica.output.exit is not None
    replica.output.exit.forget(5)
    replica.order.on_orders(0, 2, [OrderEntry(1.0, 1.0, [(*STREAM, step)]) for step in range(2, 7)], 7, 2)
    for step in range(2, 7):
        feed(replica, step, step)
    work(replica, 1.0)
    assert (len(replica.output.exit), replica.output.exit.position) == (2, 7)
    replica.output.exit.validate()


def test_a_copy_of_state_carries_what_has_not_left() -> None:
    replica, _, _ = follower(steps=3)
    assert replica.output.exit is not None
    replica.output.exit.forget(1)
    copied = made(Echo, 2)
    found, sink, _ = leaving(copied)
    copied.adopt(replica.state())
    copied.lead(1, [])
    found.flush(0.0)
    assert (sink.begun, sink.written) == ([1], [(1, [1]), (2, [2])])


def test_the_end_is_reported_when_the_outside_has_everything() -> None:
    replica = made(Echo, 2)
    found, sink, told = leaving(replica)
    replica.lead(0, [ReplicaAt(OTHER, 0)])
    feed(replica, 0, 7)
    feed(replica, 1)
    work(replica, 1.0)
    replica.order.on_seen(OTHER, 0, replica.order.end, replica.applied)
    replica.release()
    assert replica.complete
    found.report(replica)
    found.flush(0.0)
    assert (sink.written, told) == ([(0, [7])], [])
    sink.sure = 1
    found.flush(0.0)
    found.flush(0.0)
    assert told == [ToController(PartitionFinished(node=0, stage=0, partition=0))]


def test_a_primary_waits_for_a_sink_that_is_slow_and_goes_on_when_there_is_room() -> None:
    replica = made(Echo, step_max_rows=1)
    found, sink, told = leaving(replica, kept_max="1k")
    replica.lead(0, [])
    for step in range(20):
        feed(replica, step, step)
    while replica.ready(1.0):
        replica.apply(replica.next_step(1.0))
    assert 0 < replica.applied < 20
    found.flush(0.0)
    assert told == []
    sink.sure = replica.applied
    found.flush(0.0)
    assert told == [replica.key], "it is woken"
    assert replica.ready(1.0)


def test_a_secondary_does_not_wait_for_the_sink_of_another() -> None:
    replica = made(Echo, 2)
    leaving(replica, kept_max="1k")
    replica.follow()
    replica.order.on_orders(0, 0, [OrderEntry(1.0, 1.0, [(*STREAM, step)]) for step in range(20)], 20, 0)
    for step in range(20):
        feed(replica, step, step)
    work(replica, 1.0)
    assert replica.applied == 20


def test_what_has_left_is_told_with_the_orders_and_by_itself_now_and_then() -> None:
    replica = made(Echo, 2)
    found, sink, _ = leaving(replica)
    replica.lead(0, [ReplicaAt(OTHER, 0)])
    feed(replica, 0, 7)
    work(replica, 1.0)
    found.flush(0.0)
    (item,) = outgoing([replica], 1.0, 0.1)[OTHER]
    assert item.left == 0
    replica.order.on_seen(OTHER, 0, replica.order.end, replica.applied)
    found.flush(0.0)
    sink.sure = 1
    found.flush(0.0)
    assert outgoing([replica], 1.05, 0.1)[OTHER][0].left == 1, "with the commit"
    assert outgoing([replica], 1.06, 0.1) == {}
    feed(replica, 1, 8)
    work(replica, 1.0)
    list(outgoing([replica], 1.07, 0.1))
    replica.order.on_seen(OTHER, 0, replica.order.end, replica.applied)
    list(outgoing([replica], 1.08, 0.1))
    found.flush(0.0)
    sink.sure = 2
    found.flush(0.0)
    assert outgoing([replica], 1.1, 0.1) == {}, "not for each batch"
    assert outgoing([replica], 1.2, 0.1)[OTHER][0].left == 2


def test_nothing_is_ordered_ahead_in_front_of_a_sink() -> None:
    """Order no step ahead: other replicas would apply it, and keep its output, while this one waits."""
    replica = made(Echo, 2, step_max_rows=1)
    leaving(replica)
    replica.lead(0, [ReplicaAt(OTHER, 0)])
    for step in range(5):
        feed(replica, step, step)
    replica.decide_ahead(1.0)
    assert replica.order.end == 0


def test_a_replica_in_place_of_a_lost_one_orders_no_step_before_the_sink_has_said_where_its_output_goes_on() -> None:
    replica = made(Echo)
    found, sink, told = leaving(replica)
    sink.sure = -1
    replica.begin_behind_lost()
    replica.lead(0, [])
    feed(replica, 0, 7)
    work(replica, 1.0)
    found.flush(0.0)
    assert (replica.order.end, replica.between_steps, told) == (0, False, []), "no order, and no copy of its state"
    sink.sure = 5
    found.flush(0.0)
    assert (replica.between_steps, told) == (True, [replica.key]), "it is woken"
    work(replica, 1.0)
    found.flush(0.0)
    assert sink.written == [(5, [7])]


def test_what_a_secondary_keeps_is_not_taken_for_outside() -> None:
    _, found, _ = follower(steps=2)
    (kept,) = found.exits()
    assert (kept.base, kept.end, len(kept)) == (0, 2, 2)


def test_a_secondary_that_has_not_heard_is_told_again() -> None:
    replica = made(Echo, 2)
    found, sink, _ = leaving(replica)
    replica.lead(0, [ReplicaAt(OTHER, 0)])
    feed(replica, 0, 7)
    work(replica, 1.0)
    outgoing([replica], 1.0, 0.1)
    replica.order.on_seen(OTHER, 0, replica.order.end, replica.applied)
    found.flush(0.0)
    sink.sure = 1
    found.flush(0.0)
    assert [outgoing([replica], now, 0.1)[OTHER][0].left for now in (1.2, 1.4)] == [1, 1], "the first may be lost"
    peer = replica.order.peers[OTHER]
    assert peer.wants_left(1, 1.6)
    peer.left = 1  # it has answered
    assert not peer.wants_left(1, 1.6)


def test_an_outside_that_has_more_than_all_output_is_of_another_query() -> None:
    replica = made(Echo)
    found, sink, _ = leaving(replica)
    replica.lead(0, [])
    feed(replica, 0, 7)
    feed(replica, 1)
    work(replica, 1.0)
    sink.sure = 1000
    with pytest.raises(QueryFailed, match="the outside has 1000 batches, but its whole output is 1"):
        found.flush(0.0)


def test_a_replica_that_is_given_up_has_its_sink_closed() -> None:
    replica = made(Echo)
    found, sink, _ = leaving(replica)
    found.close(replica)
    assert sink.ended == 0, "it has never led"
    replica.lead(0, [])
    found.flush(0.0)
    found.close(replica)
    assert sink.ended == 1
