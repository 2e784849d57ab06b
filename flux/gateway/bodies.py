"""Bodies of requests as rows, within bounds: all rows of a body, or none (design: gateway-bodies).

No length that a stranger names is believed: a body is unpacked up to its bound, and Arrow IPC with buffers that are packed
themselves is refused, because its reader takes as much memory as they say.
"""

from __future__ import annotations

import csv as text_csv
import io
import struct
import zlib
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pyarrow import json as arrow_json

from flux.gateway import misfits
from flux.gateway.problems import Problem
from flux.json_rows import has_null_row


class BodyLimits(NamedTuple):
    """Bounds of a body."""

    #: Bytes as they travel, and unpacked.
    body_bytes: int = 16 << 20
    unpacked_bytes: int = 64 << 20
    rows: int = 200_000
    #: Columns: the readers of text take some kilobytes for each, before any name is looked at.
    columns: int = 1000
    #: Bytes of the rows as they are stored: missing values take memory, and an Arrow array may name one text often.
    stored_bytes: int = 128 << 20


def unpacked(body: bytes, encoding: str, limits: BodyLimits) -> bytes:
    """Return a body without its encoding. Problem: it is larger than its bound, or broken."""
    if encoding == "identity":
        return body
    most = limits.unpacked_bytes
    try:
        if encoding == "gzip":
            machine = zlib.decompressobj(wbits=31)
            found = machine.decompress(body, most + 1)
            whole = machine.eof or len(found) > most
            if machine.eof and machine.unused_data:
                raise Problem(
                    "malformed", f"Content-Encoding: gzip: {len(machine.unused_data)} bytes follow the end of the data"
                )
        else:
            found = pa.CompressedInputStream(pa.BufferReader(body), "zstd").read(most + 1)
            whole = True
    except (zlib.error, OSError, pa.ArrowException) as error:
        raise Problem("malformed", f"Content-Encoding: {encoding}: the body cannot be unpacked: {error}") from error
    if not whole:
        raise Problem("malformed", f"Content-Encoding: {encoding}: the body ends before its data does")
    if len(found) > most:
        raise Problem("too_large", f"the body has more than {most:,} bytes when it is unpacked")
    return bytes(found)


def rows_in(body: bytes, kind: str, schema: pa.Schema | None, limits: BodyLimits) -> pa.RecordBatch:
    """Return the rows of an unpacked body. ``schema`` None: the columns are those of the body. Problem: a row does not fit."""
    _check_count(body, kind, limits)
    try:
        return _rows_in(body, kind, schema, limits)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Problem("malformed", f"the body cannot be read: {error}") from error


def _rows_in(body: bytes, kind: str, schema: pa.Schema | None, limits: BodyLimits) -> pa.RecordBatch:
    if kind == "arrow":
        table = _arrow(body, limits)
    elif kind == "csv":
        table = _csv(body, limits)
    else:
        lines = json_lines(body) if kind == "array" else body
        if schema is None:
            table = _inferred(lines, limits)
        else:
            _check_values(lines, len(schema), limits)
            table = _lines(lines, schema)
    if schema is None:
        schema = own_columns(table.schema)
    if table.num_rows > limits.rows:
        raise Problem("too_large", f"the body has {table.num_rows:,} rows, more than {limits.rows:,}")
    if table.num_rows == 0:
        raise Problem("malformed", "the body has no rows")
    _check_bytes(table, schema, limits)
    return fitted(table, schema)


#: Values of a row, of a JSON array, that are looked at before it is known to be too large.
_VALUES_A_ROW = 16


def _check_count(body: bytes, kind: str, limits: BodyLimits) -> None:
    """Raise a Problem if a body may have too many rows: an empty row takes two bytes in a body, and a hundred in memory."""
    if kind == "csv":
        too_many = body.count(b"\n") + body.count(b"\r") > 2 * limits.rows
    elif kind == "arrow":
        return
    else:
        too_many = (
            body.count(b"{") > limits.rows
            or (kind == "lines" and body.count(b"\n") > 2 * limits.rows)
            or (kind == "array" and body.count(b",") > _VALUES_A_ROW * limits.rows)
        )
    if too_many:
        raise Problem("too_large", f"the body has more than {limits.rows:,} rows, or values that take as much memory")


