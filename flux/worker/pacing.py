"""The pace of a worker, so that small batches are processed together (design: read-together, gather).

``Pacing`` chooses the intervals at which a busy worker reads its sources, ``GatherRest`` the rest of an idle one. ``ReadTurn``
divides the time between reading and applying.
"""

from __future__ import annotations

import math

#: Rest for each second of work: with little to do a worker is busy for a third of its time at most.
SHARE = 2.0
#: Seconds. A row rests several times in each worker that it passes: as data, as an order, as the answer to it.
IDLE_REST_MAX_S = 0.001
#: Rows of a step, on average, above which nothing is gained.
SMALL_ROWS = 1024


class GatherRest:
    """The rests of an idle worker, by its work since the last rest (design: gather). It is told of every turn.

    The cost of a turn of the loop hardly depends on the number of its rows, if they are few. So a worker that has nothing left to
    do rests before it looks again, longer than its work took, but not for long: messages, steps, orders and acks of that time are
    fewer and larger then. Law: no rest is longer than ``IDLE_REST_MAX_S``, and there is none if batches are large or something is
    left to do."""

    def __init__(self) -> None:
        self._worked_s = 0.0
        self._rows = self._steps = 0

    def worked(self, seconds: float, rows: int, steps: int) -> None:
        """Note a turn: its time, and the rows and steps that it has applied."""
        self._worked_s += seconds
        self._rows += rows
        self._steps += steps

    def rest(self, longest_s: float = IDLE_REST_MAX_S) -> float:
        """Return the seconds to rest, once nothing is left to do."""
        small = 0 < self._rows <= SMALL_ROWS * self._steps
        worked_s, self._worked_s, self._rows, self._steps = self._worked_s, 0.0, 0, 0
        return min(SHARE * worked_s, longest_s) if small else 0.0


#: Seconds. Each is a multiple of the one before, so that workers with different intervals meet.
INTERVALS_S = (0.0, 0.002, 0.004, 0.008, 0.016)
#: Slices of a partition gather for half of the interval, but not for longer than this: a row waits for it in every stage.
GATHER_MAX_S = 0.004
#: A worker that has nothing left to do rests for a quarter of the interval, or for ``IDLE_REST_MAX_S`` if that is longer,
#: but not for longer than this.
REST_MAX_S = 0.002
#: Intervals for which an ack waits for others. After each interval a worker has an ack for every stream that it reads and every
#: replica of its producer, and no producer waits for these while there is credit.
ACK_INTERVALS = 2.0
#: Longest time for which orders wait for others if steps are large and the worker is almost fully busy, and the share of the age
#: of rows that they may wait: each message of orders has an answer, and both cost as much for one step as for ten.
ORDER_MAX_S, ORDER_SHARE = 0.02, 0.25
#: Seconds for which a worker is watched before it is judged.
WINDOW_S = 0.1
#: A worker is busy if it works for a larger share of its time than ``BUSY``, and has time below ``IDLE``. Doubling an interval
#: spares less than half of the work, so the longer intervals do not come and go.
BUSY, IDLE = 0.5, 0.2
#: Only for a worker that is almost fully busy does the longest interval spare more time than rows wait for it, and only until the
#: worker is eased.
FULL, EASED = 0.7, 0.3
#: The average age of rows when they are applied, in any stage, measured in intervals: above ``OLD`` of the next interval it gets
#: longer, and below ``YOUNG`` of the present one it gets shorter.
OLD, YOUNG = 1.25, 0.75


