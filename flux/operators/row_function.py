"""A function of the user's among the conditions and columns of a flow: one row for each row (design: row-function)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flux.errors import UsageError, UserCodeError
from flux.operators.batches import conform
from flux.operators.schema import check_columns
from flux.operators.user_code import gives_nothing, named, signature, takes

#: A function as PySpark's ``mapInArrow`` takes it.
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class RowFunction:
    """A function that is called with the batches of a step, one at a time.

    Law: as many rows leave as come. Rows are numbered as they are read, and a function that gives other rows has no numbers for
    them. The order of rows cannot be checked."""

    function: ArrowFunction
    #: The columns that it gives.
    schema: pa.Schema

    @property
    def name(self) -> str:
        return named(self.function)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a row for each row of a batch, with the declared columns. UserCodeError: there are more or fewer."""
        what = f"mapInArrow({self.name})"
        try:
            given = self.function(iter([batch]))
            if isinstance(given, pa.RecordBatch | pa.Table) or not isinstance(given, Iterable):
                raise UserCodeError(
                    f"{what}: expected an iterator of batches, got {type(given).__name__}: yield each batch, as in for batch in "
                    "batches: yield ..."
                )
            found = [conform(each, self.schema, what) for each in given]
        except SystemExit:
            raise UserCodeError(f"{what}: it calls sys.exit()") from None
        rows = sum(each.num_rows for each in found)
        if rows != batch.num_rows:
            raise UserCodeError(
                f"{what}: expected a row for each of {batch.num_rows} rows, got {rows}. Leave rows out with where(), and make "
                "several of one in a stage: @flux.stage over def step(batch)"
            )
        if len(found) == 1:
            return found[0]
        return (
            pa.Table.from_batches(found, self.schema).combine_chunks().to_batches()[0] if rows else _none(self.schema)
        )


def _none(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def check_row_function(function: Any, schema: Any) -> None:
    """Raise UsageError or SchemaError unless ``mapInArrow`` can take these, as far as that can be told without a session."""
    if not callable(function):
        raise UsageError(f"mapInArrow: expected a function of an iterator of batches, got {type(function).__name__}")
    said = signature(function)
    if said is not None and not takes(said, 1):
        raise UsageError(
            f"mapInArrow: the function must take one argument, the iterator of batches; got {named(function)}{said}"
        )
    if gives_nothing(function):
        raise UsageError(f"mapInArrow: {named(function)} returns nothing: yield a batch for each batch that comes")
    if schema is None:
        raise UsageError(
            "mapInArrow: the schema of the rows that the function gives is missing: schema='user BIGINT, ts TIMESTAMP'"
        )
    check_columns("mapInArrow", schema)
