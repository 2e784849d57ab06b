"""Values in Avro, to columns of a schema. Each value has the frame of a schema registry, or all are by the same schema.

``Avro`` reads values by means of the library (fastavro). ``RecordColumns`` reads records without types inside each other
without it.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.formats.base import Bad, Format, Parsed, halved, one_batch
from flux.connectors.kafka.formats.schema_registry import Registry
from flux.connectors.kafka.records import kernels
from flux.errors import UsageError
from partitioning.columns import raw_bytes

#: The frame in front of a value: the byte MAGIC, and the id of the schema in four bytes.
MAGIC, _FRAME = 0, 5
#: Most records, lists and maps inside each other.
_DEPTH_MAX = 64
#: Most bytes of a fixed type, and most types of a schema if each use of a name counts.
_SIZE_MAX, _TYPES_MAX = (1 << 31) - 1, 10_000
_DECIMAL_MAX = 38
#: Longest text of the library in a message, in characters: its errors may show whole schemas.
_WHY_MAX = 200
_PLAIN = {
    "null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "bytes": pa.binary(), "string": pa.string(),
}  # fmt: skip
#: Logical types whose numbers are counted as in Arrow. Values of all others stay the numbers or bytes that they are.
_TIMES = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
_WIDER = ({"int": pa.int32(), "long": pa.int64()}, {"float": pa.float32(), "double": pa.float64()})


@functools.cache
def library() -> Any:
    """Return fastavro. UsageError says how to install it."""
    try:
        import fastavro
    except ImportError as error:
        raise UsageError(
            f"format='avro' needs fastavro, which is missing here ({error}): pip install 'flux-exchange[avro]', on the driver "
            "and on the executors"
        ) from error
    return fastavro


class Avro(Format):
    """The format ``avro``.

    ``schema`` is the reader's schema: a record in Avro's JSON, as text or as a dict (``reader`` is the same as the library
    takes it). ``schemas`` is the place where the ids in front of values lead to writers' schemas, see ``Registry``; if it
    is None, values are by ``schema`` and have no id in front.

    Law, as in ``base``: row i is value i by itself, and a null or empty value is a row of nulls. Any bytes either make a
    row or are reported as bad. A writer's schema is checked before it is used: some schemas could make a few bytes an
    endless list, or make the library recurse too deeply.

    The library (fastavro) makes objects, value by value; these become columns together. Records without types inside each
    other need no objects (``RecordColumns``)."""

    def __init__(self, schema: Any, schemas: Any = None) -> None:
        self.reader = parsed_schema(as_json(schema))
        named: dict[str, Any] = {}
        if not isinstance(self.reader, dict) or self.reader["type"] != "record":
            raise UsageError("format='avro' reads records: schema must be one with a type \"record\" and fields")
        fields = [
            pa.field(field["name"], arrow_type(field["type"], field["name"], named, 1))
            for field in self.reader["fields"]
        ]
        if not fields:
            raise UsageError("schema names no column")
        if twice := {field.name for field in fields if sum(field.name == other.name for other in fields) > 1}:
            raise UsageError(f"schema names column {min(twice)!r} twice")
        self._as_read = pa.struct(fields)
        self._as_given = in_micros(self._as_read)
        super().__init__(pa.schema(list(self._as_given)))
        check_writer(self.reader)
        self._flat = program(self.reader, self.reader)
        self._registry = None if schemas is None else Registry(schemas)
        self.waits = self._registry is not None

    def parse(self, values: pa.Array, find_all: bool) -> Parsed:
        parsed = None if self._flat is None else self._parsed_flat(values, find_all, self._flat)
        return self._parsed_each(values, find_all) if parsed is None else parsed

    def _parsed_flat(self, values: pa.Array, find_all: bool, by_reader: FlatProgram) -> Parsed | None:
        """Read all values of a writer together. Returns None if the library has to read them."""
        rows, ids = RecordColumns(values, self.reader), np.zeros(len(values), np.int64)
        column = raw_bytes(values)
        kernels.schema_ids((column.offsets, column.data, column.validity, column.first), ids)
        blank = ids == -1
        if self._registry is None:
            rows.read(np.flatnonzero(~blank), 0, by_reader)
        else:
            for number in np.unique(ids[ids >= 0]).tolist():
                writer = self._registry.writer(number)
                how = None if isinstance(writer, str) else program(writer, self.reader)
                if how is None and not isinstance(writer, str):
                    return None
                if how is not None:
                    rows.read(np.flatnonzero(ids == number), _FRAME, how)
        good = rows.good | blank
        bad = []
        for row in np.flatnonzero(~good).tolist():
            why = self._read(values[row].as_py())
            bad.append(
                Bad(row, why if isinstance(why, str) else "it cannot be read by its schema: a number is out of range")
            )
            if not find_all:
                return Parsed(one_batch([], self.schema), np.empty(0, np.int64), bad)
        kept = np.flatnonzero(good)
        try:
            made = rows.columns(kept, [field.type for field in self._as_read])
            columns = [each.cast(field.type) for each, field in zip(made, self.schema, strict=True)]
        except pa.ArrowInvalid:  # bad UTF-8, times that Spark does not know: the library finds the value
            return None
        batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        return Parsed(batch, kept if bad else None, bad)

    def _parsed_each(self, values: pa.Array, find_all: bool) -> Parsed:
        """Read the values one by one, with the library."""
        rows: list[Any] = []
        good, bad = [], []
        for row, value in enumerate(values.to_pylist()):
            read: Any = None
            if value:
                read = self._read(value)
                if isinstance(read, str):
                    bad.append(Bad(row, read))
                    if not find_all:
                        return Parsed(one_batch([], self.schema), np.empty(0, np.int64), bad)
                    continue
            rows.append(read)
            good.append(row)
        index = np.array(good, np.int64)
        unfit: list[Bad] = []
        tables = halved(lambda some: self._columns([rows[i] for i in some]), np.arange(len(rows)), unfit, find_all)
        bad += [Bad(int(index[each.row]), each.why) for each in unfit]
        if not bad:
            return Parsed(one_batch(tables, self.schema), None, [])
        bad.sort()
        if not find_all:
            return Parsed(one_batch([], self.schema), np.empty(0, np.int64), bad[:1])
        kept = np.setdiff1d(index, [each.row for each in bad], assume_unique=True)
        return Parsed(one_batch(tables, self.schema), kept, bad)

    def _read(self, value: bytes) -> Any:
        """Return a value as a dict, or the reason why it is bad as text. A failure that is not the value's fault, as of a
        registry that does not answer, is raised."""
        writer, at = self.reader, 0
        if self._registry is not None:
            if len(value) < _FRAME or value[0] != MAGIC:
                return "it does not begin with a zero byte and the id of a schema"
            at, number = _FRAME, int.from_bytes(value[1:_FRAME], "big")
            found = self._registry.writer(number)
            if isinstance(found, str):
                return found
            writer = found
        stream = io.BytesIO(value)
        stream.seek(at)
        try:
            read = library().schemaless_reader(stream, writer, None if writer is self.reader else self.reader)
        except EOFError:
            return "it ends before its schema does"
        except Exception as error:  # the library raises errors of many kinds for bytes that are no value
            return f"it cannot be read by its schema: {type(error).__name__} {error}".rstrip()[:_WHY_MAX]
        left = len(value) - stream.tell()
        return f"{left} bytes are left behind it" if left else read

    def _columns(self, rows: list[Any]) -> pa.Table:
        return pa.Table.from_arrays(pa.array(rows, self._as_read).cast(self._as_given).flatten(), schema=self.schema)

    def __repr__(self) -> str:
        return "avro"


def as_json(schema: Any) -> Any:
    if isinstance(schema, str):
        try:
            return json.loads(schema)
        except ValueError as error:
            raise UsageError(
                f"with format='avro', schema must be a schema in Avro's JSON, not {schema[:60]!r}: {error}"
            ) from None
    if not isinstance(schema, Mapping):
        raise UsageError(
            f"with format='avro', schema must be a schema in Avro's JSON, as text or a dict; got {type(schema).__name__}"
        )
    return dict(schema)


def parsed_schema(schema: Any) -> Any:
    """Return a schema as the library takes it, without logical types whose numbers Arrow understands. UsageError: it is no
    schema."""
    try:
        return library().parse_schema(_plainer(schema, 0))
    except UsageError:
        raise
    except Exception as error:  # of several kinds, KeyErrors among them
        raise UsageError(f"it is no schema of Avro: {type(error).__name__}: {error}") from None


def _plainer(schema: Any, depth: int) -> Any:
    """Copy a schema, with its logical types put aside under a name that the library does not know."""
    # A record inside a record is up to four steps further down: the list of fields, the field, a union, and the record.
    if depth > 4 * _DEPTH_MAX:
        raise UsageError(f"a schema has at most {_DEPTH_MAX} types inside each other")
    if isinstance(schema, Mapping):
        made = {key: _plainer(value, depth + 1) if key in ("type", "fields", "items", "values") else value
                for key, value in schema.items() if key != "logicalType"}  # fmt: skip
        if (logical := schema.get("logicalType")) is not None:
            made["logicalType" if logical == "decimal" else "fluxLogicalType"] = logical
        return made
    if isinstance(schema, list | tuple):
        return [_plainer(each, depth + 1) for each in schema]
    return schema


def arrow_type(schema: Any, where: str, named: dict[str, Any], depth: int) -> pa.DataType:
    """Return the type of a column for a ``schema`` that the library has parsed. ``named`` has the types that have been defined
    before. UsageError: no column can hold the type; the text names the place, ``where``."""
    if depth > _DEPTH_MAX:
        raise UsageError(f"column {where!r} has more than {_DEPTH_MAX} types inside each other")
    if isinstance(schema, list):
        return _union(schema, where, named, depth)
    if isinstance(schema, str) and schema not in _PLAIN:
        if named.get(schema) is None:
            raise UsageError(f"column {where!r} contains itself (type {schema}), which no column can hold")
        known: pa.DataType = named[schema]
        return known
    kind = schema if isinstance(schema, str) else schema["type"]
    if isinstance(kind, dict | list):
        return arrow_type(kind, where, named, depth + 1)
    if isinstance(schema, str):
        return _PLAIN[kind]
    if kind == "array":
        return pa.list_(arrow_type(schema["items"], where, named, depth + 1))
    if kind == "map":
        return pa.map_(pa.string(), arrow_type(schema["values"], where, named, depth + 1))
    if kind in ("record", "enum", "fixed"):
        named[schema["name"]] = None  # until its fields are known
        made = _named_type(kind, schema, where, named, depth)
        named[schema["name"]] = made
        return made
    if schema.get("logicalType") == "decimal":
        return _decimal(schema, where)
    return _TIMES.get((kind, schema.get("fluxLogicalType"))) or arrow_type(kind, where, named, depth + 1)


def in_micros(type_: pa.DataType) -> pa.DataType:
    """Change all timestamps in a type to microseconds, the only ones that Spark knows."""
    if pa.types.is_timestamp(type_):
        return pa.timestamp("us", type_.tz)
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(in_micros(field.type)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(type_.key_type, in_micros(type_.item_type))
    if pa.types.is_list(type_):
        return pa.list_(in_micros(type_.value_type))
    return type_


def _named_type(kind: str, schema: Any, where: str, named: dict[str, Any], depth: int) -> pa.DataType:
    if kind == "enum":
        return pa.string()
    if kind == "fixed":
        return _decimal(schema, where) if schema.get("logicalType") == "decimal" else pa.binary()
    return pa.struct(
        [
            pa.field(field["name"], arrow_type(field["type"], f"{where}.{field['name']}", named, depth + 1))
            for field in schema["fields"]
        ]
    )


def _union(branches: list[Any], where: str, named: dict[str, Any], depth: int) -> pa.DataType:
    kept = [each for each in branches if each != "null"]
    if len(kept) <= 1:
        return arrow_type(kept[0], where, named, depth + 1) if kept else pa.null()
    for wider in _WIDER:
        if all(isinstance(each, str) and each in wider for each in kept):
            return list(wider.values())[-1]
    raise UsageError(
        f"column {where!r} is a union of {len(kept)} types, which no column can hold: one type besides null, or int and long, or "
        "float and double"
    )


def _decimal(schema: Any, where: str) -> pa.DataType:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision <= _DECIMAL_MAX:
        raise UsageError(f"column {where!r}: a decimal has 1 to {_DECIMAL_MAX} digits; got {precision!r}, {scale!r}")
    return pa.decimal128(precision, scale)


def check_writer(schema: Any) -> None:
    """Raise UsageError for a writer's schema that must not be used for bytes from strangers: types that contain themselves;
    lists whose items take no bytes, because a few bytes can say that there are billions of these; records that use each
    other until a short schema has no end."""
    _least_bytes(schema, {}, 0)
    _unfolded(schema, {})


def _unfolded(schema: Any, named: dict[str, int]) -> int:
    """Count the types of a schema, where each use of a name counts."""
    if isinstance(schema, list):
        return sum(_unfolded(each, named) for each in schema)
    if isinstance(schema, str):
        return named.get(schema, 1)
    kind = schema["type"]
    if kind in ("record", "error"):
        count = 1 + sum(_unfolded(field["type"], named) for field in schema["fields"])
        named[schema["name"]] = count
    elif kind in ("array", "map"):
        count = 1 + _unfolded(schema["items" if kind == "array" else "values"], named)
    else:
        count = _unfolded(kind, named)
    if count > _TYPES_MAX:
        raise UsageError(f"its schema unfolds to {count:,} types; there may be {_TYPES_MAX:,}")
    return count


def _least_bytes(schema: Any, named: dict[str, Any], depth: int) -> int:
    """Return the least number of bytes of a value, 0 or more. ``named`` has that of each type defined before, None until it is
    known."""
    if depth > _DEPTH_MAX:
        raise UsageError(f"a schema has at most {_DEPTH_MAX} types inside each other")
    if isinstance(schema, list):
        for each in schema:
            _least_bytes(each, named, depth + 1)
        return 1
    if isinstance(schema, str):
        if schema in _PLAIN:
            return int(schema != "null")
        if named.get(schema) is None:
            raise UsageError(f"its schema has a type that contains itself, {schema}")
        return int(named[schema])
    kind = schema["type"]
    if isinstance(kind, dict | list):
        return _least_bytes(kind, named, depth + 1)
    if kind in ("array", "map"):
        if not _least_bytes(schema["items" if kind == "array" else "values"], named, depth + 1) and kind == "array":
            raise UsageError("its schema has a list whose items take no bytes")
        return 1
    if kind in ("record", "error"):
        named[schema["name"]] = None
        least = sum(_least_bytes(field["type"], named, depth + 1) for field in schema["fields"])
    elif kind == "fixed":
        least = schema["size"]
        if type(least) is not int or not 0 <= least <= _SIZE_MAX:
            raise UsageError(f"its schema has a fixed type of size {least!r:.40}, which must be 0 to {_SIZE_MAX:,}")
    elif kind == "enum":
        least = 1
    else:
        return _least_bytes(kind, named, depth + 1)
    named[schema["name"]] = least
    return least


_KINDS = {
    "null": kernels.AVRO_NULL, "boolean": kernels.AVRO_BOOLEAN, "int": kernels.AVRO_INT, "long": kernels.AVRO_LONG,
    "float": kernels.AVRO_FLOAT, "double": kernels.AVRO_DOUBLE, "bytes": kernels.AVRO_BYTES, "string": kernels.AVRO_BYTES,
    "fixed": kernels.AVRO_FIXED, "enum": kernels.AVRO_ENUM,
}  # fmt: skip


class FlatField(NamedTuple):
    """Field of a flat record."""

    #: Name of the Avro type.
    name: str
    #: Bytes of a fixed type, or the number of symbols of an enum.
    size: int = 0
    #: Branch of null in a union of two, -1 without a union.
    null: int = -1
    #: Symbols of an enum.
    symbols: tuple[str, ...] = ()


class FlatProgram(NamedTuple):
    """Instructions for the kernel: how values of a writer's schema become columns. One entry a field of the writer."""

    #: Kinds of the fields.
    kinds: np.ndarray
    #: Branches of null, -1 without a union.
    nulls: np.ndarray
    #: Bytes of fixed types, numbers of symbols of enums.
    sizes: np.ndarray
    #: Number of the column that a field goes to, -1 for none.
    to: np.ndarray


