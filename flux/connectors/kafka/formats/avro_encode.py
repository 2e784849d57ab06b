"""Columns to values in Avro, the mirror of ``avro_decode``: all rows of a batch at once, without an object for any of them.

``AvroValues`` is the schema by which a query writes, ``WriterField`` the field of each column, and ``values`` and
``records`` make the bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.connectors.kafka.errors import UnfitValue
from flux.connectors.kafka.formats.avro_decode import MAGIC, Avro, arrow_type, as_json
from flux.connectors.kafka.formats.schema_registry import Subject
from flux.connectors.kafka.records import kernels
from flux.errors import SchemaError, UsageError
from partitioning.columns import raw_bytes

#: URL of a registry, or a function that takes subject and schema as text and returns the id.
Schemas = str | Callable[[str, str], int] | None


@dataclass(frozen=True)
class AvroValues:
    """Schema by which ``to_kafka(..., format="avro")`` writes the values of one topic, and the id in front of each value.

    Law: all writers of a query, and all that repeat their rows, write by the same schema under the same id. Both are
    settled once, in the program that starts the query."""

    #: Topic that is written; the subject in a registry is named after it.
    topic: str
    #: Schema in Avro's JSON as the user gave it. None: it is derived from the columns, or is the newest of the subject.
    schema: Any = None
    #: Origin of ids. None: nothing stands in front of values.
    schemas: Schemas = None
    #: The schema is registered if the registry does not know it.
    register: bool = False
    #: Id of the schema, once it is settled.
    id: int | None = None
    _known: dict[Any, tuple[WriterField, ...]] = dataclass_field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise UsageError for arguments that do not go together."""
        if self.schema is not None:
            Avro(self.schema)
        if not isinstance(self.register, bool):
            raise UsageError(f"register_schemas must be True or False, got {self.register!r}")
        if self.register and not isinstance(self.schemas, str):
            raise UsageError("register_schemas=True needs the URL of a registry: schemas='http://host:8081'")
        self._subject()

    @property
    def follows_registry(self) -> bool:
        """The newest schema of the subject is used, which is not known yet."""
        return self.schema is None and isinstance(self.schemas, str) and not self.register

    def check(self, columns: pa.Schema) -> None:
        """Raise SchemaError if these columns can never be written by the schema."""
        if not self.follows_registry:
            self._fields(columns)

    def settled(self, columns: pa.Schema, limit_s: float) -> AvroValues:
        """Return the values with schema and id settled. A registry is asked for them for at most ``limit_s`` seconds."""
        subject, number = self._subject(), None
        schema = self.schema if isinstance(self.schema, str) else None
        if subject is not None and self.follows_registry:
            number, schema = subject.newest(limit_s)
            try:
                Avro(schema)
            except UsageError as error:
                raise UsageError(f"schema {number} of {subject!r} cannot be used: {error}") from None
        else:
            schema = schema or json.dumps(self._schema(columns))
            if subject is not None:
                number = subject.id_of(schema, self.register, limit_s)
        made = AvroValues(self.topic, schema, id=number)
        made._fields(columns)  # so that workers need not parse the schema
        return made

    def encode(self, columns: Sequence[pa.Array], names: Sequence[str], rows: int, given: pa.Array | None) -> pa.Array:
        """Encode rows as a binary column. Rows that are null in ``given`` are null in it."""
        schema = pa.schema([(name, column.type) for name, column in zip(names, columns, strict=True)])
        fields = self._fields(schema)
        by_name = dict(zip(names, columns, strict=True))
        frame = b"" if self.id is None else bytes([MAGIC]) + self.id.to_bytes(4, "big")
        chosen = [by_name[each.name] for each in fields if not each.missing]
        return values(chosen, fields, rows, given, frame)

    def _fields(self, columns: pa.Schema) -> tuple[WriterField, ...]:
        # The types alone are the key: nullability is settled with the schema, and that of a batch may differ.
        key = tuple((each.name, each.type) for each in columns)
        if key not in self._known:
            self._known[key] = fitted(Avro(self._schema(columns)).reader, columns)
        return self._known[key]

    def _schema(self, columns: pa.Schema) -> Any:
        return derived(columns) if self.schema is None else as_json(self.schema)

    def _subject(self) -> Subject | None:
        return None if self.schemas is None else Subject(f"{self.topic}-value", self.schemas)


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
class WriterField:
    """Field of an Avro schema, and the column that is written as it. The schema is the user's, or is derived from the columns.

    Law: everything that follows from types is settled before the first row. A column that can never fit its field is
    refused here, by its name. A column of which some values may not fit (a null, a long for an int, a decimal) is checked
    value by value as it is written (``records``)."""

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
    parts: tuple[WriterField, ...] = ()
    #: The default is null, so that the field may be left out.
    optional: bool = False
    #: No column has the field: null is written.
    missing: bool = False


