"""Columns to values in Avro, the mirror of ``avro``: all rows of a batch at once, without an object for any of them.

Law: the bytes of a row follow from the row and the schema alone. A value that does not fit its field ends the batch with
``UnfitValue``, which names row and column, before any byte of the batch is written.

The inside of a column is encoded first, as a column of bytes: items of lists one after the other, a record inside as one
piece. A compiled loop then puts the fields of each row together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.kafka import kernels
from flux.kafka.avro_fields import Field
from flux.kafka.errors import UnfitValue
from partitioning.columns import raw_bytes

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
    columns: Sequence[pa.Array], fields: Sequence[Field], rows: int, given: pa.Array | None = None, frame: bytes = b""
) -> pa.Array:
    """Encode rows as a binary column, one record each. ``columns`` has a column for each field that is not missing, in order.
    A row that is null in ``given`` is null in the result. UnfitValue: a value does not fit its field."""
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
    columns: Sequence[pa.Array], fields: Sequence[Field], rows: int, given: pa.Array | None, frame: bytes
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


def _fill(line: np.ndarray, field: Field, made: pa.Array, counts: np.ndarray | None, rows: int) -> int:
    """Fill the line of a field in the kernel's table. Returns the most bytes that all its values can take."""
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


def _made(column: pa.Array, field: Field, given: pa.Array | None) -> tuple[pa.Array, np.ndarray | None]:
    """Return the column that the kernel reads, and for lists the number of items of each. Rows that are null in ``given`` are
    not checked."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    _check_nulls(column, field, given)
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), _STORED.get(field.kind) or field.to), np.zeros(len(column), np.int32)
    if field.avro in ("record", "error"):
        return records(_parts(column, field), field.parts, len(column), column), None
    if field.avro in ("array", "map"):
        return _listed(column, field)
    if field.avro == "enum":
        return _of_symbols(column, field), None
    return _cast(column, field), None


#: Types of the column that the kernel reads, for kinds whose columns do not have the type of the field.
_STORED = {kernels.AVRO_MADE: pa.binary(), kernels.AVRO_LIST: pa.binary()}


def _check_nulls(column: pa.Array, field: Field, given: pa.Array | None) -> None:
    if field.kind == kernels.AVRO_NULL or field.null >= 0 or not column.null_count:
        return
    nulls = pc.is_null(column)
    if given is not None:
        nulls = pc.and_(nulls, given.is_valid())
    found = np.flatnonzero(np.asarray(nulls))
    if len(found):
        raise _Unfit(int(found[0]), f"is null, and its type, {field.avro}, is in no union with null")


def _parts(column: pa.Array, field: Field) -> list[pa.Array]:
    """Return columns for the fields of a struct that are not missing, in order of the fields. They are null where the struct
    is null."""
    names = [each.name for each in column.type]
    found = column.flatten()
    return [found[names.index(each.name)] for each in field.parts if not each.missing]


def _listed(column: pa.Array, field: Field) -> tuple[pa.Array, np.ndarray]:
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


def _of_symbols(column: pa.Array, field: Field) -> pa.Array:
    symbols = pa.array(field.symbols, pa.string())
    column = column.cast(pa.string())
    found = pc.index_in(column, symbols)
    if found.null_count > column.null_count:
        row = int(np.flatnonzero(np.asarray(pc.and_(found.is_null(), column.is_valid())))[0])
        raise _Unfit(row, f"is {_shown(column[row])}, which is no symbol of its enum")
    return found


def _cast(column: pa.Array, field: Field) -> pa.Array:
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


def _converted(column: pa.Array, convert: Callable[[pa.Array], pa.Array], field: Field) -> pa.Array:
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
    raise _Unfit(low, f"is {_shown(column[low])}, which {_said(field)} does not hold")


def _said(field: Field) -> str:
    return f"{field.avro} ({field.to})" if str(field.to) != field.avro else field.avro


def _shown(value: Any) -> str:
    try:
        return f"{value.as_py()!r:.{_SHOWN_MAX}}"
    except (ValueError, OverflowError):  # a time that Python cannot represent
        return f"{value.cast(pa.int64()).as_py()} as {value.type}"
