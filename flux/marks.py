"""Points of a stream at which its running checksum is known, as a consumer keeps them for the next life of its producer.

The newest one received shows whether a second reading gives the same rows. The others lie between what has been applied
and that one: a source that can begin anywhere goes on behind the newest of them that everybody has applied. Long queues
have as many as short ones, farther apart.

Left to others: what is read again, and from where (producer, source_streams).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from flux.messages import Mark

#: Marks of one stream at most, beside the newest: what is read twice without need is then about an eighth of what had not been
#: applied.
MARKS_MAX = 16


class Marks:
    """``due``: the sequence from which on the next mark is wanted."""

    def __init__(self) -> None:
        self.newest = Mark(-1, 0)
        self.due = 0
        self._kept: list[Mark] = []  # by sequence

    def keep(self, applied: Callable[[], int]) -> None:
        """Keep the newest. ``applied``: tells the sequence through which all is applied here."""
        self._kept.append(self.newest)
        if len(self._kept) > MARKS_MAX // 2:
            # The newest below what is applied stays, and all behind it.
            below = bisect_left(self._kept, applied(), key=lambda mark: mark.sequence) - 1
            del self._kept[: max(below, 0)]
        if len(self._kept) > MARKS_MAX:
            self._thin()
        self.due = self.newest.sequence + self._spacing()

    def merge(self, others: Iterable[Mark]) -> None:
        """What another consumer of the stream has kept."""
        known = {mark.sequence: mark for mark in (*others, *self._kept)}
        self._kept = [known[sequence] for sequence in sorted(known)]
        if self._kept and self._kept[-1].sequence > self.newest.sequence:
            self.newest = self._kept[-1]
            self.due = self.newest.sequence + 1

    def shown(self) -> list[Mark]:
        if self.newest.sequence < 0 or (self._kept and self._kept[-1] == self.newest):
            return list(self._kept)
        return [*self._kept, self.newest]

    def _thin(self) -> None:
        """Leave out those that are too close to the one before."""
        spacing = self._spacing()
        kept = self._kept[:1]
        for mark in self._kept[1:]:
            if mark.sequence - kept[-1].sequence >= spacing:
                kept.append(mark)
        self._kept = kept

    def _spacing(self) -> int:
        return -(-(self.newest.sequence - self._kept[0].sequence) // (MARKS_MAX // 2)) or 1
