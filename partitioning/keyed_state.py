"""Keyed state: a table of groups of rows with equal keys, and the value of each measure for each group.

A ``KeyedState`` is what an aggregate keeps per partition; an operator with windows keeps one per pane. It knows nothing of
stages, batches or schemas of output.

Law: groups, values and changes depend on the rows and their order alone: neither on the cut of the rows into calls, nor on a
snapshot and restore in between, nor on other partitions in the same call.

The number of a group is its slot: 0, 1, 2, ... in the order of the first row of each. A state is for one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from partitioning import kernels
from partitioning.accumulators import Accumulator, Count, accumulator
from partitioning.columns import fixed_column, raw
from partitioning.errors import FailedPartition, StateMismatchError, SumOverflowError
from partitioning.key_index import KeyIndex
from partitioning.slot_tables import grown

#: Changed slots for which there is room at the beginning.
ROOM_MIN = 64
#: Rows of ``Addresses.at``, which kernels take as ``which``: the table of keys, the marks, then each measure.
TABLE, MARKS, MEASURES = 0, 1, 2


class TypedMeasure(NamedTuple):
    """A value per group: ``kind`` (count, count_distinct, sum, min, max, mean, exact sum or exact mean) of a column of ``type``;
    without a column, the rows."""

    kind: str
    #: The name of the column, for error messages only: columns are given by position.
    column: str | None = None
    type: pa.DataType | None = None


class Addresses(NamedTuple):
    """Addresses of the arrays of a state: int64[2 + measures, 5] (see ``kernels``). They are valid while ``rooms``, the
    capacities of the arrays, stay the same."""

    rooms: tuple[int, ...]
    at: np.ndarray


class TouchedGroups(NamedTuple):
    """Distinct slots of several states, one state behind the other: ``slots[ends[k - 1]:ends[k]]`` belong to state k."""

    slots: np.ndarray
    ends: np.ndarray


class KeyedState:
    """The groups of one partition, or of one pane of it: their keys, an accumulator for each measure, and marks of changes."""

    __slots__ = (
        "_accumulators", "_addresses", "_changed", "_index", "_mark", "_marks", "_size", "_told", "keys", "measures",
    )  # fmt: skip

    def __init__(self, keys: Sequence[pa.Field], measures: Mapping[str, TypedMeasure]) -> None:
        """Make an empty state. ``keys``: the key columns; without any there is at most one group, of all rows. Raises
        KeyTypeError or ColumnTypeError for unfit types."""
        self.keys, self.measures = tuple(keys), dict(measures)
        self._accumulators = [accumulator(*measure) for measure in self.measures.values()]
        self._clear()

    def _clear(self) -> None:
        self._index = KeyIndex(self.keys) if self.keys else None
        self._size = 0
        self._changed = ChangedSlots()
        self._told = 0  # the number of groups at the last call of ``changes``
        self._marks = np.zeros(0, np.int64)  # the last mark of each slot, see ``touched``
        self._mark = 0
        self._addresses: Addresses | None = None

    def empty(self) -> KeyedState:
        """Make another state of the same keys and measures, without groups."""
        return KeyedState(self.keys, self.measures)

    def __len__(self) -> int:
        """Return the number of groups. Slots are 0 to this number, exclusive."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of memory that keys and accumulators hold."""
        return sum(made.nbytes for made in self._accumulators) + (0 if self._index is None else self._index.nbytes)

    # ---- rows

    def slots(self, keys: Sequence[pa.Array], rows: int) -> np.ndarray:
        """Return the int32 slot of each row. New keys get new groups; call ``update`` before anything else."""
        if self._index is None:
            self._size = 1
            return np.zeros(rows, np.int32)
        slots = self._index.slots(keys)
        self._size = len(self._index)
        return slots

    def update(self, slots: np.ndarray, columns: Sequence[pa.Array | None]) -> None:
        """Add rows to their groups: ``columns`` has the values of each measure, None where a measure counts rows. Raises
        SumOverflowError, which leaves the state unusable."""
        for made, column in zip(self._accumulators, columns, strict=True):
            made.update(slots, column, self._size)

    def touched(self, slots: np.ndarray) -> np.ndarray:
        """Return each slot once, in the order of first appearance."""
        mark, out = self._next_mark(self._size), np.empty(len(slots), np.int32)
        return out[: kernels.touched(slots, self._marks, mark, out)]

    def note(self, slots: np.ndarray) -> None:
        """Note that these groups have changed, for ``changes``."""
        if self._changed.noting:
            self._changed.note(slots, self._size)

    def results(self, slots: np.ndarray) -> list[pa.Array]:
        """Return the columns of groups: the keys, then the result of each measure. Raises SumOverflowError."""
        keys = [] if self._index is None else self._index.keys(slots)
        return [*keys, *(made.result(slots) for made in self._accumulators)]

    def make_single(self) -> None:
        """Make the group of a state without key, as rows would: the aggregate of no rows is one row."""
        if not self._size:
            self.update(self.slots([], 0), [None] * len(self._accumulators))

    def merge(self, other: KeyedState) -> None:
        """Add the groups of a state of the same keys and measures. Its rows count as later rows than those of this state, so new
        groups come in the order of their slots there. Raises SumOverflowError, which leaves the state unusable."""
        if (other.keys, other.measures) != (self.keys, self.measures):
            raise StateMismatchError(f"a state of {_said(other)} cannot be merged into one of {_said(self)}")
        if not len(other):
            return
        every = np.arange(len(other), dtype=np.int32)
        slots = self.slots([] if other._index is None else other._index.keys(every), len(other))
        for mine, theirs in zip(self._accumulators, other._accumulators, strict=True):
            mine.merge(slots, theirs, self._size)
        self.note(slots)

    def part(self, keys: Sequence[Sequence[pa.Array]]) -> KeyedState:
        """Return a state with copies of the groups of these keys, given by batch, in their order. This state stays as it is."""
        slots = np.arange(self._size, dtype=np.int32)
        if self._index is not None:
            slots = np.unique(np.concatenate([slots[:0], *map(self._index.find, keys)]))
            slots = slots[slots >= 0]
        return self.copied(slots)

    def copied(self, slots: np.ndarray | None = None) -> KeyedState:
        """Return a state with copies of these groups, in this order, by default of all. Slots are distinct."""
        made, which = self.empty(), np.arange(self._size, dtype=np.int32) if slots is None else slots
        if self._index is not None:
            made._index = self._index.only(which)
        for mine, theirs in zip(self._accumulators, made._accumulators, strict=True):
            theirs.load(mine.state(which))
        made._size = len(which)
        return made

    # ---- on its way

    def snapshot(self) -> pa.Table:
        """Return one row per group: its key, then the state of each measure; perhaps as views of the state."""
        columns: dict[str, pa.Array | pa.ChunkedArray] = {}
        if self._index is not None:
            columns = {f"key.{i}": column for i, column in enumerate(self._index.to_arrow().columns)}
        for name, made in zip(self.measures, self._accumulators, strict=True):
            columns |= {f"{name}.{part}": values for part, values in made.state()}
        return pa.table(columns)

    def restore(self, groups: pa.Table) -> None:
        """Replace all groups by a ``snapshot``. Raises StateMismatchError if it was taken from a state of other measures."""
        expected = [f"key.{i}" for i in range(len(self.keys))] + [
            f"{name}.{part}"
            for name, made in zip(self.measures, self._accumulators, strict=True)
            for part in made.parts
        ]
        if groups.schema.names != expected:
            raise StateMismatchError(f"the snapshot has columns {groups.schema.names}, expected {expected}")
        self._clear()
        if self.keys:
            keys = pa.Table.from_arrays(groups.columns[: len(self.keys)], schema=pa.schema(self.keys))
            self._index = KeyIndex.from_arrow(keys)
        for name, made in zip(self.measures, self._accumulators, strict=True):
            made.load([(part, groups.column(f"{name}.{part}")) for part in made.parts])
        self._size = groups.num_rows

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        """Return the groups that changed since the last call: for older groups their slots and the state of each measure, for new
        groups the key too. The state has one row per group. None: there was no call before, or more than ``share_max`` of all
        groups have changed."""
        whole, first = not self._changed.noting, self._told
        slots = self._changed.take()
        self._told = self._size
        if whole or len(slots) > share_max * self._size:
            return None
        old, new = slots[slots < first], np.arange(first, self._size, dtype=np.int32)
        rows = np.concatenate([old, new])
        keys = [] if self._index is None else self._index.keys(new)
        state = {
            f"{name}.{part}": values
            for name, made in zip(self.measures, self._accumulators, strict=True)
            for part, values in made.state(rows)
        }
        return {"first": first, "size": self._size, "slots": old, "keys": keys, "state": pa.table(state)}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        first, size, old, keys = (changes[part] for part in ("first", "size", "slots", "keys"))
        new = np.arange(first, size, dtype=np.int32)
        if self._size != first:
            raise StateMismatchError(f"changes of a state of {first} keys cannot be applied to one of {self._size}")
        if self._index is not None and len(new) and not np.array_equal(self._index.slots(keys), new):
            raise StateMismatchError("changes of another state: keys that are new to it are there already")
        rows = np.concatenate([old, new])
        for name, made in zip(self.measures, self._accumulators, strict=True):
            made.put(rows, [(part, changes["state"][f"{name}.{part}"]) for part in made.parts], size)
        self._size = size

    # ---- calls for several states

    @property
    def joins(self) -> bool:
        """Whether ``JointUpdate`` takes such a state: it has a key, and a kernel for each measure."""
        return self._index is not None and all(made.in_one_call for made in self._accumulators)

    def addresses(self, rows: int) -> np.ndarray:
        """Return the addresses of the arrays, as kernels take them, with room for ``rows`` new groups.

        They are looked up again only if an array has grown: an array's address takes longer than all the rest."""
        assert self._index is not None
        size, words = self._size + rows, self._index.words
        if words is not None:
            words.reserve(rows)
        for made in self._accumulators:
            made.reserve(size)
        mark = self._next_mark(size)
        found = self._addresses
        rooms = (
            0 if words is None else words.capacity,
            len(self._marks),
            *[made.room for made in self._accumulators],
        )
        if found is None or found.rooms != rooms:
            table = (0,) * 5 if words is None else words.places()
            marks = self._marks.ctypes.data, 0, len(self._marks), 0, 0
            measures = [(*made.places(), 0, 0) for made in self._accumulators]
            found = self._addresses = Addresses(rooms, np.array([table, marks, *measures], np.int64))
        found.at[MARKS, 1] = mark
        kept: np.ndarray = found.at
        return kept

    def _next_mark(self, size: int) -> int:
        """Return a mark that none of the first ``size`` slots has yet."""
        if size > len(self._marks):
            self._marks, self._mark = np.zeros(2 * size, np.int64), 0
        self._mark += 1
        return self._mark


