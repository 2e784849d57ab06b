"""Runs in which sources come and go with their stages, beside stages and sinks, in queries of all kinds: readers in workers, jobs
of Spark that read DataFrames, and micro-batches of streaming queries. Some readers fail, and so do stages: in a part of the runs
only the stages that depend on them end (design: stage-fails).

The laws are those of ``growing_wide``. Besides, a source that is removed leaves nothing, and a failure touches no other stage.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

import flux
from controller.course.removals import dependants
from flux.dataflow.plan import (
    DataFrameSourcePlan,
    EdgePlan,
    FromStage,
    Plan,
    SourcePlan,
    StagePlan,
    StreamSourcePlan,
    WorkerSourcePlan,
)
from flux.dataflow.plan_change import PlanChange
from flux.dataflow.source_reader import PartitionReader
from flux.errors import QueryFailed
from flux.settings import Settings
from tests.simulation import flows, growing, mixes
from tests.simulation.growing import GrowingFlow, Grown, GrownPass
from tests.simulation.growing_readers import SOURCES, PacedSource
from tests.simulation.growing_wide import WideFlow, WideGrowing
from tests.simulation.micro_queries import MicroQuery
from tests.simulation.stage_kinds import ROW, Totals, TotalsSink
from tests.simulation.vault_process import Life
from tests.simulation.violation import Violation

#: Words of the error of a stage that has lost all replicas of a partition.
LOSS = "the only safe replica of"
ALONE = "a failing stage touches no other"
UNREAD = "a source that is removed is read no more"
#: The kinds of sources that come beside sources in workers.
FRAME, STREAM = "frame", "stream"
#: The share of additions that bring a source; among these the shares with another stage behind a running part, and with a stage
#: that reads both.
COMES_SHARE, BESIDE_SHARE, JOINS_SHARE = 0.45, 0.25, 0.25
#: The shares of sources that end while others go on, and of removals of a source, or of a stage with its readers.
EARLY_SHARE, CASCADE_SHARE = 0.3, 0.4
#: The share of first flows with an aggregate, which gives each result after the step that has changed it.
SUMS_SHARE = 0.3
#: The share of queries whose stages fail alone, the share of their sources that fail, and the shares of looks at which a stage
#: fails or is shut.
ALONE_SHARE, BREAKS_SHARE, FAILS, SHUTS = 0.5, 0.4, 0.03, 0.02
#: The methods of readers that fail, ``read`` when a partition is opened.
METHODS = ("read", "next", "next", "pauses", "bad_records", "lag", "applied")
#: The longest times from the coming of a source until its method fails, and from the going of a source until its job is
#: cancelled.
BREAKS_S, CANCELS_S = 0.6, 0.1


@dataclass
class Coming:
    """A source that has come to a running query."""

    kind: str
    data: flows.SourceData
    #: The reader of a source in workers.
    paced: PacedSource
    #: Whether the source may end while others go on.
    early: bool
    #: The method that fails; empty: no method does.
    breaks: str = ""
    #: The virtual time from which on that method fails.
    breaks_at: float = 0.0


class History(TotalsSink):
    """A sink that keeps all results of each key, in their order."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["history"] = {}

    def process(self, batch: pa.RecordBatch) -> Any:
        super().process(batch)
        for row in batch.to_pylist():
            self.state["history"].setdefault(row["key"], []).append((row["n"], row["total"]))


class GivingHistory(History):
    """A stage that keeps all results of each key, and gives them to a sink outside."""

    schema = pa.schema([(name, pa.int64()) for name in ("key", "n", "total")])

    def process(self, batch: pa.RecordBatch) -> Any:
        super().process(batch)
        return [batch]


class ComingFlow(WideFlow):
    """A dataflow of the beginning of any kind, whose stages may fail alone."""

    def __init__(self, seed: int, standbys: float, kind: str, alone: bool) -> None:
        super().__init__(seed, standbys, kind)
        self._alone = alone
        self._sums = random.Random(f"growing sums {seed}").random() < SUMS_SHARE

    def _last(self, builder: Any, node: flows.Node) -> flows.Node:
        if not self._sums:
            return super()._last(builder, node)
        totals = builder._stage(Totals, [node], ("key",), "update")
        builder.nodes.append(totals)
        kind = GivingHistory if self._outside else History
        return builder._stage(kind, [totals], ("key",), partitions=self._wide.choice([1, 1, 2]))  # type: ignore[no-any-return]

    def _settings(self, drawn: Settings) -> Settings:
        return replace(super()._settings(drawn), on_failure="stage" if self._alone else "query")


