"""Records of Avro without types inside each other, to columns without an object for any of them.

Law: the result is that of the library (``avro``), row by row. Schemas that are not understood here are left to the library.
Compiled loops check each number and length before they use it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.kafka import kernels
from partitioning.columns import raw_bytes

_KINDS = {
    "null": kernels.AVRO_NULL, "boolean": kernels.AVRO_BOOLEAN, "int": kernels.AVRO_INT, "long": kernels.AVRO_LONG,
    "float": kernels.AVRO_FLOAT, "double": kernels.AVRO_DOUBLE, "bytes": kernels.AVRO_BYTES, "string": kernels.AVRO_BYTES,
    "fixed": kernels.AVRO_FIXED, "enum": kernels.AVRO_ENUM,
}  # fmt: skip


class Field(NamedTuple):
    """Field of a flat record."""

    #: Name of the Avro type.
    name: str
    #: Bytes of a fixed type, or the number of symbols of an enum.
    size: int = 0
    #: Branch of null in a union of two, -1 without a union.
    null: int = -1
    #: Symbols of an enum.
    symbols: tuple[str, ...] = ()


class Program(NamedTuple):
    """Instructions for the kernel: how values of a writer's schema become columns. One entry a field of the writer."""

    #: Kinds of the fields.
    kinds: np.ndarray
    #: Branches of null, -1 without a union.
    nulls: np.ndarray
    #: Bytes of fixed types, numbers of symbols of enums.
    sizes: np.ndarray
    #: Number of the column that a field goes to, -1 for none.
    to: np.ndarray


def fields_of(schema: Any) -> dict[str, Field] | None:
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


def _field(type_: Any) -> Field | None:
    if isinstance(type_, list):
        if len(type_) != 2 or type_.count("null") != 1:
            return None
        field = _field(type_[1 - type_.index("null")])
        return None if field is None or field.null >= 0 else field._replace(null=type_.index("null"))
    name = type_["type"] if isinstance(type_, dict) else type_
    if not isinstance(name, str) or name not in _KINDS or (isinstance(type_, dict) and "logicalType" in type_):
        return None  # a decimal, or the name of a type that was defined before
    if name == "fixed":
        return Field(name, type_["size"])
    return Field(name, len(type_["symbols"]), symbols=tuple(type_["symbols"])) if name == "enum" else Field(name)


def program(writer: Any, reader: Any) -> Program | None:
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
    return Program(
        np.array([_KINDS[field.name] for field in written.values()], np.int64),
        np.array([field.null for field in written.values()], np.int64),
        np.array([field.size for field in written.values()], np.int64),
        np.array([columns.index(name) if name in wanted else -1 for name in written], np.int64),
    )


class Rows:
    """Rows of a column of values: numbers, or places in ``values``, that have been read for each field. ``good`` marks the
    rows that were read well."""

    def __init__(self, values: pa.Array, reader: Any) -> None:
        fields = fields_of(reader)
        assert fields is not None, "there is a program for it"
        self._fields = list(fields.values())
        self._values = raw_bytes(values)
        self._numbers = np.zeros((len(fields), len(values)), np.int64)
        self._lengths = np.zeros((len(fields), len(values)), np.int64)
        self._valid = np.zeros((len(fields), len(values)), np.bool_)
        self.good = np.zeros(len(values), np.bool_)

    def read(self, rows: np.ndarray, skip: int, how: Program) -> None:
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
