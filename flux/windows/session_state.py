"""State of session windows: the open sessions of each key.

Law: results depend on the rows, their order and the watermarks alone: neither on the cut of the rows into calls, nor on a
snapshot and restore in between, nor on sessions that ended before. The last is what makes replay points possible
(``needs_from``): a state that begins empty gives the same sessions, in the same order, as soon as all older ones have ended.

A row joins each session that is not further away than the gap: it extends one, joins two or more to one, or opens one. A session
ends when the watermark is above its last row by more than the gap. At exactly the gap a row that joins may still come, because
such a row is not late: so a session waits for one microsecond more than a window of the same end.

Sessions are numbered by slots, in the order of their first rows; joined ones keep the lowest slot. Slots of ended and joined
sessions are free for good until more than half are; then the open sessions, and the keys that have any, move together. So keys
that never come back are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.windows.window import SessionWindow
from partitioning.accumulators import Accumulator, accumulator
from partitioning.errors import StateMismatchError
from partitioning.key_index import KeyIndex
from partitioning.keyed_state import ChangedSlots, TypedMeasure
from partitioning.slot_tables import grown

#: Below this number of slots sessions do not move together.
SLOTS_MIN = 1024


class Sessions(NamedTuple):
    """Ended sessions, by end and start."""

    keys: list[pa.Array]
    #: Times of the first rows, in microseconds.
    starts: np.ndarray
    #: Times of the last rows plus the gap.
    ends: np.ndarray
    #: The result of each measure.
    values: list[pa.Array]


class SessionState:
    """The open sessions of one partition. Arrays of sessions are by slot, below ``_size``; those of keys by the slot of the
    key."""

    def __init__(self, keys: Sequence[pa.Field], measures: Mapping[str, TypedMeasure], window: SessionWindow) -> None:
        self.window = window
        self._keys, self._measures = tuple(keys), dict(measures)
        self._told: tuple[int, int] | None = None  # keys and sessions at the last call of ``changes``
        self._changed = ChangedSlots()
        self._clear()

    def _clear(self) -> None:
        self._index = KeyIndex(self._keys) if self._keys else None
        self._accumulators: list[Accumulator] = [accumulator(*measure) for measure in self._measures.values()]
        self._size = self._open = 0
        self._owners = np.zeros(0, np.int32)  # the key of each session
        self._starts, self._lasts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._begun = np.zeros(0, np.int64)  # the step of the first row, ascending
        self._is_open = np.zeros(0, np.bool_)
        # The open sessions of a key are a chain, the earliest first; -1: none.
        self._next = np.zeros(0, np.int32)
        self._heads = np.zeros(0, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that keys, sessions and accumulators hold."""
        arrays = (self._owners, self._starts, self._lasts, self._begun, self._is_open, self._next, self._heads)
        index = 0 if self._index is None else self._index.nbytes
        return index + sum(array.nbytes for array in arrays) + sum(made.nbytes for made in self._accumulators)

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return self._open

    # ---- rows

    @property
    def needs_from(self) -> int | None:
        """The first step that an open session has a row of. None: no session is open."""
        return int(self._begun[np.argmax(self._is_open[: self._size])]) if self._open else None

    @property
    def next_end(self) -> int | None:
        """The first watermark that closes a session. None: no session is open."""
        lasts = self._lasts[: self._size][self._is_open[: self._size]]
        return int(lasts.min()) + self.window.gap + 1 if len(lasts) else None

    def add(
        self, times: np.ndarray, keys: Sequence[pa.Array], columns: Sequence[pa.Array | None], step: int = 0
    ) -> None:
        """Add rows of a step, none of them below the watermark: ``times`` in microseconds, ``columns`` as for
        ``KeyedState.update``. Raises SumOverflowError, which leaves the state unusable."""
        if not len(times):
            return
        owners = np.zeros(len(times), np.int32) if self._index is None else self._index.slots(keys)
        self._make_room_for(1 if self._index is None else len(self._index))
        met = self._chains(np.unique(owners))
        runs = _Runs.of(
            np.concatenate([self._owners[met], owners]),
            np.concatenate([self._starts[met], times]),
            np.concatenate([self._lasts[met], times]),
            self.window.gap,
        )
        into = self._slots_of(runs, met, step)
        self._join(met, into[runs.of_item[: len(met)]])
        self._set(into, runs)
        slots = into[runs.of_item[len(met) :]]
        for made, column in zip(self._accumulators, columns, strict=True):
            made.update(slots, column, self._size)
        self._changed.note(into, self._size)

    def _make_room(self) -> None:
        if self._size > len(self._owners):
            for name in ("_owners", "_starts", "_lasts", "_begun", "_is_open", "_next"):
                setattr(self, name, grown(getattr(self, name), max(2 * self._size, 64)))

    def _make_room_for(self, keys: int) -> None:
        known = len(self._heads)
        if keys > known:
            self._heads = grown(self._heads, max(2 * known, keys))
            self._heads[known:] = -1

    def _chains(self, owners: np.ndarray) -> np.ndarray:
        """Return the open sessions of these keys."""
        found, at = [np.zeros(0, np.int32)], self._heads[owners]
        while len(at := at[at >= 0]):
            found.append(at)
            at = self._next[at]
        return np.concatenate(found)

    def _slots_of(self, runs: _Runs, met: np.ndarray, step: int) -> np.ndarray:
        """Return the slot of each run: the lowest of its sessions, or a new one, in the order of the first rows."""
        into = np.full(len(runs.owners), -1, np.int32)
        by_slot = np.argsort(met)[::-1]  # the lowest slot of a run is written last
        into[runs.of_item[by_slot]] = met[by_slot]
        of_rows = runs.of_item[len(met) :]
        rows = np.arange(len(of_rows))
        first = np.empty(len(into), np.int64)
        first[of_rows[::-1]] = rows[::-1]
        new = of_rows[(into[of_rows] < 0) & (first[of_rows] == rows)]
        into[new] = np.arange(self._size, self._size + len(new), dtype=np.int32)
        self._size += len(new)
        self._make_room()
        self._begun[into[new]] = step
        return into

    def _join(self, met: np.ndarray, into: np.ndarray) -> None:
        """Add the accumulators of sessions to those of the sessions ``into`` which they join, the earliest first."""
        joins = np.flatnonzero(met != into)
        joins = joins[np.lexsort((self._starts[met[joins]], into[joins]))]
        while len(joins):
            first = np.ones(len(joins), np.bool_)  # of several that join one session, one at a time
            first[1:] = into[joins[1:]] != into[joins[:-1]]
            now = joins[first]
            for made, measure in zip(self._accumulators, self._measures.values(), strict=True):
                other = accumulator(*measure)
                other.load(made.state(met[now]))
                made.merge(into[now], other, self._size)
            joins = joins[~first]
        gone = met[met != into]
        self._is_open[gone] = False
        self._open -= len(gone)
        self._changed.note(gone, self._size)

    def _set(self, into: np.ndarray, runs: _Runs) -> None:
        """Write the sessions of the runs, and the chains of their keys."""
        self._open += int(np.count_nonzero(~self._is_open[into]))
        self._owners[into], self._is_open[into] = runs.owners, True
        self._starts[into], self._lasts[into] = runs.starts, runs.lasts
        self._link(into, runs.owners)

    def _link(self, slots: np.ndarray, owners: np.ndarray) -> None:
        """Make the chains of keys from all their sessions, given by key and start."""
        same = owners[1:] == owners[:-1]
        self._next[slots] = -1
        self._next[slots[:-1][same]] = slots[1:][same]
        first = np.ones(len(slots), np.bool_)
        first[1:] = ~same
        self._heads[owners[first]] = slots[first]

    # ---- ends

    def close(self, watermark: int) -> Sessions | None:
        """Take out the sessions that no row can join any more. None: there are none."""
        there = np.flatnonzero(self._is_open[: self._size])
        # Compared without a sum, which might not fit.
        ended = (
            there[self._lasts[there] < watermark - self.window.gap]
            if watermark > self.window.gap + (-1 << 63)
            else there[:0]
        )
        if not len(ended):
            return None
        ended = ended[np.lexsort((ended, self._starts[ended], self._lasts[ended]))].astype(np.int32)
        keys = [] if self._index is None else self._index.keys(self._owners[ended])
        values = [made.result(ended) for made in self._accumulators]
        closed = Sessions(keys, self._starts[ended], self._lasts[ended] + self.window.gap, values)
        self._forget(ended)
        return closed

    def _forget(self, ended: np.ndarray) -> None:
        self._is_open[ended] = False
        self._open -= len(ended)
        # Ended sessions are the earliest of their keys, so the chain goes on behind the last of them.
        ordered = ended[np.argsort(self._starts[ended], kind="stable")]
        self._heads[self._owners[ordered]] = self._next[ordered]
        self._changed.note(ended, self._size)
        if self._size >= SLOTS_MIN and 2 * self._open < self._size:
            self._move_together()

    def _move_together(self) -> None:
        """Give the open sessions, and the keys that have any, the lowest slots. The next changes are the whole state."""
        kept = np.flatnonzero(self._is_open[: self._size]).astype(np.int32)
        owners, of_kept = np.unique(self._owners[kept], return_inverse=True)
        keys = (
            None
            if self._index is None
            else pa.Table.from_arrays(self._index.keys(owners), schema=pa.schema(self._keys))
        )
        times = self._starts[kept], self._lasts[kept], self._begun[kept]
        states = [made.state(kept) for made in self._accumulators]
        self._clear()
        self._load(keys, of_kept.astype(np.int32), *times, np.ones(len(kept), np.bool_), states)
        self._told, self._changed = None, ChangedSlots()

    # ---- on its way

    def snapshot(self) -> dict[str, pa.Table | None]:
        """Return the keys, and one row per slot of a session: key, times and the state of each measure."""
        return {"keys": None if self._index is None else self._index.to_arrow(), "sessions": self._rows(None)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by a ``snapshot``. Raises StateMismatchError if it was taken from a state of other measures."""
        sessions = snapshot["sessions"]
        expected = self._rows(np.zeros(0, np.int32)).schema.names
        if sessions.schema.names != expected:
            raise StateMismatchError(f"the snapshot has columns {sessions.schema.names}, expected {expected}")
        self._clear()
        self._load(snapshot["keys"], *self._times(sessions), self._states(sessions))
        self._told, self._changed = None, ChangedSlots()

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        """Return the sessions that changed since the last call, and the keys that are new. None: there was no call before, more
        than ``share_max`` of all sessions changed, or sessions have moved together."""
        told = self._told
        keys = 0 if self._index is None else len(self._index)
        slots = self._changed.take()
        self._told = keys, self._size
        if told is None or len(slots) > share_max * self._size:
            return None
        new = np.arange(told[0], keys, dtype=np.int32)
        return {
            "first": told,
            "keys": [] if self._index is None else self._index.keys(new),
            "size": self._size,
            "slots": slots,
            "sessions": self._rows(slots),
        }

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        known = 0 if self._index is None else len(self._index)
        if tuple(changes["first"]) != (known, self._size):
            raise StateMismatchError(
                f"changes of a state of {changes['first']} keys and sessions cannot be applied to one of {(known, self._size)}"
            )
        if self._index is not None and len(changes["keys"][0]):
            self._index.slots(changes["keys"])
        slots, sessions = changes["slots"], changes["sessions"]
        self._size = changes["size"]
        self._make_room()
        for array, values in zip(self._by_slot(), self._times(sessions), strict=True):
            array[slots] = values
        for made, state in zip(self._accumulators, self._states(sessions), strict=True):
            made.put(slots, state, self._size)
        self._make_chains()

    def _rows(self, slots: np.ndarray | None) -> pa.Table:
        which = slice(0, self._size) if slots is None else slots
        columns = {
            "owner": pa.array(self._owners[which]),
            "start": pa.array(self._starts[which]),
            "last": pa.array(self._lasts[which]),
            "begun": pa.array(self._begun[which]),
            "open": pa.array(self._is_open[which]),
        }
        for name, made in zip(self._measures, self._accumulators, strict=True):
            columns |= {f"{name}.{part}": values for part, values in made.state(slots)}
        return pa.table(columns)

    def _by_slot(self) -> tuple[np.ndarray, ...]:
        return self._owners, self._starts, self._lasts, self._begun, self._is_open

    @staticmethod
    def _times(sessions: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        owners, starts, lasts, begun, is_open = (sessions.column(i).to_numpy().copy() for i in range(5))
        return owners, starts, lasts, begun, is_open

    def _states(self, sessions: pa.Table) -> list[list[tuple[str, pa.Array]]]:
        return [
            [(part, sessions.column(f"{name}.{part}")) for part in made.parts]
            for name, made in zip(self._measures, self._accumulators, strict=True)
        ]

    def _load(
        self,
        keys: pa.Table | None,
        owners: np.ndarray,
        starts: np.ndarray,
        lasts: np.ndarray,
        begun: np.ndarray,
        is_open: np.ndarray,
        states: Iterable[list[tuple[str, pa.Array]]],
    ) -> None:
        if keys is not None:
            self._index = KeyIndex.from_arrow(keys)
        self._owners, self._starts, self._lasts, self._begun, self._is_open = owners, starts, lasts, begun, is_open
        self._size = len(owners)
        for made, state in zip(self._accumulators, states, strict=True):
            made.load(state)
        self._make_chains()

    def _make_chains(self) -> None:
        there = np.flatnonzero(self._is_open[: self._size]).astype(np.int32)
        self._open = len(there)
        there = there[np.lexsort((self._starts[there], self._owners[there]))]
        self._next = np.full(len(self._owners), -1, np.int32)
        self._heads = np.full(1 if self._index is None else len(self._index), -1, np.int32)
        self._link(there, self._owners[there])


class _Runs(NamedTuple):
    """Sessions as they are after rows have come: stretches of items of one key without a gap that is too long, by key and
    start."""

    owners: np.ndarray
    starts: np.ndarray
    lasts: np.ndarray
    #: The run of each item.
    of_item: np.ndarray

    @classmethod
    def of(cls, owners: np.ndarray, starts: np.ndarray, lasts: np.ndarray, gap: int) -> _Runs:
        """Make the runs of items: rows, and sessions that are open already."""
        order = np.lexsort((starts, owners))
        owners, starts = owners[order], starts[order]
        first = np.ones(len(order), np.bool_)
        first[1:] = owners[1:] != owners[:-1]
        reach = _reach(lasts[order], first)
        first[1:] |= starts[1:] - reach[:-1] > gap
        begins = np.flatnonzero(first)
        of_item = np.empty(len(order), np.int64)
        of_item[order] = np.cumsum(first) - 1
        return cls(owners[begins], starts[begins], reach[np.append(begins[1:], len(order)) - 1], of_item)


def _reach(lasts: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the greatest of ``lasts`` from the first item of the same key through each item.

    A running maximum over ranks, which are raised from key to key, begins anew at each key."""
    values, ranks = np.unique(lasts, return_inverse=True)
    lift = (np.cumsum(first) - 1) * len(values)
    reach: np.ndarray = values[np.maximum.accumulate(ranks + lift) - lift]
    return reach
