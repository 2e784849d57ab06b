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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.windows.window import END_OF_TIME, NEVER, SessionWindow
from partitioning import kernels
from partitioning.accumulators import Accumulator, accumulator
from partitioning.errors import StateMismatchError
from partitioning.kernels import LAST, NEXT, OWNER, START
from partitioning.key_index import KeyIndex
from partitioning.keyed_state import ChangedSlots, TypedMeasure
from partitioning.slot_tables import grown

#: Below this number of slots sessions do not move together.
SLOTS_MIN = 1024


class Sessions(NamedTuple):
    """Ended sessions, or a part of them, by end and start."""

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
        self._accumulators = self._fresh()
        self._size = self._open = 0
        # Times, key and next session of each session, as kernels take them. The open sessions of a key are a chain, the earliest
        # first.
        self._at = np.zeros((0, 4), np.int64)
        self._begun = np.zeros(0, np.int64)  # the step of the first row, ascending
        self._is_open = np.zeros(0, np.bool_)
        self._parents = np.zeros(0, np.int32)  # each slot itself, between two calls
        self._heads = np.zeros(0, np.int32)
        self._earliest = END_OF_TIME  # no last row of an open session is before this time

    def _fresh(self) -> list[Accumulator]:
        """Make an accumulator for each measure."""
        return [accumulator(*measure) for measure in self._measures.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that keys, sessions and accumulators hold."""
        arrays = (self._at, self._begun, self._is_open, self._parents, self._heads)
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
        lasts = self._at[: self._size, LAST][self._is_open[: self._size]]
        return int(lasts.min()) + self.window.gap + 1 if len(lasts) else None

    def may_end(self, watermark: int) -> bool:
        """Tell whether this watermark may close a session; False: it closes none."""
        return watermark - self.window.gap > self._earliest

    def add(
        self, times: np.ndarray, keys: Sequence[pa.Array], columns: Sequence[pa.Array | None], step: int = 0
    ) -> None:
        """Add rows of a step, none of them below the watermark: ``times`` in microseconds, ``columns`` as for
        ``KeyedState.update``. Raises SumOverflowError, which leaves the state unusable."""
        rows, before = len(times), self._size
        if not rows:
            return
        owners = np.zeros(rows, np.int32) if self._index is None else self._index.slots(keys)
        self._make_room_for(1 if self._index is None else len(self._index))
        self._make_room(before + rows)
        times = np.ascontiguousarray(times, np.int64)
        slots, gone, into = (np.empty(rows, np.int32) for _ in range(3))
        self._size, joined = kernels.join_sessions(
            owners, times.ctypes.data, self.window.gap, self._heads, self._at, self._parents, before, slots, gone, into
        )
        self._is_open[before : self._size], self._begun[before : self._size] = True, step
        self._open += self._size - before - joined
        self._earliest = min(self._earliest, int(times.min()))
        if joined:
            self._join(gone[:joined], into[:joined], before)
        for made, column in zip(self._accumulators, columns, strict=True):
            made.update(slots, column, self._size)
        self._changed.note(slots, self._size)

    def _make_room(self, sessions: int) -> None:
        known = len(self._at)
        if sessions > known:
            room = max(2 * known, sessions, 64)
            for name in ("_at", "_begun", "_is_open", "_parents"):
                setattr(self, name, grown(getattr(self, name), room))
            self._parents[known:] = np.arange(known, room, dtype=np.int32)

    def _make_room_for(self, keys: int) -> None:
        known = len(self._heads)
        if keys > known:
            self._heads = grown(self._heads, max(2 * known, keys))
            self._heads[known:] = -1

    def _join(self, gone: np.ndarray, into: np.ndarray, before: int) -> None:
        """Add the accumulators of sessions that are gone to those of the sessions ``into`` that they have joined, the earliest
        first. Sessions from slot ``before`` on have no rows yet."""
        self._is_open[gone] = False
        self._changed.note(gone, self._size)
        old = gone < before
        gone, into = gone[old], into[old]
        order = np.lexsort((self._at[gone, START], into))
        gone, into = gone[order], into[order]
        while len(gone):
            first = np.ones(len(gone), np.bool_)  # of several that join one session, one at a time
            first[1:] = into[1:] != into[:-1]
            for made, other in zip(self._accumulators, self._fresh(), strict=True):
                other.load(made.state(gone[first]))
                made.merge(into[first], other, self._size)
            gone, into = gone[~first], into[~first]

    # ---- ends

    def close(self, watermark: int, rows_max: int = 1 << 62) -> Iterator[Sessions]:
        """Yield the sessions that no row can join any more, in parts of ``rows_max`` at most, and take them out. Consume all."""
        limit = watermark - self.window.gap
        if not self.may_end(watermark):
            return
        found = np.empty(self._open, np.int32)
        count, earliest = kernels.ended_sessions(self._at, self._is_open, self._size, limit, found)
        for slots in self._in_order(found[:count], rows_max):
            yield self._given(slots)
            self._forget(slots)
        self._earliest = earliest
        if count and self._size >= SLOTS_MIN and 2 * self._open < self._size:
            self._move_together()

    def _given(self, slots: np.ndarray) -> Sessions:
        keys = [] if self._index is None else self._index.keys(self._at[slots, OWNER].astype(np.int32))
        values = [made.result(slots) for made in self._accumulators]
        return Sessions(keys, self._at[slots, START], self._at[slots, LAST] + self.window.gap, values)

    def _in_order(self, ended: np.ndarray, rows_max: int) -> Iterator[np.ndarray]:
        """Yield ended sessions by their last rows, then by their first rows, then by slot, in parts of ``rows_max`` at most.

        They are put into coarse order at once, and into order part by part: a million take 60 ms, for which other partitions of
        the worker would wait."""
        if not len(ended):
            return
        coarse = self._at[ended, LAST]
        coarse -= coarse.min()
        coarse >>= max(int(coarse.max()).bit_length() - 16, 0)
        digits = coarse.astype(np.uint16)
        order = np.argsort(digits, kind="stable")
        ends = np.cumsum(np.bincount(digits))
        begin = 0
        while begin < len(order):
            # Through the last value that fits into a part, or the first one if its sessions are more.
            end = int(ends[np.searchsorted(ends, begin + rows_max, "right") - 1])
            end = end if end > begin else int(ends[digits[order[begin]]])
            slots = ended[order[begin:end]]
            slots = slots[_order(self._at[slots, LAST], self._at[slots, START])]
            for part in range(0, len(slots), rows_max):
                yield slots[part : part + rows_max]
            begin = end

    def _forget(self, ended: np.ndarray) -> None:
        kernels.unlink_sessions(ended, self._heads, self._at, self._is_open)
        self._open -= len(ended)
        self._changed.note(ended, self._size)

    def _move_together(self) -> None:
        """Give the open sessions, and the keys that have any, the lowest slots. The next changes are the whole state."""
        kept = np.flatnonzero(self._is_open[: self._size]).astype(np.int32)
        at, begun = self._at[kept], self._begun[kept]
        moved = np.append(np.cumsum(self._is_open[: self._size]) - 1, -1)  # the new slot of each; -1 stays
        at[:, NEXT] = moved[at[:, NEXT]]
        has = np.zeros(1 if self._index is None else len(self._index), np.bool_)
        has[at[:, OWNER]] = True
        owners = np.flatnonzero(has).astype(np.int32)
        at[:, OWNER] = (np.cumsum(has) - 1)[at[:, OWNER]]
        keys = None if self._index is None else self._index.table(owners)
        states = [made.state(kept) for made in self._accumulators]
        heads, earliest = moved[self._heads[owners]].astype(np.int32), self._earliest
        self._clear()
        self._load(keys, at, begun, np.ones(len(kept), np.bool_), states)
        self._open, self._heads, self._earliest = len(kept), heads, earliest
        self._told, self._changed = None, ChangedSlots()

    # ---- beside the steps

    def part(
        self, times: np.ndarray, keys: Sequence[Sequence[pa.Array]], watermark: int, after: int
    ) -> SessionState | EndingSessions:
        """Return a state with copies of the open sessions of these keys, given by batch, and of those that the watermark ends and
        ``after`` does not (design: peek). ``times``: of the rows of the keys. Without any nothing is copied."""
        return self._copied(self._reached(keys, watermark, after)) if keys else EndingSessions(self, after)

    def ending(self, watermark: int, after: int, rows_max: int) -> Iterator[Sessions]:
        """Yield the sessions that a watermark ends and ``after`` does not, as ``close`` does, and leave them in the state."""
        for slots in self._in_order(self._reached((), watermark, after), rows_max):
            yield self._given(slots)

    def _reached(self, keys: Sequence[Sequence[pa.Array]], watermark: int, after: int) -> np.ndarray:
        """Return the slots of those sessions, ascending."""
        slots = self._open_slots()
        lasts = self._at[slots, LAST]
        reached = lasts < watermark - self.window.gap
        if after != NEVER:
            reached &= lasts >= after - self.window.gap
        if keys and self._index is None:
            reached[:] = True
        elif keys:
            touched = np.zeros(len(self._index) + 1, np.bool_)  # type: ignore[arg-type]
            for each in keys:
                touched[self._index.find(each)] = True  # type: ignore[union-attr]
            touched[-1] = False  # of keys that it does not have
            reached |= touched[self._at[slots, OWNER]]
        found: np.ndarray = slots[reached]
        return found

    def _open_slots(self) -> np.ndarray:
        return np.flatnonzero(self._is_open[: self._size]).astype(np.int32)

    def _alike(self) -> SessionState:
        """Return another state of the same keys and measures, without sessions."""
        return SessionState(self._keys, self._measures, self.window)

    def _copied(self, slots: np.ndarray) -> SessionState:
        """Return a state with copies of these sessions, in this order."""
        made, at = self._alike(), self._at[slots]
        owners = np.unique(at[:, OWNER])
        at[:, OWNER] = np.searchsorted(owners, at[:, OWNER])
        keys = None if self._index is None else self._index.table(owners.astype(np.int32))
        states = [each.state(slots) for each in self._accumulators]
        made._load(keys, at, self._begun[slots], np.ones(len(slots), np.bool_), states)
        made._make_chains()
        return made

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
        self._load(snapshot["keys"], *self._sessions(sessions), self._states(sessions))
        self._make_chains()
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
        self._make_room(self._size)
        self._at[slots], self._begun[slots], self._is_open[slots] = self._sessions(sessions)
        for made, state in zip(self._accumulators, self._states(sessions), strict=True):
            made.put(slots, state, self._size)
        self._make_chains()

    def _rows(self, slots: np.ndarray | None) -> pa.Table:
        which = slice(0, self._size) if slots is None else slots
        columns = {
            "owner": pa.array(self._at[which, OWNER].astype(np.int32)),
            "start": pa.array(self._at[which, START]),
            "last": pa.array(self._at[which, LAST]),
            "begun": pa.array(self._begun[which]),
            "open": pa.array(self._is_open[which]),
        }
        for name, made in zip(self._measures, self._accumulators, strict=True):
            columns |= {f"{name}.{part}": values for part, values in made.state(slots)}
        return pa.table(columns)

    @staticmethod
    def _sessions(rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sessions without their chains, the steps of their first rows, and whether they are open."""
        owners, starts, lasts, begun, is_open = (rows.column(i).to_numpy() for i in range(5))
        return np.column_stack([starts, lasts, np.full(len(starts), -1), owners]), begun.copy(), is_open.copy()

    def _states(self, sessions: pa.Table) -> list[list[tuple[str, pa.Array]]]:
        return [
            [(part, sessions.column(f"{name}.{part}")) for part in made.parts]
            for name, made in zip(self._measures, self._accumulators, strict=True)
        ]

    def _load(  # without chains and what follows from them
        self,
        keys: pa.Table | None,
        at: np.ndarray,
        begun: np.ndarray,
        is_open: np.ndarray,
        states: Iterable[list[tuple[str, pa.Array]]],
    ) -> None:
        if keys is not None:
            self._index = KeyIndex.from_arrow(keys)
        self._at, self._begun, self._is_open = at, begun, is_open
        self._size, self._parents = len(at), np.arange(len(at), dtype=np.int32)
        for made, state in zip(self._accumulators, states, strict=True):
            made.load(state)

    def _make_chains(self) -> None:
        there = np.flatnonzero(self._is_open[: self._size]).astype(np.int32)
        self._open = len(there)
        there = there[np.lexsort((self._at[there, START], self._at[there, OWNER]))]
        owners = self._at[there, OWNER]
        same = owners[1:] == owners[:-1]
        self._at[there, NEXT] = np.append(np.where(same, there[1:], -1), [-1] * (len(there) > 0))
        self._heads = np.full(1 if self._index is None else len(self._index), -1, np.int32)
        first = np.ones(len(there), np.bool_)
        first[1:] = ~same
        self._heads[owners[first]] = there[first]
        self._earliest = int(self._at[there, LAST].min()) if len(there) else END_OF_TIME


class EndingSessions:
    """The sessions of a state that watermarks would end, for a ``peek`` without rows: they are read where they are."""

    def __init__(self, state: SessionState, after: int) -> None:
        self._state, self._after = state, after

    def close(self, watermark: int, rows_max: int = 1 << 62) -> Iterator[Sessions]:
        """Yield the sessions that this watermark ends and no earlier one."""
        yield from self._state.ending(watermark, self._after, rows_max)
        self._after = max(self._after, watermark)


def _order(lasts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the order of sessions by their last rows, then by their first rows; equal ones keep their order.

    Numbers of two bytes are sorted by radix, several times as fast as others, and times of sessions that end together lie close
    to each other."""
    order = np.arange(len(lasts))
    for times in (starts, lasts):
        above = (times - times.min()).view(np.uint64)
        if above.max() >> np.uint64(48):
            return np.lexsort((starts, lasts))
        for shift in range(0, int(above.max()).bit_length(), 16):
            digits = (above >> np.uint64(shift)).astype(np.uint16)
            order = order[np.argsort(digits[order], kind="stable")]
    return order