#: Bytes that each value counts for before it is read: the reader spends as much time on a missing value as on a number, and a
#: body of 600 KB may have 200,000,000 missing values.
_LEAST_BYTES = 4


def _check_values(lines: bytes, columns: int, limits: BodyLimits) -> None:
    """Raise a Problem if lines of JSON have too many values, the missing ones included. Counts rows only if there may be
    enough of them: a text may have braces, too."""
    if lines.count(b"{") * columns * _LEAST_BYTES > limits.stored_bytes:
        try:
            rows = _parsed(lines, pa.schema([]), "ignore").num_rows
        except pa.ArrowException:
            return  # the reader of all columns stops there, too, and says more
        _check_size(rows * columns * _LEAST_BYTES, limits)


def _check_size(nbytes: int, limits: BodyLimits) -> None:
    if nbytes > limits.stored_bytes:
        raise Problem("too_large", f"the rows take {nbytes:,} bytes, more than {limits.stored_bytes:,}")


def json_lines(body: bytes) -> bytes:
    """Return a JSON array of objects, or one object, with each object on a line of its own."""
    try:
        packed = msgspec.json.format(body, indent=-1)
        objects = msgspec.json.decode(packed, type=list[msgspec.Raw]) if packed[:1] == b"[" else [packed]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Problem("malformed", f"the body is no JSON: {error}") from error
    return b"\n".join(bytes(each) for each in objects)


#: A type that the reader of JSON takes from text only if it is read as text first.
_FROM_TEXT = (pa.date32(),)


def _lines(lines: bytes, schema: pa.Schema) -> pa.Table:
    """Read lines of JSON with known columns."""
    if not lines.strip():
        raise Problem("malformed", "the body has no rows")
    as_read = pa.schema(
        [pa.field(field.name, pa.string() if field.type in _FROM_TEXT else field.type) for field in schema]
    )
    try:
        return read_lines(lines, as_read)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise misfits.of_lines(lines, as_read, read_lines, str(error)) from error


def read_lines(lines: bytes, schema: pa.Schema | None) -> pa.Table:
    """Read lines of JSON. pa.ArrowInvalid: a row is broken, or ``null``."""
    if has_null_row(lines):
        raise pa.ArrowInvalid("a row is null, and an object is expected in each line")
    return _parsed(lines, schema, "error" if schema is not None else "infer")


def _parsed(lines: bytes, schema: pa.Schema | None, unexpected: str) -> pa.Table:
    options = arrow_json.ReadOptions(use_threads=False, block_size=len(lines) + 64)
    parse = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    return arrow_json.read_json(pa.BufferReader(lines), read_options=options, parse_options=parse)


