"""Simulated runs whose windows close without a silent source: laws, and variants that break them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from flux.replica.event_clock import Forfeits
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.worker.watermarks import WatermarkScheduler
from tests.simulation.faults import Faults
from tests.simulation.forfeiting import ALIKE, ANSWERS, FORFEITS_FROM, TOLD, ForfeitSimulation
from tests.simulation.violation import Violation


def test_runs_that_forfeit_keep_all_laws() -> None:
    counts: Counter[str] = Counter()
    for seed in (2, 4, 6, 8):
        sim = ForfeitSimulation(FORFEITS_FROM + seed)
        sim.run()
        counts.update(sim.counts)
    assert counts["forfeited rows"] > 20
    assert counts["steps behind a forfeit"] > 100


def forgets_what_was_forfeited(patch: pytest.MonkeyPatch) -> None:
    """Begin a copy of a replica without the forfeited spans and their counts."""
    state = Replica.state
    patch.setattr(Replica, "state", lambda self: {k: v for k, v in state(self).items() if k != "forfeits"})


def takes_it_for_a_watermark(patch: pytest.MonkeyPatch) -> None:
    """Let a secondary take a forfeiting step for any other one."""
    close = Forfeits.close
    call = Replica.call

    def broken(self: Replica, step: ReplicaStep) -> Any:
        patch.setattr(Forfeits, "close", close if self.primary else lambda *given: None)
        return call(self, step)

    patch.setattr(Replica, "call", broken)


def goes_past_streams_that_move(patch: pytest.MonkeyPatch) -> None:
    """Let a primary close windows up to the foremost stream."""
    standing = WatermarkScheduler._standing

    def broken(self: WatermarkScheduler, *given: Any) -> Any:
        found, moving = standing(self, *given)
        return found, [max(moving, default=0)]

    patch.setattr(WatermarkScheduler, "_standing", broken)


def counts_only_while_it_leads(patch: pytest.MonkeyPatch) -> None:
    """Count rows at the primary only."""
    count = Forfeits.count
    each = Replica._count

    def broken(self: Replica, step: ReplicaStep) -> None:
        patch.setattr(Forfeits, "count", count if self.primary else lambda *given: None)
        each(self, step)

    patch.setattr(Replica, "_count", broken)


@pytest.mark.parametrize(
    ("variant", "laws", "first"),
    [
        (forgets_what_was_forfeited, {ALIKE, TOLD}, 8),
        (takes_it_for_a_watermark, {ALIKE, TOLD}, 4),
        (goes_past_streams_that_move, {TOLD, ANSWERS}, 2),
        (counts_only_while_it_leads, {ALIKE, TOLD}, 4),
    ],
)
def test_each_law_is_broken_without_its_rule(
    variant: Callable[[pytest.MonkeyPatch], None], laws: set[str], first: int
) -> None:
    """Try seeds until one shows the variant, beginning with one that has shown it."""
    for seed in range(first, first + 20):
        with pytest.MonkeyPatch.context() as patch:
            variant(patch)
            try:
                ForfeitSimulation(
                    FORFEITS_FROM + seed, Faults() if variant is goes_past_streams_that_move else None
                ).run()
            except Violation as violation:
                found = violation.law
                break
    else:
        raise AssertionError(f"no seed shows {variant.__name__}")
    assert found in laws
