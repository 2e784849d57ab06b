"""One seed, one run: build a cluster, let it run among faults, and see whether every law was kept.

A run puts together processes and the network, the shell of the controller (``server``), Spark (``spark``), faults (``strikes``)
and people (``operators``). The laws are in ``checkers``, ``table_laws``, ``run_end`` and in the files named there.
"""

from __future__ import annotations

import itertools
import math
import random
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from controller.decide.controller import Controller
from controller.replicas.additions import Moment
from controller.replicas.kinds import wanted
from flux.dataflow.plan import Plan, WorkerSourcePlan
from flux.dataflow.source_reader import PartitionReader
from flux.wire.control import Goodbye
from flux.wire.messages import Install
from flux.wire.parts import PartLimits
from flux.worker.core import WorkerCore
from flux.worker.source_scheduler import IDLE_SOURCE_MAX_S, IDLE_SOURCE_S
from partitioning.ids import PartitionKey
from tests.simulation import faults as faults_
from tests.simulation import flows, mixes, operators, timed_flows
from tests.simulation.alignment import AlignmentLaws
from tests.simulation.busy import Demand
from tests.simulation.checkers import Ledger
from tests.simulation.divergence import Divergences
from tests.simulation.event_time_laws import EventTimeLaws, StandStill
from tests.simulation.evidence import orders_of
from tests.simulation.faults import Faults
from tests.simulation.feed_laws import FeedLaws
from tests.simulation.fetches import Fetches
from tests.simulation.growing_laws import GrowingLaws
from tests.simulation.hearts import Hearts
from tests.simulation.losing_logs import LogFaults, Losses
from tests.simulation.mixes import ANY, Mix
from tests.simulation.moves import MoveWatch
from tests.simulation.network import Network
from tests.simulation.outcomes import Outcomes
from tests.simulation.outside import Outside
from tests.simulation.protects import Protects
from tests.simulation.reach_laws import ReachWatch
from tests.simulation.readers import Reader
from tests.simulation.rivals import Rivals
from tests.simulation.run_end import RunEnd
from tests.simulation.server import Server
from tests.simulation.spark import Spark
from tests.simulation.stalls import StallWatch
from tests.simulation.standing import Standing
from tests.simulation.strikes import Strikes
from tests.simulation.vault_process import Life, VaultProcess
from tests.simulation.violation import Violation
from tests.simulation.witness import witnesses
from tests.simulation.worker_process import WorkerProcess, draw_limits
from tests.simulation.world import World

#: A run without any progress for this time after the last fault is stuck. The longest wait for something lost is a few
#: seconds.
LIMIT_S = 30.0
#: A run with this number of events and no progress goes round in circles; ordinary runs have some thousands in all.
EVENTS_MAX = 400_000
#: Virtual time between two looks for progress.
LOOK_S = 1.0
#: Share of the runs with several workers on one executor, beside the runs in which replicas may share an executor.
SHARED_SHARE = 0.4


