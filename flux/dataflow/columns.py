"""Columns found by name, as Spark finds them: by the exact name first, else by the only name that differs in case alone."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from flux.errors import SchemaError
from partitioning.hashing import check_key_type


def positions(schema: pa.Schema, column: str, case_sensitive: bool = False) -> list[int]:
    """Return the positions of the columns of that name. Callers expect one position, and word the error for none or several."""
    exact: list[int] = schema.get_all_field_indices(column)
    if exact or case_sensitive:
        return exact
    folded = column.casefold()
    return [at for at, name in enumerate(schema.names) if name.casefold() == folded]


def position(schema: pa.Schema, column: str) -> int:
    """Return the position of a column that is known to be there once."""
    (at,) = positions(schema, column)
    return at


def picked(batch: pa.RecordBatch, columns: Sequence[int] | None) -> pa.RecordBatch:
    """Return a view of the batch with these of its columns alone; None: with all."""
    return batch if columns is None else batch.select(columns)


def check_key(key: Sequence[str], schema: pa.Schema, case_sensitive: bool = False) -> None:
    """Raise SchemaError or KeyTypeError unless each key column is there once and can be hashed."""
    for column in key:
        found = positions(schema, column, case_sensitive)
        if len(found) != 1:
            problem = "is the name of several columns" if found else "is not a column"
            raise SchemaError(f"key {column!r} {problem} of its input; there are {', '.join(schema.names)}")
        check_key_type(column, schema.field(found[0]).type)
