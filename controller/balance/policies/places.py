"""Placement while moves are planned: the holders of each partition, and the workers that may hold it. It limits every policy
(design: places)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

from controller.balance.load import Loads, ReplicaLoad
from controller.replicas.placement import Placement, placement_of
from partitioning.ids import PartitionKey


class PlannedPlacement:
    """The holders of each partition, after the moves that are planned already, so that the moves of one suggestion fit
    together."""

    def __init__(self, placement: Placement, replicas: Iterable[ReplicaLoad]) -> None:
        self._placement = placement
        self._holders: dict[PartitionKey, list[int]] = {}
        # Replicas of a partition mostly come one after the other, and a key for each of many replicas would take longer.
        for (stage, partition), group in groupby(replicas, attrgetter("stage", "partition")):
            key = PartitionKey(stage, partition)
            self._holders.setdefault(key, []).extend(replica.worker for replica in group)

    @classmethod
    def of(cls, loads: Loads, same_executor: bool = False) -> PlannedPlacement:
        leaving = [worker for worker, about in loads.workers.items() if about.leaving]
        places = {worker: about.place for worker, about in loads.workers.items()}
        return cls(placement_of(places, leaving, same_executor), loads.replicas)

    def is_free(self, stage: int, partition: int, target: int) -> bool:
        """Tell whether ``target`` is neither leaving nor a holder of the partition."""
        return target not in self._placement.leaving and target not in self._holders[PartitionKey(stage, partition)]

    def may_take(self, stage: int, partition: int, source: int, target: int) -> bool:
        """Tell whether ``target`` may hold the replica that is on ``source``, well placed or not."""
        others = self._others(stage, partition, source)
        return self.is_free(stage, partition, target) and self._placement.may_hold(target, others)

    def keeps_apart(self, stage: int, partition: int, source: int, target: int) -> bool:
        """Tell whether ``target`` is free, and no worse a place for the replica than ``source``."""
        if not self.is_free(stage, partition, target):
            return False
        others = self._others(stage, partition, source)
        rank, key = self._placement.rank, PartitionKey(stage, partition)
        return not others or rank(key, target, others) <= rank(key, source, others)

    def rank(self, stage: int, partition: int, source: int, target: int) -> int:
        """Rate ``target`` as a place for the replica on ``source``. The lowest rank is best."""
        return self._placement.rank(PartitionKey(stage, partition), target, self._others(stage, partition, source))

    def _others(self, stage: int, partition: int, source: int) -> list[int]:
        return [worker for worker in self._holders[PartitionKey(stage, partition)] if worker != source]

    def move(self, stage: int, partition: int, source: int, target: int) -> None:
        holders = self._holders[PartitionKey(stage, partition)]
        holders[holders.index(source)] = target
