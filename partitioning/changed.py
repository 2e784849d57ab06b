"""Slots that have changed since the last request for changes.

Law: ``take`` gives every slot that was noted since the ``take`` before, once. Its cost grows with the changes, not with the
state.
Therefore each slot has a mark, and not each page: keys that are hit at random touch every page.
"""

from __future__ import annotations

import numpy as np

from partitioning import kernels
from partitioning.slot_tables import grown

#: Slots for which there is room at the beginning.
ROOM_MIN = 64


class ChangedSlots:
    """The changed slots of one partition.

    Before the first ``take`` nothing is noted, so that an aggregate without checkpoints pays nothing."""

    def __init__(self) -> None:
        self.noting = False
        self._count = 0
        self._marks = np.zeros(0, np.uint8)
        self._slots = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._marks.nbytes + self._slots.nbytes

    def note(self, slots: np.ndarray, size: int) -> None:
        """Note that these int32 slots change now, each below ``size``."""
        if not self.noting:
            return
        if size > len(self._marks):
            self._marks = grown(self._marks, max(2 * size, ROOM_MIN))
        if self._count + len(slots) > len(self._slots):
            self._slots = grown(self._slots, max(2 * (self._count + len(slots)), ROOM_MIN))
        self._count = kernels.note_changed(slots, self._marks, self._slots, self._count)

    def take(self) -> np.ndarray:
        """Return the int32 slots noted since the last time, in the order of their first change."""
        taken = self._slots[: self._count].copy()
        self._marks[taken] = 0
        self.noting, self._count = True, 0
        if len(self._slots) > max(4 * len(taken), ROOM_MIN):
            self._slots = np.zeros(max(2 * len(taken), ROOM_MIN), np.int32)  # more is rarely needed
        return taken
