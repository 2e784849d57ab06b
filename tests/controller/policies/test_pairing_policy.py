"""Pairing told as stories: moves that are made, moves that are not, and the notes about both."""

from __future__ import annotations

from dataclasses import replace

import pytest
from policy_model import Cluster, policy, zipf

from controller.balance.load import Loads, Move, ReplicaLoad, WorkerLoad
from controller.balance.policies import Policy


def moved(moves: list[Move]) -> list[tuple[int, int, int]]:
    return [(move.partition, move.from_worker, move.target) for move in moves]


def after_warm_up(cluster: Cluster, asked: Policy, rounds: int = 2) -> None:
    """Run rounds, without a move, until a difference has lasted long enough to count."""
    assert cluster.run(asked, rounds) == []


# ---- workers that it helps


def test_one_overloaded_worker_of_eight_gives_to_the_idlest_until_it_is_like_the_others() -> None:
    cluster = Cluster(8).put([0.1] * 26, lambda p: [0] if p < 12 else [1 + p % 7])
    asked = policy()
    moves = cluster.run(asked, 20)
    assert {move.from_worker for move in moves} == {0}
    assert max(cluster.asked().values()) <= 0.5
    assert max(cluster.counts().values()) <= 5
    assert len(moves) <= 8
    assert cluster.run(asked, 20) == []


def test_the_gain_is_judged_on_the_pair_and_not_diluted_by_the_cluster() -> None:
    """Among 300 other workers, the difference of the same two workers is nothing in the mean."""

    def first(others: int) -> list[Move]:
        cluster = Cluster(2 + others).put([0.2] * 4, lambda p: [0])
        cluster.put([0.3] * others, lambda p: [2 + p], stage=1)
        cluster.run(policy(), 2)
        return cluster.round(policy(steady_rounds=1)).moves

    (alone,), (among_many,) = first(0), first(300)
    assert (alone.from_worker, alone.target, alone.gain) == (among_many.from_worker, among_many.target, among_many.gain)
    assert among_many.gain == pytest.approx(0.2)


def test_the_busiest_is_helped_first_and_several_pairs_may_move_in_one_round() -> None:
    cluster = Cluster(4).put([0.2] * 7, lambda p: [0] if p < 4 else [1])
    assert [move.from_worker for move in cluster.round(policy(steady_rounds=1, max_moves=1)).moves] == [0]
    both = Cluster(4).put([0.2] * 7, lambda p: [0] if p < 4 else [1])
    assert [(m.from_worker, m.target) for m in both.round(policy(steady_rounds=1, max_moves=9)).moves] == [
        (0, 2),
        (1, 3),
    ]


def test_many_small_partitions_move_too_though_one_alone_gains_less_than_the_threshold() -> None:
    cluster = Cluster(2).put([0.01] * 80, lambda p: [0])
    moves = cluster.run(policy(), 60)
    assert all(move.gain < 0.1 * 0.8 for move in moves)
    assert cluster.imbalance() < 1.2


def test_idle_workers_are_left_alone() -> None:
    cluster = Cluster(3).put([0.01] * 4, lambda p: [0])
    assert cluster.run(policy(), 10) == []


def test_among_equally_good_moves_the_smallest_state_goes_and_a_secondary_before_a_primary() -> None:
    cluster = Cluster(3).put([0.2] * 4, lambda p: [0, 2] if p < 2 else [2, 0])
    cluster.state_bytes = {(0, 0): 500, (0, 1): 400, (0, 2): 500, (0, 3): 400}
    (move,) = cluster.round(policy(steady_rounds=1)).moves
    assert (move.partition, move.from_worker, move.target, move.cost) == (1, 2, 1, 400)


def test_a_primary_moves_where_only_primaries_help() -> None:
    cluster = Cluster(3).put([0.2, 0.2], lambda p: [0, 1])
    cluster.pace[0] = 2.0
    (move,) = cluster.round(policy(steady_rounds=1)).moves
    assert (move.from_worker, move.target) == (0, 2)
    assert cluster.holders[0, move.partition] == [1, 2], "the secondary takes over"


def test_what_little_can_leave_an_overloaded_worker_does() -> None:
    cluster = Cluster(2).put([1.85, 0.15], lambda p: [0])
    cluster.fixed = {(0, 0)}
    assert moved(cluster.run(policy(), 10)) == [(1, 0, 1)]


