"""A sink gets each batch of a last stage's output when it is committed, and after a take-over goes on where it is."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from scripted import STREAM, feed, made, work

import flux
from flux.host.effects import ToController
from flux.host.leaving import Leaving
from flux.replicas.replica import Replica
from flux.wire.control import PartitionFinished
from flux.wire.messages import OrderEntry
from partitioning.table import ReplicaAt

OTHER, SCHEMA = 1, pa.schema([("x", pa.int64())])


class Echo(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Any:
        yield batch


class Kept:
    """Knows for good the positions below ``sure``."""

    def __init__(self) -> None:
        self.sure = 0
        self.begun: list[int] = []
        self.written: list[tuple[int, list[int]]] = []

    def has(self, stage: int, partition: int) -> int:
        return self.sure

    def begins(self, stage: int, partition: int, position: int) -> None:
        self.begun.append(position)

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        self.written.append((position, batch.column("x").to_pylist()))


def leaving(*replicas: Replica) -> tuple[Leaving, Kept, list[Any]]:
    """With a sink, for replicas that are alone on their workers."""
    told: list[Any] = []
    sink = Kept()
    found = Leaving(0, {replica.key: replica for replica in replicas}, told.append)
    found.sink = sink
    for replica in replicas:
        replica.outlets.clear()
        found.open(replica)
    return found, sink, told


def follower(steps: int) -> tuple[Replica, Leaving, Kept]:
    """It has applied so many steps, all committed, of one row each."""
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
        found.flush()
    assert (sink.begun, sink.written) == ([0], [(0, [0]), (1, [1])])


def test_what_a_lost_primary_had_committed_and_not_handed_on_leaves_from_the_next_one() -> None:
    replica, found, sink = follower(steps=4)
    sink.sure = 2  # the rest was lost with the primary, or is not known to have come
    found.flush()
    assert sink.written == []
    replica.lead(1, [])
    found.flush()
    assert (sink.begun, sink.written) == ([2], [(2, [2]), (3, [3])])


def test_output_is_kept_until_the_sink_has_it() -> None:
    replica, found, sink = follower(steps=4)
    found.flush()
    assert replica.exit is not None
    assert replica.exit.next == 0
    sink.sure = 3
    found.flush()
    assert replica.exit.next == 3


def test_a_copy_of_state_carries_what_has_not_left() -> None:
    replica, _, _ = follower(steps=3)
    copied = made(Echo, 2)
    found, sink, _ = leaving(copied)
    copied.adopt(replica.state())
    sink.sure = 1
    copied.lead(1, [])
    found.flush()
    assert (sink.begun, sink.written) == ([1], [(1, [1]), (2, [2])])


def test_the_end_is_reported_when_the_sink_has_everything() -> None:
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
    found.flush()
    assert (sink.written, told) == ([(0, [7])], [])
    sink.sure = 1
    found.flush()
    found.flush()
    assert told == [ToController(PartitionFinished(node=0, stage=0, partition=0))]
