"""The Avro field of each column, by the user's schema or by a schema that is derived from the columns.

Law: everything that follows from types is settled before the first row. A column that can never fit its field is refused
here, by its name. A column of which some values may not fit (a null, a long for an int, a decimal) is checked value by
value as it is written (``avro_writing``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from flux.errors import SchemaError
from flux.kafka import kernels
from flux.kafka.avro import arrow_type

_KINDS = {
    "null": kernels.AVRO_NULL, "boolean": kernels.AVRO_BOOLEAN, "int": kernels.AVRO_INT, "long": kernels.AVRO_LONG,
    "float": kernels.AVRO_FLOAT, "double": kernels.AVRO_DOUBLE, "bytes": kernels.AVRO_BYTES, "string": kernels.AVRO_BYTES,
    "fixed": kernels.AVRO_MADE, "enum": kernels.AVRO_INT, "record": kernels.AVRO_MADE, "error": kernels.AVRO_MADE,
    "array": kernels.AVRO_LIST, "map": kernels.AVRO_LIST,
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Name of the record in a schema that is derived from columns. Records inside it have namespaces of their own, by their
#: place.
RECORD = "Value"


@dataclass(frozen=True)
class Field:
    """Field of an Avro schema, and the column that is written as it."""

    #: Name as a column or a part of one; "" for a whole value.
    name: str
    #: Name of the Avro type.
    avro: str
    #: Kind of the field for the kernel (``kernels.AVRO_...``).
    kind: int
    #: Arrow type that the column gets.
    to: pa.DataType
    #: Branch of null in a union, -1 without one.
    null: int = -1
    #: Branch of the values, -1 without a union.
    branch: int = -1
    #: Size of a fixed type, in bytes.
    size: int = 0
    #: Symbols of an enum.
    symbols: tuple[str, ...] = ()
    #: Fields of a record; the item of a list; key and item of a map.
    parts: tuple[Field, ...] = ()
    #: The default is null, so that the field may be left out.
    optional: bool = False
    #: No column has the field: null is written.
    missing: bool = False


def fields_of(schema: Any) -> tuple[Field, ...]:
    """Return the fields of a record that ``avro.parsed_schema`` has parsed. ``avro.Avro`` has checked that columns can hold
    them."""
    return _parts(schema, {}, "")


def _parts(schema: Any, named: dict[str, Any], where: str) -> tuple[Field, ...]:
    return tuple(
        replace(
            _field(each["name"], each["type"], named, f"{where}{each['name']}"),
            optional=each.get("default", ...) is None,
        )
        for each in schema["fields"]
    )


def _field(name: str, type_: Any, named: dict[str, Any], where: str) -> Field:
    null = branch = -1
    if isinstance(type_, dict) and isinstance(type_["type"], dict | list):
        return _field(name, type_["type"], named, where)
    if isinstance(type_, list):
        null = type_.index("null") if "null" in type_ else -1
        values = [each for each in type_ if each != "null"]
        # The wider one of two kinds of numbers in a union holds the values of both.
        widest = next((each for each in values if each in ("long", "double")), values[0] if values else "null")
        branch, type_ = type_.index(widest), widest
    if isinstance(type_, dict) and isinstance(type_["type"], dict):
        type_ = type_["type"]
    if isinstance(type_, str):
        type_ = named.get(type_, type_)
    schema = type_ if isinstance(type_, dict) else {"type": type_}
    avro = schema["type"]
    if "name" in schema:
        named[schema["name"]] = schema
    given = {"name": name, "avro": avro, "kind": _KINDS[avro], "null": null, "branch": branch}
    if avro in ("record", "error"):
        parts = _parts(schema, named, f"{where}.")
        return Field(**given, to=pa.struct([(each.name, each.to) for each in parts]), parts=parts)
    if avro == "array":
        item = _field("item", schema["items"], named, f"{where}.item")
        return Field(**given, to=pa.list_(item.to), parts=(item,))
    if avro == "map":
        item = _field("value", schema["values"], named, f"{where}.value")
        return Field(**given, to=pa.map_(pa.string(), item.to), parts=(_field("key", "string", named, where), item))
    to = arrow_type(type_, where, {}, 1)
    size = schema["size"] if avro == "fixed" else 0
    if pa.types.is_decimal(to):
        if size and 10**to.precision > 1 << (8 * size - 1):
            raise SchemaError(
                f"to_kafka: field {where!r} of the Avro schema is a decimal of {to.precision} digits, which {size} "
                "bytes do not hold"
            )
        given["kind"] = kernels.AVRO_FIXED_DECIMAL if size else kernels.AVRO_DECIMAL
    return Field(**given, to=to, size=size, symbols=tuple(schema.get("symbols", ())))


def fitted(schema: Any, columns: pa.Schema) -> tuple[Field, ...]:
    """Return the fields of a schema as ``fields_of`` does, and mark those without a column. SchemaError: a column can never
    fit its field."""
    return _fitted(fields_of(schema), list(columns), "")


def _fitted(fields: Iterable[Field], columns: list[pa.Field], where: str) -> tuple[Field, ...]:
    types = {column.name: column.type for column in columns}
    made = []
    for each in fields:
        if each.name in types:
            made.append(_checked(types.pop(each.name), each, where + each.name))
        elif each.optional:
            made.append(replace(each, avro="null", kind=kernels.AVRO_NULL, to=pa.null(), parts=(), missing=True))
        else:
            raise SchemaError(
                f"to_kafka: field {where + each.name!r} of the Avro schema has no column; there are "
                f"{', '.join(column.name for column in columns)}. Only a field whose default is null may be left out"
            )
    for name in types:
        raise SchemaError(
            f"to_kafka: the Avro schema has no field for column {where + name!r}; it has "
            f"{', '.join(each.name for each in made)}. Name the columns that are to be written with value=, or add the field"
        )
    return tuple(made)


def _checked(type_: pa.DataType, field: Field, where: str) -> Field:
    """Return the field for a column of this type. SchemaError: no value of the column could be written, or some would change
    silently."""
    is_ = pa.types
    if is_.is_dictionary(type_):
        type_ = type_.value_type
    if is_.is_null(type_):
        return field
    if field.avro in ("record", "error") and is_.is_struct(type_):
        return replace(field, parts=_fitted(field.parts, list(type_), f"{where}."))
    if field.avro == "array" and (is_.is_list(type_) or is_.is_large_list(type_) or is_.is_fixed_size_list(type_)):
        return replace(field, parts=(_checked(type_.value_type, field.parts[0], f"{where}.item"),))
    if field.avro == "map" and is_.is_map(type_) and is_.is_string(type_.key_type):
        return replace(field, parts=(field.parts[0], _checked(type_.item_type, field.parts[1], f"{where}.value")))
    if field.parts or not _fits(type_, field):
        raise SchemaError(
            f"to_kafka: column {where!r} has type {type_}, and its field of the Avro schema is {_said(field)}: convert the "
            "column in a stage, or change the schema"
        )
    return field


def _said(field: Field) -> str:
    return f"{field.avro} ({field.to})" if field.avro in ("int", "long", "bytes", "fixed") else field.avro


def _fits(type_: pa.DataType, field: Field) -> bool:
    to, is_ = field.to, pa.types
    if is_.is_timestamp(to):
        return bool(is_.is_timestamp(type_) and (type_.tz is None) == (to.tz is None))
    if is_.is_date(to):
        return bool(is_.is_date32(type_))
    if is_.is_decimal(to):
        return bool(is_.is_decimal(type_) and type_.scale <= to.scale)
    if is_.is_integer(to):
        return bool(is_.is_integer(type_))
    if is_.is_floating(to):
        return bool(is_.is_floating(type_) and type_.bit_width <= to.bit_width)
    if is_.is_string(to):
        return bool(is_.is_string(type_) or is_.is_large_string(type_))
    if is_.is_binary(to):
        return bool(is_.is_binary(type_) or is_.is_large_binary(type_) or is_.is_fixed_size_binary(type_))
    return bool(is_.is_boolean(to) and is_.is_boolean(type_))


# ---- a schema of columns


def derived(columns: pa.Schema) -> dict[str, Any]:
    """Return a schema for columns: a record with a field for each. Fields of columns that may be null are unions with null.
    SchemaError: Avro has no type for a column, or its name is none in Avro."""
    return _record(RECORD, None, list(columns), "")


def _record(name: str, namespace: str | None, columns: list[pa.Field], where: str) -> dict[str, Any]:
    inside = name if namespace is None else f"{namespace}.{name}"
    fields = []
    for column in columns:
        if _NAME.fullmatch(column.name) is None:
            raise SchemaError(
                f"to_kafka: {where + column.name!r} is no name in Avro, where names have letters of ASCII, digits and _ and do "
                "not begin with a digit: rename the column"
            )
        fields.append({"name": column.name, **_nullable(column, inside, f"{where}{column.name}")})
    made = {"type": "record", "name": name, "fields": fields}
    return made if namespace is None else made | {"namespace": namespace}


def _nullable(column: pa.Field, inside: str, where: str) -> dict[str, Any]:
    made = _type(column.type, column.name, inside, where)
    return {"type": ["null", made], "default": None} if column.nullable and made != "null" else {"type": made}


def _type(type_: pa.DataType, name: str, inside: str, where: str) -> Any:
    is_ = pa.types
    if is_.is_dictionary(type_):
        return _type(type_.value_type, name, inside, where)
    if is_.is_struct(type_):
        return _record(name, inside, list(type_), f"{where}.")
    if is_.is_list(type_) or is_.is_large_list(type_) or is_.is_fixed_size_list(type_):
        item = pa.field("item", type_.value_type, type_.value_field.nullable)
        return {"type": "array", "items": _nullable(item, f"{inside}.{name}", f"{where}.item")["type"]}
    if is_.is_map(type_):
        if not is_.is_string(type_.key_type):
            raise SchemaError(f"to_kafka: {where!r} is a map from {type_.key_type}; those of Avro have keys of text")
        item = pa.field("value", type_.item_type, type_.item_field.nullable)
        return {"type": "map", "values": _nullable(item, f"{inside}.{name}", f"{where}.value")["type"]}
    if is_.is_timestamp(type_):
        digits = "millis" if type_.unit in ("s", "ms") else "micros"
        return {"type": "long", "logicalType": f"{'' if type_.tz else 'local-'}timestamp-{digits}"}
    if is_.is_decimal(type_) and type_.precision <= 38 and 0 <= type_.scale <= type_.precision:
        return {"type": "bytes", "logicalType": "decimal", "precision": type_.precision, "scale": type_.scale}
    if is_.is_date32(type_):
        return {"type": "int", "logicalType": "date"}
    for said, known in _TYPES:
        if said(type_):
            return known
    raise SchemaError(f"to_kafka: Avro has no type for {where!r}, of type {type_}: convert the column in a stage")


_TYPES: tuple[tuple[Any, str], ...] = (
    (pa.types.is_null, "null"), (pa.types.is_boolean, "boolean"),
    (lambda type_: type_ in (pa.int64(), pa.uint32(), pa.uint64()), "long"), (pa.types.is_integer, "int"),
    (pa.types.is_float64, "double"), (pa.types.is_floating, "float"), (pa.types.is_string, "string"),
    (pa.types.is_large_string, "string"), (pa.types.is_binary, "bytes"),
    (pa.types.is_large_binary, "bytes"), (pa.types.is_fixed_size_binary, "bytes"),
)  # fmt: skip