#: Seeds below this always run, and variants name them: their flows stay as they are.
SINKS_FROM = 1000
#: Below this are also seeds that broke a law once.
STANDBYS_FROM = 200_000_000
LIVES_FROM = 400_000_000
PROTECTS_FROM = 600_000_000
NUMBERED_FROM = 800_000_000
UPSTREAM_FROM = 1_000_000_000
READERS_FROM = 1_200_000_000
GATHERS_FROM = 3_600_000_000
LOSSES_FROM = 4_200_000_000
LOG_FAULTS_FROM = 6_000_000_000
EVENT_TIME_FROM = 40_000_000_000
#: From here on flows of event time also have alignment, and rows whose times are not believed; half of them have relations.
AHEAD_FROM = 60_000_000_000
#: From here on all flows of event time have relations, of all kinds.
WIDE_FROM = 70_000_000_000
#: From here on links between workers are cut for seconds, and streams go over to other replicas soon. Earlier seeds keep their
#: stories: workers wait there as if links never failed for long.
REACH_FROM = 90_000_000_000
#: From here on copies of stages are also read over several feeds.
FEEDS_FROM = 95_000_000_000
#: From here on stages come and go all the time.
GROWS_FROM = 100_000_000_000
#: From here on stages also come behind the running source of the first plan.
SOURCES_FROM = 110_000_000_000
#: From here on stages come and go in queries of all kinds.
WIDE_GROWS_FROM = 120_000_000_000
#: From here on sources come and go in such queries, too, and some readers and stages fail.
SOURCES_COME_FROM = 130_000_000_000
#: In this range flows have no relations, but aggregates whose replicas have no common order.
MARKS_FROM, MARKS_END = 85_000_000_000, 90_000_000_000
#: One of this number of seeds from ``LOSSES_FROM`` on has logs that lose records, if it has sources with positions.
LOSSES_OF = 2
#: Share of the seeds from ``LIVES_FROM`` on that have a directory, and the largest number of their lives.
LIVES_SHARE, LIVES_MAX = 0.15, 4


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    seed: int
    #: The broken law; None if every law was kept.
    law: str | None
    detail: str
    #: The kind of error with which the query ended; None if it went well.
    error: str | None
    counts: Counter[str]

    @property
    def ok(self) -> bool:
        return self.law is None

    def __str__(self) -> str:
        return f"make sim SEED={self.seed}" + ("" if self.ok else f"   # {self.law}: {self.detail}")


