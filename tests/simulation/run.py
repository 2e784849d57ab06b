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
from controller.sweep import under_replicated
from flux.codec import decode_report, encode
from flux.control import CopyState, EdgeComplete, Goodbye, NewTable
from flux.errors import NonDeterministicInputError, ProtocolError, QueryFailed
from flux.stage_worker import StageWorker
from flux.transfers import Limits
from flux.worker import IDLE_SOURCE_S
from partitioning.ids import StreamId
from tests.simulation import faults as faults_
from tests.simulation import flows, mixes, operators
from tests.simulation.busy import Demand
from tests.simulation.checkers import Ledger, Violation
from tests.simulation.faults import Faults
from tests.simulation.mixes import ANY, Mix
from tests.simulation.moves import MoveWatch
from tests.simulation.network import Identity, Network, garble
from tests.simulation.processes import IngressProcess, Process, WorkerProcess, draw_limits
from tests.simulation.stalls import StallWatch
from tests.simulation.world import World

#: A run without any progress for so long after the last fault is stuck. The longest wait for something lost is a few
#: seconds; a large state in tiny parts takes twenty.
LIMIT_S = 30.0
#: A run with so many events and no progress goes round in circles; ordinary ones have some thousands in all.
EVENTS_MAX = 400_000
#: How often the run is asked for its progress.
LOOK_S = 1.0
#: How often the controller looks at its clock.
TICK_S = 0.025
#: A worker that has been heard so recently will not be given up soon.
FRESH_S = 0.15
#: So many of the runs have several workers on one executor, beside those that allow copies to share one.
SHARED_SHARE = 0.4
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
    #: How often a source that has nothing yet is asked again.
    idle_source_s = IDLE_SOURCE_S

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        copies: int = 0,
        slots: int = 0,
        dataflow: Callable[[Ledger], flows.Dataflow] | None = None,
        habits: operators.Habits | None = None,
        demand: Demand | None = None,
        steady: bool = False,
    ) -> None:
        """``faults``, ``copies`` of every partition, ``slots``, ``dataflow``, ``habits`` of operators: drawn where they
        are not given; where faults are given, nobody asks for anything unless habits are. ``demand``: how busy
        workers say that they are; None: they do not say. ``steady``: streams must not stand still."""
        self.seed = seed
        self.demand = demand
        self.world = World(seed)
        rng = random.Random(f"flow {seed}")
        replicated = rng.random() < 0.75 or copies > 1
        unforeseen = random.Random(f"more faults {seed}")
        self.faults = faults or faults_.more(unforeseen, mixes.draw(rng, replicated), replicated)
        self.ledger = Ledger()
        self.counts = self.ledger.counts
        slots = slots or (rng.randint(2, 5) if replicated else rng.randint(1, 3))
        copies_max = min(slots, 3) if replicated else 1
        self.dataflow = (
            dataflow(self.ledger)
            if dataflow is not None
            else flows.draw(
                rng, self.ledger, self.faults.nondeterministic, copies_max, copies, random.Random(f"timers {seed}")
            )
        )
        self.plan = self.ledger.plan = self.dataflow.plan
        self.copies = draw_limits(random.Random(f"copies {seed}")) if dataflow is None else Limits(inline_bytes=0)
        self.network = Network(self.world, self.faults, self.counts)
        self.controller = self.ledger.controller = Controller(self.plan, slots, self.world.now)
        self.ledger.alive = self._core_of
        self.moves = MoveWatch(self)
        self.listening: dict[str, WorkerProcess] = {}  # endpoint -> who is or was there
        self.by_node: dict[int, WorkerProcess] = {}
        copies = max(stage.replicas for stage in self.plan.stages)
        drawn_shared = dataflow is None and random.Random(f"executors {seed}").random() < SHARED_SHARE
        shared = self.plan.settings.same_executor or drawn_shared
        self._executors = {
            slot: f"executor {rng.randrange(slots) if shared and slot >= copies else slot}" for slot in range(slots)
        }
        self.workers = [WorkerProcess(self, slot, slot, self._executors[slot]) for slot in range(slots)]
        if self.faults.slowness > 1:
            self.workers[0].slowness = self.faults.slowness
        self.counts[f"runs with replicas={copies}"] += 1
        self.counts[f"runs with {len(self.plan.stages)} stages"] += 1
        self.jobs: list[SparkJob] = []
        self.attempts: list[IngressProcess] = []
        self.versions: dict[tuple[str, int], set[int]] = {}
        self._attempt_ids = itertools.count()
        self._worker_attempts = itertools.count(slots)
        self._returning = 0
        self._in_place: set[int] = set()  # slots opened in place of workers that were given up
        self._may_end = not self.faults.patient
        sources = zip(self.plan.sources, self.dataflow.sources, strict=True)
        read = ((source.id, partition) for source, data in sources for partition in range(len(data.batches)))
        self._last_to_end = next(read, None)
        self._struck: set[str] = set()  # crashes at a certain moment that have been
        self._aborted: set[tuple[int, int]] = set()
        self._under_way: dict[tuple[int, int], Any] = {}
        self._controller_wakes = 0.0
        self._unread: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # by the controller, which stands still
        self._take_overs = 0
        self._taken_over = -1  # epoch of the last take-over
        self._calm_at = self.world.now + self.faults.calm_after_s
        self._progress: tuple[int, ...] = ()
        self._progress_at = self._calm_at
        self._progress_events = 0
        self._look_at = self.world.now
        self.world.after(TICK_S, self._tick)
        for rate, strike in [
            (self.faults.breaks_per_s, self.network.break_one),
            (self.faults.control_breaks_per_s, self.network.break_control),
            (self.faults.cuts_per_s, self.network.cut_one),
            (self.faults.control_cuts_per_s, self._cut_off),
            (self.faults.whims_per_s, self._whim),
            (self.faults.pauses_per_s, self._pause_one),
            (self.faults.deaths_per_s, self._kill_one),
            (self.faults.zombies_per_s, self._speculate),
            (self.faults.epochs_per_s, self._new_epoch),
            (self.faults.crashes_per_s, self._crash_one),
            (self.faults.controller_pauses_per_s, self._pause_controller),
            (self.faults.closings_per_s, self._close_for_nothing),
            (self.faults.clock_steps_per_s, self._set_a_clock),
            (self.faults.garbage_per_s, self._send_garbage),
        ]:
            if rate:
                self._strike_later(rate, strike)
        drawn = operators.draw(random.Random(f"habits {seed}"), replicated) if faults is None else operators.QUIET
        self.operators = operators.Operators(self, habits or drawn)
        self.stalls = StallWatch(self, steady)

    # ---- the course of a run

    def run(self) -> None:
        """To its end. Raises Violation."""
        self.run_until(lambda: self.controller.phase == "ended" and self._at_rest())
        self._check_end()

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Raises Violation."""
        while not reached() and self.world.step():
            self.network.calm = self.world.now >= self._calm_at
            if self.world.now >= self._look_at:
                self._look_at = self.world.now + LOOK_S
                self._look_for_progress()

    def _look_for_progress(self) -> None:
        """A flow that multiplies its rows may take minutes with tiny logs: that is slow, and not stuck."""
        repairs = self.controller.repairs
        rows = sum(replica.rows_in for core in self._hosts() for replica in core.replicas.values() if replica.primary)
        progress = (rows, repairs.done, len(self.controller._unfinished), self.counts["moves done"])
        if progress != self._progress:
            self._progress, self._progress_events = progress, self.world.events
            self._progress_at = max(self._calm_at, self.world.now)
        elif self.world.now > self._progress_at + LIMIT_S or self.world.events > self._progress_events + EVENTS_MAX:
            raise Violation("every run comes to its end", self._standing())

    @property
    def _settled(self) -> bool:
        """Whether the controller's picture is right and nothing is half done."""
        table = self.controller.table
        assert table is not None
        cores = [self._core_of(worker) for worker in table.endpoints]
        current = all(core is not None and core.epoch == table.epoch for core in cores)
        return current and not self.controller.repairs.under_way

    def _at_rest(self) -> bool:
        if self.controller.error is not None or not self._settled:
            return True
        cores = self._hosts()
        return all(producer.drained for core in cores for producer in core.producers.values()) and not any(
            core._effects or len(replica.order.since(0)) for core in cores for replica in core.replicas.values()
        )

    def _hosts(self) -> list[StageWorker]:
        table = self.controller.table
        cores = [self._core_of(worker) for worker in (table.endpoints if table is not None else ())]
        return [core for core in cores if core is not None]

    def _standing(self) -> str:
        waiting = [
            f"worker {worker.node} epoch {worker.core.epoch}: "
            f"{sum(r.queued for r in worker.core.replicas.values())} slices queued, unfinished "
            f"{[(k, 'primary' if r.primary else 'secondary', r.applied, r.order.committed, r.order.end) for k, r in worker.core.replicas.items() if not r.finished]}, "
            f"awaited {list(worker.core.awaited)}, undrained {[str(s) for s, p in worker.core.producers.items() if not p.drained]}"
            for worker in self.workers
            if worker.core is not None and not worker.dead
        ]
        jobs = [
            f"source {job.source}: {sorted(job.running)} run, {job.waiting} wait" for job in self.jobs if not job.over
        ]
        additions = [str(addition) for addition in self.controller.repairs.under_way.values()]
        table = self.controller.table
        return (
            f"{self.world.events} events at {self.world.now - 1000:.1f} s, phase {self.controller.phase}, "
            f"epoch {table.epoch if table else None}, may end: {self._may_end}; {'; '.join(waiting + jobs + additions)}"
        )

    def leader_of(self, stage: int, partition: int) -> int | None:
        """The worker of the primary, as the controller has it."""
        table = self.controller.table
        replicas = table.stages[stage][partition] if table is not None else ()
        return replicas[0].worker if replicas else None

    def host_of(self, executor: str) -> str:
        """All are on one unless a story says otherwise."""
        return "host"

    def _core_of(self, node: int) -> StageWorker | None:
        process = self.by_node.get(node)
        return None if process is None or process.dead else process.core

    @property
    def all_in(self) -> bool:
        """Whether all workers that Spark starts again are members."""
        here = self.controller.members.workers
        return not self._returning and all(process.node in here for process in self.workers if not process.dead)

    def may_end(self, source: int, partition: int) -> bool:
        """Whether this partition of a source may come to its end: patient ones wait until everything is repaired."""
        if self.faults.patient_alone and (source, partition) != self._last_to_end:
            return True
        if not self._may_end and self.network.calm and self.controller.phase == "running":
            controller = self.controller
            assert controller.table is not None
            nothing_due = controller.repairs.next(controller.table, controller.members) is None and self.moves.at_rest
            if self.all_in and self._settled and nothing_due:
                self._check_replicated()
                self._may_end = True
        return self._may_end

    def _check_replicated(self) -> None:
        """Back to as many copies as the stages ask for, as far as there are workers for them."""
        table, members = self.controller.table, self.controller.members.workers
        assert table is not None
        for stage, partition in under_replicated(self.plan, table):
            workers = {replica.worker for replica in table.stages[stage][partition]}
            executors = {members[worker].about.executor for worker in workers}
            for worker, member in members.items():
                apart = self.plan.settings.same_executor or member.about.executor not in executors
                if worker not in workers and apart and not member.leaving:
                    raise Violation("everything is repaired", f"{stage}/{partition}: worker {worker} could hold a copy")
            self.counts["partitions that cannot be repaired"] += 1
        self.counts["runs that were repaired before their end"] += 1
        if any(not replica.live for stage_ in table.stages for replicas in stage_ for replica in replicas):
            raise Violation("everything is repaired", "a replica is listed and not live")

    # ---- the controller

    def controller_hears(self, identity: Identity, frame: bytes) -> None:
        if self._controller_sleeps(self.controller_hears, identity, frame):
            return
        try:
            report = decode_report(frame)
        except ProtocolError:
            self.counts["reports that were none"] += 1
            return
        self._perform(self.controller.on_report(identity, report, self.world.now))

    def _controller_sleeps(self, event: Callable[..., None], *given: Any) -> bool:
        """What happens meanwhile waits until it goes on."""
        sleeps = self.world.now < self._controller_wakes
        if sleeps:
            self._unread.append((event, given))
        return sleeps

    def _pause_controller(self) -> None:
        seconds = self.world.random.random() * self.faults.controller_pause_s
        if self.world.now >= self._controller_wakes:
            self.counts["pauses of the controller"] += 1
            self._controller_wakes = self.world.now + seconds
            self.network.disturbed(self._controller_wakes)
            self.world.after(seconds, self._controller_goes_on)

    def _controller_goes_on(self) -> None:
        """It looks at its clock before it reads what has come, or after that."""
        unread, self._unread = self._unread, []
        if self.world.chance(0.5):
            self._perform(self.controller.on_tick(self.world.now))
        for event, given in unread:
            event(*given)

    def _tick(self) -> None:
        if self.world.now >= self._controller_wakes:
            self._perform(self.controller.on_tick(self.world.now))
            self._in_place.update(self.operators.start_missing())
        if self.controller.phase in ("starting", "running"):
            self.world.after(TICK_S, self._tick)

    def _closed(self, node: int) -> None:
        if self._controller_sleeps(self._closed, node):
            return
        self._perform(self.controller.on_closed(node, self.world.now))

    def strikes_twice(self) -> bool:
        return not self.network.calm and self.world.chance(self.faults.twice_probability)

    def _perform(self, effects: list[Tell]) -> None:
        self._note_repairs()
        self.ledger.check_controller()
        self.moves.look()
        for effect in effects:
            assert isinstance(effect.connection, tuple)
            late = 0.0
            if isinstance(effect.order, NewTable | EdgeComplete | CopyState) and not self.network.calm:
                if self.world.chance(self.faults.late_order_probability):
                    self.counts["orders that came late"] += 1
                    late = self.world.random.random() * self.faults.late_order_s
                    self.network.disturbed(self.world.now + late)
                if isinstance(effect.order, CopyState) and self.strikes_twice():
                    self.network.of(effect.connection).reply(effect.connection, encode(effect.order), late)
            self.network.of(effect.connection).reply(effect.connection, encode(effect.order), late)
        if self.controller.table is not None and not self.jobs:
            self._start_jobs()
        total = sum(stage.partitions for stage in self.plan.terminal)
        if self.controller.phase == "running" and len(self.controller._unfinished) < total:
            self._strike_once(self.faults.crash_at_the_end, "crashes when the first partition had finished")

    def first_step(self) -> None:
        """Somebody has applied something; nothing can be acked yet."""
        self._strike_once(self.faults.crash_at_the_start, "crashes before the first ack")

    def last_batch(self) -> None:
        """A source has come to its end."""
        self._strike_once(self.faults.crash_at_the_last_batch, "crashes at the last batch of a source")

    def _strike_once(self, wanted: bool, when: str) -> None:
        if wanted and when not in self._struck:
            self._struck.add(when)
            self.counts[when] += self._crash_one()

    def _note_repairs(self) -> None:
        repairs = self.controller.repairs
        now = {key: (a.worker, a.incarnation) for key, a in repairs.under_way.items()}
        if repairs.take_overs > self._take_overs:
            assert self.controller.table is not None
            self._take_overs, self._taken_over = repairs.take_overs, self.controller.table.epoch
            self.counts["repairs that overlapped a take-over"] += bool(self._under_way)
        gone = {key for key, which in self._under_way.items() if key not in now}
        table = self.controller.table
        for key in gone:
            listed = [] if table is None else [(r.worker, r.incarnation) for r in table.stages[key[0]][key[1]]]
            if self._under_way[key] not in listed:
                self._aborted.add(key)
                self.counts["additions that came to nothing"] += 1
        for key in now.keys() - self._under_way.keys():
            self.counts["additions begun"] += 1
            self.counts["additions begun again"] += key in self._aborted
        self._under_way = now

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
            self.network.disturbed(self.world.now + delay)
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

    def _strike_later(self, rate: float, strike: Callable[[], Any]) -> None:
        self.world.after(self.world.random.expovariate(rate), self._strike, rate, strike)

    def _strike(self, rate: float, strike: Callable[[], Any]) -> None:
        if self.world.now < self._calm_at:
            self.network.disturbed()
            strike()
            self._strike_later(rate, strike)

    def _alive(self) -> list[IngressProcess]:
        return [attempt for job in self.jobs for some in job.running.values() for attempt in some if not attempt.dead]

    def _pause_one(self) -> None:
        alive = [*(worker for worker in self.workers if not worker.dead), *self._alive()]
        if not alive:
            return
        process: Process = self.world.random.choice(alive)
        seconds = self.world.random.random() * self.faults.pause_s
        long = seconds > self.plan.settings.heartbeat_timeout / 2
        if long and isinstance(process, WorkerProcess) and not self._spares(process):
            return
        self.counts["pauses"] += 1
        process.pause(seconds)

    def _close_for_nothing(self) -> None:
        victim = self.world.random.choice(self.workers)
        if not victim.dead and victim.node >= 0 and self.controller.phase == "running" and self._spares(victim):
            self.counts["lifelines that closed for nothing"] += 1
            self._closed(victim.node)

    def _set_a_clock(self) -> None:
        alive = [*(worker for worker in self.workers if not worker.dead), *self._alive()]
        if alive:
            self.counts["clocks that were set"] += 1
            process: Process = self.world.random.choice(alive)
            process.wall_ahead = (2 * self.world.random.random() - 1) * self.faults.clock_step_s

    def _send_garbage(self) -> None:
        """Where a message would be understood, so that only its reader can refuse it."""
        worker = self.world.random.choice(self.workers)
        if not worker.dead:
            self.counts["garbage"] += 1
            frame = garble(encode(EdgeComplete(edge=0, producers=[0])), self.world.random)
            if self.world.chance(0.5):
                worker.control.send(frame)
            else:
                worker.control.reply(worker.control.identity, frame)

    def _cut_off(self) -> None:
        victim = self.world.random.choice(self.workers)
        if not victim.dead and self._spares(victim):
            self.counts["workers cut off from the controller"] += 1
            seconds = self.world.random.random() * self.faults.cut_s
            if self.world.chance(0.5):
                victim.control.cut(seconds)
            else:
                victim.control.cut_up(seconds)
                victim.control.cut_down(seconds)

    def _whim(self) -> None:
        cores = [core for core in map(self._core_of, self.by_node) if core is not None and core._inbound]
        if cores:
            core = self.world.random.choice(cores)
            before = core.counters.switched
            core._read_from_next(self.world.random.choice(list(core._inbound.values())))
            self.counts["changes of source on a whim"] += core.counters.switched - before

    def _spares(self, victim: WorkerProcess) -> bool:
        """Whether every partition has a safe copy elsewhere that is well."""
        if self.faults.reckless:
            return True
        table, members = self.controller.table, self.controller.members.workers
        if table is None:
            return True
        well = {
            node
            for node, member in members.items()
            if self._core_of(node) is not None
            and node != victim.node
            and self.by_node[node].paused_until <= self.world.now
            and self.world.now - member.heard < FRESH_S
        }
        return all(
            any(r.worker in well and self.controller.repairs.is_safe(stage, partition, r) for r in replicas)
            for stage, partitions in enumerate(table.stages)
            for partition, replicas in enumerate(partitions)
        )

    def _crash_one(self) -> bool:
        victim = self.world.random.choice(self.workers)
        if victim.dead or self.controller.phase == "ended" or not self._spares(victim):
            return False
        if self.world.now < self._calm_at and self.world.chance(self.faults.uneven_crash_probability):
            self.network.cut_some(list(victim.links.values()), 1.0)
            self.world.after(0.005 + self.world.random.random() * 0.05, self._die, victim)
        else:
            self._die(victim)
        return True

    def _die(self, victim: WorkerProcess) -> None:
        if not victim.dead and self.controller.phase != "ended" and self._spares(victim):
            never_back = self.controller.phase == "running" and self.world.chance(self.faults.never_back_probability)
            self.crash(victim, seen=not self.world.chance(self.faults.silent_crash_probability), back=not never_back)
            if self.world.now < self._calm_at and self.world.chance(self.faults.second_crash_probability):
                self.world.after(self.world.random.random() * 0.05, self._crash_one)

    def crash(self, victim: WorkerProcess, seen: bool = True, back: bool = True) -> None:
        """``seen``: its connection is seen to close, else only its silence tells; ``back``: Spark starts its task again."""
        self.counts["workers that crashed"] += 1
        self.counts["workers that crashed during a repair"] += bool(self.controller.repairs.under_way)
        self.counts["workers that crashed during a take-over"] += any(
            core.epoch < self._taken_over for core in self._hosts()
        )
        self._note_crash(victim)
        victim.die()
        if victim.node >= 0 and seen:
            self.world.after(0.001 + self.world.random.random() * 0.02, self._closed, victim.node)
        if back:
            self._return_later(victim, self.world.random.random() * 0.5)

    def _note_crash(self, victim: WorkerProcess) -> None:
        if victim.core is None:
            return
        replicas = victim.core.replicas.values()
        leading = [r for r in replicas if r.primary and r.order.peers]
        self.counts["primaries that died with uncommitted steps"] += any(
            r.order.committed < r.order.end for r in leading
        )
        additions = self.controller.repairs.under_way.values()
        self.counts["new replicas that died while they were added"] += any(a.worker == victim.node for a in additions)
        table = self.controller.table
        self.counts["primaries that died while they were copied"] += table is not None and any(
            table.stages[a.stage][a.partition][0].worker == victim.node for a in additions
        )

    def _return_later(self, gone: WorkerProcess, delay_s: float) -> None:
        self._returning += 1
        self.world.after(delay_s, self._return, gone)

    def _return(self, gone: WorkerProcess) -> None:
        self._returning -= 1
        slot = gone.index
        back = WorkerProcess(self, slot, next(self._worker_attempts), self._executors[slot])
        back.slowness = gone.slowness
        # Slots that wait for room begin late, or never: their numbers are no places in the list.
        self.workers[[worker.index for worker in self.workers].index(slot)] = back

    def fenced(self, process: WorkerProcess) -> None:
        """A worker has found out that it was given up: its task ends well, and another slot is open for it."""
        self.counts["workers that were fenced"] += 1
        process.report(Goodbye(node=process.node))
        process.die()
        self._closed(process.node)

    def welcomed(self, process: WorkerProcess) -> None:
        self.counts["workers that came in place of one that was given up"] += process.index in self._in_place

    def replaced(self, process: WorkerProcess) -> None:
        """Another attempt of its task has come: its own fails, and Spark has the other."""
        self.counts["workers whose task has another attempt"] += 1
        process.die()

    def _kill_one(self) -> None:
        alive = self._alive()
        if alive:
            attempt = self.world.random.choice(alive)
            self.counts["ingress tasks that died"] += 1
            self.counts["ingress tasks that died midway"] += attempt.midway
            self.counts["ingress tasks that died during a repair"] += bool(self.controller.repairs.under_way)
            self.attempt_failed(attempt)

    def _speculate(self) -> None:
        alive = self._alive()
        if alive and self.controller.phase == "running":
            attempt = self.world.random.choice(alive)
            self.counts["speculative attempts"] += 1
            self._attempt(self._job_of(attempt), attempt.index)

    # ---- the end

    def _check_end(self) -> None:
        for worker in self.by_node.values():
            if worker.core is not None:
                counters = worker.core.counters
                self.counts["duplicates refused"] += counters.duplicate
                self.counts["stale messages refused"] += counters.stale
                self.counts["gaps noticed"] += counters.gap
                self.counts["subscriptions that switched their source"] += counters.switched
                self._count_handshakes(worker.core.producers.values())
        for attempt in self.attempts:
            if attempt.core is not None:
                self._count_handshakes(attempt.core.producers.values())
        self.counts["order entries cut by a new primary"] += self.ledger.entries_cut
        self.counts["take-overs"] += self.controller.repairs.take_overs
        self.counts["repairs"] += self.controller.repairs.done
        error = self.controller.error
        if error is not None:
            if isinstance(error, NonDeterministicInputError) and self.faults.nondeterministic:
                self.counts["runs ended by non-deterministic input"] += 1
                return
            if isinstance(error, QueryFailed) and "the only safe copy of" in str(error):
                reckless = self.faults.reckless
                self.counts["runs ended by a loss" + (" that was meant" if reckless else "")] += 1
                self._check_rows(partly=True)
                return
            raise Violation("no run fails", f"{type(error).__name__}: {error}")
        if self._settled:
            self._check_drained()
        self._check_rows()

    def _count_handshakes(self, producers: Any) -> None:
        self.counts["handshakes repeated after silence"] += sum(producer.resent_handshakes for producer in producers)

    def _check_drained(self) -> None:
        self.counts["runs that came to rest"] += 1
        for core in self._hosts():
            queued = sum(replica.queued for replica in core.replicas.values())
            ordered = sum(len(replica.order.since(0)) for replica in core.replicas.values())
            if core.held_bytes or core.log_meter.bytes or queued or ordered:
                raise Violation(
                    "logs and queues drain",
                    f"worker {core.worker}: {core.log_meter.bytes} bytes in logs, {core.held_bytes} held, {queued} "
                    f"slices queued, {ordered} steps in order logs",
                )

    def _check_rows(self, partly: bool = False) -> None:
        """``partly``: the query has ended early: nothing is there twice, and nothing that nobody sent."""
        unsure = [key for key, versions in self.versions.items() if len(versions) > 1 and self._differs(key)]
        for choice in itertools.product((0, 1), repeat=min(len(unsure), 8)):
            version = {key: max(versions) for key, versions in self.versions.items()} | dict(
                zip(unsure, choice, strict=False)
            )
            wrong = self._wrong(version, partly)
            if wrong is None:
                return
        if partly:
            raise Violation("no row twice or made up, also where a query is lost", wrong or "")
        raise Violation("every row counted once at the sink", wrong or "")

    def _differs(self, key: tuple[str, int]) -> bool:
        return any(data.name == key[0] and key[1] in data.other for data in self.dataflow.sources)

    def _states(self, name: str) -> list[dict[str, Any]]:
        """State of each partition of a sink, which all replicas that have ever finished must agree on."""
        stage = next(stage for stage in self.plan.stages if stage.name == name)
        states = []
        for partition in range(stage.partitions):
            # Also those that were dropped since: the query may end when the source of a move has finished and been
            # dropped, and the target is about to.
            found = self.ledger.replicas_of(stage.id, partition)
            finished: list[Any] = [replica for replica in found if replica.through]
            if not finished:
                raise Violation("every row counted once at the sink", f"nobody has finished {name}/{partition}")
            self.counts["replicas compared at the end"] += len(finished) - 1
            for other in finished[1:]:
                if other.operator.state != finished[0].operator.state:
                    raise Violation("replicas agree", f"{name}/{partition}")
            states.append(finished[0].operator.state)
        return states

    def _states_so_far(self, name: str) -> list[dict[str, Any]]:
        """Of each partition of a sink, the state of the replica that has come farthest, dead ones too."""
        stage = next(stage for stage in self.plan.stages if stage.name == name)
        of_each = [self.ledger.replicas_of(stage.id, partition) for partition in range(stage.partitions)]
        farthest: list[Any] = [max(found, key=lambda replica: replica.applied) for found in of_each if found]
        return [replica.operator.state for replica in farthest]

    def _wrong(self, version: dict[tuple[str, int], int], partly: bool = False) -> str | None:
        for sink in self.dataflow.sinks:
            expected = Counter(sink.model(version))
            states = self._states_so_far(sink.name) if partly else self._states(sink.name)
            if sink.kind is flows.Sink:
                got = Counter(row for state in states for row in state["rows"])
                if got - expected or (got != expected and not partly):
                    missing, extra = list((expected - got).items())[:3], list((got - expected).items())[:3]
                    return f"{sink.name}: missing {missing}, too many {extra}"
                self.counts["rows at sinks of runs that were lost" if partly else "rows at sinks"] += got.total()
            else:
                totals: dict[int, tuple[int, int]] = {}
                for i, key, _ in expected.elements():
                    n, total = totals.get(key, (0, 0))
                    totals[key] = (n + 1, total + i)
                found = {key: value for state in states for key, value in state["totals"].items()}
                early = partly and all(n <= totals.get(key, (0, 0))[0] for key, (n, _) in found.items())
                if found != totals and not early:
                    return f"{sink.name}: {found} instead of {totals}"
        return None


def run(seed: int, mix: Mix = ANY) -> Result:
    return outcome(Simulation(seed, mix.faults, mix.copies, mix.slots, steady=mix.steady))


def outcome(simulation: Simulation) -> Result:
    """Never raises: whatever is wrong is in the result."""
    law: str | None = None
    detail = ""
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
    return Result(simulation.seed, law, detail, None if error is None else type(error).__name__, simulation.counts)
