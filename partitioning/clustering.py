"""The partition of a row, and clustered batches: rows sorted by their partition, so that one contiguous slice serves one
partition.

Law: a hash depends on the values alone, never on version, machine, process, slicing or batch. Rows that Spark would group
together have equal hashes: -0.0 and 0.0, every NaN and every other, null and null. Equal numbers in columns of different types
need not have equal hashes.

Law: a clustered batch is a permutation of the rows given, stable within each partition, equal keys in one
partition; and it owns its memory, because Spark writes over the buffers of batches that it hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from partitioning import kernels
from partitioning.columns import BYTES, SUPPORTED, kind_of, raw, raw_bytes, row_bytes
from partitioning.errors import KeyTypeError

#: A batch is sorted by one counter per partition: 4,096 counters of 8 bytes fill a 32 KiB cache.
PARTITIONS_MAX = 4096


def check_key_type(name: str, type_: pa.DataType) -> None:
    """Raise KeyTypeError unless columns of this type can be keys."""
    if kind_of(type_) is None:
        raise KeyTypeError(name, type_, SUPPORTED)


def hash_columns(columns: Sequence[pa.Array]) -> np.ndarray:
    """Hash each row over all columns, in their order, to a uint64: the first half of the way from a row to its
    partition. All columns must have the same length."""
    if not columns:
        raise ValueError("a hash needs at least one key column")
    rows = len(columns[0])
    hashes = np.full(rows, kernels.SEED)
    for column in columns:
        kind = kind_of(column.type)
        if kind is None:
            raise KeyTypeError("(unnamed)", column.type, SUPPORTED)
        if len(column) != rows:
            raise ValueError(f"key columns differ in length: {len(column)} rows and {rows} rows")
        if rows == 0:
            continue
        if kind < BYTES:
            kernels.hash_fixed(hashes, *raw(column))
        else:
            kernels.hash_strings(hashes, *raw_bytes(column))
    return hashes


def check_partitions(partitions: int) -> None:
    """Raise ValueError unless a stage may have this number of partitions."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise ValueError(f"partitions must be from 1 to {PARTITIONS_MAX}, not {partitions}")


def partition_ids(hashes: np.ndarray, partitions: int) -> np.ndarray:
    """Return the partition of each hash, as uint16: the second half of the way from a row to its partition, after
    ``hash_columns``.

    Law: 0 <= id < partitions, spread evenly, and taken from the high half of the hash, so that a table over the keys of one
    partition may use the low bits."""
    check_partitions(partitions)
    ids = np.empty(len(hashes), np.uint16)
    kernels.reduce_hashes(hashes, partitions, ids)
    return ids


_take_rows, _UNCHECKED = pc.get_function("take"), pc.TakeOptions(boundscheck=False)
_ROW_NUMBER = pa.int32()


class Clustered(msgspec.Struct, frozen=True):
    """A batch whose rows are grouped by consumer partition."""

    #: The rows, in stable order within each partition. It owns its memory.
    batch: pa.RecordBatch
    #: int32[p]: the partitions that have rows, those of one worker next to each other, so that one slice serves all of them.
    #: Other partitions are left out, so that the memory and the messages of a small batch do not grow with their number.
    by_rank: np.ndarray
    #: int64[p+1]: the rows of partition by_rank[r] are offsets[r] to offsets[r+1], exclusive.
    offsets: np.ndarray
    #: Approximate bytes of the rows themselves, without the rest of a larger parent batch.
    nbytes: int

    def __post_init__(self) -> None:
        assert len(self.offsets) == len(self.by_rank) + 1, "one offset per rank and one at the end"
        assert self.offsets[-1] == self.batch.num_rows, "the offsets must cover the batch"

    @property
    def partitions(self) -> int:
        return len(self.by_rank)

    def rows_of(self, partition: int) -> pa.RecordBatch:
        """Return the rows of one partition, as a view."""
        if partition not in self.by_rank:
            return self.batch.slice(0, 0)
        rank = int(np.argmax(self.by_rank == partition))
        start, end = int(self.offsets[rank]), int(self.offsets[rank + 1])
        return self.batch.slice(start, end - start)


