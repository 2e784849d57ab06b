"""Kill after kill, each at full replication: none of them ends a query, and every row is counted once.

Two mechanisms once broke this, and a real run of twenty kills found the first: a move within an executor whose other
copy was lost, so that both copies that were left shared the executor; repairs that waited as long as moves of an
earlier stage followed each other.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.faults import Faults
from tests.simulation.kills import Kills, Shape

TIMES = 6
#: Faults besides, and how long full replication may take after the return of the last worker. Where messages are lost
#: among them may be orders to copy, which are repeated after one second, then two.
BESIDES = {
    "none": (Faults(), 1.0),
    "breaks": (Faults(breaks_per_s=3.0, control_breaks_per_s=3.0), 5.0),
    "losses": (Faults(loss_probability=0.02, delay_s=0.005), 5.0),
    "delays": (Faults(spike_probability=0.02, spike=30.0, late_order_probability=0.2, late_order_s=0.1), 5.0),
}
SHAPES = [Shape(), Shape(), Shape(executors=3, slots=3, workers=5), Shape(executors=4, slots=2, workers=6, copies=3)]


def killed(besides: str, seed: int) -> Counter[str]:
    sim = Kills(seed, *BESIDES[besides], SHAPES[seed % len(SHAPES)])
    sim.kill_again_and_again(TIMES)
    assert sim.controller.error is None
    return sim.counts


@pytest.mark.timeout(600)  # a dozen seconds on a free core
def test_kills_at_full_replication_end_no_query_whatever_fails_besides() -> None:
    counts = sum((killed(besides, seed) for seed, besides in enumerate(2 * list(BESIDES))), Counter[str]())
    assert counts["executors killed with several workers"] > 5
    assert counts["killed during a move"] > 5
    assert counts["rows at sinks"] > 5000
