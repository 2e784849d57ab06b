"""Demand of replicas on their workers, and the pace of workers."""

from __future__ import annotations

import pytest

from controller.balance.load import Loads, ReplicaLoad, WorkerLoad
from controller.balance.policies.demand import DemandMeter


def loads(*replicas: ReplicaLoad, workers: int = 3, cpu: float = 0.0, thread: float = 0.0) -> Loads:
    return Loads({w: WorkerLoad(w, f"e{w}", cpu=cpu, busy=thread) for w in range(workers)}, list(replicas), 1.0)


def row_costs(worker: int, *costs: float, stage: int = 0) -> list[ReplicaLoad]:
    """Make one replica per cost, in microseconds for a row."""
    return [
        ReplicaLoad(stage, 100 * worker + number, worker, busy=cost * 0.01, rows_per_s=10_000)
        for number, cost in enumerate(costs)
    ]


def paces(*replicas: ReplicaLoad) -> list[float]:
    return DemandMeter(0.0).look(loads(*replicas), 1.0).pace.tolist()


def test_a_worker_that_takes_longer_for_the_same_rows_is_slower_by_what_is_beyond_doubt() -> None:
    same = [*row_costs(1, 1, 1, 1), *row_costs(2, 1, 1, 1)]
    assert paces(*row_costs(0, 4, 4, 4), *same) == pytest.approx([4 / 1.5, 1, 1])
    assert paces(*row_costs(0, 1.4, 1.4, 1.4), *same) == [1, 1, 1]


def test_one_partition_with_costly_keys_makes_its_worker_no_slower() -> None:
    assert paces(*row_costs(0, 1, 50, 1, 1), *row_costs(1, 1, 1, 1), *row_costs(2, 1, 1, 1)) == [1, 1, 1]


def test_a_worker_with_hardly_any_partitions_is_not_judged() -> None:
    """Slowness of one or two partitions may come from their keys and not from their worker."""
    assert paces(*row_costs(0, 9, 9), *row_costs(1, 1, 1, 1), *row_costs(2, 1, 1, 1)) == [1, 1, 1]


def test_stages_are_compared_with_themselves() -> None:
    costly = [*row_costs(0, 8, 8, 8, stage=1), *row_costs(1, 8, stage=1)]
    assert paces(*row_costs(0, 1), *row_costs(1, 1, 1, 1), *row_costs(2, 1, 1, 1), *costly) == [1, 1, 1]


def growing(busy: float, smooth_s: float = 0.0, rounds: int = 2, dt: float = 1.0, **worker: float) -> float:
    """Load of one replica that applies 100 slices a second while 50 more arrive."""
    meter = DemandMeter(smooth_s)
    for number in range(rounds):
        replica = ReplicaLoad(0, 0, 0, busy=busy, queued=int(50 * number * dt), slices_per_s=100)
        demand = meter.look(loads(replica, **worker), number * dt)
    return float(demand.steady[0])


def test_a_queue_that_grows_on_a_saturated_worker_counts_by_what_arrives_over_what_is_applied() -> None:
    assert growing(busy=0.9) == pytest.approx(0.9 * 1.5)
    assert growing(busy=0.9, dt=0.5) == pytest.approx(0.9 * 1.5)


def test_a_worker_that_is_saturated_by_other_work_counts_as_such() -> None:
    """Such a worker may read a source, for example."""
    assert growing(busy=0.3) == pytest.approx(0.3)
    assert growing(busy=0.3, cpu=0.9) == pytest.approx(0.3 * 1.5)


def test_a_worker_whose_thread_never_rests_is_saturated_though_a_replica_has_left_with_its_busy_time() -> None:
    """Replicas that left in this round are no longer in the report, and the remaining ones did not use that time."""
    assert growing(busy=0.75, thread=0.7) == pytest.approx(0.75)
    assert growing(busy=0.75, thread=0.98) == pytest.approx(0.75 * 1.5)


def test_load_is_smoothed_over_time_whatever_the_rounds() -> None:
    """After the time that load is smoothed over, a step shows by 1 - 1/e."""
    for rounds in (1, 4):
        meter = DemandMeter(2.0)
        meter.look(loads(ReplicaLoad(0, 0, 0, busy=0.2)), 0.0)
        for number in range(rounds):
            demand = meter.look(loads(ReplicaLoad(0, 0, 0, busy=0.7)), 2.0 * (number + 1) / rounds)
        assert demand.load[0] == pytest.approx(0.2 + 0.5 * 0.632, abs=1e-3)
        assert demand.latest[0] == 0.7


def test_a_replica_that_comes_counts_from_its_first_round_and_order_does_not_matter() -> None:
    meter = DemandMeter(2.0)
    first, second = ReplicaLoad(0, 0, 0, busy=0.2), ReplicaLoad(1, 0, 1, busy=0.4)
    meter.look(loads(second), 0.0)
    assert meter.look(loads(first, second), 1.0).load.tolist() == [0.2, 0.4]
    assert meter.look(loads(second, first), 2.0).load.tolist() == [0.4, 0.2]


def test_loads_of_a_worker_that_is_gone_belong_to_nobody() -> None:
    demand = DemandMeter(0.0).look(loads(ReplicaLoad(0, 0, 7, busy=0.5), ReplicaLoad(0, 1, 2, busy=0.1)), 1.0)
    assert demand.per_worker(demand.load).tolist() == [0, 0, 0.1]
