"""Formats of the values of records: JSON or CSV, to columns of a schema, all rows of a batch at once (Avro: ``avro_decode``).

Law: row i of the result is value i, by itself. A value that does not fit is found and reported (``Bad``); the values around
it are read as if it were not there. A null value (a tombstone) and an empty one are a row of nulls.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json

from flux.connectors.kafka.records import kernels
from flux.errors import UsageError
from flux.operators.schema import parse_ddl
from partitioning.columns import raw_bytes

#: Number of digits that fit each integer type, whichever digits they are.
_DIGITS = {pa.int64(): 18, pa.int32(): 9}
_CAST = {
    pa.int8(), pa.int16(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float32(), pa.float64(),
}  # fmt: skip
_TEXT = {pa.string(), pa.binary()}
#: Texts that pyarrow's reader takes for booleans: four for true, and four for false.
_BOOLEANS = pa.array(["1", "True", "TRUE", "true", "0", "False", "FALSE", "false"])


class Fields:
    """Reader of rows with columns of ``schema``, whose fields are separated by ``delimiter``, one character of ASCII.

    The columns are numbers, text, bytes and booleans. pyarrow's reader of CSV starts a thread for each text, which takes
    longer than reading a few rows. Law: the result is that of pyarrow's reader. Text that is not understood here, or does
    not fit, is left to that reader, and so is every error."""

    def __init__(self, schema: pa.Schema, delimiter: str) -> None:
        self._schema = pa.schema([field.with_nullable(True) for field in schema])
        self._types: list[pa.DataType] = self._schema.types
        self._delimiter = ord(delimiter)

    @staticmethod
    def know(schema: pa.Schema) -> bool:
        """Tell whether all columns are of types that are read here."""
        return all(
            type_ in _DIGITS or type_ in _CAST or type_ in _TEXT or type_ == pa.bool_() for type_ in schema.types
        )

    def read(self, text: pa.Buffer, rows: int) -> pa.RecordBatch | None:
        """Read rows from UTF-8 ``text`` with a newline behind each row. None: pyarrow's reader has to read them."""
        columns = len(self._types)
        begins = np.empty((columns, rows), np.int64)
        ends = np.empty((columns, rows + 1), np.int32)
        valid = np.empty((columns, rows), np.bool_)
        nulls = np.zeros(columns, np.int64)
        out = np.empty(text.size, np.uint8)
        if not kernels.csv_fields(text.address, text.size, self._delimiter, begins, ends, valid, nulls, out):
            return None
        data = pa.py_buffer(out)
        made = []
        for i, type_ in enumerate(self._types):
            validity = pa.py_buffer(np.packbits(valid[i], bitorder="little")) if nulls[i] else None
            column = None
            if (digits := _DIGITS.get(type_)) is not None:
                column = _integers(type_, digits, out, ends[i], valid[i], validity)
            if column is None:
                kind = type_ if type_ in _TEXT else pa.string()
                raw = pa.Array.from_buffers(kind, rows, [validity, pa.py_buffer(ends[i]), data])
                column = _converted(raw, type_)
            if column is None:
                return None
            made.append(column)
        return pa.RecordBatch.from_arrays(made, schema=self._schema)


def _integers(
    type_: pa.DataType, digits: int, out: np.ndarray, ends: np.ndarray, valid: np.ndarray, validity: pa.Buffer | None
) -> pa.Array | None:
    """Make a column of integers. None: a number has too many digits, or other characters than digits behind a minus."""
    numbers = np.empty(len(valid), type_.to_pandas_dtype())
    if not kernels.integers(out, ends, valid, digits, numbers):
        return None
    return pa.Array.from_buffers(type_, len(valid), [validity, pa.py_buffer(numbers)])


