"""LIKE, RLIKE, extraction, replacement and splitting. Patterns are literals; ``java_regex`` translates them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.errors import UsageError
from flux.expressions.java_regex import JavaPattern, translated
from flux.expressions.kernels.values import Value, arrays, bools, by_unique, replaced_where

_REFERENCE = re.compile(r"\\(.)|\$(?:(\d)|\{([a-zA-Z][a-zA-Z0-9]*)\})|([\\$])", re.DOTALL)


@functools.lru_cache(maxsize=512)
def like_form(pattern: str, escape: str) -> tuple[str, str]:
    """Return how a pattern of LIKE is matched, and with which text: "equal", "starts", "ends", "contains" or "regex"."""
    parts: list[tuple[bool, str]] = []  # whether it is a wildcard, and the character
    at = 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == escape:
            if at == len(pattern):
                raise UsageError(
                    f"[INVALID_FORMAT.ESC_AT_THE_END] the pattern {pattern!r} ends with its escape character {escape!r}"
                )
            if pattern[at] not in ("%", "_", escape):
                raise UsageError(
                    f"[INVALID_FORMAT.ESC_IN_THE_MIDDLE] in the pattern {pattern!r}, {escape!r} stands before {pattern[at]!r}; "
                    f"it may stand before %, _ and itself. Write {escape}{escape} for the character"
                )
            parts.append((False, pattern[at]))
            at += 1
        else:
            parts.append((character in "%_", character))
    wild = "".join(character if special else "." for special, character in parts)
    plain = "".join(character for special, character in parts if not special)
    for form, kind in ((r"\.*", "equal"), (r"\.*%", "starts"), (r"%\.*", "ends"), (r"%\.*%", "contains")):
        if re.fullmatch(form, wild):
            return kind, plain
    made = "".join(
        (".*" if character == "%" else ".") if special else _quoted(character) for special, character in parts
    )
    return "regex", rf"(?s)\A{made}\z"


def _quoted(character: str) -> str:
    return character if character.isalnum() else f"\\x{{{ord(character):x}}}"


def like(to: pa.DataType, value: Value, pattern: str, escape: str = "\\") -> Value:
    kind, text = like_form(pattern, escape)
    if kind == "equal":
        return pc.equal(value, pa.scalar(text))
    functions = {"starts": pc.starts_with, "ends": pc.ends_with, "contains": pc.match_substring}
    return functions.get(kind, pc.match_substring_regex)(value, text)


def matches(to: pa.DataType, value: Value, pattern: str) -> Value:
    """Return whether a part of the text matches: RLIKE."""
    compiled = translated(pattern)
    if compiled.literal is not None:
        return pc.match_substring(value, compiled.literal)
    return _by_engine(
        compiled,
        value,
        pa.bool_(),
        lambda values: pc.match_substring_regex(values, compiled.re2),
        lambda text: compiled.python.search(text) is not None,
    )


def _by_engine(
    compiled: JavaPattern,
    value: Value,
    to: pa.DataType,
    columns: Callable[[pa.Array], pa.Array],
    single: Callable[[str], Any],
) -> pa.Array:
    """Return the answers of RE2 (``columns``) where they are those of Java, and elsewhere those of ``re``."""
    (value,) = arrays(value)
    if compiled.re2 is None:
        return by_unique(value, single, to)
    odd = compiled.odd(value)
    if odd is None:
        return columns(value)
    where = bools(odd)
    part = by_unique(pc.filter(value, odd), single, to)
    return replaced_where(columns(value), where, part)


def check_group(pattern: str, group: int) -> None:
    """Raise UsageError unless the pattern has a group of that number."""
    count = translated(pattern).groups
    if not 0 <= group <= count:
        raise UsageError(
            f"[INVALID_PARAMETER_VALUE.REGEX_GROUP_INDEX] the regular expression {pattern!r} has {count} groups, and none "
            f"of the number {group}"
        )


def extract(to: pa.DataType, value: Value, pattern: str, group: int) -> Value:
    """Return a group of the first match; empty text without a match, and where the group is in no part of it."""
    compiled = translated(pattern)

    def columns(values: pa.Array) -> pa.Array:
        found = pc.extract_regex(values, _with_one_group(compiled.re2 or "", group))
        return pc.if_else(
            pc.is_valid(values),
            pc.fill_null(found.field(0) if found.null_count == 0 else pc.struct_field(found, 0), ""),
            None,
        )

    def single(text: str) -> str:
        found = compiled.python.search(text)
        return "" if found is None else found[group] or ""

    return _by_engine(compiled, value, pa.string(), columns, single)


@functools.lru_cache(maxsize=512)
def _with_one_group(pattern: str, group: int) -> str:
    """Return the pattern with names for its groups, as Arrow wants them, so that the first is the wanted one."""
    if group == 0:
        return f"(?P<wanted>{_without_groups(pattern)})"
    count = 0
    made, at, in_class = [], 0, False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            made.append(pattern[at : at + 2])
            at += 2
            continue
        if character == "[" and not in_class:
            in_class = True
        elif character == "]":
            in_class = False
        opens = character == "(" and not in_class
        named = re.compile(r"\(\?P<\w+>").match(pattern, at) if opens else None
        if opens and (named or pattern[at + 1 : at + 2] != "?"):
            count += 1
            made.append("(?P<wanted>" if count == group else "(?:")
            at = named.end() if named else at + 1
            continue
        made.append(character)
        at += 1
    return "".join(made)


def _without_groups(pattern: str) -> str:
    return _with_one_group(pattern, -1)


@functools.lru_cache(maxsize=512)
def replacement_parts(pattern: str, text: str) -> tuple[str | int, ...]:
    """Return the parts of a replacement: text, and numbers of groups."""
    compiled = translated(pattern)
    parts: list[str | int] = []
    at = 0
    for found in _REFERENCE.finditer(text):
        if found.start() < at:
            continue
        parts.append(text[at : found.start()])
        at = found.end()
        escaped, digit, name, lone = found.groups()
        if escaped is not None:
            parts.append(escaped)
        elif digit is not None:
            number = int(digit)
            # Java takes further digits as long as there is such a group.
            while at < len(text) and text[at] in "0123456789" and number * 10 + int(text[at]) <= compiled.groups:
                number = number * 10 + int(text[at])
                at += 1
            if number > compiled.groups:
                raise UsageError(
                    f"the replacement {text!r} names group {number}, and {pattern!r} has {compiled.groups}"
                )
            parts.append(number)
        elif name is not None:
            if name not in compiled.python.groupindex:
                raise UsageError(f"the replacement {text!r} names group {name}, which {pattern!r} does not have")
            parts.append(compiled.python.groupindex[name])
        elif lone is not None:
            raise UsageError(
                f"the replacement {text!r} has a {lone} without a group behind it; write \\{lone} for the character"
            )
    return (*parts, text[at:])


def substitute(to: pa.DataType, value: Value, pattern: str, replacement: str) -> Value:
    """Replace every match. Java, unlike RE2, finds empty matches also right behind others."""
    compiled = translated(pattern)
    parts = replacement_parts(pattern, replacement)

    def single(text: str) -> str:
        return compiled.python.sub(lambda found: "".join(_piece(found, each) for each in parts), text)

    if compiled.literal and all(isinstance(each, str) for each in parts):
        return pc.replace_substring(value, compiled.literal, "".join(map(str, parts)))
    if compiled.re2 is None or compiled.empty or any(isinstance(each, int) and each > 9 for each in parts):
        return by_unique(value, single, pa.string())
    form = "".join(f"\\{each}" if isinstance(each, int) else each.replace("\\", "\\\\") for each in parts)
    return _by_engine(
        compiled, value, pa.string(), lambda values: pc.replace_substring_regex(values, compiled.re2, form), single
    )


def _piece(found: re.Match[str], part: str | int) -> str:
    return part if isinstance(part, str) else found[part] or ""


def split(to: pa.DataType, value: Value, pattern: str, limit: int = -1) -> Value:
    """Split at every match; ``limit`` above 0 is the most parts. Empty parts at the end stay."""
    compiled = translated(pattern)
    (value,) = arrays(value)
    most = None if limit <= 0 else limit - 1
    if most == 0:
        return pa.ListArray.from_arrays(np.arange(len(value) + 1, dtype=np.int32), value, mask=_mask(value))
    if compiled.literal:
        return _listed(pc.split_pattern(value, compiled.literal, max_splits=most))
    if compiled.re2 is not None and not compiled.empty and compiled.odd(value) is None:
        return _listed(pc.split_pattern_regex(value, compiled.re2, max_splits=most))
    return by_unique(value, lambda text: _java_split(compiled.python, text, limit), to)


def _listed(parts: pa.Array) -> pa.Array:
    return pc.cast(parts, pa.list_(pa.field("element", pa.string())))


def _mask(value: pa.Array) -> Any:
    return pc.is_null(value) if value.null_count else None


def _java_split(pattern: re.Pattern[str], text: str, limit: int) -> list[str]:
    """Split as Spark does: by characters at an empty pattern, else as String.split of Java, which gives no empty
    part in front of an empty match at the beginning."""
    if not pattern.pattern:
        last = len(text) - 1 if not 0 < limit <= len(text) else limit - 1
        return [*text[:last], text[last:]] if text else [""]
    parts: list[str] = []
    at = 0
    for found in pattern.finditer(text):
        if found.end() == 0 or 0 < limit <= len(parts) + 1:
            continue
        parts.append(text[at : found.start()])
        at = found.end()
    return [*parts, text[at:]]
