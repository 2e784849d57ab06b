"""What users give: functions with their arguments, schemas with their columns."""

from __future__ import annotations

import inspect
from typing import Any

from flux.dataflow.ddl import parse_ddl
from flux.errors import SchemaError


def named(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def signature(function: Any) -> inspect.Signature | None:
    """None: it does not say, as some that are written in C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def takes(signature: inspect.Signature, arguments: int) -> bool:
    """Whether a function can be called with so many."""
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def check_columns(what: str, declared: Any) -> None:
    """No name twice, where that can be told without a session."""
    if isinstance(declared, str):
        try:
            declared = parse_ddl(declared)
        except SchemaError:
            return  # Spark may read it, and is asked when there is one
    given: Any = getattr(declared, "names", ())
    names = given if isinstance(given, list) else []
    for name in names:
        if names.count(name) > 1:
            raise SchemaError(f"{what}: its schema has column {name!r} twice; give each column a name of its own")
