"""Cool-down: a partition that has moved stays for a while, and no worker takes and gives in turn (design: cool-down).

A worker that has given a partition away may give another one at once, because an overloaded worker has to shed load
quickly.
"""

from __future__ import annotations

from collections.abc import Hashable

from controller.balance.load import Move


class Cooling:
    """The partitions and workers that cool down."""

    def __init__(self, cool_down_s: float) -> None:
        self._cool_down_s = cool_down_s
        self._until: dict[Hashable, float] = {}

    def moved(self, move: Move, now: float) -> None:
        until = now + self._cool_down_s
        for what in (("partition", move.stage, move.partition), ("gave", move.from_worker), ("took", move.target)):
            self._until[what] = until

    def forget(self, now: float) -> None:
        """Forget the moves whose cool-down is over."""
        self._until = {what: until for what, until in self._until.items() if until > now}

    def stays(self, stage: int, partition: int) -> bool:
        return ("partition", stage, partition) in self._until

    def may_give(self, worker: int) -> bool:
        return ("took", worker) not in self._until

    def may_take(self, worker: int) -> bool:
        return ("gave", worker) not in self._until
