"""Rows of one side of a join that wait for matches.

Law: answers depend on the rows, their order, and the limits by which they were forgotten: neither on the cut of the rows into
calls, nor on a snapshot and restore, nor on when forgotten rows leave memory.

Rows are numbered in the order of their arrival, for ever. They lie one behind the other in an arena. Rows of one key are a chain,
newest first, which begins at the slot of the key in an index that both sides share. A row that is forgotten stays in its place
until more than half of all are; then the others move together. So memory is bounded by twice the rows that wait.

A chain is left at the first row behind which none has a range that reaches the time of the row that looks, and stretches of it
whose rows are all later than that row's range are passed over in leaps: rows that cannot match because of their time are no work.
Blocks of rows tell how soon one of their rows ends, so rows that wait longer are no work either when rows are forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.joins.arena import Arena
from flux.windows.window import END_OF_TIME, NEVER
from partitioning import kernels
from partitioning.errors import StateMismatchError
from partitioning.kernels import BLOCK, HIGH, LOW, TIME, UNTIL
from partitioning.key_index import CHUNK_ROWS, KeyIndex
from partitioning.slot_tables import grown

#: Below this number of rows they do not move together.
ROWS_MIN = 1024
#: Rows of one side are numbered by int32 in the heads of chains.
ROWS_MAX = (1 << 31) - 1


class ArrivingRows(NamedTuple):
    """Facts of rows of one side that do not depend on other rows. Arrays are by row."""

    #: Whether the row may match anything; None: each may.
    valid: np.ndarray | None
    #: As those of ``ArrivedRows``.
    times: np.ndarray
    lows: np.ndarray
    highs: np.ndarray
    untils: np.ndarray

    def part(self, rows: slice | np.ndarray) -> ArrivingRows:
        """Return some of the rows, by a slice or a mask."""
        valid, *facts = self
        return ArrivingRows(None if valid is None else valid[rows], *(fact[rows] for fact in facts))


class ArrivedRows(NamedTuple):
    """Rows of one side as they arrive. Arrays are by row."""

    #: Slot of the key, int32; -1: the row matches nothing.
    owners: np.ndarray
    #: Event time, int64 microseconds.
    times: np.ndarray
    #: Least and greatest event time of rows of the other side that match.
    lows: np.ndarray
    highs: np.ndarray
    #: Time until which the row waits.
    untils: np.ndarray


class WaitLimits(NamedTuple):
    """Limits by which rows of one side are forgotten."""

    #: As ``WaitingRows.high_limit`` and ``until_limit``.
    high: int
    until: int
    #: As ``WaitingRows.over``.
    over: bool


class WaitingRows:
    """The rows of one side. Arrays are by place in the arena, below ``_size``."""

    def __init__(self, schema: pa.Schema, needed: Sequence[int], keys: Sequence[pa.Field]) -> None:
        """``needed``: positions of the columns that are kept; ``keys``: the fields of the index."""
        self._schema, self._needed, self._keys = schema, tuple(needed), tuple(keys)
        #: The number of the next row.
        self.next = 0
        #: Rows that match no later row of the other side than this, or wait until an earlier time, are forgotten.
        self.high_limit = self.until_limit = NEVER
        #: Nothing comes from the other side any more.
        self.over = False
        self._told: int | None = None  # the next number at the last call of ``changes``
        self._newly: list[np.ndarray] = []  # numbers of older rows that have been matched since
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self.columns = Arena(self._schema, self._needed)
        self._size = self._gone = 0
        self._at = _lines(0)
        self._owners = np.zeros(0, np.int32)
        self._numbers = np.zeros(0, np.int64)
        self._begun = np.zeros(0, np.int64)  # the step of the row, ascending
        self.matched = np.zeros(0, np.bool_)
        self.gone = np.zeros(0, np.bool_)
        self._least = np.zeros((0, 2), np.int64)
        self._heads = np.zeros(0, np.int32)

    def __len__(self) -> int:
        """Return the number of rows that wait."""
        return self._size - self._gone

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        arrays = (self._at, self._owners, self._numbers, self._begun, self.matched, self.gone, self._least, self._heads)
        return self.columns.nbytes + sum(array.nbytes for array in arrays)

    @property
    def needs_from(self) -> int | None:
        """The step of the first row that waits. None: no row waits."""
        return int(self._begun[np.argmin(self.gone[: self._size])]) if len(self) else None

    @property
    def earliest(self) -> int:
        """The least event time of the rows that wait."""
        times = self._at[: self._size, TIME][~self.gone[: self._size]]
        return int(times.min(initial=END_OF_TIME))

    @property
    def limits(self) -> WaitLimits:
        """The limits by which rows have been forgotten."""
        return WaitLimits(self.high_limit, self.until_limit, self.over)

    def forgot(self, limits: WaitLimits) -> bool:
        """Tell whether all rows that these limits forget are forgotten: rows that came since are within the limits of then."""
        return limits.high <= self.high_limit and limits.until <= self.until_limit and limits.over <= self.over

    @property
    def next_until(self) -> int:
        """The least time until which a row waits; rows that are gone may count."""
        return int(self._least[:, 1].min(initial=END_OF_TIME))

    # ---- rows

    def add(self, rows: ArrivedRows, matched: np.ndarray, columns: Sequence[pa.Array], step: int, keys: int) -> None:
        """Add rows, each with a key; the index has this many ``keys``. ``columns`` are the needed ones."""
        count = len(rows.owners)
        numbers = np.arange(self.next, self.next + count, dtype=np.int64)
        self.next += count
        self._append(rows, matched, columns, np.full(count, step, np.int64), numbers, keys)

    def _append(
        self,
        rows: ArrivedRows,
        matched: np.ndarray,
        columns: Sequence[pa.Array],
        steps: np.ndarray,
        numbers: np.ndarray,
        keys: int,
    ) -> None:
        first, size = self._size, self._size + len(numbers)
        self._make_room(size, keys)
        kernels.put_rows(rows.times, rows.lows, rows.highs, rows.untils, self._at, first)
        self._owners[first:size], self._numbers[first:size] = rows.owners, numbers
        self._begun[first:size], self.matched[first:size] = steps, matched
        self.columns.append(columns)
        self._size = size
        kernels.link_rows(self._owners, self._heads, self._at, first, size)
        kernels.note_least(self._at, first, size, self._least)

    def _make_room(self, rows: int, keys: int) -> None:
        known = len(self._at)
        if rows > ROWS_MAX:
            raise MemoryError(
                f"a partition of a join cannot keep more than {ROWS_MAX:,} rows a side; use more partitions"
            )
        if rows > known:
            room = max(2 * known, rows, 64)
            for name in ("_owners", "_numbers", "_begun", "matched", "gone"):
                setattr(self, name, grown(getattr(self, name), room))
            before, self._at = self._at, _lines(room)
            self._at[:known] = before
            blocks = len(self._least)
            self._least = grown(self._least, -(-room // BLOCK))
            self._least[blocks:] = END_OF_TIME
        known = len(self._heads)
        if keys > known:
            self._heads = grown(self._heads, max(2 * known, keys))
            self._heads[known:] = -1

    def pairs(
        self, rows: ArrivedRows, first: int, row: int, room: int, keys: int, once: bool = False
    ) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Find the rows here that match rows of the other side, as ``kernels.pair_rows`` does, at most ``room`` at once."""
        self._make_room(0, keys)
        mine, found = np.empty(room, np.int64), np.empty(room, np.int64)
        count, first, row = kernels.pair_rows(
            rows.owners, rows.times, rows.lows, rows.highs, self._heads, self._at, self.until_limit, first, row, once, mine, found
        )  # fmt: skip
        return mine[:count], found[:count], first, row

    def match(self, rows: np.ndarray) -> np.ndarray:
        """Note that rows have a match. Return which of them, in this order, have their first one."""
        keep = np.empty(len(rows), np.bool_)
        kernels.first_of_each(rows, self.matched, keep)
        if self._told is not None:
            numbers = self._numbers[rows[keep]]
            self._newly.append(numbers[numbers < self._told])
        return keep

    def remove(self, rows: np.ndarray) -> None:
        """Forget rows, each named once."""
        self.gone[rows] = True
        self._at[rows, LOW], self._at[rows, HIGH] = END_OF_TIME, NEVER
        # A key that all its rows have left would be walked through by each row that comes.
        kernels.skip_gone(self._owners[rows], self.gone, self._heads, self._at)
        self._gone += len(rows)

    # ---- ends

    def forget(self, high_limit: int, until_limit: int, everything: bool = False) -> np.ndarray:
        """Forget rows by limits that never fall, or all. Return the places of the rows that had no match, in order of arrival.
        They can be taken until ``move_together``."""
        self.high_limit, self.until_limit = max(self.high_limit, high_limit), max(self.until_limit, until_limit)
        self.over |= everything
        if not len(self):
            return np.zeros(0, np.int64)
        if self.over:
            rows = np.flatnonzero(~self.gone[: self._size])
            self.gone[rows] = True
        else:
            found = np.empty(len(self), np.int64)
            limits = self.high_limit, self.until_limit
            rows = found[: kernels.forget_rows(self._at, self.gone, self._size, *limits, self._least, found)]
        self._gone += len(rows)
        alone: np.ndarray = rows[~self.matched[rows]]
        return alone

    @property
    def untidy(self) -> bool:
        """Whether forgotten rows are more than half of all, or all."""
        return self._gone > 0 and (self._gone == self._size or (self._size >= ROWS_MIN and 2 * self._gone > self._size))

    def live(self) -> np.ndarray:
        """Return the places of the rows that wait, ascending."""
        return np.flatnonzero(~self.gone[: self._size])

    def owners(self) -> np.ndarray:
        """Return the keys of the rows that wait."""
        owners: np.ndarray = self._owners[self.live()]
        return owners

    def move_together(self, moved: np.ndarray | None = None) -> None:
        """Drop forgotten rows from memory. ``moved``: the new slot of each key."""
        kept = self.live()
        count, keys = len(kept), len(self._heads)
        if not count:
            self.clear()
            return
        room = len(self._at) if 4 * count > len(self._at) else 2 * count  # the same memory, if it is not much too large
        for name in ("_at", "_owners", "_numbers", "_begun", "matched"):
            before = getattr(self, name)
            after = before if room == len(before) else _lines(room) if name == "_at" else np.zeros(room, before.dtype)
            after[:count] = before[kept]
            setattr(self, name, after)
        if moved is not None:
            self._owners[:count] = moved[self._owners[:count]]
            keys = int(moved.max()) + 1
        self.gone = np.zeros(room, np.bool_)
        self._least = np.full((-(-room // BLOCK), 2), END_OF_TIME)
        self._heads = np.full(keys, -1, np.int32)
        self.columns.keep(kept)
        self._size, self._gone = count, 0
        kernels.link_rows(self._owners, self._heads, self._at, 0, count)
        kernels.note_least(self._at, 0, count, self._least)

    # ---- beside the steps

    def part(
        self, index: KeyIndex, touched: np.ndarray, given: tuple[WaitLimits, WaitLimits] | None, into: KeyIndex
    ) -> WaitingRows:
        """Return copies of rows, in order of arrival: those of ``touched`` keys, told by slot, and if ``given``, those without a
        match that are forgotten by its second limits and not by the first (design: peek). ``into``: their index."""
        size = self._size
        wanted = touched[self._owners[:size]] if touched.any() else np.zeros(size, np.bool_)
        if given is not None:
            before, then = given
            wanted |= self._forgotten(then) & ~self._forgotten(before) & ~self.matched[:size]
        wanted &= ~self.gone[:size]
        made = WaitingRows(self._schema, self._needed, self._keys)
        made._take_limits(self._limits())
        made._append_table(self._table(np.flatnonzero(wanted), index), into)
        return made

    def _forgotten(self, limits: WaitLimits) -> np.ndarray:
        """Return which rows are forgotten by limits."""
        if limits.over:
            return np.ones(self._size, np.bool_)
        forgotten: np.ndarray = self._at[: self._size, HIGH] < limits.high
        return forgotten | (self._at[: self._size, UNTIL] < limits.until)

    # ---- on their way

    def snapshot(self, index: KeyIndex) -> dict[str, Any]:
        """Return the rows that wait, in order of arrival, and the limits."""
        return {"rows": self._table(self.live(), index), **self._limits()}

    def restore(self, snapshot: Mapping[str, Any], index: KeyIndex) -> None:
        """Replace the rows by those of a ``snapshot``. Raises StateMismatchError if it was taken from rows of other columns."""
        self.clear()
        self._told, self._newly = None, []
        self._take_limits(snapshot)
        self._append_table(snapshot["rows"], index)

    def changes(self, index: KeyIndex) -> dict[str, Any] | None:
        """Return the changes since the last call: rows that are new, numbers of older rows that have a match now, and the limits.
        Rows that were forgotten follow from the limits. None: there was no call before."""
        told, self._told = self._told, self.next
        newly, self._newly = self._newly, []
        if told is None:
            return None
        live = self.live()
        new = live[np.searchsorted(self._numbers[live], told) :]
        matched = np.concatenate(newly) if newly else np.zeros(0, np.int64)
        return {"first": told, "rows": self._table(new, index), "matched": matched, **self._limits()}

    def apply_changes(self, changes: Mapping[str, Any], index: KeyIndex, once: bool) -> None:
        """Take the ``changes`` of rows that were equal to these when they were asked for changes before. ``once``: a row with a
        match is forgotten. Raises StateMismatchError if they were not equal."""
        if changes["first"] != self.next:
            raise StateMismatchError(
                f"changes of a side with {changes['first']} rows cannot be applied to one with {self.next}"
            )
        numbers = changes["matched"]
        rows = np.searchsorted(self._numbers[: self._size], numbers)
        rows = rows[rows < self._size]
        rows = rows[np.isin(self._numbers[rows], numbers) & ~self.gone[rows]]
        self.matched[rows] = True
        if once:
            self.remove(rows)
        self._take_limits(changes)
        self.forget(self.high_limit, self.until_limit)
        self._append_table(changes["rows"], index)

    def _limits(self) -> dict[str, Any]:
        limits = {"high_limit": self.high_limit, "until_limit": self.until_limit, "over": self.over}
        return {"next": self.next, **limits}

    def _take_limits(self, state: Mapping[str, Any]) -> None:
        self.next, self.over = state["next"], state["over"]
        self.high_limit, self.until_limit = state["high_limit"], state["until_limit"]

    def _names(self) -> list[str]:
        numbers = ["number", "begun", "matched", "time", "low", "high", "until"]
        return numbers + [f"key.{at}" for at in range(len(self._keys))] + [f"column.{at}" for at in self._needed]

    def _table(self, rows: np.ndarray, index: KeyIndex) -> pa.Table:
        types = [pa.int64(), pa.int64(), pa.bool_(), *[pa.int64()] * 4, *index.types]
        types += [self._schema.field(at).type for at in self._needed]
        schema = pa.schema(list(zip(self._names(), types, strict=True)))
        batches = []
        chunks = (rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS))
        for which in (part for chunk in chunks for part in self.columns.parts(chunk)):
            facts = [self._numbers[which], self._begun[which], self.matched[which]]
            facts += [self._at[which, fact] for fact in (TIME, LOW, HIGH, UNTIL)]
            arrays = [pa.array(fact) for fact in facts] + index.keys(self._owners[which])
            batches.append(pa.RecordBatch.from_arrays(arrays + self.columns.rows(pa.array(which)), schema=schema))
        return pa.Table.from_batches(batches, schema)

    def _append_table(self, rows: pa.Table, index: KeyIndex) -> None:
        if rows.schema.names != self._names():
            raise StateMismatchError(f"the snapshot has columns {rows.schema.names}, expected {self._names()}")
        for batch in rows.to_batches():
            if not batch.num_rows:
                continue
            numbers, begun, matched, times, lows, highs, untils = (
                column.to_numpy(zero_copy_only=False) for column in batch.columns[:7]
            )
            end = 7 + len(self._keys)
            owners = index.slots(batch.columns[7:end])
            arrived = ArrivedRows(owners, times, lows, highs, untils)
            self._append(arrived, matched, batch.columns[end:], begun, numbers, len(index))


def _lines(rows: int) -> np.ndarray:
    """Return ``at`` of kernels, zero, with each row in one line of the cache."""
    memory = np.zeros(8 * rows + 8, np.int64)
    first = -(memory.ctypes.data // 8) % 8
    return memory[first : first + 8 * rows].reshape(rows, 8)