class Clustering:
    """Clustering of the batches of one stream. It prepares once everything that does not depend on the rows. For one thread."""

    def __init__(self, schema: pa.Schema, key_indices: Sequence[int], partitions: int) -> None:
        check_partitions(partitions)
        self.partitions = partitions
        self._keys = tuple(key_indices)
        types = schema.types
        self._schema = schema
        self._views = [i for i, type_ in enumerate(types) if type_.id in _UNVIEWED]
        self._shares = any(_may_share(type_) for type_ in types)
        # Fixed row sizes would count a dictionary column by its indices alone, and most of its bytes are in the shared
        # dictionary.
        self._row_bytes = None if self._shares else row_bytes(schema)
        self._copy = copier(schema)
        #: All rows have the same number of bytes, whatever else lies in the buffers of their columns.
        self.counts_rows = self._row_bytes is not None
        key = kind_of(types[self._keys[0]]) if len(self._keys) == 1 else None
        self._one_word = key is not None and key < BYTES
        self._as_numbered = np.arange(partitions, dtype=np.int32)
        self._order = self._as_numbered
        self._next_row = np.empty(partitions, np.int64)
        self._present = np.empty(partitions, np.int32)
        self._offsets = np.empty(partitions + 1, np.int64)

    def by_key(self, batch: pa.RecordBatch, by_rank: np.ndarray | None = None) -> Clustered:
        """Send each row to the partition that its key hashes to, with partitions in the order of ``by_rank``.

        KeyTypeError: a key column has an unfit type."""
        if self.partitions == 1:
            return self.whole(batch, 0)
        self._go_by(by_rank)
        rows = np.empty(batch.num_rows, np.int32)
        ids = self._ids(batch)
        present = kernels.counting_sort(ids, self._order, self._next_row, rows, self._present, self._offsets)
        taken = self._take(batch, rows)
        # Copies, because the memory that a batch keeps must not grow with the number of partitions.
        return Clustered(
            taken, self._present[:present].copy(), self._offsets[: present + 1].copy(), self._bytes_of(taken)
        )  # fmt: skip

    def each_by_key(
        self, batch: pa.RecordBatch, sizes: Sequence[int], by_rank: np.ndarray | None = None
    ) -> list[Clustered]:
        """Cluster small batches that lie one behind the other, each for itself, at a fraction of the cost of separate calls.

        ``sizes`` are their numbers of rows. The results share memory, which is held until the last of them is gone."""
        if self.partitions == 1 or self._shares or len(sizes) == 1:
            return [self.by_key(each, by_rank) for each in pieces(batch, sizes)]
        self._go_by(by_rank)
        ids, total, several = self._ids(batch), batch.num_rows, len(sizes)
        ends = np.cumsum(sizes)
        rows, found = np.empty(total, np.int32), np.empty(several, np.int64)
        present, offsets = np.empty(total, np.int32), np.empty(total + several, np.int64)
        kernels.counting_sorts(ids, ends, self._order, self._next_row, rows, present, offsets, found)
        made: list[Clustered] = []
        at = 0
        for number, (part, count) in enumerate(
            zip(pieces(self._take(batch, rows), sizes), found.tolist(), strict=True)
        ):
            last = at + count
            starts = offsets[at + number : last + number + 1]
            made.append(Clustered(part, present[at:last], starts, self._bytes_of(part)))
            at = last
        return made

    def _go_by(self, by_rank: np.ndarray | None) -> None:
        if by_rank is None:
            self._order = self._as_numbered
        elif by_rank is not self._order:  # tables change rarely, and checking costs more than sorting
            self._order = _checked_order(by_rank, self.partitions)

    def _ids(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return the partition of each row, as uint16."""
        ids = np.empty(batch.num_rows, np.uint16)
        if self._one_word:
            kernels.partition_words(ids, self.partitions, *raw(batch.column(self._keys[0])))
        else:
            kernels.reduce_hashes(hash_columns([batch.column(i) for i in self._keys]), self.partitions, ids)
        return ids

    def whole(self, batch: pa.RecordBatch, partition: int) -> Clustered:
        """Send every row to one partition (streams without a key)."""
        copy = self._copy(batch)
        if not copy.num_rows:
            return Clustered(copy, np.empty(0, np.int32), np.zeros(1, np.int64), 0)
        by_rank, offsets = np.array([partition], np.int32), np.array([0, copy.num_rows], np.int64)
        return Clustered(copy, by_rank, offsets, self._bytes_of(copy))

    def _bytes_of(self, batch: pa.RecordBatch) -> int:
        return int(batch.nbytes if self._row_bytes is None else batch.num_rows * self._row_bytes)

    def _take(self, batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
        for i in self._views:  # take is not implemented for views of strings
            batch = _with_type(batch, i, _UNVIEWED[self._schema.field(i).type.id])
        taken = take(batch, rows)
        for i in self._views:
            taken = _with_type(taken, i, self._schema.field(i).type)
        return self._copy(taken) if self._shares else taken


def pieces(batch: pa.RecordBatch, sizes: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """Split the rows into batches of these sizes, as views."""
    start = 0
    for rows in sizes:
        yield batch.slice(start, rows)
        start += rows


def take(batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    """Take rows by int32 numbers, which must be below the number of rows: they are not checked."""
    # Arrow's own take: its pool keeps the pages of large buffers, which numpy gives back and faults in again.
    numbers = pa.Array.from_buffers(_ROW_NUMBER, len(rows), [None, pa.py_buffer(rows)])
    return _take_rows.call([batch, numbers], _UNCHECKED)


def cluster_by_key(
    batch: pa.RecordBatch, key_indices: Sequence[int], partitions: int, by_rank: np.ndarray | None = None
) -> Clustered:
    """Cluster one batch, see ``Clustering.by_key``."""
    return Clustering(batch.schema, key_indices, partitions).by_key(batch, by_rank)


def owned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copy a batch, so that it shares no memory with the original nor with a larger parent of it."""
    return copier(batch.schema)(batch)


def copier(schema: pa.Schema) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Choose the cheapest way of ``owned`` for a schema. The choice takes as long as copying a small batch, so make it once."""
    types = schema.types
    if all(type_.id in _FLAT for type_ in types):
        return _concatenated
    return _written_and_read if any(_may_share(type_) for type_ in types) else _serialized


def _concatenated(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.concat_batches([batch, batch.slice(0, 0)])  # two batches, because a single one might be returned as it is


def _serialized(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def _written_and_read(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _checked_order(by_rank: np.ndarray, partitions: int) -> np.ndarray:
    by_rank = np.ascontiguousarray(by_rank, np.int32)
    # Checked, because a wrong order would make the sort write outside of its arrays.
    if len(by_rank) != partitions or not np.array_equal(np.sort(by_rank), np.arange(partitions)):
        raise ValueError(f"by_rank must be a permutation of the {partitions} partitions")
    return by_rank


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


#: Types whose columns consist of values, or of offsets and bytes, and of nothing else.
_FLAT = {
    kind.id
    for kind in (
        pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
        pa.float32(), pa.float64(), pa.decimal128(1), pa.date32(), pa.date64(), pa.timestamp("us"), pa.time32("s"),
        pa.time64("us"), pa.duration("us"), pa.string(), pa.binary(), pa.large_string(), pa.large_binary(),
    )
}  # fmt: skip


def _may_share(type_: pa.DataType) -> bool:
    """Tell whether a copy of rows keeps buffers of the original, such as a dictionary or the bytes behind a view."""
    if isinstance(type_, pa.BaseExtensionType):
        return _may_share(type_.storage_type)
    return type_.id in _SHARING or any(_may_share(type_.field(i).type) for i in range(type_.num_fields))
