"""More workers and fewer: slots that tasks fill, and workers that are emptied before they go.

A slot is a Spark task that runs a worker, and runs it again when it dies. Closing a slot takes three steps, each safe to
repeat: its worker is leaving (nothing new is placed there, its replicas move away, others read its sources); when nothing
is left on it, it is out of the table and told to stop; whoever comes for a closed slot later is told to stop as well, so
that the task ends well and Spark does not start it again.

A closed slot stays closed: more workers get new numbers. The task of a closed slot may live on for a while, or die and
come again, and its end must never be taken for that of another task.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from controller.membership import Membership
from controller.wording import count, named
from flux.plan import Plan
from partitioning.table import Table


@dataclass
class Slots:
    """Slots 0 .. ``count`` - 1. ``closed``: nobody may fill them any more; ``tasked``: a task is there, or Spark will start
    it again; ``owed``: their executors go, and no other slot is open in their place yet; ``renewed``: open in place of
    those whose workers were given up and may live, with their tasks."""

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

    def close(self, slot: int) -> None:
        self.closed.add(slot)

    def vacate(self, slot: int) -> None:
        """Its task has ended, or has found the slot closed: Spark does not start it again."""
        self.tasked.discard(slot)

    def grow(self, workers: int) -> None:
        """Until so many are open."""
        self.count += max(workers - len(self.open), 0)

    def renew(self, slot: int) -> None:
        """Its worker was given up and may live: another slot takes its place, unless it was to go anyway."""
        if slot not in self.closed:
            before = self.count
            self._open_in_place_of(slot)
            self.renewed |= set(range(before, self.count))

    def _open_in_place_of(self, slot: int) -> None:
        self.owed.discard(slot)
        self.close(slot)
        self.grow(len(self.open) + 1)

    def owe(self, slot: int) -> None:
        """Its executor goes. A closed slot was replaced already, or is to stay empty."""
        if slot not in self.closed:
            self.owed.add(slot)

    def replace(self, room: int) -> list[int]:
        """Open others in place of those that are owed, as long as there is ``room`` for so many workers on executors that
        stay. Which were replaced."""
        staying = len(set(self.open) - self.owed)
        replaced = sorted(self.owed)[: max(room - staying, 0)]
        for slot in replaced:
            self._open_in_place_of(slot)
        return replaced

    def settle(self) -> None:
        """So many as are open now are wanted: what was owed for slots that are closed is not wanted any more."""
        self.owed -= self.closed

    def missing(self, filled: Collection[int], room: int) -> list[int]:
        """Open slots without a task. The task of a worker that was given up may be there still: where that leaves no
        ``room`` for so many tasks, one in its place waits until it has ended. It would take a slot kept for others."""
        missing = [slot for slot in self.open if slot not in self.tasked and slot not in filled]
        at_once = [slot for slot in missing if slot not in self.renewed]
        renewed = [slot for slot in missing if slot in self.renewed]
        return sorted(at_once + renewed[: max(room - len(self.tasked) - len(at_once), 0)])


@dataclass
class Drain:
    """A worker that is leaving, since when and why. ``told``: somebody was told that it does not get on."""

    worker: int
    slot: int
    why: str
    since: float
    told: bool = False


def too_few(plan: Plan, members: Membership, leaving: Iterable[int]) -> str | None:
    """Why the workers that stay could not hold all replicas; None: they can."""
    gone = set(leaving)
    staying = [member for node, member in members.workers.items() if node not in gone]
    executors = len({member.about.executor for member in staying})
    places = len(staying) if plan.settings.same_executor else executors
    for stage in plan.stages:
        if places < stage.replicas:
            return (
                f"stage {stage.name} has replicas={stage.replicas}, and without {named('worker', sorted(gone))} there would be "
                f"{count(len(staying), 'worker')} on {count(executors, 'executor')}: add workers first"
            )
    return None


def held_by(table: Table, worker: int) -> list[tuple[int, int]]:
    """(stage, partition) of every replica on a worker, in topological order."""
    return [
        (stage, partition)
        for stage, partitions in enumerate(table.stages)
        for partition, replicas in enumerate(partitions)
        for replica in replicas
        if replica.worker == worker
    ]


def reads(table: Table, worker: int) -> bool:
    return any(worker in owners for owners in table.sources)
