"""The sweep: the next additions, stage by stage from input to output, a few partitions at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from controller.planning.compiler import compile_plan
from controller.replicas.additions import (
    Addition,
    Census,
    WantedAddition,
    all_additions,
    next_additions,
    under_replicated,
)
from controller.replicas.placement import FarApart
from controller.replicas.protection_wishes import ProtectionWishes
from controller.replicas.spread import WorkerPlace
from controller.replicas.table_changes import drop, retain, without_worker
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource
from flux.settings import Settings
from partitioning.table import ReplicaAt, Table


def planned(*replicas: int) -> Plan:
    """Compile a chain of stages with two partitions and these numbers of replicas."""
    flow: Any = DataFrameSource("rows", pa.schema([("x", pa.int64())]))
    for number, copies in enumerate(replicas):
        flow = flux.stage(partitions=2, replicas=copies, name=f"s{number}")(lambda batch: batch)(flow)
    settings = replace(Settings.of(), same_executor=True)
    return compile_plan([flow], settings, lambda schema: schema, "q", b"s", 0)


def table(*stages: tuple[tuple[int, ...], ...], workers: tuple[int, ...] = (1, 2, 3)) -> Table:
    placed = tuple(tuple(tuple(ReplicaAt(worker, 0) for worker in p) for p in stage) for stage in stages)
    return Table(0, placed, (), dict.fromkeys(workers, ""))


#: Every worker on an executor of its own.
apart = FarApart({worker: WorkerPlace.of("", "", f"e{worker}") for worker in range(10)})


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
    assert next_additions(plan, low, [], 1, apart) == [WantedAddition(1, 0, 2)]


def test_the_worker_with_the_fewest_replicas_is_chosen() -> None:
    plan, low = planned(2), table(((1,), (2, 1)))
    assert next_additions(plan, low, [], 1, apart) == [WantedAddition(0, 0, 3)]


def test_additions_of_one_look_are_spread() -> None:
    plan, low = planned(2), table(((1,), (1,)))
    assert [wanted.worker for wanted in next_additions(plan, low, [], 2, apart)] == [2, 3]


def test_nothing_is_wanted_when_all_is_well() -> None:
    assert next_additions(planned(2), table(((1, 2), (2, 3))), [], 8, apart) == []


# ---- the whole plan, and the same answer with less counting


def rule(plan: Plan, low: Table, busy: list[Addition], at_once: int) -> list[WantedAddition]:
    """Apply the rule by itself, counting everything each time."""
    load = dict.fromkeys(low.endpoints, 0)
    for replica in (replica for stage in low.stages for replicas in stage for replica in replicas):
        load[replica.worker] = load.get(replica.worker, 0) + 1
    wanted: list[WantedAddition] = []
    first = min((addition.stage for addition in busy), default=None)
    for stage, partition in under_replicated(plan, low):
        if len(busy) + len(wanted) >= at_once or first not in (None, stage):
            break
        if (stage, partition) in {(addition.stage, addition.partition) for addition in busy}:
            continue
        fit = [worker for worker in load if apart.may_hold(worker, [r.worker for r in low.stages[stage][partition]])]
        if fit:
            chosen = min(fit, key=lambda worker: (load[worker], worker))
            load[chosen] += 1
            first = stage
            wanted.append(WantedAddition(stage, partition, chosen))
    return wanted


holders = st.lists(st.integers(0, 4), max_size=3, unique=True).map(tuple)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    placed=st.lists(st.tuples(holders, holders), min_size=1, max_size=3),
    copies=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    changes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 4), st.booleans()), max_size=8),
    at_once=st.integers(1, 5),
    busy=st.integers(0, 2),
)
def test_a_census_kept_from_table_to_table_changes_no_answer(
    placed: list[tuple[tuple[int, ...], ...]],
    copies: list[int],
    changes: list[tuple[int, int, int, bool]],
    at_once: int,
    busy: int,
) -> None:
    plan = planned(*copies[: len(placed)])
    now = table(*placed, workers=(0, 1, 2, 3))
    census = Census(ProtectionWishes(plan))
    for stage, partition, worker, added in [(0, 0, 9, False), *changes]:
        change = retain if added else drop
        now = change(now, stage % len(placed), partition, worker)
        going_on = [under_way(at, p, 0) for at, p in under_replicated(plan, now)[-busy:]] if busy else []
        assert next_additions(plan, now, going_on, at_once, apart, census) == rule(plan, now, going_on, at_once)


def test_the_whole_plan_is_what_the_sweep_does_one_by_one() -> None:
    plan = planned(2, 3, 1)
    full = table(((1, 2), (2, 3)), ((1, 2, 3), (2, 3, 4)), ((1,), (4,)), workers=(1, 2, 3, 4, 5))
    low, lost = without_worker(full, 2, lambda *_: True, [])
    assert lost == []
    whole = all_additions(plan, low, apart)
    done = []
    while following := next_additions(plan, low, [], 1, apart):
        done += following
        low = retain(low, following[0].stage, following[0].partition, following[0].worker)
    assert whole == done
    assert [(wanted.stage, wanted.partition) for wanted in whole] == [(0, 0), (0, 1), (1, 0), (1, 1)]
