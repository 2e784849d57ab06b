"""The faults of one run of ``python -m tests.netlab.faults``, drawn from its seed: their kinds, times and durations."""

from __future__ import annotations

import enum
import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from itertools import count


class Kind(enum.StrEnum):
    """A kind of fault."""

    BROKER = "broker stopped"
    FEEDER = "source process stopped"
    READER = "reader hangs"
    CUT_ONE = "link cut in one direction"
    CUT_BOTH = "link cut in both directions"
    PAUSE = "worker stopped"
    LONG_PAUSE = "worker stopped until it is given up"
    KILL = "executor killed"


#: Faults by which a worker is lost. Two of them at once may take both replicas of a partition, so each waits until the query is
#: whole again; all other faults may still last, or come meanwhile.
LOSSES = frozenset({Kind.LONG_PAUSE, Kind.KILL})
#: Faults of which one at a time is enough: the same thing stands still already.
SINGLE = frozenset({Kind.BROKER, Kind.FEEDER, Kind.READER})
#: The least and the greatest duration in seconds, and how often the kind is drawn. A stopped broker is told after a second, a
#: reader that hangs after 0.3 s, and tentative results come after one.
DRAWN = {
    Kind.BROKER: (0.3, 5.0, 3),
    Kind.FEEDER: (0.3, 3.0, 2),
    Kind.READER: (0.3, 5.0, 3),
    Kind.CUT_ONE: (0.2, 6.0, 4),
    Kind.CUT_BOTH: (0.2, 6.0, 4),
    Kind.PAUSE: (0.1, 3.0, 4),
    Kind.LONG_PAUSE: (0.0, 0.0, 1),
    Kind.KILL: (0.0, 0.0, 3),
}
#: Seconds between two faults.
PAUSE_MIN_S, PAUSE_MAX_S = 0.2, 3.0


@dataclass(frozen=True)
class Fault:
    """A fault. ``wait_s`` is the time behind the one before it; ``chance`` chooses the victim among those that are there."""

    kind: Kind
    wait_s: float
    seconds: float
    chance: int


def schedule(seed: int, run: int, times: int, kinds: Collection[Kind] = tuple(Kind)) -> list[Fault]:
    """Draw the faults of a run. They depend only on seed and run."""
    chance = random.Random(f"faults {seed} {run}")
    choices = [kind for kind in Kind if kind in kinds]
    weights = [DRAWN[kind][2] for kind in choices]
    made = []
    for _ in range(times):
        [kind] = chance.choices(choices, weights)
        least, most, _ = DRAWN[kind]
        wait_s, seconds = chance.uniform(PAUSE_MIN_S, PAUSE_MAX_S), chance.uniform(least, most)
        made.append(Fault(kind, round(wait_s, 3), round(seconds, 3), chance.randrange(1 << 30)))
    return made


def link_of(chance: int, hosts: Collection[str]) -> tuple[str, str]:
    """Return the direction of a link between two of the hosts."""
    pairs = [(a, b) for a in sorted(hosts) for b in sorted(hosts) if a != b]
    return pairs[chance % len(pairs)]


class Lasting:
    """The faults that last, each with the time of its end. Faults of one thing may overlap, as two cuts of a link: the thing
    goes on when the last of them is over. True while there are any."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Hashable, Callable[[], object]]] = []
        self._numbers = count()
        self._things: Counter[Hashable] = Counter()

    def __bool__(self) -> bool:
        return bool(self._ends)

    def of(self, thing: Hashable) -> int:
        """Count the faults of a thing that last."""
        return self._things[thing]

    def begin(self, thing: Hashable, until: float, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Begin a fault of a thing."""
        if not self._things[thing]:
            begin()
        self._things[thing] += 1
        heapq.heappush(self._ends, (until, next(self._numbers), thing, end))

    def over(self, thing: Hashable) -> None:
        """End all faults of a thing now."""
        ends = [entry[3] for entry in self._ends if entry[2] == thing]
        self._ends = [entry for entry in self._ends if entry[2] != thing]
        heapq.heapify(self._ends)
        self._things[thing] = 0
        if ends:
            ends[0]()

    def end(self, now: float) -> None:
        """End the faults whose time has come."""
        while self._ends and self._ends[0][0] <= now:
            _, _, thing, end = heapq.heappop(self._ends)
            self._things[thing] -= 1
            if not self._things[thing]:
                end()