def fields_of(schema: Any) -> tuple[WriterField, ...]:
    """Return the fields of a record that ``avro_decode.parsed_schema`` has parsed. ``Avro`` has checked that columns can hold
    them."""
    return _parts(schema, {}, "")


def _parts(schema: Any, named: dict[str, Any], where: str) -> tuple[WriterField, ...]:
    return tuple(
        replace(
            _field(each["name"], each["type"], named, f"{where}{each['name']}"),
            optional=each.get("default", ...) is None,
        )
        for each in schema["fields"]
    )


def _field(name: str, type_: Any, named: dict[str, Any], where: str) -> WriterField:
    """Return a field of a schema. A union has one kind of values, beside null: ``null`` and ``branch`` are their places in it.
    ``named`` has the named types that came before; a new one is added before its parts are looked at."""
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
        return WriterField(**given, to=pa.struct([(each.name, each.to) for each in parts]), parts=parts)
    if avro == "array":
        item = _field("item", schema["items"], named, f"{where}.item")
        return WriterField(**given, to=pa.list_(item.to), parts=(item,))
    if avro == "map":
        item = _field("value", schema["values"], named, f"{where}.value")
        return WriterField(
            **given, to=pa.map_(pa.string(), item.to), parts=(_field("key", "string", named, where), item)
        )
    to = arrow_type(type_, where, {}, 1)
    size = schema["size"] if avro == "fixed" else 0
    if pa.types.is_decimal(to):
        if size and 10**to.precision > 1 << (8 * size - 1):
            raise SchemaError(
                f"to_kafka: field {where!r} of the Avro schema is a decimal of {to.precision} digits, which {size} "
                "bytes do not hold"
            )
        given["kind"] = kernels.AVRO_FIXED_DECIMAL if size else kernels.AVRO_DECIMAL
    return WriterField(**given, to=to, size=size, symbols=tuple(schema.get("symbols", ())))


def fitted(schema: Any, columns: pa.Schema) -> tuple[WriterField, ...]:
    """Return the fields of a schema as ``fields_of`` does, and mark those without a column. SchemaError: a column can never
    fit its field."""
    return _fitted(fields_of(schema), list(columns), "")


def _fitted(fields: Iterable[WriterField], columns: list[pa.Field], where: str) -> tuple[WriterField, ...]:
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


def _checked(type_: pa.DataType, field: WriterField, where: str) -> WriterField:
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


def _said(field: WriterField) -> str:
    return f"{field.avro} ({field.to})" if field.avro in ("int", "long", "bytes", "fixed") else field.avro


def _fits(type_: pa.DataType, field: WriterField) -> bool:
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


#: Most bytes of a value by kind of field: for bytes those of their length, for lists those of their count and end mark. The
#: bytes themselves are added.
_MOST = {
    kernels.AVRO_NULL: 0, kernels.AVRO_BOOLEAN: 1, kernels.AVRO_INT: 5, kernels.AVRO_LONG: 10, kernels.AVRO_FLOAT: 4,
    kernels.AVRO_DOUBLE: 8, kernels.AVRO_BYTES: 5, kernels.AVRO_MADE: 0, kernels.AVRO_LIST: 6, kernels.AVRO_DECIMAL: 17,
    kernels.AVRO_FIXED_DECIMAL: 0,
}  # fmt: skip
_WITH_BYTES = (kernels.AVRO_BYTES, kernels.AVRO_MADE, kernels.AVRO_LIST)
_BYTES_MAX = (1 << 31) - 1
_SHOWN_MAX = 60
_NO_FRAME = np.empty(0, np.uint8)


