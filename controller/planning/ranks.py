"""Ranks and duplicates in a plan: the operator, the key and the steps in front that a declaration makes of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from controller.planning.event_time_edges import InputTime
from controller.planning.names import check_names, place_of_errors
from flux.dataflow.plan import DataFrameSourcePlan, EdgePlan, FromStage, SourcePlan, StagePlan
from flux.dataflow.relations.ranking import RankFlow, RankInput, ResolvedRanking, ToOrder


class Nodes:
    """The sources, stages and edges that a plan has by now."""

    def __init__(self, sources: Sequence[SourcePlan], stages: Sequence[StagePlan], edges: Sequence[EdgePlan]) -> None:
        self.sources, self.stages, self.edges = sources, stages, edges

    def delay_of(self, origin: SourcePlan | StagePlan) -> int:
        """Return the most microseconds by which rows may be late in any source behind an origin of rows."""
        if isinstance(origin, SourcePlan):
            return 0 if (time := self.sources[origin.id].event_time) is None else time.delay
        edges = [self.edges[number] for number in origin.edges_in]
        return max((self.delay_of(self._origin(edge)) for edge in edges), default=0)

    def all_end(self, origin: SourcePlan | StagePlan) -> bool:
        """Return whether all rows of an origin come from batch DataFrames."""
        if isinstance(origin, SourcePlan):
            return isinstance(origin, DataFrameSourcePlan)
        return all(self.all_end(self._origin(self.edges[number])) for number in origin.edges_in)

    def _origin(self, edge: EdgePlan) -> SourcePlan | StagePlan:
        return self.stages[edge.stage] if isinstance(edge, FromStage) else self.sources[edge.source]  # type: ignore[attr-defined]


def resolved_ranking(
    flow: RankFlow, inputs: Sequence[tuple[pa.Schema, InputTime]], nodes: Nodes, to_order: ToOrder | None
) -> ResolvedRanking:
    """Return the ranking of a flow over inputs. UsageError names the stage."""
    where = f"stage {flow.stage.name}"
    given = []
    for schema, time in inputs:
        check_names(schema, where)
        kind = "source" if isinstance(time.origin, SourcePlan) else "stage"
        name, delay = f"{kind} {time.origin.name}", nodes.delay_of(time.origin)
        given.append(RankInput(schema, name, tuple(time.kept), time.columns, delay))
    with place_of_errors(where):
        return flow.declared.resolved(given, to_order)
