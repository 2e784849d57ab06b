"""Moves as the controller sees them: add, then drop; in which order, how fast, and which of them are refused."""

from __future__ import annotations

import pytest

from controller.balance.load import Move
from controller.decide.sweep import LOOK_EVERY_S
from flux.errors import UsageError
from flux.wire.control import CopyState, PartitionFinished, ReplicaCaughtUp, ReplicaDiverged
from partitioning.table import ReplicaAt
from tests.controller.cluster import Cluster, moving

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
    assert all(c.core.repairs.safety.is_safe(0, 0, replica) for replica in c.replicas())


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
    c.move_all(second, first)
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
    c.move_all(*plan)
    order = c.settle()
    assert order == [(m.stage, m.partition) for m in sorted(plan, key=lambda m: m.stage)]


def paced() -> Cluster:
    """Sums/0 has moved, 2 MiB where 1 MiB per second is allowed; Sums/1 is to move next."""
    c = Cluster(slots=4, partitions=2, balance_max_bytes_per_second=1 << 20)
    c.move_all(Move(0, 0, 0, 3), Move(0, 1, 1, 3))
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
    assert list(c.core.repairs.under_way) == [(0, 1), (0, 0)]


def test_several_of_a_stage_at_once_if_that_is_allowed_and_none_of_the_next() -> None:
    c = Cluster(slots=4, stages=2, partitions=4, repairs_at_once=3)
    plan = [
        Move(s, p, c.holders(p, s)[0], (set(range(4)) - set(c.holders(p, s))).pop()) for s in (0, 1) for p in (0, 1)
    ]
    c.move_all(*plan)
    assert list(c.core.repairs.under_way) == [(0, 0), (0, 1)]
    c.complete(0, 0)
    assert list(c.core.repairs.under_way) == [(0, 1)]
    c.complete(1, 0)
    assert list(c.core.repairs.under_way) == [(1, 0), (1, 1)]


def test_repairs_come_before_moves() -> None:
    c = Cluster(slots=5, partitions=4)
    plan = [Move(0, p, c.holders(p)[0], 4) for p in range(4) if 4 not in c.holders(p)]
    c.move_all(*plan)
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
    c.move_all(Move(0, whole, c.holders(whole)[0], target))
    for partition in repaired:
        assert whole not in [p for _, p in c.core.repairs.under_way]
        c.complete(partition)
    assert [p for _, p in c.core.repairs.under_way] == [whole]


def test_a_repair_waits_for_no_more_than_what_has_begun_when_it_fell_due() -> None:
    """Moves of an earlier stage that follow each other, two at a time, would keep a repair in a later one from ever
    beginning."""
    c = Cluster(slots=5, stages=2, partitions=4, repairs_at_once=2)
    plan = [Move(0, p, c.holders(p)[0], (set(range(5)) - set(c.holders(p))).pop()) for p in range(4)]
    c.move_all(*plan)
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
    c.move_all(Move(0, 1, 1, 3), Move(0, 0, 0, 4))
    c.take(c.core.leave([0, 4], "asked for", c.now))
    c.complete(1)
    (job,) = c.core.moving.under_way.values()
    assert (job.move.from_worker, job.move.target) == (0, c.holders(0)[-1])
    assert job.move.target not in (0, 4)
    assert not c.events("move given up")


def test_the_source_is_kept_where_another_copy_could_not_take_over() -> None:
    c = moving(replicas=3, source=0)
    c.caught_up(safe=False)
    c.core.repairs.safety.unsafe.add((0, 0, 1, 0))
    addition = c.core.repairs.under_way[0, 0]
    assert not c.core.moving.may_drop_source(addition, c.table)


def test_asking_again_for_a_move_under_way_changes_nothing() -> None:
    c = moving()
    epoch = c.table.epoch
    c.move_all(Move(0, 0, 0, 3))
    assert (c.table.epoch, len(c.core.moves_pending())) == (epoch, 1)


