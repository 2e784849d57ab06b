"""Ranks and duplicates in a plan: the operator, the key and the steps in front that a declaration makes of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from controller.planning.event_time_edges import InputTime
from controller.planning.names import check_names, place_of_errors
from controller.planning.parts import Nodes
from flux.dataflow.plan import SourcePlan
from flux.dataflow.relations.ranking import RankFlow, RankInput, ResolvedRanking, ToOrder


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
