"""How long streams stand still is measured in every run; where it is a law, a variant breaks it."""

from __future__ import annotations

from tests.simulation.mixes import UNEVEN
from tests.simulation.run import Simulation


def test_it_is_measured_where_it_does_not_count() -> None:
    sim = Simulation(0, UNEVEN.faults, UNEVEN.copies, UNEVEN.slots)
    sim.run()
    assert sim.stalls.worst[0] > 0.0
