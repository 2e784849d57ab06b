"""Names in a plan: of columns, which steps and Spark find by them, and of stages and sources in errors about expressions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import pyarrow as pa

from flux.errors import SchemaError, UsageError


def check_names(schema: pa.Schema, what: str) -> None:
    """Raise SchemaError unless there is a column, and each has a name of its own: steps find columns by their names."""
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise SchemaError(
            f"{what}: several columns are called {twice[0]!r}; give each a name of its own, as with alias()"
        )
    if not len(schema):
        raise SchemaError(f"{what}: no column is left; keep one at least")


def check_cases(schema: pa.Schema, what: str) -> None:
    """Raise SchemaError if names of columns differ only in case, because Spark finds neither of them."""
    known: dict[str, str] = {}
    for name in schema.names:
        other = known.setdefault(name.lower(), name)
        if other != name:
            raise SchemaError(
                f"{what}: columns {other!r} and {name!r} differ only in case, and Spark does not tell them apart; rename one of "
                "them, or set spark.sql.caseSensitive to true"
            )


def free_names(wanted: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return a name for each wanted one, with a number behind it where it is taken, by another one or from the start. Names that
    differ in case alone count as the same."""
    known, found = {name.lower() for name in taken}, []
    for each in wanted:
        name, number = each, 2
        while name.lower() in known:
            name, number = f"{each} {number}", number + 1
        known.add(name.lower())
        found.append(name)
    return found


@contextmanager
def place_of_errors(where: str) -> Iterator[None]:
    """Say in a UsageError which source or stage it is about."""
    try:
        yield
    except UsageError as error:
        named = copy(error)
        named.args = (f"{where}: {error.summary}",)
        raise named from error.__cause__
