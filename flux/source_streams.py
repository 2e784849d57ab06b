"""The streams of one partition of a source, whoever reads it: an ingress task or a worker (DESIGN 2, 3)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from flux.checksum import extend
from flux.plan import EdgePlan
from flux.producer import Producer
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
        self.start: int | None = None if seeks else 0  # batch to begin with; None: workers have not said yet
        self._checksum = 0
        self._awaited = False  # some worker has answered

    def place(self) -> bool:
        """Whether it is known with which batch to begin. A source that seeks leaves out what everybody has. Not before
        somebody waits for rows: to read them takes long, and would hold up the handshakes of this very worker."""
        if not self._awaited:
            self._awaited = any(producer.awaited for producer in self.producers)
            if not self._awaited:
                return False
        if self.start is None:
            floors = [producer.floor() for producer in self.producers]
            known = [floor for floor in floors if floor is not None]
            if len(known) == len(floors):
                self.start, self._checksum = min(known)
                for producer in self.producers:
                    producer.begin_at(self.start, self._checksum)
        return self.start is not None

    @property
    def has_room(self) -> bool:
        return all(producer.has_room for producer in self.producers)

    @property
    def drained(self) -> bool:
        return all(producer.drained for producer in self.producers)

    def append(self, batch: pa.RecordBatch, created: float) -> None:
        """The batch is copied while it is clustered: the caller may reuse its memory."""
        self.rows += batch.num_rows
        self.batches += 1
        # Of the rows as they were read: how they are clustered depends on the table of the day.
        self._checksum = extend(self._checksum, batch)
        for edge, producer in zip(self.edges, self.producers, strict=True):
            if edge.key:
                data = cluster_by_key(batch, edge.key, edge.partitions, producer.order)
            else:
                turn = (producer.stream.producer + producer.next_sequence) % edge.partitions
                data = whole(batch, turn, edge.partitions, producer.order)
            producer.append(data, created, self._checksum)

    def finish(self, created: float) -> None:
        self.ended = True
        for producer in self.producers:
            producer.finish(created)
