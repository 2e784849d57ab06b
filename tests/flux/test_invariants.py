"""State machines notice when their own picture is wrong: each invariant is broken here once."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from clustered import clustered
from one_worker import Feeder, planned
from scripted import STREAM, Plain, feed, made, work
from test_transfers import Two

import flux
from flux.exchange.consumer_progress import ConsumerProgress
from flux.exchange.feed import Counters, Feed
from flux.exchange.inbound import Inbound
from flux.exchange.log import NEVER, Log
from flux.exchange.producer import Producer
from flux.replica.deltas import DeltaTracker
from flux.replica.order_log import OrderLog
from flux.replica.output import ReplicaOutput, SinkBuffer
from flux.replica.output_checksums import OutputChecksums
from flux.replica.release import CommittedOnly
from flux.replica.replica import Replica
from flux.replica.step_queue import StepQueue
from flux.state.receiver import StateReceiver
from flux.state.sender import StateSender
from flux.state.standby import Checkpoint, Standby
from flux.wire.messages import Data, OrderEntry, PartitionOrder, Resume
from flux.wire.parts import PartLimits, StateParts
from flux.worker.core import WorkerCore
from flux.worker.hosted_replicas import HostedReplicas
from flux.worker.subscriptions import Subscriptions
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import ReplicaAt, Table

OTHER = 11


def order() -> OrderLog:
    """Make the order log of a primary, with three steps, two of which the other replica has."""
    log = OrderLog()
    log.lead([ReplicaAt(OTHER, 0)], 0)
    for now in (1.0, 2.0, 3.0):
        log.append(OrderEntry(now, now, []))
    log.on_seen(OTHER, 0, 2)
    return log


def producer() -> Producer:
    """Make the producer of a stream that has ended, with one consumer on each of two workers."""
    made = Producer(StreamId(0, 0), 0, 2, 1000, 1.0)
    replicas = (ReplicaAt(OTHER, 0),), (ReplicaAt(OTHER + 1, 0),)
    made.on_table(Table(0, (replicas,), (), {}), 0, 0.0)
    made.on_resume(OTHER, Resume(0, 0, 1, 0, [(0, 0)], -1, [], 1000), 0.0)
    made.finish(0.0)
    made.validate()
    return made


def inbound() -> Inbound:
    """Make the receiving end of a stream, with two batches that wait in partition 0."""
    made = Inbound(StreamId(0, 0), 0, 1000)
    made.greet(0, "connection", 1)
    made.received.reach(5)
    made.waiting[0] = deque([3, 4])
    made.validate()
    return made


def turned(log: OrderLog) -> None:
    log._entries.reverse()


def without_its_end(made: Producer) -> None:
    made.log._entries.clear()
    made.finished = False
    made.append(clustered(pa.record_batch({"x": [1]}), [0], [1]), 0.0)
    made.finished = True


def primary() -> Replica:
    """Make a primary that has applied a step that is not committed. Another slice is ordered, and a third waits for its
    turn."""
    replica = made(Plain, 2)
    replica.lead(0, [ReplicaAt(OTHER, 0)])
    feed(replica, 0, 7)
    work(replica, 1.0)
    feed(replica, 1, 8)
    replica.decide_ahead(1.0)
    feed(replica, 2, 9)
    return replica


def secondary() -> Replica:
    """Make a secondary that has applied the only step."""
    replica = made(Plain, 2)
    replica.follow()
    replica.order.on_orders(0, 0, [OrderEntry(1.0, 1.0, [(*STREAM, 0)])], 1, 0)
    feed(replica, 0, 7)
    work(replica, 1.0)
    return replica


def with_an_exit() -> Replica:
    """Make a primary with an exit, and a batch that has not left yet."""
    replica = made(Plain)
    replica.output.keep_in(SinkBuffer(1 << 20))
    replica.lead(0, [])
    feed(replica, 0, 7)
    work(replica, 1.0)
    replica.output.exit.add(0, pa.record_batch({"x": [1]}))
    return replica


def ended(replica: Replica) -> None:
    replica.finished = replica.outlets[0].producer.finished = True


def worker() -> WorkerCore:
    """Make a worker that leads the first of two stages, whose rows wait, and follows in the second."""
    both = [flux.stage(partitions=1, replicas=2, name=name)(Plain) for name in ("First", "Second")]
    core = WorkerCore(planned(*both), 0)
    rows = ((ReplicaAt(0, 0), ReplicaAt(OTHER, 0)),), ((ReplicaAt(OTHER, 0), ReplicaAt(0, 0)),)
    core.on_table(Table(0, rows, ((),), {0: "", OTHER: ""}), 0.0)
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 1, 2)
    return core


def inbound_of(core: WorkerCore) -> Inbound:
    return core.subscriptions.streams[StreamId(0, 0)]


def leads_twice(core: WorkerCore) -> None:
    core.replicas[1, 0].primary = True
    core.hosted.note_roles()


def sends() -> StateSender:
    return Two().copied().sender


def receives() -> StateReceiver:
    two = Two().copied()
    two.deliver(two.parts.popleft())
    return two.receiver.incoming


def standby() -> Standby:
    """Make a standby with a checkpoint of two steps, and beside it one of four steps, the last of which is not
    committed."""
    made = Standby(PartitionKey(0, 0), 0)
    made.on_orders(PartitionOrder(0, 0, 0, 1, 0, [OrderEntry(float(n), float(n), []) for n in range(4)], 3))
    made.take(Checkpoint(step=2, term=1, number=0))
    made.take(Checkpoint(step=4, term=1, number=1))
    assert (made.checkpoint.step, made.beside and made.beside.step) == (2, 4)
    return made


def cuts() -> DeltaTracker:
    made = DeltaTracker()
    made.follow(0, {OTHER: 0}, PartLimits())
    made.sent_whole(OTHER, 0, 1, 100)
    made.add(memoryview(b"a"))
    return made


def one(copies: dict[Any, Any]) -> Any:
    (copy,) = copies.values()
    return copy


def without_its_cursor(made: Producer) -> None:
    made._acked.fill(-1)
    del made._cursors[OTHER]


BREAKS: list[tuple[Callable[[], Any], Callable[[Any], Any], str]] = [
    (order, lambda log: log._entries.pop(), "entries are those from base to end"),
    (order, lambda log: setattr(log, "committed", 4), "4 committed of 3"),
    (order, lambda log: setattr(log, "verified", 4), "4 verified of 3"),
    (order, turned, "time never goes back"),
    (order, lambda log: setattr(log.peers[OTHER], "sent", 4), "was sent 4 of 3"),
    (order, lambda log: setattr(log.peers[OTHER], "acked", 4), "has acked 4 of 3"),
    (
        order,
        lambda log: (log._entries.popleft(), setattr(log, "base", 1), setattr(log.peers[OTHER], "acked", 0)),
        "gone",
    ),
    (producer, without_its_end, "nothing comes after the end"),
    (producer, lambda made: made._acked.fill(3), "more counts as acked"),
    (producer, lambda made: made._acks.fill(9), "are booked elsewhere"),
    (producer, without_its_cursor, "where there is no replica"),
    (producer, lambda made: setattr(made._cursors[OTHER], "first", 7), "is told of 7"),
    (producer, lambda made: setattr(made._cursors[OTHER], "nonce", None), "is reading under nonce None"),
    (producer, lambda made: setattr(made._cursors[OTHER], "answered", False), "has not asked for"),
    (
        producer,
        lambda made: setattr(made._cursors[OTHER], "unread_since", 1.0),
        "and counted as one that reads elsewhere",
    ),
    (inbound, lambda made: setattr(made, "held_bytes", -1), "given back twice"),
    (inbound, lambda made: setattr(made, "unacked_bytes", -9), "acked what has not come"),
    (inbound, lambda made: setattr(made.feed, "connection", None), "in order on connection None"),
    (inbound, lambda made: made.others.update({7: Feed()}), "the further feed from worker 7 is not read"),
    (inbound, lambda made: made.others.update({7: made.feed}), "has two feeds, or another name"),
    (inbound, lambda made: setattr(made.feed, "nonce", -1), "in order under nonce -1"),
    (inbound, lambda made: made.waiting[0].append(5), "out of order"),
    (inbound, lambda made: made.waiting[0].reverse(), "out of order"),
    (primary, lambda made: setattr(made, "applied", 5), "5 steps applied of 2"),
    (primary, lambda made: setattr(made.order, "term", 3), "leads since 0, and has heard 3"),
    (secondary, lambda made: setattr(made.order, "committed", 0), "has applied 1 steps, and may 0"),
    (secondary, lambda made: made.waits.arrange(), "gives slices their turn"),
    (primary, lambda made: made.output._policy._marks.clear(), "1 steps are not committed, 0 are held back"),
    (
        primary,
        lambda made: made.output._policy._marks.append((5, made.output._policy._marks.popleft()[1])),
        "from step 5 on, not 0",
    ),
    (primary, lambda made: setattr(made.outlets[0].producer, "release_from", NEVER), "on, not 0"),
    (primary, lambda made: setattr(made.outlets[0].producer, "finished", True), "its partition end apart"),
    (primary, lambda made: setattr(made.output.checksums, "steps", 7), "the newest is that of 7 steps of 1"),
    (with_an_exit, lambda made: setattr(made.output.exit, "position", 9), r"kept are \[0\], of 0 to 9"),
    (
        with_an_exit,
        lambda made: made.output.exit._handed.append(made.output.exit._waiting.popleft()),
        "does not lead has handed on",
    ),
    (with_an_exit, lambda made: setattr(made.output.exit, "has_room", False), "bytes are kept, has_room is False"),
    (producer, lambda made: setattr(made.log, "has_room", False), "bytes are logged, has_room is False"),
    (producer, lambda made: setattr(made, "finished", False), "and its log is closed"),
    (primary, lambda made: setattr(made.output.room, "full", 1), "0 logs take nothing, and 1 have said so"),
    (primary, ended, "rows wait behind the end"),
    (primary, lambda made: made.waits.by_stream.update({StreamId(0, 3): deque()}), "and nothing does"),
    (
        primary,
        lambda made: made.waits.by_stream[STREAM].append(made.waits.by_stream[STREAM][0]),
        "3 slices from 1 to 1",
    ),
    (primary, lambda made: made.waits.arrivals.clear(), "0 slices have their turn, 1 are ordered, 2 wait"),
    (worker, lambda core: core.replicas.pop((1, 0)), "of epoch 0 is not here"),
    (worker, lambda core: setattr(core.replicas[1, 0], "incarnation", 3), "is that of epoch 3"),
    (worker, lambda core: core.awaited.update({(5, 0): 0}), "3 replicas are here, the table lists 2"),
    (
        worker,
        lambda core: core.hosted.partitions.update({0: {0: None, 1: None}}),
        "3 partitions are noted, 2 are here",
    ),
    (worker, lambda core: core.hosted.secondary.update({0: frozenset([0])}), "is noted as secondary"),
    (worker, leads_twice, "worker 11 leads"),
    (worker, lambda core: setattr(core.replicas[0, 0], "leads_since", 9), "leads since 9 of 0"),
    (worker, lambda core: core.replicas[0, 0].order.peers.clear(), "its peers are"),
    (worker, lambda core: setattr(core.replicas[0, 0], "frozen", 1), "frozen for 1 copies, 0 are taken"),
    (worker, lambda core: setattr(core.replicas[0, 0].order.peers[OTHER], "copying", True), "a copy that nobody sends"),
    (
        worker,
        lambda core: core.producers.update({StreamId(9, 0): producer()}),
        "2 producers, replicas and sources have 1",
    ),
    (worker, lambda core: core.producers.update({StreamId(1, 0): producer()}), "is not who produces 1.0"),
    (worker, lambda core: inbound_of(core).waiting[0].append(1), "1 wait, 2 noted"),
    (worker, lambda core: inbound_of(core).waiting.update({0: deque([7])}), "0 came last, 7 noted"),
    (worker, lambda core: inbound_of(core).waiting.update({1: deque([0])}), "1 slices wait for replicas, 2 are noted"),
    (sends, lambda made: setattr(one(made._outgoing).parts, "acked", 9999), "9999 bytes acked"),
    (receives, lambda made: made._host.awaited.clear(), "which is not awaited"),
    (
        standby,
        lambda made: setattr(made, "checkpoint", Checkpoint(step=1)),
        "its order begins at 2, its checkpoint ends at 1",
    ),
    (standby, lambda made: setattr(made, "beside", Checkpoint(step=1, term=1)), "an older checkpoint waits"),
    (
        standby,
        lambda made: setattr(made, "beside", Checkpoint(step=4, term=0)),
        "a checkpoint of an earlier primary waits",
    ),
    (cuts, lambda made: made._changes.clear(), "has cut 0, kept are 0 up to 1"),
    (receives, lambda made: setattr(one(made._incoming), "received", one(made._incoming).total), ", receiving"),
]


@pytest.mark.parametrize(("make", "break_", "said"), BREAKS, ids=[said for _, _, said in BREAKS])
def test_what_is_wrong_is_said(make: Callable[[], Any], break_: Callable[[Any], Any], said: str) -> None:
    machine = make()
    machine.validate()
    break_(machine)
    with pytest.raises(AssertionError, match=said):
        machine.validate()


def test_slices_of_an_earlier_handshake_may_be_applied_under_the_next() -> None:
    made = Inbound(StreamId(0, 0), 0, 1000)
    batch = pa.record_batch({"x": pa.array([1], pa.int64())})
    hosted, counters = [0], Counters()
    for nonce, nbytes in ((1, 300), (2, 20)):
        made.greet(0, "connection", nonce)
        made.resume(0, hosted)
        message = Data(0, 0, nonce, 0, 0, nonce - 1, [0], [1], [1], nbytes)
        taken = made.take(message, [batch], hosted, (), counters)
        assert isinstance(taken, list)
        if nonce == 1:
            (waits,) = taken
    made.applied(0, waits[1])
    assert made.unacked_bytes == 300 > made.feed.received_bytes
    made.validate()


def test_every_assertion_is_broken_by_one_of_these() -> None:
    """Count assertions in the source, so that a new one comes with its proof."""
    machines = (
        OrderLog,
        Producer,
        ConsumerProgress,
        Log,
        Feed,
        Inbound,
        Replica,
        ReplicaOutput,
        StepQueue,
        CommittedOnly,
        OutputChecksums,
        DeltaTracker,
        SinkBuffer,
        HostedReplicas,
        StateSender,
        StateParts,
        StateReceiver,
        Standby,
        Subscriptions,
        WorkerCore,
    )
    looks = [*(each.validate for each in machines), HostedReplicas._validate_role]
    written = sum(inspect.getsource(look).count("assert ") for look in looks)
    assert written == len({said for _, _, said in BREAKS})
