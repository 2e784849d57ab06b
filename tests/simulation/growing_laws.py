"""The laws of a plan that grows (design: plan-version, edge-begins, edge-closes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from controller.course.plan_phases import PlanPhase
from controller.course.plan_requests import PlanRequest
from flux.dataflow.plan import EdgePlan, FromSource, Plan, StagePlan
from flux.replica.replica import Replica
from flux.worker.core import WorkerCore
from partitioning.ids import StreamId
from tests.simulation.replaying import STEP_ROWS, Replaying
from tests.simulation.stage_kinds import ELSEWHERE, ROW
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.growing import GrowingSimulation

ALIKE = "an edge begins at the same row on all copies"
EXACT = "a new stage gets each row behind its first step once, in order"
GONE = "a removed stage leaves nothing"
FED = "a replica feeds the edges of its version"
STORED = "nothing is heard of an edge of a running source before its beginning is stored"
INCLUDED = "rows that come after the answer are for the new stage"
SHARES = "a stream has the same share of the log on all its replicas"


class GrowingLaws:
    """The laws of one run whose plan grows. ``follow`` is called with each version that a table names, ``look`` after each step
    of a worker."""

    def __init__(self, sim: GrowingSimulation) -> None:
        self._sim = sim
        #: By edge and producing partition: the number of the first row that is to travel.
        self._first: dict[tuple[int, int], int] = {}
        #: Edges that have begun in steps that are not committed: replica, step, edge, row.
        self._begun: list[tuple[Replica, int, int, int]] = []
        #: By edge and producing partition: the row with which the newest replica has begun the edge. The worker of that replica
        #: may be lost before it hears that the step is committed, and the vault may have the step.
        self._newest: dict[tuple[int, int], int] = {}
        #: By identity of a replica: the edges that the replica is known to feed.
        self._fed: dict[int, set[int]] = {}
        #: By stream: the share of the log.
        self._shares: dict[StreamId, int] = {}
        #: Stages, sources and edges that are removed.
        self.removed: dict[int, StagePlan] = {}
        self.unread: set[int] = set()
        self._edges: set[int] = set()
        #: By edge of a running source: the rows of each partition that had been read when the addition of the edge was answered.
        self._read: dict[int, Counter[int]] = {}
        #: By stream of an edge of a running source: the first beginning that the controller has stored.
        self._births: dict[StreamId, int] = {}

    def go_on(self, earlier: GrowingLaws) -> None:
        """Begin another life of the query: edges that have begun begin at the same row again."""
        self._first, self.removed, self._edges = dict(earlier._first), dict(earlier.removed), set(earlier._edges)
        self._newest, self.unread = dict(earlier._newest), set(earlier.unread)
        self._births, self._read = dict(earlier._births), dict(earlier._read)

    def follow(self, before: Plan, plan: Plan) -> None:
        self.removed |= {stage.id: stage for stage in before.stages if stage.id not in plan.stages}
        self._edges |= {edge.id for edge in before.edges if edge.id not in plan.edges}
        self.unread |= {source.id for source in before.sources if source.id not in plan.sources}

    def watch(self, replica: Replica) -> None:
        """Take the edges of a replica that comes to life as known."""
        self._fed.setdefault(id(replica), {outlet.edge.id for outlet in replica.outlets})

    def look(self, core: WorkerCore) -> bool:
        """Tell whether an edge has begun in the last step of a worker."""
        began = False
        for replica in core.replicas.values():
            fed = self._fed.setdefault(id(replica), {outlet.edge.id for outlet in replica.outlets})
            for outlet in replica.outlets:
                if outlet.edge.id not in fed:
                    fed.add(outlet.edge.id)
                    began = True
                    # Rows of a stage that may begin empty are numbered by their steps.
                    state = getattr(replica.operator, "state", None)
                    counted = state.get("tick") if isinstance(state, dict) else None
                    number = replica.applied * STEP_ROWS if counted is None else counted
                    self._begun.append((replica, replica.applied - 1, outlet.edge.id, number))
                    self._newest[outlet.edge.id, replica.partition] = number
        self._begun = [each for each in self._begun if not self._begins(*each)]
        return began

    def _begins(self, replica: Replica, step: int, edge: int, number: int) -> bool:
        """Compare the beginning of an edge once its step is committed: a primary that is deposed earlier shows no row of it."""
        if replica.order.committed <= step:
            return False
        known = self._first.setdefault((edge, replica.partition), number)
        self._sim.counts["edges that began"] += 1
        self._sim.counts["edges that began behind rows"] += number > 0
        if known != number:
            raise Violation(ALIKE, f"{replica.where}, edge {edge}: row {number}, and {known} elsewhere")
        return True

    def check_shares(self) -> None:
        for core in self._sim.hosts():
            for stream, producer in core.producers.items():
                known = self._shares.setdefault(stream, producer.log.bytes_max)
                if known != producer.log.bytes_max:
                    raise Violation(SHARES, f"stream {stream}: {producer.log.bytes_max} bytes, and {known} elsewhere")

    def check_edges(self) -> None:
        """Check that each replica feeds the edges of its version: other laws see a missing outlet only when the replica leads, if
        at all."""
        plan = self._sim.plan
        for core in self._sim.hosts():
            for replica in core.replicas.values() if core.plan.version == plan.version else ():
                edges = plan.stages[replica.stage.id].edges_out
                expected = {edge for edge in edges if plan.edges[edge].since <= replica.version}
                fed = {outlet.edge.id for outlet in replica.outlets}
                if fed != expected:
                    raise Violation(FED, f"{replica.where} of version {replica.version}: {fed}, not {expected}")

    def note_answers(self, requests: Iterable[PlanRequest]) -> None:
        """Note the rows that are read of a source when an addition behind it is answered."""
        for asked in requests:
            for edge in () if asked.phase != PlanPhase.RUNNING or asked.change is None else asked.change.edges:
                if isinstance(edge, FromSource):
                    self._read.setdefault(edge.id, Counter(self._sim.source_of(edge.source).read))

    def check_stored(self, core: WorkerCore) -> None:
        """Check the beginnings of streams of a running source: each is stored before other processes hear of it, and stays."""
        for edge in core.plan.edges:
            if not isinstance(edge, FromSource) or edge.since <= core.plan.sources[edge.source].since:
                continue
            for partition in range(edge.producers):
                stream = StreamId(edge.id, partition)
                stored = self._sim.controller.plans.births.of(stream)
                producer = core.producers.get(stream)
                if stored is not None and self._births.setdefault(stream, stored.number) != stored.number:
                    raise Violation(
                        ALIKE, f"stream {stream} begins at {stored.number}, and {self._births[stream]} before"
                    )
                if producer is not None and stored is None and stream not in self._births:
                    raise Violation(STORED, f"stream {stream} of worker {core.worker}")

    def _first_of(self, edge: EdgePlan, partition: int) -> int:
        """Return the first row of a partition that is to travel on an edge."""
        key = edge.id, partition
        return self._first.get(key, self._newest.get(key, 0))

    # ---- the end

    def check_at_the_end(self) -> None:
        sim = self._sim
        self._begun = [each for each in self._begun if not self._begins(*each)]
        if sim.controller.error is None:
            for stage in sim.plan.stages:
                if stage.since:
                    self._check_rows(stage)
        for core in sim.hosts():
            if sim.controller.table is not None and core.epoch == sim.controller.table.epoch:
                self.check_gone(core)

    def _check_rows(self, stage: StagePlan) -> None:
        for entrance, edge in enumerate(stage.edges_in):
            self._check_input(stage, entrance, self._sim.plan.edges[edge])

    def _got(self, stage: StagePlan, entrance: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the rows that the partitions of a stage have got at an input: partitions of the origin, and numbers of rows."""
        for state in self._sim.end.states(stage.name):
            for key, ticks in state["got"].items():
                if key // ELSEWHERE == entrance:
                    yield key % ELSEWHERE, ticks

    def _check_input(self, stage: StagePlan, entrance: int, edge: EdgePlan) -> None:
        sim = self._sim
        origin = sim.plan.origin(edge)
        if isinstance(origin, StagePlan) and isinstance(origin.make(), Replaying):
            self._check_order(stage, entrance, edge, origin)
            return
        if isinstance(origin, StagePlan) and origin.output_schema != ROW:
            self._check_results(stage, origin)
            return
        if not isinstance(edge, FromSource):
            given = {partition: state["tick"] for partition, state in enumerate(sim.end.states(origin.name))}
            begun = {p: self._first_of(edge, p) if edge.since > origin.since else 0 for p in given}
        else:
            given = {
                partition: sum(map(len, rows)) for partition, rows in enumerate(sim.source_data[origin.id].batches)
            }
            begun = self._begun_in_source(edge) if edge.since > origin.since else dict.fromkeys(given, 0)
        got: Counter[tuple[int, int]] = Counter()
        for hop, ticks in self._got(stage, entrance):
            if ticks != sorted(set(ticks)):
                raise Violation(EXACT, f"{stage.name}: rows {ticks} of {origin.name}/{hop}")
            got.update((hop, tick) for tick in ticks)
        expected = Counter((p, tick) for p, end in given.items() for tick in range(begun[p], end))
        sim.counts["rows at new stages"] += got.total()
        if got != expected:
            missing, extra = list((expected - got).items())[:3], list((got - expected).items())[:3]
            raise Violation(
                EXACT, f"{stage.name} of {origin.name}, from {begun} to {given}: missing {missing}, too many {extra}"
            )

    def _check_results(self, stage: StagePlan, origin: StagePlan) -> None:
        """Check the results of an aggregate: for each key, a new stage has the last of the results that a stage of the beginning
        has in full."""
        sim = self._sim
        all_ = next((each.name for each in sim.plan.stages if not each.since and "history" in each.name), None)
        if all_ is None:
            return  # that stage has failed
        known = {key: results for state in sim.end.states(all_) for key, results in state["history"].items()}
        for state in sim.end.states(stage.name):
            for key, got in state["results"].items():
                sim.counts["results at new stages"] += len(got)
                if got != known[key][-len(got) :]:
                    raise Violation(EXACT, f"{stage.name} of {origin.name}: {got} of key {key}, which has {known[key]}")

    def _check_order(self, stage: StagePlan, entrance: int, edge: EdgePlan, origin: StagePlan) -> None:
        """Check the rows behind a stage whose numbers have gaps: no row comes twice, or from before the first step."""
        for hop, ticks in self._got(stage, entrance):
            first = self._first_of(edge, hop) if edge.since > origin.since else 0
            if ticks != sorted(set(ticks)) or (ticks and ticks[0] < first):
                raise Violation(EXACT, f"{stage.name}: rows {ticks} of {origin.name}/{hop}, which begin at {first}")
            self._sim.counts["rows at new stages behind upstream replicas"] += len(ticks)

    def _begun_in_source(self, edge: FromSource) -> dict[int, int]:
        """Return the first row of each partition on an edge of a source: no row that was read after the answer lies before it."""
        sim, begun = self._sim, {}
        for partition in range(edge.producers):
            stream = StreamId(edge.id, partition)
            stored = sim.controller.plans.births.of(stream)
            if stored is None:
                raise Violation(STORED, f"stream {stream} has no beginning at the end of the run")
            begun[partition] = sim.source_of(edge.source).first_row(partition, stored.number)
            sim.counts["edges of the source that began"] += 1
            sim.counts["edges of the source that began behind rows"] += begun[partition] > 0
            read = self._read.get(edge.id)
            if read is not None and begun[partition] > read[partition]:
                raise Violation(INCLUDED, f"stream {stream} begins with row {begun[partition]} of {read[partition]}")
        return begun

    def check_gone(self, core: WorkerCore) -> None:
        """Check that a worker that goes by the newest table holds nothing of a removed stage."""
        subscriptions, lifecycle, hosted = core.subscriptions, core.lifecycle, core.hosted
        keys: dict[str, Any] = {
            "replicas": core.replicas, "followers": hosted.followers, "awaited": hosted.awaited, "placed": hosted.placed,
        }  # fmt: skip
        stages: dict[str, Any] = {
            "latencies": core.latencies, "partitions": hosted.partitions, "secondaries": hosted.secondary,
            "replicas by stage": hosted.of_stage, "inputs": lifecycle._inputs, "consumers": lifecycle._consumers,
            "copies": subscriptions.copies._copies,
        }  # fmt: skip
        streams: dict[str, Any] = {
            "producers": core.producers, "streams": subscriptions.streams, "credit": subscriptions.credit.stages.streams,
            "credit of sources": subscriptions.credit.sources.streams, "births": core._assigned._births,
            "further feeds": subscriptions.feeds._streams,
            "streams that were left": subscriptions._left, "copied streams": subscriptions.copies._copied,
        }  # fmt: skip
        found = [name for name, there in keys.items() if any(key[0] in self.removed for key in there)]
        found += [name for name, there in stages.items() if any(stage in self.removed for stage in there)]
        found += [name for name, there in streams.items() if any(stream[0] in self._edges for stream in there)]
        found += [
            f"outlets of {replica.where}"
            for replica in core.replicas.values()
            if any(outlet.edge.id in self._edges for outlet in replica.outlets)
        ]
        found += [
            f"streams of source partition {key}"
            for key, read in core.sources.items()
            if any(each.id in self._edges for each in read.edges)
        ]
        read: dict[str, Any] = {"sources": core.sources, "readers": core.reading.open, "turns": core.reading._rotation}
        found += [name for name, there in read.items() if any(key.source in self.unread for key in there)]
        if found:
            raise Violation(GONE, f"worker {core.worker} has {', '.join(found)} of {sorted(self.removed)}")
