"""Rests of an idle worker, so that small batches are processed together (design: gather).

The cost of a turn of the loop hardly depends on the number of its rows, if they are few. So a worker that has nothing left to do
rests before it looks again, longer than its work took, but not for long: messages, steps, orders and acks of that time are fewer
and larger then. Law: no rest is longer than ``REST_MAX_S``, and there is none if batches are large or something is left to do.
"""

from __future__ import annotations

#: Rest for each second of work: with little to do a worker is busy for a third of its time at most.
SHARE = 2.0
#: Seconds. A row rests several times in each worker that it passes: as data, as an order, as the answer to it.
REST_MAX_S = 0.001
#: Rows of a step, on average, above which nothing is gained.
SMALL_ROWS = 1024


class Gathering:
    """The measure of the work since the last rest, and of the next rest. It is told of every turn."""

    def __init__(self) -> None:
        self._worked_s = 0.0
        self._rows = self._steps = 0

    def worked(self, seconds: float, rows: int, steps: int) -> None:
        """Note a turn: its time, and the rows and steps that it has applied."""
        self._worked_s += seconds
        self._rows += rows
        self._steps += steps

    def rest(self, longest_s: float = REST_MAX_S) -> float:
        """Return the seconds to rest, once nothing is left to do."""
        small = 0 < self._rows <= SMALL_ROWS * self._steps
        worked_s, self._worked_s, self._rows, self._steps = self._worked_s, 0.0, 0, 0
        return min(SHARE * worked_s, longest_s) if small else 0.0
