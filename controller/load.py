"""What policies look at and what they suggest: load of replicas and workers, and moves (DESIGN 6).

Plain values, no logic: made from the workers' reports (controller.loads), looked at by policies, carried out by the
sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.apart import Place


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One copy of a partition. ``busy``: seconds per second spent applying it; ``queued``: slices that wait;
    ``state_bytes``: of its last known state; ``rows_per_s`` and ``slices_per_s`` applied (no slices: not known);
    ``movable``: it has all its copies, all of them are safe, and nothing is under way for it."""

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
    """``cpu``: seconds per second of its process, and ``busy`` of its thread, whatever it did: reading and sending too, and
    replicas that have left since; ``leaving``: it is being emptied and takes nothing more. Workers on
    the same ``executor`` share its fate, those on the same ``host`` or in the same ``domain`` often do: the replicas of a
    partition are kept apart."""

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
    """Everything at one time. ``seconds``: how long a time the rates are averages over; 0: nothing is known yet."""

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
    """Suggestion: the copy of a partition on ``source`` goes to ``target``. ``gain``: by how much the higher of the two
    workers' loads falls; ``cost``: bytes of state to copy."""

    stage: int
    partition: int
    source: int
    target: int
    gain: float = 0.0
    cost: int = 0


@dataclass(frozen=True)
class Suggestion:
    """``notes``: for people, such as a partition that no move can help."""

    moves: list[Move] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
