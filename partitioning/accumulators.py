"""Counts, sum, min, max and mean of columns, one value per slot, with Spark SQL's answers (ANSI mode).

Law: the state depends on the rows and their order alone, not on how they were split into updates.

    measure  of columns of               gives                      with nulls only
    count    anything                    bigint                     0
    count_   the types of keys           bigint                     0
    distinct
    sum      integers                    bigint, or an error        null
             float, double               double
             decimal(p,s)                decimal(p+10,s), or an error
    mean     integers, float, double     double                     null
             decimal(p,s)                decimal(p+4,s+4), half up
    min max  these, boolean, date,       the column's type          null
             time, timestamp, duration,
             string, binary

"exact sum" and "exact mean" (``exact_sums``) are those whose doubles are rounded once, so that the order of rows does not matter.

Decimals have at most 38 digits. Their sums may pass that and come back: only results have to fit. NaN is greater than any
number. Strings and binaries compare byte by byte, as unsigned numbers, and the shorter comes first: that is Spark's order of
strings (UTF8_BINARY), the order of their code points. An update that raises leaves the state unusable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from partitioning import kernels
from partitioning.columns import (
    BOOL,
    BYTES,
    DECIMAL,
    FLOAT32,
    FLOAT64,
    SUPPORTED,
    UINT64,
    bytes_column,
    decimal_column,
    fixed_column,
    kind_of,
    raw,
    raw_bytes,
    validity_buffer,
)
from partitioning.errors import ColumnTypeError, SumOverflowError
from partitioning.key_index import KeyIndex
from partitioning.slot_tables import ARENA_BYTES_MIN, grown

#: Measures whose sums of doubles are rounded once, so that they do not depend on the order of rows.
EXACT_SUM, EXACT_MEAN = "exact sum", "exact mean"
_NUMBERS = ("integers", "float", "double", "decimal128")
_ORDERED = (*_NUMBERS, "boolean", "date", "time", "timestamp", "duration", "string", "binary")
_DIGITS_MAX = 38
_SIGN = -(1 << 63)


class Accumulator:
    """One measure of one column."""

    name = ""
    result_type: pa.DataType
    #: Names of the arrays, one value per slot, that make up the state.
    _arrays: tuple[str, ...] = ()
    #: The operation of the kernels that serve several partitions in one call (``kernels.update_each``); None: they do not
    #: support this measure.
    each: int | None = None
    #: Bits that the kernels flip in each value before they compare, see ``Min``.
    flip = 0

    def __init__(self, column: str | None, type_: pa.DataType | None) -> None:
        self.column, self.type = column or "", type_
        self.kind = kind_of(type_) if type_ is not None else None
        self.size = self._room = 0

    def update(self, slots: np.ndarray, column: pa.Array | None, size: int) -> None:
        """Add the rows of ``column``, each to its slot. Every slot is below ``size``."""
        self._grow(size)
        if column is not None and (column.type != self.type or len(column) != len(slots)):
            # Checked, because kernels read by address: a wrong type or length would read outside of the column.
            raise TypeError(
                f"expected {len(slots)} rows of {self.type} for column {self.column!r}, "
                f"not {len(column)} rows of {column.type}"
            )
        if len(slots):
            self._add(slots, column)

    def result(self, slots: np.ndarray | None = None) -> pa.Array:
        """Return the measure of slots, by default of all slots."""
        return self._result(np.arange(self.size, dtype=np.int32) if slots is None else slots)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the arrays that ``state`` returns."""
        return tuple(name.strip("_") for name in self._arrays)

    def state(self, slots: np.ndarray | None = None) -> list[tuple[str, pa.Array]]:
        """Return the state of slots, by default of all slots, as arrays of one value per slot; perhaps views of the state."""
        which = slice(0, self.size) if slots is None else slots
        return [(name.strip("_"), pa.array(getattr(self, name)[which])) for name in self._arrays]

    def load(self, state: Iterable[tuple[str, pa.Array]]) -> None:
        """Replace the whole state by a result of ``state``."""
        columns = dict(state)
        for name in self._arrays:
            column = columns[name.strip("_")]
            dtype = getattr(self, name).dtype
            values = column.to_numpy(zero_copy_only=False).astype(dtype)
            setattr(self, name, values)
            self.size = self._room = len(values)

    def put(self, slots: np.ndarray, state: Iterable[tuple[str, pa.Array]], size: int) -> None:
        """Replace the state of some slots, each below ``size``, by the newer result of ``state(slots)`` of another accumulator.

        The other one was in this one's state before it was updated further."""
        self._grow(size)
        columns = dict(state)
        for name in self._arrays:
            getattr(self, name)[slots] = columns[name.strip("_")].to_numpy(zero_copy_only=False)

    def merge(self, slots: np.ndarray, other: Any, size: int) -> None:
        """Add the rows of another accumulator of the same measure, as if they came now: its slot k goes to ``slots[k]``. The
        slots are distinct, each below ``size``."""
        self._grow(size)
        self._merge(slots, other, slice(0, len(slots)))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self._arrays)

    @property
    def in_one_call(self) -> bool:
        """Support by the calls for several partitions (``keyed_state.JointUpdate``)."""
        return self.each is not None

    def places(self) -> tuple[int, int, int]:
        """Return the addresses of the first and the last array, and the slots for which they have room, for kernels.

        They are valid as long as ``room`` stays and nothing is loaded."""
        first, last = getattr(self, self._arrays[0]), getattr(self, self._arrays[-1])
        return first.ctypes.data, last.ctypes.data, len(last)

    @property
    def room(self) -> int:
        """Slots for which there is room."""
        return self._room

    def reserve(self, size: int) -> None:
        """Make room for ``size`` slots."""
        if size > self._room:
            self._room = max(size, 2 * self._room, 64)
            for name in self._arrays:
                setattr(self, name, self._more(name, getattr(self, name), self._room))

    def _grow(self, size: int) -> None:
        self.reserve(size)
        self.size = max(self.size, size)

    def _more(self, name: str, array: np.ndarray, rows: int) -> np.ndarray:
        return grown(array, rows)

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        raise NotImplementedError

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        """Do the work of ``merge``; ``every``: the slots of the other accumulator."""
        raise NotImplementedError

    def _result(self, slots: np.ndarray) -> pa.Array:
        raise NotImplementedError

    def column_of(self, words: np.ndarray, valid: np.ndarray | None) -> pa.Array:
        """Make the result from int64 words of ``kernels.gather_each``. ``valid`` None: every word is a value."""
        raise NotImplementedError