def test_where_the_partner_may_take_nothing_the_next_idlest_is_asked() -> None:
    """Worker 3 is idle, but shares an executor with worker 1, which has the other copies."""
    cluster = Cluster(4, executors={0: "a", 1: "b", 2: "c", 3: "b"}).put([0.1] * 4, lambda p: [0, 1])
    cluster.put([0.3], lambda p: [0], stage=1).put([0.05], lambda p: [2], stage=2)
    cluster.fixed = {(1, 0)}
    (move,) = cluster.round(policy(steady_rounds=1)).moves
    assert (move.from_worker, move.target) == (0, 2)


def test_a_busiest_worker_that_can_give_nothing_does_not_keep_the_idlest_from_the_second() -> None:
    cluster = Cluster(3).put([0.9], lambda p: [0]).put([0.1] * 8, lambda p: [1], stage=1)
    assert {(m.from_worker, m.target) for m in cluster.run(policy(), 20)} == {(1, 2)}
    assert max(cluster.asked()[1], cluster.asked()[2]) <= 0.5


def test_in_one_round_no_partition_moves_twice() -> None:
    cluster = Cluster(4).put([0.2] * 4, lambda p: [0, 1])
    first, second = cluster.round(policy(steady_rounds=1, max_moves=9)).moves
    assert {first.from_worker, second.from_worker} == {0, 1}
    assert first.partition != second.partition


# ---- partitions that stay


def test_load_that_flips_every_round_does_not_cause_a_move_every_round() -> None:
    for period in (1, 2, 3, 5):
        cluster = Cluster(2).put([0.1] * 16, lambda p: [p % 2])
        asked = policy()
        for number in range(60):
            high = number // period % 2
            cluster.cost = {(0, p): 0.1 if p % 2 == high else 0.01 for p in range(16)}
            cluster.round(asked)
        moves = sum(map(len, cluster.moves))
        assert moves <= 60 // 5, f"period {period}: {moves} moves"


def test_one_odd_round_causes_no_move_though_the_average_remembers_it_for_long() -> None:
    """Such a round comes where the rows began later on one worker than on the others, for example."""
    cluster = Cluster(2).put([0.1] * 10, lambda p: [p % 2])
    asked = policy(smooth_s=5.0)
    cluster.cost = {(0, p): 0.1 if p % 2 else 0.01 for p in range(10)}
    cluster.round(asked)
    cluster.cost = {(0, p): 0.1 + 0.001 * (p % 2) for p in range(10)}
    assert cluster.run(asked, 10) == []


def test_a_load_that_has_moved_for_good_is_followed() -> None:
    cluster = Cluster(2).put([0.1] * 8, lambda p: [p % 2])
    asked = policy()
    assert cluster.run(asked, 10) == []
    cluster.cost = {(0, p): 0.16 if p % 2 else 0.02 for p in range(8)}
    assert {move.from_worker for move in cluster.run(asked, 10)} == {1}
    assert max(cluster.asked().values()) <= 0.45


def test_a_single_key_heavier_than_a_worker_is_reported_and_not_moved_around() -> None:
    cluster = Cluster(3, back_pressure=True).put([2.0] + [0.05] * 15, lambda p: [p % 3])
    asked = policy()
    moves = cluster.run(asked, 40)
    assert 0 not in {move.partition for move in moves}
    assert cluster.asked()[0] - 2.0 <= 0.1 * 2.0, "the others have left it the worker"
    assert max(cluster.asked()[1], cluster.asked()[2]) < 0.6
    assert cluster.run(asked, 40) == []
    (note,) = cluster.round(asked).notes
    assert note.startswith("partition 0/0 alone takes more than a worker's fair share: no move helps")
    assert [note] == cluster.round(asked).notes, "the same text as long as it is true"


def test_a_note_calls_a_partition_by_the_name_of_its_stage() -> None:
    workers = {number: WorkerLoad(number, f"e{number}") for number in range(2)}
    replicas = [ReplicaLoad(3, 0, 0, busy=0.9), *(ReplicaLoad(3, each, 1, busy=0.02) for each in range(1, 6))]
    (note,) = policy().suggest(Loads(workers, replicas, 1.0, {3: "Delays"}), 0.0).notes
    assert note.startswith("partition Delays/0 alone takes")


def test_the_others_leave_a_heavy_partition_rather_than_it_leaves_them() -> None:
    cluster = Cluster(3).put([0.75] + [0.05] * 4, lambda p: [0])
    cluster.put([0.05], lambda p: [1], stage=1)
    moves = cluster.run(policy(), 20)
    assert moves
    assert (0, 0) not in {(m.stage, m.partition) for m in moves}


