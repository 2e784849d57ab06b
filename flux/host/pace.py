"""How long a worker leaves its sources alone, so that small batches begin their way together (design: read-together).

Each batch that is read is a wave of small messages, steps, orders and acks through all stages, and a wave costs about the same
for one batch as for ten. So a worker that small steps keep busy asks its sources at intervals, the longer the busier it is. Rows
wait once for that, where they enter, and not in each worker that they pass. The intervals begin at multiples of the wall clock:
workers whose clocks agree read at the same time, and what they send meets in one step.

Law: no interval is longer than the longest of ``INTERVALS_S``, and there is none where steps are large or the worker has time.
"""

from __future__ import annotations

import math

from flux.host.gathering import SMALL_ROWS

#: Seconds. Each a multiple of the one before, so that workers with different ones meet. With 16 ms, rows that come every 10 ms
#: would wait longer than it spares.
INTERVALS_S = (0.0, 0.002, 0.004, 0.008)
#: How long a worker is watched before it is judged.
WINDOW_S = 0.1
#: A worker is busy, or has time, with a larger or smaller share of its time than this. An interval twice as long takes less than
#: half of the work away, so the longer ones do not come and go.
BUSY, IDLE = 0.5, 0.2


class Pace:
    """Told of every turn of the loop. ``interval_s``: as it should be now."""

    def __init__(self) -> None:
        self.interval_s = INTERVALS_S[0]
        self._at = 0
        self._worked_s = self._waited_s = 0.0
        self._rows = self._steps = 0

    def turn(self, worked_s: float, waited_s: float, rows: int, steps: int) -> None:
        """A turn worked and waited for so long, and has applied so many rows in so many steps."""
        self._worked_s += worked_s
        self._waited_s += waited_s
        self._rows += rows
        self._steps += steps
        seconds = self._worked_s + self._waited_s
        if seconds >= WINDOW_S:
            self._judge(self._worked_s / seconds)
            self._worked_s = self._waited_s = 0.0
            self._rows = self._steps = 0

    def _judge(self, share: float) -> None:
        small = 0 < self._rows <= SMALL_ROWS * self._steps
        if small and share > BUSY:
            self._at = min(self._at + 1, len(INTERVALS_S) - 1)
        elif not small or share < IDLE:
            self._at = max(self._at - 1, 0)
        self.interval_s = INTERVALS_S[self._at]


def next_multiple(of_s: float, wall: float) -> float:
    """The first moment after ``wall`` that is a multiple of an interval."""
    return (math.floor(wall / of_s) + 1) * of_s
