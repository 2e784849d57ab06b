"""Cost of planning for the controller with 1,000 workers, 100,000 partitions and two replicas of each: pytest
benchmarks/test_planning.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from controller.balance.load import Loads, ReplicaLoad, WorkerLoad
from controller.balance.policies import Policy, PolicySettings, make
from controller.planning.compiler import compile_plan
from controller.replicas.additions import Census, WantedAddition, all_additions, next_additions
from controller.replicas.placement import FarApart
from controller.replicas.protection_wishes import ProtectionWishes
from controller.replicas.spread import WorkerPlace
from controller.replicas.table_changes import retain, without_worker
from flux.dataflow.source import DataFrameSource
from flux.settings import Settings
from partitioning.table import Table

WORKERS, STAGES, PARTITIONS, LOST = 1_000, 25, 4_000, 10


class Large:
    """A query with stages of 4,000 partitions, and as many executors as workers."""

    overloaded = range(0, WORKERS, 50)

    def __init__(self) -> None:
        flow: Any = DataFrameSource("rows", pa.schema([("x", pa.int64())]))
        for number in range(STAGES):
            flow = flux.stage(partitions=PARTITIONS, replicas=2, name=f"s{number}")(lambda batch: batch)(flow)
        self.plan = compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"", 0)
        self.placement = FarApart({worker: WorkerPlace.of("", "", f"e{worker}") for worker in range(WORKERS)})
        self.table = self.place()

    def place(self) -> Table:
        return self.placement.first_table(self.plan, dict.fromkeys(range(WORKERS), ""))

    def plan_for_losses(self) -> tuple[Table, list[WantedAddition]]:
        """Lose ten workers, of which no two hold both replicas of a partition, and plan all additions after that."""
        table = self.table
        for worker in range(0, WORKERS, WORKERS // LOST):
            table, orphans = without_worker(table, worker, lambda stage, partition, replica: replica.live, [1])
            assert not orphans
        return table, all_additions(self.plan, table, self.placement)

    def held(self, table: Table, wanted: list[WantedAddition]) -> list[int]:
        counts = Counter(replica.worker for rows in table.stages for replicas in rows for replica in replicas)
        counts.update(addition.worker for addition in wanted)
        return list(counts.values())

    def loads(self) -> Loads:
        """Make loads: every worker has its share, but the overloaded have twice as much."""
        busy = np.random.default_rng(1).uniform(0.8, 1.2, WORKERS * 200) * 0.4 / 200
        busy = busy.tolist()
        replicas = [
            ReplicaLoad(
                stage, p, r.worker, place == 0, busy.pop() * (2 if r.worker in self.overloaded else 1), 0, 1000, 1e3
            )
            for stage, rows in enumerate(self.table.stages)
            for p, copies in enumerate(rows)
            for place, r in enumerate(copies)
        ]
        return Loads({worker: WorkerLoad(worker, f"e{worker}") for worker in range(WORKERS)}, replicas, 1.0)

    def pairing(self) -> Policy:
        return make("pairing", PolicySettings(max_moves=WORKERS))


@pytest.fixture(scope="module")
def large() -> Large:
    return Large()


def test_first_table(benchmark: Any, large: Large) -> None:
    benchmark.pedantic(large.place, rounds=3)


def test_plan_for_the_loss_of_ten_workers(benchmark: Any, large: Large) -> None:
    benchmark.pedantic(large.plan_for_losses, rounds=5)


def test_look_of_the_sweep_after_a_change(benchmark: Any, large: Large) -> None:
    census = Census(ProtectionWishes(large.plan))
    table, _ = large.plan_for_losses()

    def look() -> None:
        nonlocal table
        (wanted,) = next_additions(large.plan, table, [], 1, large.placement, census)
        table = retain(table, wanted.stage, wanted.partition, wanted.worker)

    benchmark.pedantic(look, rounds=50, warmup_rounds=1)


def test_round_of_pairing(benchmark: Any, large: Large) -> None:
    loads, pairing = large.loads(), large.pairing()
    for number in range(2):
        pairing.suggest(loads, float(number))
    times = iter(range(10, 100))
    benchmark.pedantic(lambda: pairing.suggest(loads, float(next(times))), rounds=5)
