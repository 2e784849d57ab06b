"""Replicas on their way to life, whose operators get back a state (design: copy).

A large state is given to another thread as ``Aside`` if the operator allows it, so that other partitions of the worker go on
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from flux.replicas.copy_state import StateCopy
from flux.replicas.replica import Replica
from partitioning.ids import PartitionKey

Aside = Callable[[str, PartitionKey, Callable[[], Any], Callable[[Any, float], None]], None]
#: The replica, the state that it has got, and the time.
Alive = Callable[[Replica, StateCopy, float], None]


class Host(Protocol):
    def build(self, key: PartitionKey, incarnation: int, bases: list[int]) -> Replica:
        """Build a replica that no other part of the worker knows of yet."""


class Restoring:
    """The restoring replicas of one worker."""

    def __init__(self, host: Host, aside: Aside) -> None:
        self._host = host
        self._aside = aside
        self._waiting: dict[int, Replica] = {}

    def begin(
        self, key: PartitionKey, incarnation: int, state: StateCopy, inline: bool, wanted: Callable[[], bool], then: Alive,
        now: float,
    ) -> None:  # fmt: skip
        """Build a replica with this state, and bring it to life (``then``), if it is ``wanted`` when it is done. ``inline``:
        the state is small, so do it at once."""
        replica = self._host.build(key, incarnation, [output.base for output in state.outputs])
        stateful = state.snapshot is not None or bool(state.changes)
        restore = partial(replica.restore, state.snapshot, state.changes)
        self._waiting[id(replica)] = replica
        if stateful and replica.operator.restores_in_background and not inline:
            self._aside("restore", key, restore, lambda _, now: self._alive(replica, state, wanted, then, now))
            return
        if stateful:
            restore()
        self._alive(replica, state, wanted, then, now)

    def _alive(self, replica: Replica, state: StateCopy, wanted: Callable[[], bool], then: Alive, now: float) -> None:
        del self._waiting[id(replica)]
        if wanted():
            then(replica, state, now)
        else:
            replica.close()

    def close(self) -> None:
        """End operators that were about to come to life. No job runs aside any more."""
        for replica in self._waiting.values():
            replica.close()
        self._waiting.clear()
