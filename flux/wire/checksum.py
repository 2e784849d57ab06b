"""Running checksum of a stream, to tell whether a retried task reads the same rows again (design: same-rows).

Law: equal rows in equal batches give equal checksums, whatever lies in the buffers under nulls, before the offset of
a slice or behind its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

Columns = list[tuple[int, memoryview]]

#: Looked up for every column of every step: a lookup by the number of a type takes a tenth of the time of a comparison of
#: types.
_FIXED: dict[int, bool] = {}
_OFFSETS_OF_32_BITS = frozenset((pa.lib.Type_STRING, pa.lib.Type_BINARY))


def extend(checksum: int, batch: pa.RecordBatch) -> int:
    """Compute the checksum of a stream through ``batch``, given the checksum before it. It is not a cryptographic hash."""
    digest = xxhash.xxh3_64(checksum.to_bytes(8, "little") + batch.num_rows.to_bytes(8, "little"))
    for given in batch.columns:
        column = _plain(given)
        if column.null_count:
            digest.update(np.packbits(pc.is_null(column).to_numpy(zero_copy_only=False)).data)
            column = pc.drop_null(column)
        _update(digest, column)
    return digest.intdigest()


def extend_each(checksum: int, batch: pa.RecordBatch, sizes: Sequence[int]) -> list[int]:
    """Compute the checksum through each of several small batches of ``sizes`` rows that lie one behind the other."""
    columns = _values(batch)
    found: list[int] = []
    start = 0
    for rows in sizes:
        checksum = _extended(checksum, batch, columns, start, rows)
        start += rows
        found.append(checksum)
    return found


def extend_apart(checksums: Sequence[int], batch: pa.RecordBatch, sizes: Sequence[int]) -> list[int]:
    """Compute the checksum of each of several streams through its next batch. The batches lie one behind the other."""
    columns = _values(batch)
    starts = accumulate(sizes, initial=0)
    return [
        _extended(checksum, batch, columns, start, rows)
        for checksum, start, rows in zip(checksums, starts, sizes, strict=False)
    ]


def _extended(checksum: int, batch: pa.RecordBatch, columns: Columns | None, start: int, rows: int) -> int:
    """Extend a checksum by ``rows`` rows of a batch, whose ``_values`` are ``columns``."""
    if columns is None:
        return extend(checksum, batch.slice(start, rows))
    digest = xxhash.xxh3_64(checksum.to_bytes(8, "little") + rows.to_bytes(8, "little"))
    for width, values in columns:
        digest.update(values[start * width : (start + rows) * width])
    return digest.intdigest()


def _values(batch: pa.RecordBatch) -> Columns | None:
    """Return, for each column, the bytes of one value and the buffer of all values; None: some are null, or differ in length."""
    found = []
    for column in batch.columns:
        kind = column.type
        if column.null_count or not _is_fixed(kind):
            return None
        width = kind.bit_width // 8
        start = column.offset * width
        found.append((width, memoryview(column.buffers()[1])[start : start + len(column) * width]))
    return found


def _is_fixed(kind: pa.DataType) -> bool:
    known = _FIXED.get(kind.id)
    if known is None:
        whole = pa.types.is_primitive(kind) and not pa.types.is_boolean(kind)
        known = _FIXED[kind.id] = whole or pa.types.is_decimal128(kind)
    return known


def _plain(column: pa.Array) -> pa.Array:
    """Decode dictionaries, whose order would change the checksum, and string views, from which Arrow cannot drop nulls."""
    number = column.type.id
    if number == pa.lib.Type_DICTIONARY:
        return _plain(column.dictionary_decode())
    if number == pa.lib.Type_STRING_VIEW:
        return column.cast(pa.large_string())
    if number == pa.lib.Type_BINARY_VIEW:
        return column.cast(pa.large_binary())
    return column


def _update(digest: xxhash.xxh3_64, column: pa.Array) -> None:
    kind = column.type
    start, rows = column.offset, len(column)
    if rows == 0:
        return
    if _is_fixed(kind):
        width = kind.bit_width // 8
        digest.update(memoryview(column.buffers()[1])[start * width : (start + rows) * width])
    elif kind.id in _OFFSETS_OF_32_BITS:
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int32)[start : start + rows + 1]
        digest.update(np.diff(ends).data)
        if data is not None:
            digest.update(memoryview(data)[int(ends[0]) : int(ends[-1])])
    else:
        dense = column.take(pa.array(np.arange(rows)))
        digest.update(pa.RecordBatch.from_arrays([dense], ["c"]).serialize())
