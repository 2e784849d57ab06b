"""Variants in which a change of protection drops replicas too early, or forgets its request."""

from __future__ import annotations

from typing import Any

import pytest

from controller.decide.protection import Protection
from controller.replicas.kinds import surplus
from controller.replicas.protection_wishes import Change

Patch = pytest.MonkeyPatch


def drops_the_old_before_the_new_is_safe(patch: Patch) -> None:
    """Count every listed replica as safe."""

    def too_many(self: Protection, change: Change, key: Any, row: Any) -> list[int]:
        stage = self._board.wishes.plan.stages[key.stage]
        going = {addition.worker for addition in self._repairs.under_way.values() if addition.key == key}
        fit = [replica.worker for replica in surplus(stage, row) if replica.worker not in going]
        return fit if len(row) - len(fit) >= change.least else []

    patch.setattr(Protection, "too_many", too_many)


def drops_more_than_is_too_many(patch: Patch) -> None:
    """Drop all surplus replicas without counting the ones that stay."""

    def too_many(self: Protection, change: Change, key: Any, row: Any) -> list[int]:
        stage = self._board.wishes.plan.stages[key.stage]
        return [] if key in self._repairs.under_way else [replica.worker for replica in surplus(stage, row)]

    patch.setattr(Protection, "too_many", too_many)


def keeps_what_is_too_many(patch: Patch) -> None:
    patch.setattr(Protection, "shed", lambda *given: None)


def a_change_is_over_too_soon(patch: Patch) -> None:
    """End a change when no addition is under way, though some replica is missing."""
    patch.setattr(Protection, "_undone", lambda self, change, table: [key.partition for key in self._repairs.under_way])
