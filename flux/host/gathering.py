"""How long a worker leaves lying what comes in small batches, so that more of it comes together (design: gather).

What a turn of the loop costs hardly depends on how few rows it is for. So a worker that is through with everything rests
for as long as that took and some more, but not for long, before it looks again: messages, steps, orders and acks of that
time are fewer and larger then. Law: no rest is longer than ``REST_MAX_S``, and there is none where batches are large or
something is left to do.
"""

from __future__ import annotations

#: Rest for each second of work: with little to do a worker is busy for a third of its time at most.
SHARE = 2.0
#: Seconds. A row rests several times in each worker that it passes: as data, as an order, as the answer to it.
REST_MAX_S = 0.001
#: Rows of a step, on average, above which nothing is gained.
SMALL_ROWS = 1024


class Gathering:
    """Told of every turn; says how long to rest when there is nothing left to do."""

    def __init__(self) -> None:
        self._worked_s = 0.0
        self._rows = self._steps = 0

    def worked(self, seconds: float, rows: int, steps: int) -> None:
        """A turn took so long and has applied so many rows in so many steps."""
        self._worked_s += seconds
        self._rows += rows
        self._steps += steps

    def rest(self, longest_s: float = REST_MAX_S) -> float:
        """Seconds. Everything is done."""
        small = 0 < self._rows <= SMALL_ROWS * self._steps
        worked_s, self._worked_s, self._rows, self._steps = self._worked_s, 0.0, 0, 0
        return min(SHARE * worked_s, longest_s) if small else 0.0
