"""Competition for processors: the part of its time that a thread waits for a processor, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

#: Nanoseconds in which the calling thread ran, and in which it waited for a processor.
SCHEDULED = Path("/proc/thread-self/schedstat")
#: Time between two looks, in seconds.
LOOK_S = 0.25
#: Least time of running and waiting, in seconds, of which the share says something.
_LEAST_S = 0.005


class Crowding:
    """Meter of the thread that calls ``share``."""

    def __init__(self, scheduled: Path = SCHEDULED) -> None:
        self._scheduled = scheduled
        self._look_at = 0.0
        self._ran = self._waited = 0

    def share(self, now: float) -> float | None:
        """Return the part of the time since the last answer in which this thread could have run, and others had the
        processors: from 0 to 1. None: it is not known, or not yet."""
        if now < self._look_at:
            return None
        first, self._look_at = not self._look_at, now + LOOK_S
        try:
            ran, waited = map(int, self._scheduled.read_text().split()[:2])
        except (OSError, ValueError):
            self._look_at = float("inf")  # another system, without this file
            return None
        since = ran - self._ran, waited - self._waited
        self._ran, self._waited = ran, waited
        return None if first or sum(since) < 1e9 * _LEAST_S else since[1] / sum(since)
