"""A move that is not carried through: a worker is lost at any of its steps, outputs differ, or a copy does not arrive."""

from __future__ import annotations

from typing import Any

import pytest

from controller.balance.load import Move
from controller.replicas.addition_limits import ATTEMPTS_MAX, CONFIRM_MAX_S, SAFE_MAX_S
from controller.replicas.moves import BEGIN_MAX
from flux.errors import QueryFailed
from flux.wire.control import PartitionFinished, ReplicaCaughtUp, ReplicaDiverged
from partitioning.table import ReplicaAt
from tests.controller.cluster import Cluster, moving

# ---- a worker is lost half-way: at each of the steps


@pytest.mark.parametrize("step", ["retain", "copy", "live"])
class TestLostHalfWay:
    """Moves that lose a worker half-way. ``step``: the progress of the target's addition by then."""

    def half_way(self, step: str, source: int, replicas: int = 2, **more: Any) -> Cluster:
        c = Cluster(slots=5, replicas=replicas, **more)
        if step == "retain":
            c.mute = {"w4.0"}
        c.move_all(Move(0, 0, source, 3))
        if step == "live":
            c.caught_up(safe=False)
        assert c.core.repairs.under_way[0, 0].phase == step
        return c

    def test_the_target_another_is_not_looked_for_when_somebody_named_it(self, step: str) -> None:
        c = self.half_way(step, source=0)
        c.lose(3)
        assert c.holders() == [0, 1]
        assert not c.core.moving
        assert "there is no worker 3" in c.events("move given up")[0].why

    def test_a_source_that_is_secondary_and_the_addition_becomes_the_repair(self, step: str) -> None:
        c = self.half_way(step, source=1)
        begun = c.replicas()[-1]
        c.lose(1)
        assert c.holders() == [0, 3]
        assert c.replicas()[-1].incarnation == begun.incarnation, "what was begun goes on"
        assert "the one on worker 3 replaces it" in c.events("move given up")[0].why
        c.confirm(4, c.table.epoch)
        if step != "live":
            c.caught_up(safe=False)
        c.caught_up(safe=True)
        assert (c.holders(), c.core.repairs.done, c.core.moving.done) == ([0, 3], 1, 0)
        assert not c.core.moving

    def test_a_source_that_is_primary_and_the_rest_is_repaired_from_the_survivor(self, step: str) -> None:
        c = self.half_way(step, source=0)
        begun = c.replicas()[-1]
        c.lose(0)
        assert c.replicas()[0] == ReplicaAt(1, 0)
        assert len(c.holders()) == 2
        assert c.replicas()[1].incarnation > begun.incarnation, "its copy may hold what the survivor orders otherwise"
        c.confirm(4, c.table.epoch)
        c.complete()
        assert (len(c.holders()), c.core.repairs.done, c.core.moving.done) == (2, 1, 0)
        assert "worker 0 has lost its replica, which is repaired" in c.events("move given up")[0].why

    def test_the_only_copy_and_the_query_fails_as_without_a_move(self, step: str) -> None:
        c = self.half_way(step, source=0, replicas=1)
        c.lose(0)
        assert isinstance(c.core.error, QueryFailed)
        assert "the only safe replica of Sums/0" in str(c.core.error)

    def test_a_primary_that_does_not_move_and_the_partition_is_repaired_before_it_moves(self, step: str) -> None:
        c = self.half_way(step, source=1)
        c.lose(0)
        assert c.holders()[0] == 1
        assert c.core.repairs.under_way[0, 0].from_worker is None, "a repair first"
        c.confirm(4, c.table.epoch)
        repaired = c.holders()[1]
        c.complete()
        c.mute = set()
        c.confirm(4, c.table.epoch)
        c.tick(1.0)
        if repaired == 3:
            assert "worker 3 holds a replica already" in c.events("move given up")[0].why
        else:
            assert c.holders() == [1, repaired, 3]
            c.complete()
            assert c.holders() == [3, repaired]
        assert not c.core.moving

    def test_another_secondary_and_the_target_takes_its_place_while_the_source_stays(self, step: str) -> None:
        c = self.half_way(step, source=0)
        c.lose(1)
        assert c.holders() == [0, 3]
        c.confirm(4, c.table.epoch)
        if step != "live":
            c.caught_up(safe=False)
        c.caught_up(safe=True)
        assert c.holders() == [0, 3], "two safe copies before, and two after"
        assert (c.core.repairs.done, c.core.moving.done) == (1, 0)
        assert not c.core.moving
        assert "worker 3 holds a replica already" in c.events("move given up")[0].why

    def test_another_secondary_and_the_target_does_not_stay_beside_a_source_on_its_own_executor(
        self, step: str
    ) -> None:
        c = self.half_way(step, source=0, executors={0: "shared", 3: "shared"})
        c.lose(1)
        assert c.core.repairs.under_way[0, 0].from_worker is None, "a repair first, on another executor"
        assert c.holders()[0] == 0
        assert c.holders()[1] in (2, 4)
        c.confirm(4, c.table.epoch)
        repaired = c.holders()[1]
        c.complete()
        c.confirm(4, c.table.epoch)
        assert c.holders() == [0, repaired, 3], "then the move begins again"
        c.complete()
        c.confirm(4, c.table.epoch)
        assert (c.holders(), c.core.repairs.done, c.core.moving.done) == ([3, repaired], 1, 1)

    def test_a_bystander_of_the_same_partition_with_three_copies(self, step: str) -> None:
        c = self.half_way(step, source=1, replicas=3)
        c.lose(2)
        c.confirm(4, c.table.epoch)
        if step != "live":
            c.caught_up(safe=False)
        c.caught_up(safe=True)
        assert c.holders() == [0, 1, 3]
        assert not c.core.repairs.under_way

    def test_a_worker_that_has_no_part_in_it(self, step: str) -> None:
        c = self.half_way(step, source=0)
        c.lose(4)
        c.caught_up(safe=False)
        c.caught_up(safe=True)
        assert (c.holders(), c.core.moving.done) == ([3, 1], 1)

    def test_target_and_source_together(self, step: str) -> None:
        c = self.half_way(step, source=1)
        c.lose(3)
        c.lose(1)
        c.confirm(4, c.table.epoch)
        c.settle()
        assert c.holders()[0] == 0
        assert len(c.holders()) == 2
        assert not c.core.moving

    def test_source_and_then_the_survivor_that_is_the_last_safe_copy(self, step: str) -> None:
        c = self.half_way(step, source=0)
        c.lose(0)
        c.lose(1)
        assert "the only safe replica of Sums/0" in str(c.core.error)