def test_several_heavy_partitions_on_one_worker_get_one_each() -> None:
    cluster = Cluster(8).put([0.9] * 7, lambda p: [p % 2])
    asked = policy()
    assert [cluster.round(asked).notes for _ in range(2)] == [[], []], "so far moves help"
    cluster.run(asked, 40)
    assert max(cluster.counts().values()) == 1
    assert cluster.run(asked, 10) == []


def test_both_copies_of_a_heavy_partition_are_one_note_and_light_ones_are_none() -> None:
    cluster = Cluster(4).put([0.9, 0.1], lambda p: [2 * p, 2 * p + 1])
    assert len(cluster.round(policy()).notes) == 1
    light = Cluster(4).put([0.2], lambda p: [0])
    assert light.round(policy()).notes == []


def test_a_helper_that_would_itself_become_overloaded_is_not_chosen() -> None:
    cluster = Cluster(3).put([0.5] * 5, lambda p: [0]).put([0.6], lambda p: [1], stage=1)
    cluster.put([0.1], lambda p: [2], stage=2)
    asked = policy()
    moves = cluster.run(asked, 30)
    assert [(move.stage, move.target) for move in moves] == [(0, 2)], "0.6 + 0.5 is more than worker 1 has"
    assert max(load for worker, load in cluster.asked().items() if worker) <= 1.0


def test_where_the_largest_would_overload_the_helper_a_smaller_one_goes() -> None:
    cluster = Cluster(2).put([1.2, 0.6, 0.3, 0.2], lambda p: [0]).put([0.6], lambda p: [1], stage=1)
    cluster.run(asked := policy(), 30)
    assert cluster.asked()[1] <= 1.0
    assert cluster.holders[0, 2] == [1]
    assert cluster.run(asked, 10) == []


def test_what_has_something_under_way_stays() -> None:
    cluster = Cluster(2).put([0.2] * 4, lambda p: [0])
    cluster.fixed = {(0, 0), (0, 1), (0, 2)}
    assert {m.partition for m in cluster.run(policy(), 10)} == {3}


# ---- copies and executors


def test_a_worker_that_holds_a_copy_already_is_no_target() -> None:
    cluster = Cluster(2).put([0.2] * 4, lambda p: [0, 1]).put([0.3], lambda p: [0], stage=1)
    cluster.fixed = {(1, 0)}
    assert cluster.run(policy(), 10) == []


def test_a_crumb_is_not_moved_where_the_rest_cannot_go() -> None:
    cluster = Cluster(2).put([0.2] * 3, lambda p: [0, 1]).put([0.3, 0.02], lambda p: [0], stage=1)
    cluster.fixed = {(1, 0)}
    assert cluster.run(policy(), 10) == []


def test_the_copies_of_a_partition_never_share_an_executor() -> None:
    """Workers 2 and 3 share an executor: a partition with a copy on worker 2 moves the other copy to 1, not to the idler 3."""
    executors = {0: "a", 1: "b", 2: "c", 3: "c"}
    cluster = Cluster(4, executors=executors).put([0.2] * 4, lambda p: [0, 2])
    cluster.put([0.05], lambda p: [1], stage=1)
    cluster.fixed = {(1, 0)}
    moves = cluster.run(policy(), 20)
    assert 1 in {m.target for m in moves if m.from_worker == 0}
    assert 3 not in {m.target for m in moves if m.from_worker == 0}
    assert {m.target for m in moves if m.from_worker == 2} <= {1, 3}


def test_copies_that_share_an_executor_already_may_go_on_doing_so() -> None:
    workers = {w: WorkerLoad(w, "driver") for w in range(3)}
    replicas = [ReplicaLoad(0, p, w, primary=w == 0, busy=0.2) for p in range(3) for w in (0, 1)]
    asked = policy(steady_rounds=1)
    (move,) = asked.suggest(Loads(workers, replicas, 1.0), 0.0).moves
    assert move.target == 2
    apart = {0: WorkerLoad(0, "a"), 1: WorkerLoad(1, "driver"), 2: WorkerLoad(2, "driver")}
    heavy = [replace(r, busy=0.3) if r.worker == 0 else r for r in replicas]
    (move,) = policy(steady_rounds=1).suggest(Loads(apart, heavy, 1.0), 0.0).moves
    assert (move.from_worker, move.target) == (1, 2), (
        "within its executor; the busiest could only join that of the other copy"
    )


def test_leaving_workers_neither_take_nor_give() -> None:
    cluster = Cluster(3).put([0.2] * 4, lambda p: [0])
    cluster.leaving = {1}
    assert {m.target for m in cluster.run(policy(), 20)} == {2}
    crowded = Cluster(3).put([0.2] * 4, lambda p: [0])
    crowded.leaving = {0}
    assert crowded.run(policy(), 10) == []


