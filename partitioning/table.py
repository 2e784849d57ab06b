"""Who owns what: the table of replicas, immutable and numbered by epoch (DESIGN 4).

The controller makes tables, everybody else only reads them. A table with a higher epoch replaces one with a lower;
the first replica of a partition is its primary.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

#: Epoch of the first table. Its replicas begin empty; those of later epochs begin with a copy of state.
FIRST_EPOCH = 0


class ReplicaAt(msgspec.Struct, frozen=True, array_like=True):
    """One copy of a partition. ``incarnation`` is the epoch of the table that introduced it."""

    worker: int
    incarnation: int
    live: bool = True


class Table(msgspec.Struct, frozen=True):
    """``stages[stage][partition]`` lists the replicas, the primary first; ``sources[source][partition]`` is the worker
    that reads this partition of a source inside the workers; ``endpoints`` says where a worker's data port is."""

    epoch: int
    stages: tuple[tuple[tuple[ReplicaAt, ...], ...], ...]
    sources: tuple[tuple[int, ...], ...]
    endpoints: dict[int, str]

    def replicas(self, stage: int, partition: int) -> tuple[ReplicaAt, ...]:
        return self.stages[stage][partition]

    def workers_of(self, stage: int) -> list[int]:
        """Workers that hold a replica of any partition of the stage, ascending."""
        return sorted({replica.worker for replicas in self.stages[stage] for replica in replicas})

    def rank_order(self, stage: int) -> np.ndarray:
        """Partitions of a stage, those with the same primary next to each other: clustering in this order makes the
        rows for one worker one contiguous range. int32[partitions]."""
        owners = [replicas[0].worker if replicas else -1 for replicas in self.stages[stage]]
        return np.argsort(np.array(owners), kind="stable").astype(np.int32)


def spread(partitions: int, workers: Iterable[int], start: int = 0) -> list[int]:
    """Deal partitions to workers round robin, from ``workers[start]`` on."""
    order = list(workers)
    return [order[(start + partition) % len(order)] for partition in range(partitions)]
