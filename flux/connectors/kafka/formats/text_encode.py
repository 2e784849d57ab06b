"""The columns of rows to the keys and values of records: JSON, CSV, Avro, or as they are; all rows of a batch at once.

Law: the bytes of a row follow from the row alone, so every writer of the row writes the same.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.connectors.kafka.formats.avro_encode import AvroValues
from flux.connectors.kafka.formats.base import FORMATS
from flux.connectors.kafka.records import kernels
from flux.connectors.kafka.records.decoder import HEADER
from flux.errors import SchemaError
from partitioning.columns import raw, raw_bytes

_WHOLE = {pa.int32().id: kernels.TEXT_INT32, pa.int64().id: kernels.TEXT_INT64}
_STRING = pa.string().id


def row_texts(
    columns: Sequence[pa.Array], pieces: tuple[str, ...], null: str, json: bool, made: Callable[[pa.Array], pa.Array]
) -> pa.Array | None:
    """Join the columns of each row to a text. None: some text needs more than quotes, or the result more than one column can
    hold.

    ``pieces`` has the text before each column, and the text behind the last one. ``null`` stands for a null. With ``json``,
    text is in quotes; otherwise, as in CSV, only an empty one is. ``made`` makes the text of a column that is neither a
    whole number nor text.

    The text is made in one pass. Arrow takes a call for each step and column, which is most of the cost of small batches,
    and keeps the text of each column beside that of the rows."""
    rows = len(columns[0])
    fields = np.zeros((len(columns), kernels.TEXT_FIELDS), np.int64)
    for field, column in zip(fields, columns, strict=True):
        kind = _WHOLE.get(column.type.id)
        if kind is not None:
            view = raw(column)
            field[:] = kind, view.values, 0, view.validity, view.first
        elif column.type.id == _STRING:
            field[:] = _of_text(kernels.TEXT_STRING, column)
        else:
            field[0] = kernels.TEXT_MADE
    # This check comes before any text is made, which would have to be made again: nested columns are made of such texts,
    # too.
    if not kernels.are_plain(rows, fields, json):
        return None
    kept = []
    for field, column in zip(fields, columns, strict=True):
        if field[0] == kernels.TEXT_MADE:
            text = made(column)
            if text.type.id != _STRING:
                return None
            kept.append(text)
            field[:] = _of_text(kernels.TEXT_MADE, text)
    ends, out = kernels.texts(rows, fields, *_as_bytes(pieces), _null(null), json)
    del kept  # the kernel used its addresses until here
    if not len(ends):
        return None
    return pa.StringArray.from_buffers(rows, pa.py_buffer(ends), pa.py_buffer(out))


def _of_text(kind: int, column: pa.Array) -> tuple[int, int, int, int, int]:
    view = raw_bytes(column)
    return kind, view.data, view.offsets, view.validity, view.first


@functools.lru_cache(maxsize=64)
def _as_bytes(pieces: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [piece.encode() for piece in pieces]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([len(piece) for piece in encoded])


@functools.cache
def _null(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


_QUOTED = '"'
#: Digits of a second, by the unit of a timestamp.
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
#: First and last day, since 1970, whose year has four digits; most days between the first and the last of a batch.
_DAYS, _SPAN_MAX = (-719_528, 2_932_896), 1 << 16
_EMPTY = pa.scalar("", pa.string())


@dataclass(frozen=True)
class Columns:
    """Columns of the rows that make key, value, headers and time of a record."""

    #: One of ``READ_FORMATS``; records are written in it.
    format: str
    #: One column is written as it is (numbers as text), several as a JSON object; without any, keys are null.
    key: tuple[str, ...]
    #: One column for raw; for other formats one or several, or None for all that are not in ``aside``. A single struct
    #: column is the JSON object or the Avro record itself, and the value is null where the struct is.
    value: tuple[str, ...] | None
    #: Column of headers.
    headers: str | None
    #: Column of times.
    timestamp: str | None
    #: Columns that are not in the value unless it names them.
    aside: frozenset[str]
    #: Schema of values in Avro, for the sink; None for the operator that needs keys alone.
    avro: AvroValues | None = None

    def check(self, schema: pa.Schema) -> None:
        """Raise SchemaError for columns that are not there or whose type cannot be written."""
        wanted = [*self.key, *self.of_value(schema)]
        for name in [*wanted, *filter(None, (self.headers, self.timestamp))]:
            if schema.names.count(name) != 1:
                raise SchemaError(
                    f"to_kafka: the output has no single column {name!r}; it has {', '.join(schema.names)}"
                )
        if not self.of_value(schema):
            raise SchemaError("to_kafka: no column is left for the value; name some with value=")
        try:
            empty = pa.RecordBatch.from_pylist([], schema=schema)
            self.keys(empty)
            if self.avro is not None:
                self.avro.check(self._fields(schema))
            elif self.format != "avro":
                self.values(empty)
            # Avro without a schema: the operator that needs keys alone. The sink, which has the schema, checks the values.
            self.header_entries(empty)
            self.timestamps(empty, 0)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, TypeError) as error:
            raise SchemaError(f"to_kafka: {error}") from error

    def of_value(self, schema: pa.Schema) -> tuple[str, ...]:
        if self.value is not None:
            return self.value
        if self.format == "raw":
            return ("value",)
        return tuple(name for name in schema.names if name not in self.aside)

    def keys(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Return the keys, binary or string. None: all are null."""
        if not self.key:
            return None
        if len(self.key) == 1:
            return raw_column(batch.column(self.key[0]), f"key column {self.key[0]!r}")
        return objects([batch.column(name) for name in self.key], self.key)

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the values, binary or string; a null is a tombstone."""
        names = self.of_value(batch.schema)
        columns = [batch.column(name) for name in names]
        if self.format == "raw":
            return raw_column(columns[0], f"value column {names[0]!r}")
        if self.format == "csv":
            return lines(columns, names)
        alone = self._is_whole(batch.schema)
        if self.avro is not None and alone:
            fields = [each.name for each in columns[0].type]
            return self.avro.encode(columns[0].flatten(), fields, batch.num_rows, columns[0])
        if self.avro is not None:
            return self.avro.encode(columns, names, batch.num_rows, None)
        return json_text(columns[0]) if alone else objects(columns, names)

    def settled(self, schema: pa.Schema, limit_s: float) -> Columns:
        """Return the columns with the schema settled; a registry may be asked for it."""
        return self if self.avro is None else replace(self, avro=self.avro.settled(self._fields(schema), limit_s))

    def _is_whole(self, schema: pa.Schema) -> bool:
        """Tell whether a single struct column is the value."""
        names = self.of_value(schema)
        return self.value is not None and len(names) == 1 and pa.types.is_struct(schema.field(names[0]).type)

    def _fields(self, schema: pa.Schema) -> pa.Schema:
        """Return the fields of the value."""
        names = self.of_value(schema)
        return pa.schema(
            list(schema.field(names[0]).type) if self._is_whole(schema) else [schema.field(name) for name in names]
        )

    def header_entries(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Return the headers as list<struct<key string, value binary>>."""
        if self.headers is None:
            return None
        column = batch.column(self.headers)
        wanted = pa.list_(HEADER)
        if pa.types.is_map(column.type):
            entries = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
            offsets = column.offsets
            if column.null_count:  # a null in the offsets is a null row
                gone = np.append(column.is_null().to_numpy(zero_copy_only=False), False)
                offsets = pa.array(offsets.to_numpy(), pa.int32(), mask=gone)
            column = pa.ListArray.from_arrays(offsets, entries)
        return column if column.type == wanted else column.cast(wanted)

    def timestamps(self, batch: pa.RecordBatch, now: int) -> np.ndarray:
        """Return times in milliseconds: ``now`` for nulls, and for all rows if there is no column."""
        if self.timestamp is None:
            return np.full(batch.num_rows, now, np.int64)
        column = batch.column(self.timestamp)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ms", column.type.tz), safe=False)
        elif not pa.types.is_int64(column.type):
            raise TypeError(
                f"the timestamp column {self.timestamp!r} must be a timestamp or milliseconds, not {column.type}"
            )
        return np.array(column.cast(pa.int64()).fill_null(now))


