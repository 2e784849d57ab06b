"""Who holds which copy, and who else may: the limits that every policy keeps (DESIGN 4, 6)."""

from __future__ import annotations

from collections.abc import Iterable

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
        """Whether ``target`` may have the copy on ``source``: then no two copies share an executor, or they did before."""
        others = [worker for worker in self._holders[stage, partition] if worker != source]
        return self.may_hold(stage, partition, target) and (
            not others or not self._shares(target, others) or self._shares(source, others)
        )

    def _shares(self, worker: int, others: list[int]) -> bool:
        executor = self._workers[worker].executor if worker in self._workers else None
        return any(other in self._workers and self._workers[other].executor == executor for other in others)

    def move(self, stage: int, partition: int, source: int, target: int) -> None:
        holders = self._holders[stage, partition]
        holders[holders.index(source)] = target
