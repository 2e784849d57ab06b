"""More workers and fewer: slots that tasks fill, and workers that are emptied before they leave (design: slot, drain).

A slot is a Spark task that runs a worker; Spark starts it again when it dies. Closing a slot takes three steps, each
safe to repeat. First, its worker is leaving: it gets no new replicas, its replicas move away, and others read its
sources. Then the empty worker is taken out of the table and told to stop. Finally, any worker that comes for the closed
slot later is told to stop too, so that its task ends normally and Spark does not start it again.

A closed slot stays closed, and additional workers get new numbers: the task of a closed slot may live on for a while,
or be started again, and its end must never be taken for the end of another task.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from partitioning.ids import PartitionKey
from partitioning.table import Table


@dataclass
class Slots:
    """Slots 0 .. ``count`` - 1. ``closed``: no worker may fill them any more; ``tasked``: they have a task, or Spark
    will start it again; ``owed``: their executors leave, and no other slot is open in their place yet; ``renewed``:
    opened in place of slots whose workers were given up and may still live, and so their tasks."""

    count: int
    closed: set[int] = field(default_factory=set)
    tasked: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)
    renewed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tasked |= set(range(self.count))

    @property
    def open(self) -> list[int]:
        return [slot for slot in range(self.count) if slot not in self.closed]

    @property
    def wanted(self) -> int:
        """How many workers the query is to have: one in each open slot, and one in place of each on an executor that leaves."""
        return len(self.open) + len(self.owed & self.closed)

    def close(self, slot: int) -> None:
        self.closed.add(slot)

    def vacate(self, slot: int) -> None:
        """Its task has ended, or was told that the slot is closed: Spark does not start it again."""
        self.tasked.discard(slot)

    def grow(self, workers: int) -> None:
        """Open slots until there are as many open ones as ``workers``."""
        self.count += max(workers - len(self.open), 0)

    def renew(self, slot: int) -> None:
        """Open another slot in its place, unless it is closed: its worker was given up and may still live."""
        if slot not in self.closed:
            before = self.count
            self._open_in_place_of(slot)
            self.renewed |= set(range(before, self.count))

    def _open_in_place_of(self, slot: int) -> None:
        self.owed.discard(slot)
        self.close(slot)
        self.grow(len(self.open) + 1)

    def owe(self, slot: int) -> None:
        """Its executor leaves. A closed slot was replaced already, or is to stay empty."""
        if slot not in self.closed:
            self.owed.add(slot)

    def replace(self, room: int) -> list[int]:
        """Open other slots in place of those that are owed, as long as the executors that stay have ``room`` for that
        many workers. Returns the slots that were replaced."""
        staying = len(set(self.open) - self.owed)
        replaced = sorted(self.owed)[: max(room - staying, 0)]
        for slot in replaced:
            self._open_in_place_of(slot)
        return replaced

    def settle(self) -> None:
        """The open slots are as many as are wanted: closed ones need no replacement any more."""
        self.owed -= self.closed

    def missing(self, filled: Collection[int], room: int) -> list[int]:
        """Open slots without a task. The task of a worker that was given up may still be there. If there is no ``room``
        for one more task, the slot in its place waits until the old task has ended: it would take a task slot that is
        kept for others."""
        missing = [slot for slot in self.open if slot not in self.tasked and slot not in filled]
        at_once = [slot for slot in missing if slot not in self.renewed]
        renewed = [slot for slot in missing if slot in self.renewed]
        return sorted(at_once + renewed[: max(room - len(self.tasked) - len(at_once), 0)])


@dataclass
class Drain:
    """A worker that is leaving, since when and why. ``request``: number of the request that asks for it; ``told``: a
    warning has said that it takes long."""

    worker: int
    slot: int
    why: str
    since: float
    request: int = 0
    told: bool = False


def held_by(table: Table, worker: int) -> list[PartitionKey]:
    """The partitions that have a replica on a worker, in topological order."""
    return [
        PartitionKey(stage, partition)
        for stage, partitions in enumerate(table.stages)
        for partition, replicas in enumerate(partitions)
        for replica in replicas
        if replica.worker == worker
    ]


def reads(table: Table, worker: int) -> bool:
    return any(worker in owners for owners in table.sources)
