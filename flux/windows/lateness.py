"""Lateness of rows, judged where they are read (design: late-rows, max-ahead).

Law: a row of a source partition is late if its time is below the greatest time of the rows before it in the same partition, less
the delay. So the rows that are late follow from the partition alone: neither from the cut into batches, nor from other
partitions, nor from kills and moves. A reader that begins in the middle needs one number for it, the greatest time of the rows
before; and two more if times far ahead are not believed at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flux.windows.window import NEVER
from partitioning import kernels


class Judgement(NamedTuple):
    """The knowledge of a judge behind some rows."""

    #: The greatest time that is believed.
    newest: int = NEVER
    #: Late rows until now.
    late: int = 0
    #: Rows in succession until now whose times are not believed, and the least of these times.
    doubted: int = 0
    doubted_from: int = NEVER


#: The knowledge in front of the first row.
NOTHING = Judgement()


class Lateness:
    """The judge of one source partition. ``delay``, ``max_ahead``: in microseconds, as all times."""

    def __init__(
        self, delay: int, known: Judgement = NOTHING, max_ahead: int | None = None, believed_after: int = 1
    ) -> None:
        """Begin behind rows of which this is known. A time above the newest one by more than ``max_ahead`` is believed when
        ``believed_after`` rows in succession have such times; None: each time is believed."""
        self.delay = delay
        self.known = known
        self._max_ahead, self._believed_after = max_ahead, believed_after

    @property
    def newest(self) -> int:
        return self.known.newest

    @property
    def late(self) -> int:
        return self.known.late

    @property
    def watermark(self) -> int:
        """No row with a time below this follows that is not late."""
        newest = self.known.newest
        return NEVER if newest < NEVER + self.delay else newest - self.delay

    def judge(self, times: np.ndarray, sure: np.ndarray | None = None) -> np.ndarray | None:
        """Tell for each of the next rows whether it is late; None: none is. Rows without a time are not judged, and not given
        here. ``sure``: the greatest time that is believed of each row; None: it follows from the rows before."""
        if not len(times):
            return None
        before, late_rows = self.known.newest, self.known.late
        believed = times
        if sure is not None:
            believed = np.where(times <= sure, times, NEVER)
        elif self._max_ahead is not None and (before == NEVER or int(times.max()) > before + self._max_ahead):
            return self._one_by_one(times, self._max_ahead)
        newest = max(before, int(believed.max()))
        late = None
        if before == NEVER or int(times.min()) < newest - self.delay:  # seldom, and ten times the work
            greatest = np.maximum.accumulate(np.concatenate([[before], believed[:-1]]))
            late = times < np.maximum(greatest, NEVER + self.delay) - self.delay
            late_rows += (count := int(np.count_nonzero(late)))
            late = late if count else None
        self.known = Judgement(newest, late_rows)
        return late

    def _one_by_one(self, times: np.ndarray, max_ahead: int) -> np.ndarray | None:
        """Judge rows of which some may be too far ahead, or follow such rows."""
        newest, late_rows, doubted, doubted_from = self.known
        state, late = np.array([newest, doubted, doubted_from], np.int64), np.zeros(len(times), np.bool_)
        times = np.ascontiguousarray(times)
        count = kernels.judge_times(
            times.ctypes.data, len(times), self.delay, max_ahead, self._believed_after, state, late
        )
        newest, doubted, doubted_from = state.tolist()
        self.known = Judgement(newest, late_rows + count, doubted, doubted_from)
        return late if count else None


class BatchLateness(Lateness):
    """The judge of rows that Spark gives batch by batch, by Spark's own rule: late are the rows below a watermark that is known
    before the batch begins. ``flux.NEVER``: none is late, as in a batch DataFrame."""

    def __init__(self, watermark: int) -> None:
        super().__init__(0)
        self._watermark = watermark

    @property
    def watermark(self) -> int:
        return self._watermark

    def judge(self, times: np.ndarray, sure: np.ndarray | None = None) -> np.ndarray | None:
        if not len(times):
            return None
        newest, late_rows = max(self.newest, int(times.max())), self.late
        late: np.ndarray | None = None
        if int(times.min()) < self._watermark:
            late = times < self._watermark
            late_rows += int(np.count_nonzero(late))
        self.known = Judgement(newest, late_rows)
        return late
