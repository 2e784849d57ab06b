"""Batches as they come from users and sources: checked against their schema, cut to size."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from flux.errors import SchemaError


def conform(batch: object, schema: pa.Schema | None, what: str) -> pa.RecordBatch:
    """The batch with exactly the schema's fields; SchemaError names what was declared and what came."""
    if not isinstance(batch, pa.RecordBatch):
        raise SchemaError(f"{what}: expected a pyarrow.RecordBatch, got {type(batch).__name__}")
    if schema is None:
        raise SchemaError(
            f"{what}: rows came, but it declares no schema; give schema=... to the decorator, or yield nothing"
        )
    if batch.schema.equals(schema):
        return batch
    if batch.schema.names == schema.names and batch.schema.types == schema.types:
        return pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    raise SchemaError(f"{what}: declared ({_ddl(schema)}), got ({_ddl(batch.schema)})")


def _ddl(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def split(batch: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Views of at most so many rows, and about so many bytes, in order; the same for the same batch."""
    if batch.num_rows == 0:
        return
    step = min(rows_max, max(1, batch.num_rows * bytes_max // max(batch.nbytes, 1)))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)