class Count(Accumulator):
    """The number of rows, or of non-null values of a column of any type."""

    name = "count"
    result_type = pa.int64()
    _arrays = ("_counts",)
    each = kernels.COUNT_ROWS

    @property
    def in_one_call(self) -> bool:
        return not self.column or self.kind is not None  # columns of other types may mark their nulls in another way

    def __init__(self, column: str | None = None, type_: pa.DataType | None = None) -> None:
        super().__init__(column, type_)
        self._counts = np.zeros(0, np.int64)

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        if column is None or column.null_count == 0:
            kernels.count_rows(slots, self._counts)
            return
        validity = column.buffers()[0]
        if validity is not None and not pa.types.is_union(column.type):
            kernels.count_valid(slots, validity.address, column.offset, self._counts)
        else:  # types that mark their nulls in another way
            kernels.count_rows(slots[column.is_valid().to_numpy(zero_copy_only=False)], self._counts)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        self._counts[slots] += other._counts[every]

    def _result(self, slots: np.ndarray) -> pa.Array:
        return self.column_of(self._counts.take(slots), None)

    def column_of(self, words: np.ndarray, valid: np.ndarray | None) -> pa.Array:
        return fixed_column(self.result_type, words)


class Rounded(Accumulator):
    """Base of measures that sum doubles, and round the sum after each row: they depend on the order of rows."""

    result_type = pa.float64()
    _arrays = ("_sums", "_counts")
    each = kernels.ADD_DOUBLES

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self._sums = np.zeros(0, np.float64)
        self._counts = np.zeros(0, np.int64)

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        kernels.add_doubles(slots, *raw(column), self._sums, self._counts)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        self._sums[slots] += other._sums[every]
        self._counts[slots] += other._counts[every]

    def column_of(self, words: np.ndarray, valid: np.ndarray | None) -> pa.Array:
        return _doubles(words.view(np.float64), valid)


