"""Streaming queries of Spark whose rows come in micro-batches, as ``spark_integration.streaming.stream_source`` runs them: a job
for each batch, and the next job when all consumers have applied the rows of all tasks of the batch (design: micro-batches)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from flux.dataflow.plan import Plan
from flux.tasks.micro_batches import MicroBatch
from tests.simulation.ingress_process import IngressProcess
from tests.simulation.process import HELD_BACK_S, TURN_S
from tests.simulation.spark import SparkJob

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: The longest time between two micro-batches, and the most batches of rows of a partition in one of them.
REST_S, BATCHES_MAX = 0.05, 12


@dataclass
class MicroJob(SparkJob):
    """The job of one micro-batch."""

    query: MicroQuery | None = None
    number: int = 0
    #: By partition: its batches of rows.
    rows: dict[int, list[pa.RecordBatch]] = field(default_factory=dict)

    def task(self, sim: Simulation, partition: int, attempt: int, version: int) -> IngressProcess:
        assert self.query is not None
        least, sent = self.query.reached.get(partition, (0, ()))
        about = MicroBatch(self.query.name, self.number, least, sent)
        return MicroTask(sim, self.source, partition, attempt, iter(self.rows[partition]), self.plan, about)

    def ends(self, sim: Simulation) -> None:
        assert self.query is not None
        self.query.applied(self)


class MicroTask(IngressProcess):
    """One attempt of a task that sends a partition of a micro-batch. The task begins when consumers have told their positions."""

    def __init__(
        self,
        sim: Simulation,
        source: int,
        partition: int,
        attempt: int,
        batches: Iterator[pa.RecordBatch],
        plan: Plan,
        micro_batch: MicroBatch,
    ) -> None:
        super().__init__(sim, source, partition, attempt, batches, plan, micro_batch)
        self._rest: pa.RecordBatch | None = None

    def _append(self, core, now: float) -> None:  # type: ignore[no-untyped-def]
        if not core.find_start():
            self._read_at = now + TURN_S
            return
        assert self._batches is not None
        batch = self._rest if self._rest is not None else next(self._batches, None)
        if batch is None:
            self._batches = None
            core.finish(now)
            return
        given = batch if self._rest is not None else core.needed(batch)
        self._rest = core.append(given, now) if given.num_rows else None

    def on_goodbye_seen(self) -> None:
        if not self.dead:
            assert self.core is not None
            job = self.sim.spark.job_of(self)
            assert isinstance(job, MicroJob)
            assert job.query is not None
            job.query.note(self.index, self.core.end, tuple(self.core.sent))
        super().on_goodbye_seen()


class MicroQuery:
    """A streaming query that feeds one source."""

    def __init__(self, sim: Simulation, source: int, rng: random.Random) -> None:
        self._sim, self._source, self._rng = sim, source, rng
        self.name = f"query of source {source}"
        data = sim.source_data[source]
        self._left = {partition: list(data.read(partition)) for partition in range(len(data.batches))}
        self._number = -1
        #: By partition: its end behind the earlier batches, as the program keeps it.
        self.reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._through: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._stopped = False
        sim.world.after(rng.random() * REST_S, self._next)

    def stop(self) -> None:
        self._stopped = True

    def note(self, partition: int, end: int, sent: tuple[int, ...]) -> None:
        """Note the end of a partition behind the batch under way."""
        self._through[partition] = end, sent

    def _next(self) -> None:
        """Begin the next batch; behind the last one, end the source when it may end."""
        sim = self._sim
        if self._stopped or sim.controller.phase == "ended":
            return
        if not any(self._left.values()):
            self._end()
            return
        self._number += 1
        taken = {}
        for partition, left in self._left.items():
            several = self._rng.randint(0, BATCHES_MAX)
            taken[partition], self._left[partition] = left[:several], left[several:]
        waiting = [partition for partition, batches in taken.items() if batches]
        sim.counts["micro-batches"] += 1
        job = MicroJob(self._source, waiting, len(taken), sim.plan, query=self, number=self._number, rows=taken)
        sim.spark.begin(job)

    def applied(self, job: MicroJob) -> None:
        """Take the end of a batch: all consumers have its rows."""
        self.reached = self.reached | self._through
        self._sim.world.after(self._rng.random() * REST_S, self._next)

    def _end(self) -> None:
        sim = self._sim
        if not all(sim.may_end(self._source, partition) for partition in self._left):
            sim.world.after(HELD_BACK_S, self._next)
            return
        for edge in sim.plan.edges_of_source(self._source):
            sim.server.perform(sim.controller.driver.on_edge_complete(edge.id, []))