class JointUpdate:
    """Rows for several states of the same keys and measures, in one call.

    The cost of a small batch is call overhead, and a batch touches most partitions. So the rows of all partitions go through
    each kernel together: Python work does not grow with the number of states, except for a check of which arrays have grown. The
    rows of state k are ``rows[k]`` rows, at least one, behind those of state k - 1. Law: each state, and its results, are those
    of separate calls with its own rows. All states are such that ``joins`` holds; an update serves one batch."""

    __slots__ = ("_ends", "_indexes", "_places", "_row_ends", "_states")

    def __init__(self, states: Sequence[KeyedState], rows: Sequence[int]) -> None:
        """Make room for the rows. Raises FailedPartition if a state cannot have as many keys."""
        self._states, self._row_ends = states, list(accumulate(rows))
        self._ends = np.array(self._row_ends)
        self._indexes: list[KeyIndex] = [state._index for state in states]  # type: ignore[misc]  # joins: there is one
        places: list[np.ndarray] = []
        try:
            for state, more in zip(states, rows, strict=True):
                places.append(state.addresses(more))
        except MemoryError as error:
            raise FailedPartition(len(places), error) from error
        self._places = np.array(places)

    def slots(self, keys: Sequence[pa.Array]) -> np.ndarray:
        """Return the slot of each row, as ``KeyedState.slots`` does."""
        slots = _slots_each(self._indexes, keys, self._ends, self._places)
        for state, index in zip(self._states, self._indexes, strict=True):
            state._size = size = len(index)
            for made in state._accumulators:
                made.size = max(made.size, size)
        return slots

    def update(self, slots: np.ndarray, columns: Sequence[pa.Array | None]) -> None:
        """Add rows to their groups, as ``KeyedState.update`` does. Raises FailedPartition for a sum that does not fit."""
        made_of_first = self._states[0]._accumulators
        for measure, (made, column) in enumerate(zip(made_of_first, columns, strict=True), MEASURES):
            failed = _update_each(made, slots, column, self._ends, self._places, measure)
            if failed >= 0:
                raise FailedPartition(failed, SumOverflowError(made.column, made.result_type))

    def touched(self, slots: np.ndarray) -> TouchedGroups:
        """Return each slot of each state once, as ``KeyedState.touched`` does."""
        touched, found = np.empty(len(slots), np.int32), np.empty(len(self._ends), np.int64)
        kernels.touched_each(slots, self._ends, self._places, MARKS, touched, found)
        return TouchedGroups(touched[: found[-1]], found)

    def note(self, slots: np.ndarray, ends: Sequence[int] | None = None) -> None:
        """Note that groups have changed. ``ends``: where the slots of each state end; by default its rows."""
        start = 0
        for state, end in zip(self._states, self._row_ends if ends is None else ends, strict=True):
            if state._changed.noting:
                state._changed.note(slots[start:end], state._size)
            start = end

    def results(self, groups: TouchedGroups) -> list[pa.Array]:
        """Return the columns of groups, as ``KeyedState.results`` does."""
        columns = _keys_each(self._indexes, groups.slots, groups.ends, self._places)
        for measure, made in enumerate(self._states[0]._accumulators, MEASURES):
            columns.append(_result_each(made, groups.slots, groups.ends, self._places, measure))
        return columns


