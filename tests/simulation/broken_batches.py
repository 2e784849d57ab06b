"""Deliberately broken variants of batches of additions: each takes away one rule (design: batch)."""

from __future__ import annotations

import pytest

from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.additions import Phase

Patch = pytest.MonkeyPatch


def copies_a_batch_at_once(patch: Patch) -> None:
    """Copy all replicas of a batch at once: none waits for its turn."""
    patch.setattr(
        AdditionTracker, "_turns", lambda self, _: [a for a in self.under_way.values() if a.phase == Phase.READY]
    )


def keeps_rows_for_a_turn_that_does_not_come(patch: Patch) -> None:
    """Let a batch wait for its copies however long these take."""
    patch.setattr(AdditionTracker, "waiting_too_long", lambda self, now: [])
