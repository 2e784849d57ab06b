"""One seed, one run: build a cluster, let it run among faults, and see whether every law was kept."""

from __future__ import annotations

import itertools
import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from controller.state import Controller, Tell
from flux.codec import decode_report, encode
from flux.control import EdgeComplete, NewTable
from flux.errors import NonDeterministicInputError, QueryFailed
from partitioning.ids import StreamId
from tests.simulation import faults as faults_
from tests.simulation import flows
from tests.simulation.checkers import Ledger, Violation
from tests.simulation.network import Identity, Network
from tests.simulation.processes import IngressProcess, Process, WorkerProcess
from tests.simulation.world import World

#: A run that has not ended so long after the last fault is stuck. Patience of a producer grows to 32 resend timeouts.
LIMIT_S = 120.0
#: A run with so many events goes round in circles; ordinary ones have some thousands.
EVENTS_MAX = 400_000
#: Tasks of a Spark job that run at the same time: more partitions come in waves.
TASKS_MAX = 3


@dataclass(frozen=True)
class Result:
    """``law`` is None if every law was kept; ``error``: what the query ended with, None if it went well."""

    seed: int
    law: str | None
    detail: str
    error: str | None
    counts: Counter[str]

    @property
    def ok(self) -> bool:
        return self.law is None

    def __str__(self) -> str:
        return f"make sim SEED={self.seed}" + ("" if self.ok else f"   # {self.law}: {self.detail}")


@dataclass
class SparkJob:
    """The job that reads one Spark source: its tasks, their attempts, and when it is over."""

    source: int
    waiting: list[int]
    partitions: int
    running: dict[int, list[IngressProcess]] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)
    over: bool = False


