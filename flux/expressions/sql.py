"""Expressions and steps as text of SQL, as people write and read them. Types, modes and time zones are left out, so that two
expressions may have the same text; their text form (``str``) tells them apart."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow.types as is_

from flux.expressions.steps import MapRows, RowStep, RowSteps, Select, Where
from flux.expressions.tree import And, Case, Coalesce, Column, Connective, Expression, FunctionCall, Literal, With
from flux.expressions.types import CALENDAR, spark_name

#: Operators between two arguments, each with its rank: those of a higher rank are computed first.
_BETWEEN = {
    "equal": ("=", 4), "equal_null_safe": ("<=>", 4), "less": ("<", 4), "less_or_equal": ("<=", 4), "greater": (">", 4),
    "greater_or_equal": (">=", 4), "like": ("LIKE", 4), "rlike": ("RLIKE", 4), "add": ("+", 5), "subtract": ("-", 5),
    "multiply": ("*", 6), "divide": ("/", 6), "div": ("DIV", 6), "remainder": ("%", 6),
}  # fmt: skip
#: Operators behind their argument, and in front of it.
_BEHIND = {"is_null": "IS NULL", "is_not_null": "IS NOT NULL"}
_OR, _AND, _NOT, _COMPARED, _HIGHEST = 1, 2, 3, 4, 9
#: Options that say how a value is computed, and not which.
_QUIET = ("mode", "zone")
#: Units of lengths of time with their microseconds, the longest first.
_UNITS = {"DAY": 86_400_000_000, "HOUR": 3_600_000_000, "MINUTE": 60_000_000, "SECOND": 1_000_000, "MICROSECOND": 1}
_EPOCH = datetime.datetime(1970, 1, 1)


def sql(expression: Expression) -> str:
    """Return an expression as text of SQL."""
    return _text(expression)[0]


def steps_in_sql(steps: RowSteps) -> str:
    """Return conditions and columns as text of SQL."""
    return "; ".join(map(_step, steps.chain))


def _step(step: RowStep) -> str:
    if isinstance(step, Where):
        return f"where {sql(step.condition)}"
    if isinstance(step, Select):
        return f"select {', '.join(_output(name, each) for name, each in step.outputs)}"
    assert isinstance(step, MapRows)
    return f"mapInArrow {getattr(step.function, 'name', 'function')}" if step.looks_at is None else str(step)


def _output(name: str, value: Expression) -> str:
    text = sql(value)
    return text if isinstance(value, Column) and value.name == name else f"{text} AS {_quoted(name)}"


def _text(given: Expression) -> tuple[str, int]:
    """Return the text of an expression, and its rank: within an operator of a higher rank it needs parentheses."""
    if isinstance(given, Column):
        return _quoted(given.name), _HIGHEST
    if isinstance(given, Literal):
        return _literal(given), _HIGHEST
    if isinstance(given, Connective):
        name, rank = ("AND", _AND) if isinstance(given, And) else ("OR", _OR)
        return f"{_within(given.left, rank)} {name} {_within(given.right, rank)}", rank
    if isinstance(given, With):
        return _text(given.body.replaced({given.name: given.value}))
    if isinstance(given, Case):
        branches = "".join(f" WHEN {sql(when)} THEN {sql(then)}" for when, then in given.branches)
        return f"CASE{branches} ELSE {sql(given.otherwise)} END", _HIGHEST
    if isinstance(given, Coalesce):
        return f"coalesce({_listed(given.arguments)})", _HIGHEST
    if isinstance(given, FunctionCall):
        return _call(given)
    return str(given), _HIGHEST


def _call(given: FunctionCall) -> tuple[str, int]:
    name, arguments = given.function, given.arguments
    if name in _BETWEEN and len(arguments) == 2:
        sign, rank = _BETWEEN[name]
        return f"{_within(arguments[0], rank)} {sign} {_within(arguments[1], rank + 1)}", rank
    if name in _BEHIND:
        return f"{_within(arguments[0], _COMPARED + 1)} {_BEHIND[name]}", _COMPARED
    if name == "not":
        return f"NOT {_within(arguments[0], _NOT)}", _NOT
    if name == "in":
        return f"{_within(arguments[0], _COMPARED + 1)} IN ({_listed(arguments[1:])})", _COMPARED
    if name == "cast":
        return f"CAST({sql(arguments[0])} AS {spark_name(given.type)})", _HIGHEST
    if name == "field" and is_.is_struct(arguments[0].type):
        field = arguments[0].type.field(dict(given.options)["ordinal"])
        return f"{_within(arguments[0], _HIGHEST)}.{_quoted(field.name)}", _HIGHEST
    options = [f"{option} => {_constant(value)}" for option, value in given.options if option not in _QUIET]
    return f"{name}({', '.join([*map(sql, arguments), *options])})", _HIGHEST


def _within(given: Expression, rank: int) -> str:
    text, own = _text(given)
    return text if own >= rank else f"({text})"


def _listed(given: Sequence[Expression]) -> str:
    return ", ".join(map(sql, given))


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else "`" + name.replace("`", "``") + "`"


def _literal(given: Literal) -> str:
    value, kind = given.value, given.type
    if value is not None and is_.is_duration(kind):
        unit = next(unit for unit, size in _UNITS.items() if value % size == 0)
        count = value // _UNITS[unit]
        return f"INTERVAL {count} {unit}{'' if count == 1 else 'S'}"
    try:
        if value is not None and is_.is_date32(kind):
            return f"DATE '{(_EPOCH + datetime.timedelta(days=value)).date()}'"
        if value is not None and is_.is_timestamp(kind):
            zone = "" if kind.tz is None else "Z"
            return f"TIMESTAMP '{_EPOCH + datetime.timedelta(microseconds=value)}{zone}'"
    except OverflowError:  # years that Python does not know
        return str(given)
    return str(given) if kind == CALENDAR else _constant(value)


def _constant(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, bytes):
        return f"X'{value.hex().upper()}'"
    if isinstance(value, Decimal):
        return format(value, "f")
    if value is None or isinstance(value, bool):
        return "NULL" if value is None else str(value).lower()
    return repr(value)
