"""Failed attempts to add a replica: a limit on their number, and growing patience (design: attempts).

Law: no partition is tried for ever in silence. Each phase of an addition has a time limit; after that the addition
is given up. The next attempt goes to a worker with fewer failures and has more patience, because the state may be
large. After ``ATTEMPTS_MAX`` failures in a row the partition rests, longer each time, and a warning says so.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

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
#: For this time, a replica that was dropped because it stood still counts as a failed attempt, even if the next one
#: was added with success: that one may stand still as well.
STANDING_COUNTS_S = 600.0


@dataclass
class _Failures:
    times: int = 0
    with_worker: dict[int, int] = field(default_factory=dict)
    rest_until: float = 0.0
    standing: int = 0  # the part of ``times`` that were replicas that stood still
    standing_at: float = -math.inf


class Attempts:
    """The failures of each partition since its last success."""

    def __init__(self) -> None:
        self._failures: dict[PartitionKey, _Failures] = {}

    def failed(self, key: PartitionKey, worker: int, now: float) -> float:
        """Count one more failure. Return the seconds for which the partition rests now; 0: the next attempt may begin at
        once."""
        failures = self._failures.setdefault(key, _Failures())
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
        failures = self._failures.setdefault(key, _Failures())
        if now - failures.standing_at > STANDING_COUNTS_S:
            failures.times -= failures.standing
            failures.standing = 0
        failures.standing, failures.standing_at = failures.standing + 1, now
        return self.failed(key, worker, now)

    def succeeded(self, key: PartitionKey) -> None:
        failures = self._failures.pop(key, None)
        if failures is not None and failures.standing:
            failures.times, failures.rest_until = failures.standing, 0.0
            self._failures[key] = failures

    def with_worker(self, key: PartitionKey, worker: int) -> int:
        failures = self._failures.get(key)
        return 0 if failures is None else failures.with_worker.get(worker, 0)

    def patience_s(self, key: PartitionKey) -> float:
        """Return the wait of the next attempt before it orders the copy a second time."""
        failures = self._failures.get(key)
        # The exponent is bounded as well, because 2.0 ** 1024 is an error.
        return ASK_EVERY_S if failures is None else min(ASK_EVERY_S * 2.0 ** min(failures.times, 10), ASK_EVERY_MAX_S)

    def resting(self, now: float) -> AbstractSet[PartitionKey]:
        return {key for key, failures in self._failures.items() if now < failures.rest_until}
