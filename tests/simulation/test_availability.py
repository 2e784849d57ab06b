"""Tentative results in simulated runs: sources fall silent, and every law of availability holds."""

from __future__ import annotations

from collections import Counter

from tests.simulation.availability import AVAILABILITY_FROM, AvailabilitySimulation


def test_runs_with_silent_sources_keep_all_laws() -> None:
    counts: Counter[str] = Counter()
    for seed in (1, 2, 4, 5, 8):
        sim = AvailabilitySimulation(AVAILABILITY_FROM + seed)
        sim.run()
        counts.update(sim.counts)
    assert counts["tentative batches shown"] > 20
    assert counts["corrections done"] > 5