def records(
    columns: Sequence[pa.Array],
    fields: Sequence[WriterField],
    rows: int,
    given: pa.Array | None = None,
    frame: bytes = b"",
) -> pa.Array:
    """Encode rows as a binary column, one record each. ``columns`` has a column for each field that is not missing, in order.
    A row that is null in ``given`` is null in the result. UnfitValue: a value does not fit its field.

    Law: the bytes of a row follow from the row and the schema alone. A value that does not fit its field ends the batch
    with ``UnfitValue``, which names row and column, before any byte of the batch is written.

    The inside of a column is encoded first, as a column of bytes: items of lists one after the other, a record inside as
    one piece. A compiled loop then puts the fields of each row together."""
    left = iter(columns)
    table, kept, most = np.zeros((len(fields), kernels.OUT_FIELDS), np.int64), [], len(frame) * rows
    for line, field in zip(table, fields, strict=True):
        column = pa.nulls(rows) if field.missing else next(left)
        try:
            made, counts = _made(column, field, given)
        except _Unfit as error:
            raise error.inside(field.name) from None
        kept.append((made, counts))
        most += _fill(line, field, made, counts, rows)
    if most > _BYTES_MAX:
        raise pa.ArrowInvalid(f"{rows:,} rows can take {most:,} bytes in Avro, and one batch may have {_BYTES_MAX:,}")
    ends, out = np.zeros(rows + 1, np.int32), np.empty(most, np.uint8)
    validity = None if given is None or not given.null_count else given.buffers()[0]
    kernels.avro_values(
        0 if validity is None else validity.address, 0 if given is None else given.offset,
        np.frombuffer(frame, np.uint8) if frame else _NO_FRAME, table, ends, out,
    )  # fmt: skip
    del kept  # the kernel used its addresses until here
    mask = None
    if validity is not None:
        assert given is not None
        mask = pa.py_buffer(np.packbits(np.asarray(given.is_valid()), bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), rows, [mask, pa.py_buffer(ends), pa.py_buffer(out[: ends[-1]])])


def values(
    columns: Sequence[pa.Array], fields: Sequence[WriterField], rows: int, given: pa.Array | None, frame: bytes
) -> pa.Array:
    """Encode whole values as ``records`` does, and name the row and the column in the error."""
    try:
        return records(columns, fields, rows, given, frame)
    except _Unfit as error:
        raise UnfitValue(
            f"row {error.row} of {rows} of a batch does not fit the Avro schema: column {error.where!r} {error.why}. Nothing "
            "of the batch was written"
        ) from None


class _Unfit(Exception):
    """Value that does not fit its field: its row, the reason, and the place in the columns."""

    def __init__(self, row: int, why: str, where: str = "") -> None:
        super().__init__(row, why, where)
        self.row, self.why, self.where = row, why, where

    def inside(self, name: str) -> _Unfit:
        return _Unfit(self.row, self.why, f"{name}.{self.where}" if self.where else name)


def _fill(line: np.ndarray, field: WriterField, made: pa.Array, counts: np.ndarray | None, rows: int) -> int:
    """Fill the line of a field in the kernel's table. Returns the most bytes that all its values can take.

    ``counts``: items per row of a list. The line holds addresses in ``made`` and ``counts``: the caller keeps both alive
    until the kernel is through."""
    line[kernels.OUT_KIND] = field.kind
    line[kernels.OUT_NULL], line[kernels.OUT_BRANCH] = field.null, field.branch
    most = rows * (_MOST[field.kind] + (field.branch >= 0))
    if field.kind == kernels.AVRO_NULL:
        return most
    validity, *_, data = made.buffers()
    line[kernels.OUT_DATA] = data.address if data is not None else 0
    line[kernels.OUT_VALIDITY] = validity.address if validity is not None and made.null_count else 0
    line[kernels.OUT_FIRST] = made.offset
    if field.kind in _WITH_BYTES:
        view = raw_bytes(made)
        line[kernels.OUT_OFFSETS] = view.offsets
        ends = _offsets(made)
        most += int(ends[-1]) - int(ends[0]) if rows else 0
    if counts is not None:
        line[kernels.OUT_COUNTS] = counts.ctypes.data
    if field.kind == kernels.AVRO_FIXED_DECIMAL:
        line[kernels.OUT_SIZE] = field.size
        most += rows * field.size
    return most


def _offsets(column: pa.Array) -> np.ndarray:
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(1, np.int32)
    return np.frombuffer(buffer, np.int32, len(column) + 1, 4 * column.offset)


# ---- the column that the kernel reads


