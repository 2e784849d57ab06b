"""The table as arrays: one row per partition of any stage, one column per place in its list of replicas.

Reports about all replicas of a large query are made from these arrays, because a Python loop over 200,000 replicas would hold
up the controller's thread for seconds. Tables share equal rows, so the cost of a new table is the cost of its changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from controller.replicas.replica_safety import Life
from flux.dataflow.plan import Plan
from flux.replica.kinds import kind_of
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table, differing

Replicas = tuple[ReplicaAt, ...]
#: In ``workers``: no replica has this place.
NOBODY = -1


class Placed(NamedTuple):
    """Numbers of primaries, and of all replicas, by worker."""

    primaries: dict[int, int]
    replicas: dict[int, int]


def sizes_of(plan: Plan) -> np.ndarray:
    """Return the number of partitions by id of a stage: 0 for an id whose stage is no longer there."""
    _, end, _ = plan.next_ids()
    sizes = np.zeros(end, np.int64)
    for stage in plan.stages:
        sizes[stage.id] = stage.partitions
    return sizes


class TableIndex:
    """A table as arrays of partitions by places, the primary's place first. The rows of stage s begin at ``starts[s]``; a stage
    that is no longer there has none.

    ``workers``, ``incarnations`` and ``live`` are those of the replicas; ``safe`` and ``applies`` those of their kinds."""

    def __init__(self, plan: Plan, version: int = 0) -> None:
        """Begin without a table. ``version``: above those of the index for the plan before."""
        #: The ids of the stages, ascending.
        self.stages = np.array([stage.id for stage in plan.stages], np.int64)
        #: By id of a stage, those that are no longer there included.
        self.sizes = sizes_of(plan)
        self.starts = np.concatenate(([0], np.cumsum(self.sizes))).astype(np.int64)
        self.table: Table | None = None
        self.version = version  # grows with every change
        #: By stage: the rows of the table that the arrays have.
        self._seen: list[tuple[Replicas, ...] | None] = [None] * len(self.sizes)
        self._make(int(self.starts[-1]), 1)

    def _make(self, partitions: int, places: int) -> None:
        self.workers = np.full((partitions, places), NOBODY, np.int64)
        self.incarnations = np.full((partitions, places), NOBODY, np.int64)
        self.live, self.safe, self.applies = (np.zeros((partitions, places), bool) for _ in range(3))

    def look(self, table: Table) -> TableIndex:
        """Follow a new table."""
        self.table = table
        at: list[int] = []
        changed: list[Replicas] = []
        for stage, rows in enumerate(table.stages):
            before, self._seen[stage] = self._seen[stage], rows
            if rows is before:
                continue
            start = int(self.starts[stage])
            for number in range(len(rows)) if before is None else differing(before, rows):
                at.append(start + number)
                changed.append(rows[number])
        self._enter(np.array(at, np.int64), changed)
        return self

    def _enter(self, at: np.ndarray, rows: Sequence[Replicas]) -> None:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        if not len(rows):
            return
        self.version += 1
        self._widen(int(lengths.max()))
        replicas = list(chain.from_iterable(rows))
        kinds = {replica.kind: replica for replica in replicas}  # there are few kinds, and each is looked up once
        safe = {name: kind_of(one).safe for name, one in kinds.items()}
        applies = {name: kind_of(one).applies for name, one in kinds.items()}
        row = np.repeat(at, lengths)
        place = np.arange(len(replicas)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.workers[at], self.incarnations[at] = NOBODY, NOBODY
        self.live[at] = self.safe[at] = self.applies[at] = False
        self.workers[row, place] = [replica.worker for replica in replicas]
        self.incarnations[row, place] = [replica.incarnation for replica in replicas]
        self.live[row, place] = [replica.live for replica in replicas]
        self.safe[row, place] = [safe[replica.kind] for replica in replicas]
        self.applies[row, place] = [applies[replica.kind] for replica in replicas]

    def _widen(self, places: int) -> None:
        have = self.workers.shape[1]
        if places <= have:
            return
        before = (self.workers, self.incarnations, self.live, self.safe, self.applies)
        self._make(len(self.workers), places)
        after = (self.workers, self.incarnations, self.live, self.safe, self.applies)
        for old, new in zip(before, after, strict=True):
            new[:, :have] = old

    # ---- questions

    def by_stage(self, combine: np.ufunc, values: np.ndarray) -> dict[int, int]:
        """Combine the values of the partitions of each stage, by its id. ``values`` has one for each row."""
        # Only stages that are there have rows, and reduceat combines from each index to the next one.
        combined = combine.reduceat(values, self.starts[self.stages])
        return dict(zip(self.stages.tolist(), combined.tolist(), strict=True))

    @property
    def listed(self) -> np.ndarray:
        """Places that have a replica, as bool[partitions, places]."""
        listed: np.ndarray = self.workers != NOBODY
        return listed

    def rows_of(self, stage: int | None) -> tuple[int, int]:
        """Return the first row of a stage, and the row after its last; None: of all stages."""
        return (0, len(self.workers)) if stage is None else (int(self.starts[stage]), int(self.starts[stage + 1]))

    def replicas_of(self, stage: int | None) -> int:
        """Count the replicas of a stage; None: of all stages."""
        first, end = self.rows_of(stage)
        return int(self.listed[first:end].sum())

    def row(self, key: PartitionKey) -> int:
        return int(self.starts[key.stage]) + key.partition

    def without(self, flags: np.ndarray, lives: Iterable[Life]) -> np.ndarray:
        """Copy ``flags`` (partitions by places), with False for these replicas."""
        made = flags.copy()
        for life in lives:
            row = self.row(life.key)
            made[row] &= (self.workers[row] != life.worker) | (self.incarnations[row] != life.incarnation)
        return made

    @staticmethod
    def count(flags: np.ndarray) -> np.ndarray:
        """Count, for each partition, its replicas with the flag. The loop is over few places: a sum along them is ten times
        slower."""
        counts: np.ndarray = flags[:, 0].astype(np.int8)
        for place in range(1, flags.shape[1]):
            counts += flags[:, place]
        return counts

    def placed(self) -> Placed:
        return Placed(_counted(self.workers[:, :1]), _counted(self.workers))


def _counted(workers: np.ndarray) -> dict[int, int]:
    found, counts = np.unique(workers[workers != NOBODY], return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