class ChangedSlots:
    """Slots that have changed since the last request for changes.

    Law: ``take`` gives every slot that was noted since the ``take`` before, once. Its cost grows with the changes, not with the
    state. Therefore each slot has a mark, and not each page: keys that are hit at random touch every page. Before the first
    ``take`` nothing is noted, so that a state without checkpoints pays nothing."""

    def __init__(self) -> None:
        self.noting = False
        self._count = 0
        self._marks = np.zeros(0, np.uint8)
        self._slots = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._marks.nbytes + self._slots.nbytes

    def note(self, slots: np.ndarray, size: int) -> None:
        """Note that these int32 slots change now, each below ``size``."""
        if not self.noting:
            return
        if size > len(self._marks):
            self._marks = grown(self._marks, max(2 * size, ROOM_MIN))
        if self._count + len(slots) > len(self._slots):
            self._slots = grown(self._slots, max(2 * (self._count + len(slots)), ROOM_MIN))
        self._count = kernels.note_changed(slots, self._marks, self._slots, self._count)

    def take(self) -> np.ndarray:
        """Return the int32 slots noted since the last time, in the order of their first change."""
        taken = self._slots[: self._count].copy()
        self._marks[taken] = 0
        self.noting, self._count = True, 0
        if len(self._slots) > max(4 * len(taken), ROOM_MIN):
            self._slots = np.zeros(max(2 * len(taken), ROOM_MIN), np.int32)  # more is rarely needed
        return taken


