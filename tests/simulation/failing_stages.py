"""Runs in which stages come, go and fail all the time, under all other faults: only a failed stage ends, with what depends on it
(design: stage-fails)."""

from __future__ import annotations

import random
from dataclasses import replace

from flux.errors import QueryFailed
from tests.simulation import flows, growing
from tests.simulation.checkers import Ledger
from tests.simulation.mixes import ANY, Mix

#: The share of looks at which a stage fails.
FAILS = 0.15


class FailingFlow(growing.GrowingFlow):
    """A dataflow whose stages end alone."""

    def __call__(self, ledger: Ledger) -> flows.Dataflow:
        flow = super().__call__(ledger)
        settings = replace(flow.plan.settings, on_failure="stage")
        return replace(flow, plan=replace(flow.plan, settings=settings))


class FailingSimulation(growing.GrowingSimulation):
    """A run with changes of the plan, in which stages of later versions fail."""

    def __init__(self, seed: int, mix: Mix = ANY) -> None:
        self._fails = random.Random(f"failing {seed}")
        super().__init__(seed, mix)

    def _look(self) -> None:
        board = self.controller.board
        later = [stage.id for stage in board.plan.stages if stage.since]
        if board.phase == "running" and later and not self._sealed and self._fails.random() < FAILS:
            board.fail(QueryFailed("it has failed"), [self._fails.choice(later)])
            self.counts["stages failed"] += 1
        super()._look()
