"""Limits on attempts to add a replica (design: attempts), and on the number of additions that begin with one table (design:
batch)."""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from flux.settings import Settings
from partitioning.ids import PartitionKey

#: Time after which a copy is ordered again. It doubles until the new replica follows, because a large state takes long,
#: and every copy holds up the primary.
ASK_EVERY_S = 1.0
ASK_EVERY_MAX_S = 30.0
#: Copies ordered in one attempt. That is half a minute in the first attempt, and minutes in later ones.
COPIES_MAX = 5
#: Time for all processes to confirm the table that lists a new replica. Until then, producers keep everything for the
#: replica.
CONFIRM_MAX_S = 30.0
#: Time for which a replica waits for its copy while producers keep everything for it. After that it is taken out again,
#: which does not count as a failure.
READY_MAX_S = 2.0
#: Time for a live replica to become safe. Until then it may hold up all commits.
SAFE_MAX_S = 30.0
#: Attempts in a row before a partition rests; the time of the rest, doubled each time.
ATTEMPTS_MAX = 3
REST_S = 10.0
REST_MAX_S = 600.0
#: For this time, a worker whose primary of a partition was out of reach for others gets no replica of that partition: the same
#: link may still be down.
UNREACHED_REST_S = 30.0
#: For this time, a replica that was dropped because it stood still counts as a failed attempt, even if the next one
#: was added with success: that one may stand still as well.
STANDING_COUNTS_S = 600.0


@dataclass
class AdditionFailures:
    """The failures of one partition."""

    times: int = 0
    with_worker: dict[int, int] = field(default_factory=dict)
    rest_until: float = 0.0
    standing: int = 0  # the part of ``times`` that were replicas that stood still
    standing_at: float = -math.inf


class AdditionAttempts:
    """The failures of each partition since its last success: a limit on their number, and growing patience.

    Law: no partition is tried for ever in silence. Each phase of an addition has a time limit; after that the addition is
    given up. The next attempt goes to a worker with fewer failures and has more patience, because the state may be large.
    After ``ATTEMPTS_MAX`` failures in a row the partition rests, longer each time, and a warning says so."""

    def __init__(self) -> None:
        #: False while no partition has failed since its last success.
        self.failures: dict[PartitionKey, AdditionFailures] = {}
        #: By partition: workers whose primary of it was out of reach, and until when they get no replica of it.
        self._unreached: dict[PartitionKey, dict[int, float]] = {}

    def failed(self, key: PartitionKey, worker: int, now: float) -> float:
        """Count one more failure. Return the seconds for which the partition rests now; 0: the next attempt may begin at
        once."""
        failures = self.failures.setdefault(key, AdditionFailures())
        failures.times += 1
        failures.with_worker[worker] = failures.with_worker.get(worker, 0) + 1
        rounds, rest = divmod(failures.times, ATTEMPTS_MAX)
        if rest:
            return 0.0
        seconds = min(REST_S * 2.0 ** min(rounds - 1, 10), REST_MAX_S)
        failures.rest_until = now + seconds
        return seconds

    def stood_still(self, key: PartitionKey, worker: int, now: float) -> float:
        """Count a replica that was dropped because it stood still. Return the same as ``failed``."""
        failures = self.failures.setdefault(key, AdditionFailures())
        if now - failures.standing_at > STANDING_COUNTS_S:
            failures.times -= failures.standing
            failures.standing = 0
        failures.standing, failures.standing_at = failures.standing + 1, now
        return self.failed(key, worker, now)

    def unreached(self, key: PartitionKey, worker: int, now: float) -> None:
        """Note that the primary of a partition was out of reach on a worker."""
        self._unreached.setdefault(key, {})[worker] = now + UNREACHED_REST_S

    def out_of_reach(self, now: float) -> dict[PartitionKey, AbstractSet[int]]:
        """Return the workers that get no replica of a partition for now, by partition."""
        left = {
            key: {worker: until for worker, until in workers.items() if now < until}
            for key, workers in self._unreached.items()
        }
        self._unreached = {key: workers for key, workers in left.items() if workers}
        return {key: workers.keys() for key, workers in self._unreached.items()}

    def succeeded(self, key: PartitionKey) -> None:
        failures = self.failures.pop(key, None)
        if failures is not None and failures.standing:
            failures.times, failures.rest_until = failures.standing, 0.0
            self.failures[key] = failures

    def forget(self, stages: Collection[int]) -> None:
        """Forget the failures of stages that are gone."""
        self.failures = {key: failures for key, failures in self.failures.items() if key.stage not in stages}
        self._unreached = {key: workers for key, workers in self._unreached.items() if key.stage not in stages}

    def with_worker(self, key: PartitionKey, worker: int) -> int:
        failures = self.failures.get(key)
        return 0 if failures is None else failures.with_worker.get(worker, 0)

    def patience_s(self, key: PartitionKey) -> float:
        """Return the wait of the next attempt before it orders the copy a second time."""
        failures = self.failures.get(key)
        # The exponent is bounded as well, because 2.0 ** 1024 is an error.
        return ASK_EVERY_S if failures is None else min(ASK_EVERY_S * 2.0 ** min(failures.times, 10), ASK_EVERY_MAX_S)

    def resting(self, now: float) -> AbstractSet[PartitionKey]:
        return {key for key, failures in self.failures.items() if now < failures.rest_until}


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


class AdditionBatches:
    """The sizes of the batches of one query, by stage, because the states of stages differ in size. A batch is the additions
    that begin with one table.

    A table costs every process a look and a confirmation, so additions of a stage begin together, and their replicas become
    live together. The copies in between go one after the other, ``repair.atOnce`` at a time.

    Law: a replica that waits for its copy keeps rows in the logs of all producers. So a batch is no larger than the number
    that can be copied while the logs have room, as far as is known: the first batch of a stage is small, later ones follow
    the time that copies took. A replica that has waited for longer than ``READY_MAX_S`` all the same is taken out again,
    and nothing is lost by that."""

    def __init__(self, settings: Settings) -> None:
        self._at_once = settings.repairs_at_once
        self._most: dict[int, int] = {}
        self._copy_s: dict[int, float] = {}

    def forget(self, stages: Collection[int]) -> None:
        """Forget the sizes of stages that are gone."""
        for stage in stages:
            self._most.pop(stage, None)
            self._copy_s.pop(stage, None)

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

    def note_copy(self, stage: int, seconds: float) -> None:
        """Note the time of a copy, from its order until the new replica follows."""
        before = self._copy_s.get(stage, seconds)
        self._copy_s[stage] = before + NEWEST * (seconds - before)

    def waited_too_long(self, stage: int) -> None:
        """Note that the batch was too large. The next begins as small as possible."""
        self._most[stage] = self._at_once