def test_both_copies_of_a_partition_move_one_after_the_other() -> None:
    c = Cluster(slots=4)
    c.move_all(Move(0, 0, 0, 2), Move(0, 0, 1, 3))
    assert c.settle() == [(0, 0), (0, 0)]
    assert c.holders() == [2, 3]


def test_a_partition_can_go_back_to_where_it_was() -> None:
    c = moving(slots=2, replicas=1, target=1)
    c.complete()
    c.move_all(Move(0, 0, 1, 0))
    c.complete()
    (back,) = c.replicas()
    assert (back.worker, back.live) == (0, True)
    assert back.incarnation > 0, "another life than the first"


# ---- refusals


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Move(7, 0, 0, 3), "there is no stage 7; there are 0 (Sums)"),
        (Move(-1, 0, 0, 3), "there is no stage -1"),
        (Move(0, 9, 0, 3), "stage Sums has no partition 9; it has 0 to 1"),
        (Move(0, 0, 2, 3), "Sums/0 is not on worker 2; it is on 0, 1"),
        (Move(0, 0, 0, 1), "Sums/0: worker 1 holds a replica already"),
        (Move(0, 0, 0, 0), "Sums/0 would stay where it is"),
        (Move(0, 0, 0, 9), "there is no worker 9; there are 0, 1, 2, 3"),
        (Move(0, 0, 0, 3), "worker 3 is on the same executor as worker 1, which holds another replica"),
    ],
)
def test_an_impossible_move_is_refused_with_the_reason_and_none_of_the_others_is_made(wrong: Move, says: str) -> None:
    c = Cluster(slots=4, partitions=2, executors={1: "shared", 3: "shared"})
    with pytest.raises(UsageError) as error:
        c.move_all(Move(0, 0, 1, 2), wrong)
    assert says in str(error.value)
    assert not c.core.moving
    assert c.table.epoch == 0


def test_the_executor_of_the_source_is_no_hindrance() -> None:
    c = Cluster(slots=4, executors={0: "shared", 3: "shared"})
    c.move_all(Move(0, 0, 0, 3))
    c.complete()
    assert c.holders() == [3, 1]


def test_another_target_for_what_is_moving_already_is_refused() -> None:
    c = moving(source=1)
    with pytest.raises(UsageError, match="Sums/0 is moving from worker 1 to worker 3 already: asked for"):
        c.move_all(Move(0, 0, 1, 2))


def test_copies_without_an_order_cannot_be_moved() -> None:
    c = Cluster(slots=4, ordered=False)
    with pytest.raises(UsageError, match="do not keep one order"):
        c.move_all(Move(0, 0, 0, 3))


def test_there_is_nothing_to_move_before_the_start_and_after_the_end() -> None:
    c = Cluster(slots=4)
    c.take(c.core.driver.on_stop())
    with pytest.raises(UsageError, match="cannot move partitions: the query is ended"):
        c.move_all(Move(0, 0, 0, 3))


def test_output_that_is_being_fetched_stays_where_it_is() -> None:
    c = Cluster(slots=4, collect=1)
    held = c.holders(0, 1)
    target = (set(range(4)) - set(held)).pop()
    c.move_all(Move(1, 0, held[0], target))
    listed = c.replicas(0, 1)[-1]
    assert listed.worker == target
    c.report(held[0], PartitionFinished(node=held[0], stage=1, partition=0))
    assert c.core.phase == "finished"
    assert c.events("move given up")[0].why.startswith("the query is through")
    assert c.holders(0, 1) == held, "its target would be one copy too many"
    about = {"stage": 1, "partition": 0, "worker": target, "incarnation": listed.incarnation}
    for safe in (False, True):  # reports that the primary sent before it heard of that
        c.report(held[0], ReplicaCaughtUp(node=held[0], safe=safe, stall_ms=0.0, **about))
    assert c.holders(0, 1) == held
    with pytest.raises(UsageError, match="the query is finished"):
        c.move_all(Move(1, 0, held[0], target))
