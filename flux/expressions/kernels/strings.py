"""Text, by characters: code points, as Spark counts them. Binary columns count bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.expressions.kernels.values import Bools, Ints, Value, arrays, by_unique, integers, made, spread, valid
from flux.expressions.types import STRING

_INT_MAX = (1 << 31) - 1


class Characters:
    """Characters of a column by position: at which byte each begins."""

    def __init__(self, text: pa.Array) -> None:
        buffers = text.buffers()
        self.data = np.frombuffer(buffers[2] or b"", np.uint8)
        self.offsets = np.frombuffer(buffers[1], np.int32, len(text) + 1, 4 * text.offset).astype(np.int64)
        if is_.is_string(text.type):
            low, high = int(self.offsets[0]), int(self.offsets[-1])
            first = np.flatnonzero((self.data[low:high] & 0xC0) != 0x80) + low
        else:
            first = np.arange(self.offsets[0], self.offsets[-1])
        self._starts = np.append(first, self.offsets[-1])
        self._before = np.searchsorted(first, self.offsets)

    @property
    def counts(self) -> Ints:
        """The number of characters of each row."""
        return np.diff(self._before)

    def byte_at(self, position: Ints) -> Ints:
        """Return the byte at which the character of that position of each row begins; positions are within the row."""
        return np.asarray(self._starts[self._before[:-1] + position], np.int64)

    def position_of(self, byte: Ints) -> Ints:
        """Return how many characters of each row begin before a byte of the column."""
        return np.searchsorted(self._starts[:-1], byte) - self._before[:-1]


def cut(characters: Characters, first: Ints, last: Ints, where: Bools, to: pa.DataType) -> pa.Array:
    """Return the characters from ``first`` to ``last``, the last not included, of each row; both are within the row."""
    begin = np.where(where, characters.byte_at(np.where(where, first, 0)), 0)
    end = np.where(where, characters.byte_at(np.where(where, last, 0)), 0)
    lengths = np.maximum(end - begin, 0)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths)
    data = pa.py_buffer(np.ascontiguousarray(characters.data[index]))
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), data]
    made_ = pa.Array.from_buffers(to, len(lengths), buffers)
    return made_ if where.all() else pc.if_else(pa.array(where), made_, pa.scalar(None, to))


def upper(to: pa.DataType, value: Value) -> Value:
    (value,) = arrays(value)
    if pc.all(pc.string_is_ascii(value)).as_py() is not False:
        return pc.ascii_upper(value)
    return by_unique(value, str.upper, STRING)


def lower(to: pa.DataType, value: Value) -> Value:
    (value,) = arrays(value)
    if pc.all(pc.string_is_ascii(value)).as_py() is not False:
        return pc.ascii_lower(value)
    return by_unique(value, str.lower, STRING)


def trim(to: pa.DataType, value: Value, side: str, characters: str = " ") -> Value:
    """Remove characters, spaces alone if none are given, at one side or both."""
    functions = {"both": pc.utf8_trim, "left": pc.utf8_ltrim, "right": pc.utf8_rtrim}
    return functions[side](value, characters) if characters else value


def length(to: pa.DataType, value: Value) -> Value:
    counted = pc.utf8_length(value) if is_.is_string(value.type) else pc.binary_length(value)
    return pc.cast(counted, to)


def byte_length(to: pa.DataType, value: Value) -> Value:
    return pc.cast(pc.binary_length(value), to)


def substring(to: pa.DataType, value: Value, position: Value, count: Value) -> Value:
    """Return ``count`` characters from a position that begins with 1, or counts from the end if it is negative; 0 is
    1. A part in front of the text is counted, and not there."""
    if (
        is_.is_string(to)
        and isinstance(position, pa.Scalar)
        and isinstance(count, pa.Scalar)
        and position.is_valid
        and count.is_valid
    ):
        return _constant_substring(value, position.as_py(), count.as_py())
    value, position, count = arrays(value, position, count)
    where = valid(value, position, count)
    characters = Characters(value)
    counts, at, many = characters.counts, integers(position), integers(count)
    start = np.where(at > 0, at - 1, np.where(at < 0, counts + at, 0))
    end = np.minimum(start + many, _INT_MAX)
    first = np.clip(start, 0, counts)
    return cut(characters, first, np.maximum(np.clip(end, 0, counts), first), where, to)


def _constant_substring(value: Value, at: int, many: int) -> Value:
    if many <= 0:
        return pc.utf8_slice_codeunits(value, 0, 0)
    if at >= 0:
        start = max(at - 1, 0)
        return pc.utf8_slice_codeunits(value, start, min(start + many, _INT_MAX))
    end = at + many
    return pc.utf8_slice_codeunits(value, at, end if end < 0 else None)


def left(to: pa.DataType, value: Value, count: Value) -> Value:
    return substring(to, value, pa.scalar(1, pa.int32()), count)


def right(to: pa.DataType, value: Value, count: Value) -> Value:
    """Return the last characters; none for a count that is not positive."""
    value, count = arrays(value, count)
    where = valid(value, count)
    characters = Characters(value)
    counts = characters.counts
    first = counts - np.clip(integers(count), 0, counts)
    return cut(characters, first, counts, where, to)


def concat(to: pa.DataType, *values: Value) -> Value:
    if len(values) == 1:
        return values[0]
    return pc.binary_join_element_wise(*values, pa.scalar("" if is_.is_string(to) else b"", to))


def concat_with(to: pa.DataType, separator: Value, *values: Value) -> Value:
    """Join texts that are not null with a separator; null without a separator."""
    given, *columns = arrays(separator, *values)
    if not columns:
        return pc.if_else(pc.is_valid(given), "", pa.scalar(None, STRING))
    # Arrow's own way to leave nulls out leaves rows out that have nothing else.
    empty = pa.scalar("")
    parts = [pc.if_else(each.is_valid(), pc.binary_join_element_wise(given, each, empty), empty) for each in columns]
    together = pc.binary_join_element_wise(*parts, empty)
    position = pc.add(pc.utf8_length(given if isinstance(separator, pa.Array) else separator), 1)
    return substring(to, together, position, pa.scalar(_INT_MAX, pa.int32()))


def replace(to: pa.DataType, value: Value, search: str, replacement: str) -> Value:
    return pc.replace_substring(value, search, replacement) if search else value


def position(to: pa.DataType, value: Value, text: str, start: int = 1) -> Value:
    """Return the position of the first occurrence at or behind ``start``, beginning with 1; 0 if there is none. Empty
    text is found at ``start``."""
    (value,) = arrays(value)
    where = valid(value)
    if start < 1:
        return made(np.zeros(len(value), np.int64), where, to)
    characters = Characters(value)
    if start > 1:
        rest = cut(characters, np.minimum(start - 1, characters.counts), characters.counts, where, STRING)
        beyond = start - 1 > characters.counts
    else:
        rest, beyond = value, np.zeros(len(value), np.bool_)
    found = integers(pc.find_substring(rest, text))
    inner = Characters(rest)
    at = inner.position_of(inner.offsets[:-1] + np.maximum(found, 0)) + start
    return made(np.where((found < 0) | beyond, 0, at), where, to)


def starts_with(to: pa.DataType, value: Value, text: Value) -> Value:
    if isinstance(text, pa.Scalar) and text.is_valid and is_.is_string(value.type):
        return pc.starts_with(value, text.as_py())
    value, text = arrays(value, text)
    return _end_is(value, text, at_end=False)


def ends_with(to: pa.DataType, value: Value, text: Value) -> Value:
    if isinstance(text, pa.Scalar) and text.is_valid and is_.is_string(value.type):
        return pc.ends_with(value, text.as_py())
    value, text = arrays(value, text)
    return _end_is(value, text, at_end=True)


def _end_is(value: pa.Array, text: pa.Array, at_end: bool) -> pa.Array:
    where = valid(value, text)
    # Bytes, which are quicker, and the same thing in UTF-8.
    raw, wanted = pc.cast(value, pa.binary()), pc.cast(text, pa.binary())
    characters = Characters(raw)
    size, needed = characters.counts, np.where(where, Characters(wanted).counts, 0)
    needed = np.minimum(needed, size)
    first = size - needed if at_end else np.zeros_like(size)
    part = cut(characters, first, first + needed, where, pa.binary())
    return pc.equal(part, wanted)


def contains(to: pa.DataType, value: Value, text: str) -> Value:
    return pc.match_substring(value, text)


def reverse(to: pa.DataType, value: Value) -> Value:
    return pc.utf8_reverse(value)


def repeat(to: pa.DataType, value: Value, count: Value) -> Value:
    value, count = arrays(value, count)
    return pc.binary_repeat(
        value, pc.cast(pc.max_element_wise(count, pa.scalar(0, count.type), skip_nulls=False), pa.int64())
    )


def pad(to: pa.DataType, value: Value, width: int, padding: str, side: str) -> Value:
    """Pad with repetitions of ``padding`` up to a width, or cut to it."""
    (value,) = arrays(value)
    counts = Characters(value).counts
    width = max(width, 0)
    if not padding:
        return pc.utf8_slice_codeunits(value, 0, width)
    fill = pa.scalar(padding * (width // len(padding) + 1))
    missing = np.clip(width - counts, 0, width)
    filling = Characters(spread(fill, 1))
    filler = _cut_of_one(filling, missing, len(value))
    shown = pc.utf8_slice_codeunits(value, 0, width)
    parts = (filler, shown) if side == "left" else (shown, filler)
    return pc.binary_join_element_wise(*parts, "")


def _cut_of_one(characters: Characters, counts: Ints, rows: int) -> pa.Array:
    """Return the first ``counts`` characters of the only row, for each row."""
    last = characters.byte_at(np.zeros(1, np.int64))[0]
    ends = np.array([characters.byte_at(np.array([each]))[0] - last for each in range(int(counts.max(initial=0)) + 1)])
    lengths = ends[counts]
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    data = pa.py_buffer(np.ascontiguousarray(characters.data[index]))
    return pa.Array.from_buffers(STRING, rows, [None, pa.py_buffer(offsets.astype(np.int32)), data])


def split_part(to: pa.DataType, value: Value, delimiter: str, part: int) -> Value:
    """Return a part of a text that is split at each delimiter, counted from 1, or from the end if negative; empty if
    there is none."""
    (value,) = arrays(value)
    if not delimiter:
        return value if part in (1, -1) else pc.if_else(pc.is_valid(value), "", None)
    parts = pc.split_pattern(value, delimiter)
    counts = integers(pc.list_value_length(parts))
    at = counts + part if part < 0 else np.full(len(value), part - 1)
    there = valid(value) & (at >= 0) & (at < counts)
    starts = integers(parts.offsets)[:-1]
    taken = parts.values.take(pa.array(np.where(there, starts + at, 0), pa.int64(), mask=~there))
    return pc.if_else(pc.is_valid(value), pc.fill_null(taken, ""), pa.scalar(None, STRING))


def ascii_code(to: pa.DataType, value: Value) -> Value:
    """Return the code of the first character; 0 of empty text."""
    return by_unique(value, lambda text: ord(text[0]) if text else 0, to)


def parts_up_to(to: pa.DataType, value: Value, delimiter: str, count: int) -> Value:
    """Return the text before the n-th delimiter, or behind the n-th from the end."""

    def one(text: str) -> str:
        if not delimiter or count == 0:
            return ""
        if count > 0:
            return delimiter.join(text.split(delimiter)[:count])
        return delimiter.join(text.rsplit(delimiter, -count)[count:])

    return by_unique(value, one, STRING)