class Pacing:
    """The intervals of a busy worker, told of every turn of its loop: times as they should be now, all in seconds.

    Each batch that is read is a wave of small messages, steps, orders and acks through all stages, and a wave costs about the
    same for one batch as for ten. So a worker that is kept busy by small steps reads its sources at intervals, which are the
    longer the busier it is. Rows wait at their entry meanwhile. The intervals begin at multiples of the wall clock: workers whose
    clocks agree read at the same time, and their rows meet in one step, because partitions gather for a part of the interval
    before they order one.

    An interval makes rows older by its own length and younger by the work that it spares. So it is never much longer than the
    usual age of rows: if rows pass quickly, a busy worker is left busy.

    Law: no interval is longer than the longest of ``INTERVALS_S``, and there is none if steps are large, rows are young, or the
    worker has time."""

    def __init__(self) -> None:
        #: Interval at which sources are read.
        self.interval_s = INTERVALS_S[0]
        #: Time for which partitions gather.
        self.gather_s = 0.0
        #: Longest rest.
        self.rest_max_s = IDLE_REST_MAX_S
        #: Least time for which an ack may wait.
        self.ack_s = 0.0
        #: Least time for which orders may wait.
        self.order_s = 0.0
        self._at = 0
        self._worked_s = self._waited_s = 0.0
        self._rows = self._steps = 0
        self._aged_s = 0.0

    def turn(self, worked_s: float, waited_s: float, rows: int, steps: int, aged_s: float) -> bool:
        """Note a turn: its seconds of work and waiting, and the rows and steps that it has applied. ``aged_s``: the sum, over all
        steps, of the age of the oldest row of a step. Tell whether the pace is another one now (``WorkerCore.set_pace``)."""
        self._worked_s += worked_s
        self._waited_s += waited_s
        self._rows += rows
        self._steps += steps
        self._aged_s += aged_s
        seconds = self._worked_s + self._waited_s
        if seconds < WINDOW_S:
            return False
        self._judge(self._worked_s / seconds)
        self._worked_s = self._waited_s = 0.0
        self._rows = self._steps = 0
        self._aged_s = 0.0
        return True

    def _judge(self, share: float) -> None:
        small, longest = 0 < self._rows <= SMALL_ROWS * self._steps, len(INTERVALS_S) - 1
        age_s = self._aged_s / max(self._steps, 1)
        longer_s = INTERVALS_S[min(self._at + 1, longest)]
        if small and share > (FULL if self._at == longest - 1 else BUSY) and age_s > OLD * longer_s:
            self._at = min(self._at + 1, longest)
        elif not small or share < (EASED if self._at == longest else IDLE) or age_s < YOUNG * self.interval_s:
            self._at = max(self._at - 1, 0)
        self.interval_s = INTERVALS_S[self._at]
        self.gather_s = min(self.interval_s / 2, GATHER_MAX_S)
        self.rest_max_s = max(IDLE_REST_MAX_S, min(self.interval_s / 4, REST_MAX_S))
        self.ack_s = ACK_INTERVALS * self.interval_s
        large = self._rows > SMALL_ROWS * self._steps
        self.order_s = min(ORDER_SHARE * age_s, ORDER_MAX_S) if large and share > FULL else 0.0


def next_multiple(of_s: float, wall: float) -> float:
    """Return the first moment after ``wall`` that is a multiple of an interval."""
    return (math.floor(wall / of_s) + 1) * of_s


#: Seconds for which work without end may hold sources up: short against the delay by its queue, and long against a turn of the
#: loop, so that a worker that keeps up still applies before it reads.
STARVED_S = 0.01
#: Batches read at a time when there is nothing to apply: a partition then has more rows pending, and its keys come into the cache
#: once for all of them.
BATCHES = 4
#: Seconds for which small batches are read, however many they are. Otherwise a source with many of them would fall behind by one
#: step after the other.
READ_S = 0.002
#: That time is doubled whenever it was too short, up to this limit. The more batches start together, the less each costs, so a
#: worker catches up the faster the further it is behind.
READ_MAX_S = 0.016


class ReadTurn:
    """The times at which a worker reads from its sources, and for how long: its one thread also applies slices (design:
    read-turn). A turn ``begins``, then ``goes_on`` before every further batch, and at last has ``ended``.

    Applying goes first, so that queues stay short. But an overloaded worker always has something to apply, and its sources have
    rows for every other worker, too. Law: however much there is to apply, sources are read again at most ``STARVED_S`` and one
    step after the last time."""

    def __init__(self) -> None:
        self._least = 0
        self._due = self._end = 0.0
        self._read_s = READ_S

    def begins(self, idle: bool, now: float, interval_s: float = 0.0) -> bool:
        """Tell whether to read sources now. ``idle``: there is nothing to apply; ``interval_s``: seconds for which sources may
        have been left alone, which lengthens the turn."""
        if not idle and now < self._due:
            return False
        self._least = BATCHES if idle else 1
        self._due, self._end = now + max(STARVED_S, 2 * self._read_s), now + max(self._read_s, interval_s / 2)
        return True

    def goes_on(self, batches: int, now: float) -> bool:
        """Tell whether to read one more batch, after this number in the turn."""
        return batches < self._least or now < self._end

    def ended(self, behind: bool) -> None:
        """End the turn. ``behind``: there are more small batches than could be read in time."""
        self._read_s = min(2 * self._read_s, READ_MAX_S) if behind else READ_S
