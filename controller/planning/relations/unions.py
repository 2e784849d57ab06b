"""Unions in a plan: inputs with the same columns by position, brought to the same names and types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from controller.planning.names import check_names, place_of_errors
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowSteps, Select
from flux.expressions.tree import Column

#: A function from the schema of rows, and operators behind them, to steps.
ToSteps = Callable[[pa.Schema, Callable[[Any], Any]], RowSteps]


def united(schemas: Sequence[pa.Schema], name: str, to_steps: ToSteps | None) -> list[RowSteps | None]:
    """Return the steps that bring rows of each schema to the columns of their union; None: they are as they should be. The names
    are those of the first, and the types those of Spark. SchemaError, UsageError: Spark has no such union."""
    first = schemas[0]
    for number, schema in enumerate(schemas):
        check_names(schema, f"{name}, input {number}")
        if len(schema) != len(first):
            raise SchemaError(
                f"{name}: expected the same columns by position, got {len(first)} ({', '.join(first.names)}) and "
                f"{len(schema)} ({', '.join(schema.names)}): choose them with select()"
            )
    if all(schema.types == first.types for schema in schemas):
        return [_renamed(schema, _nullable(schemas)) for schema in schemas]
    if to_steps is None:
        raise UsageError(f"{name}: the types of its columns are resolved by Spark, and there is no session")
    with place_of_errors(name):
        types = _types(schemas, to_steps)
        cast = [to_steps(schema, functools.partial(_cast, names=first.names, types=types)) for schema in schemas]
    union = _nullable([steps.output for steps in cast])
    return [RowSteps.of(steps.schema, steps.chain, union) for steps in cast]


def _nullable(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the first of several schemas with the same types. A column may be null if it may be in any of them."""
    nullable = [any(schema.field(at).nullable for schema in schemas) for at in range(len(schemas[0]))]
    return pa.schema([field.with_nullable(may) for field, may in zip(schemas[0], nullable, strict=True)])


def _renamed(schema: pa.Schema, union: pa.Schema) -> RowSteps | None:
    if schema.equals(union):
        return None
    columns = [(wanted, Column(own.name, own.type)) for wanted, own in zip(union.names, schema, strict=True)]
    return RowSteps.of(schema, (Select(tuple(columns)),), union)


def _types(schemas: Sequence[pa.Schema], to_steps: ToSteps) -> list[str]:
    """Let Spark find the types of a union."""
    dataframes: list[Any] = []
    types: list[str] = []

    def noted(df: Any) -> Any:
        dataframes.append(df)
        if len(dataframes) == len(schemas):  # here, because errors of Spark are caught here
            union = functools.reduce(lambda one, other: one.union(other), dataframes)
            types.extend(field.dataType.simpleString() for field in union.schema)
        return df

    for schema in schemas:
        to_steps(schema, noted)
    return types


def _cast(df: Any, names: Sequence[str], types: Sequence[str]) -> Any:
    casts = zip(df.columns, types, names, strict=True)
    return df.selectExpr(*(f"CAST({_quoted(own)} AS {type_}) AS {_quoted(name)}" for own, type_, name in casts))


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