def raw_column(column: pa.Array, what: str) -> pa.Array:
    """Return text and bytes as they are; numbers, booleans and decimals as text."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return column
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.binary())
    if (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    ):
        return column.cast(pa.string())
    raise TypeError(f"{what} has type {kind}, which has no bytes of its own: convert it to text or binary in a stage")


def objects(columns: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    """Make one JSON object of each row, nulls written out."""
    made = row_texts(columns, _object_pieces(tuple(names)), "null", True, json_text)
    if made is not None:
        return made
    pieces: list[pa.Array | pa.Scalar] = []
    before = "{"
    for name, column in zip(names, columns, strict=True):
        pieces += [_text(f"{before}{json.dumps(name, ensure_ascii=False)}:"), json_text(column)]
        before = ","
    return _joined([*pieces, _text("}")], null="null")


@functools.lru_cache(maxsize=64)
def _object_pieces(names: tuple[str, ...]) -> tuple[str, ...]:
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    return (f"{{{quoted[0]}:", *[f",{name}:" for name in quoted[1:]], "}")


def json_text(column: pa.Array) -> pa.Array:
    """Return the JSON of each value as text; null for null."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return json_text(column.dictionary_decode())
    if pa.types.is_floating(kind):
        column = column.cast(pa.float32()) if pa.types.is_float16(kind) else column
        return pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type)).cast(pa.string())
    if pa.types.is_null(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.string())
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        made = objects(column.flatten(), names) if names else pa.array(["{}"] * len(column), pa.string())
        return pc.if_else(column.is_valid(), made, pa.scalar(None, pa.string()))
    if pa.types.is_map(kind):
        named = _joined(
            [_text(_QUOTED), _escaped(_plain(column.keys)), _text('":'), json_text(column.items)], null="null"
        )
        return _listed(column, named, "{", "}")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not pa.types.is_list(kind):
            column = column.cast(pa.list_(kind.value_type))
        return _listed(column, json_text(column.values).fill_null("null"), "[", "]")
    return _joined([_text(_QUOTED), _escaped(_plain(column)), _text(_QUOTED)])


