"""Outlets: the ways of a replica's output inside the dataflow, one per outgoing edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import pyarrow as pa

from flux.dataflow.batches import conform, given_batches, is_tiny, split
from flux.dataflow.columns import picked
from flux.dataflow.operator import Batches
from flux.dataflow.plan import StagePlan
from flux.errors import SchemaError, UserCodeError
from flux.settings import Settings
from flux.stream.producer import Producer
from partitioning.cluster import Clustered, Clustering


@dataclass
class Outlet:
    """The stream of this partition on one outgoing edge. Empty ``key``: rotate over partitions. ``columns`` are those that
    travel, with ``schema``; None: all columns, with the schema of the output."""

    producer: Producer
    key: tuple[int, ...]
    columns: tuple[int, ...] | None = None
    schema: pa.Schema | None = None
    _clustering: Clustering | None = field(default=None, init=False)

    def send(self, batch: pa.RecordBatch, created: float, clustered: Clustered | None = None) -> None:
        """Send a batch. ``clustered`` are the same rows by partition, if they are so already."""
        self.producer.append(clustered or self._clustered(picked(batch, self.columns)), created)

    def _clustered(self, batch: pa.RecordBatch) -> Clustered:
        producer, clustering = self.producer, self._clustering_of(batch)
        if self.key:
            return clustering.by_key(batch, producer.by_rank)
        return clustering.whole(batch, (producer.stream.producer + producer.next_sequence) % producer.partitions)

    def clustered_each(self, batch: pa.RecordBatch, rows: Sequence[int]) -> Sequence[Clustered | None]:
        """Cluster batches of ``rows`` rows that lie one behind the other, for this outlet, and for those of other partitions on
        the same edge. They share memory.

        None: each outlet has to do it. Without a key only the outlet knows which partition has its turn; and the share of text
        in a log would depend on the rows beside it (design: log-share)."""
        batch = picked(batch, self.columns)
        clustering = self._clustering_of(batch)
        if not self.key or not clustering.counts_rows:
            return [None] * len(rows)
        return clustering.each_by_key(batch, rows, self.producer.by_rank)

    def _clustering_of(self, batch: pa.RecordBatch) -> Clustering:
        if self._clustering is None:
            self._clustering = Clustering(batch.schema, self.key, self.producer.partitions)
        return self._clustering


def fits(output: Batches, stage: StagePlan, limits: Settings) -> TypeGuard[list[pa.RecordBatch]]:
    """Tell whether an operator has given a list of one batch that needs neither a check nor a cut, as most do for small steps."""
    if type(output) is not list or len(output) != 1 or type(output[0]) is not pa.RecordBatch:
        return False
    batch = output[0]
    small = 0 < batch.num_rows <= limits.batch_max_rows and is_tiny(batch, limits.batch_max_bytes)
    return small and stage.output_schema is not None and bool(batch.schema.equals(stage.output_schema))


def cut_output(output: Batches, stage: StagePlan, limits: Settings, where: str) -> Iterator[pa.RecordBatch]:
    """Yield the output batches of an operator, checked and cut to size. ``where`` names their origin in errors."""
    takes_empty = stage.sink is not None and stage.sink.traits.takes_empty
    for batch in given_batches(output):
        try:
            checked = conform(batch, stage.output_schema, f"output of stage {stage.name}")
        except SchemaError as error:  # no row is at fault
            raise UserCodeError(f"{where}: {error}") from None
        if takes_empty and not checked.num_rows:
            yield checked
        yield from split(checked, limits.batch_max_rows, limits.batch_max_bytes)