# ---- moves that take their time, or fail


def copying(loads: Loads, move: Move, arrived: bool) -> Loads:
    """Return the loads while a move is under way: its partition is not movable, and its target may have a copy already."""
    busy = [r for r in loads.replicas if (r.stage, r.partition) != (move.stage, move.partition)]
    (here,) = [r for r in loads.replicas if (r.stage, r.partition) == (move.stage, move.partition)]
    there = replace(here, worker=move.target, primary=False, busy=0.0, movable=False)
    return replace(loads, replicas=[*busy, replace(here, movable=False), *([there] if arrived else [])])


@pytest.mark.parametrize("arrived", [False, True])
def test_a_move_under_way_counts_as_made(arrived: bool) -> None:
    cluster = Cluster(2).put([0.3, 0.1, 0.1, 0.1], lambda p: [0])
    asked = policy(cool_down_s=0.0, steady_rounds=1)
    (move,) = asked.suggest(cluster.loads(), 1.0).moves
    assert move.partition == 0
    for number in range(10):
        assert asked.suggest(copying(cluster.loads(), move, arrived), 2.0 + number).moves == []
    cluster.make(move)
    assert cluster.run(asked, 5) == []


def test_a_target_that_is_lost_is_replaced_by_another() -> None:
    cluster = Cluster(3).put([0.2] * 3, lambda p: [0]).put([0.05], lambda p: [2], stage=1)
    asked = policy()
    cluster.fixed = {(1, 0)}
    after_warm_up(cluster, asked)
    (move,) = asked.suggest(cluster.loads(), cluster.now).moves
    assert move.target == 1
    asked.suggest(copying(cluster.loads(), move, True), cluster.now + 1)
    del cluster.pace[1]  # lost, and the addition is about to be dropped: its load is where it was
    cluster.pass_time(2.0)
    cluster.fixed = {(0, move.partition), (1, 0)}
    (other,) = cluster.round(asked).moves
    assert (other.from_worker, other.target) == (0, 2)
    assert other.partition != move.partition
    cluster.fixed = {(1, 0)}  # from now on the copy on worker 0 may be moved again
    assert {m.target for m in cluster.run(asked, 20)} <= {2}
    assert max(cluster.asked().values()) <= 0.45


def test_a_target_that_is_leaving_is_not_chosen_again() -> None:
    cluster = Cluster(3).put([0.1] * 8, lambda p: [0])
    asked = policy()
    after_warm_up(cluster, asked)
    target = cluster.round(asked).moves[0].target
    cluster.leaving = {target}
    assert {m.target for m in cluster.run(asked, 20)} == {3 - target}


def test_what_was_refused_is_not_asked_for_again_at_once_and_others_are() -> None:
    cluster = Cluster(2).put([0.2, 0.1, 0.1, 0.1], lambda p: [0])
    asked = policy(cool_down_s=5.0, steady_rounds=1)
    suggested = [asked.suggest(cluster.loads(), float(number)).moves for number in range(6)]
    assert moved(suggested[0]) == [(0, 0, 1)]
    partitions = [m.partition for moves in suggested for m in moves]
    assert partitions[:4] == [0, 1, 2, 3]
    assert moved(suggested[5]) == [(0, 0, 1)]


# ---- limits


def test_a_moved_partition_stays_for_the_cool_down() -> None:
    cluster = Cluster(2).put([0.3, 0.2, 0.1], lambda p: [0])
    asked = policy(cool_down_s=5.0, steady_rounds=1, smooth_s=0.0)
    assert moved(cluster.round(asked).moves) == [(0, 0, 1)]
    cluster.put([0.4], lambda p: [1], stage=1)
    cluster.fixed = {(1, 0)}
    assert [len(cluster.round(asked).moves) for _ in range(6)] == [0, 0, 0, 0, 1, 0]


def test_who_has_just_given_takes_nothing_for_the_cool_down() -> None:
    cluster = Cluster(3).put([0.1] * 6, lambda p: [0]).put([0.1] * 4, lambda p: [2], stage=1)
    asked = policy(cool_down_s=5.0, steady_rounds=1, smooth_s=0.0)
    assert [(m.from_worker, m.target) for m in cluster.round(asked).moves] == [(0, 1)]
    cluster.cost = {key: {0: 0.01, 1: 0.5, 2: 0.2}[cluster.holders[key][0]] for key in cluster.cost}
    targets = [{m.target for m in cluster.round(asked).moves} for _ in range(5)]
    assert all(0 not in each for each in targets[:4])
    assert targets[4] == {0}


