"""Streams and replicas that stand still: every run measures the time, for each replica alone.

Variants break the laws: ``greets_again_much_too_late``, ``keeps_who_stands_still``.
"""

from __future__ import annotations

import pytest

from tests.simulation.mixes import STANDING, UNEVEN
from tests.simulation.run import Simulation, run
from tests.simulation.runs import LONG
from tests.simulation.stage_kinds import Watched
from tests.simulation.test_claims import PATIENT, applied, begun, run_for, simulation
from tests.simulation.violation import Violation


def test_it_is_measured() -> None:
    sim = Simulation(0, UNEVEN.faults, UNEVEN.copies, UNEVEN.slots)
    sim.run()
    assert sim.stalls.worst[0] > 0.0


def test_who_stands_still_for_too_long_is_dropped_and_nothing_else_breaks() -> None:
    results = [run(seed, STANDING) for seed in range(30 if LONG else 9)]
    assert not [str(result) for result in results if not result.ok]
    assert sum(result.counts["replicas that stood still"] for result in results) > 1.5 * len(results)


def test_a_secondary_that_gets_no_rows_is_seen_although_its_primary_goes_on() -> None:
    sim = simulation((Watched,), slots=3, partitions=1, batches=4000, faults=PATIENT, resend_timeout=0.05)
    sim.run_until(lambda: begun(sim))
    key = (0, 0)
    core = next(core for core in sim.hosts() if key in core.replicas and not core.replicas[key].primary)
    for inbound in core.subscriptions.of(core.replicas[key]):
        inbound.take = lambda *given: []  # type: ignore[method-assign]
    before = applied(sim)[key]
    run_for(sim, sim.stalls.limit_s - 0.3)
    where = f"secondary 0/0 of worker {core.worker}"
    stood = [sim.world.now - standing.since for standing in sim.stalls._standing.values() if where in standing.what]
    assert max(stood) > sim.stalls.limit_s - 0.6
    assert applied(sim)[key] > before + 100
    with pytest.raises(Violation, match="no stream stands still"):
        run_for(sim, 1.0)
