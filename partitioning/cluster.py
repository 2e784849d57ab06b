"""A batch sorted by the partition that its rows go to, so that one contiguous slice serves one partition.

Law: a clustered batch is a permutation of the rows given, stable within each partition, equal keys in one
partition; and it owns its memory, because Spark writes over the buffers of batches that it hands out.

``by_rank`` puts partitions of one worker next to each other, so that one slice serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from partitioning import kernels
from partitioning.hashing import hash_columns
from partitioning.scheme import check_partitions, partition_ids


@dataclass(frozen=True, slots=True)
class Clustered:
    """batch    rows grouped by consumer partition, stable within each; owns its memory
    by_rank  int32[P]: the partition at each rank; rows of by_rank[0] come first. A compact one leaves out partitions
             without rows
    offsets  int64[P+1]: rows of partition by_rank[r] are offsets[r] to offsets[r+1], exclusive
    nbytes   bytes of the rows themselves, not of a larger parent of theirs"""

    batch: pa.RecordBatch
    by_rank: np.ndarray
    offsets: np.ndarray
    nbytes: int

    def __post_init__(self) -> None:
        assert len(self.offsets) == len(self.by_rank) + 1, "one offset per rank and one at the end"
        assert self.offsets[-1] == self.batch.num_rows, "the offsets must cover the batch"

    @property
    def partitions(self) -> int:
        return len(self.by_rank)

    def compact(self) -> Clustered:
        """Of the partitions with rows alone: what is kept and sent of a small batch must not grow with the number of
        partitions."""
        ranks = np.flatnonzero(self.offsets[1:] != self.offsets[:-1])
        if len(ranks) == len(self.by_rank):
            return self
        offsets = np.append(self.offsets[ranks], self.offsets[-1])
        return Clustered(self.batch, self.by_rank[ranks], offsets, self.nbytes)

    def rows_of(self, partition: int) -> pa.RecordBatch:
        """The rows of one partition, a view."""
        (rank,) = np.flatnonzero(self.by_rank == partition)
        start, end = int(self.offsets[rank]), int(self.offsets[rank + 1])
        return self.batch.slice(start, end - start)


def cluster_by_key(
    batch: pa.RecordBatch, key_indices: Sequence[int], partitions: int, by_rank: np.ndarray | None = None
) -> Clustered:
    """Send each row to the partition that its key hashes to. Raises KeyTypeError for unfit keys."""
    if partitions == 1:
        return whole(batch, 0, 1, by_rank)
    by_rank = _checked_order(by_rank, partitions)
    ids = partition_ids(hash_columns([batch.column(i) for i in key_indices]), partitions)
    rows = np.empty(len(ids), np.int32)
    offsets = np.empty(partitions + 1, np.int64)
    kernels.counting_sort(ids, by_rank, offsets, np.zeros(partitions, np.int64), rows)
    clustered = _take(batch, rows)
    return Clustered(clustered, by_rank, offsets, clustered.nbytes)


def whole(batch: pa.RecordBatch, partition: int, partitions: int, by_rank: np.ndarray | None = None) -> Clustered:
    """Send every row to one partition (streams without a key)."""
    by_rank = _checked_order(by_rank, partitions)
    copy = owned(batch)
    offsets = np.where(np.arange(partitions + 1) <= np.flatnonzero(by_rank == partition)[0], 0, copy.num_rows)
    return Clustered(copy, by_rank, offsets.astype(np.int64), copy.nbytes)


def owned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A copy that shares no memory with the batch, nor with the batch's larger parent."""
    if any(_may_share(type_) for type_ in batch.schema.types):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return pa.ipc.open_stream(sink.getvalue()).read_next_batch()
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def _checked_order(by_rank: np.ndarray | None, partitions: int) -> np.ndarray:
    check_partitions(partitions)
    if by_rank is None:
        return np.arange(partitions, dtype=np.int32)
    by_rank = np.ascontiguousarray(by_rank, np.int32)
    # A wrong order would make the sort write outside of its arrays.
    if len(by_rank) != partitions or not np.array_equal(np.sort(by_rank), np.arange(partitions)):
        raise ValueError(f"by_rank must be a permutation of the {partitions} partitions")
    return by_rank


def _take(batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    schema = batch.schema
    views = [i for i, type_ in enumerate(schema.types) if type_.id in _UNVIEWED]
    if views:  # take is not implemented for views of strings
        for i in views:
            batch = _with_type(batch, i, _UNVIEWED[schema.field(i).type.id])
        taken = _take(batch, rows)
        for i in views:
            taken = _with_type(taken, i, schema.field(i).type)
        return taken
    # Arrow's own take: its pool keeps the pages of large buffers, which numpy gives back and faults in again.
    taken = pc.take(batch, pa.array(rows), boundscheck=False)
    return owned(taken) if any(_may_share(type_) for type_ in schema.types) else taken


def _with_type(batch: pa.RecordBatch, i: int, type_: pa.DataType) -> pa.RecordBatch:
    return batch.set_column(i, batch.schema.field(i).with_type(type_), batch.column(i).cast(type_))


_UNVIEWED = {
    pa.lib.Type_STRING_VIEW: pa.large_string(),
    pa.lib.Type_BINARY_VIEW: pa.large_binary(),
}

_SHARING = {
    *_UNVIEWED,
    pa.lib.Type_DICTIONARY,
    pa.lib.Type_LIST_VIEW,
    pa.lib.Type_LARGE_LIST_VIEW,
    pa.lib.Type_RUN_END_ENCODED,
}


def _may_share(type_: pa.DataType) -> bool:
    """Whether a copy of rows keeps buffers of the original: a dictionary, the bytes behind a view."""
    if isinstance(type_, pa.BaseExtensionType):
        return _may_share(type_.storage_type)
    return type_.id in _SHARING or any(_may_share(type_.field(i).type) for i in range(type_.num_fields))
