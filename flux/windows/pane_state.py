"""State of tumbling and hopping windows: a table of groups for each pane.

Law: results depend on the rows, their order and the watermarks alone: neither on the cut of the rows into calls, nor on a
snapshot and restore in between. A window is given once, when the watermark has reached its end, from its panes with the oldest
first; a pane is dropped when its last window has been given. So state is bounded by the rows of the open windows, not by all keys
that came.

With ``by_window`` a row is added to each of its windows instead of one pane, because results are wanted after every step: there
is a table for each window.

A table is a piece of the state: ``changes`` gives the pieces that changed, each by its own changes, and names those that are
gone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.windows.window import END_OF_TIME, NEVER, Window
from partitioning.keyed_state import KeyedState, TypedMeasure

#: Open panes of a partition. Rows at random times would open one for nearly each row, and memory would end before the reason was
#: seen.
PANES_MAX = 65_536
#: Bytes of a table without groups.
TABLE_BYTES = 2_000


class TooManyPanes(ValueError):
    """Refusal of a row that would open one pane too many."""


class WindowGroups(NamedTuple):
    """Groups of one window: those of ``state`` with these slots."""

    start: int
    end: int
    state: KeyedState
    slots: np.ndarray


class PaneState:
    """The open panes of one partition, or its open windows if ``by_window``."""

    def __init__(
        self, keys: Sequence[pa.Field], measures: Mapping[str, TypedMeasure], window: Window, by_window: bool = False
    ) -> None:
        self.window, self.by_window = window, by_window
        #: Through this watermark all windows are closed.
        self.closed = NEVER
        self._empty = KeyedState(keys, measures)
        self._pieces: dict[int, KeyedState] = {}  # by the start of the pane, or of the window
        self._begun: dict[int, int] = {}  # the step of the first row of each piece
        self._told: set[int] | None = None  # the pieces at the last call of ``changes``
        self._step = 0  # the step whose rows are added
        self._idle_below = END_OF_TIME  # no open window ends below this, so most watermarks need no look at the panes

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all panes hold."""
        return sum(piece.nbytes + TABLE_BYTES for piece in self._pieces.values())

    def __len__(self) -> int:
        """Return the number of open panes."""
        return len(self._pieces)

    @property
    def needs_from(self) -> int | None:
        """The first step that an open piece has a row of. None: no piece is open."""
        return min(self._begun.values(), default=None)

    @property
    def next_end(self) -> int | None:
        """The first watermark that closes a window. None: no piece is open."""
        return self._first_end(min(self._pieces), self.closed) if self._pieces else None

    # ---- rows

    def add(
        self, times: np.ndarray, keys: Sequence[pa.Array], columns: Sequence[pa.Array | None], step: int = 0
    ) -> list[WindowGroups]:
        """Add rows of a step, none of them below the watermark: ``times`` in microseconds, ``columns`` as for
        ``KeyedState.update``. With ``by_window``, return the groups that have changed, by window and in the order of their first
        rows. Raises TooManyPanes or SumOverflowError, which leave the state unusable."""
        self._step = step
        if not self.by_window:
            self._add(self.window.panes(times), keys, columns)
            return []
        found = self.window.starts(times)
        if len(found) == 1:
            return sorted(self._add(found[0][0], keys, columns), key=lambda groups: groups.start)
        every = np.arange(len(times))
        rows = np.concatenate([every if there is None else every[there] for _, there in found])
        starts = np.concatenate([starts if there is None else starts[there] for starts, there in found])
        order = np.lexsort((rows, starts))
        rows = rows[order]
        return self._add(starts[order], _taken(keys, rows), _taken(columns, rows))

    def _add(
        self, starts: np.ndarray, keys: Sequence[pa.Array], columns: Sequence[pa.Array | None]
    ) -> list[WindowGroups]:
        """Add rows to the pieces with these starts."""
        first, last = int(starts.min()), int(starts.max())
        if first == last:
            return [self._add_to(first, len(starts), keys, columns)]
        order = _stable_order(starts, first, last, self.window.slide if self.by_window else self.window.pane)
        ordered = starts[order]
        cuts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(ordered)]
        keys, columns = _taken(keys, order), _taken(columns, order)
        changed = []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            cut = slice(begin, end)
            changed.append(self._add_to(int(ordered[begin]), end - begin, _cut(keys, cut), _cut(columns, cut)))
        return changed

    def _add_to(
        self, start: int, rows: int, keys: Sequence[pa.Array], columns: Sequence[pa.Array | None]
    ) -> WindowGroups:
        piece = self._pieces.get(start)
        if piece is None:
            if len(self._pieces) >= PANES_MAX:
                raise TooManyPanes(
                    f"{PANES_MAX:,} panes of {self.window.pane:,} us are open, and a row at {start:,} us (since 1970, UTC) "
                    "would open one more: are the times right? A longer slide makes fewer panes, a shorter delay of the "
                    "watermark closes them sooner. All windows of a batch DataFrame are open until its end: group it by the "
                    "start of the window, as in groupBy(F.date_trunc('minute', 'ts'))"
                )
            piece = self._pieces[start] = self._empty.empty()
            self._begun[start] = self._step
            self._idle_below = min(self._idle_below, self._first_end(start))
            if self._told is not None:
                piece.changes()  # the first call begins to note changes, and gives nothing
        slots = piece.slots(keys, rows)
        piece.update(slots, columns)
        touched = piece.touched(slots) if self.by_window else slots
        piece.note(touched)
        return WindowGroups(start, start + self.window.size, piece, touched)

    # ---- ends

    def close(self, watermark: int) -> Iterator[WindowGroups]:
        """Yield the windows that end at the watermark or before, the earliest first and each once, and drop panes that no open
        window has. With ``by_window`` nothing is yielded, because the results have been given already. Consume all of it."""
        if watermark <= self.closed:
            return
        if watermark >= self._idle_below:
            starts = sorted(self._pieces)
            if not self.by_window:
                yield from self._ended(starts, watermark)
            for start in starts:
                if self._last_end(start) > watermark:
                    break
                self._drop(start)
        self.closed = watermark
        if watermark >= self._idle_below:  # the ends of later pieces are on the same grid, and none of them is earlier
            end = self.next_end
            self._idle_below = END_OF_TIME if end is None else end

    def _first_end(self, start: int, after: int = NEVER) -> int:
        """Return the end of the first window that has a piece and ends after this time."""
        if self.by_window:
            return start + self.window.size
        return next(end for end in self.window.ends(start) if end > after)

    def _last_end(self, start: int) -> int:
        return start + self.window.size if self.by_window else self.window.last_end(start)

    def _drop(self, start: int) -> None:
        self._pieces.pop(start, None)
        self._begun.pop(start, None)

    def _ended(self, panes: Sequence[int], watermark: int) -> Iterator[WindowGroups]:
        """Yield the windows of these panes, which are ascending, that end behind the watermark before and through this one."""
        ends: set[int] = set()
        for pane in panes:
            of_pane = self.window.ends(pane)
            if of_pane.start > watermark:
                break
            ends.update(end for end in of_pane if self.closed < end <= watermark)
        for end in sorted(ends):
            start = end - self.window.size
            mine = panes[bisect_left(panes, start) : bisect_left(panes, end)]
            state = self._pieces[mine[0]]
            if len(mine) > 1:
                state = self._empty.empty()
                for pane in mine:
                    state.merge(self._pieces[pane])
            yield WindowGroups(start, end, state, np.arange(len(state), dtype=np.int32))

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        """Return the open pieces, each as ``KeyedState.snapshot``, by their starts."""
        return {
            "closed": self.closed,
            "begun": dict(self._begun),
            "pieces": {start: self._pieces[start].snapshot() for start in sorted(self._pieces)},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by a ``snapshot``. Raises StateMismatchError if it was taken from a state of other measures."""
        self.closed, self._told, self._begun = snapshot["closed"], None, dict(snapshot["begun"])
        self._idle_below = NEVER
        self._pieces = {start: self._restored(groups) for start, groups in snapshot["pieces"].items()}

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        """Return the pieces that changed since the last call: each as its own changes, or whole where it is new or much of it
        changed; and the starts of those that are gone. None: there was no call before."""
        first, told = self._told is None, self._told or set()
        self._told = set(self._pieces)
        changed: dict[int, Any] = {}
        whole: dict[int, pa.Table] = {}
        for start in sorted(self._pieces):
            piece = self._pieces[start]
            found = piece.changes(share_max)
            if found is None or start not in told:
                whole[start] = None if first else piece.snapshot()
            elif len(found["slots"]) or found["first"] != found["size"]:
                changed[start] = found
        if first:
            return None
        begun = {start: self._begun[start] for start in whole}
        gone = sorted(told - self._told)
        return {"closed": self.closed, "begun": begun, "changed": changed, "whole": whole, "gone": gone}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        self.closed, self._idle_below = changes["closed"], NEVER
        for start in changes["gone"]:
            self._drop(start)
        self._begun |= changes["begun"]
        for start, groups in changes["whole"].items():
            self._pieces[start] = self._restored(groups)
        for start, found in changes["changed"].items():
            self._pieces[start].apply_changes(found)

    def _restored(self, groups: pa.Table) -> KeyedState:
        piece = self._empty.empty()
        piece.restore(groups)
        return piece


def _stable_order(starts: np.ndarray, first: int, last: int, step: int) -> np.ndarray:
    """Return the order of rows by the starts of their pieces, which differ by multiples of ``step``; rows of a piece keep their
    order. Numbers of two bytes are sorted by radix, several times as fast as others."""
    if (last - first) // step < 1 << 16:
        return np.argsort(((starts - first) // step).astype(np.uint16), kind="stable")
    return np.argsort(starts, kind="stable")


def _taken(columns: Sequence[Any], rows: np.ndarray) -> list[Any]:
    places = pa.array(rows)
    return [None if column is None else column.take(places) for column in columns]


def _cut(columns: Sequence[Any], rows: slice) -> list[Any]:
    return [None if column is None else column.slice(rows.start, rows.stop - rows.start) for column in columns]
