"""When a worker reads from its sources, and how much: its one thread also applies what has come (design: read-turn).

Applying goes first, so that queues stay short. But a worker that is asked for more than it can do is never through, and
its sources are not its own affair: rows for every other worker are among them. Law: with whatever there is to apply,
sources are read again at most ``STARVED_S`` and one step after the last time.
"""

from __future__ import annotations

#: Work without end holds sources up for no longer: short against the delay that its queue means, long against a turn of
#: the loop, so that a worker that keeps up still applies before it reads.
STARVED_S = 0.01
#: Batches read at a time when there is nothing to apply: a partition then finds more rows waiting, and its keys come into
#: the cache once for all.
BATCHES = 4
#: Small batches are read for so long, however many they are: else a source of many would fall behind by one step after
#: the other.
READ_S = 0.002
#: And for twice as long each time that this was too short, up to so long: the more of them begin their way together, the less
#: each costs, so a worker catches up the faster the further it is behind.
READ_MAX_S = 0.016


class ReadTurn:
    """``begins``, then ``goes_on`` before every further batch, and at last ``ended``."""

    def __init__(self) -> None:
        self._least = 0
        self._due = self._end = 0.0
        self._read_s = READ_S

    def begins(self, idle: bool, now: float, interval_s: float = 0.0) -> bool:
        """Whether sources are to be read now. ``idle``: there is nothing to apply; ``interval_s``: since when they may have been
        left alone, which makes it more."""
        if not idle and now < self._due:
            return False
        self._least = BATCHES if idle else 1
        self._due, self._end = now + max(STARVED_S, 2 * self._read_s), now + max(self._read_s, interval_s / 2)
        return True

    def goes_on(self, batches: int, now: float) -> bool:
        """Whether to read one more after so many in this turn."""
        return batches < self._least or now < self._end

    def ended(self, behind: bool) -> None:
        """The turn is over. ``behind``: there are more small batches than there was time for."""
        self._read_s = min(2 * self._read_s, READ_MAX_S) if behind else READ_S