def _made(column: pa.Array, field: WriterField, given: pa.Array | None) -> tuple[pa.Array, np.ndarray | None]:
    """Return the column that the kernel reads, and for lists the number of items of each. Rows that are null in ``given`` are
    not checked."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    _check_nulls(column, field, given)
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), _STORED.get(field.kind) or field.to), np.zeros(len(column), np.int32)
    if field.avro in ("record", "error"):
        return records(_struct_parts(column, field), field.parts, len(column), column), None
    if field.avro in ("array", "map"):
        return _listed(column, field)
    if field.avro == "enum":
        return _of_symbols(column, field), None
    return _cast(column, field), None


#: Types of the column that the kernel reads, for kinds whose columns do not have the type of the field.
_STORED = {kernels.AVRO_MADE: pa.binary(), kernels.AVRO_LIST: pa.binary()}


def _check_nulls(column: pa.Array, field: WriterField, given: pa.Array | None) -> None:
    if field.kind == kernels.AVRO_NULL or field.null >= 0 or not column.null_count:
        return
    nulls = pc.is_null(column)
    if given is not None:
        nulls = pc.and_(nulls, given.is_valid())
    found = np.flatnonzero(np.asarray(nulls))
    if len(found):
        raise _Unfit(int(found[0]), f"is null, and its type, {field.avro}, is in no union with null")


def _struct_parts(column: pa.Array, field: WriterField) -> list[pa.Array]:
    """Return columns for the fields of a struct that are not missing, in order of the fields. They are null where the struct
    is null."""
    names = [each.name for each in column.type]
    found = column.flatten()
    return [found[names.index(each.name)] for each in field.parts if not each.missing]


def _listed(column: pa.Array, field: WriterField) -> tuple[pa.Array, np.ndarray]:
    """Encode lists or maps. Their items are encoded one after the other, so the items of a list are one piece of bytes."""
    is_map = field.avro == "map"
    if not is_map and not pa.types.is_list(column.type):
        if column.offset:  # the cast of a slice would keep earlier entries in structs, but not their offsets
            column = column.take(pa.array(np.arange(len(column))))
        column = column.cast(pa.list_(column.type.value_type))
    if column.null_count:  # entries of a list that is null do not count
        column = column.take(pa.array(np.arange(len(column))))
    offsets = _offsets(column)
    first, rows = int(offsets[0]), int(offsets[-1]) - int(offsets[0])
    inside = (column.keys, column.items) if is_map else (column.values,)
    try:
        items = records([each.slice(first, rows) for each in inside], field.parts, rows)
    except _Unfit as error:
        row = int(np.searchsorted(offsets, first + error.row, side="right")) - 1
        raise _Unfit(row, error.why, error.where) from None
    ends = _offsets(items)[offsets - first] if rows else np.zeros(len(offsets), np.int32)
    mask = pa.py_buffer(np.packbits(np.asarray(column.is_valid()), bitorder="little")) if column.null_count else None
    made = pa.Array.from_buffers(
        pa.binary(), len(column), [mask, pa.py_buffer(np.ascontiguousarray(ends)), items.buffers()[2]]
    )
    return made, np.diff(offsets).astype(np.int32)


def _of_symbols(column: pa.Array, field: WriterField) -> pa.Array:
    symbols = pa.array(field.symbols, pa.string())
    column = column.cast(pa.string())
    found = pc.index_in(column, symbols)
    if found.null_count > column.null_count:
        row = int(np.flatnonzero(np.asarray(pc.and_(found.is_null(), column.is_valid())))[0])
        raise _Unfit(row, f"is {_shown(column[row])}, which is no symbol of its enum")
    return found


def _cast(column: pa.Array, field: WriterField) -> pa.Array:
    to = field.to
    if field.avro == "fixed" and not pa.types.is_decimal(to):
        column = column.cast(pa.binary())
        wrong = np.flatnonzero(np.asarray(pc.fill_null(pc.not_equal(pc.binary_length(column), field.size), False)))
        if len(wrong):
            raise _Unfit(
                int(wrong[0]), f"has {len(column[int(wrong[0])].as_py()):,} bytes, and its type takes {field.size:,}"
            )
        return column
    if column.type == to:
        return column
    if pa.types.is_timestamp(to) and to.unit == "ms" and column.type.unit in ("us", "ns"):
        return _floored(column, 1_000 if column.type.unit == "us" else 1_000_000, to)
    if pa.types.is_timestamp(to) and to.unit == "us" and column.type.unit == "ns":
        return _floored(column, 1_000, to)
    return _converted(column, lambda some: some.cast(to), field)


def _floored(column: pa.Array, by: int, to: pa.DataType) -> pa.Array:
    """Round times down to the unit of the type, also before 1970."""
    counts = np.asarray(column.cast(pa.int64()).fill_null(0)) // by
    return pa.array(counts, mask=np.asarray(column.is_null())).cast(pa.int64()).cast(to)


def _converted(column: pa.Array, convert: Callable[[pa.Array], pa.Array], field: WriterField) -> pa.Array:
    try:
        return convert(column)
    except pa.ArrowInvalid:
        pass
    low, high = 0, len(column)  # the first row that does not fit lies in between
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(column[low:middle])
            low = middle
        except pa.ArrowInvalid:
            high = middle
    raise _Unfit(low, f"is {_shown(column[low])}, which {_type_said(field)} does not hold")


def _type_said(field: WriterField) -> str:
    return f"{field.avro} ({field.to})" if str(field.to) != field.avro else field.avro


def _shown(value: Any) -> str:
    try:
        return f"{value.as_py()!r:.{_SHOWN_MAX}}"
    except (ValueError, OverflowError):  # a time that Python cannot represent
        return f"{value.cast(pa.int64()).as_py()} as {value.type}"
