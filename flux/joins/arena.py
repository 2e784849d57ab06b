"""Growing columns: rows are appended to them batch by batch, and taken out of them by their numbers.

Law: rows have the numbers 0, 1, 2, ... in the order in which they were appended. Taking copies from one Arrow array over the
memory of a column. Appending doubles the memory when it is full, so it costs the rows that come and not those that are there.

A column is made of parts as Arrow's own: bits of validity, values of one width or offsets and bytes, children of structs. Types
that have no such form (lists, maps) are kept as pieces of Arrow, each at least as large as all behind it, so there are few.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as is_

from flux.operators.batches import at_once, text_cuts, text_lengths
from partitioning.columns import fixed_bytes
from partitioning.slot_tables import grown

#: Rows, or bytes, for which a new column has room.
ROOM_MIN = 64
#: Bytes beyond which pieces of a column stay apart.
PIECE_BYTES_MAX = 1 << 28


class GrowingBits:
    """Bits, one for each row, the lowest of each byte first."""

    def __init__(self) -> None:
        self.bytes = np.zeros(ROOM_MIN // 8, np.uint8)

    def put(self, first: int, bits: np.ndarray) -> None:
        """Set the bits of the rows from ``first`` on, behind which there is none yet."""
        at, over = first >> 3, first & 7
        ahead = np.unpackbits(self.bytes[at : at + 1], bitorder="little")[:over] if over else bits[:0]
        packed = np.packbits(np.concatenate([ahead.astype(np.bool_), bits]), bitorder="little")
        if at + len(packed) > len(self.bytes):
            self.bytes = grown(self.bytes, 2 * (at + len(packed)))
        self.bytes[at : at + len(packed)] = packed

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Return the bits of rows, uint8."""
        bits: np.ndarray = (self.bytes[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1
        return bits

    def buffer(self, rows: int) -> pa.Buffer:
        return pa.py_buffer(self.bytes[: -(-rows // 8)])


class GrowingColumn(abc.ABC):
    """A column of one type. ``rows`` have been appended."""

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_
        self.rows = 0

    @abc.abstractmethod
    def append(self, array: pa.Array) -> None:
        """Append the values of an array of the type."""

    @abc.abstractmethod
    def take(self, rows: pa.Array) -> pa.Array:
        """Return the values of rows, given by their numbers; null where the number is null."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held."""

    @property
    def longest(self) -> int:
        """A number of bytes, as ``text_lengths`` counts them, that no value exceeds."""
        return 0

    def lengths(self, rows: np.ndarray) -> np.ndarray | int:
        """Return the ``text_lengths`` of rows, given by their numbers."""
        return 0

    def kept(self, rows: np.ndarray) -> GrowingColumn:
        """Return a column with these rows alone, ascending; perhaps this one."""
        made = growing(self.type)
        made.append(self.take(pa.array(rows)))
        return made


class BufferColumn(GrowingColumn):
    """A column whose memory is that of one Arrow array: the validity, and the buffers of a subclass."""

    def __init__(self, type_: pa.DataType) -> None:
        super().__init__(type_)
        self._valid: GrowingBits | None = None  # None: no row is null

    def append(self, array: pa.Array) -> None:
        if not len(array):
            return
        if array.null_count or self._valid is not None:
            if self._valid is None:
                self._valid = GrowingBits()
                self._valid.put(0, np.ones(self.rows, np.bool_))
            self._valid.put(self.rows, array.is_valid().to_numpy(zero_copy_only=False))
        self._add(array)
        self.rows += len(array)

    @abc.abstractmethod
    def _add(self, array: pa.Array) -> None:
        """Append the values of a slice that has rows."""

    @abc.abstractmethod
    def view(self) -> pa.Array:
        """Return all values, over the memory of the column."""

    def take(self, rows: pa.Array) -> pa.Array:
        return self.view().take(rows)

    def lengths(self, rows: np.ndarray) -> np.ndarray | int:
        found = self._lengths(rows)
        return found if self._valid is None else found * self._valid.at(rows)

    def _lengths(self, rows: np.ndarray) -> np.ndarray | int:
        """Return the bytes of text of rows, and anything for null."""
        return 0

    @property
    def nbytes(self) -> int:
        return self._held() + (0 if self._valid is None else self._valid.bytes.nbytes)

    @abc.abstractmethod
    def _held(self) -> int: ...

    def _validity(self) -> pa.Buffer | None:
        return None if self._valid is None else self._valid.buffer(self.rows)


class FixedValues(BufferColumn):
    """A column of values of one width in whole bytes."""

    def __init__(self, type_: pa.DataType, width: int) -> None:
        super().__init__(type_)
        number = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(width)
        self._shape = () if number else (width,)
        self._dtype = np.dtype(number or np.uint8)
        self._values = np.zeros((ROOM_MIN, *self._shape), self._dtype)

    def _add(self, array: pa.Array) -> None:
        end = self.rows + len(array)
        if end > len(self._values):
            self._values = grown(self._values, 2 * end)
        given = np.frombuffer(array.buffers()[1], self._dtype)
        if self._shape:
            given = given[: len(given) // self._shape[0] * self._shape[0]].reshape(-1, *self._shape)
        self._values[self.rows : end] = given[array.offset : array.offset + len(array)]

    def view(self) -> pa.Array:
        buffers = [self._validity(), pa.py_buffer(self._values[: self.rows])]
        return pa.Array.from_buffers(self.type, self.rows, buffers)

    def kept(self, rows: np.ndarray) -> GrowingColumn:
        if self._valid is not None or 4 * len(rows) < len(self._values):
            return super().kept(rows)
        self._values[: len(rows)] = self._values[rows]  # in the same memory: new one costs more than the rows
        self.rows = len(rows)
        return self

    def _held(self) -> int:
        return self._values.nbytes


class BitValues(BufferColumn):
    """A column of booleans."""

    def __init__(self, type_: pa.DataType) -> None:
        super().__init__(type_)
        self._values = GrowingBits()

    def _add(self, array: pa.Array) -> None:
        self._values.put(self.rows, array.fill_null(False).to_numpy(zero_copy_only=False))

    def view(self) -> pa.Array:
        return pa.Array.from_buffers(self.type, self.rows, [self._validity(), self._values.buffer(self.rows)])

    def _held(self) -> int:
        return self._values.bytes.nbytes


class ByteValues(BufferColumn):
    """A column of text or bytes. Offsets have 64 bits, because all rows together may be larger than one column of a batch."""

    def __init__(self, type_: pa.DataType) -> None:
        super().__init__(type_)
        text = is_.is_string(type_) or is_.is_large_string(type_)
        self._wide = pa.large_string() if text else pa.large_binary()
        self._number = np.int64 if type_ == self._wide else np.int32
        self._ends = np.zeros(ROOM_MIN, np.int64)  # the first is the start of row 0
        self._data = np.zeros(ROOM_MIN, np.uint8)
        self._longest = 0

    @property
    def longest(self) -> int:
        return self._longest

    def _lengths(self, rows: np.ndarray) -> np.ndarray | int:
        found: np.ndarray = self._ends[rows + 1] - self._ends[rows]
        return found

    def _add(self, array: pa.Array) -> None:
        _, offsets, data = array.buffers()
        ends = np.frombuffer(offsets, self._number)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        begin, size = int(ends[0]), int(ends[-1] - ends[0])
        self._longest = max(self._longest, int(np.diff(ends).max()))
        used, end = int(self._ends[self.rows]), self.rows + len(array)
        if end >= len(self._ends):
            self._ends = grown(self._ends, 2 * end + 1)
        if used + size > len(self._data):
            self._data = grown(self._data, 2 * (used + size))
        self._ends[self.rows + 1 : end + 1] = ends[1:] + (used - begin)
        if size:
            self._data[used : used + size] = np.frombuffer(data, np.uint8)[begin : begin + size]

    def view(self) -> pa.Array:
        used = int(self._ends[self.rows])
        buffers = [
            self._validity(),
            pa.py_buffer(self._ends[: self.rows + 1]),
            pa.py_buffer(self._data[:used]),
        ]
        return pa.Array.from_buffers(self._wide, self.rows, buffers)

    def take(self, rows: pa.Array) -> pa.Array:
        found = self.view().take(rows)
        return found if found.type == self.type else found.cast(self.type)

    def _held(self) -> int:
        return self._ends.nbytes + self._data.nbytes


class StructValues(BufferColumn):
    """A column of structs: a column for each field."""

    def __init__(self, type_: pa.DataType) -> None:
        super().__init__(type_)
        self._fields = [growing(field.type) for field in type_]

    @property
    def longest(self) -> int:
        return sum(column.longest for column in self._fields)

    def _lengths(self, rows: np.ndarray) -> np.ndarray | int:
        return sum(column.lengths(rows) for column in self._fields)

    def _add(self, array: pa.Array) -> None:
        for at, column in enumerate(self._fields):
            column.append(array.field(at))

    def view(self) -> pa.Array:
        raise NotImplementedError("fields are taken one by one")

    def take(self, rows: pa.Array) -> pa.Array:
        fields = [column.take(rows) for column in self._fields]
        missing = rows.is_null() if rows.null_count else None
        if self._valid is not None:
            # a column of booleans that are never null, so that a null number gives null as everywhere
            valid = pa.Array.from_buffers(pa.bool_(), self.rows, [None, self._valid.buffer(self.rows)]).take(rows)
            missing = pa.compute.invert(valid.fill_null(False))
        return pa.StructArray.from_arrays(fields, fields=list(self.type), mask=missing)

    def _held(self) -> int:
        return sum(column.nbytes for column in self._fields)


class PieceColumn(GrowingColumn):
    """A column in pieces of Arrow, each at least twice as large as the next one."""

    def __init__(self, type_: pa.DataType) -> None:
        super().__init__(type_)
        self._pieces: list[pa.Array] = []
        self._lengths = np.zeros(ROOM_MIN, np.int64)
        self._longest = 0

    @property
    def longest(self) -> int:
        return self._longest

    def lengths(self, rows: np.ndarray) -> np.ndarray | int:
        found: np.ndarray = self._lengths[rows]
        return found

    def append(self, array: pa.Array) -> None:
        if not len(array):
            return
        end, lengths = self.rows + len(array), text_lengths(array)
        if end > len(self._lengths):
            self._lengths = grown(self._lengths, 2 * end)
        self._lengths[self.rows : end] = lengths
        self._longest = max(self._longest, int(np.max(lengths)))
        self._pieces.append(pa.concat_arrays([array, array[:0]]))  # a copy: it may be a view of a larger batch
        self.rows = end
        while len(self._pieces) > 1 and self._merges(*self._pieces[-2:]):
            self._pieces[-2:] = [pa.concat_arrays(self._pieces[-2:])]

    def _merges(self, piece: pa.Array, last: pa.Array) -> bool:
        """Return whether two pieces become one: text within lists has offsets of 32 bits."""
        return 2 * len(last) > len(piece) and piece.nbytes + last.nbytes <= PIECE_BYTES_MAX

    def take(self, rows: pa.Array) -> pa.Array:
        found = pa.chunked_array(self._pieces, self.type).take(rows)
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found

    @property
    def nbytes(self) -> int:
        return self._lengths.nbytes + sum(int(piece.nbytes) for piece in self._pieces)


def growing(type_: pa.DataType) -> GrowingColumn:
    """Return an empty column of a type."""
    if is_.is_boolean(type_):
        return BitValues(type_)
    if is_.is_string(type_) or is_.is_binary(type_) or is_.is_large_string(type_) or is_.is_large_binary(type_):
        return ByteValues(type_)
    if is_.is_struct(type_) and len(list(type_)):
        return StructValues(type_)
    width = None if is_.is_nested(type_) or is_.is_dictionary(type_) or is_.is_null(type_) else fixed_bytes(type_)
    return PieceColumn(type_) if width is None or isinstance(type_, pa.BaseExtensionType) else FixedValues(type_, width)


class Arena:
    """The columns of rows that wait, by position among the columns of their input: those that are needed."""

    def __init__(self, schema: pa.Schema, needed: Sequence[int]) -> None:
        self._columns = {at: growing(schema.field(at).type) for at in needed}

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def append(self, columns: Sequence[pa.Array]) -> None:
        """Append rows: the needed columns, in the order of their positions."""
        for column, array in zip(self._columns.values(), columns, strict=True):
            column.append(array)

    def take(self, at: int, rows: pa.Array) -> pa.Array:
        """Return values of one column, null where the number of the row is null."""
        return self._columns[at].take(rows)

    def longest(self, at: int) -> int:
        """Return a number of bytes of text that no value of a column exceeds."""
        return self._columns[at].longest

    def lengths(self, at: int, rows: np.ndarray) -> np.ndarray | int:
        """Return the bytes of text of values of one column."""
        return self._columns[at].lengths(rows)

    def parts(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield rows in parts that can be taken at once."""
        if at_once(len(rows), sum(column.longest for column in self._columns.values())):
            yield rows
            return
        lengths: np.ndarray | int = sum(column.lengths(rows) for column in self._columns.values())
        yield from (rows[part] for part in text_cuts(lengths, len(rows)))

    def rows(self, rows: pa.Array) -> list[pa.Array]:
        """Return rows: the needed columns."""
        return [column.take(rows) for column in self._columns.values()]

    def keep(self, rows: np.ndarray) -> None:
        """Drop all rows but these, which are ascending and get the lowest numbers."""
        self._columns = {at: column.kept(rows) for at, column in self._columns.items()}
