"""How long a worker leaves its sources alone, so that small batches begin their way together (design: read-together).

Each batch that is read is a wave of small messages, steps, orders and acks through all stages, and a wave costs about the same
for one batch as for ten. So a worker that small steps keep busy asks its sources at intervals, the longer the busier it is. Rows
wait for that where they enter. The intervals begin at multiples of the wall clock: workers whose clocks agree read at the same
time, and what they send meets in one step, because partitions gather for a part of the interval before they order one.

An interval makes rows older by its own length and younger by the work that it spares. So it is never much longer than rows are
old anyway: where these come through soon, a busy worker is left busy.

Law: no interval is longer than the longest of ``INTERVALS_S``, and there is none where steps are large, rows are young, or the
worker has time.
"""

from __future__ import annotations

import math

from flux.host import gathering
from flux.host.gathering import SMALL_ROWS

#: Seconds. Each a multiple of the one before, so that workers with different ones meet.
INTERVALS_S = (0.0, 0.002, 0.004, 0.008, 0.016)
#: What has come for a partition gathers for half of the interval, but not for longer: a row waits for that in every stage.
GATHER_MAX_S = 0.004
#: A worker that has nothing left to do rests for a quarter of the interval, or for ``gathering.REST_MAX_S`` if that is longer,
#: but not for longer than this.
REST_MAX_S = 0.002
#: In intervals: how long an ack waits for others. After each interval a worker has an ack for every stream that it reads and
#: every replica of its producer, and nobody waits for these while there is credit.
ACK_INTERVALS = 2.0
#: How long orders wait for others at most where steps are large and the worker is as good as full, and which share of the age of
#: rows: each message of orders has an answer, and both cost as much for one step as for ten.
ORDER_MAX_S, ORDER_SHARE = 0.02, 0.25
#: How long a worker is watched before it is judged.
WINDOW_S = 0.1
#: A worker is busy, or has time, with a larger or smaller share of its time than this. An interval twice as long takes less than
#: half of the work away, so the longer ones do not come and go.
BUSY, IDLE = 0.5, 0.2
#: Only for one that is as good as full the longest interval spares more time than rows wait for it, and only until it is not.
FULL, EASED = 0.7, 0.3
#: In intervals: how old rows must be on average when they are applied, in whatever stage, before there is a longer one, and how
#: young they must get before there is a shorter one.
OLD, YOUNG = 1.25, 0.75


class Pace:
    """Told of every turn of the loop. ``interval_s``, how long partitions are to gather, how long a rest may be, and how long an
    ack and orders may wait at least (seconds): as these should be now."""

    def __init__(self) -> None:
        self.interval_s = INTERVALS_S[0]
        self.gather_s = 0.0
        self.rest_max_s = gathering.REST_MAX_S
        self.ack_s = 0.0
        self.order_s = 0.0
        self._at = 0
        self._worked_s = self._waited_s = 0.0
        self._rows = self._steps = 0
        self._aged_s = 0.0

    def turn(self, worked_s: float, waited_s: float, rows: int, steps: int, aged_s: float) -> None:
        """A turn worked and waited for so long, and has applied so many rows in so many steps. ``aged_s``: the ages of the oldest
        row of each step, added up."""
        self._worked_s += worked_s
        self._waited_s += waited_s
        self._rows += rows
        self._steps += steps
        self._aged_s += aged_s
        seconds = self._worked_s + self._waited_s
        if seconds >= WINDOW_S:
            self._judge(self._worked_s / seconds)
            self._worked_s = self._waited_s = 0.0
            self._rows = self._steps = 0
            self._aged_s = 0.0

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
        self.rest_max_s = max(gathering.REST_MAX_S, min(self.interval_s / 4, REST_MAX_S))
        self.ack_s = ACK_INTERVALS * self.interval_s
        large = self._rows > SMALL_ROWS * self._steps
        self.order_s = min(ORDER_SHARE * age_s, ORDER_MAX_S) if large and share > FULL else 0.0


def next_multiple(of_s: float, wall: float) -> float:
    """The first moment after ``wall`` that is a multiple of an interval."""
    return (math.floor(wall / of_s) + 1) * of_s
