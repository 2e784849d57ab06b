"""Formats of files in a folder: parquet, CSV and JSON, to batches of a schema.

Law: the rows of a file come in the order of the file, the same whenever it is read; batches may begin and end anywhere. A column
of the schema that a file does not have is null, a column that only the file has is left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json
import pyarrow.parquet as pq
from pyarrow import fs

from flux.connectors.files.errors import BadFile, gone
from flux.connectors.files.text_streams import CsvText, JsonText
from flux.errors import UsageError
from flux.operators.plain_columns import cast_exactly

#: Rows of a batch from a parquet file, and bytes of a text that are parsed at once. A line must be shorter than BLOCK_BYTES.
ROWS, BLOCK_BYTES = 131_072, 8 << 20


@dataclass(frozen=True)
class FileFormat:
    """Base of formats of files."""

    #: Schema of the rows that are read.
    schema: pa.Schema
    #: Whether a column is found by its exact name only.
    case_sensitive: bool = False

    def lacks(self, files: fs.FileSystem, path: str) -> str:
        """Return the reason why a file does not end where its writer wanted it to, as far as a file can tell; "" if it does."""
        return ""

    def read(self, files: fs.FileSystem, path: str, skip: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file without the first ``skip``. Raises BadFile or FileGone with the name of the file."""
        at = 0
        try:
            at = self._first(files, path, skip) if skip else 0
            for batch in self._batches(files, path, at):
                left = max(skip - at, 0)
                if left < batch.num_rows:
                    yield self._conformed(batch.slice(left))
                at += batch.num_rows
        except FileNotFoundError as error:
            raise gone(path) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            bad = BadFile(
                f"{path}: cannot be read behind row {at}: {_line(error)}. Mend the file or the schema; the query goes on with "
                "the same checkpointLocation. A mended file has changed since it was found, which onChanged='ignore' allows. Or "
                "start the query again with ignoreCorruptFiles=True, which leaves out the rest of the file"
            )
            bad.defect = _line(error)
            raise bad from error

    def _first(self, files: fs.FileSystem, path: str, skip: int) -> int:
        """Return the number of the row with which ``_batches`` begins, at most ``skip``."""
        return 0

    def _batches(self, files: fs.FileSystem, path: str, first: int) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def _conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.schema.equals(self.schema):
            return batch
        there = self._found(batch.schema.names)
        columns = []
        for field in self.schema:
            name = there.get(field.name)
            column = pa.nulls(batch.num_rows, field.type) if name is None else batch.column(name)
            if column.type != field.type:
                try:
                    column = cast_exactly(column, field.type, self._found_names)
                except ValueError as error:
                    raise ValueError(f"column {field.name} is {column.type}, not {field.type}: {error}") from error
            if not field.nullable and column.null_count:
                raise ValueError(f"column {field.name} is null, and its schema says NOT NULL")
            columns.append(column)
        return pa.record_batch(columns, schema=self.schema)

    def _found(self, there: Sequence[str]) -> dict[str, str]:
        """Return the name in the file for each name of the schema that a file has."""
        return self._found_names(there, self.schema.names)

    def _found_names(self, there: Sequence[str], wanted: Sequence[str]) -> dict[str, str]:
        return _by_name(there, wanted, self.case_sensitive)


def _line(error: Exception) -> str:
    """Return the text of an error as one line, without a full stop: the message goes on behind it."""
    if "straddling object" in str(error):  # pyarrow advises another size of blocks, which is no option here
        return f"a row is longer than {BLOCK_BYTES:,} bytes"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _by_name(there: Sequence[str], wanted: Sequence[str], case_sensitive: bool) -> dict[str, str]:
    """Find columns as Spark does: by exact name, or regardless of case if there is no such name."""
    found = {name: name for name in wanted if name in there}
    if case_sensitive:
        return found
    lower: dict[str, list[str]] = {}
    for name in there:
        lower.setdefault(name.lower(), []).append(name)
    for name in wanted:
        same = lower.get(name.lower(), [])
        if name not in found and len(same) > 1:
            raise ValueError(f"column {name} is there several times but for case: {', '.join(same)}")
        if name not in found and same:
            found[name] = same[0]
    return found