def _check_bytes(table: pa.Table, schema: pa.Schema, limits: BodyLimits) -> None:
    """Raise a Problem if rows would take too much memory as they are stored."""
    widths = (field.type.bit_width // 8 if pa.types.is_primitive(field.type) else 4 for field in schema)
    nbytes = table.num_rows * sum(widths)
    nbytes += sum(text_bytes(chunk) for column in table.columns for chunk in column.chunks)
    _check_size(nbytes, limits)


def text_bytes(array: pa.Array) -> int:
    """Return the bytes of values that share memory, or take none, once each has its own. Problem: they cannot be told."""
    type_ = array.type
    if isinstance(array, pa.ExtensionArray):
        return text_bytes(array.storage)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        values = array.flatten()
        return 8 * len(values) + text_bytes(values)
    if pa.types.is_dictionary(type_):
        if _is_text(type_.value_type):
            return pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0
        if pa.types.is_primitive(type_.value_type):
            return 0
    elif type_ in (pa.string_view(), pa.binary_view()):
        if len(array) == 0:
            return 0
        sizes = np.frombuffer(array.buffers()[1], np.int32)[4 * array.offset :: 4][: len(array)]
        valid = array.is_valid().to_numpy(zero_copy_only=False)  # the size of a missing value may be any number
        return int(sizes.astype(np.int64)[valid].sum())
    elif not str(type_).startswith(("list_view", "large_list_view", "run_end_encoded")):
        return 0
    raise Problem("malformed", f"a column has type {str(type_)[:100]}; send plain columns")


def _is_text(type_: pa.DataType) -> bool:
    return any(
        is_(type_)
        for is_ in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


def _inferred(lines: bytes, limits: BodyLimits) -> pa.Table:
    """Read lines of JSON whose columns are not known yet."""
    names: set[str] = set()
    rows = 0
    try:
        # The first request of a stream only: bounds depth and names, which the reader of lines does not.
        for line in lines.split(b"\n"):
            if line.strip():
                rows += 1
                found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
                names.update(found)
                if len(names) > limits.columns:
                    raise Problem("too_large", f"the events have more than {limits.columns:,} columns")
                _check_no_object(found)
        _check_size(rows * len(names) * _LEAST_BYTES, limits)
        return read_lines(lines, None)
    except (msgspec.MsgspecError, RecursionError, pa.ArrowException, UnicodeDecodeError) as error:
        raise Problem("malformed", f"the columns of the events cannot be told from the body: {error}") from error


def _check_no_object(row: dict[str, msgspec.Raw]) -> None:
    """Raise a Problem if a value of a row has an object, whose names would be columns too."""
    for name, raw in row.items():
        value = msgspec.json.decode(raw)
        if isinstance(value, dict) or (b"{" in bytes(raw) and _has_object(value)):
            raise Problem(
                "unfit_row", f"column {name[:100]!r}: expected a value or an array, got an object", column=name[:100]
            )


def _has_object(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_object, value)))


def own_columns(found: pa.Schema) -> pa.Schema:
    """Return the columns of a stream whose first events have these."""
    return pa.schema([pa.field(field.name, _own_type(field.type)) for field in found])


def _own_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_null(type_):
        return pa.string()
    if pa.types.is_timestamp(type_):
        return pa.timestamp("us", "UTC")
    if pa.types.is_list(type_):
        return pa.list_(_own_type(type_.value_type))
    return pa.string() if pa.types.is_large_string(type_) else type_


#: The bytes in which a header ends; one that does not has too many columns, or is refused for a field of more than 128 KiB.
_HEADER_BYTES = 1 << 20


def _csv(body: bytes, limits: BodyLimits) -> pa.Table:
    """Read CSV with a header. All columns are text; ``fitted`` makes values of them. An empty field is no value."""
    piece = io.StringIO(body[:_HEADER_BYTES].decode(errors="replace"), newline="")
    try:
        head = next((row for row in text_csv.reader(piece) if row), [])
    except text_csv.Error as error:
        raise Problem("malformed", f"the body is no CSV with a header: {error}") from error
    if len(head) > limits.columns:
        raise Problem("too_large", f"the header has more than {limits.columns:,} columns")
    try:
        names = csv.read_csv(
            pa.BufferReader(body), csv.ReadOptions(use_threads=False, block_size=len(body) + 64)
        ).schema.names
        return csv.read_csv(
            pa.BufferReader(body),
            csv.ReadOptions(use_threads=False, block_size=len(body) + 64),
            csv.ParseOptions(newlines_in_values=True),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""],
                quoted_strings_can_be_null=False,
            ),
        )  # fmt: skip
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Problem("malformed", f"the body is no CSV with a header: {error}") from error