class Simulation:
    #: The laws of a plan that grows; None for a plan that does not.
    growing: GrowingLaws | None = None
    #: A source that has nothing yet is asked again after this time.
    idle_source_s = IDLE_SOURCE_S
    #: By id: the data of sources that have come to the plan in an earlier life.
    came: Mapping[int, flows.SourceData] = MappingProxyType({})

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        copies: int = 0,
        slots: int = 0,
        dataflow: Callable[[Ledger], flows.Dataflow] | None = None,
        habits: operators.Habits | None = None,
        demand: Demand | None = None,
        bounded: bool = False,
        collected: bool = False,
        standbys: float | None = None,
        life: Life | None = None,
        numbered: float = 0.0,
        upstream: bool = False,
        losing: bool = False,
        log_faults: LogFaults | None = None,
        event_time: bool = False,
        ahead: bool = False,
        related: bool = False,
        wide: bool = False,
        looks_up: bool = False,
        reach: bool = False,
        marks: bool = False,
        unreached_s: float = 0.0,
        feeds: bool = False,
    ) -> None:
        """Build the cluster of a run. ``faults``, ``copies`` (replicas of every partition), ``slots``, ``dataflow`` and
        ``habits`` (of operators) are drawn unless given; if faults are given, habits are quiet unless given, too.

        ``demand``: the load that workers report; None: they report none. ``bounded``: replicas may not be far apart; drawn
        if faults and flow are. ``collected``: the output is fetched, also if that is not drawn. ``standbys``: the share of
        stages with standbys in place of secondaries; drawn if None. ``numbered``: the share of sources with positions of
        their own. ``losing``: these are logs that lose records, with ``log_faults`` also needed ones. ``event_time``: rows
        have event time, as some ranges of seeds always do. ``ahead``: some sources are aligned, or do not believe each time.
        ``related``: rows are joined, ranked, or given once; ``wide``: such relations are of all kinds; ``looks_up``: in place
        of them, rows look up a table that is read anew. ``marks``: some aggregates have replicas without a common order.
        ``reach``: a stream whose rows do not come goes over to another replica soon, and a primary counts as unreached after
        ``unreached_s``, unless 0. ``feeds``: replicas of stages are read over several feeds, as some ranges of seeds always
        do."""
        self.seed = seed
        self.gathers = faults is None and seed >= GATHERS_FROM
        # Sources stand still for seconds where rows have times, and each question costs a turn. The mixes keep their stories.
        timed = faults is None and seed >= EVENT_TIME_FROM
        self.idle_source_max_s = max(IDLE_SOURCE_MAX_S, self.idle_source_s) if timed else self.idle_source_s
        self.demand = demand
        self.life = life
        self.world = World(seed) if life is None else life.world(seed)
        rng = random.Random(f"flow {seed}")
        replicated = rng.random() < 0.75 or copies > 1
        unforeseen = random.Random(f"more faults {seed}")
        if faults is None:  # else nothing is drawn: the later draws stay as they were
            faults_so_far = faults_.more(unforeseen, mixes.draw(rng, replicated), replicated)
            latest = faults_.latest(random.Random(f"latest faults {seed}"), faults_so_far, replicated)
            self.faults = faults_.with_spoilt_tables(random.Random(f"spoilt tables {seed}"), latest)
            if seed >= PROTECTS_FROM:
                self.faults = faults_.with_protects(random.Random(f"how often {seed}"), self.faults)
            if seed >= REACH_FROM:
                self.faults = faults_.with_pair_cuts(random.Random(f"pair cuts {seed}"), self.faults)
        else:
            self.faults = faults
        self.ledger = Ledger()
        self.counts = self.ledger.counts
        slots = slots or (rng.randint(2, 5) if replicated else rng.randint(1, 3))
        copies_max = min(slots, 3) if replicated else 1
        self.dataflow = (
            dataflow(self.ledger)
            if dataflow is not None
            else timed_flows.draw(
                rng,
                self.ledger,
                copies_max,
                copies,
                lambda: self.world.now,
                random.Random(f"ahead {seed}") if ahead or (faults is None and seed >= AHEAD_FROM) else None,
                random.Random(f"related {seed}") if related or _has_relations(faults, seed) else None,
                wide or (faults is None and seed >= WIDE_FROM and not _has_marks(faults, seed)),
                looks_up,
                random.Random(f"marks {seed}") if marks or _has_marks(faults, seed) else None,
            )
            if event_time or timed
            else flows.draw(
                rng,
                self.ledger,
                self.faults.nondeterministic,
                copies_max,
                copies,
                random.Random(f"timers {seed}"),
                random.Random(f"collects {seed}") if faults is None or collected else None,
                collected,
                random.Random(f"sinks {seed}") if faults is None and seed >= SINKS_FROM else None,
                random.Random(f"telling {seed}"),
                random.Random(f"numbered {seed}"),
                flows.NUMBERED_SHARE if faults is None and seed >= NUMBERED_FROM else numbered,
                random.Random(f"upstream {seed}") if upstream or (faults is None and seed >= UPSTREAM_FROM) else None,
                flows.READ_SHARE if faults is None and seed >= READERS_FROM else 0.0,
                losing or (faults is None and seed >= LOSSES_FROM and seed % LOSSES_OF == 0),
                log_faults if log_faults is not None or faults is not None else draw_log_faults(seed),
            )
        )
        if life is not None:  # rows lost together with all replicas are compared with nothing
            for source in self.dataflow.sources:
                source.other.clear()
        if dataflow is None:
            share = 1.0 if bounded else 0.0 if faults is not None else flows.BOUNDED_SHARE
            self.dataflow = flows.bounded(self.dataflow, random.Random(f"bounds {seed}"), share)
        if standbys is None and faults is None and seed >= STANDBYS_FROM:
            standbys = random.Random(f"standbys {seed}").choice([0.0, 0.0, 0.5, 1.0])
        if standbys or self.faults.protects_per_s:
            self.dataflow = flows.with_standbys(self.dataflow, random.Random(f"kinds {seed}"), standbys or 0.0)
        if timed:
            self.dataflow = timed_flows.with_checkpoints(self.dataflow)
        if any(source.logs is not None for source in self.dataflow.sources):
            # Checkpoints come often, so that logs may lose records that are in all checkpoints.
            soon = replace(self.dataflow.plan.settings, checkpoint_interval=0.02)
            self.dataflow = replace(self.dataflow, plan=replace(self.dataflow.plan, settings=soon))
        if life is not None:
            slots = life.go_on(self, slots)
        self.plan = self.ledger.plan = _with_step_timeout(self.dataflow.plan, self.faults.step_timeout_s)
        if not (reach or (faults is None and seed >= REACH_FROM)):
            settings = replace(self.plan.settings, link_timeout=math.inf, link_unreached=math.inf)
            self.plan = self.ledger.plan = replace(self.plan, settings=settings)
        elif unreached_s:
            settings = replace(self.plan.settings, link_unreached=unreached_s)
            self.plan = self.ledger.plan = replace(self.plan, settings=settings)
        if feeds or (faults is None and seed >= FEEDS_FROM):
            self.plan = self.ledger.plan = flows.with_feeds(self.plan, random.Random(f"feeds {seed}"))
        self.ledger.feeds = FeedLaws(self)
        #: By id: the data of all sources.
        self.source_data = {
            source.id: data
            for source, data in zip(
                (source for source in self.plan.sources if not source.since), self.dataflow.sources, strict=True
            )
        } | dict(self.came)
        #: The plan that travels with the tasks of processes, which ask for later versions.
        self.first_plan = self.plan
        if self.dataflow.event_time is not None:
            self.ledger.event_time = self.ledger.event_time or EventTimeLaws(self.dataflow.event_time)
            self.ledger.event_time.begin(self.ledger)
        self.stand_still = StandStill(self)
        self.copies = (
            draw_limits(random.Random(f"copies {seed}"), self.faults, self.plan)
            if dataflow is None
            else PartLimits(inline_bytes=0)
        )
        if life is not None:
            self.copies = life.limits(self.copies, self.plan)
        self.network = Network(self.world, self.faults, self.counts)
        self.controller = self.ledger.controller = Controller(self.plan, slots, self.world.now)
        self.ledger.alive = self.core_of
        self.server = Server(self)
        self.spark = Spark(self)
        self.end = RunEnd(self)
        self.moves = MoveWatch(self)
        self.divergences = Divergences(self)
        self.hearts = Hearts(self)
        self.rivals = Rivals(self)
        self.standing = Standing(self)
        self.protects = Protects(self)
        self.alignment = AlignmentLaws(self)
        self.outcomes = Outcomes(self)
        self.fetches = Fetches(self)
        self.outside = Outside(self) if life is None else life.outside_of(self)
        self.reader = Reader(self)
        self.strikes = Strikes(self)
        self.losses = Losses(self)
        self.listening: dict[str, WorkerProcess] = {}  # endpoint -> the process that is or was there
        self.by_node: dict[int, WorkerProcess] = {}
        copies = max(stage.replicas for stage in self.plan.stages)
        apart = max(len(wanted(stage)) for stage in self.plan.stages)
        drawn_shared = dataflow is None and random.Random(f"executors {seed}").random() < SHARED_SHARE
        shared = self.plan.settings.same_executor or drawn_shared
        self.executors = {
            slot: f"executor {rng.randrange(slots) if shared and slot >= apart else slot}" for slot in range(slots)
        }
        self.workers = [WorkerProcess(self, slot, slot, self.executors[slot]) for slot in range(slots)]
        self.vault = None if life is None else VaultProcess(self, life.place)
        if self.faults.slowness > 1:
            self.workers[0].slowness = self.faults.slowness
        self.counts[f"runs with replicas={copies}"] += 1
        self.counts[f"runs with {len(self.plan.stages)} stages"] += 1
        self.worker_attempts = itertools.count(slots)
        self.returning = 0
        self.sources_may_end = not self.faults.patient
        read = (
            (source, partition) for source, data in self.source_data.items() for partition in range(len(data.batches))
        )
        self._last_to_end = next(read, None)
        self._progress: tuple[int, ...] = ()
        self._progress_copied = 0
        self._progress_at = self.strikes.calm_at
        self._progress_events = 0
        #: By partition: the most bytes of a state that a copy has brought since there was other progress.
        self._copied: dict[PartitionKey, int] = {}
        self._look_at = self.world.now
        self.server.start()
        self.strikes.start()
        drawn = operators.draw(random.Random(f"habits {seed}"), replicated) if faults is None else operators.QUIET
        self.operators = operators.Operators(self, habits or drawn)
        self.stalls = StallWatch(self)
        self.reach = ReachWatch(self)

    # ---- the course of a run

    @property
    def stage_names(self) -> dict[int, str]:
        """Return the names of all stages by id, removed ones included."""
        return {stage.id: stage.name for stage in self.plan.stages}

    def follow(self) -> None:
        """Note that the controller may follow another version of the plan."""

    def run(self) -> None:
        """Run to the end. Raise Violation if a law is broken."""
        if self.dataflow.collected:
            self.run_until(lambda: self.controller.phase in ("finished", "ended"))
            self.fetches.all()
            self.server.perform(self.controller.driver.on_stop())
        self.run_until(lambda: self.controller.phase == "ended" and self.at_rest())
        self.end.check()

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Take events until the condition is true. Raise Violation if a law is broken."""
        world, network, calm_at = self.world, self.network, self.strikes.calm_at
        while not reached() and world.step():
            network.calm = world.now >= calm_at
            if world.now >= self._look_at:
                self._look_at = world.now + LOOK_S
                self._look_for_progress()

    def copied(self, part: Install) -> None:
        """Note a part of a state that has come to a new replica.

        A part further on than all parts of the partition is progress: a large state in tiny parts takes longer than LIMIT_S. A
        copy that begins again and again is none.
        """
        key = PartitionKey(part.stage, part.partition)
        self._copied[key] = max(self._copied.get(key, 0), part.offset)

    def _look_for_progress(self) -> None:
        """Raise Violation if there is no progress.

        A flow that multiplies its rows may take minutes with tiny logs: such a flow is slow, and not stuck.
        """
        repairs = self.controller.repairs
        rows = sum(replica.rows_in for core in self.hosts() for replica in core.replicas.values() if replica.leads)
        moves = self.counts["moves done"]
        progress = (rows, repairs.done, len(self.controller.unfinished), moves, self.fetches.answers)
        copied = sum(self._copied.values())
        if progress != self._progress:
            self._copied.clear()
            copied = 0
        if (progress, copied) != (self._progress, self._progress_copied):
            self._progress, self._progress_copied, self._progress_events = progress, copied, self.world.events
            self._progress_at = max(self.strikes.calm_at, self.world.now)
        elif self.world.now > self._progress_at + LIMIT_S or self.world.events > self._progress_events + EVENTS_MAX:
            raise Violation("every run comes to its end", self.how_it_stands())

    @property
    def settled(self) -> bool:
        """Whether the controller's picture is right and nothing is half done."""
        return self._current and not self.controller.repairs.under_way

    @property
    def _current(self) -> bool:
        """Whether all workers of the table are there and follow this table."""
        table = self.controller.table
        assert table is not None
        cores = [self.core_of(worker) for worker in table.endpoints]
        cores += [process.core for process in self.by_node.values() if process.role == "vault" and not process.dead]
        return all(core is not None and core.epoch == table.epoch for core in cores)

    @property
    def some_are_gone(self) -> bool:
        """Whether a partition has no replica any more. Once all its output is there, that is no loss."""
        table = self.controller.table
        return table is not None and any(not replicas for stage in table.stages for replicas in stage)

    def at_rest(self) -> bool:
        if self.controller.error is not None or not self.settled or self.some_are_gone:
            return True
        cores = self.hosts()
        producers = [producer for core in cores for producer in core.producers.values()]
        again = self.life is not None and self.life.number  # a query that had finished does not read its sources again
        return all(producer.drained or (again and not producer.log) for producer in producers) and not any(
            core._effects or any(len(order.since(0)) for order in orders_of(core)) for core in cores
        )

    def hosts(self) -> list[WorkerCore]:
        table = self.controller.table
        cores = [self.core_of(worker) for worker in (table.endpoints if table is not None else ())]
        return [core for core in cores if core is not None]

    def how_it_stands(self) -> str:
        waiting = [
            f"worker {worker.node} epoch {worker.core.epoch}: "
            f"{sum(len(r.waits) for r in worker.core.replicas.values())} slices queued, unfinished "
            f"{[(k, 'primary' if r.primary else 'secondary', r.applied, r.order.committed, r.order.end) for k, r in worker.core.replicas.items() if not r.finished]}, "
            f"awaited {list(worker.core.awaited)}, undrained {[str(s) for s, p in worker.core.producers.items() if not p.drained]}"
            for worker in self.workers
            if worker.core is not None and not worker.dead
        ]
        jobs = [
            f"source {job.source}: {sorted(job.running)} run, {job.waiting} wait"
            for job in self.spark.jobs
            if not job.over
        ]
        additions = [str(addition) for addition in self.controller.repairs.under_way.values()]
        table = self.controller.table
        return (
            f"{self.world.events} events at {self.world.now - 1000:.1f} s, phase {self.controller.phase}, "
            f"epoch {table.epoch if table else None}, may end: {self.sources_may_end}; {'; '.join(waiting + jobs + additions)}"
        )

    def leader_of(self, stage: int, partition: int) -> int | None:
        """Return the worker of the primary in the view of the controller."""
        table = self.controller.table
        replicas = table.row(stage, partition) if table is not None else ()
        return replicas[0].worker if replicas else None

    def executor_for(self, slot: int) -> str:
        """Return the executor on which Spark starts the task of a further slot."""
        return f"executor of slot {slot}"

    def host_of(self, executor: str) -> str:
        """Return the host of an executor. All are on one host unless a story says otherwise."""
        return "host"

    def core_of(self, node: int) -> WorkerCore | None:
        process = self.by_node.get(node)
        return None if process is None or process.dead else process.core

    @property
    def all_in(self) -> bool:
        """Whether all workers that Spark starts again are members."""
        here = self.controller.members.workers
        return not self.returning and all(process.node in here for process in self.workers if not process.dead)

    def may_end(self, source: int, partition: int) -> bool:
        """Tell whether this partition of a source may come to its end: patient ones wait until everything is repaired."""
        if self.life is not None and self.life.had_ended(self, source, partition):
            return True
        if self.faults.patient_alone and (source, partition) != self._last_to_end:
            return True
        if not self.sources_may_end and self.network.calm and self.controller.phase == "running":
            controller = self.controller
            assert controller.table is not None
            nothing_due = (
                not controller.repairs.due(Moment(controller.table, controller.board.placement()))
                and self.moves.at_rest
                and not self.protects.pending
            )
            settled = self.settled or (self._current and self.moves.held_up)
            at_rest = self.all_in and settled and nothing_due and self.divergences.all_noticed()
            if at_rest and self.outcomes.all_over():
                self.end.check_replicated()
                self.sources_may_end = True
        return self.sources_may_end and self.stand_still.may_end(source, partition)

    def opened(self, about: WorkerSourcePlan, partition: int, reader: PartitionReader) -> PartitionReader:
        """Return the reader of a source that has been opened in a worker, perhaps changed."""
        return reader

    # ---- tasks of workers

    def crash(self, victim: WorkerProcess, seen: bool = True, back: bool = True) -> None:
        """Crash a worker. ``seen``: its connection is seen to close, else only its silence tells; ``back``: Spark starts its
        task again."""
        self.counts["workers that crashed"] += 1
        self.counts["workers that crashed during a repair"] += bool(self.controller.repairs.under_way)
        self.counts["workers that crashed during a take-over"] += any(
            core.epoch < self.server.taken_over for core in self.hosts()
        )
        self._note_crash(victim)
        victim.die()
        if victim.node >= 0 and seen:
            self.world.after(0.001 + self.world.random.random() * 0.02, self.server.closed, victim.node)
        if not self.rivals.takes_over(victim) and back:
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
            [r.worker for r in table.row(a.stage, a.partition)][:1] == [victim.node] for a in additions
        )

    def _return_later(self, gone: WorkerProcess, delay_s: float) -> None:
        self.returning += 1
        self.world.after(delay_s, self._return, gone)

    def _return(self, gone: WorkerProcess) -> None:
        self.returning -= 1
        slot = gone.index
        back = WorkerProcess(self, slot, next(self.worker_attempts), self.executors[slot])
        back.slowness = gone.slowness
        # Slots that wait for room begin late, or never: their numbers are no places in the list.
        self.workers[[worker.index for worker in self.workers].index(slot)] = back

    def fenced(self, process: WorkerProcess) -> None:
        """End the task of a worker that has found out that it was given up. The task ends well, and another slot is open."""
        self.counts["workers that were fenced"] += 1
        process.report(Goodbye(node=process.node))
        process.die()
        self.server.closed(process.node)
        self.rivals.ended_well(process)

    def welcomed(self, process: WorkerProcess) -> None:
        self.counts["workers that came in place of one that was given up"] += process.index in self.server.in_place

    def replaced(self, process: WorkerProcess) -> None:
        """Let the task of a worker fail, because another attempt of it has come and stays."""
        self.counts["workers whose task has another attempt"] += 1
        process.die()


