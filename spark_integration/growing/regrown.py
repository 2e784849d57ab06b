"""A plan that has grown, compiled again from a program that declares all of its flows at once (design: same-form).

Law: each part gets the ids, the version and the shares of log that it has in the checkpoint location. Flows are compiled version
by version, as they once came: the flows of a version and of earlier ones, and not later ones, decide whether a step is chained
into the stage before it, and whether a sink has a stage of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from controller.planning.additions import check_addition, compiled_addition, compiled_version
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.inputs import topological
from controller.planning.names import KeptNames
from controller.planning.steps import Resolvers
from controller.text import some
from flux.dataflow.flow import Flow
from flux.dataflow.plan import (
    ById,
    EdgePlan,
    FromSource,
    FromStage,
    Part,
    Plan,
    SourcePlan,
    StagePlan,
    WorkerSourcePlan,
)
from flux.dataflow.sink import FlowTo, flow_of
from flux.errors import UsageError
from flux.settings import Settings
from spark_integration.growing.kept_versions import PlanRecord
from spark_integration.query.checkpoint_location import CheckpointLocation

#: Stages that a message names.
NAMED = 8
#: Compiles flows into a version, on top of an earlier one: flows, the earlier plan, the number of the version, its names.
CompileVersion = Callable[[Sequence[Flow | FlowTo], CompiledPlan, int, KeptNames], CompiledPlan]


def compiled_again(
    flows: Sequence[Flow | FlowTo], location: CheckpointLocation, settings: Settings, secret: bytes, found: Resolvers,
    collect: int, workers: int,
) -> tuple[CompiledPlan, CheckpointLocation]:  # fmt: skip
    """Compile flows for a query whose plan has grown in its location (design: same-form): with the ids that the location has.
    Stages that have failed there, and that the program has, begin anew, as a further version: the location that comes back has
    them. ``collect``: partitions of collecting stages, 0: none; ``workers``: the number with which the query began.

    UsageError: the program lacks stages of the location, or has others."""
    kept, about = location.versions, location.about
    assert kept is not None
    assert about is not None
    described = about["plan"]
    new = new_flows(flows, kept, described)
    if strange := [name for _, name in new if name not in kept.failed]:
        it = "it" if len(strange) == 1 else "them"
        raise UsageError(
            f"checkpointLocation={str(location.place)!r} has no stage {some(strange, NAMED)}: start the query without {it}, and "
            f"add {it} to the running query (query.add)"
        )
    beginning = {id(flow) for flow, _ in new}

    def compiles(given: Sequence[Flow | FlowTo], earlier: CompiledPlan, version: int, names: KeptNames) -> CompiledPlan:
        return compiled_version(given, earlier, found, version, location.partitions, names, 0 if version else collect)

    empty = Plan(location.query or "", ById(), ById(), ById(), settings, secret)
    made = grown_again([flow for flow in flows if id(flow) not in beginning], kept, described, empty, compiles)
    ascending = all(edge.stage < edge.consumer for edge in made.plan.edges if isinstance(edge, FromStage))
    if not ascending or {stage.name for stage in made.plan.stages} != described["stages"].keys():
        location.check(made.plan)
        raise UsageError(f"checkpointLocation={str(location.place)!r} is that of another plan: stages read others")
    if not new:
        return made, location
    addition = compiled_addition([flow for flow, _ in new], made, found)
    check_addition(addition)
    for edge in addition.change.edges:
        if not isinstance(edge, FromSource) or edge.source not in made.plan.sources:
            continue
        source = made.plan.sources[edge.source]
        if not isinstance(source, WorkerSourcePlan):
            stage = addition.made.plan.stages[edge.consumer].name
            raise UsageError(
                f"stage {stage} has failed, and it reads source {source.name}, which goes on and is read by Spark: its rows are "
                "numbered for the stages of the start. Leave the stage out"
            )
    addition = addition.with_log_shares(workers)
    return addition.made, location.with_new(addition.made.plan, [stage.name for stage in addition.change.stages])


def grown_again(
    flows: Sequence[Flow | FlowTo],
    kept: PlanRecord,
    described: Mapping[str, Any],
    empty: Plan,
    compiles: CompileVersion,
) -> CompiledPlan:
    """Return the newest version of a plan that has these flows. ``kept``: the versions of its location; ``described``: the
    description of the plan there; ``empty``: a plan without parts, with the settings of the query. The result may lack parts of
    the description, or differ from it otherwise, which the caller checks."""
    finder = _StageFinder(kept, described)
    versions = finder.versions(flows)
    every = topological([flow_of(given) for given in flows])
    made = CompiledPlan(replace(empty, version=-1))
    of_stages = {version for flow in every if (version := finder.since(flow)) is not None}
    for version in sorted(of_stages.union(each for each in versions if isinstance(each, int))):
        given = [flow for flow, of in zip(flows, versions, strict=True) if of == version]
        inner = _inner([flow for flow in every if finder.since(flow) == version], given)
        made = compiles([*inner, *given], made, version, _names(kept, described, version))
    return _renumbered(made, kept)


def _inner(stages: Sequence[Flow], given: Sequence[Flow | FlowTo]) -> list[Flow]:
    """Return those of a version's stages that none of its flows needs: their readers of that version are gone, and the present
    ones came later. The last one stands for those before it."""
    covered = {id(flow) for flow in topological([flow_of(each) for each in given])}
    left = [flow for flow in stages if id(flow) not in covered]
    before = {id(flow) for each in left for flow in topological([of for of in each.inputs if isinstance(of, Flow)])}
    return [flow for flow in left if id(flow) not in before]


def new_flows(
    flows: Sequence[Flow | FlowTo], kept: PlanRecord, described: Mapping[str, Any]
) -> list[tuple[Flow | FlowTo, str]]:
    """Return the flows that a location does not have, each with the name of a stage that it lacks."""
    found = _StageFinder(kept, described).versions(flows)
    return [(flow, of) for flow, of in zip(flows, found, strict=True) if isinstance(of, str)]


def _names(kept: PlanRecord, described: Mapping[str, Any], version: int) -> KeptNames:
    stages = frozenset(name for name, stage in kept.stages.items() if stage.since == version)
    sinkless = frozenset(name for name in stages if not described["stages"][name]["sink"])
    return KeptNames(kept.gone_in(version), stages, sinkless)


class _StageFinder:
    """A search for the stages of a program's flows in a location, by their names."""

    def __init__(self, kept: PlanRecord, described: Mapping[str, Any]) -> None:
        self._kept, self._stages = kept, described["stages"]
        self._free = set(kept.stages)
        #: By flow: the name of its stage; None: it has none of its own.
        self._name_of: dict[int, str | None] = {}
        #: Stages whose own sink has been found.
        self._sinks: set[str] = set()

    def since(self, flow: Flow) -> int | None:
        """Return the version of the stage of a flow, after ``versions``. None: it has none of its own."""
        name = self._name_of.get(id(flow))
        return None if name is None else self._kept.stages[name].since

    def versions(self, flows: Sequence[Flow | FlowTo]) -> list[int | str]:
        """Return the version of each flow: that of the newest stage that it needs. A text is the name of a stage that the
        location lacks."""
        return [self._version(given) for given in flows]

    def _version(self, given: Flow | FlowTo) -> int | str:
        end = flow_of(given)
        place = given.sink.destination() if isinstance(given, FlowTo) else None
        order = topological([end])
        before_chained = {id(flow.inputs[0]) for flow in order if flow.stage.chained}
        found = [
            self._stage_of(flow, flow is end or id(flow) in before_chained, place if flow is end else None)
            for flow in order
        ]
        names = [name for name in found if name is not None]
        own = self._name_of[id(end)]
        if not names or not (own or end.stage.passes or end.stage.chained):
            return end.stage.name
        if isinstance(given, FlowTo):
            sink = self._sink_of(names[-1], place)
            if sink is None:
                return f"{names[-1]}.sink"
            names.append(sink)
        return max(self._kept.stages[name].since for name in names)

    def _stage_of(self, flow: Flow, needed: bool, place: str | None) -> str | None:
        """Return the stage of a flow. Conditions and columns have one only where it is ``needed``, if then. ``place``: the
        destination of its sink."""
        if id(flow) not in self._name_of:
            if flow.stage.passes and not needed:
                return None
            found = sorted(self._candidates(flow.stage.name), key=partial(self._goes_elsewhere, place))
            self._name_of[id(flow)] = found[0] if found else None
            self._free.difference_update(found[:1])
        return self._name_of[id(flow)]

    def _sink_of(self, giver: str, place: str | None) -> str | None:
        """Return the stage with the sink of a flow: the one that gives the rows, or one that was made for the sink. One that
        writes to the same place comes first. None: there is none."""
        sinks = [giver] if self._stages[giver]["sink"] and giver not in self._sinks else []
        sinks += self._candidates(f"{giver}.sink")
        sinks.sort(key=partial(self._goes_elsewhere, place))
        if not sinks:
            return None
        self._sinks.add(sinks[0])
        self._free.discard(sinks[0])
        return sinks[0]

    def _goes_elsewhere(self, place: str | None, stage: str) -> bool:
        return bool(self._stages[stage]["destination"] != place)

    def _candidates(self, name: str) -> Iterator[str]:
        """Yield the free stages of a name, or of this name with a number behind it, the oldest first."""
        numbered = re.compile(re.escape(name) + r"(#\d+)?")
        found = [each for each in self._free if numbered.fullmatch(each)]
        yield from sorted(found, key=lambda each: self._kept.stages[each].number)


