"""Columns in the form that kernels take: addresses and a kind, read from Arrow's own buffers without a copy.

Law: every fixed-width value is one 64-bit word (decimal128: two), equal values have equal words, and the
column made from the words of a column equals it, up to the sign of zero and the payload of NaN. Kernels read
validity maps and first rows themselves, so that nulls and slices need no preparation.

The addresses are valid as long as the array that they came from is alive: use them at once, keep none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

# A kind tells the kernels how to read a value. Kinds are numbers, because kernels are compiled once for all of them.
BOOL, INT8, INT16, INT32, INT64 = 0, 1, 2, 3, 4
UINT8, UINT16, UINT32, UINT64 = 5, 6, 7, 8
FLOAT32, FLOAT64, DECIMAL = 9, 10, 11
BYTES, WIDE_BYTES = 12, 13

_T = pa.lib
_KINDS: dict[int, int] = {
    _T.Type_BOOL: BOOL,
    _T.Type_INT8: INT8,
    _T.Type_INT16: INT16,
    _T.Type_INT32: INT32,
    _T.Type_INT64: INT64,
    _T.Type_UINT8: UINT8,
    _T.Type_UINT16: UINT16,
    _T.Type_UINT32: UINT32,
    _T.Type_UINT64: UINT64,
    _T.Type_FLOAT: FLOAT32,
    _T.Type_DOUBLE: FLOAT64,
    _T.Type_DECIMAL128: DECIMAL,
    _T.Type_DATE32: INT32,
    _T.Type_DATE64: INT64,
    _T.Type_TIMESTAMP: INT64,
    _T.Type_TIME32: INT32,
    _T.Type_TIME64: INT64,
    _T.Type_DURATION: INT64,
    _T.Type_STRING: BYTES,
    _T.Type_BINARY: BYTES,
    _T.Type_LARGE_STRING: WIDE_BYTES,
    _T.Type_LARGE_BINARY: WIDE_BYTES,
}

#: Types of key columns, for messages.
SUPPORTED = (
    "boolean",
    "integers",
    "float",
    "double",
    "decimal128",
    "date",
    "time",
    "timestamp",
    "duration",
    "string",
    "binary",
)

_STORAGE: dict[int, np.dtype[Any]] = {
    INT8: np.dtype(np.int8),
    INT16: np.dtype(np.int16),
    INT32: np.dtype(np.int32),
    INT64: np.dtype(np.int64),
    UINT8: np.dtype(np.uint8),
    UINT16: np.dtype(np.uint16),
    UINT32: np.dtype(np.uint32),
    UINT64: np.dtype(np.uint64),
    FLOAT32: np.dtype(np.uint32),  # as bits
    FLOAT64: np.dtype(np.uint64),
}


def kind_of(type_: pa.DataType) -> int | None:
    """Return the kind of a type, or None if kernels cannot read it."""
    return _KINDS.get(type_.id)


def fixed_bytes(type_: pa.DataType) -> int | None:
    """Return the bytes of each value, or None if they differ between values or are not whole."""
    try:
        bits = type_.bit_width
    except ValueError:
        return None
    return None if bits % 8 else bits // 8


def row_bytes(schema: pa.Schema) -> int | None:
    """Return the bytes of the values of each row, or None if rows differ. A value of a dictionary column counts as its
    index."""
    widths = [fixed_bytes(type_) for type_ in schema.types]
    return None if None in widths else sum([width or 0 for width in widths])


class FixedColumn(NamedTuple):
    """A fixed-width column in the form that kernels take."""

    #: Address of the values.
    values: int
    #: Address of the validity map; 0: every row is valid.
    validity: int
    #: The first row in both.
    first: int
    kind: int


class StringColumn(NamedTuple):
    """A string or binary column in the form that kernels take."""

    #: Address of the offsets.
    offsets: int
    #: Address of the bytes.
    data: int
    #: Address of the validity map; 0: every row is valid.
    validity: int
    #: The first row in offsets and validity map.
    first: int
    kind: int


def raw(array: pa.Array) -> FixedColumn:
    validity, values = array.buffers()
    return FixedColumn(
        values.address if values is not None else 0,
        validity.address if validity is not None and array.null_count else 0,
        array.offset,
        _KINDS[array.type.id],
    )


def raw_bytes(array: pa.Array) -> StringColumn:
    validity, offsets, data = array.buffers()
    return StringColumn(
        offsets.address if offsets is not None else 0,
        data.address if data is not None else 0,
        validity.address if validity is not None and array.null_count else 0,
        array.offset,
        _KINDS[array.type.id],
    )


def validity_buffer(valid: np.ndarray | None) -> pa.Buffer | None:
    """Make the Arrow validity map of a boolean array; None if every row is valid."""
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def fixed_column(type_: pa.DataType, words: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """Make a column of a one-word type from its words (int64 or uint64), the inverse of reading by a kernel."""
    kind = _KINDS[type_.id]
    if kind == BOOL:
        values = np.packbits(words != 0, bitorder="little")
    else:
        stored = _STORAGE[kind]
        values = np.ascontiguousarray(words if stored.itemsize == words.itemsize else words.astype(stored))
    return pa.Array.from_buffers(type_, len(words), [validity_buffer(valid), pa.py_buffer(values)])


def decimal_column(type_: pa.DataType, low: np.ndarray, high: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """Make a decimal128 column from its low (uint64) and high (int64 or uint64) words."""
    values = np.empty((len(low), 2), np.uint64)
    values[:, 0] = low
    values[:, 1] = high.view(np.uint64)
    return pa.Array.from_buffers(type_, len(low), [validity_buffer(valid), pa.py_buffer(values)])


def bytes_column(type_: pa.DataType, offsets: np.ndarray, data: np.ndarray, valid: np.ndarray | None) -> pa.Array:
    """Make a string or binary column from its int64 offsets and bytes."""
    if _KINDS[type_.id] == BYTES:
        if offsets[-1] > np.iinfo(np.int32).max:
            raise OverflowError(f"{len(offsets) - 1} values of {offsets[-1]} bytes do not fit one column of {type_}")
        offsets = offsets.astype(np.int32)
    buffers = [validity_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(type_, len(offsets) - 1, buffers)
