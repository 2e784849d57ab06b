"""Casts between numbers, dates and timestamps; those from and to text are in ``text_casts``."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.expressions.kernels import calendar, decimals, text_casts, times
from flux.expressions.kernels.arithmetic import saturated
from flux.expressions.kernels.values import (
    ANSI,
    LEGACY,
    Bools,
    ExpressionError,
    Floats,
    Ints,
    Value,
    arrays,
    bools,
    by_unique,
    floats,
    integers,
    made,
    settled,
    valid,
    without,
)
from flux.expressions.types import DATE, STRING, TIMESTAMP, TIMESTAMP_NTZ, bounds, spark_name

Cast = Callable[[pa.DataType, pa.Array, str, "str | None"], pa.Array]


def lost(shown: object, to: pa.DataType) -> ExpressionError:
    return ExpressionError(
        "CAST_OVERFLOW", f"{shown} is out of the range of {spark_name(to)}. Use try_cast to get null instead"
    )


def kind_of(type_: pa.DataType) -> str:
    """Return the kind of a type, by which casts are chosen."""
    kinds = {
        STRING: "text",
        pa.binary(): "binary",
        DATE: "date",
        TIMESTAMP: "timestamp",
        TIMESTAMP_NTZ: "local",
        pa.null(): "null",
    }
    if type_ in kinds:
        return kinds[type_]
    for name, test in (
        ("boolean", is_.is_boolean),
        ("integer", is_.is_integer),
        ("float", is_.is_floating),
        ("decimal", is_.is_decimal),
        ("duration", is_.is_duration),
    ):
        if test(type_):
            return name
    return str(type_)


def cast(to: pa.DataType, value: Value, mode: str, zone: str | None = None) -> Value:
    """Return values as another type. ``mode`` says whether values that do not fit are errors."""
    (value,) = arrays(value)
    kind, goal = kind_of(value.type), kind_of(to)
    if value.type == to:
        return value
    if kind == "null":
        return pa.nulls(len(value), to)
    if goal == "text":
        return text_casts.to_text(value, mode, zone)
    if kind == "text":
        return text_casts.from_text(to, value, mode, zone)
    return CASTS[kind, goal](to, value, mode, zone)


def can_cast(from_: pa.DataType, to: pa.DataType) -> bool:
    kind, goal = kind_of(from_), kind_of(to)
    if from_ == to or kind == "null":
        return True
    simple = ("boolean", "integer", "float", "decimal", "date", "timestamp", "local", "text", "binary")
    if goal == "text":
        return kind in simple
    if kind == "text":
        return goal in simple
    return (kind, goal) in CASTS


def can_fail(from_: pa.DataType, to: pa.DataType, mode: str) -> bool:
    """Tell whether a cast may raise."""
    kind, goal = kind_of(from_), kind_of(to)
    if mode != ANSI or from_ == to or goal == "text" or kind == "null":
        return False
    if kind == goal == "integer":
        return bool(to.bit_width < from_.bit_width)
    if kind == "integer" and goal == "decimal":
        return bool(to.precision - to.scale < len(str(bounds(from_)[1])))
    sure = {
        ("date", "timestamp"),
        ("timestamp", "date"),
        ("local", "date"),
        ("date", "local"),
        ("integer", "float"),
        ("decimal", "float"),
    }
    return (kind, goal) not in sure and (kind == "text" or "boolean" not in (kind, goal))


def _integer_to_integer(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    if to.bit_width >= value.type.bit_width or mode == LEGACY:
        return pc.cast(value, to, safe=False)
    low, high = bounds(to)
    bad = bools(pc.or_(pc.less(value, low), pc.greater(value, high)))
    return pc.cast(settled(value, bad, mode, lambda at: lost(value[at].as_py(), to)), to, safe=False)


def _number_to_float(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    return pc.cast(value, to, safe=False)


def _number_to_boolean(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    zero = pa.scalar(Decimal(0) if is_.is_decimal(value.type) else 0, value.type)
    return pc.not_equal(value, zero)


def _boolean_to_number(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    if is_.is_decimal(to):
        return decimals.fitted(decimals.from_integer(pc.cast(value, pa.int8())), to, mode)
    return pc.cast(value, to)


def _integer_to_decimal(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    if to.precision - to.scale >= len(str(bounds(value.type)[1])):
        return pc.cast(value, to)
    return decimals.fitted(decimals.from_integer(value), to, mode)


def _float_to_integer(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    """Cut towards zero. Before ANSI mode, small types take the low bits of an INT, as Java does."""
    numbers, where = floats(value), valid(value)
    if mode == LEGACY:
        first = saturated(numbers, pa.int64() if to.bit_width == 64 else pa.int32())
        return made(first.astype(to.to_pandas_dtype()), where, to)
    bad = where & ~_within(numbers, to)
    kept = made(saturated(np.where(bad, 0, numbers), to), where, to)
    return settled(kept, bad, mode, lambda at: lost(value[at].as_py(), to))


def _within(numbers: Floats, to: pa.DataType) -> Bools:
    """Tell which doubles an integer type holds, as Spark asks: floor at most the greatest, ceil at least the least."""
    low, high = bounds(to)
    return np.asarray((np.floor(numbers) <= float(high)) & (np.ceil(numbers) >= float(low)), np.bool_)


def _float_to_decimal(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    """Return doubles by the digits that are shown; NaN and infinities are null."""
    single = is_.is_float32(value.type)
    value = without(value, valid(value) & ~np.isfinite(floats(value)))
    # Spark takes a float as the double that it is.
    texts = by_unique(pc.cast(value, pa.float64()) if single else value, repr, STRING)
    return text_casts.from_text(to, texts, mode, None)


def _decimal_to_integer(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    try:
        return decimals.to_integer(to, value, mode)
    except ExpressionError as error:
        raise lost(str(error).partition("] ")[2].partition(" is ")[0], to) from None


def _decimal_to_float(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    return pc.cast(decimals.to_double(value), to)


def _decimal_to_decimal(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    return decimals.fitted(value, to, mode)


def _timestamp_to_date(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    there = calendar.local(integers(value), zone if value.type == TIMESTAMP else None)
    return made(calendar.days_of(there), valid(value), to)


def _date_to_timestamp(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    days = integers(value) * calendar.DAY
    return made(calendar.instants(days, zone if to == TIMESTAMP else None), valid(value), to)


def _timestamp_to_local(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    return made(calendar.local(integers(value), zone), valid(value), to)


def _local_to_timestamp(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    return made(calendar.instants(integers(value), zone), valid(value), to)


def _timestamp_to_number(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    """Return seconds since the epoch: whole ones as integers, else with their fraction."""
    micros, where = integers(value), valid(value)
    if is_.is_floating(to):
        return made(micros / calendar.SECOND, where, to)
    if is_.is_decimal(to):
        whole = pc.cast(made(micros, where, pa.int64()), pa.decimal256(19, 0))
        return decimals.fitted(pc.multiply(whole, pa.scalar(Decimal("0.000001"), pa.decimal256(7, 6))), to, mode)
    seconds = micros // calendar.SECOND
    low, high = bounds(to)
    bad = where & ((seconds < low) | (seconds > high))
    kept = made(np.where(bad, 0, seconds), where, to)
    return settled(kept, bad, mode, lambda at: lost(value[at].as_py(), to))


def _number_to_timestamp(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    """Return the timestamps of seconds since the epoch."""
    where = valid(value)
    if is_.is_integer(value.type):
        seconds: Ints = integers(value)
        low, high = (each // calendar.SECOND for each in bounds(pa.int64()))
        # Spark goes as far as there are times here, and no further.
        far = np.where(seconds > high, bounds(pa.int64())[1], bounds(pa.int64())[0])
        inside = (seconds <= high) & (seconds > low)
        return made(np.where(inside, np.where(inside, seconds, 0) * calendar.SECOND, far), where, to)
    if is_.is_decimal(value.type):
        return times.from_epoch(to, value, 1)
    numbers = floats(value)
    bad = where & ~np.isfinite(numbers)
    kept = settled(value, bad, mode, lambda at: text_casts.invalid(value[at].as_py(), to))
    where = valid(kept)
    micros = np.where(where, floats(kept), 0) * calendar.SECOND
    beyond = where & ~_within(micros, pa.int64())
    result = made(saturated(micros, pa.int64()), where, to)
    return result if mode == LEGACY else settled(result, beyond, mode, lambda at: lost(value[at].as_py(), to))


_NUMBERS = ("boolean", "integer", "float", "decimal")
CASTS: dict[tuple[str, str], Cast] = {
    ("integer", "integer"): _integer_to_integer,
    ("integer", "float"): _number_to_float,
    ("float", "float"): _number_to_float,
    ("integer", "boolean"): _number_to_boolean,
    ("float", "boolean"): _number_to_boolean,
    ("decimal", "boolean"): _number_to_boolean,
    **{("boolean", goal): _boolean_to_number for goal in _NUMBERS[1:]},
    ("integer", "decimal"): _integer_to_decimal,
    ("float", "integer"): _float_to_integer,
    ("float", "decimal"): _float_to_decimal,
    ("decimal", "integer"): _decimal_to_integer,
    ("decimal", "float"): _decimal_to_float,
    ("decimal", "decimal"): _decimal_to_decimal,
    ("timestamp", "date"): _timestamp_to_date,
    ("local", "date"): _timestamp_to_date,
    ("date", "timestamp"): _date_to_timestamp,
    ("date", "local"): _date_to_timestamp,
    ("timestamp", "local"): _timestamp_to_local,
    ("local", "timestamp"): _local_to_timestamp,
    **{("timestamp", goal): _timestamp_to_number for goal in _NUMBERS[1:]},
    **{(kind, "timestamp"): _number_to_timestamp for kind in _NUMBERS[1:]},
}