def _has_relations(faults: Faults | None, seed: int) -> bool:
    return (
        faults is None and seed >= AHEAD_FROM and (seed % 2 == 0 or seed >= WIDE_FROM) and not _has_marks(faults, seed)
    )


def _has_marks(faults: Faults | None, seed: int) -> bool:
    return faults is None and MARKS_FROM <= seed < MARKS_END


def _with_step_timeout(plan: Plan, seconds: float) -> Plan:
    return replace(plan, settings=replace(plan.settings, step_timeout=seconds)) if seconds else plan


def lives_of(seed: int, mix: Mix) -> int:
    """Return the number of lives of the query of a seed; 0 if it has no directory to go on from."""
    if mix is ANY and seed >= WIDE_GROWS_FROM:
        from tests.simulation import growing_wide

        return growing_wide.lives_of(seed)
    if mix is not ANY or seed < LIVES_FROM or seed >= GROWS_FROM or _has_marks(None, seed):
        return mix.lives
    rng = random.Random(f"how many lives {seed}")
    return rng.randint(1, LIVES_MAX) if rng.random() < LIVES_SHARE else 0


def draw_log_faults(seed: int) -> LogFaults | None:
    """Draw the faults of the logs of a random run, if it has logs that lose records."""
    rng = random.Random(f"log faults {seed}")
    if seed < LOG_FAULTS_FROM or rng.random() < 0.5:
        return None
    return LogFaults(goes_on=rng.random() < 0.6, needed=rng.random() < 0.7, anew=rng.random() < 0.4)