def _converted(raw: pa.Array, type_: pa.DataType) -> pa.Array | None:
    if raw.type == type_:
        return raw
    if type_ == pa.bool_():
        which = pc.index_in(raw, value_set=_BOOLEANS)
        return None if which.null_count > raw.null_count else pc.less(which, len(_BOOLEANS) // 2)
    try:
        return raw.cast(type_)
    except pa.ArrowInvalid:
        return None


#: Rows from a parser, in one piece or in several.
Rows: TypeAlias = "pa.Table | pa.RecordBatch"

FORMATS = ("raw", "json", "csv")
READ_FORMATS = (*FORMATS, "avro")


class Bad(NamedTuple):
    """Value that does not fit."""

    #: Row of the column that was read.
    row: int
    #: Reason, for people.
    why: str


class Parsed(NamedTuple):
    """Result of parsing a column of values."""

    #: Rows of the values that fit.
    rows: pa.RecordBatch
    #: Row numbers of these values in the column, None for all.
    kept: np.ndarray | None
    #: All other values, or only the first of them.
    bad: list[Bad]


class Format:
    """Parser of values into columns of ``schema``."""

    #: ``parse`` may wait for another process, as for a registry.
    waits = False
    #: Text that is parsed instead of a value that is null or empty.
    _instead = b""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._nullable = pa.schema([field.with_nullable(True) for field in schema])
        self._never_null = [i for i, field in enumerate(schema) if not field.nullable]

    def parse(self, values: pa.Array, find_all: bool) -> Parsed:
        """Parse ``values``, a binary column. With ``find_all`` every bad value is found; otherwise the first is enough."""
        shapes = np.empty(len(values), np.int8)
        self._shapes(_view(values), shapes)
        broken = np.flatnonzero(shapes == kernels.BROKEN)
        bad = [Bad(int(row), self._broken) for row in (broken if find_all else broken[:1])]
        rows = np.flatnonzero(shapes != kernels.BROKEN)
        blank = shapes == kernels.BLANK

        def parsed(some: np.ndarray) -> Rows:
            return self._checked(values, some, blank)

        tables = halved(parsed, rows, bad, find_all) if len(rows) else []
        if not bad:
            return Parsed(one_batch(tables, self.schema), None, [])
        bad.sort()
        if not find_all:
            return Parsed(one_batch([], self.schema), np.empty(0, np.int64), bad[:1])
        kept = np.setdiff1d(rows, [each.row for each in bad], assume_unique=True)
        return Parsed(one_batch(tables, self.schema), kept, bad)

    #: Reason why a value is no single row.
    _broken = ""

    def _shapes(self, values: Any, shapes: np.ndarray) -> None:
        raise NotImplementedError

    def _table(self, text: pa.Buffer, rows: int) -> Rows:
        """Parse text with one row in each line; there should be ``rows`` of them. Raises the errors of pyarrow."""
        raise NotImplementedError

    def _checked(self, values: pa.Array, some: np.ndarray, blank: np.ndarray) -> Rows:
        instead = np.frombuffer(self._instead, np.uint8)
        # Views and slices share their bytes, so ``nbytes`` alone gives the size of these values.
        size = values.nbytes + (len(instead) + 1) * len(some)
        out = np.empty(size, np.uint8)
        text = pa.py_buffer(out[: kernels.join(_view(values), some, instead, blank, out)])
        _check_text(text)
        table = self._table(text, len(some))
        if table.num_rows != len(some):
            raise pa.ArrowInvalid("it is not exactly one row")
        for i in self._never_null:
            if table.column(i).null_count:
                raise pa.ArrowInvalid(f"column {self.schema.names[i]} is null, and its schema says NOT NULL")
        return table


class Json(Format):
    """The format ``json``: one object in each value. Fields without a column are left out; columns without a field are null.

    A parser of lines sees all values as one text. Before it does, a kernel checks that brackets and quotes are closed
    within each value; otherwise two bad records could make a good row together."""

    _instead = b"{}"
    _broken = f"it is not one JSON object with at most {kernels.DEPTH_MAX} brackets inside each other"

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema)
        # pyarrow takes dates in JSON for numbers; people write them as text.
        fields = [field.with_type(pa.string()) if pa.types.is_date(field.type) else field for field in schema]
        self._read_as = pa.schema([field.with_nullable(True) for field in fields])
        for field in self._read_as:
            if unfit := _unfit(field.type):
                raise UsageError(
                    f"format='json' cannot read column {field.name!r}: {unfit}. Declare it as STRING, or leave it out and "
                    "parse the value in a stage"
                )

    def _shapes(self, values: Any, shapes: np.ndarray) -> None:
        kernels.objects(values, shapes)

    def _table(self, text: pa.Buffer, rows: int) -> Rows:
        # This is the streaming reader: the other one starts a thread each time, which takes longer than parsing a few rows.
        reader = arrow_json.open_json(
            pa.BufferReader(text),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=text.size + 1),
            parse_options=arrow_json.ParseOptions(explicit_schema=self._read_as, unexpected_field_behavior="ignore"),
        )
        table = reader.read_all()
        return table if table.schema == self._nullable else table.cast(self._nullable)

    def __repr__(self) -> str:
        return "json"


class Csv(Format):
    """The format ``csv``: one row in each value, without a header. Empty fields are null; fields may be in double quotes."""

    _broken = "it is not one row of CSV: a quote does not end, or there is a line break outside of quotes"

    def __init__(self, schema: pa.Schema, delimiter: str = ",") -> None:
        super().__init__(schema)
        if len(delimiter.encode()) != 1 or delimiter in '"\r\n':
            raise UsageError(f"the delimiter of CSV must be one character of ASCII, and no quote; got {delimiter!r}")
        for field in schema:
            if pa.types.is_nested(field.type):
                raise UsageError(f"format='csv' cannot read column {field.name!r} of type {field.type}")
        self._delimiter = delimiter
        self._instead = delimiter.encode() * (len(schema) - 1)
        self._flat = Fields(schema, delimiter) if Fields.know(schema) else None

    def _shapes(self, values: Any, shapes: np.ndarray) -> None:
        kernels.lines(values, ord(self._delimiter), shapes)

    def _table(self, text: pa.Buffer, rows: int) -> Rows:
        flat = None if self._flat is None else self._flat.read(text, rows)
        return self._read(text) if flat is None else flat

    def _read(self, text: pa.Buffer) -> pa.Table:
        if text.slice(0, min(text.size, len(BOM_UTF8))).to_pybytes() == BOM_UTF8:
            text = pa.py_buffer(BOM_UTF8 + text.to_pybytes())  # pyarrow drops one, and only that of the first value
        fields = {field.name: field.type for field in self.schema}
        return arrow_csv.read_csv(
            pa.BufferReader(text),
            read_options=arrow_csv.ReadOptions(use_threads=False, block_size=text.size + 1, column_names=list(fields)),
            parse_options=arrow_csv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=True, ignore_empty_lines=False
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=fields, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
            ),
        )

    def __repr__(self) -> str:
        return "csv"


