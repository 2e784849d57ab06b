"""Which partition of a worker applies its next step (design: fair-turns).

Several steps of one partition, because its keys are in the cache by then; then the next stage has its turn, and in it the
next partition. So a stage that takes long, with many partitions, keeps no other waiting: the one behind it, which
everybody sends to, has every other turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from flux.host.gathering import SMALL_ROWS
from flux.replicas.replica import Replica
from flux.replicas.together import may_go_together
from flux.stream.receiver import Slice
from partitioning.ids import PartitionKey

#: Steps of one partition in its turn. And the time for them, because steps may be slow: who has little to do then waits for
#: one step of another, not for eight.
STEPS_IN_TURN, TURN_S = 8, 0.01
#: Partitions of a stage whose steps go together, at most: nothing is gained by more, and others wait meanwhile.
TOGETHER_MAX = 64


class Turns:
    """Those that ``wake`` has named are looked at: whatever makes a replica ready names it."""

    def __init__(self, replicas: Mapping[PartitionKey, Replica]) -> None:
        """``replicas`` that the worker hosts, as they are at any time."""
        self._replicas = replicas
        self._ready: set[PartitionKey] = set()
        self._order: deque[deque[PartitionKey]] = deque()  # by stage: whose turn it is, then who is next
        self._steps = 0
        self._began = 0.0
        self.gather_s = 0.0  # how long small slices wait for others, to be applied in one step; chosen by the shell
        self.gathered_at = math.inf  # when the first that gathers has done so for long enough
        self._gathering: deque[tuple[float, Replica]] = deque()  # until when, the soonest first
        self._gathered: set[PartitionKey] = set()  # those that have, and wait for their turn

    def __bool__(self) -> bool:
        """Whether there may be something to apply."""
        return bool(self._ready)

    def arrange(self) -> None:
        """The worker hosts others than before."""
        by_stage: dict[int, deque[PartitionKey]] = {}
        for key in self._replicas:
            by_stage.setdefault(key[0], deque()).append(key)
        self._order, self._steps = deque(by_stage.values()), 0

    def wake(self, key: PartitionKey) -> None:
        """It may have something to do by now."""
        self._ready.add(key)

    def wake_all(self, keys: Iterable[PartitionKey]) -> None:
        self._ready.update(keys)

    def forget(self, key: PartitionKey) -> None:
        self._ready.discard(key)
        self._gathered.discard(key)

    def gathers(self, replica: Replica, slice_: Slice, now: float) -> bool:
        """Whether what has come for a replica is not to be ordered yet, because more of it is expected soon (design: gather).
        Whatever it is woken by, the replica waits until ``gathered`` names it."""
        if not self.gather_s or not replica.primary or replica.timed or slice_.rows > SMALL_ROWS:
            return False  # between two ticks whatever waits is applied: a timer would be late
        if replica.applied < replica.order.end:
            return False  # a step that is ordered may have waited for this very slice
        if replica.key in self._gathered:
            return False  # else it would never come to its turn where the worker is busy
        if not replica.gathers:
            replica.gathers = True
            self._gathering.append((now + self.gather_s, replica))
            self.gathered_at = self._gathering[0][0]
        return True

    def gathered(self, now: float) -> Iterator[Replica]:
        """Those that have gathered for long enough, of those that are still here."""
        while now >= self.gathered_at:
            _, replica = self._gathering.popleft()
            replica.gathers = False
            self.gathered_at = self._gathering[0][0] if self._gathering else math.inf
            if self._replicas.get(replica.key) is replica:
                self._gathered.add(replica.key)
                yield replica

    def next(self, now: float, wall_ahead: float = 0.0) -> Replica | None:
        """One that is ready for a step; None: nobody is. Timers go by the wall clock, ``wall_ahead`` of ``now``."""
        wall = now + wall_ahead
        if not self._goes_on(now, wall) and not self._pass_on(now, wall):
            return None
        self._steps += 1
        self._gathered.discard(self._order[0][0])
        return self._replicas[self._order[0][0]]

    def next_together(self, now: float, wall_ahead: float = 0.0) -> list[Replica]:
        """The ``next``, and others of its stage whose steps may go together with that (design: together). Empty: nobody is."""
        first = self.next(now, wall_ahead)
        if first is None:
            return []
        found = [first]
        if len(self._ready) < 2 or not may_go_together(first):
            return found
        for key in self._order[0]:
            if len(found) == TOGETHER_MAX:
                break
            if key in self._ready and key != first.key and self._is_ready(key, now + wall_ahead):
                other = self._replicas[key]
                if may_go_together(other):
                    found.append(other)
        return found

    def stepped(self, replicas: Iterable[Replica]) -> None:
        """These have taken a step."""
        for replica in replicas:
            self._gathered.discard(replica.key)

    def _goes_on(self, now: float, wall: float) -> bool:
        """Whether the partition whose turn it is applies one more step in it."""
        in_time = 0 < self._steps < STEPS_IN_TURN and now - self._began < TURN_S
        return in_time and self._is_ready(self._order[0][0], wall)

    def _pass_on(self, now: float, wall: float) -> bool:
        self._steps, self._began = 0, now
        ready = self._ready
        for _ in range(len(self._order) if ready else 0):
            self._order.rotate(-1)
            stage = self._order[0]
            for _ in range(len(stage)):
                stage.rotate(-1)
                if stage[0] in ready and self._is_ready(stage[0], wall):
                    return True
        return False

    def _is_ready(self, key: PartitionKey, wall: float) -> bool:
        if key not in self._ready:
            return False
        if not self._replicas[key].ready(wall):
            self._gathered.discard(key)
            self._ready.discard(key)  # whatever makes it ready again puts it back
            return False
        return True
