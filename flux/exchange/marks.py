"""Marks: points of a stream whose running checksum a consumer keeps for the next life of its producer (design: marks).

The newest mark is at the last batch received, and shows whether a second reading gives the same rows. The others lie between
the last batch applied and the newest mark: a source that can begin anywhere goes on after the newest of them that every
consumer has applied. Long queues have as many marks as short ones, farther apart.

Left to others: the rows that are read again, and their first position (producer, source_streams).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from flux.wire.messages import Mark

#: The most marks of one stream, beside the newest. With this number, the rows that are read twice without need are about an
#: eighth of the rows that had not been applied.
MARKS_MAX = 16


class Marks:
    """The marks of one stream. ``newest`` is the mark at the last batch received; ``due`` the sequence at which the next mark
    is to be kept."""

    def __init__(self) -> None:
        self.newest = Mark(-1, 0)
        self.due = 0
        self._kept: list[Mark] = []  # by sequence
        self._left_out = False  # marks below the first kept one were left out
        self._settled = Mark(-1, 0)  # no later life begins before it

    def validate(self, applied: int) -> None:
        """Check that a source could go on after some mark, and need not be read again from its start."""
        assert not self._left_out or self._kept[0].sequence < applied, f"no mark is below {applied}: {self._kept}"

    def settle(self, mark: Mark) -> None:
        """Keep a mark behind rows that are needed no more, and none before it."""
        if mark.sequence <= self._settled.sequence:
            return
        self._settled, self._left_out = mark, False
        self._kept = [kept for kept in self._kept if kept.sequence > mark.sequence]
        if mark.sequence > self.newest.sequence:
            self.newest, self.due = mark, mark.sequence + 1

    def keep(self, applied: Callable[[], int]) -> None:
        """Keep the newest mark. ``applied()`` gives the sequence through which all batches are applied here."""
        self._kept.append(self.newest)
        if len(self._kept) > MARKS_MAX // 2:
            # The newest mark that is applied stays, and all later ones.
            below = bisect_left(self._kept, applied(), key=lambda mark: mark.sequence) - 1
            self._left_out |= below > 0
            del self._kept[: max(below, 0)]
        if len(self._kept) > MARKS_MAX:
            self._thin()
        self.due = self.newest.sequence + self._spacing()

    def merge(self, others: Iterable[Mark]) -> None:
        """Add the marks of another consumer of the stream."""
        known = {mark.sequence: mark for mark in (*others, *self._kept)}
        self._kept = [known[sequence] for sequence in sorted(known)]
        self.come_from_behind()
        if self._kept and self._kept[-1].sequence > self.newest.sequence:
            self.newest = self._kept[-1]
            self.due = self.newest.sequence + 1

    def come_from_behind(self) -> None:
        """Note that a replica here may be behind all marks: until it has passed one, there is none for it."""
        self._left_out = False

    def shown(self) -> list[Mark]:
        kept = [self._settled, *self._kept] if self._settled.sequence >= 0 else list(self._kept)
        if self.newest.sequence < 0 or (kept and kept[-1] == self.newest):
            return kept
        return [*kept, self.newest]

    def _thin(self) -> None:
        """Leave out marks that are too close to the one before."""
        spacing = self._spacing()
        kept = self._kept[:1]
        for mark in self._kept[1:]:
            if mark.sequence - kept[-1].sequence >= spacing:
                kept.append(mark)
        self._kept = kept

    def _spacing(self) -> int:
        return -(-(self.newest.sequence - self._kept[0].sequence) // (MARKS_MAX // 2)) or 1
