"""Windows as a user declares them, and the panes that they are made of.

    flux.window("ts", "10 minutes")                  tumbling: [12:00, 12:10), [12:10, 12:20), ...
    flux.window("ts", "10 minutes", "5 minutes")     hopping: a window begins every five minutes
    flux.session_window("ts", "5 minutes")           sessions: rows of a key with gaps of at most five minutes
    flux.window(flux.NOW, "10 seconds")              windows of processing time: rows by the step in which they are applied

Windows include their start and exclude their end. They are aligned to the epoch in UTC, plus ``startTime``, as in Spark.

A pane is a stretch of time that lies in each window completely or not at all: the greatest common divisor of size and slide. So a
row is added to one pane, and a hopping window is the sum of its panes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flux.arguments import checked
from flux.errors import UsageError
from flux.windows.durations import microseconds, words

#: Times before all others, and after all others: a watermark that is not known yet, and that of an input that has ended.
NEVER, END_OF_TIME = -(1 << 63), (1 << 63) - 1
#: The number of the first version of a table that is read anew: watermarks of such tables are above all times of events, so that
#: they hold none of these back.
FIRST_VERSION = 1 << 61
#: The most windows that one row may be in. A group has a result for each of them.
OVERLAPPING_MAX = 65_536


class ProcessingTime:
    """The time of the step in which a row is applied (``context.now``), in place of a column of times. It is ordered with the
    step, so it is the same on every replica and in every repetition; another run of the query has other times."""

    def __repr__(self) -> str:
        return "flux.NOW"


NOW = ProcessingTime()


@dataclass(frozen=True, slots=True)
class Window:
    """Windows of one size. All lengths are in microseconds."""

    #: The name of the column with the times of rows; None: the time of the step.
    column: str | None
    size: int
    #: Distance between the starts of two windows; at most ``size``.
    slide: int
    #: A window starts at this time; in [0, slide).
    offset: int = 0

    @property
    def pane(self) -> int:
        """The length of a pane."""
        return math.gcd(self.size, self.slide)

    @property
    def grid(self) -> int:
        """The greatest step of time at whose multiples windows end."""
        return math.gcd(self.size, self.slide, self.offset)

    def panes(self, times: np.ndarray) -> np.ndarray:
        """Return the start of the pane of each time."""
        return self._floor(times, self.pane)

    def starts(self, times: np.ndarray) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Return the windows of each time: for each of the windows that overlap, the start of each row's window, and which rows
        have one; None: all of them. The latest window comes first."""
        latest = self._floor(times, self.slide)
        found: list[tuple[np.ndarray, np.ndarray | None]] = []
        for back in range(-(-self.size // self.slide)):
            starts = latest - back * self.slide
            whole = (back + 1) * self.slide <= self.size
            found.append((starts, None if whole else times < starts + self.size))
        return found

    def last_end(self, pane: int) -> int:
        """Return the end of the last window that has this pane."""
        return (pane - self.offset) // self.slide * self.slide + self.offset + self.size

    def ends(self, pane: int) -> range:
        """Return the ends of all windows that have this pane, ascending."""
        last = self.last_end(pane)
        windows = 1 + (self.size - (pane + self.pane - (last - self.size))) // self.slide
        return range(last - (windows - 1) * self.slide, last + 1, self.slide)

    def _floor(self, times: np.ndarray, step: int) -> np.ndarray:
        return (times - self.offset) // step * step + self.offset

    @property
    def by_clock(self) -> bool:
        """Whether these are windows of processing time."""
        return self.column is None

    def __str__(self) -> str:
        slide = "" if self.slide == self.size else f" every {words(self.slide)}"
        start = f" from {words(self.offset)}" if self.offset else ""
        return f"windows of {words(self.size)} of {_named(self.column)}{slide}{start}"


@dataclass(frozen=True, slots=True)
class SessionWindow:
    """Sessions: rows of one key between which there is no longer gap than ``gap`` microseconds."""

    #: The name of the column with the times of rows; None: the time of the step.
    column: str | None
    gap: int

    @property
    def by_clock(self) -> bool:
        """Whether these are sessions of processing time."""
        return self.column is None

    def __str__(self) -> str:
        return f"sessions of {_named(self.column)} with gaps of {words(self.gap)}"


@dataclass(frozen=True, slots=True)
class Closing(SessionWindow):
    """Groups of key and ``column``, a time that is known beforehand, such as the end of an auction. A group is final when the
    watermark has passed this time: it is a session without a gap."""

    gap: int = 0

    def __str__(self) -> str:
        return f"key and {self.column}, which the watermark has to pass"


def _named(column: str | None) -> str:
    return "the time of the step" if column is None else column


@checked("flux.window")
def window(
    timeColumn: str | ProcessingTime,  # noqa: N803
    windowDuration: str,  # noqa: N803
    slideDuration: str | None = None,  # noqa: N803
    startTime: str | None = None,  # noqa: N803
) -> Window:
    """Declare tumbling or hopping windows for ``flux.stage(window=...)``, with the arguments of the function ``window`` of Spark
    SQL.

    timeColumn      name of the column with the times of rows; ``flux.NOW``: the time of the step in which a row is applied
    windowDuration  length of a window, such as "10 minutes"; months and years have no fixed length and are refused
    slideDuration   distance between the starts of windows, at most windowDuration; default: windowDuration
    startTime       distance of a window's start from the epoch (UTC), as in "15 minutes" for hours from a quarter past"""
    column = _column(timeColumn, "flux.window")
    size = _positive(windowDuration, "flux.window, windowDuration")
    slide = size if slideDuration is None else _positive(slideDuration, "flux.window, slideDuration")
    if slide > size:
        raise UsageError(
            f"flux.window: slideDuration {slideDuration!r} is longer than windowDuration {windowDuration!r}: rows between two "
            "windows would be in none"
        )
    if size // slide > OVERLAPPING_MAX:
        raise UsageError(
            f"flux.window: with windows of {windowDuration!r} every {slideDuration!r} each row is in {size // slide:,} windows; "
            f"at most {OVERLAPPING_MAX:,} are possible: choose a longer slideDuration"
        )
    start = 0 if startTime is None else microseconds(startTime, "flux.window, startTime")
    if abs(start) >= slide:
        raise UsageError(f"flux.window: startTime {startTime!r} must be shorter than the distance between two windows")
    return Window(column, size, slide, start % slide)


@checked("flux.session_window")
def session_window(timeColumn: str | ProcessingTime, gapDuration: str) -> SessionWindow:  # noqa: N803
    """Declare sessions for ``flux.stage(window=...)``, with the arguments of the function of this name of Spark SQL.

    timeColumn   name of the column with the times of rows; ``flux.NOW``: the time of the step in which a row is applied
    gapDuration  the longest gap between two rows of a session, such as "5 minutes". A gap of exactly this length joins them. A
                 session ends this long after its last row"""
    return SessionWindow(
        _column(timeColumn, "flux.session_window"), _positive(gapDuration, "flux.session_window, gapDuration")
    )


def _column(name: str | ProcessingTime, what: str) -> str | None:
    if isinstance(name, ProcessingTime):
        return None
    if not isinstance(name, str) or not name:
        raise UsageError(f"{what}: timeColumn must be the name of a column, got {name!r:.100}")
    return name


def _positive(text: str, what: str) -> int:
    length = microseconds(text, what)
    if length <= 0:
        raise UsageError(f"{what}: expected a duration above zero, got {text!r:.100}")
    return length