class SumDouble(Rounded):
    name = "sum"

    def _result(self, slots: np.ndarray) -> pa.Array:
        return self.column_of(*_counted(self._sums.view(np.int64), self._counts, slots))


class MeanDouble(Rounded):
    name = "mean"
    each = kernels.MEAN_DOUBLES

    def _result(self, slots: np.ndarray) -> pa.Array:
        counts = self._counts[slots]
        return _doubles(self._sums[slots] / np.maximum(counts, 1), counts > 0)


class SumInteger(Accumulator):
    """The sum of a column of integers, as 64-bit integers: a sum beyond them is an error at once."""

    name = "sum"
    result_type = pa.int64()
    _arrays = ("_sums", "_counts")
    each = kernels.ADD_INTEGERS

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self._sums = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        if not kernels.add_integers(slots, *raw(column), self._sums, self._counts):
            raise SumOverflowError(self.column, self.result_type)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        mine, theirs = self._sums[slots], other._sums[every]
        both = mine + theirs
        if (((both ^ mine) & (both ^ theirs)) < 0).any():  # the sign differs from that of both
            raise SumOverflowError(self.column, self.result_type)
        self._sums[slots] = both
        self._counts[slots] += other._counts[every]

    def _result(self, slots: np.ndarray) -> pa.Array:
        return self.column_of(*_counted(self._sums, self._counts, slots))

    def column_of(self, words: np.ndarray, valid: np.ndarray | None) -> pa.Array:
        return fixed_column(self.result_type, words, valid)


class SumDecimal(Accumulator):
    """The sum of a decimal column, as 192-bit integers in units of the scale.

    A sum may pass the digits of its type and come back, as 0.6 + 0.6 - 0.6 of DECIMAL(38,38) does: only a result has to fit."""

    name = "sum"
    _arrays = ("_low", "_high", "_over", "_counts")

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self._sum_type = pa.decimal128(min(_DIGITS_MAX, type_.precision + 10), type_.scale)
        self.result_type = self._sum_type
        self._low = np.zeros(0, np.uint64)
        self._high = np.zeros(0, np.uint64)
        self._over = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        values, validity, offset, _ = raw(column)
        kernels.add_decimals(slots, values, validity, offset, self._low, self._high, self._over, self._counts)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        low = self._low[slots] + other._low[every]
        partial = self._high[slots] + other._high[every]
        high = partial + (low < other._low[every])  # with the carry of each word into the next one
        self._over[slots] += other._over[every] + (partial < other._high[every]) + (high < partial)
        self._low[slots], self._high[slots] = low, high
        self._counts[slots] += other._counts[every]

    def _result(self, slots: np.ndarray) -> pa.Array:
        low, high = self._low[slots], self._high[slots]
        if not kernels.decimals_fit(low, high, self._over[slots], self._sum_type.precision):
            raise SumOverflowError(self.column, self.result_type)
        return decimal_column(self.result_type, low, high, self._counts[slots] > 0)


class MeanDecimal(SumDecimal):
    """The mean of a decimal column: its sum and its count, divided when a result is asked for."""

    name = "mean"

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self.result_type = pa.decimal128(min(_DIGITS_MAX, type_.precision + 4), min(_DIGITS_MAX, type_.scale + 4))

    def _result(self, slots: np.ndarray) -> pa.Array:
        low, high, counts = self._low[slots].copy(), self._high[slots].copy(), self._counts[slots]
        digits = self.result_type.scale - self._sum_type.scale
        if not kernels.divide_decimals(low, high, self._over[slots], counts, digits, self.result_type.precision):
            raise SumOverflowError(self.column, self.result_type, self.name)
        return decimal_column(self.result_type, low, high, counts > 0)


