"""How often adding a replica to a partition has come to nothing: a limit on attempts, and growing patience (DESIGN 5).

Law: a partition is never tried for ever without a word. An addition has so long for each of its phases; after that it
is given up, and the next attempt goes to a worker that has failed less often, with more patience, because what failed
may be a large state. After ``ATTEMPTS_MAX`` in a row the partition rests, each time for longer, and a person is told.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

#: After how long a copy is ordered again; doubled each time until the new replica follows, because a large state
#: takes its time and every copy holds up the primary.
ASK_EVERY_S = 1.0
ASK_EVERY_MAX_S = 30.0
#: Copies ordered in one attempt: after the last, half a minute has passed in the first attempt, minutes in later ones.
COPIES_MAX = 5
#: How long all processes have to confirm the table that lists a new replica, and a live one has to become safe. As long
#: as the first takes, producers keep everything for the new replica; as long as the second, nothing is committed.
CONFIRM_MAX_S = 30.0
SAFE_MAX_S = 30.0
#: Attempts in a row before a partition rests, and for how long; doubled each time.
ATTEMPTS_MAX = 3
REST_S = 10.0
REST_MAX_S = 600.0

#: (stage, partition)
Key = tuple[int, int]


@dataclass
class _Failures:
    times: int = 0
    with_worker: dict[int, int] = field(default_factory=dict)
    rest_until: float = 0.0


class Attempts:
    def __init__(self) -> None:
        self._failures: dict[Key, _Failures] = {}

    def failed(self, key: Key, worker: int, now: float) -> float:
        """One more came to nothing. For how many seconds the partition rests now; 0: it is tried again at once."""
        failures = self._failures.setdefault(key, _Failures())
        failures.times += 1
        failures.with_worker[worker] = failures.with_worker.get(worker, 0) + 1
        rounds, rest = divmod(failures.times, ATTEMPTS_MAX)
        if rest:
            return 0.0
        seconds = min(REST_S * 2.0 ** min(rounds - 1, 10), REST_MAX_S)
        failures.rest_until = now + seconds
        return seconds

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)

    def with_worker(self, key: Key, worker: int) -> int:
        failures = self._failures.get(key)
        return 0 if failures is None else failures.with_worker.get(worker, 0)

    def patience_s(self, key: Key) -> float:
        """Of the first copy of the next attempt."""
        failures = self._failures.get(key)
        # The exponent is bounded as well: 2.0 ** 1024 is an error.
        return ASK_EVERY_S if failures is None else min(ASK_EVERY_S * 2.0 ** min(failures.times, 10), ASK_EVERY_MAX_S)

    def resting(self, now: float) -> AbstractSet[Key]:
        return {key for key, failures in self._failures.items() if now < failures.rest_until}
