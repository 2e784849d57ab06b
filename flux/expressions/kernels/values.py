"""Arrays and scalars as kernels take them, and errors of rows.

A kernel gets the values of its arguments as arrays of one length, or as scalars where all rows have the same; at
least one is an array. It returns an array, or a scalar. Nulls stay where they are; what lies under a null is never
looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.errors import FluxError
from flux.expressions.types import spark_name

Value = Any  # pa.Array | pa.Scalar; pyarrow has no types for mypy
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

#: Modes of evaluation, as Spark has them: an error, null, or the answer of Spark before ANSI mode.
ANSI, TRY, LEGACY = "ansi", "try", "legacy"


class ExpressionError(FluxError, ValueError):
    """A row for which Spark raises, too. The message begins with the name of Spark's error condition."""

    def __init__(self, condition: str, message: str) -> None:
        super().__init__(f"[{condition}] {message}")
        self._given = condition, message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


def overflow(to: pa.DataType, shown: object) -> ExpressionError:
    remedy = "Use try_cast or a try_ function to get null instead, or cast to a larger type first"
    small = is_.is_integer(to) and to.bit_width < 32
    condition = (
        "BINARY_ARITHMETIC_OVERFLOW"
        if small
        else "DATETIME_OVERFLOW"
        if is_.is_timestamp(to)
        else "ARITHMETIC_OVERFLOW"
    )
    return ExpressionError(condition, f"{shown} is out of the range of {spark_name(to)}. {remedy}")


def division_by_zero(shown: object, remainder: bool = False) -> ExpressionError:
    condition, instead = ("REMAINDER_BY_ZERO", "try_mod") if remainder else ("DIVIDE_BY_ZERO", "try_divide")
    return ExpressionError(
        condition, f"{shown} is divided by zero. Use {instead}, or nullif(divisor, 0), to get null instead"
    )


def arrays(*values: Value) -> list[pa.Array]:
    """Return the values as arrays of one length."""
    rows = next((len(each) for each in values if isinstance(each, pa.Array)), 1)
    return [each if isinstance(each, pa.Array) else spread(each, rows) for each in values]


def spread(value: Value, rows: int) -> pa.Array:
    """Return a scalar as an array of that many rows; an array as it is."""
    if isinstance(value, pa.Array):
        return value
    return pa.nulls(rows, value.type) if not value.is_valid else pa.repeat(value, rows)


def integers(array: pa.Array) -> Ints:
    """Return integers, dates, times and durations as int64, with anything for nulls."""
    kind = array.type
    if is_.is_date32(kind) or is_.is_time32(kind):
        array = array.view(pa.int32())
    elif is_.is_temporal(kind):
        array = array.view(pa.int64())
    return np.asarray(_filled(array, 0).to_numpy(zero_copy_only=False), np.int64)


def floats(array: pa.Array) -> Floats:
    """Return numbers that are no decimals as float64, with 0 for nulls."""
    return np.asarray(_filled(array, 0).to_numpy(zero_copy_only=False), np.float64)


def bools(value: Value) -> Bools:
    """Return a boolean array with False for nulls."""
    return np.asarray(_filled(value, False).to_numpy(zero_copy_only=False), np.bool_)


def _filled(array: pa.Array, with_: Any) -> pa.Array:
    return pc.fill_null(array, pa.scalar(with_, array.type)) if array.null_count else array


def valid(*values: pa.Array) -> Bools:
    """Return where none of the arrays is null."""
    found = np.ones(len(values[0]), np.bool_)
    for each in values:
        if each.null_count:
            found &= np.asarray(each.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    return found


def made(values: np.ndarray[Any, Any], where: Bools, type_: pa.DataType) -> pa.Array:
    """Return an Arrow array of a numpy array that is null where ``where`` is False."""
    mask = None if where.all() else ~where
    if is_.is_date32(type_):
        return pa.array(values.astype(np.int32, copy=False), mask=mask).view(type_)
    if is_.is_timestamp(type_) or is_.is_duration(type_):
        return pa.array(values.astype(np.int64, copy=False), mask=mask).view(type_)
    return pa.array(values.astype(type_.to_pandas_dtype(), copy=False), type_, mask=mask)


def without(array: pa.Array, bad: Bools) -> pa.Array:
    """Return the array with nulls where ``bad`` is True."""
    return pc.if_else(pa.array(bad), pa.scalar(None, array.type), array) if bad.any() else array


def settled(array: pa.Array, bad: Bools, mode: str, error: Callable[[int], ExpressionError]) -> pa.Array:
    """Return the array if no row is bad; else raise the error of the first bad row in ANSI mode, and give null for
    bad rows in other modes."""
    if not bad.any():
        return array
    if mode == ANSI:
        raise error(int(bad.argmax()))
    return without(array, bad)


def quotient(values: Ints, divisor: Any) -> Ints:
    """Return quotients that are cut towards zero, as those of Java are."""
    below = values // divisor
    return np.asarray(below + ((below < 0) & (below * divisor != values)), np.int64)


def by_unique(value: Value, function: Callable[[Any], Any], type_: pa.DataType) -> pa.Array:
    """Return the function's answers, which is called once for each different value that is not null."""
    (array,) = arrays(value)
    encoded = array.dictionary_encode()
    answers = pa.array([function(each) for each in encoded.dictionary.to_pylist()], type_)
    return answers.take(encoded.indices)


def scattered(part: pa.Array, where: Bools) -> pa.Array:
    """Return an array that has the values of ``part``, in turn, where ``where`` is True, and null elsewhere."""
    at = np.cumsum(where) - 1
    return part.take(pa.array(at, pa.int64(), mask=~where))


def replaced_where(array: pa.Array, where: Bools, part: pa.Array) -> pa.Array:
    """Return the array with the values of ``part``, in turn, where ``where`` is True."""
    return pc.if_else(pa.array(where), scattered(part, where), array)
