"""Batches as they come from users and sources: checked against their schema, cut to size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.dataflow.plain import plain_batch, typed_nulls
from flux.errors import SchemaError

#: What a small batch costs beside its rows, wherever batches are kept up to a bound in bytes.
BATCH_BYTES = 256

#: Buffers that several columns share are counted once by Arrow where it is quick.
TINY = 64

#: Bytes of each value of the types that most columns have, by the number of the type.
_WIDTHS = {
    kind.id: kind.bit_width / 8
    for kind in (
        pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
        pa.float32(), pa.float64(), pa.date32(), pa.date64(), pa.timestamp("us"),
    )
}  # fmt: skip
#: Where the values of strings and binaries end.
_OFFSETS = {
    kind.id: np.dtype(np.int32 if kind in (pa.string(), pa.binary()) else np.int64)
    for kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
}

#: What can be looped over, and is meant as a whole.
_ONE = (pa.RecordBatch, pa.Table, pa.Array, pa.ChunkedArray, str, bytes, dict)


def given_batches(output: Any) -> Iterator[Any]:
    """What an operator's method gave, one by one and still to be checked: yielded, or returned, also as a single batch or
    table."""
    if output is None:
        return
    if isinstance(output, _ONE) or not isinstance(output, Iterable) or _of(output, "pandas."):
        output = (output,)
    for given in output:
        if isinstance(given, pa.Table):
            yield from given.to_batches()
        else:
            yield given


def conform(batch: object, schema: pa.Schema | None, what: str) -> pa.RecordBatch:
    """The batch with exactly the schema's fields, dictionaries and views decoded, and nulls without a type given one; SchemaError
    names what was declared and what came."""
    if not isinstance(batch, pa.RecordBatch):
        raise SchemaError(f"{what}: expected a pyarrow.RecordBatch, got {_kind(batch)}{_remedy(batch)}")
    if schema is None:
        raise SchemaError(
            f"{what}: rows came, but it declares no schema; give schema=... to the decorator, or yield nothing"
        )
    if batch.schema.equals(schema):
        return batch
    typed = typed_nulls(batch, schema)
    plain = plain_batch(typed, schema)
    if plain.schema.equals(schema):
        return plain
    raise SchemaError(f"{what}: declared ({_ddl(schema)}), got ({_ddl(batch.schema)})")


def _kind(given: Any) -> str:
    return f"{'pandas.' if _of(given, 'pandas.') else ''}{type(given).__name__}"


def _remedy(given: Any) -> str:
    if _of(given, "pandas."):
        return "; pa.RecordBatch.from_pandas(df, preserve_index=False) makes one"
    if isinstance(given, dict):
        return "; pa.RecordBatch.from_pydict(columns) makes one of a dict of columns"
    return ""


def _of(given: Any, package: str) -> bool:
    return type(given).__module__.startswith(package)


def _ddl(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def split(batch: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Views of at most so many rows, and about so many bytes, in order; the same for the same rows."""
    rows = batch.num_rows
    if rows == 0:
        return
    if rows <= rows_max and (is_tiny(batch, bytes_max) or batch.nbytes <= bytes_max):
        yield batch
        return
    step = min(rows_max, max(1, rows * bytes_max // max(logical_bytes(batch), 1)))
    for start in range(0, rows, step):
        yield batch.slice(start, step)


def is_tiny(batch: pa.RecordBatch, bytes_max: int) -> bool:
    """Whether it has fewer bytes beyond doubt, however often a buffer counts: ``nbytes`` takes fifty times as long."""
    return bool(batch.get_total_buffer_size() * max(TINY, batch.num_columns) <= bytes_max)


def logical_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of the values, the same for the same rows. ``nbytes`` is not: it counts what lies in buffers, and
    these differ between replicas. It is hardly ever less."""
    return int(sum([_bytes(column) for column in batch.columns]))


def _bytes(values: Any) -> float:
    kind, count = values.type, len(values)
    width = _WIDTHS.get(kind.id)
    if width is not None:
        return float(count * width)
    if not count:  # and there need be no offsets
        return 0.0
    if kind.id in _OFFSETS and not values.null_count:  # what lies under a null may be anything
        offsets, whole = values.buffers()[1], _OFFSETS[kind.id]
        ends = np.frombuffer(offsets, whole, count + 1, values.offset * whole.itemsize)
        return 4.0 * count + int(ends[-1]) - int(ends[0])
    if pa.types.is_struct(kind):
        return sum([_bytes(child) for child in values.flatten()])
    if pa.types.is_map(kind):
        values = values.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
        return 4 * count + _bytes(values.flatten())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return 4 * count + _bytes(values.flatten())
    if kind.id in _OFFSETS:
        return 4 * count + (pc.sum(pc.binary_length(values)).as_py() or 0)
    if pa.types.is_null(kind):
        return 0
    try:
        return float(count * kind.bit_width / 8)
    except ValueError:  # what Spark has no type for
        return float(values.nbytes)
