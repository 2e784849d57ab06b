"""Numbers: operators and mathematical functions, with the overflow rules of Java and of Spark's ANSI mode.

Integers: an overflow is an error in ANSI mode, null in the functions that begin with TRY, and wraps around otherwise.
A division by zero, of doubles too, is an error or null. Remainders have the sign of the dividend. Rounding of doubles
goes by the decimal digits that are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.expressions.kernels import decimals, strict_math
from flux.expressions.kernels.values import (
    ANSI,
    LEGACY,
    Bools,
    Floats,
    Ints,
    Value,
    arrays,
    by_unique,
    division_by_zero,
    floats,
    integers,
    made,
    overflow,
    quotient,
    replaced_where,
    settled,
    valid,
)
from flux.expressions.types import bounds

Operator = Callable[[Ints, Ints], Ints]


def add(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    if is_.is_decimal(to):
        return decimals.add(to, left, right, mode)
    return _operate(to, left, right, mode, (pc.add, pc.add_checked), _add_overflows, "+")


def subtract(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    if is_.is_decimal(to):
        return decimals.subtract(to, left, right, mode)
    return _operate(to, left, right, mode, (pc.subtract, pc.subtract_checked), _subtract_overflows, "-")


def multiply(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    if is_.is_decimal(to):
        return decimals.multiply(to, left, right, mode)
    return _operate(to, left, right, mode, (pc.multiply, pc.multiply_checked), _multiply_overflows, "*")


def _operate(
    to: pa.DataType,
    left: Value,
    right: Value,
    mode: str,
    functions: tuple[Any, Any],
    overflows: Callable[[Ints, Ints, Ints], Bools],
    sign: str,
) -> Value:
    wrapping, checked = functions
    if is_.is_duration(to):
        left, right = (pc.cast(each, pa.int64()) for each in (left, right))
    if is_.is_floating(to) or mode == LEGACY:
        return pc.cast(wrapping(left, right), to)
    try:
        return pc.cast(checked(left, right), to)
    except pa.ArrowInvalid:
        pass  # the slow way finds the row
    left, right = arrays(left, right)
    x, y, result = integers(left), integers(right), integers(wrapping(left, right))
    if left.type.bit_width < 64:
        result = integers(wrapping(pc.cast(left, pa.int64()), pc.cast(right, pa.int64())))
        low, high = bounds(left.type)
        bad = (result < low) | (result > high)
    else:
        bad = overflows(x, y, result)
    bad &= valid(left, right)
    kept = made(np.where(bad, 0, result), valid(left, right), to)
    return settled(kept, bad, mode, lambda at: overflow(to, f"{left[at].as_py()} {sign} {right[at].as_py()}"))


def _add_overflows(x: Ints, y: Ints, result: Ints) -> Bools:
    return np.asarray(((x ^ result) & (y ^ result)) < 0, np.bool_)


def _subtract_overflows(x: Ints, y: Ints, result: Ints) -> Bools:
    return np.asarray(((x ^ y) & (x ^ result)) < 0, np.bool_)


def _multiply_overflows(x: Ints, y: Ints, result: Ints) -> Bools:
    least = np.iinfo(np.int64).min
    with np.errstate(all="ignore"):
        back = result // np.where(y == 0, 1, y)
    lost = (y != 0) & (back != x)
    return np.asarray(lost | ((x == least) & (y == -1)) | ((y == least) & (x == -1)), np.bool_)


def divide(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    """Divide doubles or decimals. Spark has no other division with ``/``."""
    if is_.is_decimal(to):
        return decimals.divide(to, left, right, mode)
    left, right = arrays(left, right)
    x, y = floats(left), floats(right)
    where = _divisible(left, right, y == 0, mode)
    with np.errstate(all="ignore"):
        return made(x / np.where(where, y, 1), where, to)


def _divisible(left: pa.Array, right: pa.Array, zero: Any, mode: str, remainder: bool = False) -> Bools:
    """Return where there is a dividend and a divisor that is not zero; a zero divisor is an error in ANSI mode."""
    both = valid(left, right)
    bad = both & zero
    if mode == ANSI and bad.any():
        raise division_by_zero(left[int(bad.argmax())].as_py(), remainder)
    return np.asarray(both & ~zero, np.bool_)


def integral_divide(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    """Divide towards zero. ``div`` of Spark gives BIGINT, of decimals too."""
    if decimals.is_decimal(left):
        return decimals.integral_divide(to, left, right, mode)
    left, right = arrays(left, right)
    x, y = integers(left), integers(right)
    where = _divisible(left, right, y == 0, mode)
    low, _ = bounds(left.type)
    bad = where & (x == low) & (y == -1)
    if mode != LEGACY:
        kept = quotient(x, np.where(bad | ~where, 1, y))
        return settled(
            made(kept, where, to), bad, mode, lambda at: overflow(to, f"{left[at].as_py()} div {right[at].as_py()}")
        )
    return made(np.where(bad, x, quotient(x, np.where(bad | ~where, 1, y))), where, to)


def remainder(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    if is_.is_decimal(to):
        return decimals.remainder(to, left, right, mode)
    return _modulo(to, left, right, mode, lambda x, y: np.fmod(x, y))


def pmod(to: pa.DataType, left: Value, right: Value, mode: str) -> Value:
    """Return remainders moved to be positive, where the divisor is."""
    if is_.is_decimal(to):
        return decimals.pmod(to, left, right, mode)

    def positive(x: Any, y: Any) -> Any:
        rest = np.fmod(x, y)
        return np.where(rest < 0, np.fmod(rest + y, y), rest)

    return _modulo(to, left, right, mode, positive)


def _modulo(to: pa.DataType, left: Value, right: Value, mode: str, function: Callable[[Any, Any], Any]) -> Value:
    left, right = arrays(left, right)
    take = floats if is_.is_floating(to) else integers
    x, y = take(left), take(right)
    if is_.is_float32(to):
        x, y = x.astype(np.float32), y.astype(np.float32)  # type: ignore[assignment]
    where = _divisible(left, right, y == 0, mode, remainder=True)
    # The remainder by -1 is 0, also of the least integer, of which the machine has no quotient.
    divisor = np.where(where, y, 1) if is_.is_floating(to) else np.where(where & (y != -1), y, 1)
    with np.errstate(all="ignore"):
        return made(_at_minus_one(function(x, divisor), x, y, to), where, to)


def _at_minus_one(result: Any, x: Any, y: Any, to: pa.DataType) -> Any:
    return result if is_.is_floating(to) else np.where(y == -1, 0, result)


def negate(to: pa.DataType, value: Value, mode: str) -> Value:
    if is_.is_floating(to) or is_.is_decimal(to):
        return pc.negate(value)
    return subtract(to, pa.scalar(0, value.type if not is_.is_duration(to) else pa.int64()), value, mode)


def absolute(to: pa.DataType, value: Value, mode: str) -> Value:
    if is_.is_floating(to) or is_.is_decimal(to):
        return pc.abs(value)
    (value,) = arrays(value)
    negated = negate(to, pc.if_else(pc.less(value, pa.scalar(0, value.type)), value, pa.scalar(0, value.type)), mode)
    return pc.if_else(pc.less(value, pa.scalar(0, value.type)), negated, value)


def bit_and(to: pa.DataType, left: Value, right: Value) -> Value:
    return pc.bit_wise_and(left, right)


def bit_or(to: pa.DataType, left: Value, right: Value) -> Value:
    return pc.bit_wise_or(left, right)


def bit_xor(to: pa.DataType, left: Value, right: Value) -> Value:
    return pc.bit_wise_xor(left, right)


def bit_not(to: pa.DataType, value: Value) -> Value:
    return pc.bit_wise_not(value)


def square_root(to: pa.DataType, value: Value) -> Value:
    with np.errstate(all="ignore"):
        return _of_floats(value, np.sqrt)


def _of_floats(value: Value, function: Callable[[Floats], Any]) -> pa.Array:
    (value,) = arrays(value)
    return made(function(floats(value)), valid(value), pa.float64())


def power(to: pa.DataType, left: Value, right: Value) -> Value:
    left, right = arrays(left, right)
    return made(strict_math.power(floats(left), floats(right)), valid(left, right), pa.float64())


def exponential(to: pa.DataType, value: Value) -> Value:
    return _of_floats(value, strict_math.exp)


def logarithm(to: pa.DataType, value: Value, base: str) -> Value:
    """Return the logarithm: null for numbers that have none, zero included."""
    function = {"e": strict_math.log, "2": strict_math.log2, "10": strict_math.log10}[base]
    (value,) = arrays(value)
    numbers = floats(value)
    return made(function(numbers), valid(value) & ~(numbers <= 0), pa.float64())


def sign(to: pa.DataType, value: Value) -> Value:
    return _of_floats(value, lambda x: np.where(x == 0, x, np.sign(x)))


def floor(to: pa.DataType, value: Value, mode: str) -> Value:
    return _to_whole(to, value, np.floor, decimals.FLOOR, mode)


def ceiling(to: pa.DataType, value: Value, mode: str) -> Value:
    return _to_whole(to, value, np.ceil, decimals.CEILING, mode)


def _to_whole(to: pa.DataType, value: Value, function: Callable[[Floats], Floats], rounding: str, mode: str) -> Value:
    if is_.is_decimal(value.type):
        return decimals.round_to(to, value, 0, mode, rounding)
    if is_.is_integer(value.type):
        return pc.cast(value, to)
    (value,) = arrays(value)
    whole, where = np.nan_to_num(function(floats(value)), nan=0.0, posinf=np.inf, neginf=-np.inf), valid(value)
    low, high = bounds(to)
    bad = where & ~((whole <= float(high)) & (whole >= float(low))) if mode == ANSI else where & False
    return settled(made(saturated(whole, to), where, to), bad, mode, lambda at: overflow(to, value[at].as_py()))


def saturated(numbers: Floats, to: pa.DataType) -> Ints:
    """Return doubles as integers as Java casts them: NaN is 0, and a number that is too large the nearest integer."""
    low, high = bounds(to)
    whole = np.trunc(np.nan_to_num(numbers, nan=0.0))
    over, under = whole >= float(high), whole <= float(low)
    result = np.where(over | under, 0, whole).astype(np.int64)
    return np.where(over, high, np.where(under, low, result))


def round_scaled(to: pa.DataType, value: Value, scale: int, rounding: str) -> Value:
    """Round decimals down or up at a scale: ``floor`` and ``ceil`` with two arguments."""
    return decimals.round_to(to, value, scale, ANSI, rounding)


def round_half(to: pa.DataType, value: Value, scale: int, mode: str, even: bool = False) -> Value:
    """Round half up, away from zero, or half to the even digit."""
    if is_.is_decimal(value.type):
        return decimals.round_to(to, value, scale, mode, decimals.HALF_EVEN if even else decimals.HALF_UP)
    (value,) = arrays(value)
    if is_.is_integer(to):
        return value if scale >= 0 else _round_integers(to, value, scale, mode, even)
    return _round_floats(value, scale, even)


def _round_integers(to: pa.DataType, value: pa.Array, scale: int, mode: str, even: bool) -> pa.Array:
    wide = decimals.from_integer(value)
    rounded = pc.round(decimals.wide(wide), max(scale, -19), decimals.HALF_EVEN if even else decimals.HALF_UP)
    if scale < -19:
        return made(np.zeros(len(value), np.int64), valid(value), to)
    return decimals.to_integer(to, rounded, mode)


def _round_floats(value: pa.Array, scale: int, even: bool) -> pa.Array:
    """Round by the digits that are shown. A whole number over a power of ten is the nearest double of its quotient,
    so that numbers far from a tie need no digits; the others go through text."""
    x = floats(value)
    with np.errstate(all="ignore"):
        scaled = np.abs(x) * 10.0**scale if abs(scale) <= 22 else np.full(len(x), np.inf)
        below = np.floor(scaled)
        part = scaled - below
        whole = np.where(part > 0.5, below + 1, below)
        near = np.copysign(whole / 10.0**scale if scale >= 0 else whole * 10.0**-scale, x) if abs(scale) <= 22 else x
    tie = np.abs(part - 0.5) < 1e-12 + 1e-15 * scaled
    large = scaled >= 2.0**49
    precise = valid(value) & np.isfinite(x) & (tie | large)
    if is_.is_float32(value.type):
        precise = valid(value) & np.isfinite(x)
    # Java's BigDecimal has no zero with a sign.
    kept = made(np.where(np.isfinite(x), near + 0.0, x), valid(value), value.type)
    if not precise.any():
        return kept
    how = ROUND_HALF_EVEN if even else ROUND_HALF_UP
    part_of = pc.filter(value, pa.array(precise))
    # Spark takes a float as the double that it is.
    exact = by_unique(part_of, lambda each: _rounded(repr(each), scale, how), value.type)
    return replaced_where(kept, precise, exact)


def _rounded(shown: str, scale: int, how: str) -> float:
    number = Decimal(shown)
    if scale >= -int(number.as_tuple().exponent):
        return float(number) + 0.0
    with_room = decimals.EXACT
    return float(number.quantize(Decimal(1).scaleb(-scale), how, with_room)) + 0.0
