"""What policies look at and what they suggest: load of replicas and workers, and moves (design: load).

Plain values without logic: ``load_reports`` makes the loads from the workers' reports, policies read them and suggest
moves, and the sweep carries the moves out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from controller.replicas.apart import Place
from partitioning.ids import PartitionKey


class Holding(NamedTuple):
    """A partition on a worker: which of its replicas is meant."""

    stage: int
    partition: int
    worker: int


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica. ``busy``: seconds per second spent applying its steps; ``queued``: slices that wait for it;
    ``state_bytes``: of its last known state; ``rows_per_s`` and ``slices_per_s``: applied (0 slices: not known);
    ``movable``: its partition has all replicas, all of them have arrived, and none is being added or moved."""

    stage: int
    partition: int
    worker: int
    primary: bool = True
    busy: float = 0.0
    queued: int = 0
    state_bytes: int = 0
    rows_per_s: float = 0.0
    movable: bool = True
    slices_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """``cpu``: seconds per second of its process; ``busy``: of its thread, for any work: also reading, sending, and
    replicas that have left since; ``leaving``: the worker is being emptied and gets nothing more. Workers on one
    ``executor`` fail together, workers on one ``host`` or in one ``domain`` often do: so the replicas of a partition
    are kept apart."""

    worker: int
    executor: str = ""
    cpu: float = 0.0
    rss_bytes: int = 0
    leaving: bool = False
    busy: float = 0.0
    host: str = ""
    domain: str = ""

    @property
    def place(self) -> Place:
        return Place.of(self.domain, self.host, self.executor)


@dataclass(frozen=True)
class Loads:
    """The loads of all workers and replicas at one time. ``seconds``: length of the interval that the rates are
    averages of; 0: no rates are known yet."""

    workers: dict[int, WorkerLoad]
    replicas: list[ReplicaLoad]
    seconds: float = 0.0

    def of_workers(self) -> dict[int, float]:
        """Busy seconds per second of each worker: the sum over its replicas."""
        load = dict.fromkeys(self.workers, 0.0)
        for replica in self.replicas:
            if replica.worker in load:
                load[replica.worker] += replica.busy
        return load


@dataclass(frozen=True, slots=True)
class Move:
    """Suggestion: the replica on ``from_worker`` goes to ``target``. ``gain``: by how much the higher of the two
    workers' loads falls; ``cost``: bytes of state to copy."""

    stage: int
    partition: int
    from_worker: int
    target: int
    gain: float = 0.0
    cost: int = 0

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.stage, self.partition)

    @property
    def moved(self) -> Holding:
        """The replica that it is about."""
        return Holding(self.stage, self.partition, self.from_worker)


@dataclass(frozen=True)
class Suggestion:
    """``notes``: for people, such as a partition that no move can help."""

    moves: list[Move] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
