"""Times as text and back, by patterns of Java's DateTimeFormatter, in English, as Spark has them.

Letters: y u M L d D H h K k m s S a E Q X x Z, quoted text, and other characters for themselves. Others are refused
when the expression is made.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.errors import UsageError
from flux.expressions.kernels import calendar
from flux.expressions.kernels.values import Bools, ExpressionError, Ints, arrays, integers, made, settled, valid
from flux.expressions.types import STRING, spark_name

_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
#: Repetitions of each letter that are supported, to write and to read.
_ONE_OR_TWO = (1, 2)
_UP_TO_THREE = (1, 2, 3)
_WRITTEN = {
    "y": (1, 2, 4),
    "M": (1, 2, 3, 4),
    **dict.fromkeys("dHhKkms", _ONE_OR_TWO),
    "D": (1, 3),
    "S": tuple(range(1, 10)),
    "a": (1,),
    "E": (1, 2, 3, 4),
    **dict.fromkeys("QXxZ", _UP_TO_THREE),
}
_READ = {letter: counts for letter, counts in _WRITTEN.items() if letter not in "DEQKkxZ"}


@dataclass(frozen=True)
class Piece:
    """A letter of a pattern with its repetitions, or text (``letter`` is then empty)."""

    letter: str
    count: int
    text: str = ""


@functools.lru_cache(maxsize=512)
def pieces(pattern: str, reading: bool = False) -> tuple[Piece, ...]:
    """Return the pieces of a pattern. UsageError names the first that is not supported."""
    found: list[Piece] = []
    for match in re.finditer(r"'((?:[^']|'')*)'|([a-zA-Z])\2*|(.)", pattern, re.DOTALL):
        quoted, letter, other = match.groups()
        if letter:
            name = {"u": "y", "L": "M"}.get(letter, letter)
            count = len(match[0])
            if count not in (_READ if reading else _WRITTEN).get(name, ()):
                supported = ", ".join(
                    f"{each * counts[0]}" for each, counts in (_READ if reading else _WRITTEN).items()
                )
                raise UsageError(
                    f"the pattern {pattern!r} has {match[0]}, which is not supported where rows are read; "
                    f"supported are {supported} and repetitions of them. Compute the column before the rows come to Flux"
                )
            found.append(Piece(name, count))
        elif other is not None:
            if other in "'[]{}#":
                raise UsageError(f"the pattern {pattern!r} has {other}, which is not supported where rows are read")
            found.append(Piece("", 0, other))
        else:
            found.append(Piece("", 0, quoted.replace("''", "'") or "'"))
    return tuple(found)


def number(values: Ints, width: int) -> pa.Array:
    """Return integers that are not negative as text, with zeros in front up to a width."""
    if len(values) and width <= 4 and int(values.min()) >= 0 and int(values.max()) < 10**width:
        return _padded(width).take(pa.array(values))
    return pc.utf8_lpad(pc.cast(pa.array(values), STRING), width, "0")


@functools.cache
def _padded(width: int) -> pa.Array:
    return pa.array([f"{each:0{width}}" for each in range(10**width)])


def year_text(years: Ints, width: int = 4) -> pa.Array:
    """Return years as text: with a sign in front of negative ones, and of those with more digits than the width."""
    if not len(years) or (int(years.min()) >= 0 and int(years.max()) < 10**width):
        return number(years, width)
    sign = np.where(years < 0, "-", np.where(years >= 10**width, "+" if width > 1 else "", ""))
    return pc.binary_join_element_wise(pa.array(sign, STRING), number(np.abs(years), width), "")


def written(times: Ints, zone: str | None, pattern: str) -> pa.Array:
    """Return instants (``zone`` None: local times) as text."""
    there = calendar.local(times, zone)
    fixed = _of_one_width(pieces(pattern), there)
    if fixed is not None:
        return fixed
    parts = [_written(piece, there, there - times) for piece in pieces(pattern)]
    if not parts:
        return pa.repeat("", len(times))
    return pc.binary_join_element_wise(*parts, "") if len(parts) > 1 else pc.cast(_whole(parts[0], len(times)), STRING)


#: Letters that give digits: the unit of the clock that they count, in microseconds, and its limit.
_CLOCK = {"H": (calendar.HOUR, 24), "m": (calendar.MINUTE, 60), "s": (calendar.SECOND, 60)}
_DATE = ("yyyy", "MM", "dd")


def _of_one_width(listed: tuple[Piece, ...], there: Ints) -> pa.Array | None:
    """Return times as text whose characters are written as one table of bytes, which is several times as fast; None: the
    pieces are not all of one width in ASCII, or years have more than four digits."""
    columns: list[Any] = []
    days = calendar.days_of(there)
    date: tuple[Ints, ...] | None = None
    for piece in listed:
        text = piece.letter * piece.count
        if not piece.letter and piece.text.isascii():
            columns += [np.full(1, ord(each), np.uint8) for each in piece.text]
        elif text in _DATE:
            date = date or calendar.civil(days)
            value = date[_DATE.index(text)]
            if len(value) and (int(value.min()) < 0 or int(value.max()) > 9999):
                return None
            columns += _digits(value, piece.count)
        elif piece.letter in _CLOCK and piece.count == 2:
            unit, limit = _CLOCK[piece.letter]
            columns += _digits(there // unit % limit, 2)
        elif piece.letter == "S" and piece.count <= 6:
            columns += _digits(there % calendar.SECOND // 10 ** (6 - piece.count), piece.count)
        else:
            return None
    rows, width = len(there), len(columns)
    table = np.empty((rows, width), np.uint8)
    for at, column in enumerate(columns):
        table[:, at] = column
    offsets = np.arange(rows + 1, dtype=np.int32) * width
    return pa.Array.from_buffers(STRING, rows, [None, pa.py_buffer(offsets), pa.py_buffer(table)])


def _digits(values: Ints, width: int) -> list[Any]:
    """Return the characters of numbers that are not negative, from the left."""
    small = values.astype(np.int32)
    return [(small // 10**at % 10 + 48).astype(np.uint8) for at in reversed(range(width))]


def _whole(part: pa.Array | str, rows: int) -> pa.Array:
    return pa.repeat(part, rows) if isinstance(part, str) else part


def _written(piece: Piece, there: Ints, offset: Ints) -> pa.Array | str:
    letter, count = piece.letter, piece.count
    if not letter:
        return piece.text
    if letter in "HhKkmsSa":
        return _written_time(letter, count, there % calendar.DAY)
    if letter in "XxZ":
        return _written_offset(letter, count, offset // calendar.SECOND)
    days = calendar.days_of(there)
    if letter == "E":
        return _name(_DAYS, calendar.weekday(days), count < 4)
    if letter == "D":
        return number(calendar.day_of_year(days), count)
    year, month, day = calendar.civil(days)
    if letter == "y":
        return number(year % 100, 2) if count == 2 else year_text(year, count)
    if letter == "d":
        return number(day, count)
    if letter == "Q":
        quarter = number((month - 1) // 3 + 1, min(count, 2) if count < 3 else 1)
        return pc.binary_join_element_wise("Q", quarter, "") if count == 3 else quarter
    return number(month, count) if count <= 2 else _name(_MONTHS, month - 1, count == 3)


def _written_time(letter: str, count: int, of_day: Ints) -> pa.Array:
    hour = of_day // calendar.HOUR
    if letter == "a":
        return pa.array(["AM", "PM"]).take(pa.array(hour // 12))
    if letter == "S":
        digits = number(of_day % calendar.SECOND, 6)
        return pc.utf8_slice_codeunits(pc.utf8_rpad(digits, 9, "0"), 0, count)
    value = {
        "H": hour,
        "h": (hour + 11) % 12 + 1,
        "K": hour % 12,
        "k": (hour + 23) % 24 + 1,
        "m": of_day // calendar.MINUTE % 60,
        "s": of_day // calendar.SECOND % 60,
    }[letter]
    return number(value, count)


def _name(names: list[str], at: Ints, short: bool) -> pa.Array:
    return pa.array([each[:3] if short else each for each in names]).take(pa.array(at))


def _written_offset(letter: str, count: int, seconds: Ints) -> pa.Array:
    def shown(value: int) -> str:
        if value == 0 and letter == "X":
            return "Z"
        sign, value = "-" if value < 0 else "+", abs(value)
        hours, minutes = f"{value // 3600:02}", f"{value // 60 % 60:02}"
        if letter == "Z":
            return f"{sign}{hours}{minutes}"
        if count == 1:
            return f"{sign}{hours}{minutes if minutes != '00' else ''}"
        return f"{sign}{hours}{':' if count == 3 else ''}{minutes}"

    different, at = np.unique(seconds, return_inverse=True)
    return pa.array([shown(int(each)) for each in different], STRING).take(pa.array(at))


_GROUPS = {"a": "(?i:AM|PM)"}
_NUMBERS = {1: r"\d{1,9}", 2: r"\d{2}", 4: r"-?\d{4}"}


@functools.lru_cache(maxsize=512)
def _reading(pattern: str) -> tuple[str, tuple[Piece, ...]]:
    """Return the regular expression of texts that the pattern reads, and the pieces of its groups."""
    groups: list[Piece] = []
    made_ = []
    for piece in pieces(pattern, reading=True):
        letter, count = piece.letter, piece.count
        if not letter:
            made_.append("(?i:" + "".join(f"\\x{{{ord(each):x}}}" for each in piece.text) + ")")
            continue
        if any(letter == each.letter for each in groups):
            raise UsageError(f"the pattern {pattern!r} has {letter} twice, which is not supported where rows are read")
        if letter == "M" and count > 2:
            form = "(?i:" + "|".join(each[:3] if count == 3 else each for each in _MONTHS) + ")"
        elif letter == "X":
            form = "Z|" + {1: r"[+-]\d{2}(?:\d{2})?", 2: r"[+-]\d{4}", 3: r"[+-]\d{2}:\d{2}"}[count]
        elif letter == "S":
            form = rf"\d{{1,{count}}}"
        else:
            form = _GROUPS.get(letter) or _NUMBERS[count]
        made_.append(f"(?P<g{len(groups)}>{form})")
        groups.append(piece)
    return rf"\A{''.join(made_)}\z", tuple(groups)


def read(values: pa.Array, zone: str | None, pattern: str) -> tuple[Ints, Bools]:
    """Return the instants (``zone`` None: local times) of texts, and where there is one."""
    form, groups = _reading(pattern)
    rows = len(values)
    if not groups:
        fits = pc.fill_null(pc.match_substring_regex(values, form), False)
        return np.zeros(rows, np.int64), np.asarray(fits)
    found = pc.extract_regex(values, form)
    there = valid(found)
    parts = {piece.letter: (piece, _filled_text(pc.struct_field(found, at))) for at, piece in enumerate(groups)}
    fields = {
        letter: _numbers(text)
        for letter, (piece, text) in parts.items()
        if letter not in "aXS" and not (letter == "M" and piece.count > 2)
    }
    ones = np.ones(rows, np.int64)
    year, month, day = fields.get("y", ones * 1970), fields.get("M", ones), fields.get("d", ones)
    if "y" in parts and parts["y"][0].count == 2:
        year = year + 2000
    if "M" in parts and parts["M"][0].count > 2:
        short = pa.array([each[:3].upper() for each in _MONTHS])
        month = (
            integers(pc.fill_null(pc.index_in(pc.ascii_upper(pc.utf8_slice_codeunits(parts["M"][1], 0, 3)), short), 0))
            + 1
        )
    hour, minute, second = _hour(fields, parts, rows), fields.get("m", ones * 0), fields.get("s", ones * 0)
    fraction = ones * 0
    if "S" in parts:
        fraction = _numbers(pc.utf8_slice_codeunits(pc.utf8_rpad(parts["S"][1], 6, "0"), 0, 6))
    there &= calendar.exists(year, month, day) & (hour >= 0) & (hour < 24) & (minute < 60) & (second < 60)
    days = calendar.days_from(year, np.clip(month, 1, 12), np.clip(day, 1, 31))
    times = days * calendar.DAY + hour * calendar.HOUR + minute * calendar.MINUTE + second * calendar.SECOND + fraction
    if "X" in parts:
        return times - offset_of(parts["X"][1]), there
    return calendar.instants(np.where(there, times, 0), zone), there


def _hour(fields: dict[str, Ints], parts: dict[str, tuple[Piece, pa.Array]], rows: int) -> Ints:
    """Return the hour of the day; -1 where the text has none."""
    if "H" in fields or "h" not in fields:
        return fields.get("H", np.zeros(rows, np.int64))
    hour = fields["h"]
    afternoon = np.zeros(rows, np.int64)
    if "a" in parts:
        afternoon = integers(pc.cast(pc.equal(pc.ascii_upper(parts["a"][1]), "PM"), pa.int64()))
    return np.where((hour < 1) | (hour > 12), -1, hour % 12 + 12 * afternoon)


def _filled_text(values: pa.Array) -> pa.Array:
    return pc.fill_null(values, "")


def _numbers(texts: pa.Array) -> Ints:
    """Return digits as integers; 0 for empty text."""
    return integers(pc.cast(pc.if_else(pc.equal(texts, ""), "0", texts), pa.int64()))


def offset_of(texts: pa.Array) -> Ints:
    """Return offsets such as +01:00, -0130 or Z in microseconds."""
    encoded = texts.dictionary_encode()

    def one(text: str) -> int:
        found = re.fullmatch(r"([+-])(\d{1,2}):?(\d{2})?:?(\d{2})?", text or "")
        if found is None:
            return 0
        seconds = int(found[2]) * 3600 + int(found[3] or 0) * 60 + int(found[4] or 0)
        return (-seconds if found[1] == "-" else seconds) * calendar.SECOND

    return integers(pa.array([one(each) for each in encoded.dictionary.to_pylist()], pa.int64()).take(encoded.indices))


def format_time(to: pa.DataType, value: pa.Array, pattern: str, zone: str | None) -> pa.Array:
    """Return times as text: DATE_FORMAT."""
    (value,) = arrays(value)
    text = written(integers(value), zone, pattern)
    return pc.if_else(value.is_valid(), text, pa.scalar(None, STRING)) if value.null_count else text


def format_seconds(to: pa.DataType, value: pa.Array, pattern: str, zone: str | None) -> pa.Array:
    """Return seconds since the epoch as text: FROM_UNIXTIME."""
    (value,) = arrays(value)
    times = made(integers(value) * calendar.SECOND, valid(value), pa.int64())
    return format_time(to, times, pattern, zone)


def parse_time(to: pa.DataType, value: pa.Array, pattern: str, zone: str | None, mode: str) -> pa.Array:
    """Return the times of texts: TO_TIMESTAMP with a pattern; seconds since the epoch where ``to`` is BIGINT."""
    (value,) = arrays(value)
    times, there = read(value, zone, pattern)
    result = made(times // calendar.SECOND if to == pa.int64() else times, there, to)
    bad = valid(value) & ~there
    return settled(result, bad, mode, lambda at: unreadable(value[at].as_py(), to, f"by the pattern {pattern}"))


def unreadable(text: str, to: pa.DataType, how: str) -> ExpressionError:
    return ExpressionError(
        "CANNOT_PARSE_TIMESTAMP", f"{text!r} is no {spark_name(to)} {how}. Use try_to_timestamp to get null instead"
    )
