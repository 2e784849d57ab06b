"""State of tumbling and hopping windows: a table of groups for each pane.

Law: results depend on the rows, their order and the watermarks alone: neither on the cut of the rows into calls, nor on a
snapshot and restore in between. A window is given once, when the watermark has reached its end, from its panes with the oldest
first.

With ``by_window`` there is a table for each window, because results are wanted after every step.

A table is a piece of the state: ``changes`` gives the pieces that changed, each by its own changes, and names those that are
gone.

``add_to_each`` adds small batches to the panes of several partitions in one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from flux.windows.open_panes import TABLE_BYTES, OpenPanes, TooManyPanes, taken
from flux.windows.pane_spans import PANES_MERGED_MAX, PaneSpans, merged
from flux.windows.window import NEVER, Window
from partitioning.errors import FailedPartition
from partitioning.keyed_state import JointUpdate, KeyedState, TypedMeasure


class WindowGroups(NamedTuple):
    """Groups of one window: those of ``state`` with these slots."""

    start: int
    end: int
    state: KeyedState
    slots: np.ndarray


class PaneState(OpenPanes[KeyedState]):
    """The open panes of one partition, or its open windows if ``by_window``: their groups."""

    def __init__(
        self, keys: Sequence[pa.Field], measures: Mapping[str, TypedMeasure], window: Window, by_window: bool = False
    ) -> None:
        super().__init__(window, by_window)
        self._empty = KeyedState(keys, measures)
        many = not by_window and window.size // window.pane > PANES_MERGED_MAX
        self._spans = PaneSpans(window, self._empty.empty, lambda start: self._pieces.get(start)) if many else None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all panes hold."""
        spans = 0 if self._spans is None else self._spans.nbytes
        return spans + sum(piece.nbytes + TABLE_BYTES for piece in self._pieces.values())

    @property
    def joins(self) -> bool:
        """Whether ``add_to_each`` takes such a state."""
        return not self.by_window and self._empty.joins

    def part(self, times: np.ndarray, keys: Sequence[Sequence[pa.Array]], watermark: int, after: int) -> Self:
        made = super().part(times, keys, watermark, after)
        if self._spans is not None:
            made._spans = self._spans.aside(lambda start: made._pieces.get(start), self._starts_of(times))
        return made

    def _copied(self, piece: KeyedState, keys: Sequence[Sequence[pa.Array]]) -> KeyedState:
        return piece.part(keys) if self.by_window else piece.copied()

    def _make(self) -> KeyedState:
        piece = self._empty.empty()
        if self._told is not None:
            piece.changes()  # the first call begins to note changes, and gives nothing
        return piece

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
        return self._add(starts[order], taken(keys, rows), taken(columns, rows))

    def _add(
        self, starts: np.ndarray, keys: Sequence[pa.Array], columns: Sequence[pa.Array | None]
    ) -> list[WindowGroups]:
        """Add rows to the pieces with these starts."""
        order, cuts = self._by_piece(starts)
        if order is None:
            return [self._add_to(cuts[0].start, len(starts), keys, columns)]
        keys, columns = taken(keys, order), taken(columns, order)
        return [
            self._add_to(start, rows, _cut(keys, begin, rows), _cut(columns, begin, rows))
            for start, begin, rows in cuts
        ]

    def _add_to(
        self, start: int, rows: int, keys: Sequence[pa.Array], columns: Sequence[pa.Array | None]
    ) -> WindowGroups:
        piece = self._piece(start)
        slots = piece.slots(keys, rows)
        piece.update(slots, columns)
        touched = piece.touched(slots) if self.by_window else slots
        piece.note(touched)
        return WindowGroups(start, start + self.window.size, piece, touched)

    def pieces_of(self, starts: Sequence[int], step: int) -> list[KeyedState]:
        """Return the tables of panes, for rows of a step. Raises TooManyPanes, which leaves the state unusable."""
        self._step = step
        return [self._piece(start) for start in starts]

    # ---- ends

    def close(self, watermark: int) -> Iterator[WindowGroups]:
        """Yield the windows that end at the watermark or before, the earliest first and each once, and drop panes that no open
        window has. With ``by_window`` nothing is yielded, because the results have been given already. Consume all of it."""
        spans, before = self._spans, self.closed
        for start, end, panes in self._ended(watermark):
            parts = [self._pieces[pane] for pane in panes] if spans is None else list(spans.of(start, end))
            state = parts[0] if len(parts) == 1 else merged(self._empty.empty(), parts)
            yield WindowGroups(start, end, state, np.arange(len(state), dtype=np.int32))
        if spans is not None and self.closed > before:
            spans.forget_before(self._first_open)

    @property
    def _first_open(self) -> int:
        """The start of the first window that has not ended."""
        window = self.window
        return window.last_end(self.closed - window.size) - window.size + window.slide

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
        self._forget_spans()
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
        self._forget_spans()
        for start in changes["gone"]:
            self._drop(start)
        self._begun |= changes["begun"]
        for start, groups in changes["whole"].items():
            self._pieces[start] = self._restored(groups)
        for start, found in changes["changed"].items():
            self._pieces[start].apply_changes(found)

    def _forget_spans(self) -> None:
        if self._spans is not None:
            self._spans.clear()

    def _restored(self, groups: pa.Table) -> KeyedState:
        piece = self._empty.empty()
        piece.restore(groups)
        return piece


def add_to_each(
    states: Sequence[PaneState],
    steps: Sequence[int],
    rows: Sequence[int],
    times: np.ndarray,
    keys: Sequence[pa.Array],
    columns: Sequence[pa.Array | None],
) -> None:
    """Add rows to several states of the same keys, measures and windows in one call: ``rows[k]`` rows of a step of state k, at
    least one, behind those of state k - 1. Law: each state is that of a call of ``add`` with its own rows. ``joins`` holds for
    all states. Raises FailedPartition, which leaves the states unusable."""
    starts, owners = states[0].window.panes(times), np.repeat(np.arange(len(states)), rows)
    changes, falls = owners[1:] != owners[:-1], starts[1:] < starts[:-1]
    if (falls & ~changes).any():
        order = np.lexsort((starts, owners))  # rows of one pane keep their order
        starts, keys, columns = starts[order], taken(keys, order), taken(columns, order)
    begins = np.flatnonzero(np.concatenate([[True], changes | (starts[1:] != starts[:-1])]))
    of, at = owners[begins], starts[begins].tolist()
    pieces: list[KeyedState] = []
    ends = np.searchsorted(of, np.arange(len(states)), "right").tolist()
    for number, (state, step, end) in enumerate(zip(states, steps, ends, strict=True)):
        try:
            pieces += state.pieces_of(at[len(pieces) : end], step)
        except TooManyPanes as error:
            raise FailedPartition(number, error) from error
    try:
        update = JointUpdate(pieces, np.diff(begins, append=len(times)).tolist())
        slots = update.slots(keys)
        update.update(slots, columns)
    except FailedPartition as failed:
        raise FailedPartition(int(of[failed.at]), failed.error) from failed.error
    update.note(slots)


def _cut(columns: Sequence[Any], begin: int, rows: int) -> list[Any]:
    return [None if column is None else column.slice(begin, rows) for column in columns]
