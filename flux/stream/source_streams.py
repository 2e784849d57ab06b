"""The streams of one partition of a source, the same for both kinds of readers: ingress tasks and workers (design:
stream, seek)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from flux.dataflow.plan import EdgePlan
from flux.stream.checksum import extend
from flux.stream.positions import ReaderPosition, position_before
from flux.stream.producer import Producer
from partitioning.cluster import cluster_by_key, whole


class SourceStreams:
    """The streams of one partition of a source: one per edge that leaves the source, fed with the same batches."""

    def __init__(
        self, edges: Sequence[EdgePlan], producers: Sequence[Producer], name: str, seeks: bool = False
    ) -> None:
        """``seeks``: the source can begin at any batch, and this is not the first life of its partition."""
        self.edges = edges
        self.producers = producers
        self.name = name
        self.rows = 0
        self.batches = 0
        self.pauses = 0  # how often the source had nothing just now
        self.ended = False
        self.first: int | None = None if seeks else 0  # element to begin with; None: workers have not said yet
        self._checksum = 0
        self._awaited = False  # some worker has answered

    def place(self) -> bool:
        """Whether it is known with which element to begin. A source that seeks skips the batches that all consumers
        have applied. It does not begin before a worker waits for rows: reading takes long, and would hold up the
        handshakes of this very worker."""
        if not self._awaited:
            self._awaited = any(producer.awaited for producer in self.producers)
            if not self._awaited:
                return False
        if self.first is None:
            floors = [producer.floor() for producer in self.producers]
            known = [floor for floor in floors if floor is not None]
            if len(known) == len(floors):
                self.first, self._checksum = min(known)
                for producer in self.producers:
                    producer.begin_at(self.first, self._checksum)
        return self.first is not None

    @property
    def position(self) -> ReaderPosition:
        """The position at which its reader begins, once that is known."""
        assert self.first is not None
        return position_before(self.first)

    @property
    def has_room(self) -> bool:
        return all(producer.has_room for producer in self.producers)

    @property
    def drained(self) -> bool:
        return all(producer.drained for producer in self.producers)

    def append(self, batch: pa.RecordBatch, created: float) -> None:
        """Append a batch to all streams. It is copied while it is clustered, so the caller may reuse its memory."""
        self.rows += batch.num_rows
        self.batches += 1
        # The checksum is of the rows as read, because their clustering depends on the table of the moment.
        self._checksum = extend(self._checksum, batch)
        for edge, producer in zip(self.edges, self.producers, strict=True):
            if edge.key:
                data = cluster_by_key(batch, edge.key, edge.partitions, producer.by_rank)
            else:
                turn = (producer.stream.producer + producer.next_sequence) % edge.partitions
                data = whole(batch, turn, edge.partitions, producer.by_rank)
            producer.append(data, created, self._checksum)

    def finish(self, created: float) -> None:
        self.ended = True
        for producer in self.producers:
            producer.finish(created)
