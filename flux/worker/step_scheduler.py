"""The choice of the partition of a worker that applies its next step (design: fair-turns).

A partition takes several steps at a time, because its keys are in the cache by then. The next stage has the turn after it, with
its own next partition. So a slow stage with many partitions does not hold up another one: the stage behind it, to which all its
partitions send, has every other turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from flux.exchange.inbound import Slice
from flux.replica.batched_steps import may_go_together, next_together
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.worker.pacing import SMALL_ROWS
from partitioning.ids import PartitionKey

#: Limit of steps of one partition in its turn, and of the seconds for them, because steps may be slow: an idle partition then
#: waits for one step of another, not for eight.
STEPS_IN_TURN, TURN_S = 8, 0.01
#: Limit of partitions of a stage whose steps go together: more gain nothing, and other stages wait meanwhile.
TOGETHER_MAX = 64


class StepScheduler:
    """The turns of one worker. Only replicas named to ``wake`` are looked at, so every cause of readiness has to name its
    replica."""

    def __init__(self, replicas: Mapping[PartitionKey, Replica]) -> None:
        """Begin without turns. ``replicas``: those that the worker hosts at any time, a live mapping."""
        self._replicas = replicas
        self._ready: set[PartitionKey] = set()
        #: Notes that a replica may have something to do by now. It is called for each received slice.
        self.wake: Callable[[PartitionKey], None] = self._ready.add
        #: Partitions by stage, the stage and the partition whose turn it is first.
        self._order: deque[deque[PartitionKey]] = deque()
        self._steps = 0
        self._began = 0.0
        #: Seconds for which small slices wait for others, to be applied in one step; set by the shell.
        self.gather_s = 0.0
        #: Time at which the first gathering replica has gathered long enough.
        self.gathered_at = math.inf
        #: Gathering replicas, each with the time of its end, the soonest first.
        self._gathering: deque[tuple[float, Replica]] = deque()
        #: Partitions that have gathered long enough, and wait for their turn.
        self._gathered: set[PartitionKey] = set()

    def __bool__(self) -> bool:
        """Tell whether there may be something to apply."""
        return bool(self._ready)

    def arrange(self, woken: PartitionKey | None = None) -> None:
        """Make turns for the replicas that the worker hosts now. ``woken``: one of them that may have something to do."""
        if woken is not None:
            self._ready.add(woken)
        by_stage: dict[int, deque[PartitionKey]] = {}
        for key in self._replicas:
            by_stage.setdefault(key[0], deque()).append(key)
        self._order, self._steps = deque(by_stage.values()), 0

    def wake_all(self, keys: Iterable[PartitionKey]) -> None:
        self._ready.update(keys)

    def forget(self, key: PartitionKey) -> None:
        self._ready.discard(key)
        self._gathered.discard(key)

    def gathers(self, replica: Replica, slice_: Slice, now: float) -> bool:
        """Tell whether a received slice is not to be ordered yet, because more slices are expected soon (design: gather). Even if
        the replica is woken meanwhile, it waits until ``gathered`` names it."""
        if not replica.primary or replica.timed or slice_.rows > SMALL_ROWS:
            return False  # between two ticks all pending slices are applied: otherwise a timer would be late
        if replica.applied < replica.order.end:
            return False  # a step that is ordered may have waited for this very slice
        if replica.key in self._gathered:
            return False  # otherwise it would never get its turn on a busy worker
        if not replica.gathers:
            replica.gathers = True
            self._gathering.append((now + self.gather_s, replica))
            self.gathered_at = self._gathering[0][0]
        return True

    def gathered(self, now: float) -> Iterator[Replica]:
        """Yield replicas that have gathered for long enough, and are still here."""
        while now >= self.gathered_at:
            _, replica = self._gathering.popleft()
            replica.gathers = False
            self.gathered_at = self._gathering[0][0] if self._gathering else math.inf
            if self._replicas.get(replica.key) is replica:
                self._gathered.add(replica.key)
                yield replica

    def next(self, now: float, wall_ahead: float = 0.0) -> list[ReplicaStep]:
        """Return the step of the partition whose turn it is, and steps of others of its stage that may go together with it
        (design: together). Empty: no replica is ready. Timers go by the wall clock, ``wall_ahead`` of ``now``."""
        wall = now + wall_ahead
        if not self._goes_on(now, wall) and not self._pass_on(now, wall):
            return []
        self._steps += 1
        key = self._order[0][0]
        self._gathered.discard(key)
        replica = self._replicas[key]
        if len(self._ready) < 2 or not may_go_together(replica):
            return [replica.next_step(wall)]
        steps = next_together(self._with_others(replica, wall), wall)
        self._gathered.difference_update([step.key for step in steps])
        return steps

    def _with_others(self, first: Replica, wall: float) -> list[Replica]:
        """Return a replica, and others of its stage whose steps may go together with its own."""
        found = [first]
        for key in self._order[0]:
            if len(found) == TOGETHER_MAX:
                break
            if key in self._ready and key != first.key and self._is_ready(key, wall):
                other = self._replicas[key]
                if may_go_together(other):
                    found.append(other)
        return found

    def _goes_on(self, now: float, wall: float) -> bool:
        """Tell whether the partition whose turn it is applies one more step in it."""
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
            self._ready.discard(key)  # the next cause of readiness puts it back
            return False
        return True
