"""Moves as the controller sees them: add, then drop, whatever is lost half-way."""

from __future__ import annotations

from typing import Any

import pytest

from controller.attempts import ATTEMPTS_MAX, CONFIRM_MAX_S, SAFE_MAX_S
from controller.load import Move
from controller.moving import BEGIN_MAX
from controller.sweeping import LOOK_EVERY_S
from flux.control import CopyState, PartitionFinished, ReplicaCaughtUp, ReplicaDiverged
from flux.errors import QueryFailed, UsageError
from partitioning.table import ReplicaAt
from tests.controller.cluster import Cluster


def move(c: Cluster, *moves: Move, why: str = "asked for") -> None:
    c.take(c.core.move(moves, why, c.now))


def moving(slots: int = 4, replicas: int = 2, source: int = 0, target: int = 3, **more: int) -> Cluster:
    """Sums/0 is moving; its copies are on workers 0, 1, ... at first."""
    c = Cluster(slots=slots, replicas=replicas, **more)
    assert c.holders() == list(range(replicas))
    move(c, Move(0, 0, source, target))
    assert c.holders() == [*range(replicas), target]
    return c


# ---- the two halves


def test_a_move_adds_the_target_and_drops_the_source_once_the_target_is_safe() -> None:
    c = moving(source=1)
    assert c.sent(CopyState) == [CopyState(stage=0, partition=0, worker=3, incarnation=1)]
    c.caught_up(safe=False)
    assert c.holders() == [0, 1, 3], "live is not enough"
    c.caught_up(safe=True)
    assert c.replicas() == (ReplicaAt(0, 0), ReplicaAt(3, 1))
    assert (c.core.moving.done, c.core.repairs.done, c.core.repairs.take_overs) == (1, 0, 0)


def test_the_target_takes_the_place_of_a_primary_that_moves() -> None:
    c = moving(replicas=3, source=0)
    c.complete()
    assert c.holders() == [3, 1, 2]
    assert all(c.core.repairs.is_safe(0, 0, replica) for replica in c.replicas())


def test_a_secondary_that_moves_leaves_the_primary_what_it_is() -> None:
    c = moving(replicas=3, source=2)
    c.complete()
    assert c.holders() == [0, 1, 3]


def test_a_stage_with_one_replica_has_two_for_a_moment() -> None:
    c = moving(slots=2, replicas=1, target=1)
    c.complete()
    assert c.replicas() == (ReplicaAt(1, 1),)


def test_the_history_says_where_from_where_to_why_how_much_and_how_long() -> None:
    c = moving(source=1)
    c.now += 0.5
    c.caught_up(safe=False, stall_ms=12.0, bytes=1 << 20)
    c.now += 0.25
    c.caught_up(safe=True)
    (event,) = c.core.repairs.news()
    assert (event.kind, event.stage, event.partition, event.source, event.worker) == ("move", "Sums", 0, 1, 3)
    assert (event.why, event.bytes, event.stall_ms, event.seconds) == ("asked for", 1 << 20, 12.0, 0.75)
    assert str(event) == (
        "move of Sums/0 from worker 1 to worker 3: asked for; took 0.750 s, 1,048,576 bytes of state, stall 12.0 ms"
    )


def test_what_is_under_way_and_what_waits_is_in_the_progress_report() -> None:
    c = Cluster(slots=4, partitions=2)
    first, second = Move(0, 0, 0, 3), Move(0, 1, 1, 3)
    move(c, second, first)
    assert c.core.moves_pending() == [second, first]
    report = c.core.report()
    assert report["movesUnderWay"] == [
        {"stage": "Sums", "partition": 1, "source": 1, "target": 3, "phase": "copy", "why": "asked for"}
    ]
    assert (report["movesDone"], report["movesPending"], report["repairsUnderWay"]) == (0, 1, [])
    assert c.settle() == [(0, 1), (0, 0)]
    assert (c.core.report()["movesDone"], c.core.moves_pending()) == (2, [])


