"""Failing stages, among other faults: a stage takes along the stages that depend on it, and no other (design: stage-fails)."""

from __future__ import annotations

import pytest

from tests.simulation import growing
from tests.simulation.failing_stages import FailingFlow, FailingSimulation
from tests.simulation.run import GROWS_FROM, outcome
from tests.simulation.runs import LONG

#: Seeds; for ``make test``, seeds in which much happens in little time.
SEEDS = range(GROWS_FROM + 200, GROWS_FROM + 300) if LONG else [GROWS_FROM + each for each in (200, 205)]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_stage_whose_replicas_cannot_be_made_again_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "GrowingFlow", FailingFlow)
    failed = 0
    for seed in range(GROWS_FROM + 300, GROWS_FROM + 330):
        simulation = FailingSimulation(seed, shuts=True)
        result = outcome(simulation)
        assert result.ok, str(result)
        plans = simulation.controller.plans
        failed += sum("no such table" in each.error for each in plans.failed.values())
        assert not {stage.name for stage in simulation.controller.plan.stages if stage.since == 0} & set(plans.failed)
    assert failed > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_depends_on_a_failed_stage_ends(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "GrowingFlow", FailingFlow)
    simulation = FailingSimulation(seed)
    result = outcome(simulation)
    assert result.ok, str(result)
    assert result.counts["stages failed"] > 0
    plans, plan = simulation.controller.plans, simulation.controller.plan
    assert plans.failed
    assert not {stage.name for stage in plan.stages if stage.since == 0} & set(plans.failed), "the first stages go on"
    assert not {stage.stage for stage in plans.failed.values()} & {stage.id for stage in plan.stages}
    table = simulation.controller.table
    assert table is None or all(not table.stages[each.stage] for each in plans.failed.values())