@dataclass(frozen=True)
class ParquetFormat(FileFormat):
    """The format of parquet files. A file is complete when its footer is there, which is written last."""

    def lacks(self, files: fs.FileSystem, path: str) -> str:
        try:
            with files.open_input_file(path) as file:
                size = file.size()
                if size < 12 or file.read_at(4, size - 4) != b"PAR1":
                    return "it has no footer of a parquet file"
                pq.read_metadata(file)
                return ""
        except (pa.ArrowException, OSError) as error:
            return f"its footer cannot be read: {_line(error)}"

    def schema_of(self, files: fs.FileSystem, path: str) -> pa.Schema:
        """Return the columns of a file, with INT96 as instants, as Spark takes them."""
        with self._open(files, path) as file:
            physical = iter([file.schema.column(i).physical_type for i in range(len(file.schema.names))])
            return pa.schema([_instants(field, physical) for field in file.schema_arrow])

    def _first(self, files: fs.FileSystem, path: str, skip: int) -> int:
        """Return the first row of the row group that contains row ``skip``."""
        with self._open(files, path) as file:
            return _group(file.metadata, skip)[1]

    def _batches(self, files: fs.FileSystem, path: str, first: int) -> Iterator[pa.RecordBatch]:
        with self._open(files, path) as file:
            names = self._found(file.schema_arrow.names)
            if not names and len(self.schema):
                raise ValueError(f"it has none of the columns {', '.join(self.schema.names)}")
            group = _group(file.metadata, first)[0]
            groups = list(range(group, file.metadata.num_row_groups))
            if groups:
                yield from file.iter_batches(ROWS, row_groups=groups, columns=list(names.values()), use_threads=False)

    def _open(self, files: fs.FileSystem, path: str) -> Any:
        # Spark writes timestamps as INT96 by default, and the nanoseconds that pyarrow makes of them end in 2262.
        return pq.ParquetFile(files.open_input_file(path), coerce_int96_timestamp_unit="us")


def _instants(field: pa.Field, physical: Iterator[str]) -> pa.Field:
    """Return the field with its INT96 as instants. ``physical`` yields the types of the columns of a file, from the first of the
    field on; those of the field are consumed."""
    kind = field.type
    if pa.types.is_dictionary(kind) or not pa.types.is_nested(kind):
        is_int96 = next(physical) == "INT96"
        return field.with_type(pa.timestamp("us", "UTC")) if is_int96 else field
    is_map = pa.types.is_map(kind)
    children = [kind.key_field, kind.item_field] if is_map else [kind.field(i) for i in range(kind.num_fields)]
    inside = [_instants(child, physical) for child in children]
    if inside == children:
        return field
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct(inside))
    if is_map:
        return field.with_type(pa.map_(inside[0], inside[1]))
    return field.with_type(pa.large_list(inside[0]) if pa.types.is_large_list(kind) else pa.list_(inside[0]))


def _group(metadata: Any, row: int) -> tuple[int, int]:
    """Return the last row group that begins at the row or before, and its first row."""
    group, first = 0, 0
    while group < metadata.num_row_groups and first + metadata.row_group(group).num_rows <= row:
        first += metadata.row_group(group).num_rows
        group += 1
    return group, first


