"""Which slots have changed since somebody last asked.

Law: ``take`` gives every slot that was noted since the ``take`` before, once. It costs what has changed, not what there is; so a
mark per slot, and not one per page: keys that are hit at random touch every page.
"""

from __future__ import annotations

import numpy as np

from partitioning import kernels
from partitioning.slot_tables import grown

#: Slots that there is room for at the beginning.
ROOM_MIN = 64


class Changed:
    """Nothing is noted before the first ``take``: where nobody asks, it costs nothing."""

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
        """These int32 slots change now, each below ``size``."""
        if not self.noting:
            return
        if size > len(self._marks):
            self._marks = grown(self._marks, max(2 * size, ROOM_MIN))
        if self._count + len(slots) > len(self._slots):
            self._slots = grown(self._slots, max(2 * (self._count + len(slots)), ROOM_MIN))
        self._count = kernels.note_changed(slots, self._marks, self._slots, self._count)

    def take(self) -> np.ndarray:
        """The int32 slots noted since the last time, in the order of their first change."""
        taken = self._slots[: self._count].copy()
        self._marks[taken] = 0
        self.noting, self._count = True, 0
        if len(self._slots) > max(4 * len(taken), ROOM_MIN):
            self._slots = np.zeros(max(2 * len(taken), ROOM_MIN), np.int32)  # more is not needed as a rule
        return taken
