"""Lateness of rows, judged where they are read (design: late-rows).

Law: a row of a source partition is late if its time is below the greatest time of the rows before it in the same partition, less
the delay. So the rows that are late follow from the partition alone: neither from the cut into batches, nor from other
partitions, nor from kills and moves. A reader that begins in the middle needs one number for it, the greatest time of the rows
before."""

from __future__ import annotations

import numpy as np

from flux.windows.window import NEVER


class Lateness:
    """The judge of one source partition. ``delay``: in microseconds, as all times. ``newest``: the greatest time of the rows
    before the first one that is judged."""

    def __init__(self, delay: int, newest: int = NEVER, late: int = 0) -> None:
        self.delay, self.newest = delay, newest
        #: Late rows until now.
        self.late = late

    @classmethod
    def behind(cls, delay: int, watermark: int, late: int) -> Lateness:
        """Make the judge of rows behind a point of the stream, of which the watermark and the number of late rows are known."""
        return cls(delay, NEVER if watermark == NEVER else watermark + delay, late)

    @property
    def watermark(self) -> int:
        """No row with a time below this follows that is not late."""
        return NEVER if self.newest < NEVER + self.delay else self.newest - self.delay

    def judge(self, times: np.ndarray) -> np.ndarray | None:
        """Tell for each of the next rows whether it is late; None: none is. Rows without a time are not judged, and not given
        here."""
        if not len(times):
            return None
        before = self.newest
        self.newest = max(before, int(times.max()))
        if before != NEVER and int(times.min()) >= self.watermark:
            return None  # by far the most frequent case, and a tenth of the work
        greatest = np.maximum.accumulate(np.concatenate([[max(before, int(times[0]))], times[:-1]]))
        late: np.ndarray = times < np.maximum(greatest, NEVER + self.delay) - self.delay
        self.late += (count := int(np.count_nonzero(late)))
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

    def judge(self, times: np.ndarray) -> np.ndarray | None:
        if not len(times):
            return None
        self.newest = max(self.newest, int(times.max()))
        if int(times.min()) >= self._watermark:
            return None
        late: np.ndarray = times < self._watermark
        self.late += int(np.count_nonzero(late))
        return late
