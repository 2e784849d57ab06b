"""Deliberately broken variants of moves: each takes away one rule."""

from __future__ import annotations

from typing import Any

import pytest

import controller.sweeping
from controller.membership import Membership
from controller.moves import drop, make_live
from controller.state import Controller
from partitioning.table import Table

Patch = pytest.MonkeyPatch


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


def a_target_stays_beside_a_source_on_its_own_executor(patch: Patch) -> None:
    """Where the other copy was lost meanwhile."""
    patch.setattr(Controller, "_keep_apart", lambda *given: None)
