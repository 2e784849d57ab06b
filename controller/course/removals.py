"""Removals: the stages that go with a stage or source, and the change of the plan that takes them out (design: removal)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.text import some
from flux.dataflow.plan import EdgePlan, FromSource, FromStage, Plan
from flux.dataflow.plan_change import PlanChange
from flux.errors import UsageError
from flux.expressions.steps import MapRows
from flux.joins.lookup import LookupTable

#: Stages that an error names; further ones are only counted.
NAMED = 8


def dependants(plan: Plan, stages: Iterable[int] = (), sources: Iterable[int] = ()) -> list[int]:
    """Return these stages and all that read them or these sources, near or far, in ascending order."""
    gone, from_sources = set(stages), set(sources)
    for stage in plan.stages:  # in topological order
        for edge in map(plan.edges.__getitem__, stage.edges_in):
            if isinstance(edge, FromStage) and edge.stage in gone:
                gone.add(stage.id)
            if isinstance(edge, FromSource) and edge.source in from_sources:
                gone.add(stage.id)
    return sorted(gone)


def removal(plan: Plan, version: int, name: str, cascade: bool) -> PlanChange:
    """Make the change that removes a stage or a source by its name. A stage takes along those that Flux has made for its sinks;
    ``cascade``: with all that depends on it.

    UsageError: there is no such stage or source, others depend on it, or nothing would be left."""
    stages = [stage.id for stage in plan.stages if stage.name == name]
    sources = [source.id for source in plan.sources if source.name == name] if not stages else []
    if not stages and not sources:
        known = ", ".join(part.name for part in (*plan.stages, *plan.sources))
        raise UsageError(f"cannot remove {name}: there is no such stage or source; there are {known}")
    gone = dependants(plan, stages, sources)
    others = [plan.stages[stage].name for stage in gone if stage not in (*stages, *_for_sinks(plan, stages))]
    if others and not cascade:
        verb = "depends" if len(others) == 1 else "depend"
        raise UsageError(
            f"cannot remove {name}: {some(others, NAMED)} {verb} on it. Remove {'it' if len(others) == 1 else 'them'} first, or "
            "all together with cascade=True (flux remove --cascade)"
        )
    tables = [edge for edge in plan.edges if edge.consumer in gone and looks_up(plan, edge)] if plan.durable else []
    if tables:
        raise UsageError(
            f"cannot remove {name}: rows look up a table on their way to {plan.stages[tables[0].consumer].name}, and the "
            "checkpointLocation keeps tables in the order of the program's start, which would be another one then"
        )
    if len(gone) == len(plan.stages):
        raise UsageError(f"cannot remove {name}: no stage would be left; query.stop() ends the query")
    return without(plan, version, gone, sources)


def _for_sinks(plan: Plan, stages: Sequence[int]) -> list[int]:
    """Return the stages that Flux has made for sinks of these."""
    readers = [edge.consumer for edge in plan.edges if isinstance(edge, FromStage) and edge.stage in stages]
    return [reader for reader in readers if plan.stages[reader].for_sink]


def looks_up(plan: Plan, edge: EdgePlan) -> bool:
    """Tell whether rows look up a table on their way over an edge, or the edge brings the rows of such a table."""
    if isinstance(edge, FromSource) and plan.sources[edge.source].refresh_us:
        return True
    chain = () if edge.steps is None else edge.steps.chain
    return any(isinstance(each, MapRows) and isinstance(each.function, LookupTable) for each in chain)


def without(plan: Plan, version: int, stages: Iterable[int], sources: Iterable[int] = ()) -> PlanChange:
    """Make the change that removes these stages, which no others read, and sources that nothing reads then."""
    gone = sorted(stages)
    edges = [edge for edge in plan.edges if edge.consumer in gone]
    read = {edge.source for edge in plan.edges if isinstance(edge, FromSource) and edge.consumer not in gone}
    unread = {edge.source for edge in edges if isinstance(edge, FromSource)} - read
    return PlanChange(
        version,
        removed_sources=tuple(sorted({*sources, *unread})),
        removed_stages=tuple(gone),
        removed_edges=tuple(edge.id for edge in edges),
        base=plan.version,
    )
