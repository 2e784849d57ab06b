"""A kind of replica that exists in tests only: a witness receives and acks the order of a partition, and does nothing else.

A witness holds no state, reads no streams, may never lead and saves no partition, but a step is committed only when the
witness has the entry. Registration is all that the kind needs: witnesses live among active replicas and keep every law, which
shows that the exchange asks kinds and does not take them for active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from flux.replica.kinds import AckMeaning, ReplicaKind, register, unregister
from flux.replica.order_log import OrderLog
from flux.wire.messages import PartitionOrder, PartitionSeen
from partitioning.ids import PartitionKey

WITNESS = "witness"


class WitnessLog:
    """The log of one witness."""

    def __init__(self, key: PartitionKey, incarnation: int) -> None:
        self.key = key
        self.incarnation = incarnation
        #: None until the first orders come.
        self.order: OrderLog | None = None
        self.answers = 0

    def on_orders(self, item: PartitionOrder) -> PartitionSeen | None:
        if self.order is None:
            if item.first > item.committed:
                return None  # the first message was lost; its steps are not committed without this witness
            self.order = OrderLog(item.first)
        order = self.order
        if not order.on_orders(item.term, item.first, item.entries, item.committed, order.committed):
            return None
        order.trim(order.committed)
        self.answers += 1
        through, applied = order.verified, order.committed
        return PartitionSeen(*self.key, self.incarnation, order.term, through, applied, checked=0, checksum=0)


#: The kind, with none of its replicas wanted: ``witnesses`` sets their number.
KIND = ReplicaKind(
    name=WITNESS,
    applies=False,
    releases=False,
    acks=AckMeaning.NOTHING,
    commits=True,
    copies=False,
    replays=False,
    install=lambda host, key, replica: host.keep_order(key, WitnessLog(key, replica.incarnation)),
    role="witness",
    leads_as=None,
    at_once=False,
    safe=False,
    wanted=lambda stage: 0,
)


@contextmanager
def witnesses(count: int) -> Iterator[None]:
    """Give each partition this number of witnesses beside its active replicas."""
    if not count:
        yield
        return
    register(replace(KIND, wanted=lambda stage: count))
    try:
        yield
    finally:
        unregister(WITNESS)
