"""Fields of structs and elements of arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.expressions.kernels.values import (
    ANSI,
    ExpressionError,
    Ints,
    Value,
    arrays,
    integers,
    made,
    settled,
    valid,
)


def field(to: pa.DataType, value: Value, ordinal: int) -> Value:
    return pc.struct_field(value, [ordinal])


def struct(to: pa.DataType, *values: Value) -> Value:
    return pa.StructArray.from_arrays(arrays(*values), fields=list(to))


def element(to: pa.DataType, value: Value, index: Value, mode: str, first: int = 0) -> Value:
    """Return an element of each array. ``first`` is the number of the first element: 0 for ``a[i]`` and ``get``, 1
    for ELEMENT_AT, whose negative numbers count from the end. Outside of the array is an error in ANSI mode, else
    null."""
    value, index = arrays(value, index)
    starts, counts = _places(value)
    wanted = integers(index)
    where = valid(value, index)
    at = np.where(wanted < 0, counts + wanted, wanted - 1) if first else wanted
    if first and bool((where & (wanted == 0)).any()):
        raise ExpressionError(
            "INVALID_INDEX_OF_ZERO", "elements are counted from 1, or from -1 at the end; there is none at 0"
        )
    inside = (at >= 0) & (at < counts)
    result = value.values.take(pa.array(np.where(inside, starts + at, 0), pa.int64(), mask=~(where & inside)))
    if mode == ANSI:
        condition = "INVALID_ARRAY_INDEX_IN_ELEMENT_AT" if first else "INVALID_ARRAY_INDEX"
        settled(result, where & ~inside, mode, lambda row: _outside(condition, int(wanted[row]), int(counts[row])))
    return result


def _outside(condition: str, wanted: int, count: int) -> ExpressionError:
    return ExpressionError(
        condition, f"element {wanted} of an array of {count}. Use get, or try_element_at, to get null instead"
    )


def _places(value: pa.Array) -> tuple[Ints, Ints]:
    """Return where the elements of each array begin in the array of all, and how many there are."""
    offsets = integers(value.offsets)
    return offsets[:-1], np.diff(offsets)


def size(to: pa.DataType, value: Value, null_is_minus_one: bool) -> Value:
    (value,) = arrays(value)
    _, counts = _places(value)
    if null_is_minus_one:
        return made(np.where(valid(value), counts, -1), np.ones(len(value), np.bool_), to)
    return made(counts, valid(value), to)


def array(to: pa.DataType, *values: Value) -> Value:
    """Return arrays of the values of each row."""
    columns = arrays(*values)
    rows, width = len(columns[0]), len(columns)
    together = pa.concat_arrays([pc.cast(each, to.value_type) for each in columns])
    at = np.arange(rows * width).reshape(width, rows).T.reshape(-1)
    return pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * width, together.take(pa.array(at)), type=to)
