"""Whether a thread gets a processor when it could go on: how long it waits for one, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

#: Of the calling thread: nanoseconds in which it ran, and in which it waited for a processor.
SCHEDULED = Path("/proc/thread-self/schedstat")
#: Seconds between two looks.
LOOK_S = 0.25
#: Seconds of running and waiting that say something.
_LEAST_S = 0.005


class Crowding:
    """Of the thread that asks."""

    def __init__(self, scheduled: Path = SCHEDULED) -> None:
        self._scheduled = scheduled
        self._look_at = 0.0
        self._ran = self._waited = 0

    def share(self, now: float) -> float | None:
        """Of the time since the last answer in which this thread could go on, the part in which others had the processors, from
        0 to 1. None: not known (yet)."""
        if now < self._look_at:
            return None
        first, self._look_at = not self._look_at, now + LOOK_S
        try:
            ran, waited = map(int, self._scheduled.read_text().split()[:2])
        except (OSError, ValueError):
            self._look_at = float("inf")  # another system, which does not count it
            return None
        since = ran - self._ran, waited - self._waited
        self._ran, self._waited = ran, waited
        return None if first or sum(since) < 1e9 * _LEAST_S else since[1] / sum(since)