class SourcesComing(WideGrowing):
    """A run with changes of the plan that bring sources."""

    def __init__(self, seed: int, mix: mixes.Mix, life: Life | None = None) -> None:
        earlier = None if life is None else life.earlier
        #: By id: the sources that have come in any life, including sources that are gone.
        self.coming: dict[int, Coming] = dict(earlier.coming) if isinstance(earlier, SourcesComing) else {}
        self.came = {source: each.data for source, each in self.coming.items()}
        self._draws = random.Random(f"growing comes {seed} {0 if life is None else life.number}")
        self._alone = random.Random(f"growing alone {seed}").random() < ALONE_SHARE
        #: Names of stages in which a failure was caused, in any life.
        self._fails_in: set[str] = set(earlier._fails_in) if isinstance(earlier, SourcesComing) else set()
        self._micro: dict[int, MicroQuery] = {}
        #: By stage of any version: the stages that read it.
        self._readers: dict[int, set[int]] = defaultdict(set)
        #: By name: the id of a stage.
        self._ids: dict[str, int] = {}
        super().__init__(seed, mix, life)
        self._note_readers()
        for each in self.coming.values():
            each.paced.clock = lambda: self.world.now

    def _flow(self, seed: int, kind: str) -> GrowingFlow:
        self._sinks = random.Random(f"growing sinks {seed}")
        return ComingFlow(seed, self._standbys, self._kinds.choice(["", *SOURCES]), self._alone)

    # ---- sources

    def source_of(self, source: int) -> PacedSource:
        return self.coming[source].paced if source in self.coming else self.flow.source

    def _running_source(self, plan: Plan) -> SourcePlan:
        return self._draws.choice([source for source in plan.sources if isinstance(source, WorkerSourcePlan)])

    def _add(self) -> None:
        if self._draws.random() >= COMES_SHARE:
            super()._add()
            return
        draws = self._draws
        plan, version = self.controller.plans.newest()
        number, stage, edge = plan.next_ids()
        source = self._come(number)
        stages: list[StagePlan] = []
        edges: list[EdgePlan] = []
        origin: StagePlan | SourcePlan = source
        if draws.random() < 0.4:
            first, way = self._stage(plan, stage, edge, source, GrownPass, (edge + 1,))
            stages, edges, origin = [first], [way], first
        last, way = self._stage(plan, stage + len(stages), edge + len(edges), origin, Grown)
        stages, edges = [*stages, last], [*edges, way]
        others = [each for each in plan.stages if each.output_schema == ROW]
        if draws.random() < JOINS_SHARE and others:
            stages[-1], way = self._reading(last, edge + len(edges), draws.choice(others))
            edges.append(way)
        elif draws.random() < BESIDE_SHARE and others:
            beside, way = self._stage(plan, stage + len(stages), edge + len(edges), draws.choice(others), Grown)
            stages, edges = [*stages, beside], [*edges, way]
        self._ask(PlanChange(version, (source,), tuple(stages), tuple(edges), base=plan.version))
        self.counts[f"sources asked for: {self.coming[number].kind}"] += 1

    def _reading(self, stage: StagePlan, edge: int, origin: StagePlan) -> tuple[StagePlan, EdgePlan]:
        """Return a stage with one more input, and the edge that leads to it."""
        places = tuple(ROW.get_field_index(column) for column in stage.key)
        about = edge, stage.id, len(stage.edges_in), places, ROW, stage.partitions, origin.partitions
        way = FromStage(*about, log_bytes=self._draws.choice([400, 4000, 64 << 10]), stage=origin.id)
        return replace(stage, edges_in=(*stage.edges_in, edge), schemas=(*stage.schemas, ROW)), way

    def _come(self, number: int) -> SourcePlan:
        draws, name = self._draws, f"coming{number}"
        # Spark does not repeat a batch that its own checkpoint has, so streams only come to queries without a directory.
        kind = draws.choice([*SOURCES, "counted", FRAME, FRAME] + ([STREAM, STREAM] if self.life is None else []))
        builder = flows._Builder(draws, self.ledger, False, 1, 1)
        batches = draws.choice([5, 30, 90])
        rows = [[builder._rows(draws.choice([1, 3])) for _ in range(batches)] for _ in range(draws.randint(1, 2))]
        data = flows.SourceData(name, rows)
        paced = PacedSource(kind, data, random.Random(f"{name} of {self.seed}"))
        paced.travels_as(f"{name} of {self.seed}")
        paced.clock = lambda: self.world.now
        coming = self.coming[number] = Coming(kind, data, paced, draws.random() < EARLY_SHARE)
        if self._alone and kind in SOURCES and draws.random() < BREAKS_SHARE:
            coming.breaks, coming.breaks_at = draws.choice(METHODS), self.world.now + draws.random() * BREAKS_S
        self.source_data[number] = data
        if kind == FRAME:
            return DataFrameSourcePlan(number, name, ROW)
        if kind == STREAM:
            return StreamSourcePlan(number, name, ROW)
        source = paced.source()
        assert source.reader is not None
        return WorkerSourcePlan(number, name, ROW, len(rows), source.reader)

    def opened(self, about: WorkerSourcePlan, partition: int, reader: PartitionReader) -> PartitionReader:
        coming = self.coming.get(about.id)
        if coming is None or not coming.breaks:
            return reader
        if coming.breaks == "read":
            self._break(coming)
            return reader
        broken = self._broken(coming, getattr(reader, coming.breaks))
        vars(reader).update({coming.breaks: broken, "defines": reader.defines | {coming.breaks}})
        return reader

    def _broken(self, coming: Coming, works: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that fails from a time on."""

        def call(*given: Any) -> Any:
            self._break(coming)
            return works(*given)

        return call

    def _break(self, coming: Coming) -> None:
        if self.world.now >= coming.breaks_at and not self._sealed:
            self.counts[f"readers that failed: {coming.breaks}"] += 1
            raise OSError("the outside is gone")

    def may_end(self, source: int, partition: int) -> bool:
        coming = self.coming.get(source)
        return (coming is not None and coming.early) or super().may_end(source, partition)

    # ---- versions

    def _note_readers(self) -> None:
        self._ids |= {stage.name: stage.id for stage in self.plan.stages}
        for edge in self.plan.edges:
            if isinstance(edge, FromStage):
                self._readers[edge.stage].add(edge.consumer)

    def _behind_stage(self, name: str) -> set[int]:
        """Return a stage of any version and all stages that ever read it, directly or through others."""
        found, left = set[int](), [self._ids[name]]
        while left:
            stage = left.pop()
            found.add(stage)
            left += self._readers[stage] - found
        return found

    def follow(self) -> None:
        before = self.plan
        super().follow()
        if self.plan is not before:
            self._note_readers()
        for source in self.plan.sources if self.plan is not before else ():
            if source.id not in before.sources:
                self._begin(source)
        for source in before.sources if self.plan is not before else ():
            if source.id not in self.plan.sources:
                self.counts["sources that went"] += 1
                self.world.after(self._draws.random() * CANCELS_S, self._cancel, source.id)

    def _begin(self, source: SourcePlan) -> None:
        if isinstance(source, DataFrameSourcePlan):
            self.spark.read(source.id)
        elif isinstance(source, StreamSourcePlan):
            self._micro[source.id] = MicroQuery(self, source.id, self._draws)

    def _cancel(self, source: int) -> None:
        self.spark.cancel(source)
        if source in self._micro:
            self._micro[source].stop()

    def _look(self) -> None:
        plan = self.controller.plan
        later = [stage for stage in plan.stages if stage.since]
        if self.controller.phase == "running" and self._alone and later and not self._sealed:
            if self._draws.random() < FAILS:
                stage = self._draws.choice(later)
                self._fails_in.add(stage.name)
                self.controller.board.fail(QueryFailed("it has failed"), [stage.id])
                self.counts["stages failed"] += 1
            elif self._draws.random() < SHUTS:
                stage = self._draws.choice(later)
                self._fails_in.add(stage.name)
                growing.shut(stage.name, self.seed)
                self.counts["stages shut"] += 1
            breaks = [source for source, each in self.coming.items() if each.breaks]
            self._fails_in |= {plan.stages[stage].name for stage in dependants(plan, (), breaks)}
        super()._look()

    def _remove(self, stage: StagePlan) -> None:
        plan, draws = self.controller.plan, self._draws
        if draws.random() >= CASCADE_SHARE:
            super()._remove(stage)
            return
        later = [
            *(each.name for each in plan.stages if each.since),
            *(each.name for each in plan.sources if each.since),
        ]
        asked = self.controller.plans.remove(draws.choice(later), True, self.world.now)
        if asked is not None:
            self._asked.append(asked)
        self.counts["removals asked for, with readers"] += 1

    # ---- laws

    def run(self) -> None:
        super().run()
        plans, plan = self.controller.plans, self.controller.plan
        self.counts["stages that failed"] += len(plans.failed)
        for failed in plans.failed.values():
            meant = failed.because_of in self._fails_in or LOSS in plans.failed[failed.because_of].error
            if not meant or failed.stage not in self._behind_stage(failed.because_of):
                raise Violation(ALONE, f"{failed.name} because of {failed.because_of}: {failed.error}")
        if self.controller.error is None and any(stage.stage in plan.stages for stage in plans.failed.values()):
            raise Violation(ALONE, f"{sorted(plans.failed)} have failed and are in the plan")
        table = self.controller.table
        rows = (
            Counter[int]() if table is None else {source: len(table.sources[source]) for source in self.growing.unread}
        )
        alive = {attempt.source for attempt in self.spark.alive()} & self.growing.unread
        if alive or any(rows.values()):
            raise Violation(UNREAD, f"tasks of {sorted(alive)}, readers in the table: {rows}")