def test_once_the_source_is_dropped_the_target_is_one_that_may_take_over() -> None:
    c = moving(source=1)
    c.complete()
    c.lose(0)
    assert c.holders()[0] == 3
    assert c.core.error is None


def test_a_source_lost_as_its_drop_goes_out_is_an_ordinary_loss() -> None:
    c = moving(source=0)
    c.caught_up(safe=False)
    c.mute = {"w0.0", "w1.0", "w2.0", "w3.0"}
    c.caught_up(safe=True)
    c.lose(0)
    assert (c.holders(), c.core.moving.done, c.core.repairs.take_overs) == ([3, 1], 1, 0)
    assert not c.core.repairs.under_way


def test_what_a_source_says_after_it_was_dropped_changes_nothing() -> None:
    """Still on its old table, the source says again that the target is safe, and that a secondary gives other output."""
    c = moving(source=0)
    target = c.replicas()[-1]
    c.complete()
    table, done = c.table, c.core.moving.done
    for safe in (False, True):
        said = ReplicaCaughtUp(node=0, stage=0, partition=0, worker=3, incarnation=target.incarnation, safe=safe)
        c.report(0, said)
    c.report(0, ReplicaDiverged(node=0, stage=0, partition=0, worker=3, incarnation=target.incarnation, step=5))
    assert (c.table, c.core.moving.done) == (table, done)


def test_a_target_with_other_output_is_dropped_and_the_move_begins_again() -> None:
    c = moving(source=1)
    c.caught_up(safe=False)
    first = c.replicas()[-1]
    c.report(0, ReplicaDiverged(node=0, stage=0, partition=0, worker=3, incarnation=first.incarnation, step=5))
    assert c.holders() == [0, 1, 3]
    assert c.replicas()[-1].incarnation > first.incarnation
    c.complete()
    assert c.holders() == [0, 3]


def test_a_source_with_other_output_is_dropped_and_the_target_becomes_the_repair() -> None:
    c = moving(source=1)
    c.report(0, ReplicaDiverged(node=0, stage=0, partition=0, worker=1, incarnation=0, step=5))
    c.complete()
    assert (c.holders(), c.core.repairs.done, c.core.moving.done) == ([0, 3], 1, 0)


