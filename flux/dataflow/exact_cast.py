"""Casts of columns that change no value, also inside lists, structs and maps.

Law: each value of the result equals the value that it was made of, or ``cast_exactly`` raises. Arrow's own safe casts check
integers and decimals, but round a double to a float, cut the time off a date, and take any number but zero for true. So
the result is cast back and compared.

Text is parsed: 0.1 becomes the nearest double, as everywhere. A number has no unit of time, so numbers and times are not cast
to each other. Fields of a struct are found by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as is_

from flux.dataflow.plain import plain_column, with_child

#: Matches columns by name: given the existing and the wanted names, returns a dict from wanted to existing names.
FindNames = Callable[[Sequence[str], Sequence[str]], dict[str, str]]


def exact_names(there: Sequence[str], wanted: Sequence[str]) -> dict[str, str]:
    return {name: name for name in wanted if name in there}


def cast_exactly(column: pa.Array, type_: pa.DataType, find: FindNames = exact_names) -> pa.Array:
    """Return the column as ``type_``. Raises ValueError, with the first value that would change, or with Arrow's reason."""
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