# ---- order


def test_moves_go_from_input_to_output_one_at_a_time() -> None:
    c = Cluster(slots=4, stages=3, partitions=2)
    plan = [Move(s, p, c.holders(p, s)[0], c.holders(p, s)[0] + 2 & 3) for s in (2, 0, 1) for p in (1, 0)]
    plan = [m for m in plan if m.target not in c.holders(m.partition, m.stage)]
    assert {m.stage for m in plan} == {0, 1, 2}
    move(c, *plan)
    order = c.settle()
    assert order == [(m.stage, m.partition) for m in sorted(plan, key=lambda m: m.stage)]


def paced() -> Cluster:
    """Sums/0 has moved, 2 MiB where 1 MiB per second is allowed; Sums/1 is to move next."""
    c = Cluster(slots=4, partitions=2, balance_max_bytes_per_second=1 << 20)
    move(c, Move(0, 0, 0, 3), Move(0, 1, 1, 3))
    c.complete(bytes=2 << 20)
    assert c.core.moving.done == 1
    return c


def test_moves_copy_no_more_bytes_per_second_than_allowed_on_average() -> None:
    c = paced()
    assert not c.core.repairs.under_way
    c.tick(1.9)
    assert not c.core.repairs.under_way
    (reason,) = c.core.report()["movesWaiting"]
    assert "spark.flux.balance.maxBytesPerSecond" in reason
    c.tick(LOOK_EVERY_S)
    assert list(c.core.repairs.under_way) == [(0, 1)]


def test_a_worker_that_leaves_is_emptied_as_fast_as_it_goes() -> None:
    c = paced()
    c.take(c.core.drain(1, c.now))
    assert list(c.core.repairs.under_way) == [(0, 1)]


def test_several_of_a_stage_at_once_if_that_is_allowed_and_none_of_the_next() -> None:
    c = Cluster(slots=4, stages=2, partitions=4, repairs_at_once=3)
    plan = [
        Move(s, p, c.holders(p, s)[0], (set(range(4)) - set(c.holders(p, s))).pop()) for s in (0, 1) for p in (0, 1)
    ]
    move(c, *plan)
    assert list(c.core.repairs.under_way) == [(0, 0), (0, 1)]
    c.complete(0, 0)
    assert list(c.core.repairs.under_way) == [(0, 1)]
    c.complete(1, 0)
    assert list(c.core.repairs.under_way) == [(1, 0), (1, 1)]


def test_repairs_come_before_moves() -> None:
    c = Cluster(slots=5, partitions=4)
    plan = [Move(0, p, c.holders(p)[0], 4) for p in range(4) if 4 not in c.holders(p)]
    move(c, *plan)
    assert list(c.core.repairs.under_way) == [(0, plan[0].partition)]
    lost = next(node for node in range(4) if node not in c.holders(plan[0].partition))
    c.lose(lost)
    short = [p for p in range(4) if len(c.holders(p)) < 2]
    assert short
    order = [p for _, p in c.settle()]
    assert order[: 1 + len(short)] == [plan[0].partition, *short], "what was begun comes to its end first"


def test_a_move_waits_for_a_repair_under_way_though_more_may_be_added_at_once() -> None:
    c = Cluster(slots=5, partitions=3, repairs_at_once=4)
    lost = c.holders(0)[1]
    c.lose(lost)
    repaired = [p for _, p in c.core.repairs.under_way]
    whole = next((p for p in range(3) if p not in repaired), None)
    assert whole is not None
    target = next(w for w in c.core.members.workers if w not in c.holders(whole))
    move(c, Move(0, whole, c.holders(whole)[0], target))
    for partition in repaired:
        assert whole not in [p for _, p in c.core.repairs.under_way]
        c.complete(partition)
    assert [p for _, p in c.core.repairs.under_way] == [whole]


