"""Decimals: exact operators and rounding HALF_UP.

Arrow computes decimals of 256 bits, 76 digits. That is enough for sums and products of decimals of 38 digits, and for
nearly all quotients; a batch whose values would need more in between is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.expressions.kernels.values import (
    ANSI,
    LEGACY,
    ExpressionError,
    Value,
    arrays,
    bools,
    division_by_zero,
    overflow,
    settled,
    valid,
    without,
)
from flux.expressions.types import spark_name

DIGITS_MAX = 76
#: Digits of a decimal of 128 bits, with which Arrow computes several times as fast.
NARROW_MAX = 38
HALF_UP, HALF_EVEN, DOWN, FLOOR, CEILING = "half_towards_infinity", "half_to_even", "towards_zero", "down", "up"
EXACT = Context(prec=400)
_INT64 = pa.decimal256(19, 0)


def out_of_range(shown: object, to: pa.DataType) -> ExpressionError:
    return ExpressionError(
        "NUMERIC_VALUE_OUT_OF_RANGE",
        f"{shown} does not fit {spark_name(to)}. Use try_cast or a try_ function to get null instead, "
        "or cast to a larger decimal",
    )


def digits(values: pa.Array) -> int:
    """Return the number of digits of the longest value of a decimal array, its scale included."""
    extremes = pc.min_max(values).as_py()
    scale = values.type.scale
    longest = max((abs(each) for each in extremes.values() if each is not None), default=Decimal(0))
    return max(len(str(int(longest.scaleb(scale, EXACT)))), int(scale), 1)


def wide(values: pa.Array, scale: int | None = None) -> pa.Array:
    """Return decimals with room for all digits there can be, at a scale that is at least their own."""
    values = pc.cast(values, pa.decimal256(DIGITS_MAX, values.type.scale))
    if scale is None or scale == values.type.scale:
        return values
    needed = digits(values) + scale - values.type.scale
    if needed > DIGITS_MAX:
        raise _too_long(needed)
    return pc.cast(values, pa.decimal256(DIGITS_MAX, scale))


def claimed(values: pa.Array, precision: int) -> pa.Array:
    """Return the same 256-bit numbers in a type of another precision, without a look at them. Arrow derives the type
    of a result from the precisions of its arguments, and refuses some whose numbers would fit."""
    type_ = pa.decimal256(precision, values.type.scale)
    return pa.Array.from_buffers(type_, len(values), values.buffers(), offset=values.offset)


def _too_long(needed: int) -> ExpressionError:
    return ExpressionError(
        "NUMERIC_VALUE_OUT_OF_RANGE",
        f"decimals of this batch need {needed} digits in between, and {DIGITS_MAX} is the limit where rows are read. "
        "Cast an operand to a decimal with fewer digits, or compute this column behind the source",
    )


def fitted(values: pa.Array, to: pa.DataType, mode: str, rounding: str = HALF_UP) -> pa.Array:
    """Return decimals as ``to``, rounded to its scale. Values that are too large are errors in ANSI mode, else null."""
    if values.type == to:
        return values
    whole, scale = to.precision - to.scale, values.type.scale
    if values.type.precision - scale > whole:
        values = _within(values, whole, to, mode)
    if scale > to.scale:
        values = _within(pc.round(wide(values), to.scale, rounding), whole, to, mode)
    return pc.cast(values, to)


def _within(values: pa.Array, whole: int, to: pa.DataType, mode: str) -> pa.Array:
    """Return decimals with at most ``whole`` digits in front of the point. The others are errors, or null."""
    scale = values.type.scale
    if whole + scale >= DIGITS_MAX:
        return values
    limit = pa.scalar(Decimal(10) ** whole, pa.decimal256(whole + scale + 1, scale))
    bad = bools(pc.greater_equal(pc.abs(values), limit))
    return settled(values, bad, mode, lambda at: out_of_range(values[at].as_py(), to))


def add(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    return _sum(to, left, right, mode, pc.add)


def subtract(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    return _sum(to, left, right, mode, pc.subtract)


def _sum(to: pa.DataType, left: Value, right: Value, mode: str, operator: Callable[[Value, Value], Value]) -> Value:
    whole = max(left.type.precision - left.type.scale, right.type.precision - right.type.scale)
    scale = max(left.type.scale, right.type.scale)
    if whole + scale < NARROW_MAX:
        return fitted(arrays(operator(left, right))[0], to, mode)
    left, right = arrays(left, right)
    # Two numbers of 76 digits have a sum of 256 bits.
    left, right = (claimed(wide(each, scale), DIGITS_MAX - 1) for each in (left, right))
    return fitted(operator(left, right), to, mode)


def multiply(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    """Multiply: two numbers of 38 digits have a product of 76."""
    if left.type.precision + right.type.precision < NARROW_MAX:
        return fitted(arrays(pc.multiply(left, right))[0], to, mode)
    left, right = (wide(each) for each in arrays(left, right))
    return fitted(claimed(_product(left, right), DIGITS_MAX), to, mode)


def _product(left: pa.Array, right: pa.Array) -> pa.Array:
    half = DIGITS_MAX // 2 - 1
    return pc.multiply(claimed(left, max(half, left.type.scale)), claimed(right, max(half, right.type.scale)))


def divide(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    """Divide: the quotient is cut one digit behind the scale of the result, and rounded HALF_UP from there."""
    left, right = _divisible(left, right, mode)
    return fitted(_quotient(left, right, to.scale + 1), to, mode)


def _divisible(left: Value, right: Value, mode: str, remainder: bool = False) -> tuple[pa.Array, pa.Array]:
    """Return dividends, and divisors with null for zero; in ANSI mode, a zero below a dividend is an error."""
    left, right = arrays(left, right)
    zero = bools(pc.equal(right, pa.scalar(Decimal(0), right.type)))
    bad = zero & valid(left)
    if bad.any() and mode == ANSI:
        raise division_by_zero(left[int(bad.argmax())].as_py(), remainder)
    return left, without(right, zero)


def _quotient(left: pa.Array, right: pa.Array, scale: int) -> pa.Array:
    """Return quotients, cut to a scale that is at least the given one. Arrow takes ``s1 + p2 - s2 + 1`` digits behind
    the point, at least 4: the precision that the divisor claims decides."""
    own, divisor = left.type.scale, right.type.scale
    claim = max(scale - 1 - own + divisor, divisor, 1)
    given = max(4, own + claim - divisor + 1)
    moved = given + divisor - own
    needed = digits(left) + moved
    if needed > DIGITS_MAX:
        raise _too_long(needed)
    left = claimed(wide(left), max(min(digits(left), DIGITS_MAX - moved), own, 1))
    return claimed(pc.divide(left, claimed(wide(right), claim)), DIGITS_MAX)


def remainder(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    left, right = _divisible(left, right, mode, remainder=True)
    return fitted(_remainder(left, right), to, mode)


def _remainder(left: pa.Array, right: pa.Array) -> pa.Array:
    """Return remainders with the signs of the dividends."""
    scale = max(left.type.scale, right.type.scale)
    left, right = wide(left, scale), wide(right, scale)
    whole = _whole(_quotient(left, right, 0))
    rest = pc.subtract(claimed(left, DIGITS_MAX - 1), claimed(_product(whole, right), DIGITS_MAX - 1))
    return claimed(rest, DIGITS_MAX)


def _whole(values: pa.Array) -> pa.Array:
    return pc.cast(pc.trunc(values), pa.decimal256(DIGITS_MAX, 0))


def pmod(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    left, right = _divisible(left, right, mode, remainder=True)
    rest = _remainder(left, right)
    divisor = wide(right, rest.type.scale)
    again = _remainder(
        claimed(pc.add(claimed(rest, DIGITS_MAX - 1), claimed(divisor, DIGITS_MAX - 1)), DIGITS_MAX), divisor
    )
    negative = pc.less(rest, pa.scalar(Decimal(0), rest.type))
    return fitted(pc.if_else(negative, again, rest), to, mode)


def integral_divide(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    """Divide towards zero, as BIGINT."""
    left, right = _divisible(left, right, mode)
    scale = max(left.type.scale, right.type.scale)
    return to_integer(to, _whole(_quotient(wide(left, scale), wide(right, scale), 0)), mode)


def to_integer(to: pa.DataType, values: pa.Array, mode: str) -> pa.Array:
    """Return decimals cut towards zero; before ANSI mode, digits in front are lost as in Java."""
    whole = pc.trunc(values)
    half = 1 << (to.bit_width - 1)
    bad = np.zeros(len(values), np.bool_)
    if values.type.precision - values.type.scale >= len(str(half)):
        compared = _whole(wide(values))
        low, high = (pa.scalar(Decimal(each), compared.type) for each in (-half, half - 1))
        bad = bools(pc.or_(pc.less(compared, low), pc.greater(compared, high)))
    if bad.any() and mode == LEGACY:
        return pa.array([None if each is None else _wrapped(int(each), to) for each in whole.to_pylist()], to)
    whole = settled(whole, bad, mode, lambda at: overflow(to, values[at].as_py()))
    return pc.cast(pc.cast(whole, pa.int64(), safe=False), to, safe=False)


def _wrapped(value: int, to: pa.DataType) -> int:
    """Return the low bits of an integer, as Java takes them."""
    half: int = 1 << (to.bit_width - 1)
    return (value + half) % (2 * half) - half


def to_double(values: pa.Array) -> pa.Array:
    """Return the doubles that are nearest. Arrow's own cast may be off by one in the last place; its parser is not."""
    kind = values.type
    if kind.precision <= 15 and kind.scale <= 22:
        unscaled = pa.Array.from_buffers(
            pa.decimal128(kind.precision, 0), len(values), values.buffers(), offset=values.offset
        )
        return pc.divide(pc.cast(pc.cast(unscaled, pa.int64()), pa.float64()), 10.0**kind.scale)
    return pc.cast(pc.cast(values, pa.string()), pa.float64())


def from_integer(values: pa.Array) -> pa.Array:
    """Return integers as decimals of scale 0, which hold all of them."""
    return pc.cast(pc.cast(values, pa.int64()), _INT64)


def round_to(to: pa.DataType, value: Value, scale: int, mode: str, rounding: str = HALF_UP) -> Value:
    """Round at ``scale`` digits behind the point, before it if negative."""
    (value,) = arrays(value)
    if scale < value.type.scale:
        value = pc.round(wide(value), scale, rounding)
    return fitted(value, to, mode)


def is_decimal(value: Value) -> bool:
    return bool(is_.is_decimal(value.type))
