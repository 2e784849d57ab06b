"""Slots, which tasks fill with workers, and drains of workers before they leave (design: slot, drain).

A slot is a Spark task that runs a worker; Spark starts it again when it dies. A slot is closed in three steps, each
safe to repeat. First, its worker is leaving: it gets no new replicas, its replicas move away, and other workers read its
sources. Then the empty worker is taken out of the table and told to stop. Finally, any worker that comes for the closed
slot later is told to stop, too, so that its task ends normally and Spark does not start it again.

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
    """Slots 0 .. ``count`` - 1."""

    count: int
    #: No worker may fill them any more.
    closed: set[int] = field(default_factory=set)
    #: They have a task, or Spark will start it again.
    tasked: set[int] = field(default_factory=set)
    #: Their executors leave, and no other slot is open in their place yet.
    owed: set[int] = field(default_factory=set)
    #: Opened in place of slots whose workers were given up. The workers, and their tasks, may still live.
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
        """Note that Spark does not start the slot's task again: it has ended, or was told that the slot is closed."""
        self.tasked.discard(slot)

    def grow(self, workers: int) -> None:
        """Open slots until ``workers`` of them are open."""
        self.count += max(workers - len(self.open), 0)

    def renew(self, slot: int) -> None:
        """Open another slot in place of one whose worker was given up and may still live. A closed slot gets none."""
        if slot not in self.closed:
            before = self.count
            self._open_in_place_of(slot)
            self.renewed |= set(range(before, self.count))

    def _open_in_place_of(self, slot: int) -> None:
        self.owed.discard(slot)
        self.close(slot)
        self.grow(len(self.open) + 1)

    def owe(self, slot: int) -> None:
        """Note that the slot's executor leaves. A closed slot was replaced already, or is to stay empty."""
        if slot not in self.closed:
            self.owed.add(slot)

    def replace(self, room: int) -> list[int]:
        """Open other slots in place of owed ones, while the executors that stay have ``room`` for the workers. Return the
        slots that were replaced."""
        staying = len(set(self.open) - self.owed)
        replaced = sorted(self.owed)[: max(room - staying, 0)]
        for slot in replaced:
            self._open_in_place_of(slot)
        return replaced

    def settle(self) -> None:
        """Note that the number of open slots is the wanted one, so that closed slots need no replacement."""
        self.owed -= self.closed

    def missing(self, filled: Collection[int], room: int) -> list[int]:
        """Return the open slots that need a task now.

        The task of a worker that was given up may still be there. Without ``room`` for one more task, the slot in its place
        waits until the old task has ended: it would take a task slot that is kept for others."""
        missing = [slot for slot in self.open if slot not in self.tasked and slot not in filled]
        at_once = [slot for slot in missing if slot not in self.renewed]
        renewed = [slot for slot in missing if slot in self.renewed]
        return sorted(at_once + renewed[: max(room - len(self.tasked) - len(at_once), 0)])


@dataclass
class Drain:
    """A worker that is leaving, with its reason."""

    worker: int
    slot: int
    why: str
    #: Time of its beginning.
    since: float
    #: The number of the request for it; 0: none.
    request: int = 0
    #: A warning has said that it takes long.
    told: bool = False


def held_by(table: Table, worker: int) -> list[PartitionKey]:
    """Return the partitions that have a replica on a worker, in topological order."""
    return [
        PartitionKey(stage, partition)
        for stage, partitions in enumerate(table.stages)
        for partition, replicas in enumerate(partitions)
        for replica in replicas
        if replica.worker == worker
    ]


def reads(table: Table, worker: int) -> bool:
    return any(worker in owners for owners in table.sources)
