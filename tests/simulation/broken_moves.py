"""Deliberately broken variants of moves: each takes away one rule."""

from __future__ import annotations

from typing import Any

import pytest

import controller.decide.sweep
from controller.decide.sweep import Sweep
from controller.replicas.moves import MoveQueue
from controller.replicas.placement import FarApart
from controller.replicas.table_changes import Change, drop, made_live

Patch = pytest.MonkeyPatch


def drops_the_source_before_the_target_is_safe(patch: Patch) -> None:
    """Drop the source of a move when the target is live, instead of safe."""
    caught_up = Sweep.caught_up

    def broken(self: Sweep, message: Any, now: float) -> None:
        caught_up(self, message, now)
        addition = self.repairs.under_way.get((message.stage, message.partition))
        if addition is not None and addition.phase == "live" and addition.from_worker is not None:
            self.repairs.under_way.pop(addition.key)
            assert self.board.table is not None
            self.moving.finish(addition, now)
            self.board.publish(drop(self.board.table, *addition.key, addition.from_worker))

    patch.setattr(Sweep, "caught_up", broken)


def the_target_leads_before_it_is_safe(patch: Patch) -> None:
    def broken(worker: int) -> Change:
        live = made_live(worker)
        return lambda replicas: tuple(sorted(live(replicas), key=lambda replica: replica.worker != worker))

    patch.setattr(controller.decide.sweep, "made_live", broken)


def who_leaves_gets_new_replicas(patch: Patch) -> None:
    obstacle = FarApart.obstacle

    def broken(self: FarApart, *given: Any) -> str | None:
        leaving, self.leaving = self.leaving, frozenset()
        try:
            return obstacle(self, *given)
        finally:
            self.leaving = leaving

    patch.setattr(FarApart, "obstacle", broken)


def a_move_is_forgotten_when_its_target_is_lost(patch: Patch) -> None:
    patch.setattr("controller.replicas.moves.MoveQueue._again", lambda *given: None)


def moves_begin_as_they_were_asked_for(patch: Patch) -> None:
    """Begin moves in another order than stage by stage."""
    next_ = MoveQueue.next

    def broken(self: Any, *given: Any) -> Any:
        self.pending.reverse()
        return next_(self, *given)

    patch.setattr(MoveQueue, "next", broken)


def a_target_stays_beside_a_source_on_its_own_executor(patch: Patch) -> None:
    """Leave a target beside its source on one executor after the other copy was lost meanwhile."""
    patch.setattr(Sweep, "keep_apart", lambda *given: None)