def _said(state: KeyedState) -> str:
    keys = ", ".join(f"{field.name} {field.type}" for field in state.keys) or "no key"
    measures = ", ".join(f"{m.kind}({m.column or ''}{f' {m.type}' if m.type else ''})" for m in state.measures.values())
    return f"{keys}: {measures or 'no measure'}"


# ---- kernels over several states: the rows of state k end at row ``ends[k]`` (int64, exclusive), and ``places[k, which]`` has
# the addresses of its table of keys, or of one of its accumulators.


def _slots_each(
    indexes: Sequence[KeyIndex], columns: Sequence[pa.Array], ends: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Find the slots of all rows, as ``KeyIndex.slots`` does.

    Keys of one word take a single call, for which every table must have room already. Other keys take a call for each state."""
    if indexes[0].words is None:
        return np.concatenate([
            index.slots([column.slice(start, end - start) for column in columns])
            for index, (start, end) in zip(indexes, _parts(ends), strict=True)
        ])  # fmt: skip
    (column,), (type_,) = columns, indexes[0].types
    if column.type != type_ or len(column) != ends[-1]:
        # Kernels read by address: a wrong type or length would read outside of the column.
        raise TypeError(f"expected {ends[-1]} rows of {type_}, not {len(column)} rows of {column.type}")
    out = np.empty(len(column), np.int32)
    whole = kernels.find_words_each(*raw(column), ends, out, places, TABLE)
    assert whole, "a table had no room for its rows"
    return out


def _keys_each(indexes: Sequence[KeyIndex], slots: np.ndarray, ends: np.ndarray, places: np.ndarray) -> list[pa.Array]:
    """Return the keys of slots, as ``KeyIndex.keys`` does."""
    if indexes[0].words is None:
        found = [index.keys(slots[start:end]) for index, (start, end) in zip(indexes, _parts(ends), strict=True)]
        return [pa.concat_arrays(columns) for columns in zip(*found, strict=True)]
    words, valid = np.empty(len(slots), np.uint64), np.empty(len(slots), np.bool_)
    whole = kernels.take_words_each(slots, ends, places, TABLE, words, valid) == len(slots)
    return [fixed_column(indexes[0].types[0], words, None if whole else valid)]


def _update_each(
    made: Accumulator, slots: np.ndarray, column: pa.Array | None, ends: np.ndarray, places: np.ndarray, which: int
) -> int:
    """Update accumulators that are all like ``made`` and have room, as ``Accumulator.update`` does.

    Return the first state whose sum does not fit, or -1."""
    assert made.each is not None
    if column is not None and (column.type != made.type or len(column) != ends[-1]):
        raise TypeError(f"expected {ends[-1]} rows of {made.type}, not {len(column)} rows of {column.type}")
    if column is None or (isinstance(made, Count) and not column.null_count):
        return int(kernels.update_each(made.each, slots, 0, 0, 0, 0, made.flip, ends, places, which))
    if isinstance(made, Count):
        validity = column.buffers()[0]
        about = kernels.COUNT_VALID, slots, 0, validity.address, column.offset, 0
        return int(kernels.update_each(*about, made.flip, ends, places, which))
    return int(kernels.update_each(made.each, slots, *raw(column), made.flip, ends, places, which))


def _result_each(made: Accumulator, slots: np.ndarray, ends: np.ndarray, places: np.ndarray, which: int) -> pa.Array:
    """Return the results of slots, as ``Accumulator.result`` does, for accumulators like ``made``."""
    assert made.each is not None
    words, valid = np.empty(len(slots), np.int64), np.empty(len(slots), np.bool_)
    whole = kernels.gather_each(made.each, slots, ends, places, which, made.flip, words, valid) == len(slots)
    return made.column_of(words, None if whole else valid)


def _parts(ends: np.ndarray) -> list[tuple[int, int]]:
    """Return begin and end of the rows of each state."""
    each = ends.tolist()
    return list(zip([0, *each], each, strict=False))
