"""Answers of a worker to readers of output (design: readers).

A reader that asks for rows that do not exist yet waits here for a moment: it gets new rows as soon as they are committed, and
need not ask in a loop. One reader may wait for each partition; a later one takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import pyarrow as pa

from flux.host.effects import ToConnection
from flux.replicas.offer import Offer
from flux.replicas.replica import Replica
from flux.wire.messages import Pull, Pulled
from partitioning.ids import PartitionKey

#: Seconds for which a reader waits here at most: well below the time after which a reader takes silence for a loss.
WAIT_S = 0.2
#: Limit of bytes in one answer, even if more was asked for: large enough to be fast, small enough not to hold up the data path.
ANSWER_BYTES = 4 << 20


class Waiting(NamedTuple):
    """A reader's question that waits for news until a time."""

    connection: Hashable
    pull: Pull
    until: float


class Offering:
    """The offers of one worker. ``tell`` passes an answer to the shell; ``wake`` is called for a replica that has room again."""

    def __init__(
        self,
        replicas: Mapping[PartitionKey, Replica],
        tell: Callable[[ToConnection], None],
        wake: Callable[[PartitionKey], None],
    ) -> None:
        self._replicas = replicas
        self._tell = tell
        self._wake = wake
        self._waiting: dict[PartitionKey, Waiting] = {}

    def on_pull(self, connection: Hashable, pull: Pull, now: float) -> bool:
        """Answer a question, or let it wait. Return False if the output of this partition is not offered here."""
        key = PartitionKey(pull.stage, pull.partition)
        offer = self._offer(key)
        if offer is None:
            self._tell(ToConnection(connection, Pulled(pull.stage, pull.partition, pull.position, leads=False)))
            return False
        self.show(self._replicas[key], offer)
        full = not offer.has_room
        offer.acknowledge(pull.acknowledged)
        if full and offer.has_room:
            self._wake(key)
        if pull.waits and not self._has_news(key, offer, pull):
            self._let_go(key)
            self._waiting[key] = Waiting(connection, pull, now + WAIT_S)
        else:
            self._answer(connection, pull, offer)
        return True

    def show(self, replica: Replica, offer: Offer) -> None:
        """Show the output that is committed by now."""
        offer.leads = True
        offer.show(replica.order.committed)

    def flush(self, now: float) -> None:
        """Answer questions that have waited long enough, or for which there is news."""
        for key, waiting in list(self._waiting.items()):
            offer = self._offer(key)
            if offer is None or now >= waiting.until or self._has_news(key, offer, waiting.pull):
                self._let_go(key)

    def due(self) -> float:
        return min((waiting.until for waiting in self._waiting.values()), default=math.inf)

    def _offer(self, key: PartitionKey) -> Offer | None:
        """Return the offer of a primary."""
        replica = self._replicas.get(key)
        if replica is None or not replica.primary or not isinstance(replica.exit, Offer):
            return None
        return replica.exit

    def _has_news(self, key: PartitionKey, offer: Offer, pull: Pull) -> bool:
        return offer.shown > pull.position or offer.left > pull.position or self._replicas[key].complete

    def _let_go(self, key: PartitionKey) -> None:
        waiting, offer = self._waiting.pop(key, None), self._offer(key)
        if waiting is not None and offer is not None:
            self._answer(waiting.connection, waiting.pull, offer)

    def _answer(self, connection: Hashable, pull: Pull, offer: Offer) -> None:
        batches = list(offer.since(pull.position, min(pull.bytes_max, ANSWER_BYTES)))
        finished = self._replicas[PartitionKey(pull.stage, pull.partition)].complete
        answer = Pulled(
            pull.stage, pull.partition, pull.position, len(batches), offer.left, offer.shown, finished,
            not offer.has_room,
        )  # fmt: skip
        self._tell(ToConnection(connection, answer, encoded(batches) if batches else None))


def encoded(batches: list[pa.RecordBatch]) -> pa.Buffer:
    """Encode batches with their schema, because a reader has no plan."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return stream.getvalue()