class Min(Accumulator):
    """The least value, kept as an integer with the same order as the values."""

    name = "min"
    _arrays = ("_best", "_seen")
    each = kernels.KEEP_LEAST
    #: Bits that are flipped in each value before it is compared: all (-1) where the greatest value is kept.
    _turn = 0

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self.result_type = type_
        self._best = np.zeros(0, np.int64)
        self._seen = np.zeros(0, np.bool_)
        # All bits flipped reverse the order; the first bit flipped makes unsigned numbers sort as signed ones.
        self.flip = self._turn ^ (_SIGN if self.kind == UINT64 else 0)

    def _more(self, name: str, array: np.ndarray, rows: int) -> np.ndarray:
        larger = grown(array, rows)
        if name == "_best":
            larger[len(array) :] = np.iinfo(np.int64).max
        return larger

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        kernels.keep_least(slots, *raw(column), self.flip, self._best, self._seen)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        # Without a value, ``_best`` has the greatest number.
        self._best[slots] = np.minimum(self._best[slots], other._best[every])
        self._seen[slots] |= other._seen[every]

    def _result(self, slots: np.ndarray) -> pa.Array:
        best, valid = np.empty(len(slots), np.int64), np.empty(len(slots), np.bool_)
        whole = kernels.gather_seen(self._best, self._seen, slots, self.flip, best, valid) == len(slots)
        return self.column_of(best, None if whole else valid)

    def column_of(self, words: np.ndarray, valid: np.ndarray | None) -> pa.Array:
        if self.kind not in (FLOAT32, FLOAT64):
            return fixed_column(self.result_type, words, valid)
        bits = words ^ ((words >> np.int64(63)) & np.int64(np.iinfo(np.int64).max))
        return _doubles(bits.view(np.float64), valid).cast(self.result_type)


class Max(Min):
    """The greatest value: the least one after all bits are flipped."""

    name = "max"
    _turn = -1


class MinDecimal(Accumulator):
    """The least value of a decimal column, as a 128-bit integer in units of the scale: ``_high`` is compared first, then
    ``_low``."""

    name = "min"
    _arrays = ("_low", "_high", "_seen")
    #: See ``Min``.
    _turn = 0

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self.result_type = type_
        self._low = np.zeros(0, np.uint64)
        self._high = np.zeros(0, np.int64)
        self._seen = np.zeros(0, np.bool_)

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        values, validity, offset, _ = raw(column)
        kernels.keep_least_decimals(slots, values, validity, offset, self._turn, self._low, self._high, self._seen)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        low, high = self._low[slots], self._high[slots]
        less = (other._high[every] < high) | ((other._high[every] == high) & (other._low[every] < low))
        better = other._seen[every] & (less | ~self._seen[slots])
        where = slots[better]
        self._low[where], self._high[where] = other._low[every][better], other._high[every][better]
        self._seen[where] = True

    def _result(self, slots: np.ndarray) -> pa.Array:
        low, high = self._low[slots], self._high[slots]
        if self._turn:
            low, high = ~low, ~high
        return decimal_column(self.result_type, low, high, self._seen[slots])


class MaxDecimal(MinDecimal):
    """The greatest value of a decimal column: the least one after all bits are flipped."""

    name = "max"
    _turn = -1


