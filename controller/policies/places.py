"""Who holds which copy, and who else may: the limits that every policy keeps (DESIGN 4, 6)."""

from __future__ import annotations

from collections.abc import Iterable

from controller.apart import Shared, shared
from controller.load import Loads, ReplicaLoad, WorkerLoad


class Places:
    """Changes as moves are planned, so that what is suggested together fits together."""

    def __init__(self, workers: dict[int, WorkerLoad], replicas: Iterable[ReplicaLoad]) -> None:
        self._workers = workers
        self._holders: dict[tuple[int, int], list[int]] = {}
        for replica in replicas:
            self._holders.setdefault((replica.stage, replica.partition), []).append(replica.worker)

    @classmethod
    def of(cls, loads: Loads) -> Places:
        return cls(loads.workers, loads.replicas)

    def may_hold(self, stage: int, partition: int, target: int) -> bool:
        """Neither leaving nor a holder of a copy already."""
        return not self._workers[target].leaving and target not in self._holders[stage, partition]

    def keeps_apart(self, stage: int, partition: int, source: int, target: int) -> bool:
        """Whether ``target`` may have the copy on ``source``: then no two copies share an executor, host or domain, or they
        did before."""
        others = [worker for worker in self._holders[stage, partition] if worker != source]
        return self.may_hold(stage, partition, target) and (
            not others or self._shared(target, others) <= self._shared(source, others)
        )

    def shared(self, stage: int, partition: int, source: int, target: int) -> Shared:
        """The most that ``target`` shares with the copies that are not on ``source``."""
        return self._shared(target, [worker for worker in self._holders[stage, partition] if worker != source])

    def _shared(self, worker: int, others: list[int]) -> Shared:
        if worker not in self._workers:
            return Shared.NOTHING
        place = self._workers[worker].place
        beside = (shared(place, self._workers[other].place) for other in others if other in self._workers)
        return max(beside, default=Shared.NOTHING)

    def move(self, stage: int, partition: int, source: int, target: int) -> None:
        holders = self._holders[stage, partition]
        holders[holders.index(source)] = target