def run(seed: int, mix: Mix = ANY) -> Result:
    lives = lives_of(seed, mix)
    if lives:
        from tests.simulation.lives import run_lives

        return run_lives(seed, mix, lives)
    with witnesses(mix.witnesses):
        return outcome(simulated(seed, mix))


def simulated(seed: int, mix: Mix, life: Life | None = None) -> Simulation:
    """Make the simulation of a seed under the faults of a mix. ``life``: the life of a query with a directory."""
    if mix.grows or (mix is ANY and seed >= GROWS_FROM):
        from tests.simulation.growing import GrowingSimulation
        from tests.simulation.growing_sources import SourcesComing
        from tests.simulation.growing_wide import WideGrowing

        if mix.comes or (mix is ANY and seed >= SOURCES_COME_FROM):
            return SourcesComing(seed, mix, life)
        if mix.all_kinds or (mix is ANY and seed >= WIDE_GROWS_FROM):
            return WideGrowing(seed, mix, life)
        return GrowingSimulation(seed, mix, life)
    return Simulation(
        seed, mix.faults, mix.copies, mix.slots, bounded=mix.bounded, collected=mix.collected,
        standbys=mix.standbys, life=life, numbered=mix.numbered, upstream=mix.upstream, habits=mix.habits,
        losing=mix.losing, log_faults=mix.log_faults, event_time=mix.event_time,
        ahead=mix.ahead,
        related=mix.related,
        wide=mix.wide,
        looks_up=mix.looks_up,
        reach=mix.reach,
        unreached_s=mix.unreached_s,
        marks=mix.marks,
        feeds=mix.feeds,
    )  # fmt: skip


def outcome(simulation: Simulation) -> Result:
    """Run a simulation and return its result. This never raises: each error is in the result."""
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