def test_who_has_just_taken_gives_nothing_for_the_cool_down() -> None:
    cluster = Cluster(3).put([0.1] * 4, lambda p: [0]).put([0.01] * 2, lambda p: [1], stage=1)
    cluster.put([0.05], lambda p: [2], stage=2)
    asked = policy(cool_down_s=5.0, steady_rounds=1, smooth_s=0.0)
    assert [(m.from_worker, m.target) for m in cluster.round(asked).moves] == [(0, 1)]
    cluster.cost |= {(1, 0): 0.4, (1, 1): 0.4} | {(0, p): 0.02 for p in range(4)}
    sources = [[m.from_worker for m in cluster.round(asked).moves] for _ in range(5)]
    assert sources == [[], [], [], [], [1]]


def test_no_more_moves_in_a_round_than_allowed() -> None:
    cluster = Cluster(16).put(zipf(0.8, 200, 8.0), lambda p: [p % 4])
    cluster.run(asked := policy(max_moves=3), 40)
    assert max(map(len, cluster.moves)) == 3
    cluster.run(asked, 100)
    assert cluster.run(asked, 10) == []


def test_moves_keep_to_the_bytes_per_second_and_a_large_state_moves_all_the_same() -> None:
    cluster = Cluster(2).put([0.1] * 8, lambda p: [0])
    cluster.state_bytes = {(0, p): 10 << 20 for p in range(8)}
    asked = policy(max_bytes_per_s=4 << 20, steady_rounds=1)
    per_round = [len(cluster.round(asked).moves) for _ in range(9)]
    assert per_round[0] == 1, "more than the bucket holds"
    assert sum(per_round) * 10 <= 4 * (9 + 1) + 10
    assert sum(per_round) >= 3


# ---- missing measurements


def test_before_anything_is_known_nothing_is_suggested() -> None:
    cluster = Cluster(2).put([0.2] * 4, lambda p: [0])
    asked = policy(steady_rounds=1)
    assert asked.suggest(cluster.loads(seconds=0.0), 1.0).moves == []
    assert asked.suggest(Loads({}, [], 1.0), 2.0).moves == []
    assert len(asked.suggest(cluster.loads(), 3.0).moves) == 1


def test_of_two_saturated_workers_the_one_whose_queue_grows_is_helped_first() -> None:
    cluster = Cluster(3).put([0.25] * 4, lambda p: [0]).put([0.25] * 8, lambda p: [1], stage=1)
    asked = policy(steady_rounds=3)
    after_warm_up(cluster, asked)
    loads = cluster.loads().of_workers()
    assert loads[0] == loads[1] == 1.0, "busy time alone does not tell them apart"
    assert cluster.round(asked).moves[0].from_worker == 1


def test_where_only_the_lengths_of_queues_are_known_the_longer_goes_first() -> None:
    workers = {w: WorkerLoad(w, f"e{w}") for w in range(3)}
    replicas = [ReplicaLoad(0, p, p % 2, busy=0.25, queued=20 - 10 * (p % 2)) for p in range(8)]
    (move,) = policy(steady_rounds=1).suggest(Loads(workers, replicas, 1.0), 1.0).moves
    assert move.from_worker == 0


def test_a_backlog_that_grows_no_longer_is_worked_off_with_help() -> None:
    workers = {w: WorkerLoad(w, f"e{w}") for w in range(2)}

    def suggested(queued: int) -> list[Move]:
        replicas = [ReplicaLoad(0, p, 0, busy=0.12, queued=queued, slices_per_s=100) for p in range(8)]
        others = [ReplicaLoad(1, p, 1, busy=0.1, slices_per_s=100) for p in range(8)]
        return policy(steady_rounds=1).suggest(Loads(workers, replicas + others, 1.0), 1.0).moves

    assert suggested(queued=1000)
    assert suggested(queued=10) == [], "a tenth of a second's worth is nothing"


def test_the_queue_of_a_worker_with_time_to_spare_is_not_its_load() -> None:
    """Rows queue at such a worker because its output waits for a slow stage downstream."""
    workers = {w: WorkerLoad(w, f"e{w}") for w in range(2)}
    asked = policy(steady_rounds=1)
    for number in range(10):
        replicas = [
            ReplicaLoad(0, p, p % 2, busy=0.1, queued=1000 * number * (1 - p % 2), slices_per_s=10) for p in range(6)
        ]
        assert asked.suggest(Loads(workers, replicas, 1.0), float(number)).moves == []
