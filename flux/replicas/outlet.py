"""Where the output of a replica goes inside the dataflow: one outlet per outgoing edge."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from flux.stream.producer import Producer
from partitioning.cluster import cluster_by_key, whole


@dataclass(frozen=True)
class Outlet:
    """Where output goes: the stream of this partition on one outgoing edge. ``key`` empty: rotate over partitions."""

    producer: Producer
    key: tuple[int, ...]

    def send(self, batch: pa.RecordBatch, created: float) -> None:
        by_rank, partitions = self.producer.by_rank, self.producer.partitions
        if self.key:
            data = cluster_by_key(batch, self.key, partitions, by_rank)
        else:
            turn = (self.producer.stream.producer + self.producer.next_sequence) % partitions
            data = whole(batch, turn, partitions, by_rank)
        self.producer.append(data, created)