def _renumbered(compiled: CompiledPlan, kept: PlanRecord) -> CompiledPlan:
    """Return a plan with the ids, versions and shares of log that its parts have in a location. Parts that the location lacks get
    ids behind all others."""
    plan, spare = compiled.plan, [count(each) for each in kept.used]
    sources = _Ids({name: each.number for name, each in kept.sources.items()}, spare[0])
    stages = _Ids({name: each.number for name, each in kept.stages.items()}, spare[1])
    source_of = {source.id: sources.of(source.name) for source in plan.sources}
    stage_of = {stage.id: stages.of(stage.name) for stage in plan.stages}
    edge_of: dict[int, int] = {}
    edges = []
    for stage in plan.stages:
        known = kept.stages.get(stage.name)
        for at, edge in enumerate(stage.edges_in):
            there = known is not None and at < len(known.edges)
            edge_of[edge] = known.edges[at] if known is not None and there else next(spare[2])
            share = known.log_bytes[at] if known is not None and there else None
            moved = _moved(plan.edges[edge], source_of, stage_of)
            since = 0 if known is None else known.since
            edges.append(replace(moved, id=edge_of[edge], log_bytes=share, since=since))
    made = replace(
        plan,
        sources=_by_id(_kept_source(source, source_of[source.id], kept) for source in plan.sources),
        stages=_by_id(_kept_stage(stage, stage_of[stage.id], edge_of, kept) for stage in plan.stages),
        edges=_by_id(edges),
        version=kept.version,
        first_streams=kept.first_streams,
        used=kept.used,
    )
    return CompiledPlan(
        made,
        {stage_of[id_]: each for id_, each in compiled.flows.items()},
        {source_of[id_]: each for id_, each in compiled.sources.items()},
        {stage_of[id_]: each for id_, each in compiled.rows.items()},
        {source_of[id_]: each for id_, each in compiled.declared.items()},
        {stage_of[id_]: each for id_, each in compiled.sinks.items()},
    )


