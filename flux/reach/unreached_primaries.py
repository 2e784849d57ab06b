"""Primaries to which rows, or acks of their output, do not come, while another replica of their partition has them (design:
unreached).

Rows: the primary has got slices of a stream from a secondary alone. It reports so itself. Acks: the oldest element of a log has
waited for an ack. The primary asks its secondaries, and one that has all acks of it makes the report. Both take long to be
worth a report, because the other replica is to lead then.

Left to others: the decision (the controller), and loans (``flux.reach.loans``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flux.exchange.feed import Counters
from flux.exchange.producer import Producer, ToWorker
from flux.reach.loans import Borrower
from flux.replica.replica import Replica
from flux.wire.control import Unreached
from flux.wire.messages import Unacked, UnackedElement
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import Table

#: The time between two looks, as a share of the time after which a primary counts as unreached.
LOOK = 1 / 5


@dataclass(slots=True)
class OldestElement:
    """The oldest element of a log, and the time of the first look that found it there."""

    sequence: int
    since: float


class UnreachedPrimaries:
    """The primaries of a worker that are out of reach for a producer or a consumer, and the secondaries there that are not."""

    def __init__(
        self,
        worker: int,
        unreached_s: float,
        replicas: Mapping[PartitionKey, Replica],
        producers: Mapping[StreamId, Producer],
        borrower: Borrower,
        counters: Counters,
    ) -> None:
        """Begin without any. ``replicas``, ``producers``: those of the worker, live mappings; ``unreached_s``: the time after
        which a primary counts as unreached."""
        self._worker = worker
        self._unreached_s = unreached_s
        self._replicas = replicas
        self._producers = producers
        self._borrower = borrower
        self._counters = counters
        self._oldest: dict[StreamId, OldestElement] = {}
        #: By primary: committed steps at the last look. A secondary that has not applied these by now lacks rows itself, and
        #: would stand still as primary.
        self._committed: dict[PartitionKey, int] = {}
        #: The time of the next look.
        self.look_at = 0.0

    def look(self, now: float) -> Iterator[ToWorker | Unreached]:
        """Look at the primaries here: yield reports about rows, and questions about acks."""
        self.look_at = now + LOOK * self._unreached_s
        before, self._committed = (
            self._committed,
            {r.key: r.order.committed for r in self._replicas.values() if r.leads},
        )
        for key, stream, lender in self._borrower.alone(now - self._unreached_s):
            replica = self._replicas.get(key)
            peer = replica.order.peers.get(lender) if replica is not None and replica.leads else None
            if replica is not None and peer is not None and peer.applied >= before.get(key, peer.applied + 1):
                yield Unreached(
                    node=self._worker, stage=key.stage, partition=key.partition, primary=self._worker,
                    leader=replica.incarnation, worker=lender, incarnation=peer.incarnation, edge=stream.edge,
                    producer=stream.producer, acks=False,
                )  # fmt: skip
        asked: dict[int, list[UnackedElement]] = {}
        for replica, stream, sequence in self._unacked(now):
            for worker, peer in replica.order.peers.items():
                if peer.live and peer.kind.applies:
                    element = UnackedElement(*replica.key, peer.incarnation, replica.incarnation, stream.edge, sequence)
                    asked.setdefault(worker, []).append(element)
        for worker, items in asked.items():
            yield ToWorker(worker, Unacked(self._worker, items))

    def _unacked(self, now: float) -> Iterator[tuple[Replica, StreamId, int]]:
        """Yield the primaries whose logs have had the same oldest element for long, with the stream and that element."""
        known, self._oldest = self._oldest, {}
        for replica in self._replicas.values():
            for outlet in replica.outlets if _commits(replica) else ():
                log, stream = outlet.producer.log, outlet.producer.stream
                if not log or (sequence := log[log.base].sequence) >= outlet.producer.release_from:
                    continue
                oldest = known.get(stream)
                if oldest is None or oldest.sequence != sequence:
                    oldest = OldestElement(sequence, now)
                elif now >= oldest.since + self._unreached_s:
                    yield replica, stream, sequence
                self._oldest[stream] = oldest

    def on_unacked(self, message: Unacked, table: Table | None) -> Iterator[Unreached]:
        """Yield reports about the primaries on a worker whose output has all acks at secondaries here."""
        for element in message.items:
            key = PartitionKey(element.stage, element.partition)
            replica, producer = self._replicas.get(key), self._producers.get(StreamId(element.edge, element.partition))
            secondary = replica is not None and not replica.primary and replica.incarnation == element.incarnation
            asks = table is not None and secondary and table.replicas(*key)[0].worker == message.worker
            if replica is None or producer is None or not asks or not _gives(replica, producer):
                self._counters.stale += 1
            elif producer.log.base > element.sequence and not replica.missing():
                yield Unreached(
                    node=self._worker, stage=key.stage, partition=key.partition, primary=message.worker,
                    leader=element.leader, worker=self._worker, incarnation=replica.incarnation, edge=element.edge,
                    producer=key.partition, acks=True,
                )  # fmt: skip


def _commits(replica: Replica) -> bool:
    """Tell whether a replica leads others by an order."""
    return replica.leads and not replica.orders_itself and bool(replica.order.peers)


def _gives(replica: Replica, producer: Producer) -> bool:
    """Tell whether a stream has the output of a replica."""
    return any(outlet.producer is producer for outlet in replica.outlets)
