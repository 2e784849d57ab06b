"""Rows of CSV whose columns are numbers, text, bytes and booleans, to columns without pyarrow's reader of CSV.

That reader starts a thread for each text, which takes longer than reading a few rows. Law: the result is that of pyarrow's
reader. Text that is not understood here, or does not fit, is left to that reader, and so is every error.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.kafka import kernels

#: Number of digits that fit each integer type, whichever digits they are.
_DIGITS = {pa.int64(): 18, pa.int32(): 9}
_CAST = {
    pa.int8(), pa.int16(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float32(), pa.float64(),
}  # fmt: skip
_TEXT = {pa.string(), pa.binary()}
#: Texts that pyarrow's reader takes for booleans: four for true, and four for false.
_BOOLEANS = pa.array(["1", "True", "TRUE", "true", "0", "False", "FALSE", "false"])


class Fields:
    """Reader of rows with columns of ``schema``, whose fields are separated by ``delimiter``, one character of ASCII."""

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
