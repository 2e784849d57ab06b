"""Runs in which stages come and go all the time, under all other faults: stages behind running ones and behind each other, and
their removal, asked for through the door of people (design: plan-version, edge-begins, edge-closes).

The laws are in ``growing_laws``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

import flux
from controller.course.plan_phases import PlanPhase
from controller.decide.plan_changes import PlanRequest, VersionToKeep
from controller.planning.compiler import compile_plan
from flux.dataflow.flow import Flow
from flux.dataflow.plan import ById, EdgePlan, FromStage, Plan, StagePlan
from flux.dataflow.plan_change import PlanChange, encode_change
from flux.dataflow.source import DataFrameSource
from flux.errors import UsageError
from flux.settings import Settings
from partitioning.ids import ACTIVE, STANDBY
from tests.simulation import faults as faults_
from tests.simulation import flows, mixes, operators
from tests.simulation.checkers import Ledger
from tests.simulation.growing_laws import GrowingLaws
from tests.simulation.run import Simulation
from tests.simulation.stage_kinds import ELSEWHERE, ROW, Double, Filter, Shatter, Sink, Watched
from tests.simulation.vault_process import Life

#: Seconds between two batches of a source's partition, and between two looks for something to change.
BATCH_S, LOOK_S = 0.008, 0.03
#: One run in this number has standbys in place of some secondaries.
STANDBYS_OF = 3
#: Changes in a run, at most; and seconds after which no more are asked for.
CHANGES_MAX, CHANGES_S = 12, 4.0
#: Longest time until a version is in the directory, and until the controller hears of that.
KEEPS_S = 0.02
#: The classes of new stages, by a name that travels in place of the class: operators of the simulation hold its ledger.
_made: dict[str, type[flux.Operator]] = {}


class Grown(Watched):
    """Keeps what arrives, by the partition that it comes from: the numbers that the origin gave its rows."""

    schema: Any = None

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["got"] = {}

    def process(self, batch: pa.RecordBatch) -> Any:
        got = self.state["got"]
        for hop, tick in zip(batch.column("hop").to_pylist(), batch.column("tick").to_pylist(), strict=True):
            got.setdefault(hop % ELSEWHERE, []).append(tick)
        return super().process(batch)

    def through(self, rows: list[Any]) -> Any:
        return None


class GrownPass(Grown):
    """Keeps what arrives, and gives it to others."""

    schema = ROW

    def through(self, rows: list[Any]) -> Any:
        return [self.stamped(rows)]


def made(name: str) -> flux.Operator:
    return _made[name]()


def _make(name: str, kind: type[Watched], seed: int, ledger: Ledger) -> None:
    _made[f"{name} of {seed}"] = type(name, (kind,), {"ledger": ledger, "stage_name": name, "transient": ("ledger",)})


def _goes_on(flow: GrowingFlow, life: Life, seed: int, ledger: Ledger) -> flows.Dataflow:
    """Make the dataflow of a life: the version in its directory, with the operators of a program that is started again."""
    made, kept = flow(ledger), life.place.plan
    if kept is None or life.earlier is None:
        return made
    first = made.plan
    for stage in kept.stages:
        if stage.since:
            _make(stage.name, GrownPass if stage.output_schema is not None else Grown, seed, ledger)
            ledger.keys[stage.name] = life.earlier.ledger.keys[stage.name]
    stages = ById(
        stage if stage.since else replace(stage, make=first.stages[stage.id].make, sink=first.stages[stage.id].sink)
        for stage in kept.stages
    )
    # Readers belong to the program.
    sources = ById(first.sources[source.id] for source in kept.sources)
    plan = replace(
        first, stages=stages, sources=sources, edges=kept.edges, version=kept.version, used=kept.used,
        first_streams=kept.first_streams,
    )  # fmt: skip
    return replace(made, plan=plan)


class GrowingFlow:
    """The dataflow of the beginning: a source in workers or in Spark, one or two stages, and a sink."""

    def __init__(self, seed: int, standbys: float) -> None:
        """Draw it for a seed, with standbys in place of secondaries in this share of the stages."""
        self.rng, self.kinds, self.standbys = (
            random.Random(f"growing flow {seed}"), random.Random(f"growing kinds {seed}"), standbys,
        )  # fmt: skip
        #: The clock of the run, once there is one.
        self.clock: Callable[[], float] = lambda: 0.0

    def __call__(self, ledger: Ledger) -> flows.Dataflow:
        rng = self.rng
        copies = rng.choice([1, 2, 2, 3])
        builder = flows._Builder(rng, ledger, False, copies, copies)
        builder._spread = 50
        in_spark = rng.random() < 0.3
        partitions, batches = rng.randint(1, 2), rng.choice([150, 400])
        data = flows.SourceData(
            "source", [[builder._rows(rng.choice([1, 3])) for _ in range(batches)] for _ in range(partitions)]
        )
        source: Any = (
            DataFrameSource("source", ROW)
            if in_spark
            else flux.source(partial(self._read, builder, data), ROW, partitions, "source")
        )
        node = flows.Node(source, "source", data=data)
        builder.nodes.append(node)
        for kind in rng.choice([[Watched], [Filter], [Double], [Shatter], [Watched, Filter]]):
            node = builder._stage(kind, [node], rng.choice([("key",), ("id",)]))
            builder.nodes.append(node)
        sink = builder._stage(Sink, [node], ("key",))
        log = rng.choice([2000, 20_000, 1 << 20])
        chosen = replace(
            Settings.of(),
            log_max_bytes=log,
            credit_max_bytes=rng.choice([2000, 1 << 20]),
            step_max_rows=rng.choice([1, 8, 4096]),
            ack_interval=rng.choice([0.0, 0.005]),
            resend_timeout=rng.choice([0.03, 0.1]),
            heartbeat_interval=0.05,
            heartbeat_timeout=0.25,
            heartbeat_last_timeout=3.0,
            repairs_at_once=rng.choice([1, 2, 8]),
            same_executor=rng.random() < 0.15,
            progress_interval=0.2,
        )
        assert isinstance(sink.given, Flow)
        plan = compile_plan([sink.given], chosen, lambda given: given, "q", flows.SECRET)
        made = flows.Dataflow(plan, [data], [sink], 64 << 10, False)
        return flows.with_standbys(made, self.kinds, self.standbys) if self.standbys else made

    def _read(
        self, builder: Any, data: flows.SourceData, partition: int, start: int
    ) -> Iterator[pa.RecordBatch | None]:
        began: float | None = None
        for number, batch in enumerate(builder._seek(data, partition, start)):
            began = self.clock() if began is None else began
            while self.clock() < began + number * BATCH_S:
                yield None
            yield batch


def drawn_faults(seed: int, mix: mixes.Mix) -> faults_.Faults:
    """Return the faults of the mix, or any faults. Sources end when all is repaired, which leaves time for changes."""
    rng = random.Random(f"growing faults {seed}")
    found = mix.faults
    if found is None:
        found = faults_.latest(rng, faults_.more(rng, mixes.draw(rng, True), True), True)
        found = faults_.with_spoilt_tables(rng, found)
    return replace(found, patient=True, patient_alone=False, nondeterministic=False, protects_per_s=0.0)


class GrowingSimulation(Simulation):
    """A run with changes of the plan."""

    def __init__(self, seed: int, mix: mixes.Mix, life: Life | None = None) -> None:
        """``life``: of a query with a directory."""
        any_kind = mix is mixes.ANY and seed % STANDBYS_OF == STANDBYS_OF - 1
        self._standbys = mix.standbys or (
            random.Random(f"growing standbys {seed}").choice([0.5, 1.0]) if any_kind else 0.0
        )
        flow, rng = GrowingFlow(seed, self._standbys), random.Random(f"growing {seed}")
        habits = rng.choice([operators.QUIET, operators.QUIET, operators.STORMY]) if mix.faults is None else None
        drawn: Any = flow if life is None else partial(_goes_on, flow, life, seed)
        super().__init__(
            seed, drawn_faults(seed, mix), slots=rng.randint(3, 5), dataflow=drawn, habits=habits, life=life
        )
        flow.clock = lambda: self.world.now
        self._rng, self._began = rng, self.world.now
        self._left = rng.randint(3, CHANGES_MAX)
        self._names = 0
        self._asked: list[PlanRequest] = []
        self._sealed = False
        self.growing = GrowingLaws(self)
        if life is not None and isinstance(life.earlier, GrowingSimulation):
            self._names = life.earlier._names
            asked = life.earlier.controller.plans.current
            if asked is not None and asked.phase == PlanPhase.STORING:
                there = life.place.plan is not None and life.place.plan.version == asked.version
                self.counts["versions kept and not heard of" if there else "versions lost with everything"] += 1
            self.growing.go_on(life.earlier.growing)
        self.world.after(LOOK_S, self._look)

    # ---- the directory

    def _keep(self, order: VersionToKeep) -> None:
        """Write a version, as a thread of the driver does: it is there some time before the controller hears of it."""
        assert self.life is not None
        self.life.place.plan = order.plan
        self.counts["versions kept"] += 1
        self.world.after(self._rng.random() * KEEPS_S, self._kept, order)

    def _kept(self, order: VersionToKeep) -> None:
        if self.server.sleeps(self._kept, order):
            return
        self.controller.plans.kept(order, self.world.now)
        self.server.perform(self.controller.board.take())

    # ---- changes

    def _look(self) -> None:
        if self.controller.phase == "ended" or self._sealed:
            return
        self.world.after(LOOK_S, self._look)
        self.growing.check_shares()
        self.growing.check_edges()
        if self.controller.phase != "running":
            return
        plans = self.controller.plans
        if plans.under_way:
            return
        over = self.world.now > self._began + CHANGES_S
        if (self._left <= 0 or over) and self._rng.random() < 0.3:
            self._sealed = True
            plans.seal()
        elif self._left > 0 and not over and self._rng.random() < 0.5:
            self._left -= 1
            grown = [stage for stage in self.plan.stages if stage.since and not stage.edges_out]
            try:
                self._remove(self._rng.choice(grown)) if grown and self._rng.random() < 0.45 else self._add()
            except UsageError as error:
                self.counts[f"changes refused at once: {str(error)[:40]}"] += 1
            self.server.perform(self.controller.board.take())

    def _add(self) -> None:
        plan, version = self.controller.plans.newest()
        origins = [stage for stage in plan.stages if stage.output_schema is not None]
        origin = self._rng.choice(origins)
        _, stage, edge = plan.next_ids()
        if self._rng.random() < 0.4:
            first, way = self._stage(plan, stage, edge, origin, GrownPass, (edge + 1,))
            last, on = self._stage(plan, stage + 1, edge + 1, first, Grown)
            stages, edges = (first, last), (way, on)
        else:
            last, way = self._stage(plan, stage, edge, origin, Grown)
            stages, edges = (last,), (way,)
        change = PlanChange(version, stages=stages, edges=edges, base=plan.version)
        self._asked.append(self.controller.plans.add(change, encode_change(change, flows.SECRET), self.world.now))
        self.counts["stages asked for"] += len(stages)

    def _stage(
        self, plan: Plan, stage: int, edge: int, origin: StagePlan, kind: type[Watched], edges_out: tuple[int, ...] = ()
    ) -> tuple[StagePlan, EdgePlan]:
        rng, name = self._rng, f"grown{self._names}"
        self._names += 1
        _make(name, kind, self.seed, self.ledger)
        key = rng.choice([(), ("key",), ("id",)])
        self.ledger.keys[name] = key
        partitions = rng.randint(1, 3)
        output = ROW if kind is GrownPass else None
        copies = rng.randint(1, max(each.replicas for each in plan.stages))
        stands_by = self._standbys > 0 and copies > 1 and rng.random() < self._standbys
        made_stage = StagePlan(
            stage,
            name,
            partitions,
            copies,
            key,
            partial(made, f"{name} of {self.seed}"),
            (ROW,),
            output,
            (edge,),
            edges_out,
            recovery=STANDBY if stands_by else ACTIVE,
        )
        places = tuple(ROW.get_field_index(column) for column in key)
        way = FromStage(
            edge,
            stage,
            0,
            places,
            ROW,
            partitions,
            origin.partitions,
            log_bytes=rng.choice([400, 4000, 64 << 10]),
            stage=origin.id,
        )
        return made_stage, way

    def _remove(self, stage: StagePlan) -> None:
        asked = self.controller.plans.remove(stage.name, False, self.world.now)
        assert asked is not None
        self._asked.append(asked)
        self.counts["removals asked for"] += 1

    @property
    def stage_names(self) -> dict[int, str]:
        return super().stage_names | {stage.id: stage.name for stage in self.growing.removed.values()}

    def follow(self) -> None:
        """Go by the version of the plan that the controller's newest table names."""
        plan = self.controller.board.plan
        if plan is not self.plan:
            self.growing.follow(self.plan, plan)
            self.plan = self.ledger.plan = self.end.plan = plan
        if self.life is not None:
            for order in self.controller.plans.to_keep():
                self.world.after(self._rng.random() * KEEPS_S, self._keep, order)

    # ---- the course of a run

    def may_end(self, source: int, partition: int) -> bool:
        return self._sealed and super().may_end(source, partition)

    def run(self) -> None:
        super().run()
        for asked in self._asked:
            done = asked.phase == PlanPhase.RUNNING
            self.counts[
                "changes of the plan done" if done else f"changes of the plan that came to nothing: {asked.why[:30]}"
            ] += 1
        self.growing.check_at_the_end()
