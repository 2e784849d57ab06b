"""Wall clocks that are set while a query runs: time-outs, polls and liveness use the monotonic clock, and do not notice."""

from __future__ import annotations

import pytest

from tests.simulation.faults import Faults
from tests.simulation.flows import chain
from tests.simulation.run import Simulation
from tests.simulation.stage_kinds import Watched

STEP_S = 8.0


def simulation() -> Simulation:
    faults = Faults(patient=True, calm_after_s=1.0)
    return Simulation(0, faults, 2, 3, lambda ledger: chain(ledger, (Watched, Watched), 2))


@pytest.mark.parametrize("step_s", [-STEP_S, STEP_S])
@pytest.mark.parametrize("who", ["all", "one"])
def test_a_wall_clock_that_is_set_stops_nothing_and_nobody_is_given_up(step_s: float, who: str) -> None:
    """Set wall clocks forward or back. A clock set back by 8 s once stopped the query for 8 s."""
    unhurried, sim = simulation(), simulation()
    unhurried.run()

    def set_clocks() -> None:
        for process in sim.workers if who == "all" else sim.workers[:1]:
            process.wall_ahead = step_s

    sim.world.after(0.03, set_clocks)
    sim.run()
    assert sim.controller.error is None
    assert not [event for event in sim.controller.repairs.history if event.kind == "loss"]
    assert sim.world.now - 1000.0 < unhurried.world.now - 1000.0 + 0.5
