"""Casts from and to text.

Each kind of text has a regular expression of the forms that Spark reads; what does not fit is an error in ANSI mode,
else null. Before ANSI mode, numbers with a point are cut to integers.
"""

from __future__ import annotations

import functools
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.expressions.kernels import calendar, decimals, formats
from flux.expressions.kernels.values import (
    LEGACY,
    Bools,
    ExpressionError,
    Ints,
    bools,
    by_unique,
    floats,
    integers,
    made,
    replaced_where,
    settled,
    valid,
    without,
)
from flux.expressions.types import DATE, STRING, TIMESTAMP, TIMESTAMP_NTZ, bounds, spark_name

#: Spaces and control characters, which Spark removes at both ends before it reads a value.
_BLANK = "".join(map(chr, (*range(33), 127)))
_INTEGER = r"\A(?P<sign>[+-]?)(?P<digits>[0-9]+)\z"
_SHORT_INTEGER = r"\A-?[0-9]{1,18}\z"
_CUT_INTEGER = r"\A(?P<sign>[+-]?)(?P<digits>[0-9]*)(?:\.[0-9]*)?\z"
_NUMBER = r"\A[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[dDfF]?\z"
_PLAIN_DECIMAL = r"\A(?P<sign>[+-]?)0*(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?\z"
_DATE_FORM = (
    r"\A(?P<sign>[+-]?)(?P<year>[0-9]{4,7})(?:-(?P<month>[0-9]{1,2})(?:-(?P<day>[0-9]{1,2})(?:[ T](?s:.*))?)?)?\z"
)
_TIME_FORM = (
    r"\A(?P<sign>[+-]?)(?P<year>[0-9]{4,6})(?:-(?P<month>[0-9]{1,2})(?:-(?P<day>[0-9]{1,2})"
    r"(?:[ T](?P<hour>[0-9]{1,2})(?::(?P<minute>[0-9]{1,2})(?::(?P<second>[0-9]{1,2})(?:\.(?P<part>[0-9]*))?"
    r"(?: *(?P<zone>[A-Z+-][A-Za-z0-9_/:+-]*))?)?)?)?)?)?\z"
)
_SPECIAL = {"nan": float("nan"), **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), float("inf"))}
_SPECIAL |= dict.fromkeys(("-inf", "-infinity"), float("-inf"))
_TRUE, _FALSE = pa.array(["t", "true", "y", "yes", "1"]), pa.array(["f", "false", "n", "no", "0"])
#: Forms that a decimal of more digits than this cannot have, whatever its scale.
_WHOLE_MAX = 38


def invalid(text: object, to: pa.DataType) -> ExpressionError:
    return ExpressionError(
        "CAST_INVALID_INPUT", f"{text!r} is no {spark_name(to)}. Correct the value, or use try_cast to get null instead"
    )