class MinBytes(Accumulator):
    """The least string or binary value.

    Values lie in pieces of an arena. A slot reuses its piece while the new value fits into it, else it takes a new piece. A
    full arena is packed."""

    name = "min"
    _arrays = ("_heads", "_starts", "_rooms", "_sizes")
    _greatest = False

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self.result_type = type_
        self._heads = np.zeros(0, np.uint64)
        self._starts, self._rooms = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._sizes = np.zeros(0, np.int64)  # -1: no value yet
        self._arena = np.zeros(ARENA_BYTES_MIN, np.uint8)
        self._meta = np.zeros(2, np.int64)  # bytes used, bytes wanted

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._arena.nbytes

    @property
    def parts(self) -> tuple[str, ...]:
        return ("best",)

    def state(self, slots: np.ndarray | None = None) -> list[tuple[str, pa.Array]]:
        which = np.arange(self.size, dtype=np.int32) if slots is None else slots
        return [("best", self._column(which, pa.large_binary()))]

    def put(self, slots: np.ndarray, state: Iterable[tuple[str, pa.Array]], size: int) -> None:
        """Keep the better of the present value and the newer one. The newer one is better or equal."""
        self._grow(size)
        (best,) = (column for name, column in state if name == "best")
        first = 0
        for chunk in best.chunks if isinstance(best, pa.ChunkedArray) else [best]:
            self._keep(slots[first : first + len(chunk)], chunk)
            first += len(chunk)

    def load(self, state: Iterable[tuple[str, pa.Array]]) -> None:
        (best,) = (column for name, column in state if name == "best")
        rows = len(best)
        self._heads, self._arena = np.zeros(0, np.uint64), np.zeros(max(best.nbytes, ARENA_BYTES_MIN), np.uint8)
        self._starts = self._rooms = self._sizes = np.zeros(0, np.int64)
        self._meta = np.zeros(2, np.int64)
        self.size = self._room = 0
        # All slots are empty, so the value of each is the least.
        first = 0
        self._grow(rows)
        for chunk in best.chunks if isinstance(best, pa.ChunkedArray) else [best]:
            self._keep(np.arange(first, first + len(chunk), dtype=np.int32), chunk)
            first += len(chunk)

    def _more(self, name: str, array: np.ndarray, rows: int) -> np.ndarray:
        larger = grown(array, rows)
        if name == "_sizes":
            larger[len(array) :] = -1
        return larger

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        assert column is not None
        self._keep(slots, column)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        ((_, best),) = other.state()
        self._keep(slots, best)

    def _keep(self, slots: np.ndarray, column: pa.Array) -> None:
        done = 0
        while True:
            done = kernels.keep_least_strings(
                slots, *raw_bytes(column), self._greatest, done,
                self._heads, self._starts, self._rooms, self._sizes, self._arena, self._meta,
            )  # fmt: skip
            if done == len(slots):
                return
            self._make_room(int(self._meta[1]))

    def _make_room(self, wanted: int) -> None:
        """Pack the arena into a new one that is at most half full, so that the next packing is far off."""
        every = np.arange(len(self._sizes), dtype=np.int32)
        offsets, packed = self._pieces(every)
        self._starts, self._rooms = offsets[:-1].copy(), np.diff(offsets)
        self._arena = grown(packed, max(2 * (len(packed) + wanted), ARENA_BYTES_MIN))
        self._meta[0] = len(packed)

    def _pieces(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of the slots, one after the other, as int64 offsets and bytes."""
        offsets = np.empty(len(slots) + 1, np.int64)
        kernels.piece_ends(self._sizes, slots, offsets)
        data = np.empty(int(offsets[-1]), np.uint8)
        kernels.copy_pieces(self._starts, self._sizes, self._arena, slots, data)
        return offsets, data

    def _result(self, slots: np.ndarray) -> pa.Array:
        return self._column(slots, self.result_type)

    def _column(self, slots: np.ndarray, type_: pa.DataType) -> pa.Array:
        return bytes_column(type_, *self._pieces(slots), self._sizes[slots] >= 0)


class MaxBytes(MinBytes):
    name = "max"
    _greatest = True


class CountDistinct(Accumulator):
    """The exact number of distinct values that are not null, equal as in grouping: the pairs of slot and value, each once."""

    name = "count_distinct"
    result_type = pa.int64()
    _arrays = ("_counts",)

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self._counts = np.zeros(0, np.int64)
        self._pairs = self._none()

    def _none(self) -> KeyIndex:
        return KeyIndex([pa.field("slot", pa.int32(), False), pa.field(self.column, self.type)])

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._pairs.nbytes

    @property
    def parts(self) -> tuple[str, ...]:
        return ("values",)

    def state(self, slots: np.ndarray | None = None) -> list[tuple[str, pa.Array]]:
        """Return the values of each slot as a list."""
        which = np.arange(self.size) if slots is None else slots
        owners, values = self._pairs.keys()
        order = np.argsort(owners := owners.to_numpy(), kind="stable")
        begins, ends = (np.searchsorted(owners[order], which, side) for side in ("left", "right"))
        offsets = np.concatenate([[0], np.cumsum(ends - begins)])
        rows = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], ends - begins)
        return [("values", pa.LargeListArray.from_arrays(pa.array(offsets), values.take(pa.array(order[rows]))))]

    def load(self, state: Iterable[tuple[str, pa.Array]]) -> None:
        listed = _one(state, "values")
        self._counts, self._pairs = np.zeros(0, np.int64), self._none()
        self.size = self._room = 0
        self._grow(len(listed))
        self._keep_lists(np.arange(len(listed), dtype=np.int32), listed)

    def put(self, slots: np.ndarray, state: Iterable[tuple[str, pa.Array]], size: int) -> None:
        """Add the values of a newer state, which has all the present ones."""
        self._grow(size)
        self._keep_lists(slots, _one(state, "values"))

    def _keep_lists(self, slots: np.ndarray, listed: pa.Array) -> None:
        self._keep(np.repeat(slots, pc.list_value_length(listed).to_numpy(zero_copy_only=False)), listed.flatten())

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        assert column is not None
        if column.null_count:
            slots, column = slots[column.is_valid().to_numpy(zero_copy_only=False)], column.drop_null()
        self._keep(slots, column)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        owners, values = other._pairs.keys()
        self._keep(slots[owners.to_numpy()], values)

    def _keep(self, slots: np.ndarray, values: pa.Array) -> None:
        known = len(self._pairs)
        if len(values):
            self._pairs.slots([pa.array(slots, pa.int32()), values])
        owners, _ = self._pairs.keys(np.arange(known, len(self._pairs), dtype=np.int32))
        found = np.bincount(owners.to_numpy())
        self._counts[: len(found)] += found

    def _result(self, slots: np.ndarray) -> pa.Array:
        return fixed_column(self.result_type, self._counts.take(slots))


def _one(state: Iterable[tuple[str, pa.Array]], part: str) -> pa.Array:
    column = dict(state)[part]
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def accumulator(measure: str, column: str | None, type_: pa.DataType | None) -> Accumulator:
    """Make an accumulator. ColumnTypeError: the measure is not defined for the type."""
    if measure == "count":
        return Count(column, type_)
    if column is None or type_ is None:
        raise ValueError(f"{measure} needs a column")
    kind = kind_of(type_)
    if measure == "count_distinct":
        if kind is None:
            raise ColumnTypeError(measure, column, type_, SUPPORTED)
        return CountDistinct(column, type_)
    if measure in ("min", "max"):
        if kind is None:
            raise ColumnTypeError(measure, column, type_, _ORDERED)
        if kind >= BYTES:
            return (MinBytes if measure == "min" else MaxBytes)(column, type_)
        if kind == DECIMAL:
            return (MinDecimal if measure == "min" else MaxDecimal)(column, type_)
        return (Min if measure == "min" else Max)(column, type_)
    if measure in (EXACT_SUM, EXACT_MEAN):
        return _exact(measure, column, type_, kind)
    if measure not in ("sum", "mean"):
        raise ValueError(f"unknown measure {measure!r}; known are count, count_distinct, sum, min, max and mean")
    if kind is None or kind == BOOL or kind >= BYTES or pa.types.is_temporal(type_):
        raise ColumnTypeError(measure, column, type_, _NUMBERS)
    if kind == DECIMAL:
        return (SumDecimal if measure == "sum" else MeanDecimal)(column, type_)
    if measure == "mean":
        return MeanDouble(column, type_)
    return (SumDouble if kind in (FLOAT32, FLOAT64) else SumInteger)(column, type_)


def _exact(measure: str, column: str, type_: pa.DataType, kind: int | None) -> Accumulator:
    """Make the accumulator of an exact measure. Integers and decimals are summed exactly anyway, except for the mean of
    integers."""
    from partitioning.exact_sums import ExactMean, ExactSum  # it imports this module

    plain = measure.removeprefix("exact ")
    doubles = kind is not None and kind in (FLOAT32, FLOAT64)
    if doubles or (measure == EXACT_MEAN and isinstance(accumulator(plain, column, type_), MeanDouble)):
        return (ExactSum if measure == EXACT_SUM else ExactMean)(column, type_)
    return accumulator(plain, column, type_)


def _counted(values: np.ndarray, counts: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the int64 values of slots, and which of them have counted anything (None: all)."""
    out, valid = np.empty(len(slots), np.int64), np.empty(len(slots), np.bool_)
    whole = kernels.gather_counted(values, counts, slots, out, valid) == len(slots)
    return out, None if whole else valid


def _doubles(values: np.ndarray, valid: np.ndarray | None) -> pa.Array:
    """Make a column of doubles with one NaN only.

    The bits of the NaN that a sum of two NaNs gives depend on the loop that added them up, and replicas are compared bit by
    bit."""
    nan = np.isnan(values)
    if nan.any():
        values = np.where(nan, np.nan, values)
    return pa.Array.from_buffers(pa.float64(), len(values), [validity_buffer(valid), pa.py_buffer(values)])
