"""The marks of event time that a partition has heard of, with their dates (design: shadow-deadlines).

A mark is a multiple of the quantum of the stage's windows: results that are final at the mark are due once the partition has
heard of it from any stream. Its date is the time at which it could first have been complete: the creation of the row that brought
it. Rows travel with that time, statements do not, so a mark of which only statements speak is dated by the first of them.

The tentative lane loses messages. Marks in between are dated backwards, mark by mark, by their distance in event time, and not
before the last message of the stream (rule D4). By the later mark's date they would be due too late. Stable rows come all of them
and in order, so nothing is dated backwards for them: after a night without rows, the first row in the morning would make each
mark of the night overdue before the rows of the other streams have come.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from flux.windows.window import END_OF_TIME, NEVER

#: The most marks that are kept of one jump of event time, as when old data is read: earlier marks are merged into the first one
#: that is kept.
MARKS_MAX = 256


class DatedMark(NamedTuple):
    """A mark that is not reached yet, and its date by the wall clock in seconds."""

    mark: int
    created: float
    #: The time at which the partition has first heard of it.
    heard: float


class MarkCalendar:
    """The marks of one partition that were heard of and that no stable watermark has reached."""

    def __init__(self, quantum: int) -> None:
        """Begin empty. ``quantum`` in microseconds; 0: there are no windows here, and each tentative message brings its mark."""
        self._quantum = quantum
        self._dates: dict[int, DatedMark] = {}
        #: The newest mark that was heard of.
        self.newest = NEVER

    def __len__(self) -> int:
        return len(self._dates)

    def floor(self, time: int) -> int:
        """Return the newest mark at or before a time."""
        quantum = self._quantum
        return time if quantum <= 0 or time in (NEVER, END_OF_TIME) else time // quantum * quantum

    def hear(self, time: int, created: float, now: float, watermark: int, since: float = inf) -> None:
        """Note that event time has come to ``time`` in some stream. ``created``: date of the news; ``watermark``: the stable one;
        ``since``: for a lane that loses messages, the date of the last message before, from which on marks may be missing."""
        quantum, newest = self._quantum, self.floor(time)
        if quantum <= 0 or newest <= watermark:
            return
        begin = max(self.newest, watermark)
        if begin == NEVER:
            begin = newest - quantum
        first = max(self.floor(begin) + quantum, newest - (MARKS_MAX - 1) * quantum)
        for mark in range(first, newest + 1, quantum):
            self._dates[mark] = DatedMark(mark, self.dated(created, newest - mark, since), now)
        self.newest = max(self.newest, newest)
        self._date(newest, created)

    def hear_tentative(self, mark: int, created: float, now: float, watermark: int, since: float) -> None:
        """Note a tentative mark of another stage, which tells its own date."""
        if self._quantum > 0:
            self.hear(mark, created, now, watermark, since)
        elif mark > watermark:
            self._dates.setdefault(mark, DatedMark(mark, created, now))
            self.newest = max(self.newest, mark)
            self._date(mark, created)

    def _date(self, mark: int, created: float) -> None:
        """Date a mark that is known by the earliest of its dates."""
        known = self._dates.get(mark)
        if known is not None and created < known.created:
            self._dates[mark] = known._replace(created=created)

    def dated(self, created: float, distance: int, since: float) -> float:
        """Return the date of a mark in front of another one, ``distance`` microseconds of event time behind it."""
        return created if since == inf else min(created, max(created - distance / 1e6, since))

    def after(self, time: int) -> DatedMark | None:
        """Return the first mark above a time; None: none was heard of."""
        return self._dates.get(min((mark for mark in self._dates if mark > time), default=NEVER))

    def between(self, after: int, through: int) -> list[DatedMark]:
        """Return the marks above ``after`` up to ``through``, in order."""
        return [self._dates[mark] for mark in sorted(self._dates) if after < mark <= through]

    def drop(self, through: int) -> None:
        """Forget marks that the stable watermark has reached."""
        if self._dates:
            self._dates = {mark: dated for mark, dated in self._dates.items() if mark > through}
