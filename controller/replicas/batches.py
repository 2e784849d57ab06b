"""How many additions begin with one table (design: batch).

A table costs every process a look and a confirmation, so additions of a stage begin together, and their replicas become
live together. The copies in between go one after the other, ``repair.atOnce`` at a time.

Law: what waits for its copy keeps rows in the logs of all producers. So a batch is no larger than what is copied while
the logs have room, as far as is known: the first of a stage is small, the next follows the time that copies took. A
replica that has waited for longer than ``READY_MAX_S`` all the same is taken out again, and nothing is lost by that.
"""

from __future__ import annotations

from flux.settings import Settings

#: Additions of the first batch of a stage, whose copies may take any time. Small states take some 10 ms each.
FIRST = 8
#: The largest batch. With ten changed rows for each kilobyte, one of this size is still a small message.
MOST = 256
#: So long the last replica of a batch may wait for its copy, by estimate, if the logs are empty. Sources have logs for
#: some seconds of rows.
ROWS_WAIT_S = 1.0
#: The same if the logs are full. Then everything stands still while anybody waits, and that is as long with batches of
#: one: copies take as long, and confirmations come between them.
ROWS_WAIT_LEAST_S = 0.1
#: Weight of the newest copy in the mean time of a copy.
NEWEST = 0.25
#: Longest time for which a table that lists replicas as live, or leaves sources of moves out, waits for others of the
#: batch: the table is no news to anybody sooner than it can be followed.
LISTED_EVERY_S = 0.1


class Batches:
    """The sizes of the batches of one query, stage by stage, as states are not of the same size."""

    def __init__(self, settings: Settings) -> None:
        self._at_once = settings.repairs_at_once
        self._most: dict[int, int] = {}
        self._copy_s: dict[int, float] = {}

    def size(self, stage: int, room: float) -> int:
        """``room``: share of the fullest log that is free."""
        most = self._most.get(stage, FIRST)
        if copy_s := self._copy_s.get(stage):
            wait_s = max(ROWS_WAIT_S * room, ROWS_WAIT_LEAST_S)
            most = min(most, int(self._at_once * wait_s / copy_s))
        return max(most, self._at_once)

    def begun(self, stage: int, additions: int) -> None:
        """A full batch has begun: the next may be twice as large, if copies are fast."""
        most = self._most.get(stage, FIRST)
        if additions >= most:
            self._most[stage] = min(2 * most, MOST)

    def copied(self, stage: int, seconds: float) -> None:
        """From the order for a copy until the new replica follows."""
        before = self._copy_s.get(stage, seconds)
        self._copy_s[stage] = before + NEWEST * (seconds - before)

    def waited_too_long(self, stage: int) -> None:
        """The batch was too large. The next begins as small as it can be."""
        self._most[stage] = self._at_once