def lines(columns: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    """Make one row of CSV of each row. Null is an empty field, and an empty string is in quotes."""
    for name, column in zip(names, columns, strict=True):
        if pa.types.is_nested(column.type):
            raise TypeError(f"format='csv' cannot write column {name!r} of type {column.type}")
    columns = [_as_string(column) for column in columns]
    made = row_texts(columns, ("", *[","] * (len(columns) - 1), ""), "", False, _plain)
    if made is not None:
        return made
    pieces: list[pa.Array | pa.Scalar] = []
    for column in columns:
        text = _plain(column)
        if pa.types.is_string(column.type):
            special = pc.or_(pc.match_substring_regex(text, '[",\r\n]'), pc.equal(text, _EMPTY))
            if pc.any(special).as_py():
                quoted = _joined([_text(_QUOTED), pc.replace_substring(text, '"', '""'), _text(_QUOTED)])
                text = pc.if_else(special, quoted, text)
        pieces += [_text(","), text]
    return _joined(pieces[1:], null="")


def _as_string(column: pa.Array) -> pa.Array:
    """Change other types of text to string, the type that is searched for characters that need quotes."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    text = pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type)
    return column.cast(pa.string()) if text else column


def _plain(column: pa.Array) -> pa.Array:
    """Return text without quotes. Times are ISO 8601, instants in UTC; binary is base64."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return _times(column)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        encoded = [None if value is None else base64.b64encode(value) for value in column.to_pylist()]
        return pa.array(encoded, pa.string())
    if pa.types.is_duration(kind):
        return column.cast(pa.int64()).cast(pa.string())
    return column.cast(pa.string())


def _times(column: pa.Array) -> pa.Array:
    """Return times in ISO 8601, to the digits of the unit. Arrow takes a microsecond for each, this a tenth of it: digit by
    digit for all."""
    digits, end = _DIGITS[column.type.unit], b"Z" if column.type.tz is not None else b""
    count = np.asarray(column.cast(pa.int64()).fill_null(0))
    seconds, fraction = np.divmod(count, 10**digits)
    days, seconds = np.divmod(seconds, 86400)
    first, last = (int(days.min()), int(days.max())) if len(days) else (0, 0)
    if first < _DAYS[0] or last > _DAYS[1] or last - first > _SPAN_MAX:
        plain = column.cast(pa.timestamp(column.type.unit, "UTC" if end else None)).cast(pa.string())
        return pc.replace_substring(plain, " ", "T", max_replacements=1)
    calendar = np.datetime_as_string(np.arange(first, last + 1).astype("M8[D]")).astype("S10")
    pattern = b"0000-00-00T00:00:00" + (b"." + digits * b"0" if digits else b"") + end
    out = np.tile(np.frombuffer(pattern, np.uint8), (len(count), 1))
    out[:, :10] = calendar.view(np.uint8).reshape(-1, 10)[days - first]
    for at, number in ((11, seconds // 3600), (14, seconds // 60 % 60), (17, seconds % 60)):
        number = number.astype(np.uint8)
        out[:, at] += number // 10
        out[:, at + 1] += number % 10
    for at in range(19 + digits, 19, -1):
        fraction, digit = np.divmod(fraction, 10)
        out[:, at] += digit.astype(np.uint8)
    ends = np.arange(0, out.size + 1, len(pattern), dtype=np.int32)
    made = pa.StringArray.from_buffers(len(out), pa.py_buffer(ends), pa.py_buffer(out))
    return pc.if_else(column.is_valid(), made, pa.scalar(None, pa.string())) if column.null_count else made


_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}


def _escaped(text: pa.Array) -> pa.Array:
    """Escape the text between the quotes of a JSON string. Most columns have nothing to escape, which one look at their bytes
    shows."""
    data = np.frombuffer(text.buffers()[2] or b"", np.uint8)
    if not np.any((data < 32) | (data == 34) | (data == 92)):
        return text
    text = pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), '"', '\\"')
    if np.any(data < 32):
        for character, written in _CONTROLS.items():
            text = pc.replace_substring(text, character, written)
    return text


def _listed(column: pa.Array, texts: pa.Array, left: str, right: str) -> pa.Array:
    """Join the ``texts`` of the entries of a column of lists, which the column's offsets count."""
    offsets = column.offsets
    if column.null_count:
        gone = np.append(column.is_null().to_numpy(zero_copy_only=False), False)
        offsets = pa.array(offsets.to_numpy(), pa.int32(), mask=gone)
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ",")
    return _joined([_text(left), joined, _text(right)])


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.string())


def _joined(pieces: Sequence[pa.Array | pa.Scalar], null: str | None = None) -> pa.Array:
    """Join the pieces of each row. ``null`` stands for nulls; without it, a null in any piece makes the result null."""
    if null is None:
        return pc.binary_join_element_wise(*pieces, _EMPTY)
    return pc.binary_join_element_wise(*pieces, _EMPTY, null_handling="replace", null_replacement=null)


__all__ = ["FORMATS", "Columns"]
