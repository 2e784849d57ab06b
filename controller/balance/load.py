"""Loads of replicas and workers, which policies look at, and moves, which policies suggest (design: load).

Plain values without logic: ``load_reports`` makes the loads from the workers' reports, policies read them and suggest
moves, and the sweep carries the moves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from controller.replicas.moves import Holding, Move
from controller.replicas.spread import WorkerPlace
from controller.replicas.table_index import TableIndex

__all__ = ["Holding", "LoadTable", "Loads", "Move", "ReplicaLoad", "Suggestion", "WorkerLoad"]


@dataclass(frozen=True)
class LoadTable:
    """The loads of all replicas at one time as arrays, one value for each place of ``TableIndex``, and the loads of the
    workers. Read it before the table of its columns changes.

    People and metrics are told sums over these arrays, without an object for each replica. Policies get ``Loads``."""

    columns: TableIndex
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

    def state_of_stages(self) -> dict[int, int]:
        """Sum up the bytes of state of the primaries of each stage, by its id."""
        held = np.where(self.columns.listed[:, 0], self.state_bytes[:, 0], 0)
        return {stage: int(nbytes) for stage, nbytes in self.columns.by_stage(np.add, held).items()}

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
        # In the order of ReplicaLoad's fields.
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


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of one replica. A replica that has not reported yet has the rates of the busiest one of its partition."""

    #: The number of the stage in the query.
    stage: int
    partition: int
    #: The number of the worker that holds it.
    worker: int
    #: It sends the output of the partition; the others follow.
    primary: bool = True
    #: Seconds per second in which it applies its steps.
    busy: float = 0.0
    #: Slices that are not applied yet.
    queued: int = 0
    #: Size of its last known state.
    state_bytes: int = 0
    #: Rows applied.
    rows_per_s: float = 0.0
    #: Its partition has all replicas, all of them have arrived, and none is being added or moved.
    movable: bool = True
    #: Slices applied; 0: not known.
    slices_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of one worker.

    Workers on one executor fail together, workers on one host or in one domain often do, so the replicas of a partition are kept
    apart."""

    worker: int
    #: The id of Spark's executor.
    executor: str = ""
    #: Processor seconds per second of its process.
    cpu: float = 0.0
    #: Memory of its process.
    rss_bytes: int = 0
    #: The worker is being emptied and gets no more replicas.
    leaving: bool = False
    #: Seconds per second in which its thread works on anything: also reading, sending, and replicas that have left since.
    busy: float = 0.0
    #: The machine.
    host: str = ""
    #: The rack or zone (``spark.flux.domain``).
    domain: str = ""

    @property
    def place(self) -> WorkerPlace:
        return WorkerPlace.of(self.domain, self.host, self.executor)


@dataclass(frozen=True)
class Loads:
    """The loads of all workers and replicas at one time."""

    #: By number.
    workers: dict[int, WorkerLoad]
    #: In the order of stages and partitions.
    replicas: list[ReplicaLoad]
    #: Length of the interval over which rates are averaged; 0: no rates are known yet.
    seconds: float = 0.0
    #: Names of stages, by number, for the notes that people read; a stage without one is called by its number.
    names: Mapping[int, str] = field(default_factory=dict)

    def called(self, stage: int, partition: int) -> str:
        """Return the name of a partition, such as Delays/3."""
        return f"{self.names.get(stage, stage)}/{partition}"

    def of_workers(self) -> dict[int, float]:
        """Sum up the busy seconds per second of each worker's replicas."""
        load = dict.fromkeys(self.workers, 0.0)
        for replica in self.replicas:
            if replica.worker in load:
                load[replica.worker] += replica.busy
        return load


@dataclass(frozen=True)
class Suggestion:
    """The suggestions of a policy in one round, the most useful move first."""

    moves: list[Move] = field(default_factory=list)
    #: For people, for example about a partition that no move can help.
    notes: list[str] = field(default_factory=list)
