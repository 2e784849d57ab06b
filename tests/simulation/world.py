"""Virtual time: a heap of events, and one seeded source of randomness."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]
#: Virtual time between two looks of the controller at its clock.
TICK_S = 0.025


class World:
    """Virtual time, which passes only from event to event. Events of equal times keep the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._getrandbits = self.random.getrandbits
        self.now = 1000.0
        self.events = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Action, *given: Any) -> None:
        heapq.heappush(self._heap, (when if when > self.now else self.now, next(self._order), action, given))

    def after(self, delay_s: float, action: Action, *given: Any) -> None:
        self.at(self.now + delay_s, action, *given)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def throw(self, sides: int) -> int:
        """Return one of 1 .. ``sides``, as ``random.randint`` does, but three times as fast: each turn of a process throws."""
        bits = sides.bit_length()
        while (thrown := self._getrandbits(bits)) >= sides:
            pass
        return thrown + 1

    def step(self) -> bool:
        """Take the next event. Return False if there is none."""
        if not self._heap:
            return False
        self.now, _, action, given = heapq.heappop(self._heap)
        self.events += 1
        action(*given)
        return True
