"""The checkers can fail: each deliberately broken variant of moves is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import controller.sweeping
from controller.membership import Membership
from controller.moves import drop, make_live
from controller.state import Controller
from partitioning.table import Table
from tests.simulation.operators import Habits
from tests.simulation.run import Result, Simulation, outcome

Patch = pytest.MonkeyPatch

#: Somebody moves something all the time.
RESTLESS = Habits(asks_per_s=50.0, drains=0.05)
SEEDS_MAX = 60


def drops_the_source_before_the_target_is_safe(patch: Patch) -> None:
    """Live is taken for safe."""
    caught_up = Controller._caught_up

    def broken(self: Controller, message: Any, now: float) -> None:
        caught_up(self, message, now)
        addition = self.repairs.under_way.get((message.stage, message.partition))
        if addition is not None and addition.phase == "live" and addition.source is not None:
            self.repairs.under_way.pop(addition.key)
            assert self.table is not None
            self.moving.finish(addition, now)
            self._publish(drop(self.table, *addition.key, addition.source))

    patch.setattr(Controller, "_caught_up", broken)


def the_target_leads_before_it_is_safe(patch: Patch) -> None:
    def broken(table: Table, stage: int, partition: int, worker: int) -> Table:
        changed = make_live(table, stage, partition, worker)
        rows = list(changed.stages[stage])
        rows[partition] = tuple(sorted(rows[partition], key=lambda replica: replica.worker != worker))
        stages = (*changed.stages[:stage], tuple(rows), *changed.stages[stage + 1 :])
        return Table(changed.epoch, stages, changed.sources, changed.endpoints)

    patch.setattr(controller.sweeping, "make_live", broken)


def who_leaves_gets_new_replicas(patch: Patch) -> None:
    obstacle = Membership.obstacle

    def broken(self: Membership, worker: int, *given: Any) -> str | None:
        member = self.workers.get(worker)
        if member is None or not member.leaving:
            return obstacle(self, worker, *given)
        member.leaving = False
        try:
            return obstacle(self, worker, *given)
        finally:
            member.leaving = True

    patch.setattr(Membership, "obstacle", broken)


def a_move_is_forgotten_when_its_target_is_lost(patch: Patch) -> None:
    patch.setattr("controller.moving.Moving._again", lambda *given: None)


def moves_begin_as_they_were_asked_for(patch: Patch) -> None:
    """Not stage by stage."""
    next_ = controller.moving.Moving.next

    def broken(self: Any, *given: Any) -> Any:
        self.pending.reverse()
        return next_(self, *given)

    patch.setattr("controller.moving.Moving.next", broken)


@pytest.mark.parametrize(
    ("break_it", "law"),
    [
        (drops_the_source_before_the_target_is_safe, "no move costs a safe copy"),
        (the_target_leads_before_it_is_safe, "a primary is safe"),
        (who_leaves_gets_new_replicas, "who leaves gets nothing new"),
        (a_move_is_forgotten_when_its_target_is_lost, "every move ends"),
        (moves_begin_as_they_were_asked_for, "moves keep the topological order"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_variant_of_moves_is_caught(break_it: Callable[[Patch], None], law: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        caught = _first_caught()
    assert caught is not None, f"{break_it.__name__} got through {SEEDS_MAX} runs"
    assert caught.law == law, str(caught)
    assert _run(caught.seed).ok, "the unbroken code keeps the laws under the same seed"


def _first_caught() -> Result | None:
    return next((result for result in map(_run, range(SEEDS_MAX)) if not result.ok), None)


def _run(seed: int) -> Result:
    return outcome(Simulation(seed, habits=RESTLESS))