def _arrow(body: bytes, limits: BodyLimits) -> pa.Table:
    """Read a stream of Arrow IPC whose buffers are not packed."""
    batches, rows = [], 0
    try:
        for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(body)):
            if is_packed(message.metadata):
                raise Problem(
                    "unknown_content",
                    "the buffers of the Arrow stream are packed; send Content-Encoding: zstd in place of it",
                )
        with pa.ipc.open_stream(pa.BufferReader(body)) as reader:
            schema = reader.schema
            for batch in reader:
                rows += batch.num_rows
                if rows > limits.rows:
                    raise Problem("too_large", f"the body has more than {limits.rows:,} rows")
                batch.validate(full=True)
                batches.append(batch)
        return pa.Table.from_batches(batches, schema=schema)
    except (pa.ArrowException, OSError, ValueError, struct.error, IndexError) as error:
        raise Problem("malformed", f"the body is no stream of Arrow IPC: {error}") from error


#: Positions of fields in the tables of Arrow's messages: header type and header; compression of a record batch; its place in a
#: dictionary batch.
_HEADER_TYPE, _HEADER, _COMPRESSION, _OF_DICTIONARY = 1, 2, 3, 1
_IS_DICTIONARY, _IS_BATCH = 2, 3


def is_packed(metadata: pa.Buffer) -> bool:
    """Return whether the buffers of a message are packed, by its flatbuffer. struct.error: it is broken."""
    data = memoryview(metadata)
    message = struct.unpack_from("<I", data, 0)[0]
    of_type = _field(data, message, _HEADER_TYPE)
    kind = data[of_type] if of_type else 0
    at = _field(data, message, _HEADER)
    if kind not in (_IS_DICTIONARY, _IS_BATCH) or not at:
        return False
    table = _followed(data, at)
    if kind == _IS_DICTIONARY:
        inner = _field(data, table, _OF_DICTIONARY)
        if not inner:
            return False
        table = _followed(data, inner)
    return _field(data, table, _COMPRESSION) != 0


def _followed(data: memoryview, at: int) -> int:
    offset: int = struct.unpack_from("<I", data, at)[0]
    return at + offset


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the place of a field of a table; 0: it is not there."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise struct.error("a table of the message is broken")
    size = struct.unpack_from("<H", data, vtable)[0]
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + at)[0] if at + 2 <= size else 0
    return table + offset if offset else 0


#: Seconds by which the time of an event may be ahead of the gateway's clock. One event of the year 9999 would bring the watermark
#: there, and all events behind it would be late.
AHEAD_S = 86_400


def check_times(batch: pa.RecordBatch, column: str, now_s: float) -> None:
    """Raise a Problem if the time of an event is more than ``AHEAD_S`` ahead of the clock, in seconds since the epoch."""
    ahead = pc.greater(batch.column(column).cast(pa.int64()), int((now_s + AHEAD_S) * 1_000_000))
    row = int(pc.index(ahead, True).as_py())
    if row >= 0:
        said = f"row {row + 1}, column {column!r}: expected a time at most a day ahead of the gateway's clock"
        raise Problem("unfit_row", f"{said}, got {batch.column(column)[row]}", row + 1, column)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with the columns of a stream, in its order and types. Columns that are missing have no value. Problem: a column
    is not known, or a value does not fit."""
    misfits.check_names(table.schema.names, schema)
    columns = []
    for field in schema:
        found = table.schema.get_field_index(field.name)
        if found < 0:
            column = pa.nulls(table.num_rows, field.type)
        else:
            column = _cast(table.column(found).combine_chunks(), field)
        if not field.nullable and column.null_count:
            row = int(pc.index(column.is_null(), True).as_py())
            raise Problem("unfit_row", f"row {row + 1}, column {field.name!r}: a value is missing", row + 1, field.name)
        columns.append(column)
    made = pa.RecordBatch.from_arrays(columns, schema=schema)
    try:
        made.validate(full=True)
    except pa.ArrowException as error:
        raise Problem("malformed", f"a text in the body is no UTF-8: {error}") from error
    return made


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, field.type)
    if column.type == field.type:
        return column
    try:
        return pc.cast(column, field.type, safe=True)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise misfits.of_cast(column, field, str(error)) from error
