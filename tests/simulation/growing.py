"""Runs in which stages come and go all the time, under all other faults: stages behind running ones and behind each other, and
their removal, by the requests that people make (design: plan-version, edge-begins, edge-closes). In some runs stages also come
behind the running source of the beginning (design: edge-of-a-source).

The laws are in ``growing_laws``.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

import flux
from controller.course.plan_phases import PlanPhase
from controller.course.plan_requests import BirthsToKeep, LocationOrder, PlanRequest
from controller.course.source_births import stream_of
from controller.planning.compiler import compile_plan
from flux.dataflow.flow import Flow
from flux.dataflow.plan import (
    ById,
    DataFrameSourcePlan,
    EdgePlan,
    FromDataFrame,
    FromMicroBatches,
    FromSource,
    FromStage,
    Plan,
    SourcePlan,
    StagePlan,
    StreamSourcePlan,
)
from flux.dataflow.plan_change import PlanChange, encode_change
from flux.dataflow.source import DataFrameSource
from flux.errors import UsageError
from flux.settings import Settings
from partitioning.ids import ACTIVE, STANDBY
from tests.simulation import faults as faults_
from tests.simulation import flows, mixes, operators
from tests.simulation.checkers import Ledger
from tests.simulation.growing_laws import GrowingLaws
from tests.simulation.growing_readers import SOURCES, PacedSource
from tests.simulation.run import SOURCES_FROM, Simulation
from tests.simulation.stage_kinds import ELSEWHERE, ROW, Double, Filter, Shatter, Sink, Watched
from tests.simulation.vault_process import Life

#: Seconds between two looks for a change to make.
LOOK_S = 0.03
#: One run in this number has standbys in place of some secondaries.
STANDBYS_OF = 3
#: The share of additions behind the source, in runs that have such additions.
BEHIND_SOURCE = 0.5
#: The most changes in a run; and the seconds after which no more are asked for.
CHANGES_MAX, CHANGES_S = 12, 4.0
#: Longest time until a version is in the directory, and until the controller hears of that.
KEEPS_S = 0.02
#: The share of births that a directory fails to keep at once; half of these are there all the same.
FAILS = 0.15
#: The classes of new stages, by a name that travels in place of the class: operators of the simulation hold its ledger.
_made: dict[str, type[flux.Operator]] = {}
#: Classes of new stages whose operators cannot be opened any more.
_shut: set[type[flux.Operator]] = set()


class Grown(Watched):
    """An operator that keeps the numbers of its rows, as their origin gave them, by input and by partition of the origin."""

    schema: Any = None

    def open(self, context: flux.Context) -> None:
        if type(self) in _shut:
            raise OSError("no such table")
        super().open(context)
        self.state["got"] = {}

    def process(self, batch: pa.RecordBatch) -> Any:
        got = self.state["got"]
        entrance = self.context.input * ELSEWHERE
        for hop, tick in zip(batch.column("hop").to_pylist(), batch.column("tick").to_pylist(), strict=True):
            got.setdefault(entrance + hop % ELSEWHERE, []).append(tick)
        return super().process(batch)

    def through(self, rows: list[Any]) -> Any:
        return None


class GrownPass(Grown):
    """An operator that keeps the numbers of its rows, and gives the rows to other stages."""

    schema = ROW

    def through(self, rows: list[Any]) -> Any:
        return [self.stamped(rows)]


class GrownTotals(flux.Operator):
    """An operator that keeps the results of an aggregate, by key."""

    ledger: Ledger
    stage_name: str

    def open(self, context: flux.Context) -> None:
        if type(self) in _shut:
            raise OSError("no such table")
        super().open(context)
        self.state: dict[str, Any] = {"results": {}}

    def process(self, batch: pa.RecordBatch) -> Any:
        self.ledger.one_home(self.stage_name, self.context, batch)
        for row in batch.to_pylist():
            self.state["results"].setdefault(row["key"], []).append((row["n"], row["total"]))


class GrownGiving(GrownPass):
    """An operator that keeps its rows, and gives them to a sink outside as well."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["rows"] = []

    def through(self, rows: list[Any]) -> Any:
        self.state["rows"] += rows
        return super().through(rows)


def made(name: str) -> flux.Operator:
    return _made[name]()


