"""Executors that die one after the other, each when all is replicated again: as ``flux bench failover`` does it.

An executor has several slots. When it dies, Spark starts its tasks again at once in free slots of the others, so that
workers of one query come to share an executor, and later another executor in its place. A worker that joins gets
partitions by moves, and these are under way when the next executor dies.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from controller.replicas.additions import under_replicated
from flux.dataflow.flow import Flow
from flux.settings import Settings
from tests.simulation import flows, stage_kinds
from tests.simulation.checkers import Ledger
from tests.simulation.faults import Faults
from tests.simulation.run import Simulation
from tests.simulation.violation import Violation
from tests.simulation.worker_process import WorkerProcess

#: Seconds between two batches of a partition of the source, and rows of a batch.
PERIOD_S, ROWS = 0.05, 2
#: Batches of each partition of the source: more than a run lasts.
BATCHES = 3000
#: The longest times after which Spark starts a task again, and another executor.
TASK_S, EXECUTOR_S = 0.6, 3.0
#: The longest time until the next executor dies: moves begin a second after the last worker has joined.
CALM_S = 3.0


@dataclass(frozen=True)
class Shape:
    """The size of a cluster and of its query."""

    executors: int = 3
    #: Slots of each executor.
    slots: int = 2
    workers: int = 3
    #: Copies of each partition.
    copies: int = 2
    #: Partitions of each stage.
    partitions: int = 3
    hosts: int = 1


class Kills(Simulation):
    """One run in which executors are killed."""

    idle_source_s = 0.01

    def __init__(self, seed: int, faults: Faults, whole_s: float, shape: Shape | None = None) -> None:
        """Prepare a run. ``faults``: faults beside the kills; ``whole_s``: the longest time from the return of the last worker
        until each partition has all its copies."""
        self.whole_s = whole_s
        self.shape = shape = shape or Shape()
        self._batches = BATCHES
        self._rng = random.Random(f"kills {seed}")
        faults = replace(faults, calm_after_s=BATCHES * PERIOD_S)
        self._hosts_of: dict[str, str] = {}  # executor -> host
        super().__init__(seed, faults, shape.copies, shape.workers, self._steady, demand=lambda *about: 0.01)
        self._numbers = itertools.count()
        self._running = [self._named(f"host {number % shape.hosts}") for number in range(shape.executors)]
        self._queue: list[WorkerProcess] = []  # tasks for which no executor has a slot
        for worker in self.workers:
            worker.executor = self.executors[worker.index] = self._running[worker.index % shape.executors]

    def _steady(self, ledger: Ledger) -> flows.Dataflow:
        """Make a flow: rows at a steady rate through a keyed stage into a sink."""
        rng = self._rng
        builder = flows._Builder(rng, ledger, False, self.shape.copies, self.shape.copies)
        builder._spread = 50
        data = flows.SourceData("source", [[builder._rows(ROWS) for _ in range(BATCHES)] for _ in range(2)])

        def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
            begun = self.world.now - start * PERIOD_S
            for number in itertools.count(start):
                while number < self._batches and self.world.now < begun + number * PERIOD_S:
                    yield None
                if number >= self._batches:
                    return
                yield stage_kinds.make_batch(data.batches[partition][number], partition, number * ROWS)

        node = flows.Node(flux.source(read, stage_kinds.ROW, 2, "source"), "source", data=data)
        builder.nodes.append(node)
        stage = builder._stage(stage_kinds.Watched, [node], ("key",), partitions=self.shape.partitions)
        sink = builder._stage(stage_kinds.Sink, [stage], ("key",), partitions=self.shape.partitions)
        settings = replace(
            Settings.of(),
            resend_timeout=rng.choice([0.2, 1.0]),
            ack_interval=rng.choice([0.005, 0.02]),
            log_max_bytes=rng.choice([2000, 1 << 20]),
            repairs_at_once=rng.choice([1, 1, 3]),
            balance_round=rng.choice([0.1, 0.5]),
            balance_cool_down=0.5,
            balance_max_moves=rng.choice([1, 4]),
        )
        assert isinstance(sink.given, Flow)
        plan = compile_plan([sink.given], settings, lambda given: given, "q", flows.SECRET)
        return flows.Dataflow(plan, [data], [sink], 64 << 10, timed=False)

    # ---- Spark

    def _named(self, host: str) -> str:
        name = f"executor {next(self._numbers)}"
        self._hosts_of[name] = host
        return name

    def executor_for(self, slot: int) -> str:
        return self._rng.choice(self._free() or self._running)

    def _free(self) -> list[str]:
        """List the executors that run and have a free slot."""
        taken = [worker.executor for worker in self.workers if not worker.dead]
        return [name for name in self._running if taken.count(name) < self.shape.slots]

    def host_of(self, executor: str) -> str:
        return self._hosts_of.get(executor, "host 0")

    def kill_executor(self, name: str) -> None:
        victims = [worker for worker in self.workers if worker.executor == name and not worker.dead]
        self.counts["executors killed"] += 1
        self.counts["executors killed with several workers"] += len(victims) > 1
        self._running.remove(name)
        for worker in victims:
            self.crash(worker)
        self.world.after(EXECUTOR_S * self._rng.random(), self._another_executor, self._hosts_of[name])

    def _another_executor(self, host: str) -> None:
        self._running.append(self._named(host))
        queue, self._queue = self._queue, []
        for gone in queue:
            self._place(gone)

    def _return_later(self, gone: WorkerProcess, delay_s: float) -> None:
        self.returning += 1
        self.world.after(TASK_S * self._rng.random(), self._place, gone)

    def _place(self, gone: WorkerProcess) -> None:
        free = self._free()
        if free:
            self.executors[gone.index] = self._rng.choice(free)
            self._return(gone)
        else:
            self._queue.append(gone)

    # ---- the course of a run

    @property
    def replicated(self) -> bool:
        """Whether every partition has all of its copies, and no repair is under way; moves may be."""
        table, under_way = self.controller.table, self.controller.repairs.under_way.values()
        moves_only = all(addition.from_worker is not None for addition in under_way)
        return table is not None and moves_only and not under_replicated(self.plan, table)

    def kill_again_and_again(self, times: int) -> None:
        """Kill workers and executors; then let the source end, and count every row. Raises Violation."""
        self.run_until(lambda: self.controller.phase == "running")
        for _ in range(times):
            self._wait_for_a_moment()
            self.counts["killed during a move"] += bool(self.controller.moving.under_way)
            alive = [worker for worker in self.workers if not worker.dead]  # others were started elsewhere
            if self._rng.random() < 0.8:
                self.kill_executor(self._rng.choice(sorted({worker.executor for worker in alive})))
            else:
                self.crash(self._rng.choice(alive))
            self._recover()
        self._batches = int((self.world.now - 1000.0) / PERIOD_S) + 50
        for data in self.dataflow.sources:
            data.batches = [batches[: self._batches] for batches in data.batches]
        self.run()

    def _wait_for_a_moment(self) -> None:
        """Wait for any moment, or for one a little after a move has begun, if one does; then until all is replicated."""
        if self._rng.random() < 0.5:
            self._wait(CALM_S * self._rng.random())
        else:
            self._wait(CALM_S, unless=lambda: bool(self.controller.moving.under_way))
            self._wait(0.05 * self._rng.random())
        self.run_until(lambda: self.replicated)

    def _wait(self, seconds: float, unless: Callable[[], bool] = lambda: False) -> None:
        end = self.world.now + seconds
        self.world.at(end, lambda: None)
        self.run_until(lambda: self.world.now >= end or unless())

    def _recover(self) -> None:
        self.run_until(lambda: self._failed or (self.all_in and not self.controller.driver.awaits_workers))
        self._wait(self.whole_s, unless=lambda: self._failed or self.replicated)
        if self._failed:
            raise Violation("no kill at full replication fails a query", str(self.controller.error))
        if not self.replicated:
            raise Violation("full replication comes back in time", self.how_it_stands())
        self._wait(self.whole_s, unless=lambda: self._failed or not self._together())
        if self._together():
            raise Violation("replicas are on different hosts", f"{self._together()}, {self.how_it_stands()}")

    def _together(self) -> list[tuple[int, int]]:
        """List the partitions with two copies on one host, though there are hosts enough."""
        table, members = self.controller.table, self.controller.members.workers
        assert table is not None
        if len({member.about.host for member in members.values()}) < self.shape.copies:
            return []
        return [
            (stage, partition)
            for stage, partitions in enumerate(table.stages)
            for partition, replicas in enumerate(partitions)
            if len(replicas) == self.shape.copies
            and len({members[replica.worker].about.host for replica in replicas}) < self.shape.copies
        ]

    @property
    def _failed(self) -> bool:
        return self.controller.error is not None
