"""Keys of order: bytes for each row, whose order is the order of the rows (design: keys-of-order).

Law: the key of a row comes before that of another one if and only if the row comes first in the order; keys are equal if and only
if the rows are equal in all columns of the order. Values are compared as in Spark: strings by their bytes, NaN as greatest, -0.0
equal to 0.0, structs and lists by their parts. No key is the beginning of another one, so keys of several orders can follow each
other.

So any number of columns of any types is one comparison of bytes, which compiled loops can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flux.errors import SchemaError
from flux.ranks import kernels
from partitioning.columns import BYTES, DECIMAL, kind_of, raw, raw_bytes

#: Bytes in front of nulls that come before all values, and of nulls that come behind them.
NULL_FIRST, NULL_LAST = 0, 2


class SortColumn(NamedTuple):
    """A column of an order, by its position."""

    at: int
    descending: bool = False
    nulls_last: bool = False


class OrderKeys(NamedTuple):
    """The keys of rows, one behind the other: that of row i ends at ``ends[i + 1]``."""

    ends: np.ndarray
    data: np.ndarray

    def heads(self) -> np.ndarray:
        """Return the first 16 bytes of each key as two uint64, which have the same order."""
        out = np.empty((len(self.ends) - 1, 2), np.uint64)
        kernels.heads(self.ends, self.data, out)
        return out

    def column(self) -> pa.Array:
        """Return the keys as a column of binary values."""
        buffers = [None, pa.py_buffer(self.ends), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.large_binary(), len(self.ends) - 1, buffers)


def order_keys(columns: Sequence[pa.Array], order: Iterable[SortColumn], rows: int) -> OrderKeys:
    """Return the keys of rows by an order of their columns. SchemaError: a column has a type without an order."""
    sizes = np.zeros(rows, np.int64)
    parts = [_Part(columns[each.at], each) for each in order]
    for part in parts:
        part.add_sizes(sizes)
    ends = np.zeros(rows + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    data, cursors = np.empty(int(ends[-1]), np.uint8), ends[:-1].copy()
    for part in parts:
        part.put(data, cursors)
    return OrderKeys(ends, data)


def check_order(schema: pa.Schema, order: Iterable[SortColumn]) -> None:
    """Raise SchemaError if a column of an order has a type without an order."""
    for each in order:
        field = schema.field(each.at)
        try:
            order_keys([pa.array([], field.type)], [SortColumn(0)], 0)
        except SchemaError as error:
            raise SchemaError(f"column {field.name!r}: {error}") from None


class _Part:
    """The values of one column, as bytes in the keys of its rows."""

    def __init__(self, column: pa.Array, how: SortColumn) -> None:
        self._column, self._kind = column, kind_of(column.type)
        self._how = 255 if how.descending else 0, NULL_LAST if how.nulls_last else NULL_FIRST
        self._pieces: OrderKeys | None = None
        if self._kind is None and not pa.types.is_null(column.type):
            self._pieces = _nested(column)
            self._valid = column.is_valid().to_numpy(zero_copy_only=False)

    def add_sizes(self, sizes: np.ndarray) -> None:
        if self._pieces is not None:
            sizes += 1 + np.where(self._valid, np.diff(self._pieces.ends), 0)
        elif self._kind is None:
            sizes += 1
        elif self._kind >= BYTES:
            kernels.string_sizes(*raw_bytes(self._column), sizes)
        else:
            sizes += 17 if self._kind == DECIMAL else 9

    def put(self, data: np.ndarray, cursors: np.ndarray) -> None:
        if self._pieces is not None:
            kernels.put_pieces(*self._pieces, self._valid, *self._how, data, cursors)
        elif self._kind is None:
            data[cursors] = self._how[1]
            cursors += 1
        elif self._kind >= BYTES:
            kernels.put_strings(*raw_bytes(self._column), *self._how, data, cursors)
        elif self._kind == DECIMAL:
            kernels.put_decimals(*raw(self._column)[:3], *self._how, data, cursors)
        else:
            kernels.put_fixed(*raw(self._column), *self._how, data, cursors)


def _nested(column: pa.Array) -> OrderKeys:
    """Return the keys of structs, lists and maps; those of nulls are of no account."""
    type_, rows = column.type, len(column)
    if pa.types.is_struct(type_):
        fields = column.flatten()
        return order_keys(fields, map(SortColumn, range(len(fields))), rows)
    if pa.types.is_fixed_size_list(type_):
        elements, begins = column.values, (column.offset + np.arange(rows + 1)) * type_.list_size
    elif pa.types.is_map(type_) or pa.types.is_list(type_) or pa.types.is_large_list(type_):
        begins = column.offsets.to_numpy().astype(np.int64)
        elements = column.values
        if pa.types.is_map(type_):
            elements = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
    else:
        raise SchemaError(f"there is no order of values of type {type_}; leave the column out with drop(), or cast it")
    keys = order_keys([elements], [SortColumn(0)], len(elements))
    lengths = np.diff(begins)
    ends = np.empty(rows + 1, np.int64)
    kernels.list_ends(begins, lengths, keys.ends, ends)
    data = np.empty(int(ends[-1]), np.uint8)
    kernels.join_lists(begins, lengths, keys.ends, keys.data, data)
    return OrderKeys(ends, data)