def _make(name: str, kind: type[flux.Operator], seed: int, ledger: Ledger) -> None:
    _made[f"{name} of {seed}"] = type(name, (kind,), {"ledger": ledger, "stage_name": name, "transient": ("ledger",)})


def shut(name: str, seed: int) -> None:
    """Let no operator of a later stage be opened from now on."""
    _shut.add(_made[f"{name} of {seed}"])


def _goes_on(flow: GrowingFlow, life: Life, seed: int, ledger: Ledger) -> flows.Dataflow:
    """Make the dataflow of a life: the version in its directory, with the operators of a program that is started again."""
    made, kept = flow(ledger), life.place.plan
    if kept is None or life.earlier is None:
        return made
    first = made.plan
    for stage in kept.stages:
        if stage.since:
            kind = GrownGiving if stage.sink is not None else GrownPass if stage.output_schema is not None else Grown
            _make(stage.name, kind if ROW in stage.schemas else GrownTotals, seed, ledger)
            ledger.keys[stage.name] = life.earlier.ledger.keys[stage.name]
    stages = ById(
        stage if stage.since else replace(stage, make=first.stages[stage.id].make, sink=first.stages[stage.id].sink)
        for stage in kept.stages
    )
    # Readers belong to the program.
    sources = ById(
        source if source.since else replace(first.sources[source.id], first_edges=source.first_edges)
        for source in kept.sources
    )
    plan = replace(
        first, stages=stages, sources=sources, edges=kept.edges, version=kept.version, used=kept.used,
        first_streams=kept.first_streams,
    )  # fmt: skip
    return replace(made, plan=plan)


class GrowingFlow:
    """The dataflow of the beginning: a source in workers or in Spark, one or two stages, and a sink."""

    def __init__(self, seed: int, standbys: float, kind: str = "") -> None:
        """Draw the dataflow of a seed, with standbys in place of secondaries in a share ``standbys`` of the stages. ``kind``: of
        a source in workers, one of ``SOURCES``; empty: a source that counts its batches, or a DataFrame."""
        self.rng, self.kinds, self.standbys = (
            random.Random(f"growing flow {seed}"), random.Random(f"growing kinds {seed}"), standbys,
        )  # fmt: skip
        self.source = PacedSource(kind, flows.SourceData("source", []), random.Random(f"growing cuts {seed}"))

    def __call__(self, ledger: Ledger) -> flows.Dataflow:
        rng = self.rng
        copies = rng.choice([1, 2, 2, 3])
        builder = flows._Builder(rng, ledger, False, copies, copies)
        builder._spread = 50
        in_spark = rng.random() < 0.3 and not self.source.kind
        partitions, batches = rng.randint(1, 2), rng.choice([150, 400])
        data = flows.SourceData(
            "source", [[builder._rows(rng.choice([1, 3])) for _ in range(batches)] for _ in range(partitions)]
        )
        self.source.data = data
        source: Any = DataFrameSource("source", ROW) if in_spark else self.source.source()
        node = flows.Node(source, "source", data=data)
        builder.nodes.append(node)
        for kind in rng.choice([[Watched], [Filter], [Double], [Shatter], [Watched, Filter]]):
            node = builder._stage(kind, [node], rng.choice([("key",), ("id",)]))
            builder.nodes.append(node)
        sink = self._last(builder, node)
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
        plan = compile_plan([self._ended(sink.given)], self._settings(chosen), lambda given: given, "q", flows.SECRET)
        made = flows.Dataflow(plan, [data], [sink], 64 << 10, self.timed)
        return flows.with_standbys(made, self.kinds, self.standbys) if self.standbys else made

    #: Whether stages may set timers.
    timed = False

    def _last(self, builder: Any, node: flows.Node) -> flows.Node:
        """Return the last stage, behind this node."""
        return builder._stage(Sink, [node], ("key",))  # type: ignore[no-any-return]

    def _ended(self, flow: Flow) -> Any:
        """Return the flow with its sink outside, if the flow has such a sink."""
        return flow

    def _settings(self, drawn: Settings) -> Settings:
        return drawn


def gives_rows(origin: StagePlan | SourcePlan) -> bool:
    """Tell whether a part of the plan gives rows with numbers. Aggregates give results without numbers."""
    return isinstance(origin, SourcePlan) or origin.output_schema == ROW