def test_a_repair_waits_for_no_more_than_what_has_begun_when_it_fell_due() -> None:
    """Moves of an earlier stage that follow each other, two at a time, would keep a repair in a later one from ever
    beginning."""
    c = Cluster(slots=5, stages=2, partitions=4, repairs_at_once=2)
    plan = [Move(0, p, c.holders(p)[0], (set(range(5)) - set(c.holders(p))).pop()) for p in range(4)]
    move(c, *plan)
    assert list(c.core.repairs.under_way) == [(0, 0), (0, 1)]
    primary, other = c.holders(2, 1)
    c.report(primary, ReplicaDiverged(node=primary, stage=1, partition=2, worker=other, incarnation=0, step=1))
    c.complete(0)
    assert list(c.core.repairs.under_way) == [(0, 1)], "none of the same stage begins either"
    c.complete(1)
    assert list(c.core.repairs.under_way) == [(1, 2)]
    c.complete(2, 1)
    assert c.settle() == [(0, 2), (0, 3)]


def test_a_move_to_a_worker_that_leaves_goes_elsewhere_if_its_source_leaves_too() -> None:
    c = Cluster(slots=5, partitions=2)
    move(c, Move(0, 1, 1, 3), Move(0, 0, 0, 4))
    c.take(c.core.leave([0, 4], "asked for", c.now))
    c.complete(1)
    (job,) = c.core.moving.under_way.values()
    assert (job.move.source, job.move.target) == (0, c.holders(0)[-1])
    assert job.move.target not in (0, 4)
    assert not c.events("move given up")


def test_the_source_is_kept_where_another_copy_could_not_take_over() -> None:
    c = moving(replicas=3, source=0)
    c.caught_up(safe=False)
    c.core.repairs._unsafe.add((0, 0, 1, 0))
    addition = c.core.repairs.under_way[0, 0]
    assert not c.core.moving.may_drop_source(addition, c.table)


def test_asking_again_for_a_move_under_way_changes_nothing() -> None:
    c = moving()
    epoch = c.table.epoch
    move(c, Move(0, 0, 0, 3))
    assert (c.table.epoch, len(c.core.moves_pending())) == (epoch, 1)


def test_both_copies_of_a_partition_move_one_after_the_other() -> None:
    c = Cluster(slots=4)
    move(c, Move(0, 0, 0, 2), Move(0, 0, 1, 3))
    assert c.settle() == [(0, 0), (0, 0)]
    assert c.holders() == [2, 3]


def test_a_partition_can_go_back_to_where_it_was() -> None:
    c = moving(slots=2, replicas=1, target=1)
    c.complete()
    move(c, Move(0, 0, 1, 0))
    c.complete()
    (back,) = c.replicas()
    assert (back.worker, back.live) == (0, True)
    assert back.incarnation > 0, "another life than the first"


# ---- what is refused


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Move(7, 0, 0, 3), "there is no stage 7; there are 0 (Sums)"),
        (Move(-1, 0, 0, 3), "there is no stage -1"),
        (Move(0, 9, 0, 3), "stage Sums has no partition 9; it has 0 to 1"),
        (Move(0, 0, 2, 3), "Sums/0 is not on worker 2; it is on 0, 1"),
        (Move(0, 0, 0, 1), "Sums/0: worker 1 holds a copy already"),
        (Move(0, 0, 0, 0), "Sums/0 would stay where it is"),
        (Move(0, 0, 0, 9), "there is no worker 9; there are 0, 1, 2, 3"),
        (Move(0, 0, 0, 3), "worker 3 is on the same executor as worker 1, which holds another copy"),
    ],
)
def test_an_impossible_move_is_refused_with_the_reason_and_none_of_the_others_is_made(wrong: Move, says: str) -> None:
    c = Cluster(slots=4, partitions=2, executors={1: "shared", 3: "shared"})
    with pytest.raises(UsageError) as error:
        move(c, Move(0, 0, 1, 2), wrong)
    assert says in str(error.value)
    assert not c.core.moving
    assert c.table.epoch == 0


