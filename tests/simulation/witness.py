"""A kind of replica that exists in tests only: a witness receives and acks the order of a partition, and does nothing else.

It holds no state, reads no streams, may never lead and saves no partition, but a step is committed only when it has the
entry. To register it is all that it takes: that it lives among active replicas, and keeps every law, shows that the exchange
asks kinds and does not take them for active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import controller.replicas.kinds as at_controller
import flux.replica.kinds as at_workers
from flux.dataflow.plan import StagePlan
from flux.replica.kinds import AckMeaning, ReplicaInstaller
from flux.replica.order_log import OrderLog
from flux.replica.release import CommittedOnly
from flux.wire.messages import PartitionOrder, PartitionSeen
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt

WITNESS = "witness"


class WitnessLog:
    """One witness. ``order``: None until the first orders come."""

    def __init__(self, key: PartitionKey, incarnation: int) -> None:
        self.key = key
        self.incarnation = incarnation
        self.order: OrderLog | None = None
        self.answers = 0

    def on_orders(self, item: PartitionOrder) -> PartitionSeen | None:
        if self.order is None:
            if item.first > item.committed:
                return None  # the first message was lost; what it had is not committed without this witness
            self.order = OrderLog(item.first)
        order = self.order
        if not order.on_orders(item.term, item.first, item.entries, item.committed, order.committed):
            return None
        order.trim(order.committed)
        self.answers += 1
        through, applied = order.verified, order.committed
        return PartitionSeen(*self.key, self.incarnation, order.term, through, applied, checked=0, checksum=0)


class Witness:
    """As workers see it."""

    name = WITNESS
    applies = False
    releases = False
    acks = AckMeaning.NOTHING
    commits = True
    copies = False
    replays = False
    release = CommittedOnly  # no replica with an operator is of this kind

    def install(self, host: ReplicaInstaller, key: PartitionKey, replica: ReplicaAt) -> None:
        host.keep_order(key, WitnessLog(key, replica.incarnation))


@dataclass(frozen=True)
class WitnessPlaces:
    """As the controller sees it. ``count`` for each partition."""

    count: int
    name = WITNESS
    role = "witness"
    leads_as = None
    at_once = False
    safe = False

    def wanted(self, stage: StagePlan) -> int:
        return self.count


@contextmanager
def witnesses(count: int) -> Iterator[None]:
    """Each partition has so many beside its active replicas."""
    if not count:
        yield
        return
    at_workers.register(Witness())
    at_controller.register(WitnessPlaces(count))
    try:
        yield
    finally:
        at_workers.unregister(WITNESS)
        at_controller.unregister(WITNESS)