@dataclass(frozen=True)
class CsvFormat(FileFormat):
    """The format of CSV files. ``header``: whether the first line of a file has the names of its columns; otherwise they are
    those of the schema, in its order."""

    header: bool = False
    sep: str = ","
    quote: str = '"'
    escape: str = ""
    null: str = ""
    encoding: str = "utf-8"
    multi_line: bool = False

    def _batches(self, files: fs.FileSystem, path: str, first: int) -> Iterator[pa.RecordBatch]:
        read = arrow_csv.ReadOptions(
            use_threads=False, block_size=BLOCK_BYTES,
            column_names=None if self.header else self.schema.names,
        )  # fmt: skip
        parse = arrow_csv.ParseOptions(
            delimiter=self.sep, quote_char=self.quote or False, double_quote=True, escape_char=self.escape or False,
            newlines_in_values=self.multi_line,
        )  # fmt: skip
        header = self._header(files, path) if self.header else []
        if self.header and not header:
            return
        found = self._found(header)
        names = [found.get(name, name) for name in self.schema.names]
        convert = arrow_csv.ConvertOptions(
            column_types=dict(zip(names, self.schema.types, strict=True)), null_values=[self.null], strings_can_be_null=True,
            quoted_strings_can_be_null=False, include_columns=names, include_missing_columns=True,
            true_values=["true", "True", "TRUE"], false_values=["false", "False", "FALSE"],
        )  # fmt: skip
        with files.open_input_stream(path) as stream:
            text = CsvText(stream, self.encoding)
            if text.is_empty:
                return
            for batch in arrow_csv.open_csv(text, read_options=read, parse_options=parse, convert_options=convert):
                yield batch.rename_columns(self.schema.names)

    def _header(self, files: fs.FileSystem, path: str) -> list[str]:
        """Return the names of the columns of a file. pyarrow would give them with the types that it guesses from the rows."""
        encoding = "utf-8-sig" if self.encoding.lower() in ("utf-8", "utf8") else self.encoding
        how: dict[str, Any] = {"delimiter": self.sep, "escapechar": self.escape or None, "doublequote": True}
        how |= {"quotechar": self.quote} if self.quote else {"quoting": csv.QUOTE_NONE}
        with files.open_input_stream(path) as stream, io.TextIOWrapper(stream, encoding=encoding, newline="") as text:
            try:
                return next((line for line in csv.reader(text, **how) if line), [])
            except csv.Error as error:
                raise ValueError(f"its header: {error}") from error


@dataclass(frozen=True)
class JsonFormat(FileFormat):
    """The format of files with one JSON object in each line. Fields that the schema does not name are left out, missing fields
    are null. Names are exact, as in Spark, where the session does not change that for JSON."""

    def _batches(self, files: fs.FileSystem, path: str, first: int) -> Iterator[pa.RecordBatch]:
        # pyarrow takes dates in JSON for numbers; programs write them as text.
        fields = [field.with_type(pa.string()) if pa.types.is_date(field.type) else field for field in self.schema]
        parse = arrow_json.ParseOptions(
            explicit_schema=pa.schema([field.with_nullable(True) for field in fields]),
            unexpected_field_behavior="ignore",
        )
        read = arrow_json.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
        with files.open_input_stream(path) as stream:
            text = JsonText(stream)
            if text.is_empty:
                return
            for batch in arrow_json.open_json(text, read_options=read, parse_options=parse):
                batch.validate(full=True)  # the parser takes any bytes for text
                yield batch


def check_flat(schema: pa.Schema) -> None:
    for field in schema:
        if pa.types.is_nested(field.type):
            raise UsageError(f"a CSV file cannot hold column {field.name} of type {field.type}; JSON or parquet can")


def check_json(schema: pa.Schema) -> None:
    for field in schema:
        if unfit := _unfit(field.type, False):
            raise UsageError(
                f"a JSON file cannot hold column {field.name} of type {field.type}: {unfit}. Declare it as STRING"
            )


def _unfit(type_: pa.DataType, inside: bool) -> str:
    """Return the reason why pyarrow cannot read a type in its usual JSON form; "" if it can."""
    if pa.types.is_map(type_):
        return "a map has no fixed fields"
    if pa.types.is_binary(type_):
        return "JSON has no binary values"
    if pa.types.is_date(type_) and inside:
        return "a date inside another column"
    children = [type_.field(i).type for i in range(type_.num_fields)] if pa.types.is_nested(type_) else []
    return next((unfit for child in children if (unfit := _unfit(child, True))), "")
