"""The rows of tentative messages, by partition of their consumer (design: tentative-lane)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from flux.dataflow.plan import EdgePlan
from flux.wire.messages import Tentative
from partitioning.clustering import Clustering


class LaneOutput:
    """The way of tentative results over one edge: its steps, and the partition of each row."""

    def __init__(self, edge: EdgePlan) -> None:
        self._edge = edge
        self._clustering: Clustering | None = None

    def made(self, batches: Sequence[pa.RecordBatch], producer: int, where: str) -> dict[int, pa.RecordBatch]:
        """Return the rows of each partition that has any. Without a key any partition may have them: stable batches go round, and
        void the rows of a mark in each."""
        edge = self._edge
        rows = [edge.rows_of(batch, lambda: where)[0] for batch in batches]
        rows = [batch for batch in rows if batch.num_rows]
        if not rows:
            return {}
        whole = rows[0] if len(rows) == 1 else pa.concat_batches(rows)
        if not edge.key or edge.partitions == 1:
            return {producer % edge.partitions: whole}
        if self._clustering is None:
            self._clustering = Clustering(whole.schema, edge.key, edge.partitions)
        clustered = self._clustering.by_key(whole)
        return {partition: clustered.rows_of(partition) for partition in clustered.by_rank.tolist()}


def rows_by_partition(message: Tentative, batches: Sequence[pa.RecordBatch]) -> dict[int, pa.RecordBatch]:
    """Return the rows of a message, by partition."""
    found, begin = {}, 0
    for partition, rows in zip(message.partitions, message.rows, strict=True):
        found[partition] = batches[0].slice(begin, rows)
        begin += rows
    return found
