"""Ids of stages, edges and sources are no positions: a plan whose ids have gaps runs as well (design: plan)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flux.dataflow.plan import ById, EdgePlan, FromSource, FromStage, Plan
from tests.simulation import run as simulation


def stage_id(number: int) -> int:
    return 2 * number + 1


def edge_id(number: int) -> int:
    return 3 * number + 2


def with_gaps(plan: Plan) -> Plan:
    """Return the plan with gaps between its ids, as if parts with other ids had been removed."""

    def edge(given: EdgePlan) -> EdgePlan:
        match given:
            case FromStage():
                given = replace(given, stage=stage_id(given.stage))
            case FromSource():
                given = replace(given, source=stage_id(given.source))
        return replace(given, id=edge_id(given.id), consumer=stage_id(given.consumer))

    stages = ById(
        replace(
            stage,
            id=stage_id(stage.id),
            edges_in=tuple(map(edge_id, stage.edges_in)),
            edges_out=tuple(map(edge_id, stage.edges_out)),
        )
        for stage in plan.stages
    )
    sources = ById(replace(source, id=stage_id(source.id)) for source in plan.sources)
    return replace(plan, stages=stages, edges=ById(map(edge, plan.edges)), sources=sources)


@pytest.mark.parametrize("seed", [5000, 5001, 5012])
def test_a_plan_whose_ids_have_gaps_keeps_every_law(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulation._with_step_timeout
    monkeypatch.setattr(simulation, "_with_step_timeout", lambda plan, timeout: with_gaps(made(plan, timeout)))
    result = simulation.run(seed)
    assert result.ok, str(result)
