"""Batches as they come from users and sources: checked against their schema, cut to size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.errors import SchemaError
from flux.operators.plain_columns import cast_exactly, plain_batch, plain_column, typed_nulls

#: Cost of a small batch beside its rows, wherever the kept batches are limited in bytes.
BATCH_BYTES = 256

#: Bytes of text and of lists that are taken out of a state at once, beside those of one row: few rows may have much, and one
#: column of a batch has less than 2 GiB of text.
TAKEN_BYTES_MAX = 1 << 26

#: A safe factor for ``is_tiny``: the quick size of Arrow counts a buffer once, however many columns share it.
TINY = 64

#: Bytes of each value of the commonest types, by the number of the type.
_WIDTHS = {
    kind.id: kind.bit_width / 8
    for kind in (
        pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
        pa.float32(), pa.float64(), pa.date32(), pa.date64(), pa.timestamp("us"),
    )
}  # fmt: skip
#: Type of the offsets at which the values of strings and binaries end.
_OFFSETS = {
    kind.id: np.dtype(np.int32 if kind in (pa.string(), pa.binary()) else np.int64)
    for kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
}

#: Types that can be looped over, but are one output as a whole.
_ONE = (pa.RecordBatch, pa.Table, pa.Array, pa.ChunkedArray, str, bytes, dict)


def given_batches(output: Any) -> Iterator[Any]:
    """Yield the output of an operator's method one by one, still unchecked. The method may have yielded or returned it, also as a
    single batch or table."""
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
    """Return the batch with exactly the schema's fields: columns are found by name, dictionaries and views decoded, nulls without
    a type given one, and numbers cast where no value changes. Raises SchemaError with the declared and the given schema."""
    if not isinstance(batch, pa.RecordBatch):
        raise SchemaError(f"{what}: expected a pyarrow.RecordBatch, got {_kind(batch)}{_remedy(batch)}")
    if schema is None:
        raise SchemaError(
            f"{what}: rows came, but it declares no schema; give schema=... to the decorator, or yield nothing"
        )
    if batch.schema.equals(schema):
        return batch
    return _matched(batch, schema, f"{what}: declared ({_ddl(schema)}), got ({_ddl(batch.schema)})")


def _matched(batch: pa.RecordBatch, schema: pa.Schema, what: str) -> pa.RecordBatch:
    """Return the batch in the order of the names of the schema. An undeclared column is an error and not left out: the user may
    have forgotten to declare it."""
    names = batch.schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    missing = [name for name in schema.names if name not in names]
    more = [name for name in names if name not in schema.names]
    if twice:
        raise SchemaError(f"{what}: column {twice[0]!r} is there twice; give each column a name of its own")
    if missing:
        raise SchemaError(f"{what}: {_columns(missing)} missing. Rename or add, or declare in schema=... what is given")
    if more:
        raise SchemaError(
            f"{what}: {_columns(more)} not declared. Add what is missing to schema=... (a function without a schema keeps "
            f"that of its input), or leave it out with batch.select({schema.names})"
        )
    ordered = batch if names == schema.names else batch.select(schema.names)
    plain = plain_batch(typed_nulls(ordered, schema), schema)
    if plain.schema.equals(schema):
        return plain
    columns = [_as_declared(column, field, what) for column, field in zip(plain.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _as_declared(column: pa.Array, field: pa.Field, what: str) -> pa.Array:
    """Return the column with the type of the field."""
    plain = plain_column(column)
    if not _casts(plain.type, field.type):
        raise SchemaError(
            f"{what}: column {field.name!r} is {plain.type} and not {field.type}. Cast it, as in "
            f"batch.column({field.name!r}).cast(...), or declare its type in schema=..."
        )
    try:
        return cast_exactly(plain, field.type)
    except ValueError as error:
        raise SchemaError(
            f"{what}: column {field.name!r} is {plain.type} and has a value that {field.type} does not hold: {error}. "
            "Declare the wider type in schema=..., or cast the column as it is meant"
        ) from error


def _casts(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether an implicit cast is allowed, as long as it changes no value: from a number to a number type that is as
    general, and from a type to the same type in another unit or with longer offsets. A cast of a float to an integer, or of text
    that would have to be parsed, may be a mistake."""
    types = pa.types
    if given == wanted:
        return True
    if types.is_struct(given) and types.is_struct(wanted):
        mine, others = ({field.name: field.type for field in kind} for kind in (given, wanted))
        return mine.keys() == others.keys() and all(_casts(mine[name], others[name]) for name in mine)
    if types.is_map(given) and types.is_map(wanted):
        return _casts(given.key_type, wanted.key_type) and _casts(given.item_type, wanted.item_type)
    if _is_list(given) and _is_list(wanted):
        return _casts(given.value_type, wanted.value_type)
    if types.is_timestamp(given) and types.is_timestamp(wanted):
        return (given.tz is None) == (wanted.tz is None)
    if types.is_integer(given):
        return bool(types.is_integer(wanted) or types.is_floating(wanted) or types.is_decimal(wanted))
    if types.is_floating(given):
        return bool(types.is_floating(wanted) and wanted.bit_width > given.bit_width)
    alike = (types.is_decimal, types.is_duration, types.is_time, types.is_date, _is_text, _is_bytes)
    return any(of_kind(given) and of_kind(wanted) for of_kind in alike)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _columns(names: list[str]) -> str:
    """Return "columns a, b are", for a sentence."""
    return f"column {names[0]!r} is" if len(names) == 1 else f"columns {', '.join(map(repr, names))} are"


