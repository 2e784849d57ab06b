"""Load balance in running queries: the results of a policy's suggestions, round after round, among faults and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.simulation.busy import Demand
from tests.simulation.faults import Faults
from tests.simulation.flows import chain
from tests.simulation.run import Simulation
from tests.simulation.stage_kinds import Watched

WORKERS = 8
PARTITIONS = 32
#: The stage whose load differs; the sink after it has none.
BUSY_STAGE = 0
#: Long enough for a dozen rounds and for the moves that they begin.
SECONDS = 12.0
#: Share of a worker that an ordinary partition takes.
ORDINARY = 0.08


def balanced(
    demand: Demand, copies: int = 1, faults: Faults | None = None, seed: int = 1, partitions: int = PARTITIONS
) -> Simulation:
    """Run a query that goes on for a while and keeps every law."""
    sim = Simulation(
        seed,
        faults or Faults(calm_after_s=SECONDS, patient=True),
        copies,
        WORKERS,
        lambda ledger: chain(ledger, [Watched], copies, partitions, batches=5, balance_cool_down=2.0),
        demand=demand,
    )
    sim.run()
    assert sim.controller.error is None
    return sim


def loads(sim: Simulation, demand: Callable[[int], float]) -> Counter[int]:
    """Return the load of each worker at the end. ``demand`` is that of a partition of the busy stage."""
    assert sim.controller.table is not None
    load = Counter(dict.fromkeys(sim.controller.members.workers, 0.0))
    for partition, replicas in enumerate(sim.controller.table.stages[BUSY_STAGE]):
        for replica in replicas:
            load[replica.worker] += demand(partition)  # type: ignore[assignment]
    return load  # type: ignore[return-value]


@pytest.mark.parametrize("copies", [1, pytest.param(2, marks=pytest.mark.long)])
def test_one_overloaded_worker_of_eight_is_relieved(copies: int) -> None:
    heavy = range(0, PARTITIONS, WORKERS)  # the partitions that worker 0 leads at first

    def of(partition: int) -> float:
        return (3 if partition in heavy else 1) * ORDINARY / copies

    sim = balanced(lambda stage, partition, worker, now: of(partition) if stage == BUSY_STAGE else 0.0, copies)
    load = loads(sim, of)
    mean = sum(load.values()) / len(load)
    assert max(load.values()) <= 1.35 * mean, load
    assert 2 <= sim.counts["moves done"] <= 3 * copies + 4


def test_a_load_that_flips_every_round_does_not_cause_a_move_every_round() -> None:
    def demand(stage: int, partition: int, worker: int, now: float) -> float:
        high = partition % 2 == int(now) % 2
        return (2.5 if high else 0.5) * ORDINARY if stage == BUSY_STAGE else 0.0

    sim = balanced(demand)
    assert sim.counts["moves done"] <= SECONDS / 5


def test_a_partition_heavier_than_a_worker_is_reported_and_not_moved_around() -> None:
    def demand(stage: int, partition: int, worker: int, now: float) -> float:
        return (1.0 if partition == 0 else 0.02) if stage == BUSY_STAGE else 0.0

    sim = balanced(demand)
    moved = [(e.stage, e.partition) for e in sim.controller.repairs.history if e.kind == "move"]
    busiest = sim.plan.stages[BUSY_STAGE].name
    assert (busiest, 0) not in moved
    assert any(
        event.kind == "balance" and f"partition {busiest}/0 " in event.why for event in sim.controller.repairs.history
    )


@pytest.mark.parametrize("seed", [2, pytest.param(4, marks=pytest.mark.long)])
def test_balance_among_losses_keeps_every_law(seed: int) -> None:
    faults = Faults(calm_after_s=6.0, crashes_per_s=0.7, second_crash_probability=0.3, patient=True, delay_s=0.002)
    sim = balanced(
        lambda stage, partition, worker, now: 0.15 if (partition + int(now / 3)) % 4 == 0 else 0.01, 2, faults, seed, 12
    )
    assert sim.counts["workers that crashed"] > 0
    assert sim.counts["moves begun"] > 0
