"""Runs in which stages come, go and fail all the time, under all other faults: only a failed stage ends, with the stages that
depend on it (design: stage-fails)."""

from __future__ import annotations

import random
from dataclasses import replace

from flux.errors import QueryFailed
from tests.simulation import flows, growing
from tests.simulation.checkers import Ledger
from tests.simulation.mixes import ANY, Mix

#: The share of looks at which a stage fails, and at which a stage cannot be opened any more, while there are stages of later
#: versions. A stage that cannot be opened fails when one of its replicas is made again, from a copy or from the checkpoint of a
#: standby.
FAILS, SHUTS = 0.15, 0.3


class FailingFlow(growing.GrowingFlow):
    """A dataflow whose stages end alone."""

    def __call__(self, ledger: Ledger) -> flows.Dataflow:
        flow = super().__call__(ledger)
        settings = replace(flow.plan.settings, on_failure="stage")
        return replace(flow, plan=replace(flow.plan, settings=settings))


class FailingSimulation(growing.GrowingSimulation):
    """A run with changes of the plan, in which stages of later versions fail."""

    def __init__(self, seed: int, mix: Mix = ANY, shuts: bool = False) -> None:
        """Prepare a run. ``shuts``: in place of reported errors, some stages cannot be opened any more."""
        self._fails = random.Random(f"failing {seed}")
        self._shuts = random.Random(f"shutting {seed}") if shuts else None
        super().__init__(seed, mix)

    def _look(self) -> None:
        board = self.controller.board
        later = [stage.id for stage in board.plan.stages if stage.since]
        if self._shuts is not None:
            if later and self._shuts.random() < SHUTS:
                growing.shut(board.plan.stages[self._shuts.choice(later)].name, self.seed)
                self.counts["stages shut"] += 1
        elif board.phase == "running" and later and not self._sealed and self._fails.random() < FAILS:
            board.fail(QueryFailed("it has failed"), [self._fails.choice(later)])
            self.counts["stages failed"] += 1
        super()._look()