def test_the_executor_of_the_source_is_no_hindrance() -> None:
    c = Cluster(slots=4, executors={0: "shared", 3: "shared"})
    move(c, Move(0, 0, 0, 3))
    c.complete()
    assert c.holders() == [3, 1]


def test_another_target_for_what_is_moving_already_is_refused() -> None:
    c = moving(source=1)
    with pytest.raises(UsageError, match="Sums/0 is moving from worker 1 to worker 3 already: asked for"):
        move(c, Move(0, 0, 1, 2))


def test_copies_without_an_order_cannot_be_moved() -> None:
    c = Cluster(slots=4, ordered=False)
    with pytest.raises(UsageError, match="do not keep one order"):
        move(c, Move(0, 0, 0, 3))


def test_there_is_nothing_to_move_before_the_start_and_after_the_end() -> None:
    c = Cluster(slots=4)
    c.take(c.core.on_stop())
    with pytest.raises(UsageError, match="cannot move partitions: the query is ended"):
        move(c, Move(0, 0, 0, 3))


def test_output_that_is_being_fetched_stays_where_it_is() -> None:
    c = Cluster(slots=4, collect=1)
    held = c.holders(0, 1)
    target = (set(range(4)) - set(held)).pop()
    move(c, Move(1, 0, held[0], target))
    c.report(held[0], PartitionFinished(node=held[0], stage=1, partition=0))
    assert c.core.phase == "finished"
    assert c.events("move given up")[0].why.startswith("the query is through")
    c.complete(0, 1)
    assert c.holders(0, 1)[0] == held[0]
    with pytest.raises(UsageError, match="the query is finished"):
        move(c, Move(1, 0, held[0], target))


# ---- a worker is lost half-way: at each of the steps


@pytest.mark.parametrize("step", ["retain", "copy", "live"])
class TestLostHalfWay:
    """``step``: how far the addition of the target had come."""

    def half_way(self, step: str, source: int, replicas: int = 2, **more: Any) -> Cluster:
        c = Cluster(slots=5, replicas=replicas, **more)
        if step == "retain":
            c.mute = {"w4.0"}
        move(c, Move(0, 0, source, 3))
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
        assert "worker 0 has lost its copy, which is repaired" in c.events("move given up")[0].why

    def test_the_only_copy_and_the_query_fails_as_without_a_move(self, step: str) -> None:
        c = self.half_way(step, source=0, replicas=1)
        c.lose(0)
        assert isinstance(c.core.error, QueryFailed)
        assert "the only safe copy of Sums/0" in str(c.core.error)

    def test_a_primary_that_does_not_move_and_the_partition_is_repaired_before_it_moves(self, step: str) -> None:
        c = self.half_way(step, source=1)
        c.lose(0)
        assert c.holders()[0] == 1
        assert c.core.repairs.under_way[0, 0].source is None, "a repair first"
        c.confirm(4, c.table.epoch)
        repaired = c.holders()[1]
        c.complete()
        c.mute = set()
        c.confirm(4, c.table.epoch)
        c.tick(1.0)
        if repaired == 3:
            assert "worker 3 holds a copy already" in c.events("move given up")[0].why
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
        assert "worker 3 holds a copy already" in c.events("move given up")[0].why

    def test_another_secondary_and_the_target_does_not_stay_beside_a_source_on_its_own_executor(
        self, step: str
    ) -> None:
        c = self.half_way(step, source=0, executors={0: "shared", 3: "shared"})
        c.lose(1)
        assert c.core.repairs.under_way[0, 0].source is None, "a repair first, on another executor"
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
        assert "the only safe copy of Sums/0" in str(c.core.error)


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
    """It goes by its old table still: says again that the target is safe, and that a secondary gives other output."""
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
    move(c, Move(0, 0, 0, 3))
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
    move(c, *plan)
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
    move(c, Move(0, 0, 1, 3))
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
    needs_other = len(c.holders(other)) < 2
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