class Simulation:
    def __init__(self, seed: int, faults: faults_.Faults | None = None) -> None:
        self.seed = seed
        self.world = World(seed)
        rng = random.Random(f"flow {seed}")
        self.faults = faults or faults_.draw(rng)
        self.ledger = Ledger()
        self.counts = self.ledger.counts
        self.dataflow = flows.draw(rng, self.ledger, self.faults.nondeterministic)
        self.plan = self.ledger.plan = self.dataflow.plan
        self.network = Network(self.world, self.faults, self.counts)
        slots = rng.randint(1, 3)
        self.controller = Controller(self.plan, slots, self.world.now)
        self.listening: dict[str, WorkerProcess] = {}  # endpoint -> who is or was there
        self.workers = [WorkerProcess(self, slot, slot) for slot in range(slots)]
        if self.faults.slowness > 1:
            self.workers[0].slowness = self.faults.slowness
        self.jobs: list[SparkJob] = []
        self.attempts: list[IngressProcess] = []
        self.versions: dict[tuple[str, int], set[int]] = {}
        self._attempt_ids = itertools.count()
        self._calm_at = self.world.now + self.faults.calm_after_s
        if self.faults.crash:
            self.world.after(self.world.random.random() * self.faults.calm_after_s, self._crash_one)
        for rate, strike in [
            (self.faults.breaks_per_s, self.network.break_one),
            (self.faults.pauses_per_s, self._pause_one),
            (self.faults.deaths_per_s, self._kill_one),
            (self.faults.zombies_per_s, self._speculate),
            (self.faults.epochs_per_s, self._new_epoch),
        ]:
            if rate:
                self._strike_later(rate, strike)

    # ---- the course of a run

    def run(self) -> None:
        """Raises Violation."""
        limit = self.world.now + self.faults.calm_after_s + LIMIT_S
        while self.world.step():
            self.network.calm = self.world.now >= self._calm_at
            if self.controller.phase == "ended" and self._at_rest():
                break
            if self.world.now > limit or self.world.events > EVENTS_MAX:
                raise Violation("every run comes to its end", self._standing())
        self._check_end()

    def _at_rest(self) -> bool:
        if self.controller.error is not None or self.counts["workers that crashed"]:
            return True
        cores = [worker.core for worker in self.workers if worker.core is not None]
        return all(producer.drained for core in cores for producer in core.producers.values()) and not any(
            core._effects for core in cores
        )

    def _standing(self) -> str:
        waiting = [
            f"worker {worker.index}: {sum(r.queued for r in worker.core.replicas.values())} slices queued, unfinished "
            f"{[k for k, r in worker.core.replicas.items() if not r.finished]}, undrained "
            f"{[str(s) for s, p in worker.core.producers.items() if not p.drained]}"
            for worker in self.workers
            if worker.core is not None
        ]
        jobs = [
            f"source {job.source}: {sorted(job.running)} run, {job.waiting} wait" for job in self.jobs if not job.over
        ]
        return f"{self.world.events} events, phase {self.controller.phase}; {'; '.join(waiting + jobs)}"

    # ---- the controller

    def controller_hears(self, identity: Identity, frame: bytes) -> None:
        self._perform(self.controller.on_report(identity, decode_report(frame), self.world.now))

    def _perform(self, effects: list[Tell]) -> None:
        for effect in effects:
            assert isinstance(effect.connection, tuple)
            late = 0.0
            if isinstance(effect.order, NewTable | EdgeComplete) and not self.network.calm:
                self.ledger.table = self.controller.table  # type: ignore[assignment]
                if self.world.chance(self.faults.late_order_probability):
                    self.counts["orders that came late"] += 1
                    late = self.world.random.random() * self.faults.late_order_s
            self.network.of(effect.connection).reply(effect.connection, encode(effect.order), late)
        if self.controller.table is not None:
            self.ledger.table = self.controller.table
            if not self.jobs:
                self._start_jobs()

    def _new_epoch(self) -> None:
        table = self.controller.table
        if table is not None and self.controller.phase == "running":
            self.counts["epochs"] += 1
            self.controller.table = msgspec.structs.replace(table, epoch=table.epoch + 1)
            self.controller._tell_all(NewTable(table=self.controller.table, complete=self.controller.complete))
            self._perform(self.controller._take())

    # ---- Spark

    def _start_jobs(self) -> None:
        for source, data in zip(self.plan.sources, self.dataflow.sources, strict=True):
            if source.partitions is None:
                job = SparkJob(source.id, list(range(len(data.batches))), len(data.batches))
                self.jobs.append(job)
                for partition in data.other:
                    for edge in self.plan.edges_of_source(source.id):
                        self.ledger.unsteady.add(StreamId(edge.id, partition))
                self._fill(job)

    def _fill(self, job: SparkJob) -> None:
        while job.waiting and len(job.running) < TASKS_MAX:
            self._attempt(job, job.waiting.pop(0))
        if not job.waiting and not job.running and not job.over:
            job.over = True
            delay = self.world.random.random() * self.faults.edge_complete_delay_s
            self.world.after(delay, self._edges_complete, job)

    def _edges_complete(self, job: SparkJob) -> None:
        for edge in self.plan.edges_of_source(job.source):
            self._perform(self.controller.on_edge_complete(edge.id, list(range(job.partitions))))

    def _attempt(self, job: SparkJob, partition: int) -> None:
        if self.controller.phase == "ended" or partition in job.done:
            return
        data = self.dataflow.sources[job.source]
        version = min(job.attempts[partition], 1) if self.world.chance(0.8) else 0
        self.versions.setdefault((data.name, partition), set()).add(version)
        job.attempts[partition] += 1
        batches = data.read(partition, version)
        attempt = IngressProcess(self, job.source, partition, next(self._attempt_ids), batches)
        job.running.setdefault(partition, []).append(attempt)
        self.attempts.append(attempt)

    def _job_of(self, attempt: IngressProcess) -> SparkJob:
        return next(job for job in self.jobs if job.source == attempt.source)

    def attempt_finished(self, attempt: IngressProcess) -> None:
        job = self._job_of(attempt)
        for each in job.running.pop(attempt.index):
            each.die()
        job.done.add(attempt.index)
        self._fill(job)

    def attempt_failed(self, attempt: IngressProcess) -> None:
        attempt.die()
        job = self._job_of(attempt)
        alive = job.running[attempt.index]
        alive.remove(attempt)
        if not alive:
            self.world.after(self.world.random.random() * 0.1, self._attempt, job, attempt.index)

    # ---- faults

    def _strike_later(self, rate: float, strike: Callable[[], None]) -> None:
        self.world.after(self.world.random.expovariate(rate), self._strike, rate, strike)

    def _strike(self, rate: float, strike: Callable[[], None]) -> None:
        if self.world.now < self._calm_at:
            strike()
            self._strike_later(rate, strike)

    def _alive(self) -> list[IngressProcess]:
        return [attempt for job in self.jobs for some in job.running.values() for attempt in some if not attempt.dead]

    def _pause_one(self) -> None:
        process: Process = self.world.random.choice([*self.workers, *self._alive()])
        self.counts["pauses"] += 1
        process.pause(self.world.random.random() * self.faults.pause_s)

    def _crash_one(self) -> None:
        self.counts["workers that crashed"] += 1
        dead = self.world.random.choice(self.workers)
        dead.die()
        self.world.after(self.world.random.random(), self._restart, dead)

    def _restart(self, dead: WorkerProcess) -> None:
        self.workers[dead.index] = WorkerProcess(self, dead.index, dead.attempt + len(self.workers))

    def _kill_one(self) -> None:
        alive = self._alive()
        if alive:
            attempt = self.world.random.choice(alive)
            self.counts["ingress tasks that died"] += 1
            self.counts["ingress tasks that died midway"] += attempt.midway
            self.attempt_failed(attempt)

    def _speculate(self) -> None:
        alive = self._alive()
        if alive and self.controller.phase == "running":
            attempt = self.world.random.choice(alive)
            self.counts["speculative attempts"] += 1
            self._attempt(self._job_of(attempt), attempt.index)

    # ---- the end

    def _check_end(self) -> None:
        for worker in self.workers:
            if worker.core is not None:
                self.counts["duplicates refused"] += worker.core.counters.duplicate
                self.counts["stale messages refused"] += worker.core.counters.stale
                self.counts["gaps noticed"] += worker.core.counters.gap
                self._count_handshakes(worker.core.producers.values())
        for attempt in self.attempts:
            if attempt.core is not None:
                self._count_handshakes(attempt.core.producers.values())
        error = self.controller.error
        if error is not None:
            if isinstance(error, NonDeterministicInputError) and self.faults.nondeterministic:
                self.counts["runs ended by non-deterministic input"] += 1
                return
            if isinstance(error, QueryFailed) and self.faults.crash and "was lost" in str(error):
                self.counts["runs ended by the loss of a worker"] += 1
                return
            raise Violation("no run fails", f"{type(error).__name__}: {error}")
        self._check_drained()
        self._check_rows()

    def _count_handshakes(self, producers: Any) -> None:
        self.counts["handshakes repeated after silence"] += sum(producer.resent_handshakes for producer in producers)

    def _check_drained(self) -> None:
        if self.counts["workers that crashed"]:
            return  # all was over by then
        for worker in self.workers:
            core = worker.core
            if core is None:
                continue  # it hosts nothing and was still joining when all was over
            if core.held_bytes or core.log_meter.bytes or any(replica.queued for replica in core.replicas.values()):
                raise Violation(
                    "logs and queues drain",
                    f"worker {core.worker}: {core.log_meter.bytes} in logs, {core.held_bytes} held",
                )

    def _check_rows(self) -> None:
        unsure = [key for key, versions in self.versions.items() if len(versions) > 1 and self._differs(key)]
        for choice in itertools.product((0, 1), repeat=min(len(unsure), 8)):
            version = {key: max(versions) for key, versions in self.versions.items()} | dict(
                zip(unsure, choice, strict=False)
            )
            wrong = self._wrong(version)
            if wrong is None:
                return
        raise Violation("every row counted once at the sink", wrong or "")

    def _differs(self, key: tuple[str, int]) -> bool:
        return any(data.name == key[0] and key[1] in data.other for data in self.dataflow.sources)

    def _wrong(self, version: dict[tuple[str, int], int]) -> str | None:
        for sink in self.dataflow.sinks:
            expected = Counter(sink.model(version))
            if sink.kind is flows.Sink:
                got = self.ledger.arrived[sink.name]
                if got != expected:
                    missing, extra = list((expected - got).items())[:3], list((got - expected).items())[:3]
                    return f"{sink.name}: missing {missing}, too many {extra}"
                self.counts["rows at sinks"] += expected.total()
            else:
                totals: dict[int, tuple[int, int]] = {}
                for i, key, _ in expected.elements():
                    n, total = totals.get(key, (0, 0))
                    totals[key] = (n + 1, total + i)
                if self.ledger.totals[sink.name] != totals:
                    return f"{sink.name}: {self.ledger.totals[sink.name]} instead of {totals}"
        return None


def run(seed: int, faults: faults_.Faults | None = None) -> Result:
    """Never raises: whatever is wrong is in the result."""
    law: str | None = None
    detail = ""
    simulation = Simulation(seed, faults)
    try:
        simulation.run()
    except Violation as violation:
        law, detail = violation.law, violation.detail
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Violation) else None
        if cause is not None:  # raised inside an operator, which the exchange reports as user code
            law, detail = cause.law, cause.detail
        else:
            law, detail = "no unhandled exception", "".join(traceback.format_exception(error)[-3:]).strip()
    error = simulation.controller.error
    return Result(seed, law, detail, None if error is None else type(error).__name__, simulation.counts)