def fields_of(schema: Any) -> dict[str, FlatField] | None:
    """Return the fields of a record by name, in order. None if one of them is more than a number, text, bytes or a symbol."""
    if not isinstance(schema, dict) or schema["type"] != "record" or schema.get("aliases"):
        return None
    found = {}
    for each in schema["fields"]:
        field = _field(each["type"])
        if field is None or each.get("aliases"):
            return None
        found[each["name"]] = field
    return found


def _field(type_: Any) -> FlatField | None:
    if isinstance(type_, list):
        if len(type_) != 2 or type_.count("null") != 1:
            return None
        field = _field(type_[1 - type_.index("null")])
        return None if field is None or field.null >= 0 else field._replace(null=type_.index("null"))
    name = type_["type"] if isinstance(type_, dict) else type_
    if not isinstance(name, str) or name not in _KINDS or (isinstance(type_, dict) and "logicalType" in type_):
        return None  # a decimal, or the name of a type that was defined before
    if name == "fixed":
        return FlatField(name, type_["size"])
    return (
        FlatField(name, len(type_["symbols"]), symbols=tuple(type_["symbols"])) if name == "enum" else FlatField(name)
    )


def program(writer: Any, reader: Any) -> FlatProgram | None:
    """Make the program from a writer's to the reader's schema. None where the library must resolve one to the other."""
    written, wanted = fields_of(writer), fields_of(reader)
    if written is None or wanted is None or writer["name"] != reader["name"]:
        return None
    defaults = {each["name"]: each.get("default", ...) for each in reader["fields"]}
    for name, field in wanted.items():
        known = written.get(name)
        if known is None and (field.null < 0 or defaults[name] is not None):
            return None
        if known is not None and (known._replace(null=field.null) != field or known.null >= 0 > field.null):
            return None
    columns = list(wanted)
    return FlatProgram(
        np.array([_KINDS[field.name] for field in written.values()], np.int64),
        np.array([field.null for field in written.values()], np.int64),
        np.array([field.size for field in written.values()], np.int64),
        np.array([columns.index(name) if name in wanted else -1 for name in written], np.int64),
    )


