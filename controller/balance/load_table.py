"""The loads of all replicas as arrays, one value for each place of ``TableColumns``, and the loads of the workers.

People and metrics are told sums over these arrays, without an object for each replica. Policies get ``Loads``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from controller.balance.load import Loads, ReplicaLoad, WorkerLoad
from controller.replicas.columns import TableColumns


@dataclass(frozen=True)
class LoadTable:
    """The loads of all replicas at one time. Read it before the table of its columns changes."""

    columns: TableColumns
    workers: dict[int, WorkerLoad]
    #: See ``Loads``.
    seconds: float
    #: See ``ReplicaLoad``. This array and the next four are by partition and place.
    busy: np.ndarray
    rows_per_s: np.ndarray
    slices_per_s: np.ndarray
    queued: np.ndarray
    state_bytes: np.ndarray
    #: By partition.
    movable: np.ndarray

    def of_workers(self) -> dict[int, float]:
        """Sum up the busy seconds per second of each worker's replicas."""
        listed = self.columns.listed
        workers = self.columns.workers[listed]
        sums = np.bincount(workers, self.busy[listed], minlength=1) if len(workers) else np.zeros(1)
        return {worker: float(sums[worker]) if worker < len(sums) else 0.0 for worker in self.workers}

    def heaviest(self, stage: int | None, most: int) -> list[ReplicaLoad]:
        """Return up to ``most`` replicas of a stage, or of all stages, with the highest loads, the heaviest first."""
        first, end = self.columns.rows_of(stage)
        rows, places = np.nonzero(self.columns.listed[first:end])
        rows += first
        order = np.lexsort((self.columns.workers[rows, places], rows, -self.busy[rows, places]))[:most]
        return list(self._replicas(rows[order], places[order]))

    def replicas(self, first: int, end: int) -> list[ReplicaLoad]:
        """Return the replicas of the partitions with the rows ``first`` to ``end`` (exclusive), in the order of the table."""
        rows, places = np.nonzero(self.columns.listed[first:end])
        return list(self._replicas(rows + first, places))

    def loads(self) -> Loads:
        """Make the loads of all replicas, for policies."""
        return Loads(self.workers, self.replicas(0, len(self.movable)), self.seconds)

    def _replicas(self, rows: np.ndarray, places: np.ndarray) -> Iterator[ReplicaLoad]:
        stages = np.searchsorted(self.columns.starts, rows, side="right") - 1
        columns: Sequence[np.ndarray] = (
            stages,
            rows - self.columns.starts[stages],
            self.columns.workers[rows, places],
            places == 0,
            self.busy[rows, places],
            self.queued[rows, places],
            self.state_bytes[rows, places],
            self.rows_per_s[rows, places],
            self.movable[rows],
            self.slices_per_s[rows, places],
        )  # fmt: skip
        return map(ReplicaLoad, *(column.tolist() for column in columns))