class _Ids:
    """Ids by name. A name that is not known gets a spare one."""

    def __init__(self, known: Mapping[str, int], spare: Iterator[int]) -> None:
        self._known, self._spare = known, spare

    def of(self, name: str) -> int:
        return self._known[name] if name in self._known else next(self._spare)


def _by_id(parts: Iterable[Part]) -> ById[Part]:
    return ById(sorted(parts, key=lambda part: part.id))


def _moved(edge: EdgePlan, source_of: Mapping[int, int], stage_of: Mapping[int, int]) -> EdgePlan:
    """Return an edge with the new ids of its origin and its consumer."""
    edge = replace(edge, consumer=stage_of[edge.consumer])
    if isinstance(edge, FromStage):
        return replace(edge, stage=stage_of[edge.stage])
    assert isinstance(edge, FromSource)
    return replace(edge, source=source_of[edge.source])


def _kept_stage(stage: StagePlan, number: int, edge_of: Mapping[int, int], kept: PlanRecord) -> StagePlan:
    known = kept.stages.get(stage.name)
    return replace(
        stage,
        id=number,
        edges_in=tuple(edge_of[edge] for edge in stage.edges_in),
        # A stage gets edges in the order of their ids, and loses some.
        edges_out=tuple(sorted(edge_of[edge] for edge in stage.edges_out)),
        first_edges=None if known is None else tuple(known.first_edges),
        since=0 if known is None else known.since,
    )


def _kept_source(source: SourcePlan, number: int, kept: PlanRecord) -> SourcePlan:
    """Return a source with its id, and the columns that are compared when its rows are read again: those of its first edges, some
    of which may be gone."""
    known = kept.sources.get(source.name)
    if known is None:
        return replace(source, id=number)
    columns = None if known.read is None else tuple(known.read)
    first = FromSource(0, 0, 0, (), source.schema, 1, 0, number, columns=columns)
    return replace(source, id=number, first_edges=(first,), since=known.since)