def format_of(name: str | None, schema: Any, schemas: Any = None) -> Format | None:
    """Make a format by its name; None keeps values as they are. ``schemas`` has the schemas of writers, for Avro. UsageError:
    arguments that do not go together."""
    if schemas is not None and name != "avro":
        raise UsageError("schemas says where the schemas of Avro are: it needs format='avro'")
    if name is None or name == "raw":
        if schema is not None:
            raise UsageError(
                "schema says what format='json', 'csv' or 'avro' reads; without a format the columns are Kafka's"
            )
        return None
    if name not in READ_FORMATS:
        raise UsageError(f"format must be one of {', '.join(READ_FORMATS)}; got {name!r}")
    if schema is None and name == "avro":
        raise UsageError("format='avro' needs a schema in Avro's JSON, which says the columns, also with schemas=")
    if name == "avro":
        from flux.connectors.kafka.formats.avro_decode import Avro  # needs a library that others need not have

        return Avro(schema, schemas)
    if schema is None:
        raise UsageError(f"format={name!r} needs a schema, as in schema='user BIGINT, amount DOUBLE'")
    fields = parse_ddl(schema) if isinstance(schema, str) else schema
    if not isinstance(fields, pa.Schema):
        raise UsageError(f"schema must be DDL, or a pyarrow schema; got {type(schema).__name__}")
    twice = sorted({field for field in fields.names if fields.names.count(field) > 1})
    if twice or not len(fields):
        raise UsageError(f"schema names column {twice[0]!r} twice" if twice else "schema names no column")
    return Json(fields) if name == "json" else Csv(fields)


def _unfit(type_: pa.DataType) -> str:
    """Tell why pyarrow cannot read a type as people write it in JSON; "" if it can."""
    if pa.types.is_map(type_):
        return "a map has no fixed fields"
    if pa.types.is_struct(type_):
        return next((unfit for field in type_ if (unfit := _unfit(field.type))), "")
    if pa.types.is_list(type_):
        return _unfit(type_.value_type)
    if pa.types.is_binary(type_):
        return "JSON has no binary values"
    if pa.types.is_date(type_):
        return "a date inside another column"
    return ""


def halved(parsed: Callable[[np.ndarray], Rows], rows: np.ndarray, bad: list[Bad], find_all: bool) -> list[Rows]:
    """Return the tables of rows that can be parsed. A part that cannot be parsed is halved until the bad row is found."""
    try:
        return [parsed(rows)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        if len(rows) == 1:
            bad.append(Bad(int(rows[0]), str(error).split("\n")[0]))
            return []
    half = len(rows) // 2
    found = len(bad)
    tables = halved(parsed, rows[:half], bad, find_all)
    if not find_all and len(bad) > found:
        return []
    return tables + halved(parsed, rows[half:], bad, find_all)


def one_batch(tables: list[Rows], schema: pa.Schema) -> pa.RecordBatch:
    if not tables:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    if len(tables) == 1 and isinstance(tables[0], pa.RecordBatch):
        return pa.RecordBatch.from_arrays(tables[0].columns, schema=schema)
    table = pa.concat_tables(map(_table_of, tables)).combine_chunks()
    columns = [column.chunk(0) if column.num_chunks else pa.array([], column.type) for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _table_of(rows: Rows) -> pa.Table:
    return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows


def _check_text(text: pa.Buffer) -> None:
    """Raise an error for text that is not UTF-8: pyarrow's parser of JSON takes any bytes for text, and later steps would fail
    on them."""
    if kernels.ascii_alone(text.address, text.size):
        return
    ends = np.array([0, text.size], np.int64)
    whole = pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(ends), text])
    try:
        whole.cast(pa.large_string())
    except pa.ArrowInvalid:
        raise pa.ArrowInvalid("it is not UTF-8") from None


def _view(values: pa.Array) -> Any:
    """Return the addresses of a column, as kernels take them. The caller keeps ``values`` alive until the kernel is through."""
    column = raw_bytes(values)
    return column.offsets, column.data, column.validity, column.first
