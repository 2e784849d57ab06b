"""Counts evened out for workers that join, and workers emptied that leave."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_model import Cluster, policy

from controller.balance.load import Loads, ReplicaLoad, Suggestion, WorkerLoad
from controller.balance.policies import Policy

LIMITLESS = {"max_moves": math.inf, "max_bytes_per_s": math.inf}


def drain(same_executor: bool = False) -> Policy:
    return policy("drain", same_executor=same_executor, **LIMITLESS)


# ---- even


@pytest.mark.parametrize("partitions", [1, 7, 32, 61])
@pytest.mark.parametrize("workers", range(1, 17))
def test_counts_end_as_even_as_they_can_with_no_more_moves_than_needed(workers: int, partitions: int) -> None:
    cluster = Cluster(workers).put([0.1] * partitions, lambda p: [p % min(workers, 2)])
    before = cluster.counts()
    high = sorted([partitions // workers + (rank < partitions % workers) for rank in range(workers)], reverse=True)
    needed = sum(max(count - best, 0) for count, best in zip(sorted(before.values(), reverse=True), high, strict=True))
    moves = cluster.round(policy("even", **LIMITLESS)).moves
    assert len(moves) == needed
    assert sorted(cluster.counts().values(), reverse=True) == high
    assert cluster.round(policy("even")).moves == []


def test_a_worker_that_joins_gets_its_share_of_every_stage() -> None:
    cluster = Cluster(3)
    for stage in range(3):
        cluster.put([0.1] * 12, lambda p: [p % 2], stage=stage)
    moves = cluster.round(policy("even", **LIMITLESS)).moves
    assert {m.target for m in moves} == {2}
    assert sorted(m.stage for m in moves) == [0] * 4 + [1] * 4 + [2] * 4


def test_what_costs_least_goes_and_what_has_something_under_way_stays() -> None:
    cluster = Cluster(2).put([0.1] * 4, lambda p: [0])
    cluster.state_bytes = {(0, 0): 10, (0, 1): 9, (0, 2): 8, (0, 3): 7}
    cluster.fixed = {(0, 3)}
    assert {(m.partition, m.cost) for m in cluster.round(policy("even", **LIMITLESS)).moves} == {(1, 9), (2, 8)}


def test_moves_that_take_their_time_are_not_made_twice() -> None:
    cluster = Cluster(2).put([0.1] * 4, lambda p: [0])
    asked = policy("even", max_moves=1)
    first = asked.suggest(cluster.loads(), 1.0).moves
    cluster.fixed = {(m.stage, m.partition) for m in first}
    second = asked.suggest(cluster.loads(), 2.0).moves
    cluster.fixed |= {(m.stage, m.partition) for m in second}
    assert [len(first), len(second)] == [1, 1]
    assert asked.suggest(cluster.loads(), 3.0).moves == []
    cluster.fixed = set()
    for move in [*first, *second]:
        cluster.make(move)
    assert asked.suggest(cluster.loads(), 4.0).moves == []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    workers=st.integers(1, 9),
    executors=st.integers(1, 5),
    copies=st.integers(1, 3),
    partitions=st.integers(0, 40),
    leaving=st.sets(st.integers(0, 8), max_size=3),
    seed=st.integers(0, 50),
)
def test_even_keeps_copies_apart_and_leaves_those_alone_who_leave(
    workers: int, executors: int, copies: int, partitions: int, leaving: set[int], seed: int
) -> None:
    executor = {worker: f"e{worker % executors}" for worker in range(workers)}
    copies = min(copies, workers, executors)
    cluster = Cluster(workers, executors=executor)
    # Copies on neighbours, which are on different executors but where it goes round.
    cluster.put([0.1] * partitions, lambda p: [(p * seed) % (workers - copies + 1) + c for c in range(copies)])
    cluster.leaving = {worker for worker in leaving if worker < workers}
    before = cluster.counts()
    moves = cluster.round(policy("even", **LIMITLESS)).moves
    assert len({(m.stage, m.partition) for m in moves}) == len(moves)
    assert all(cluster.counts()[worker] == before[worker] for worker in cluster.leaving)


# ---- drain


def test_what_leaves_goes_to_the_least_loaded_the_heaviest_first() -> None:
    cluster = Cluster(4).put([0.3, 0.2, 0.2, 0.1], lambda p: [0])
    cluster.put([0.3], lambda p: [1], stage=1)
    cluster.leaving = {0}
    suggestion = cluster.round(drain())
    assert [(m.partition, m.target) for m in suggestion.moves] == [(0, 2), (1, 3), (2, 3), (3, 1)]
    assert cluster.counts()[0] == 0
    assert suggestion.notes == []
    assert cluster.round(drain()) == Suggestion()


def test_before_anything_is_known_of_load_counts_decide() -> None:
    cluster = Cluster(3).put([0.0] * 9, lambda p: [0 if p < 6 else 1])
    cluster.leaving = {0}
    cluster.round(drain())
    assert cluster.counts() == {0: 0, 1: 5, 2: 4}


def test_nobody_leaves_nothing_moves() -> None:
    assert Cluster(3).put([0.3] * 9, lambda p: [0]).round(drain()) == Suggestion()


def test_two_that_leave_hand_over_one_copy_of_a_partition_after_the_other() -> None:
    cluster = Cluster(4).put([0.1] * 4, lambda p: [0, 1])
    cluster.leaving = {0, 1}
    assert len(cluster.round(drain()).moves) == 4
    assert len(cluster.round(drain()).moves) == 4
    assert cluster.counts() == {0: 0, 1: 0, 2: 4, 3: 4}


def test_the_copies_that_cannot_be_placed_are_named_with_the_reason() -> None:
    cluster = Cluster(2).put([0.1], lambda p: [0, 1])
    cluster.leaving = {0}
    (note,) = cluster.round(drain()).notes
    assert note.startswith("partition 0/0 cannot leave worker 0: every worker that stays holds a replica of it")
    cluster.leaving = {0, 1}
    assert "no worker stays" in cluster.round(drain()).notes[0]


def test_executors_are_kept_apart_unless_they_may_be_shared_where_there_is_no_other() -> None:
    workers = {w: WorkerLoad(w, executor, leaving=w == 0) for w, executor in enumerate("abb")}
    replicas = [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 0, 1, primary=False)]
    refused = drain().suggest(Loads(workers, replicas, 1.0), 1.0)
    assert refused.moves == []
    assert "shares an executor with another of its replicas" in refused.notes[0]
    shared = drain(same_executor=True).suggest(Loads(workers, replicas, 1.0), 1.0)
    assert [(m.from_worker, m.target) for m in shared.moves] == [(0, 2)]
    more = {**workers, 3: WorkerLoad(3, "c")}
    busy = [*replicas, ReplicaLoad(1, 0, 3, busy=0.5)]
    apart = drain(same_executor=True).suggest(Loads(more, busy, 1.0), 1.0)
    assert [(m.from_worker, m.target) for m in apart.moves] == [(0, 3)], "apart is better, busy or not"


def test_a_copy_with_something_under_way_waits_for_its_turn_without_a_note() -> None:
    cluster = Cluster(2).put([0.1] * 2, lambda p: [0])
    cluster.leaving, cluster.fixed = {0}, {(0, 0)}
    suggestion = cluster.round(drain())
    assert ([m.partition for m in suggestion.moves], suggestion.notes) == ([1], [])
    cluster.fixed = set()
    assert [m.partition for m in cluster.round(drain()).moves] == [0]


def test_a_target_that_begins_to_leave_is_emptied_again() -> None:
    cluster = Cluster(3).put([0.1] * 4, lambda p: [0])
    cluster.leaving = {0}
    asked = policy("drain", max_moves=1)
    target = cluster.round(asked).moves[0].target
    cluster.leaving = {0, target}
    cluster.run(asked, 10)
    assert cluster.counts()[3 - target] == 4
