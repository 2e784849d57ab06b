"""Columns as they travel: plain Arrow types, without dictionaries and views.

Rows come in batches, and a batch travels without its schema: data that an encoding keeps beside the rows (a dictionary, the
buffers behind a view) would have to travel along. So columns are decoded where they enter, at a source or in the output of
a stage, also inside lists, structs and maps, and every reader sees the plain type. A column that cannot be decoded is
refused when the plan is made.

    dictionary<T>                    T
    string_view, binary_view         string, binary
    list_view<T>, large_list_view<T> list<T>, large_list<T>
    run-end-encoded                  refused

``cast_exactly`` makes a column of a declared type of one that nearly has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as is_

from flux.errors import SchemaError


def plain_type(type_: pa.DataType) -> pa.DataType:
    """Return the type that columns of ``type_`` have after decoding."""
    if is_.is_dictionary(type_):
        return plain_type(type_.value_type)
    if is_.is_string_view(type_):
        return pa.string()
    if is_.is_binary_view(type_):
        return pa.binary()
    if is_.is_list(type_) or is_.is_list_view(type_):
        return pa.list_(_plain_field(type_.value_field))
    if is_.is_large_list(type_) or is_.is_large_list_view(type_):
        return pa.large_list(_plain_field(type_.value_field))
    if is_.is_fixed_size_list(type_):
        return pa.list_(_plain_field(type_.value_field), type_.list_size)
    if is_.is_struct(type_):
        return pa.struct([_plain_field(field) for field in type_])
    if is_.is_map(type_):
        return pa.map_(_plain_field(type_.key_field), _plain_field(type_.item_field), type_.keys_sorted)
    return type_


def plain_schema(schema: pa.Schema, what: str) -> pa.Schema:
    """Return the schema after decoding. SchemaError names the first column that cannot be decoded. ``what`` has these columns."""
    for field in schema:
        reason = _unfit(plain_type(field.type))
        if reason:
            raise SchemaError(f"{what}: column {field.name!r} of type {field.type} cannot be taken: {reason}")
    return pa.schema([_plain_field(field) for field in schema], schema.metadata)


def typed_nulls(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with nulls of the schema's types in place of columns of type null, which pyarrow makes of values that all
    are null. A batch without such columns is returned as it came."""
    given = batch.schema
    if given.names != schema.names:
        return batch
    untyped = [is_.is_null(own.type) and field.nullable for own, field in zip(given, schema, strict=True)]
    if not any(untyped):
        return batch
    fields = [field if new else own for own, field, new in zip(given, schema, untyped, strict=True)]
    columns = [
        pa.nulls(batch.num_rows, field.type) if new else column
        for column, field, new in zip(batch.columns, schema, untyped, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, given.metadata))


def plain_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with its columns decoded, where that gives the columns of ``schema``; else as it came."""
    given = batch.schema
    if given.equals(schema) or given.names != schema.names:
        return batch
    if given.types != schema.types and [plain_type(type_) for type_ in given.types] != schema.types:
        return batch
    columns = [_plain(column, type_) for column, type_ in zip(batch.columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_field(field: pa.Field) -> pa.Field:
    plain = plain_type(field.type)
    return field if plain == field.type else field.with_type(plain)


def _unfit(type_: pa.DataType) -> str | None:
    """Return the reason why columns of a type, which is as plain as it can be, cannot travel; None: they can."""
    if is_.is_run_end_encoded(type_):
        return "run-end-encoded columns do not travel; decode it with pyarrow.compute.run_end_decode"
    if isinstance(type_, pa.BaseExtensionType):
        inner = [type_.storage_type]
    else:
        inner = [type_.field(i).type for i in range(type_.num_fields)]
    for part in inner:
        if plain_type(part) != part:
            return f"there is {part} inside of it, which cannot be decoded there; cast it to {plain_type(part)}"
        reason = _unfit(part)
        if reason:
            return reason
    return None


def plain_column(column: pa.Array) -> pa.Array:
    """Return the column, decoded."""
    return _plain(column, plain_type(column.type))


def _plain(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Return the same rows as ``type_``, which is the plain type of the array's."""
    kind = array.type
    if kind == type_:
        return array
    if is_.is_dictionary(kind):
        return _plain(array.dictionary, type_).take(array.indices)
    if is_.is_list_view(kind) or is_.is_large_list_view(kind):
        return _plain_list_view(array, type_)
    if is_.is_struct(kind):
        children = [_plain(array.field(i), type_.field(i).type) for i in range(kind.num_fields)]
        # Entries of a map may have no mask, not even one without nulls: pyarrow before 26 ends the process.
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=mask)
    if is_.is_map(kind):
        entries = pa.struct([type_.key_field, type_.item_field])
        return with_child(array, type_, _plain(array.values, entries))
    if is_.is_nested(kind):
        return with_child(array, type_, _plain(array.values, type_.value_type))
    return array.cast(type_)


def with_child(array: pa.Array, type_: pa.DataType, child: pa.Array) -> pa.Array:
    own = 1 if is_.is_fixed_size_list(type_) else 2
    buffers = array.buffers()[:own]
    return pa.Array.from_buffers(type_, len(array), buffers, array.null_count, array.offset, [child])


