"""Availability in a plan: the stages and sources that a bound reaches, and the reasons for which there can be none (design:
availability-reach).

A tentative result of a stage needs tentative rows of the stages before it. So the bound of a stage reaches everything before it,
up to the sources; a stage that several bounds reach has the shortest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from controller.planning.checks import NothingWaits
from controller.planning.event_time_edges import window_of
from controller.planning.parts import Parts
from flux.dataflow.availability import FORFEIT, HOP_US, PACE_US, STOP, Availability, of_settings
from flux.dataflow.plan import EdgePlan, FromMicroBatches, FromSource, FromStage, Plan, SourcePlan, StagePlan
from flux.errors import UsageError
from flux.operators.aggregate import Aggregate
from flux.operators.operator import chain_of
from flux.operators.tentative import BARRIER, tentative_kind
from flux.settings import Settings
from flux.windows.durations import words

LINE = "withWatermark('ts', '10 seconds')"


def set_availability(
    sources: Parts[SourcePlan],
    stages: Parts[StagePlan],
    edges: Parts[EdgePlan],
    asked: Mapping[int, int],
    settings: Settings,
) -> None:
    """Give new sources and stages the availability that reaches them. ``asked``: the bounds that stages ask for themselves, in
    microseconds. UsageError: a stage can have none."""
    default, grown = of_settings(settings), _grown(sources, stages, edges)
    if default is None and not asked:
        return
    found: dict[int, Availability] = {}
    names: dict[int, str] = {}  # by stage: the stage that asks for the bound, or the setting
    for stage in reversed(stages.new):
        wanted: list[tuple[Availability, str]] = []
        states = any(edges[number].states for number in stage.edges_in)
        if stage.id in asked:
            own = of_settings(settings, asked[stage.id])
            assert own is not None
            wanted.append((own, f"stage {stage.name}"))
        elif default is not None and states and stage.id not in grown and _may_show(stage):
            wanted.append((default, "the query"))
        behind = {edges[number].consumer for number in stage.edges_out} & found.keys()
        if states or stage.id in asked:  # otherwise it waits for nothing but the end of its input
            wanted += [(found[each], names[each]) for each in sorted(behind)]
        if wanted:
            strictest, names[stage.id] = min(wanted, key=lambda each: each[0].bound_us)
            depth = max((found[each].stages_behind + 1 for each in behind), default=0)
            found[stage.id] = replace(strictest, stages_behind=depth)
    if not found:
        if not any(map(stages.runs, (each.id for each in stages))):
            _refuse_none(edges)
        return
    for stage in stages.new:
        if stage.id in found:
            if stage.id in grown:
                _refuse_grown(stage, names[stage.id])
            _check(stage, found[stage.id], names[stage.id], sources, stages, edges)
    if settings.watermark_drift:
        raise UsageError(
            "spark.flux.watermark.drift lets partitions wait for the one that is farthest behind, and availability is there to "
            "go on without it: leave one of them out"
        )
    reached = _sources(found, edges)
    for number in sorted(reached):
        _check_source(sources[number])
    if settings.availability_overflow == FORFEIT:
        _forfeiting(found, sources, stages, edges)
    for source in sources.new:
        sources[source.id] = replace(source, may_be_silent=source.id in reached)
    for stage in stages.new:
        stages[stage.id] = replace(stage, availability=found.get(stage.id))


#: Options that say how availability is kept, and nothing without it.
_HOW = tuple(f"availability_{each}" for each in ("failure", "stabilization", "overflow", "max_state"))


def told_unused(plan: Plan, options: Iterable[str]) -> str | None:
    """Return a note about options of a start that have no effect, because no stage of its plan has availability; None: there are
    none. It is no mistake: a stage that is added to the running query may ask for availability."""
    given = [name for name in _HOW if name in options]
    if not given or any(stage.availability is not None for stage in plan.stages):
        return None
    has = "this has" if len(given) == 1 else "these have"
    return (
        f"{', '.join(given)} without availability: no stage of this query has a bound on its results, so {has} no "
        "effect. Give the query the bound, as in availability='3s', or a stage its own"
    )


def _grown(sources: Parts[SourcePlan], stages: Parts[StagePlan], edges: Parts[EdgePlan]) -> set[int]:
    """Return the new stages that read parts which run already, near or far."""
    grown: set[int] = set()
    for stage in stages.new:  # each after its inputs
        for edge in map(edges.__getitem__, stage.edges_in):
            if isinstance(edge, FromStage):
                old = stages.runs(edge.stage) or edge.stage in grown
            else:
                assert isinstance(edge, FromSource)
                old = sources.runs(edge.source)
            if old:
                grown.add(stage.id)
    return grown


def _refuse_none(edges: Iterable[EdgePlan]) -> NoReturn:
    """Raise UsageError: no stage of a query can have the availability that its settings ask for."""
    if any(edge.states for edge in edges):
        raise UsageError(
            "availability is a bound on results, and the only stages of this query that wait for a watermark give their rows "
            "to a sink that takes stable ones alone: leave availability out"
        )
    raise UsageError(
        "availability bounds the time to results that wait for a watermark, and no source of this query tells one before its "
        f"end: declare it, source.{LINE}, for a source that workers read (a DataFrame tells none), or leave availability out"
    )


def _refuse_grown(stage: StagePlan, asks: str) -> NoReturn:
    asks = "it" if asks == f"stage {stage.name}" else asks
    raise UsageError(
        f"stage {stage.name}: {asks} asks for availability, which reaches all stages before it, and one of these runs and keeps "
        "its own. Leave availability out, and the added stage gives stable results; or read the input by a source of its "
        "own; or start the query anew with the stage in it"
    )


def _forfeiting(
    found: dict[int, Availability],
    sources: Parts[SourcePlan],
    stages: Parts[StagePlan],
    edges: Parts[EdgePlan],
) -> None:
    """Let the stages forfeit that can: windows that read sources themselves (design: forfeit). UsageError: there are none."""
    able = set()
    for stage in stages.new:
        mine = [edges[number] for number in stage.edges_in]
        if stage.id in found and window_of(chain_of(stage.make())[0]) is not None:
            idle = [
                sources[edge.source]
                for edge in mine
                if isinstance(edge, FromSource) and (time := sources[edge.source].event_time) is not None and time.idle
            ]
            if idle:
                raise UsageError(
                    f"source {idle[0].name} has idle=, and availability_overflow='forfeit' closes the windows of stage "
                    f"{stage.name} without a partition, too, after a while: rows that are left out could not be told apart. "
                    "Leave one of them out"
                )
            if all(isinstance(edge, FromSource) for edge in mine) and not stage.at_marks:
                able.add(stage.id)
    if not able or any(each.max_state is None for each in found.values()):
        raise UsageError(
            "availability_overflow='forfeit' closes windows without the inputs that are missing when the state of a worker is "
            "beyond availability_max_state, so it needs that limit, as in availability_max_state='1g', and a stage with windows, "
            "not with order='marks', whose inputs are sources: conditions and columns in front of it are where(...) and "
            "select(...) of the source"
        )
    found |= {stage: replace(each, overflow=FORFEIT if stage in able else STOP) for stage, each in found.items()}


def _may_show(stage: StagePlan) -> bool:
    """Tell whether a stage may have tentative results. One that may not and has nothing behind it, as the files of a folder, is
    no mistake: it gets stable rows alone."""
    return stage.output_schema is not None and tentative_kind(stage.make()) != BARRIER


def _sources(found: Mapping[int, Availability], edges: Parts[EdgePlan]) -> set[int]:
    return {edge.source for edge in edges if isinstance(edge, FromSource) and edge.consumer in found}


def _check(
    stage: StagePlan,
    availability: Availability,
    asks: str,
    sources: Parts[SourcePlan],
    stages: Parts[StagePlan],
    edges: Parts[EdgePlan],
) -> None:
    """Raise UsageError if a stage cannot have the availability that ``asks`` asks for."""
    asks = "it" if asks == f"stage {stage.name}" else asks
    operator = stage.make()
    if stage.output_schema is None:
        raise UsageError(
            f"stage {stage.name}: availability is a bound on results, and its operator gives none. End the flow in a sink that "
            "takes tentative rows, a flux.Sink that defines tentative()"
        )
    if isinstance(chain_of(operator)[0], Aggregate) and stage.output_mode == "complete":
        raise UsageError(
            f'stage {stage.name} has output_mode="complete": it gives its groups once, when all input has ended, so there is no '
            f'result that could be late, and {asks} asks for availability. Say output_mode="append" with a window, or "update"'
        )
    mine = [edges[number] for number in stage.edges_in]
    for edge in mine:
        if isinstance(edge, FromMicroBatches):
            raise UsageError(
                f"stage {stage.name}: {asks} asks for availability, and source {sources[edge.source].name} comes in "
                "micro-batches of Structured Streaming. Nothing is sent between two batches, and Spark's own query decides when "
                "the next one begins, so a late batch and a missing input cannot be told apart. Read the input inside the "
                "workers: flux.kafka, flux.files, flux.datasource"
            )
    if not any(edge.states for edge in mine):
        raise NothingWaits(
            f"stage {stage.name}: {asks} asks for availability, which bounds the time to results that wait for a watermark, and "
            f"no input of the stage {_lacks(mine, sources, stages)}"
        )
    if tentative_kind(operator) == BARRIER:
        raise UsageError(
            f"stage {stage.name} is a barrier: no event time decides its output, so there are no tentative results of it, and "
            f"{asks} asks for availability, which needs them from each stage before. Use windows of event time there, or leave "
            "availability out"
        )
    _check_bound(stage, availability, mine)


def _lacks(mine: Sequence[EdgePlan], sources: Parts[SourcePlan], stages: Parts[StagePlan]) -> str:
    """Tell why no input of a stage has a watermark before its end, and what to write."""
    origins = [stages[edge.stage] if isinstance(edge, FromStage) else edge for edge in mine]
    timed = [
        sources[each.source].name
        for each in origins
        if isinstance(each, FromSource) and sources[each.source].event_time is not None and not each.producers_known
    ]
    if timed:
        return f"tells one before its end: source {timed[0]} is a DataFrame. Read it inside the workers, as with flux.files"
    return (
        f"has one. Declare it where rows are read: source.{LINE}. A stage that keeps a time says so: "
        "@flux.stage(event_time='ts')"
    )


def _check_bound(stage: StagePlan, availability: Availability, mine: Sequence[EdgePlan]) -> None:
    """Raise UsageError if a bound is too short: partitions whose rows come once a quantum would be missing while nothing fails
    (design: availability-least)."""
    quantum = min(max(edge.quantum for edge in mine), PACE_US)
    hops = max(2, availability.stages_behind + 1)
    least = 2 * quantum + hops * HOP_US
    if availability.bound_us < least:
        steps = f"two steps of its windows ({words(quantum)} each, at most) and " if quantum else ""
        raise UsageError(
            f"stage {stage.name}: availability of {words(availability.bound_us)} is shorter than {steps}{hops} hops between "
            f"workers ({words(HOP_US)} each): say {words(least)} or more"
        )


def _check_source(source: SourcePlan) -> None:
    if source.event_time is not None and source.event_time.advance:
        raise UsageError(
            f"source {source.name}: advance=True lets the watermark of an idle partition go on with the clock, so what comes "
            "later is late for good, and availability gives tentative results and corrects them: leave one of them out"
        )