def _kind(given: Any) -> str:
    return f"{'pandas.' if _of(given, 'pandas.') else ''}{type(given).__name__}"


def _remedy(given: Any) -> str:
    if _of(given, "pandas."):
        return "; pa.RecordBatch.from_pandas(df, preserve_index=False) makes one"
    if isinstance(given, dict) and given and not any(map(_is_column, given.values())):
        return "; pa.RecordBatch.from_pylist(rows) makes one of a list of rows"
    if isinstance(given, dict):
        return "; pa.RecordBatch.from_pydict(columns) makes one of a dict of columns"
    return ""


def _is_column(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray | pa.Array | pa.ChunkedArray) or _of(value, "pandas.")


def _of(given: Any, package: str) -> bool:
    return type(given).__module__.startswith(package)


def _ddl(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def split(batch: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Yield views of at most ``rows_max`` rows and about ``bytes_max`` bytes, in order; the same views for the same rows."""
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
    """Return whether a batch certainly has fewer bytes, however often buffers are shared. ``nbytes`` takes 50 times as long."""
    return bool(batch.get_total_buffer_size() * max(TINY, batch.num_columns) <= bytes_max)


def logical_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of the values, the same for the same rows. ``nbytes`` is not the same: it counts the contents of buffers,
    and these differ between replicas. The result is hardly ever less than ``nbytes``."""
    return int(sum([_bytes(column) for column in batch.columns]))


def _bytes(values: Any) -> float:
    kind, count = values.type, len(values)
    width = _WIDTHS.get(kind.id)
    if width is not None:
        return float(count * width)
    if not count:  # there may be no buffer of offsets at all
        return 0.0
    if kind.id in _OFFSETS and not values.null_count:  # bytes under a null may be anything
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
    except ValueError:  # a type that Spark does not have
        return float(values.nbytes)


def text_lengths(values: Any) -> np.ndarray | int:
    """Return the bytes of text and of lists of each value; 0 for null, under which replicas may have different bytes. An int: all
    have as many."""
    kind = values.type
    if kind.id in _OFFSETS:
        lengths = pc.fill_null(pc.binary_length(values), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
    if pa.types.is_struct(kind):
        return sum([text_lengths(child) for child in values.flatten()])
    if pa.types.is_map(kind):
        elements: list[Any] = [values.keys, values.items]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        elements = [values.values]
    else:
        return 0
    offsets = values.offsets.to_numpy()
    found = np.zeros(len(values), np.int64)
    for each in elements:
        width = _WIDTHS.get(each.type.id, 8)
        ends = np.zeros(len(each) + 1, np.int64)
        np.cumsum(np.broadcast_to(text_lengths(each) + int(np.ceil(width)), len(each)), out=ends[1:])
        found += ends[offsets[1:]] - ends[offsets[:-1]]
    found[np.asarray(values.is_null())] = 0
    return found


def at_once(rows: int, longest: int) -> bool:
    """Return whether rows with at most this number of bytes of text each are certainly taken at once."""
    return rows * longest < TAKEN_BYTES_MAX


def text_cuts(lengths: np.ndarray | int, rows: int) -> Iterator[slice]:
    """Yield parts of rows, each with at most ``TAKEN_BYTES_MAX`` of text beside that of its last row. Equal lengths give equal
    parts."""
    ends = np.cumsum(np.broadcast_to(lengths, rows)) // TAKEN_BYTES_MAX
    first = 0
    for end in [*(np.flatnonzero(np.diff(ends)) + 1).tolist(), rows]:
        yield slice(first, end)
        first = end
