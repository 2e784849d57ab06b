"""Differences between kinds of replicas are asked where they matter at a worker (design: kinds)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from one_worker import planned
from scripted import OTHER, SCHEMA, Plain, feed, made, work

import flux
import flux.replica.kinds as kinds
from flux.errors import ProtocolError, QueryFailed
from flux.exchange.producer import Producer
from flux.replica.kinds import active
from flux.replica.order_exchange import claim_of
from flux.replica.order_log import OrderClaim, OrderLog
from flux.replica.output_checksums import CHECKSUMS_KEPT
from flux.replica.replica import Replica
from flux.wire.codec import decode_command
from flux.wire.control import NewTable
from flux.wire.frames import encode
from flux.wire.messages import Hello, OrderEntry, Orders, OrdersSeen, PartitionOrder
from flux.worker.core import WorkerCore
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table
from tests.flux.test_order import entry
from tests.simulation.witness import KIND as WITNESS_KIND
from tests.simulation.witness import WITNESS, WitnessLog

A, B = 1, 2


#: Has an operator, and does nothing with it before it leads.
SILENT = replace(
    active, name="silent", applies=False, releases=False, commits=False, safe=False, leads_as=None, wanted=None
)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    kinds.register(SILENT)
    kinds.register(WITNESS_KIND)
    yield
    kinds.unregister("silent")
    kinds.unregister(WITNESS)


def flux_stage(name: str) -> object:
    return flux.stage(partitions=1, replicas=2, name=name)(Plain)


def one_stage(*replicas: ReplicaAt, epoch: int = 0) -> Table:
    return Table(epoch, ((replicas,),), (), {replica.worker: "" for replica in replicas})


# ---- the table


def test_a_replica_is_active_unless_the_table_says_otherwise_and_its_kind_travels() -> None:
    table = one_stage(ReplicaAt(0, 0), ReplicaAt(1, 0, kind=WITNESS))
    came = decode_command(encode(NewTable(table=table, complete={})))
    assert isinstance(came, NewTable)
    assert came.table == table
    assert [replica.kind for replica in came.table.replicas(0, 0)] == ["active", WITNESS]


def test_a_kind_that_nobody_knows_is_named() -> None:
    with pytest.raises(
        ProtocolError, match="'spare' here, only active, disk, independent, silent, standby, upstream, witness"
    ):
        kinds.kind_of(ReplicaAt(0, 0, kind="spare"))


# ---- commits


def test_a_replica_whose_kind_does_not_count_is_not_waited_for() -> None:
    log = OrderLog()
    log.lead([ReplicaAt(A, 0), ReplicaAt(B, 0, kind="silent")], 0)
    log.append(entry(0))
    log.on_seen(A, 0, 1)
    assert log.committed == 1
    assert log.alone(log.peers[A]), "it need not be told what it commits by having it"
    assert not log.alone(log.peers[B])


def test_one_that_counts_is_waited_for_whatever_its_kind() -> None:
    log = OrderLog()
    log.lead([ReplicaAt(A, 0), ReplicaAt(B, 0, kind=WITNESS)], 0)
    log.append(entry(0))
    log.on_seen(A, 0, 1)
    assert log.committed == 0
    log.on_seen(B, 0, 1)
    assert log.committed == 1


def test_one_that_needs_no_copy_of_the_state_gets_the_order_from_what_is_committed() -> None:
    log = OrderLog()
    log.lead([], 0)
    log.append(entry(0))
    log.lead([ReplicaAt(A, 3, False), ReplicaAt(B, 3, False, WITNESS)], 1)
    assert log.peers[A].acked is None
    assert log.peers[B].acked == 1


# ---- operators


def secondary(kind: kinds.ReplicaKind) -> Replica:
    """Make a secondary with a committed step, and the rows of this step."""
    like = made(Plain, 2)
    replica = Replica(like.stage, 0, 0, like.outlets, like.limits, kind)
    replica.follow()
    replica.order.on_orders(0, 0, [entry(0)], 1, 0)
    feed(replica, 0, 7)
    return replica


def test_a_secondary_applies_what_is_committed_if_its_kind_does() -> None:
    assert work(secondary(active), 1.0) == 1


def test_one_whose_kind_does_not_apply_begins_when_it_leads() -> None:
    replica = secondary(SILENT)
    assert work(replica, 1.0) == 0
    assert not replica.missing()
    replica.lead(1, [])
    assert work(replica, 1.0) == 1


def test_no_checksums_are_kept_for_a_kind_whose_output_is_not_compared() -> None:
    primary = made(Plain, 2)
    primary.lead(0, [ReplicaAt(OTHER, 0, kind=WITNESS)])
    for sequence in range(3 * CHECKSUMS_KEPT):
        feed(primary, sequence, sequence)
        work(primary, 10.0)
    assert primary.output.checksums.at(CHECKSUMS_KEPT) is None


class Passing(flux.Operator):
    """An operator that passes rows on, so that its output has a checksum."""

    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch


def test_output_is_compared_from_the_copy_on_whatever_the_plan_says() -> None:
    """Give the stage, which had one replica at the start, another one."""
    primary, other = made(Passing, 1), made(Passing, 1)
    primary.lead(0, [])
    feed(primary, 0, 7)
    work(primary, 1.0)
    assert primary.output.checksums.at(primary.applied) is None, "there is nobody to compare with"
    primary.output.compare(primary.applied)
    other.adopt(primary.state())
    for replica in (primary, other):
        replica.lead(1, [ReplicaAt(OTHER, 1)])
        feed(replica, 1, 8)
        work(replica, 2.0)
    assert primary.applied == other.output.checksums.steps == 2
    assert primary.output.checksums.at(2) == other.output.checksums.newest != primary.output.checksums.at(1)
    assert [replica.validate() for replica in (primary, other)] == [None, None]


def test_a_primary_without_others_does_not_keep_checksums() -> None:
    primary = made(Passing, 2)
    primary.lead(0, [ReplicaAt(OTHER, 0)])
    feed(primary, 0, 7)
    work(primary, 1.0)
    assert primary.output.checksums.at(1) is not None
    primary.lead(1, [])
    feed(primary, 1, 8)
    work(primary, 2.0)
    assert primary.output.checksums.at(2) is None
    assert not primary.state()["compared"]
    primary.output.compare(primary.applied)
    assert primary.output.checksums.at(2) == primary.output.checksum


def test_what_is_repeated_is_compared_to_its_end_though_nobody_else_is_left() -> None:
    """Go on to the end: a primary alone stops to compare, and would begin anew in the middle when another replica
    comes, and claim to differ."""
    lost, heir = made(Passing, 2), made(Passing, 2)
    lost.lead(0, [ReplicaAt(OTHER, 0)])
    for sequence in range(3):
        feed(lost, sequence, sequence)
        feed(heir, sequence, sequence)
        work(lost, 1.0)
    lost.order.on_seen(OTHER, 0, lost.order.end, 0)
    claim = claim_of(lost)
    steps = claim.steps
    assert steps == lost.order.end > 1
    order = OrderLog()
    order.on_orders(0, 0, lost.order.since(0), steps, 0)
    heir.succeed(order, 0, claim)
    heir.lead(1, [])
    assert work(heir, 2.0, 1) == 1
    heir.output.compare(heir.applied)
    assert work(heir, 2.0) == steps - 1, "and there is no complaint"
    assert heir.output.checksums.newest == lost.output.checksums.newest


def test_what_is_repeated_and_differs_ends_the_query() -> None:
    heir = made(Passing, 2)
    feed(heir, 0, 7)
    order = OrderLog()
    order.on_orders(0, 0, [OrderEntry(1.0, 1.0, [(0, 0, 0)])], 1, 0)
    heir.succeed(order, 0, OrderClaim(1, 99))
    heir.lead(1, [])
    with pytest.raises(QueryFailed, match="repeated after a loss and gave other output"):
        work(heir, 2.0)


# ---- streams


def test_a_producer_keeps_nothing_for_a_kind_that_reads_no_streams() -> None:
    producer = Producer(StreamId(0, 0), 0, 1, 1 << 20, 1.0)
    producer.on_table(one_stage(ReplicaAt(A, 0), ReplicaAt(B, 0, kind=WITNESS)), 0, 0.0)
    assert [send.worker for send in producer.poll(0.0) if isinstance(send.message, Hello)] == [A]
    assert kinds.without_streams() == {WITNESS}


def test_a_consumer_reads_from_a_secondary_only_if_its_kind_releases_output() -> None:
    core = WorkerCore(planned(flux_stage("First"), flux_stage("Second")), 0)
    replicas = ReplicaAt(1, 0, kind="silent"), ReplicaAt(2, 0, kind="silent"), ReplicaAt(3, 0)
    endpoints = dict.fromkeys(range(4), "")
    core.on_table(Table(0, ((replicas,), ((ReplicaAt(0, 0),),)), ((),), endpoints), 0.0)
    found = core.hosted.producers_of(StreamId(1, 0))
    assert found == {1: (0, True), 2: (0, False), 3: (0, True)}, "the first is the primary"


# ---- workers


def test_a_worker_keeps_the_order_for_a_replica_without_operator_and_forgets_it_with_the_table() -> None:
    core = WorkerCore(planned(flux_stage("First")), 0)
    witnessed = Table(0, (((ReplicaAt(1, 0), ReplicaAt(0, 0, kind=WITNESS)),),), ((),), {0: "", 1: ""})
    core.on_table(witnessed, 0.0)
    assert not core.replicas
    assert isinstance(core.hosted.followers[0, 0], WitnessLog)
    core.on_data_plane("primary", Orders([PartitionOrder(0, 0, 0, 0, 0, [entry(0)], 0)]), [], 0.0)
    core.on_data_plane("primary", Orders([PartitionOrder(0, 0, 9, 0, 1, [entry(1)], 0)]), [], 0.0)
    answers = [effect.message for effect in core.poll(0.0) if isinstance(getattr(effect, "message", None), OrdersSeen)]
    assert [answer.items[0].received_below for answer in answers] == [1], "orders for another life are stale"
    assert core.counters.stale == 1
    core.on_table(Table(1, (((ReplicaAt(1, 0),),),), ((),), {0: "", 1: ""}), 0.0)
    assert not core.hosted.followers


def test_a_replica_without_operator_that_is_to_lead_ends_the_query() -> None:
    core = WorkerCore(planned(flux_stage("First")), 0)
    with pytest.raises(AssertionError, match="a replica without state cannot lead"):
        core.on_table(Table(0, (((ReplicaAt(0, 0, kind=WITNESS),),),), ((),), {0: ""}), 0.0)
