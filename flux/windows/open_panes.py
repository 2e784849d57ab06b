"""Open panes of tumbling and hopping windows: pieces of state by stretches of time.

A row is in one pane, and a hopping window is made of several. A pane is opened by its first row and dropped when its last window
has been given: so state is bounded by the rows of the open windows, not by all keys that came.

With ``by_window`` a piece is a whole window, and a row is added to each of its windows.

``OpenPanes`` knows times and windows alone. A subclass knows the content of a piece.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa

from flux.windows.durations import words
from flux.windows.times import as_text
from flux.windows.window import END_OF_TIME, NEVER, Window

#: Open panes of a partition. Rows at random times would open one for nearly each row, and memory would end before the reason was
#: seen.
PANES_MAX = 65_536
#: Bytes of a table without groups.
TABLE_BYTES = 2_000

Piece = TypeVar("Piece")


class TooManyPanes(ValueError):
    """Refusal of a row that would open one pane too many."""


class PieceRows(NamedTuple):
    """Rows of a call that belong to one piece: ``rows`` of them from ``begin`` on, in the order by pieces."""

    start: int
    begin: int
    rows: int


class EndedWindow(NamedTuple):
    """A window that has ended, with the starts of its panes that have rows, ascending."""

    start: int
    end: int
    panes: Sequence[int]


class OpenPanes(Generic[Piece]):
    """The open panes of one partition, or its open windows if ``by_window``."""

    def __init__(self, window: Window, by_window: bool = False) -> None:
        self.window, self.by_window = window, by_window
        #: Through this watermark all windows are closed.
        self.closed = NEVER
        self._pieces: dict[int, Piece] = {}  # by the start of the pane, or of the window
        self._begun: dict[int, int] = {}  # the step of the first row of each piece
        self._told: set[int] | None = None  # the pieces at the last call of ``changes``
        self._step = 0  # the step whose rows are added
        self._idle_below = END_OF_TIME  # no open window ends below this, so most watermarks need no look at the panes

    def _make(self) -> Piece:
        """Make a piece without rows."""
        raise NotImplementedError

    def part(self, times: np.ndarray, keys: Sequence[Sequence[pa.Array]], watermark: int, after: int) -> Self:
        """Return a state whose changes leave this one as it is, for rows of these times and keys, given by batch, and for the
        windows that end by the watermark and not by ``after`` (design: peek). It shares the pieces that get no row."""
        made = copy.copy(self)
        made.closed, made._told = max(self.closed, after), None
        made._pieces, made._begun = dict(self._pieces), dict(self._begun)
        for start in self._starts_of(times):
            piece = self._pieces.get(start)
            if piece is not None:
                given = self._gives(start, made.closed, watermark)
                made._pieces[start] = self._copied(piece, keys) if given else self._make()
        return made

    def _starts_of(self, times: np.ndarray) -> list[int]:
        """Return the starts of the pieces that have rows of these times."""
        if self.by_window:
            found = [starts if there is None else starts[there] for starts, there in self.window.starts(times)]
        else:
            found = [self.window.panes(times)]
        starts: list[int] = np.unique(np.concatenate(found)).tolist()
        return starts

    def _gives(self, start: int, after: int, watermark: int) -> bool:
        """Return whether a piece has a share in output: in that of a window that ends behind ``after`` and through the watermark,
        or at once."""
        return self.by_window or any(after < end <= watermark for end in self.window.ends(start))

    def _copied(self, piece: Piece, keys: Sequence[Sequence[pa.Array]]) -> Piece:
        """Return a copy of a piece, or with ``by_window`` of its groups of these keys."""
        raise NotImplementedError

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

    def may_end(self, watermark: int) -> bool:
        """Tell whether a window may end at this watermark or before; False: none does."""
        return watermark >= self._idle_below

    # ---- rows

    def _by_piece(self, starts: np.ndarray) -> tuple[np.ndarray | None, list[PieceRows]]:
        """Return the order of rows by the starts of their pieces, in which rows of a piece keep theirs, and the rows of each
        piece. None as the order: all rows are of one piece."""
        first, last = int(starts.min()), int(starts.max())
        if first == last:
            return None, [PieceRows(first, 0, len(starts))]
        order = _stable_order(starts, first, last, self.window.slide if self.by_window else self.window.pane)
        ordered = starts[order]
        cuts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(ordered)]
        return order, [
            PieceRows(int(ordered[begin]), begin, end - begin) for begin, end in zip(cuts, cuts[1:], strict=False)
        ]

    def _piece(self, start: int) -> Piece:
        """Return an open piece, or open it. Raises TooManyPanes, which leaves the state unusable."""
        piece = self._pieces.get(start)
        if piece is None:
            if len(self._pieces) >= PANES_MAX:
                raise TooManyPanes(
                    f"{PANES_MAX:,} panes of {words(self.window.pane)} are open, and a row at {as_text(start)} "
                    "would open one more: are the times right? A longer slide makes fewer panes, a shorter delay of the "
                    "watermark closes them sooner. All windows of a batch DataFrame are open until its end: group it by the "
                    "start of the window, as in groupBy(F.date_trunc('minute', 'ts'))"
                )
            piece = self._pieces[start] = self._make()
            self._begun[start] = self._step
            self._idle_below = min(self._idle_below, self._first_end(start))
        return piece

    # ---- ends

    def _ended(self, watermark: int) -> Iterator[EndedWindow]:
        """Yield the windows that end at the watermark or before, the earliest first and each once; then drop panes that no open
        window has. With ``by_window`` nothing is yielded, because the results have been given already. Consume all of it."""
        if watermark <= self.closed:
            return
        if watermark >= self._idle_below:
            starts = sorted(self._pieces)
            if not self.by_window:
                yield from self._windows(starts, watermark)
            for start in starts:
                if self._last_end(start) > watermark:
                    break
                self._drop(start)
        self.closed = watermark
        if watermark >= self._idle_below:  # the ends of later pieces are on the same grid, and none of them is earlier
            end = self.next_end
            self._idle_below = END_OF_TIME if end is None else end

    def _windows(self, panes: Sequence[int], watermark: int) -> Iterator[EndedWindow]:
        """Yield the windows of these panes, which are ascending, that end behind the watermark before and through this one."""
        ends: set[int] = set()
        for pane in panes:
            of_pane = self.window.ends(pane)
            if of_pane.start > watermark:
                break
            ends.update(end for end in of_pane if self.closed < end <= watermark)
        for end in sorted(ends):
            start = end - self.window.size
            yield EndedWindow(start, end, panes[bisect_left(panes, start) : bisect_left(panes, end)])

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


def _stable_order(starts: np.ndarray, first: int, last: int, step: int) -> np.ndarray:
    """Return the order of rows by the starts of their pieces, which differ by multiples of ``step``; rows of a piece keep their
    order. Numbers of two bytes are sorted by radix, several times as fast as others."""
    if (last - first) // step < 1 << 16:
        return np.argsort(((starts - first) // step).astype(np.uint16), kind="stable")
    return np.argsort(starts, kind="stable")


def taken(columns: Sequence[Any], rows: np.ndarray) -> list[Any]:
    """Return these rows of columns, of which some may be None."""
    places = pa.array(rows)
    return [None if column is None else column.take(places) for column in columns]
