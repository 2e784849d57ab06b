"""The part of Spark in a query: jobs that read its DataFrames, with tasks that are tried again."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flux.dataflow.plan import DataFrameSourcePlan, Plan
from partitioning.ids import StreamId
from tests.simulation.ingress_process import IngressProcess

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Tasks of a Spark job that run at the same time: more partitions come in waves.
TASKS_MAX = 3


@dataclass
class SparkJob:
    """The job that reads one Spark source: its tasks, their attempts, and its end."""

    source: int
    waiting: list[int]
    partitions: int
    #: The plan that travels with the tasks of the job.
    plan: Plan
    running: dict[int, list[IngressProcess]] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)
    over: bool = False

    def task(self, sim: Simulation, partition: int, attempt: int, version: int) -> IngressProcess:
        """Make an attempt of a task."""
        batches = sim.source_data[self.source].read(partition, version)
        return IngressProcess(sim, self.source, partition, attempt, batches, self.plan)

    def ends(self, sim: Simulation) -> None:
        """Tell the controller that all tasks of the job have ended well."""
        for edge in self.plan.edges_of_source(self.source):
            if edge.id in sim.plan.edges:
                sim.server.perform(sim.controller.driver.on_edge_complete(edge.id, list(range(self.partitions))))


class Spark:
    """The jobs of a query that read its DataFrames."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.world, self.controller = sim.world, sim.controller
        self.jobs: list[SparkJob] = []
        self.attempts: list[IngressProcess] = []
        #: By name and partition of a source: the versions that attempts have read.
        self.versions: dict[tuple[str, int], set[int]] = {}
        self._attempt_ids = itertools.count()

    def start(self) -> None:
        for source in self.sim.plan.sources:
            if isinstance(source, DataFrameSourcePlan):
                self.read(source.id)

    def read(self, source: int) -> None:
        """Begin the job that reads a DataFrame."""
        plan, data = self.sim.plan, self.sim.source_data[source]
        for partition in data.other:
            for edge in plan.edges_of_source(source):
                self.sim.ledger.unsteady.add(StreamId(edge.id, partition))
        # The first tasks have the plan with which the simulation began.
        carried = self.sim.first_plan if source in self.sim.first_plan.sources else plan
        self.begin(SparkJob(source, list(range(len(data.batches))), len(data.batches), carried))

    def begin(self, job: SparkJob) -> None:
        self.jobs.append(job)
        self._fill(job)

    def cancel(self, source: int) -> None:
        """End the jobs of a source that no stage reads any more."""
        for job in self.jobs:
            if job.source == source and not job.over:
                job.over = True
                for attempt in [attempt for some in job.running.values() for attempt in some]:
                    attempt.die()
                job.running.clear()

    def _fill(self, job: SparkJob) -> None:
        while job.waiting and len(job.running) < TASKS_MAX:
            self.attempt(job, job.waiting.pop(0))
        if not job.waiting and not job.running and not job.over:
            job.over = True
            delay = self.world.random.random() * self.sim.faults.edge_complete_delay_s
            self.sim.network.disturbed(self.world.now + delay)
            self.world.after(delay, self._edges_complete, job)

    def _edges_complete(self, job: SparkJob) -> None:
        job.ends(self.sim)

    def attempt(self, job: SparkJob, partition: int) -> None:
        if self.controller.phase == "ended" or partition in job.done or job.over:
            return
        data = self.sim.source_data[job.source]
        version = min(job.attempts[partition], 1) if self.world.chance(0.8) else 0
        self.versions.setdefault((data.name, partition), set()).add(version)
        job.attempts[partition] += 1
        attempt = job.task(self.sim, partition, next(self._attempt_ids), version)
        job.running.setdefault(partition, []).append(attempt)
        self.attempts.append(attempt)

    def job_of(self, attempt: IngressProcess) -> SparkJob:
        return next(job for job in reversed(self.jobs) if job.source == attempt.source)

    def finished(self, attempt: IngressProcess) -> None:
        job = self.job_of(attempt)
        for each in job.running.pop(attempt.index):
            each.die()
        job.done.add(attempt.index)
        self._fill(job)

    def failed(self, attempt: IngressProcess) -> None:
        attempt.die()
        job = self.job_of(attempt)
        alive = job.running[attempt.index]
        alive.remove(attempt)
        if not alive:
            self.world.after(self.world.random.random() * 0.1, self.attempt, job, attempt.index)

    def alive(self) -> list[IngressProcess]:
        return [attempt for job in self.jobs for some in job.running.values() for attempt in some if not attempt.dead]