def from_text(to: pa.DataType, value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    """Return texts as values of another type."""
    if is_.is_binary(to):
        return pc.cast(value, to)
    trimmed = pc.utf8_trim(value, _BLANK)
    if is_.is_decimal(to):
        return _decimals(to, trimmed, mode)
    if is_.is_integer(to):
        result, good = _integers(to, trimmed, mode)
    elif is_.is_floating(to):
        result, good = _floats(to, trimmed)
    elif is_.is_boolean(to):
        folded = pc.ascii_lower(trimmed)
        result = pc.is_in(folded, _TRUE)
        good = bools(pc.or_(result, pc.is_in(folded, _FALSE)))
    elif to == DATE:
        result, good = _dates(trimmed)
    else:
        result, good = _timestamps(to, trimmed, zone)
    given = valid(value)
    result = settled(result, given & ~good, mode, lambda at: invalid(value[at].as_py(), to))
    return without(result, ~given)


def _integers(to: pa.DataType, texts: pa.Array, mode: str) -> tuple[pa.Array, Bools]:
    if pc.all(pc.match_substring_regex(texts, _SHORT_INTEGER)).as_py() is not False:
        wide = pc.cast(texts, pa.int64())
        least, most = bounds(to)
        fits = bools(pc.and_(pc.greater_equal(wide, least), pc.less_equal(wide, most)))
        return pc.cast(wide, to, safe=False), fits
    found = pc.extract_regex(texts, _CUT_INTEGER if mode == LEGACY else _INTEGER)
    good = valid(found) & ~bools(pc.is_in(texts, pa.array(["", "+", "-"])))
    digits = pc.utf8_ltrim(pc.struct_field(found, "digits"), "0")
    digits = pc.if_else(pc.fill_null(pc.equal(digits, ""), True), "0", digits)
    good &= bools(pc.less_equal(pc.utf8_length(digits), 19))
    digits = pc.if_else(pa.array(good), digits, "0")
    number = pc.cast(digits, pa.decimal128(20, 0))
    negative = pc.fill_null(pc.equal(pc.struct_field(found, "sign"), "-"), False)
    number = pc.if_else(negative, pc.negate(number), number)
    low, high = (pa.scalar(Decimal(each), pa.decimal128(20, 0)) for each in bounds(to))
    good &= bools(pc.and_(pc.greater_equal(number, low), pc.less_equal(number, high)))
    number = pc.if_else(pa.array(good), number, pa.scalar(Decimal(0), pa.decimal128(20, 0)))
    return pc.cast(pc.cast(number, pa.int64()), to), good


def _floats(to: pa.DataType, texts: pa.Array) -> tuple[pa.Array, Bools]:
    plain = bools(pc.match_substring_regex(texts, _NUMBER))
    clean = pc.utf8_ltrim(pc.utf8_rtrim(pc.if_else(pa.array(plain), texts, "0"), "dDfF"), "+")
    result = pc.cast(clean, to)
    other = valid(texts) & ~plain
    if not other.any():
        return result, plain
    part = by_unique(pc.filter(texts, pa.array(other)), _odd_float, to)
    good = plain.copy()
    good[other] = valid(part)
    return replaced_where(result, other, part), good


def _odd_float(text: str) -> float | None:
    folded = text.lower()
    if folded in _SPECIAL:
        return _SPECIAL[folded]
    if "0x" in folded and "p" in folded:
        try:
            return float.fromhex(folded.rstrip("df") if folded[-1] in "df" and "p" not in folded[-2:] else folded)
        except ValueError:
            return None
    return None


def _decimals(to: pa.DataType, texts: pa.Array, mode: str) -> pa.Array:
    """Return decimals: by columns if they have no exponent. One digit behind the scale is enough to round HALF_UP."""
    found = pc.extract_regex(texts, _PLAIN_DECIMAL)
    whole = pc.fill_null(pc.struct_field(found, "whole"), "")
    part = pc.fill_null(pc.struct_field(found, "part"), "")
    digits = pc.if_else(bools_array(~bools(pc.match_substring_regex(texts, "[0-9]"))), None, whole)
    plain = valid(found, digits) & bools(pc.less_equal(pc.utf8_length(whole), _WHOLE_MAX))
    part = pc.utf8_slice_codeunits(part, 0, min(to.scale + 1, DIGITS_BEHIND_MAX))
    sign = pc.if_else(pc.equal(pc.struct_field(found, "sign"), "-"), "-", "")
    shown = pc.binary_join_element_wise(
        sign, pc.binary_join_element_wise("0", whole, ""), ".", pc.binary_join_element_wise(part, "0", ""), ""
    )
    shown = pc.if_else(bools_array(plain), shown, "0.0")
    wide = pc.cast(shown, pa.decimal256(decimals.DIGITS_MAX, min(to.scale + 2, DIGITS_BEHIND_MAX)))
    fits = decimals.fitted(wide, to, mode)
    result = without(fits, ~plain)
    other = valid(texts) & ~plain
    if not other.any():
        return result
    odd = pc.filter(texts, bools_array(other))
    numbers = by_unique(odd, functools.partial(_odd_decimal, to=to), pa.string())
    bad = np.zeros(len(texts), np.bool_)
    bad[other] = ~valid(numbers)
    large = np.zeros(len(texts), np.bool_)
    large[other] = bools(pc.equal(numbers, "large"))
    numbers = pc.if_else(pc.equal(numbers, "large"), None, numbers)
    result = replaced_where(result, other, pc.cast(numbers, to))
    result = settled(result, bad, mode, lambda at: invalid(texts[at].as_py(), to))
    return settled(result, large, mode, lambda at: decimals.out_of_range(texts[at].as_py(), to))


DIGITS_BEHIND_MAX = 38


def bools_array(values: Bools) -> pa.Array:
    return pa.array(values)


def _odd_decimal(text: str, to: pa.DataType) -> str | None:
    """Return a number with an exponent, or with many digits, at the scale; "large" if it does not fit."""
    if not text.isascii() or "_" in text:
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    if number.adjusted() > to.precision - to.scale:
        return "large"
    if number.adjusted() < -to.scale - 2:
        return format(Decimal(0).scaleb(-to.scale), "f")
    rounded = number.quantize(Decimal(1).scaleb(-to.scale), "ROUND_HALF_UP", decimals.EXACT)
    return format(rounded, "f") if abs(rounded) < Decimal(10) ** (to.precision - to.scale) else "large"


def _fields(found: pa.Array, *names: str) -> list[Ints]:
    """Return groups of digits as integers; 0 where a group is empty."""
    return [_number(pc.struct_field(found, name)) for name in names]


def _number(texts: pa.Array) -> Ints:
    filled = pc.if_else(pc.fill_null(pc.equal(texts, ""), True), "0", texts)
    return integers(pc.cast(filled, pa.int64()))


def _date_fields(found: pa.Array) -> tuple[Ints, Bools]:
    """Return days, and where there is such a day. Month and day are 1 where they are not given."""
    year, month, day = _fields(found, "year", "month", "day")
    year = np.where(bools(pc.equal(pc.struct_field(found, "sign"), "-")), -year, year)
    month = np.where(bools(pc.equal(pc.struct_field(found, "month"), "")), 1, month)
    day = np.where(bools(pc.equal(pc.struct_field(found, "day"), "")), 1, day)
    good = valid(found) & calendar.exists(year, month, day)
    return np.where(good, calendar.days_from(year, np.clip(month, 1, 12), np.clip(day, 1, 31)), 0), good


def _dates(texts: pa.Array) -> tuple[pa.Array, Bools]:
    days, good = _date_fields(pc.extract_regex(texts, _DATE_FORM))
    good &= np.abs(days) < (1 << 31)
    return made(np.where(good, days, 0), np.ones(len(texts), np.bool_), DATE), good


def _timestamps(to: pa.DataType, texts: pa.Array, zone: str | None) -> tuple[pa.Array, Bools]:
    found = pc.extract_regex(texts, _TIME_FORM)
    days, good = _date_fields(found)
    hour, minute, second = _fields(found, "hour", "minute", "second")
    part = pc.fill_null(pc.struct_field(found, "part"), "")
    micros = _number(pc.utf8_slice_codeunits(pc.utf8_rpad(part, 6, "0"), 0, 6))
    good &= (hour < 24) & (minute < 60) & (second < 60) & (np.abs(days) < 106_751_991)
    times = np.where(good, days, 0) * calendar.DAY + hour * calendar.HOUR + minute * calendar.MINUTE
    times = times + second * calendar.SECOND + micros
    zones = pc.struct_field(found, "zone").dictionary_encode()
    instants = calendar.instants(times, zone)
    at = integers(zones.indices)
    for index, name in enumerate(zones.dictionary.to_pylist()):
        if not name:
            continue
        here = (at == index) & good
        if not calendar.is_zone(name):
            good &= ~here
        elif zone is not None:
            instants = np.where(here, calendar.instants(times, name), instants)
    return made(np.where(good, times if to == TIMESTAMP_NTZ else instants, 0), np.ones(len(texts), np.bool_), to), good


def to_text(value: pa.Array, mode: str, zone: str | None) -> pa.Array:
    """Return values as text."""
    kind = value.type
    if is_.is_binary(kind):
        return by_unique(value, lambda each: each.decode("utf-8", "replace"), STRING)
    if is_.is_floating(kind):
        return _float_text(value)
    if is_.is_decimal(kind):
        return _decimal_text(value, plain=mode != LEGACY)
    if kind == DATE:
        return _with_nulls(_date_text(integers(value)), value)
    if kind in (TIMESTAMP, TIMESTAMP_NTZ):
        return _with_nulls(_time_text(calendar.local(integers(value), zone if kind == TIMESTAMP else None)), value)
    return pc.cast(value, STRING)


def _float_text(value: pa.Array) -> pa.Array:
    """Return numbers as Java shows them. Arrow shows the same digits, and numbers from 0.001 to 10,000,000 in the same form."""
    texts = pc.cast(value, STRING)
    texts = pc.if_else(pc.match_substring(texts, "."), texts, pc.binary_join_element_wise(texts, ".0", ""))
    size = np.abs(floats(value))
    odd = valid(value) & ~((size >= 1e-3) & (size < 1e7))
    if not odd.any():
        return texts
    single = is_.is_float32(value.type)
    part = by_unique(
        pc.filter(value, pa.array(odd)), lambda each: shown_as_java(np.float32(each) if single else each), STRING
    )
    return replaced_where(texts, odd, part)


def _with_nulls(texts: pa.Array, value: pa.Array) -> pa.Array:
    return pc.if_else(value.is_valid(), texts, pa.scalar(None, STRING)) if value.null_count else texts


def _date_text(days: Ints) -> pa.Array:
    if not len(days) or int(np.abs(days).max()) < 10**8:  # later ones are beyond the last timestamp
        return formats.written(days * calendar.DAY, None, "yyyy-MM-dd")
    year, month, day = calendar.civil(days)
    return pc.binary_join_element_wise(formats.year_text(year), formats.number(month, 2), formats.number(day, 2), "-")


def _time_text(times: Ints) -> pa.Array:
    micros = times % calendar.SECOND
    texts = formats.written(times, None, "yyyy-MM-dd HH:mm:ss")
    if not micros.any():
        return texts
    parts = pc.binary_join_element_wise(".", pc.utf8_rtrim(formats.number(micros, 6), "0"), "")
    return pc.binary_join_element_wise(texts, pc.if_else(pa.array(micros == 0), "", parts), "")


def _decimal_text(value: pa.Array, plain: bool) -> pa.Array:
    texts = pc.cast(value, STRING)
    if not plain or value.type.scale <= 6:
        return texts
    scientific = bools(pc.match_substring(texts, "E"))
    if not scientific.any():
        return texts
    part = by_unique(pc.filter(texts, pa.array(scientific)), lambda each: format(Decimal(each), "f"), STRING)
    return replaced_where(texts, scientific, part)


def shown_as_java(number: Any) -> str:
    """Return a double or float as ``toString`` of Java 19 and newer writes it."""
    if not np.isfinite(number):
        return "NaN" if np.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    kind = type(number)
    decimal = Decimal(str(number) if kind is not float else repr(number))
    sign, digits, exponent = decimal.as_tuple()
    text = "".join(map(str, digits)).rstrip("0") or "0"
    adjusted = len(digits) - 1 + int(exponent)
    if text == "0":
        return "-0.0" if np.signbit(number) else "0.0"
    if len(text) == 1 and abs(number) < 1e-30:
        closer = f"{float(number):.1e}"
        if kind(closer) == number:
            # Two digits are shown in any case, so that they are the two that are nearest.
            mantissa, power = closer.lstrip("-").split("e")
            text, adjusted = mantissa.replace(".", ""), int(power)
    if -3 <= adjusted < 7:
        shown = format(Decimal((0, tuple(map(int, text)), adjusted - len(text) + 1)), "f")
        shown = shown if "." in shown else f"{shown}.0"
    else:
        shown = f"{text[0]}.{text[1:].rstrip('0') or '0'}E{adjusted}"
    return f"-{shown}" if sign else shown