def edge_kind(source: SourcePlan) -> type[FromSource]:
    """Return the kind of the edges that leave a source."""
    if isinstance(source, StreamSourcePlan):
        return FromMicroBatches
    return FromDataFrame if isinstance(source, DataFrameSourcePlan) else FromSource


def drawn_faults(seed: int, mix: mixes.Mix) -> faults_.Faults:
    """Return the faults of the mix, or draw any faults. Sources end when all is repaired, which leaves time for changes."""
    rng = random.Random(f"growing faults {seed}")
    found = mix.faults
    if found is None:
        found = faults_.latest(rng, faults_.more(rng, mixes.draw(rng, True), True), True)
        found = faults_.with_spoilt_tables(rng, found)
    return replace(found, patient=True, patient_alone=False, nondeterministic=False, protects_per_s=0.0)


class GrowingSimulation(Simulation):
    """A run with changes of the plan."""

    #: Whether workers have time-outs for links between them, and go round cut ones.
    _reach = False

    def __init__(self, seed: int, mix: mixes.Mix, life: Life | None = None) -> None:
        """Prepare a run. ``life``: the life of a query with a directory."""
        self._standbys = self._share_of_standbys(seed, mix)
        rng, chosen = random.Random(f"growing {seed}"), random.Random(f"growing sources {seed}")
        kind = chosen.choice(SOURCES) if mix.sources or (mix is mixes.ANY and seed >= SOURCES_FROM) else ""
        flow = self.flow = self._flow(seed, kind)
        habits = rng.choice([operators.QUIET, operators.QUIET, operators.STORMY]) if mix.faults is None else None
        drawn: Any = flow if life is None else partial(_goes_on, flow, life, seed)
        super().__init__(
            seed, self._faults(seed, mix), slots=rng.randint(3, 5), dataflow=drawn, habits=habits, life=life,
            reach=self._reach,
        )  # fmt: skip
        flow.source.clock = lambda: self.world.now
        #: The draws that decide which stages come behind the source; None: no stage does.
        self._behind = chosen if flow.source.kind else None
        self._rng, self._began = rng, self.world.now
        self._left = rng.randint(3, CHANGES_MAX)
        self._names = 0
        self._asked: list[PlanRequest] = []
        self._sealed = False
        #: Orders that the directory has still to carry out.
        self._orders: deque[LocationOrder] = deque()
        #: Orders that are carried out, each with an error or "", of which the controller has not heard yet.
        self._results: deque[tuple[LocationOrder, str]] = deque()
        self._fails = random.Random(f"growing failures {seed}")
        self.growing = GrowingLaws(self)
        if life is not None:
            self.controller.plans.births.begin(life.place.births.values())
        if life is not None and isinstance(life.earlier, GrowingSimulation):
            self._names = life.earlier._names
            flow.source.read |= life.earlier.flow.source.read
            asked = life.earlier.controller.plans.current
            if asked is not None and asked.phase == PlanPhase.STORING:
                there = life.place.plan is not None and life.place.plan.version == asked.version
                self.counts["versions kept and not heard of" if there else "versions lost with everything"] += 1
            self.growing.go_on(life.earlier.growing)
        self.world.after(LOOK_S, self._look)

    def _share_of_standbys(self, seed: int, mix: mixes.Mix) -> float:
        """Return the share of stages with standbys in place of secondaries."""
        any_kind = mix is mixes.ANY and seed % STANDBYS_OF == STANDBYS_OF - 1
        drawn = random.Random(f"growing standbys {seed}").choice([0.5, 1.0]) if any_kind else 0.0
        return mix.standbys or drawn

    def _flow(self, seed: int, kind: str) -> GrowingFlow:
        """Return the dataflow of the beginning, with a source of this ``kind``."""
        return GrowingFlow(seed, self._standbys, kind)

    def _faults(self, seed: int, mix: mixes.Mix) -> faults_.Faults:
        return drawn_faults(seed, mix)

    # ---- the directory

    def _keep(self) -> None:
        """Carry out the next order, as a thread of the driver does: its result is there some time before the controller hears of
        it."""
        assert self.life is not None
        order, place, error = self._orders.popleft(), self.life.place, ""
        if isinstance(order, BirthsToKeep):
            fails = self._fails.random()
            error = "no space left" if fails < FAILS else ""
            births = order.births if fails > FAILS / 2 else ()
            self.counts["births that were not kept at once"] += bool(error)
        else:
            place.plan, births = order.plan, order.births
        self.counts["orders about births" if isinstance(order, BirthsToKeep) else "versions kept"] += 1
        edges = self.first_plan.edges if place.plan is None else place.plan.edges
        place.births |= {stream_of(birth): birth for birth in births}
        place.births = {stream: birth for stream, birth in place.births.items() if stream.edge in edges}
        self._results.append((order, error))
        self.world.after(self._rng.random() * KEEPS_S, self._kept)

    def _kept(self) -> None:
        if self.server.sleeps(self._kept):
            return
        order, error = self._results.popleft()
        self.controller.plans.kept(order, self.world.now, error)
        self.server.perform(self.controller.board.take())

    # ---- changes

    def _look(self) -> None:
        if self.controller.phase == "ended" or self._sealed:
            return
        self.world.after(LOOK_S, self._look)
        self.growing.check_shares()
        self.growing.check_edges()
        self.growing.note_answers(self._asked)
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
        origin: StagePlan | SourcePlan = self._rng.choice(
            [stage for stage in plan.stages if stage.output_schema is not None]
        )
        if self._behind is not None and self._behind.random() < BEHIND_SOURCE:
            origin = self._running_source(plan)
            self.counts["stages asked for behind the source"] += 1
        _, stage, edge = plan.next_ids()
        if self._rng.random() < 0.4 and gives_rows(origin):
            first, way = self._stage(plan, stage, edge, origin, GrownPass, (edge + 1,))
            last, on = self._stage(plan, stage + 1, edge + 1, first, Grown)
            stages, edges = (first, last), (way, on)
        else:
            last, way = self._stage(plan, stage, edge, origin, Grown)
            stages, edges = (last,), (way,)
        self._ask(PlanChange(version, stages=stages, edges=edges, base=plan.version))

    def _running_source(self, plan: Plan) -> SourcePlan:
        """Return the source behind which a stage comes."""
        return plan.sources[0]

    def source_of(self, source: int) -> PacedSource:
        """Return a source in workers by its id, also one that is removed."""
        return self.flow.source

    def _ask(self, change: PlanChange) -> None:
        self._asked.append(self.controller.plans.add(change, encode_change(change, flows.SECRET), self.world.now))
        self.counts["stages asked for"] += len(change.stages)

    def _stage(
        self,
        plan: Plan,
        stage: int,
        edge: int,
        origin: StagePlan | SourcePlan,
        kind: type[Watched],
        edges_out: tuple[int, ...] = (),
    ) -> tuple[StagePlan, EdgePlan]:
        rng, name = self._rng, f"grown{self._names}"
        self._names += 1
        rows = gives_rows(origin)
        schema = ROW if rows else origin.output_schema
        assert schema is not None
        _make(name, kind if rows else GrownTotals, self.seed, self.ledger)
        key = rng.choice([(), ("key",), ("id",)]) if rows else ("key",)
        self.ledger.keys[name] = key
        partitions = rng.randint(1, 3)
        output = ROW if issubclass(kind, GrownPass) else None
        copies = rng.randint(1, max(each.replicas for each in plan.stages))
        stands_by = self._standbys > 0 and copies > 1 and rng.random() < self._standbys
        made_stage = StagePlan(
            stage,
            name,
            partitions,
            copies,
            key,
            partial(made, f"{name} of {self.seed}"),
            (schema,),
            output,
            (edge,),
            edges_out,
            recovery=STANDBY if stands_by else ACTIVE,
        )
        places = tuple(schema.get_field_index(column) for column in key)
        log_bytes = rng.choice([400, 4000, 64 << 10])
        way: EdgePlan
        if isinstance(origin, SourcePlan):
            about = edge, stage, 0, places, ROW, partitions, origin.worker_partitions
            way = edge_kind(origin)(*about, log_bytes=log_bytes, source=origin.id)
        else:
            about = edge, stage, 0, places, schema, partitions, origin.partitions
            way = FromStage(*about, log_bytes=log_bytes, stage=origin.id)
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
                self._orders.append(order)
                self.world.after(self._rng.random() * KEEPS_S, self._keep)

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
