"""The times at which a worker reads from its sources, and for how long: its one thread also applies slices (design: read-turn).

Applying goes first, so that queues stay short. But an overloaded worker always has something to apply, and its sources have rows
for every other worker, too. Law: however much there is to apply, sources are read again at most ``STARVED_S`` and one step after
the last time.
"""

from __future__ import annotations

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
    """The turn of the sources: ``begins``, then ``goes_on`` before every further batch, and at last ``ended``."""

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
