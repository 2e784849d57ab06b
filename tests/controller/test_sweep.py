"""The sweep: what to add next, stage by stage from input to output, a few partitions at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

import flux
from controller.dag import compile_plan
from controller.moves import retain
from controller.sweep import Addition, Wanted, next_additions, under_replicated
from flux.api import Source
from flux.plan import Plan
from flux.settings import Settings
from partitioning.table import ReplicaAt, Table


def planned(*replicas: int) -> Plan:
    """A chain of stages with two partitions and so many replicas each."""
    flow: Any = Source("rows", dataframe=pa.schema([("x", pa.int64())]))
    for number, copies in enumerate(replicas):
        flow = flux.stage(partitions=2, replicas=copies, name=f"s{number}")(lambda batch: batch)(flow)
    settings = replace(Settings.of(), same_executor=True)
    return compile_plan([flow], settings, lambda schema: schema, "q", b"s", 0)


def table(*stages: tuple[tuple[int, ...], ...], workers: tuple[int, ...] = (1, 2, 3)) -> Table:
    placed = tuple(tuple(tuple(ReplicaAt(worker, 0) for worker in p) for p in stage) for stage in stages)
    return Table(0, placed, (), dict.fromkeys(workers, ""))


def apart(worker: int, replicas: tuple[ReplicaAt, ...]) -> bool:
    return all(replica.worker != worker for replica in replicas)


def under_way(stage: int, partition: int, worker: int) -> Addition:
    return Addition(stage, partition, worker, 1, 0.0, 1.0)


def test_partitions_with_too_few_replicas_come_in_topological_order() -> None:
    plan = planned(2, 1, 3)
    low = table(((1,), (1, 2)), ((1,), (2,)), ((1, 2, 3), (3, 1)))
    assert under_replicated(plan, low) == [(0, 0), (2, 1)]


def test_one_partition_at_a_time_unless_more_are_allowed() -> None:
    plan, low = planned(2), table(((1,), (1,)))
    assert len(next_additions(plan, low, [], 1, apart)) == 1
    assert len(next_additions(plan, low, [], 8, apart)) == 2
    assert next_additions(plan, low, [under_way(0, 0, 2)], 1, apart) == []


def test_a_stage_waits_until_the_one_before_it_is_through() -> None:
    plan, low = planned(2, 2), table(((1,), (1, 2)), ((1,), (2, 1)))
    assert [wanted.stage for wanted in next_additions(plan, low, [], 8, apart)] == [0]
    assert next_additions(plan, retain(low, 0, 0, 2), [under_way(0, 0, 2)], 8, apart) == []


def test_a_stage_that_falls_short_again_waits_for_the_addition_under_way_behind_it() -> None:
    plan = planned(2, 2)
    low = retain(table(((1,), (1, 2)), ((1,), (2, 1))), 1, 0, 2)
    assert next_additions(plan, low, [under_way(1, 0, 2)], 8, apart) == []


def test_a_partition_that_no_worker_can_hold_holds_up_nobody_else() -> None:
    plan = planned(3, 2)
    low = table(((1, 2), (2, 1)), ((1,), (2, 1)), workers=(1, 2))
    assert next_additions(plan, low, [], 1, apart) == [Wanted(1, 0, 2)]


def test_the_worker_with_the_fewest_replicas_is_chosen() -> None:
    plan, low = planned(2), table(((1,), (2, 1)))
    assert next_additions(plan, low, [], 1, apart) == [Wanted(0, 0, 3)]


def test_additions_of_one_look_are_spread() -> None:
    plan, low = planned(2), table(((1,), (1,)))
    assert [wanted.worker for wanted in next_additions(plan, low, [], 2, apart)] == [2, 3]


def test_nothing_is_wanted_when_all_is_well() -> None:
    assert next_additions(planned(2), table(((1, 2), (2, 3))), [], 8, apart) == []
