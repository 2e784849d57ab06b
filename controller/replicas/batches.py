"""Batches: numbers of additions that begin with one table (design: batch).

A table costs every process a look and a confirmation, so additions of a stage begin together, and their replicas become
live together. The copies in between go one after the other, ``repair.atOnce`` at a time.

Law: a replica that waits for its copy keeps rows in the logs of all producers. So a batch is no larger than the number that
can be copied while the logs have room, as far as is known: the first batch of a stage is small, later ones follow the time
that copies took. A replica that has waited for longer than ``READY_MAX_S`` all the same is taken out again, and nothing is
lost by that.
"""

from __future__ import annotations

from flux.settings import Settings

#: Additions of the first batch of a stage, when the time of a copy is not known. Small states take some 10 ms each.
FIRST = 8
#: The largest batch. With ten changed rows for each kilobyte, one of this size is still a small message.
MOST = 256
#: The last replica of a batch may wait this long for its copy, by estimate, if the logs are empty. Sources have logs for
#: some seconds of rows.
ROWS_WAIT_S = 1.0
#: The wait of the last replica if the logs are full. Then everything stands still while a replica waits. Batches of one would
#: take as long, because copies take as long and confirmations come between them.
ROWS_WAIT_LEAST_S = 0.1
#: Weight of the newest copy in the mean time of a copy.
NEWEST = 0.25
#: A table that lists replicas as live, or leaves sources of moves out, waits at most this long for other replicas of the
#: batch. A shorter wait would gain nothing: it takes the processes about as long to follow a table.
LISTED_EVERY_S = 0.1


class Batches:
    """The sizes of the batches of one query, by stage, because the states of stages differ in size."""

    def __init__(self, settings: Settings) -> None:
        self._at_once = settings.repairs_at_once
        self._most: dict[int, int] = {}
        self._copy_s: dict[int, float] = {}

    def size(self, stage: int, room: float) -> int:
        """Return the size of the next batch. ``room`` is the free share of the fullest log."""
        most = self._most.get(stage, FIRST)
        if copy_s := self._copy_s.get(stage):
            wait_s = max(ROWS_WAIT_S * room, ROWS_WAIT_LEAST_S)
            most = min(most, int(self._at_once * wait_s / copy_s))
        return max(most, self._at_once)

    def begun(self, stage: int, additions: int) -> None:
        """Note that a batch has begun. After a full one, the next may be twice as large, if copies are fast."""
        most = self._most.get(stage, FIRST)
        if additions >= most:
            self._most[stage] = min(2 * most, MOST)

    def copied(self, stage: int, seconds: float) -> None:
        """Note the time of a copy, from its order until the new replica follows."""
        before = self._copy_s.get(stage, seconds)
        self._copy_s[stage] = before + NEWEST * (seconds - before)

    def waited_too_long(self, stage: int) -> None:
        """Note that the batch was too large. The next begins as small as possible."""
        self._most[stage] = self._at_once