def test_a_finished_partition_can_be_moved_while_others_are_not_through() -> None:
    c = Cluster(slots=4, partitions=2)
    c.report(0, PartitionFinished(node=0, stage=0, partition=0))
    c.move_all(Move(0, 0, 0, 3))
    c.complete()
    assert c.holders() == [3, 1]
    c.report(3, PartitionFinished(node=3, stage=0, partition=0))
    assert c.core.phase == "running", "told twice"
    c.report(1, PartitionFinished(node=1, stage=0, partition=1))
    assert (c.core.phase, c.core.error) == ("ended", None)


def test_a_plan_whose_workers_are_gone_before_its_turn_comes_is_given_up_move_by_move() -> None:
    c = Cluster(slots=5, partitions=3)
    spare = [(set(range(5)) - set(c.holders(p))) for p in range(3)]
    plan = [Move(0, p, c.holders(p)[0], 4) for p in range(3) if 4 in spare[p]]
    assert len(plan) == 3
    c.move_all(*plan)
    c.lose(4)
    c.settle()
    assert len(c.events("move given up")) == 3
    assert not c.core.moving


# ---- attempts


def test_a_copy_that_never_arrives_is_given_up_after_some_and_the_target_dropped() -> None:
    c = moving(source=1)
    first = c.replicas()[-1]
    for _ in range(40):
        c.tick(1.0)
    (failed,) = c.events("failed attempt")
    assert (failed.worker, failed.source) == (3, 1)
    assert "it does not follow after 5 copies of state" in failed.why
    assert c.replicas()[-1].incarnation > first.incarnation, "the second attempt"


def test_a_move_that_fails_again_and_again_is_given_up_and_the_reason_told() -> None:
    c = moving(source=1)
    for _ in range(600):
        c.tick(1.0)
    assert len(c.events("failed attempt")) == BEGIN_MAX
    (given_up,) = c.events("move given up")
    assert f"that was attempt {BEGIN_MAX}" in given_up.why
    assert c.holders() == [0, 1]
    assert not c.core.moving


def test_a_live_target_that_does_not_become_safe_holds_up_commits_and_is_dropped() -> None:
    c = moving(source=1)
    c.caught_up(safe=False)
    first = c.replicas()[-1]
    c.tick(SAFE_MAX_S + 1.0)
    assert first not in c.replicas()
    assert "it is live, and still not safe" in c.events("failed attempt")[0].why


def test_a_process_that_does_not_confirm_is_named_and_producers_need_not_keep_rows_for_ever() -> None:
    c = Cluster(slots=4)
    c.mute = {"w2.0"}
    c.move_all(Move(0, 0, 1, 3))
    c.tick(CONFIRM_MAX_S + 1.0)
    assert "worker 2 did not confirm its table within 31 s" in c.events("failed attempt")[0].why


def test_a_repair_goes_to_another_worker_when_the_first_fails() -> None:
    c = Cluster(slots=4)
    c.lose(1)
    tried = [c.holders()[1]]
    for _ in range(40):
        c.tick(1.0)
    tried.append(c.holders()[1])
    assert sorted(tried) == [2, 3]


def test_after_some_attempts_a_partition_rests_and_says_so_and_others_go_on() -> None:
    c = Cluster(slots=4, partitions=2)
    for partition in (0, 1):
        assert 0 in c.holders(partition) or 1 in c.holders(partition)
    c.lose(c.holders(0)[1])
    stuck = next(iter(c.core.repairs.under_way))[1]
    other = 1 - stuck
    needs_other = (0, other) in c.core.repairs.under_way
    while len(c.events("failed attempt")) < ATTEMPTS_MAX:
        c.tick(1.0)
    (warning,) = c.events("warning")
    assert "it is tried again in 10 s" in warning.why
    assert (0, stuck) not in c.core.repairs.under_way
    if needs_other:
        assert list(c.core.repairs.under_way) == [(0, other)]
        c.complete(other)
    for _ in range(11):
        c.tick(1.0)
    assert list(c.core.repairs.under_way) == [(0, stuck)]
    c.complete(stuck)
    assert len(c.holders(stuck)) == 2


def test_success_makes_earlier_failures_forgotten() -> None:
    c = Cluster(slots=4)
    c.lose(1)
    for _ in range(40):
        c.tick(1.0)
    c.complete()
    assert c.core.repairs.attempts.patience_s((0, 0)) == 1.0
