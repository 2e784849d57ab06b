"""State of sessions whose rows are wanted as they came: the open sessions of each key, and their rows.

Law: that of ``session_state``; the rows of a session come as they came, whichever sessions have joined meanwhile.

Sessions are those of ``SessionState``, with a measure of its own: the chain of a session's rows. A chain is the numbers of its
first and last row, and for each row the number of the next one, so that a row is added, and two sessions are joined, without a
look at other rows. Rows of sessions that have ended stay until they are more than half of all; then those of open sessions
are numbered anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.windows import kept_rows
from flux.windows.kept_rows import GroupRows, KeptRows, whole_groups
from flux.windows.session_state import Sessions, SessionState
from flux.windows.window import SessionWindow
from partitioning import kernels
from partitioning.accumulators import Accumulator
from partitioning.errors import StateMismatchError
from partitioning.keyed_state import TypedMeasure
from partitioning.slot_tables import grown

#: Sessions whose rows are looked up in one call.
SESSIONS_MAX = 65_536


class _Links:
    """The number of the next row of each row, or -1; shared by all chains of a partition."""

    def __init__(self, after: np.ndarray) -> None:
        self.after = after
        #: The number of the first row that is added now.
        self.first = 0

    def make_room(self, rows: int) -> None:
        known = len(self.after)
        if rows > known:
            self.after = grown(self.after, max(2 * known, rows, 64))
            self.after[known:] = -1


class _RowChains(Accumulator):
    """The rows of each session, as a measure."""

    name = "rows"
    result_type = pa.large_list(pa.int64())
    _arrays = ("_heads", "_tails", "_counts")

    def __init__(self, links: _Links) -> None:
        super().__init__(None, None)
        self._links = links
        self._heads, self._tails, self._counts = (np.zeros(0, np.int64) for _ in range(3))

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        kernels.chain_rows(slots, self._links.first, self._heads, self._tails, self._counts, self._links.after)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        heads, tails, counts = other._heads[every], other._tails[every], other._counts[every]
        self._links.after[self._tails[slots]] = heads
        self._tails[slots] = tails
        self._counts[slots] += counts

    def _result(self, slots: np.ndarray) -> pa.Array:
        ends = np.cumsum(self._counts[slots])
        rows = np.empty(int(ends[-1]) if len(ends) else 0, np.int64)
        if not kernels.gather_chains(slots, self._heads, self._links.after, ends, rows):
            rows = rows[np.lexsort((rows, np.repeat(np.arange(len(slots)), self._counts[slots])))]
        return pa.LargeListArray.from_arrays(pa.array(np.append(0, ends)), pa.array(rows))

    def follow(self, links: _Links, rows: np.ndarray) -> None:
        """Go on with other chains, in which these rows, ascending, have the numbers 0, 1, ..."""
        self._links = links
        self._heads, self._tails = np.searchsorted(rows, self._heads), np.searchsorted(rows, self._tails)

    def renumber(self, slots: np.ndarray, numbers: np.ndarray) -> None:
        """Take the new numbers of the rows of these sessions. Rows of other sessions are gone."""
        for chain in (self._heads, self._tails):
            chain[slots] = numbers[chain[slots]]


class _ChainedSessions(SessionState):
    """Open sessions with the chains of their rows."""

    def __init__(self, keys: Sequence[pa.Field], window: SessionWindow, links: _Links) -> None:
        self._links = links
        super().__init__(keys, {"rows": TypedMeasure("rows")}, window)

    def _fresh(self) -> list[Accumulator]:
        return [_RowChains(self._links)]

    def rows_of_open(self) -> np.ndarray:
        """Return the numbers of the rows of all open sessions, ascending."""
        return self._rows_of(self._open_slots())

    def _rows_of(self, slots: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._accumulators[0].result(slots).values.to_numpy()
        return np.sort(rows)

    def those_of(
        self, keys: Sequence[Sequence[pa.Array]], watermark: int, after: int, links: _Links
    ) -> tuple[_ChainedSessions, np.ndarray]:
        """Return the ``part`` of the sessions, and the numbers of their rows, ascending. Rows are numbered by their places among
        these numbers there, in chains of ``links``, which are made."""
        slots = self._reached(keys, watermark, after)
        rows = self._rows_of(slots)
        made = self._copied(slots)
        assert isinstance(made, _ChainedSessions)
        made._links = links
        (chains,) = made._accumulators
        assert isinstance(chains, _RowChains)
        after_each = self._links.after[rows]
        links.after = np.where(after_each < 0, -1, np.searchsorted(rows, after_each))
        chains.follow(links, rows)
        return made, rows

    def _alike(self) -> _ChainedSessions:
        return _ChainedSessions(self._keys, self.window, self._links)

    def renumber(self, numbers: np.ndarray) -> None:
        (chains,) = self._accumulators
        assert isinstance(chains, _RowChains)
        chains.renumber(self._open_slots(), numbers)
        self._told = None  # the next changes are the whole state


class _Told(NamedTuple):
    """Rows, and the next row of each, at the last call of ``changes``."""

    rows: int
    after: np.ndarray


class SessionRows:
    """The open sessions of one partition, with their rows."""

    def __init__(self, schema: pa.Schema, keys_at: Sequence[int], window: SessionWindow) -> None:
        """``schema``: that of rows; ``keys_at``: the positions of the keys by which they are grouped."""
        self._keys_at = tuple(keys_at)
        self._rows = KeptRows(schema)
        self._ended = 0  # rows of sessions that have ended
        self._links = _Links(np.zeros(0, np.int64))
        self._sessions = _ChainedSessions([schema.field(at) for at in keys_at], window, self._links)
        self._told: _Told | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows and sessions hold."""
        return self._rows.nbytes + self._links.after.nbytes + self._sessions.nbytes

    @property
    def needs_from(self) -> int | None:
        """The first step that an open session has a row of. None: no session is open."""
        return self._sessions.needs_from

    @property
    def next_end(self) -> int | None:
        """The first watermark that closes a session. None: no session is open."""
        return self._sessions.next_end

    def add(self, times: np.ndarray, rows: pa.RecordBatch, step: int = 0) -> None:
        """Add rows of a step, none of them below the watermark; ``times`` in microseconds."""
        self._links.first = len(self._rows)
        self._rows.add(rows)
        self._links.make_room(len(self._rows))
        self._sessions.add(times, [rows.column(at) for at in self._keys_at], [None], step)

    def close(self, watermark: int, rows_max: int = 1 << 62) -> Iterator[GroupRows]:
        """Yield the sessions that no row can join any more, in parts of ``rows_max`` rows at most or of one session, and take
        them out. Consume all."""
        for ended in self._sessions.close(watermark, SESSIONS_MAX):
            yield from self._given(ended, rows_max)
            self._ended += len(ended.values[0].values)
        if len(self._rows) >= kept_rows.ROWS_MIN and 2 * self._ended > len(self._rows):
            self._move_together()

    def _given(self, ended: Sessions, rows_max: int) -> Iterator[GroupRows]:
        """Yield the rows of sessions."""
        offsets, rows = ended.values[0].offsets.to_numpy(), ended.values[0].values.to_numpy()
        for first, last in whole_groups(offsets, rows_max):
            taken = self._rows.taken(rows[offsets[first] : offsets[last]])
            of = slice(first, last)
            yield GroupRows(taken, np.diff(offsets[first : last + 1]), ended.starts[of], ended.ends[of])

    def ending(self, watermark: int, after: int, rows_max: int) -> Iterator[GroupRows]:
        """Yield the sessions that a watermark ends and ``after`` does not, as ``close`` does, and leave them in the state."""
        for ended in self._sessions.ending(watermark, after, SESSIONS_MAX):
            yield from self._given(ended, rows_max)

    def part(
        self, times: np.ndarray, keys: Sequence[Sequence[pa.Array]], watermark: int, after: int
    ) -> SessionRows | EndingSessionRows:
        """Return the ``part`` of the sessions, with copies of their rows; see ``SessionState.part``."""
        if not keys:
            return EndingSessionRows(self, after)
        made = SessionRows(self._rows.schema, self._keys_at, self._sessions.window)
        made._sessions, rows = self._sessions.those_of(keys, watermark, after, made._links)
        for begin in range(0, len(rows), kept_rows.BATCH_ROWS_MAX):
            made._rows.add(self._rows.taken(rows[begin : begin + kept_rows.BATCH_ROWS_MAX]), owned=True)
        return made

    def _move_together(self) -> None:
        """Number the rows of open sessions anew, in their order. The next changes are the whole state."""
        kept = self._sessions.rows_of_open()
        numbers = np.full(len(self._rows) + 1, -1, np.int64)  # the new number of each; -1 stays
        numbers[kept] = np.arange(len(kept))
        after = numbers[self._links.after[kept]]
        rows = KeptRows(self._rows.schema)
        for begin in range(0, len(kept), kept_rows.BATCH_ROWS_MAX):
            rows.add(self._rows.taken(kept[begin : begin + kept_rows.BATCH_ROWS_MAX]), owned=True)
        self._sessions.renumber(numbers)
        self._rows, self._links.after, self._ended, self._told = rows, after, 0, None

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        """Return rows, chains and sessions."""
        return {
            "sessions": self._sessions.snapshot(),
            "rows": self._rows.since(0),
            "after": self._links.after[: len(self._rows)],
            "ended": self._ended,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by a ``snapshot``. Raises StateMismatchError if it was taken from another state."""
        self._rows = KeptRows(self._rows.schema)
        self._take(snapshot["rows"])
        self._links.after = np.array(snapshot["after"], np.int64)
        self._ended, self._told = snapshot["ended"], None
        self._sessions.restore(snapshot["sessions"])

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        """Return the rows that came since the last call, and the changes of sessions and chains. None: there was no call
        before, much has changed, or rows were numbered anew."""
        told, size = self._told, len(self._rows)
        self._told = _Told(size, self._links.after[:size].copy())
        sessions = self._sessions.changes(share_max)
        if told is None or sessions is None:
            return None
        after = self._links.after[:size]
        changed = np.flatnonzero(after[: told.rows] != told.after)
        places = np.append(changed, np.arange(told.rows, size))
        return {
            "first": told.rows,
            "rows": self._rows.since(told.rows),
            "places": places,
            "after": after[places],
            "ended": self._ended,
            "sessions": sessions,
        }

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        if changes["first"] != len(self._rows):
            raise StateMismatchError(
                f"changes of a state of {changes['first']} rows cannot be applied to one of {len(self._rows)}"
            )
        self._take(changes["rows"])
        self._links.make_room(len(self._rows))
        self._links.after[changes["places"]] = changes["after"]
        self._ended = changes["ended"]
        self._sessions.apply_changes(changes["sessions"])

    def _take(self, rows: pa.Table) -> None:
        for batch in rows.to_batches():
            self._rows.add(batch)


class EndingSessionRows:
    """The sessions of a state that watermarks would end, for a ``peek`` without rows: they are read where they are."""

    def __init__(self, state: SessionRows, after: int) -> None:
        self._state, self._after = state, after

    def close(self, watermark: int, rows_max: int = 1 << 62) -> Iterator[GroupRows]:
        """Yield the sessions that this watermark ends and no earlier one."""
        yield from self._state.ending(watermark, self._after, rows_max)
        self._after = max(self._after, watermark)