class RecordColumns:
    """Columns of records of Avro without types inside each other, made without an object for any of them: for each field that
    has been read, numbers, or places in ``values``. ``good`` marks the rows that were read well.

    Law: the result is that of the library (``Avro``), row by row. Schemas that are not understood here are left to the
    library. Compiled loops check each number and length before they use it."""

    def __init__(self, values: pa.Array, reader: Any) -> None:
        fields = fields_of(reader)
        assert fields is not None, "there is a program for it"
        self._fields = list(fields.values())
        self._values = raw_bytes(values)
        self._numbers = np.zeros((len(fields), len(values)), np.int64)
        self._lengths = np.zeros((len(fields), len(values)), np.int64)
        self._valid = np.zeros((len(fields), len(values)), np.bool_)
        self.good = np.zeros(len(values), np.bool_)

    def read(self, rows: np.ndarray, skip: int, how: FlatProgram) -> None:
        values = self._values
        kernels.avro_records(
            (values.offsets, values.data, values.validity, values.first), rows, skip, *how, self._numbers, self._lengths,
            self._valid, self.good,
        )  # fmt: skip

    def columns(self, kept: np.ndarray, types: list[pa.DataType]) -> list[pa.Array]:
        """Make columns of the rows ``kept``. ArrowInvalid: bytes that should be text are not UTF-8."""
        return [self._column(number, kept, kind) for number, kind in enumerate(types)]

    def _column(self, number: int, kept: np.ndarray, kind: pa.DataType) -> pa.Array:
        field, valid = self._fields[number], self._valid[number][kept]
        nulls = len(valid) - int(np.count_nonzero(valid))
        validity = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
        given = self._numbers[number][kept]
        if field.name == "null":
            return pa.nulls(len(given), kind)
        if field.name == "boolean":
            return pa.array(given != 0, kind, mask=~valid)
        if field.name == "enum":
            return pa.array(field.symbols, kind).take(pa.array(given, mask=~valid))
        if field.name in ("bytes", "string", "fixed"):
            lengths = self._lengths[number][kept]
            ends, data = np.zeros(len(given) + 1, np.int32), np.empty(int(lengths.sum()), np.uint8)
            kernels.gather(given, lengths, ends, data)
            made = pa.Array.from_buffers(kind, len(given), [validity, pa.py_buffer(ends), pa.py_buffer(data)], nulls)
            if field.name == "string":
                made.validate(full=True)
            return made
        if field.name in ("int", "float"):
            given = given.astype(np.int32)
        return pa.Array.from_buffers(kind, len(given), [validity, pa.py_buffer(given)], nulls)
