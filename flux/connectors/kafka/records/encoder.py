"""Arrow columns to record batches of Kafka (format 2), and the partition of a key as Kafka's Java client chooses it.

Left to the caller: the rows of a batch and its sequence, the broker that takes it, and the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.connectors.kafka.records import kernels
from flux.connectors.kafka.records.compression import NUMBERS, compress
from flux.connectors.kafka.records.decoder import HEADER
from partitioning.columns import raw_bytes

#: Largest record batch: the default limit of brokers (1,048,588), less its head and some room.
BATCH_BYTES = 1_000_000
_SEQUENCES = 1 << 31


class ProducerIdentity(NamedTuple):
    """Producer of record batches, for a broker that takes each record of a producer once."""

    id: int = -1
    epoch: int = -1
    #: Sequence of the first record, -1 without a producer id.
    sequence: int = -1


NOBODY = ProducerIdentity()


class Encoded(NamedTuple):
    """Record batches as bytes."""

    #: One record batch after another.
    data: pa.Buffer
    #: Number of rows in each.
    rows: list[int]


def encode(
    keys: pa.Array | None,
    values: pa.Array | None,
    timestamps: np.ndarray,
    headers: pa.Array | None = None,
    codec: str | None = None,
    producer: ProducerIdentity = NOBODY,
    batch_bytes: int = BATCH_BYTES,
    transactional: bool = False,
    offset: int | None = None,
) -> Encoded:
    """Encode record batches of at most about ``batch_bytes`` each before compression (a record that is larger has one of its
    own).

    keys, values  binary or string columns; None: all null. A null value is a tombstone
    timestamps    int64, milliseconds since 1970
    headers       a column of list<struct<key string, value binary>>; null: none
    offset        of the first record, as a broker would send it; a broker that takes the batches gives its own
    producer      with a sequence that goes on from batch to batch, and begins again at 0 behind 2^31 - 1"""
    made = list(record_batches(keys, values, timestamps, headers, codec, producer, batch_bytes, transactional, offset))
    batches = [batch for batch, _ in made]
    data = batches[0] if len(batches) == 1 else np.concatenate(batches) if batches else b""
    return Encoded(pa.py_buffer(data), [rows for _, rows in made])


def record_batches(
    keys: pa.Array | None,
    values: pa.Array | None,
    timestamps: np.ndarray,
    headers: pa.Array | None = None,
    codec: str | None = None,
    producer: ProducerIdentity = NOBODY,
    batch_bytes: int = BATCH_BYTES,
    transactional: bool = False,
    offset: int | None = None,
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the record batches of ``encode`` one after another, each made when it is asked for: its bytes, and its number of
    rows."""
    rows = len(timestamps)
    times = np.ascontiguousarray(timestamps, np.int64)
    raw, kept = views(keys, values, headers, rows)
    attributes = attributes_of(codec, transactional)
    first = 0
    while first < rows:
        count, size = map(int, kernels.fitting(*raw, times, first, rows, batch_bytes))
        out = np.empty(kernels.HEAD + size, np.uint8)
        end = int(kernels.encode(*raw, times, first, first + count, out.ctypes.data + kernels.HEAD))
        assert end == out.ctypes.data + out.size, "the size of records is what they take"
        if codec is not None:
            body = compress(codec, pa.py_buffer(out[kernels.HEAD :]))
            out = np.concatenate([out[: kernels.HEAD], np.frombuffer(body, np.uint8)])
        sequence = (producer.sequence + first) % _SEQUENCES if producer.sequence >= 0 else -1
        kernels.put_head(
            out.ctypes.data, out.size, 0 if offset is None else offset + first, attributes, times, first, first + count,
            producer.id, producer.epoch, sequence,
        )  # fmt: skip
        yield out, count
        first += count
    del kept  # the kernels used its addresses until here


def attributes_of(codec: str | None, transactional: bool) -> int:
    """Return the attributes of a record batch."""
    return NUMBERS[codec] | (kernels.TRANSACTIONAL if transactional else 0)


def views(keys: pa.Array | None, values: pa.Array | None, headers: pa.Array | None, rows: int) -> tuple[list[Any], Any]:
    """Return addresses of the columns for the kernels, and objects that must live as long."""
    columns = [_column(keys, rows), _column(values, rows), _headers(headers, rows)]
    return [view for view, _ in columns], columns


def with_headers(given: pa.Array | None, added: Mapping[str, bytes | pa.Array], rows: int) -> pa.Array:
    """Return a column of headers with ``added`` behind those of each row: by key a value for all rows, or a column of values."""
    count = len(added)
    names = pa.array([*added] * rows, pa.string())
    columns = [pa.array([each], pa.binary()) if isinstance(each, bytes) else each for each in added.values()]
    firsts = np.cumsum([0, *map(len, columns)])
    index = np.empty((rows, count), np.int64)
    for at, column in enumerate(columns):
        index[:, at] = firsts[at] if len(column) == 1 else firsts[at] + np.arange(rows)
    values = pa.concat_arrays(columns).take(pa.array(index.reshape(-1)))
    ours = pa.StructArray.from_arrays([names, values], fields=list(HEADER))
    if given is None:
        return pa.ListArray.from_arrays(pa.array(np.arange(0, count * rows + 1, count, dtype=np.int32)), ours)
    sizes = np.asarray(given.value_lengths().fill_null(0))
    ends = np.cumsum(sizes + count)
    is_ours = np.zeros(int(ends[-1]) if rows else 0, bool)
    for back in range(1, count + 1):
        is_ours[ends - back] = True
    order = np.empty(len(is_ours), np.int64)
    order[~is_ours] = np.arange(int(sizes.sum()))
    order[is_ours] = np.arange(count * rows) + int(sizes.sum())
    entries = pa.concat_arrays([given.flatten(), ours]).take(pa.array(order))
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), entries)


def partitions_of(keys: pa.Array, partitions: int) -> np.ndarray:
    """Return for each key the partition (int32) that Kafka's Java client, and ``murmur2`` of others, sends it to; -1 for null,
    which has none of its own."""
    out = np.empty(len(keys), np.int32)
    view, kept = _column(keys, len(keys))
    kernels.partitions_of(view, partitions, out)
    del kept
    return out


def _column(column: pa.Array | None, rows: int) -> tuple[Any, Any]:
    """Return addresses for the kernels, and objects that must live as long."""
    if column is None:
        column = pa.nulls(rows, pa.binary())
    if pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type):
        column = column.cast(pa.binary())
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
        raise TypeError(f"keys and values must be binary or string columns, got {column.type}")
    view = raw_bytes(column)
    return (view.offsets, view.data, view.validity, view.first), column


def _headers(headers: pa.Array | None, rows: int) -> tuple[Any, Any]:
    none, kept = _column(None, 0)
    if headers is None or headers.null_count == rows:
        return (0, 0, 0, none, none), kept
    validity, offsets = headers.buffers()[:2]
    entries = headers.values  # with entries before the first row, which the offsets count
    names, items = pc.struct_field(entries, "key"), pc.struct_field(entries, "value")
    if names.null_count:
        raise ValueError("a header needs a key; found null")
    named, name_kept = _column(names, 0)
    valued, item_kept = _column(items, 0)
    address = validity.address if validity is not None and headers.null_count else 0
    return (offsets.address, address, headers.offset, named, valued), (headers, name_kept, item_kept)