def _plain_list_view(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Make a list of a list view. Arrow's own cast reads offsets that views do not have."""
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(), out=offsets[1:])
    values = _plain(array.flatten(), type_.value_type)
    made = pa.LargeListArray if is_.is_large_list(type_) else pa.ListArray
    width = pa.int64() if is_.is_large_list(type_) else pa.int32()
    return made.from_arrays(pa.array(offsets).cast(width), values, type=type_, mask=array.is_null())


#: Matches columns by name: given the existing and the wanted names, returns a dict from wanted to existing names.
FindNames = Callable[[Sequence[str], Sequence[str]], dict[str, str]]


def exact_names(there: Sequence[str], wanted: Sequence[str]) -> dict[str, str]:
    return {name: name for name in wanted if name in there}


def cast_exactly(column: pa.Array, type_: pa.DataType, find: FindNames = exact_names) -> pa.Array:
    """Return the column as ``type_``, also inside lists, structs and maps. ``find`` finds the fields of a struct.

    Law: each value of the result equals the value that it was made of. Else ValueError, with the first value that would change,
    or with Arrow's reason. Arrow's own safe casts check integers and decimals, but round a double to a float, cut the time off a
    date, and take any number but zero for true. So the result is cast back and compared.

    Text is parsed: 0.1 becomes the nearest double, as everywhere. A number has no unit of time, so numbers and times are not cast
    to each other."""
    column = plain_column(column)
    kind = column.type
    if kind == type_:
        return column
    if is_.is_null(kind):
        return pa.nulls(len(column), type_)
    if is_.is_struct(kind) and is_.is_struct(type_):
        return _struct(column, type_, find)
    if is_.is_map(kind) and is_.is_map(type_):
        entries = pa.struct([type_.key_field, type_.item_field])
        names = dict(zip(entries.names, _entry_names(kind), strict=True))
        return with_child(column, type_, _struct(column.values, entries, lambda there, wanted: names))
    if _is_list(kind) and _is_list(type_):
        if is_.is_fixed_size_list(kind) or is_.is_fixed_size_list(type_) or kind.id != type_.id:
            column = _cast(column, _list_of(type_, kind.value_field))
        return with_child(column, type_, cast_exactly(column.values, type_.value_type, find))
    if is_.is_nested(kind) or is_.is_nested(type_):
        raise ValueError(f"there is no cast from {kind} to {type_}")
    return _leaf(column, type_)


def _entry_names(map_type: pa.DataType) -> tuple[str, str]:
    """Return the names of the fields of a map's entries."""
    return map_type.key_field.name, map_type.item_field.name


def _is_list(type_: pa.DataType) -> bool:
    return bool(is_.is_list(type_) or is_.is_large_list(type_) or is_.is_fixed_size_list(type_))


def _list_of(type_: pa.DataType, values: pa.Field) -> pa.DataType:
    """Return a list type of the same kind with other values."""
    if is_.is_fixed_size_list(type_):
        return pa.list_(values, type_.list_size)
    return pa.large_list(values) if is_.is_large_list(type_) else pa.list_(values)


def _struct(column: pa.Array, type_: pa.DataType, find: FindNames) -> pa.Array:
    kind = column.type
    there = [kind.field(i).name for i in range(kind.num_fields)]
    fields = [type_.field(i) for i in range(type_.num_fields)]
    found = find(there, [field.name for field in fields])
    children = []
    for field in fields:
        name = found.get(field.name)
        child = pa.nulls(len(column), field.type) if name is None else column.field(there.index(name))
        try:
            children.append(cast_exactly(child, field.type, find))
        except ValueError as error:
            raise ValueError(f"field {field.name} is {child.type}, not {field.type}: {error}") from error
    # Entries of a map may have no mask, not even one without nulls: pyarrow before 26 ends the process.
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _leaf(column: pa.Array, type_: pa.DataType) -> pa.Array:
    kind = column.type
    if is_.is_temporal(kind) != is_.is_temporal(type_) and (_is_number(kind) or _is_number(type_)):
        raise ValueError(f"there is no cast from {kind} to {type_}: a number says no unit of time")
    made = _cast(column, type_)
    if _is_text(kind) or _is_text(type_) or made.null_count == len(made):
        return made
    try:
        back = pc.cast(made, kind, safe=False)
    except pa.ArrowException as error:
        raise ValueError(f"a cast from {kind} to {type_} may change values: {error}") from error
    same = pc.equal(column, back)
    if is_.is_floating(kind):
        same = pc.or_(same, pc.and_(pc.is_nan(column), pc.is_nan(back)))
    changed = pc.index(same, pa.scalar(False)).as_py()
    if changed >= 0:
        raise ValueError(f"{_shown(column[changed])} would become {_shown(made[changed])}")
    return made


def _cast(column: pa.Array, type_: pa.DataType) -> pa.Array:
    try:
        return pc.cast(column, type_)
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _is_number(type_: pa.DataType) -> bool:
    return bool(is_.is_integer(type_) or is_.is_floating(type_) or is_.is_decimal(type_) or is_.is_boolean(type_))


def _is_text(type_: pa.DataType) -> bool:
    """Return whether a type holds text or bytes: a cast between such types keeps the bytes, or Arrow refuses it."""
    string = is_.is_string(type_) or is_.is_large_string(type_)
    return bool(string or is_.is_binary(type_) or is_.is_large_binary(type_) or is_.is_fixed_size_binary(type_))


def _shown(value: Any) -> str:
    """Return a scalar as people read it, or as Arrow writes it if Python has no such value."""
    try:
        return f"{value.as_py()!s}"
    except (ValueError, OverflowError):
        return str(value)
