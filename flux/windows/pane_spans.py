"""Sums of panes, so that a window of many panes is not merged from each of them.

A span is 2, 4, 8, ... panes in a row that begin at a multiple of their number, counted from the offset of the windows; its table
has the groups of its panes, merged with the oldest first. A window is made of the largest spans that fit into it, ten at most for
sixty panes, in place of sixty. A span is made of its two halves when the first window that contains it is final: then no row of
it comes any more. A first half is forgotten once its span is there, because each later window that contains the half contains
the span.

Law: the panes of a span, and the spans of a window, follow from times alone. So sums of doubles have the same last digits on
each replica, after a restore, and in a state that began empty at a replay point. Two stacks (a running total, and the totals of
all ends of the panes before) would merge less, and hold the groups of half of all windows at once: gigabytes, where a pane has
few of many keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator

from flux.windows.window import Window
from partitioning.keyed_state import KeyedState

#: Windows of up to this many panes are merged from panes.
PANES_MERGED_MAX = 16


class PaneSpans:
    """The sums of the open panes of one partition."""

    def __init__(
        self, window: Window, make: Callable[[], KeyedState], pane: Callable[[int], KeyedState | None]
    ) -> None:
        """``make`` makes a state without groups; ``pane`` returns the pane that begins at a time, or None if it has no row."""
        self._offset, self._pane_us = window.offset, window.pane
        self._make, self._pane = make, pane
        self._spans: dict[tuple[int, int], KeyedState] = {}  # by the number of panes and the start

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self._spans.values())

    def of(self, start: int, end: int) -> Iterator[KeyedState]:
        """Yield the states that make up a window that is final, the oldest first."""
        while start < end:
            panes = self._longest(start, end)
            found = self._sum(panes, start)
            if found is not None:
                yield found
            start += panes * self._pane_us

    def aside(self, pane: Callable[[int], KeyedState | None], changed: Collection[int]) -> PaneSpans:
        """Return sums of other panes, which are these but for the ``changed`` ones."""
        made = copy.copy(self)
        made._pane = pane
        made._spans = {
            (panes, start): span
            for (panes, start), span in self._spans.items()
            if not any(start <= each < start + panes * self._pane_us for each in changed)
        }
        return made

    def forget_before(self, start: int) -> None:
        """Forget the spans that begin before a time: no later window contains them."""
        for key in [key for key in self._spans if key[1] < start]:
            del self._spans[key]

    def clear(self) -> None:
        self._spans.clear()

    def _longest(self, start: int, end: int) -> int:
        """Return the number of panes of the longest span that begins at ``start`` and ends at ``end`` or before."""
        number, room = (start - self._offset) // self._pane_us, (end - start) // self._pane_us
        panes = 1
        while 2 * panes <= room and number % (2 * panes) == 0:
            panes *= 2
        return panes

    def _sum(self, panes: int, start: int) -> KeyedState | None:
        """Return a span, or a pane; None: no row is in it."""
        if panes == 1:
            return self._pane(start)
        found = self._spans.get((panes, start))
        if found is None:
            half = panes // 2
            parts = [self._sum(half, start), self._sum(half, start + half * self._pane_us)]
            there = [part for part in parts if part is not None]
            if not there:
                return None
            found = self._spans[panes, start] = merged(self._make(), there)
            self._spans.pop((half, start), None)
        return found


def merged(state: KeyedState, parts: Iterable[KeyedState]) -> KeyedState:
    """Add the groups of parts to a state, and return it."""
    for part in parts:
        state.merge(part)
    return state
