"""Workers that come later and workers that leave: nothing is lost, and tasks end well."""

from __future__ import annotations

from typing import Any

import pytest

from controller.load import Move
from controller.sweeping import DRAIN_TOLD_S
from flux.control import Goodbye, Heartbeat, NewTable, RegisterAgain, Rejected, Stop, Welcome
from flux.errors import QueryFailed, UsageError
from tests.controller.cluster import Cluster, register


def drain(c: Cluster, worker: int) -> None:
    c.take(c.core.drain(worker, c.now))


def scale(c: Cluster, workers: int) -> None:
    c.take(c.core.scale(workers, c.now))


def stops(c: Cluster, connection: str) -> list[Any]:
    return [order for order in c.told(connection) if isinstance(order, Stop)]


def all_holders(c: Cluster) -> set[int]:
    return {replica.worker for stage in c.table.stages for replicas in stage for replica in replicas}


# ---- drain


def test_a_worker_that_is_drained_gives_everything_away_and_then_is_told_to_stop() -> None:
    c = Cluster(slots=4, partitions=4, stages=2)
    held = sum(0 in c.holders(p, s) for s in (0, 1) for p in range(4))
    drain(c, 0)
    assert c.core.report()["leaving"] == [0]
    order = c.settle()
    assert (len(order), order) == (held, sorted(order)), "in topological order"
    assert 0 not in all_holders(c)
    assert 0 not in c.table.endpoints
    assert all(len(c.holders(p, s)) == 2 for s in (0, 1) for p in range(4))
    assert [stop.reason for stop in stops(c, "w0.0")] == ["worker 0 has left the query: asked for"]
    assert not stops(c, "w1.0")
    assert (c.core.report()["leaving"], c.core.moving.done) == ([], held)
    (event,) = c.events("drain")
    assert (event.worker, event.why) == (0, "asked for")


def test_the_others_get_about_as_much_each() -> None:
    c = Cluster(slots=4, partitions=12)
    drain(c, 0)
    c.settle()
    copies = [sum(worker in c.holders(p) for p in range(12)) for worker in (1, 2, 3)]
    assert max(copies) - min(copies) <= 1


def test_a_worker_that_leaves_gets_nothing_more() -> None:
    c = Cluster(slots=4, partitions=4)
    drain(c, 0)
    c.lose(1)
    c.settle()
    assert 0 not in all_holders(c)
    assert c.core.error is None


def test_nothing_can_be_moved_to_a_worker_that_leaves() -> None:
    c = Cluster(slots=4, partitions=4)
    drain(c, 3)
    partition = next(p for p in range(4) if 3 not in c.holders(p))
    with pytest.raises(UsageError, match="worker 3 is leaving"):
        c.core.move([Move(0, partition, c.holders(partition)[0], 3)], "by hand", c.now)


def test_what_others_gave_it_just_now_is_given_to_somebody_else() -> None:
    """A worker that leaves while it is a target, of a move or of a repair."""
    c = Cluster(slots=5)
    c.take(c.core.move([Move(0, 0, 0, 3)], "by hand", c.now))
    drain(c, 3)
    assert "worker 3" in c.events("move given up")[0].why
    assert c.holders() == [0, 1]
    c.lose(1)
    target = c.holders()[1]
    drain(c, target)
    c.settle()
    assert c.holders()[1] not in (3, target)
    assert set(c.core.members.workers) == {0, c.holders()[1]}


def test_its_partitions_of_sources_are_read_by_those_that_stay_from_the_first_moment() -> None:
    c = Cluster(slots=4, readers=8)
    before = c.table.sources[0]
    drain(c, 3)
    drain(c, 0)
    after = c.table.sources[0]
    assert not {0, 3} & set(after)
    assert all(new == old for new, old in zip(after, before, strict=True) if old not in (0, 3))
    assert max(after.count(1), after.count(2)) - min(after.count(1), after.count(2)) <= 2


def test_a_loss_gives_no_source_to_a_worker_that_leaves() -> None:
    c = Cluster(slots=4, partitions=4, readers=8)
    drain(c, 3)
    assert 3 in c.core.members.workers
    c.lose(0)
    assert 3 not in c.table.sources[0]


def test_asking_twice_is_asking_once() -> None:
    c = Cluster(slots=4)
    drain(c, 0)
    before = (c.table.epoch, len(c.core.moves_pending()))
    drain(c, 0)
    assert (c.table.epoch, len(c.core.moves_pending())) == before


def test_an_idle_worker_leaves_at_once() -> None:
    c = Cluster(slots=4)
    drain(c, 3)
    assert 3 not in c.table.endpoints
    assert stops(c, "w3.0")


@pytest.mark.parametrize(("slots", "replicas", "leaves"), [(2, 2, [0]), (4, 3, [0, 1]), (1, 1, [0])])
def test_a_drain_that_leaves_too_few_workers_is_refused_with_the_arithmetic(
    slots: int, replicas: int, leaves: list[int]
) -> None:
    c = Cluster(slots=slots, replicas=replicas)
    *first, last = leaves
    for worker in first:
        drain(c, worker)
    before = c.core.report()["leaving"]
    with pytest.raises(UsageError, match=rf"Sums has replicas={replicas}, and without workers? .*: add workers first"):
        drain(c, last)
    assert c.core.report()["leaving"] == before


def test_workers_on_one_executor_count_as_one_unless_copies_may_share() -> None:
    shared = {0: "a", 1: "b", 2: "b"}
    with pytest.raises(UsageError, match="2 workers on 1 executor:"):
        drain(Cluster(slots=3, executors=shared), 0)
    c = Cluster(slots=3, executors=shared, same_executor=True)
    drain(c, 0)
    c.settle()
    assert all_holders(c) == {1, 2}


def test_an_unknown_worker_cannot_be_drained() -> None:
    with pytest.raises(UsageError, match=r"there is no worker 9; there are 0, 1, 2"):
        drain(Cluster(), 9)


# ---- losses during a drain


def test_a_worker_that_is_lost_while_it_is_emptied_is_an_ordinary_loss_and_its_task_does_not_come_back() -> None:
    c = Cluster(slots=4, partitions=4)
    drain(c, 0)
    c.lose(0)
    c.settle()
    assert all(len(c.holders(p)) == 2 for p in range(4))
    assert "it was lost before it was empty" in c.events("drain")[0].why
    assert not c.core.moving
    c.join(0, attempt=7)
    assert [type(order) for order in c.told("w0.7")] == [Stop]
    assert len(c.core.members.workers) == 3


def test_a_target_that_is_lost_is_replaced_by_another() -> None:
    c = Cluster(slots=5, partitions=4)
    drain(c, 0)
    (addition,) = c.core.repairs.under_way.values()
    c.lose(addition.worker)
    c.settle()
    assert 0 not in all_holders(c)
    assert addition.worker not in all_holders(c)
    assert not c.events("move given up"), "it goes wherever there is room"


def test_when_the_rest_cannot_hold_everything_any_more_the_worker_stays_until_somebody_comes() -> None:
    c = Cluster(slots=3)
    drain(c, 0)
    c.lose(2)
    assert c.holders()[0] in (0, 1)
    c.settle()
    assert 0 in all_holders(c)
    assert c.core.report()["movesWaiting"] == ["no other worker may hold a copy of it"]
    c.tick(DRAIN_TOLD_S + 1.0)
    (warning,) = c.events("warning")
    assert (warning.worker, warning.why) == (0, "still holds 1 replicas after 31 s")
    c.join(2, attempt=1)
    c.settle()
    assert 0 not in c.core.members.workers
    assert len(c.holders()) == 2


def test_the_survivor_of_a_pair_may_be_the_one_that_leaves() -> None:
    """The last safe copy is on the leaving worker: it becomes primary, is repaired from, and only then goes."""
    c = Cluster(slots=4)
    drain(c, 1)
    c.lose(0)
    assert c.holders()[0] == 1
    c.settle()
    assert (1 in all_holders(c), len(c.holders()), c.core.error) == (False, 2, None)


# ---- what a dismissed worker hears


def test_a_stop_that_was_lost_is_told_again() -> None:
    c = Cluster(slots=4)
    drain(c, 3)
    c.orders.clear()
    c.take(c.core.on_report("w3.0", Heartbeat(node=3, progress=1, stats={}), c.now))
    assert c.told("w3.0") == [RegisterAgain()]
    c.take(c.core.on_report("w3.0", register(3, node=3), c.now))
    assert isinstance(c.told("w3.0")[-1], Stop)


def test_a_second_attempt_of_a_task_whose_slot_is_closed_is_told_to_stop() -> None:
    c = Cluster(slots=4)
    drain(c, 3)
    c.join(3, attempt=1)
    (stop,) = c.told("w3.1")
    assert "slot 3 was closed" in stop.reason


# ---- scale


def test_growing_opens_slots_whose_tasks_are_to_be_started() -> None:
    c = Cluster(slots=2)
    assert c.core.missing_slots() == []
    scale(c, 4)
    assert (c.core.slots, c.core.missing_slots()) == (4, [2, 3])
    c.core.tasks_started([2, 3])
    assert c.core.missing_slots() == []
    assert c.join(2) == 2
    assert c.join(3) == 3
    assert sorted(c.table.endpoints) == [0, 1, 2, 3]
    assert [event.why for event in c.events("scale")] == ["from 2 to 4 workers"]
    assert len(c.events("join")) == 2


def test_who_joins_is_told_how_many_workers_the_query_began_with() -> None:
    """The share of a stream in the logs must be the same for every replica of it, always."""
    c = Cluster(slots=2)
    scale(c, 4)
    c.join(2)
    assert c.told("w2.0")[0] == Welcome(node=2, incarnation=0, workers=2)


def test_shrinking_drains_the_workers_in_the_highest_slots() -> None:
    c = Cluster(slots=4, partitions=4)
    scale(c, 2)
    assert c.core.report()["leaving"] == [2, 3]
    c.settle()
    assert (sorted(c.core.members.workers), all_holders(c)) == ([0, 1], {0, 1})
    assert stops(c, "w2.0")
    assert stops(c, "w3.0")
    assert c.core.missing_slots() == []


def test_slots_that_nobody_has_come_for_are_closed_first() -> None:
    c = Cluster(slots=2)
    scale(c, 4)
    scale(c, 2)
    assert (c.core.report()["leaving"], c.core.missing_slots()) == ([], [])
    c.join(3)
    assert isinstance(c.told("w3.0")[-1], Stop)


def test_growing_after_shrinking_takes_a_number_that_was_never_used() -> None:
    """The task of a closed slot may live on, or die and come again: it is not taken for that of the new worker."""
    c = Cluster(slots=4, partitions=4)
    scale(c, 2)
    c.settle()
    scale(c, 3)
    assert (c.core.slots, c.core.missing_slots()) == (5, [4])
    c.join(4, attempt=9)
    assert len(c.core.members.workers) == 3


def test_the_tasks_of_a_slot_that_was_closed_may_end_at_any_time_after_others_were_opened() -> None:
    """It ended the query: the task of slot 2 was over after the slot had been opened again for another task."""
    c = Cluster(slots=3, partitions=3)
    scale(c, 2)
    c.settle()
    scale(c, 3)
    c.take(c.core.on_tasks_ended([2], "the Spark job", "its tasks ended before the query"))
    assert (c.core.phase, c.core.error) == ("running", None)


def test_a_task_counts_until_its_worker_says_that_it_ends() -> None:
    c = Cluster(slots=3, partitions=3)
    scale(c, 2)
    c.settle()
    assert stops(c, "w2.0")
    assert c.core.places.tasked == {0, 1, 2}, "told to go, not gone"
    c.take(c.core.on_report("stranger", Goodbye(node=2), c.now))
    assert c.core.places.tasked == {0, 1, 2}
    c.take(c.core.on_report("w2.0", Goodbye(node=2), c.now))
    assert c.core.places.tasked == {0, 1}


def test_a_dismissed_worker_that_dies_before_it_hears_of_it_leaves_an_attempt_that_is_answered() -> None:
    c = Cluster(slots=3, partitions=3)
    scale(c, 2)
    c.settle()
    scale(c, 3)
    c.core.tasks_started([3])
    c.join(3)
    c.lose(2)  # its kernel closes its connection; Spark starts its task again
    c.join(2, attempt=9)
    assert [type(order) for order in c.told("w2.9")] == [Stop]
    assert len(c.core.members.workers) == 3


def test_rolling_decommission_never_takes_the_end_of_one_task_for_that_of_another() -> None:
    """One executor after the other goes; the tasks of their workers end, or come again, long after others have come."""
    c = Cluster(slots=3, partitions=3)
    for turn in range(6):
        worker = min(c.core.members.workers)
        slot = c.core.members.workers[worker].about.index
        c.take(c.core.replace([worker], 3, c.now))
        c.take(c.core.leave([worker], "its executor goes", c.now))
        (missing,) = c.core.missing_slots()
        assert missing == 3 + turn, "a number that was never used"
        c.core.tasks_started([missing])
        c.join(missing)
        c.settle()
        assert worker not in c.core.members.workers
        if turn % 2:
            c.take(c.core.on_tasks_ended([slot], "the Spark job", "its tasks ended before the query"))
        else:
            c.join(slot, attempt=100 + turn)
            assert [type(order) for order in c.told(f"w{slot}.{100 + turn}")] == [Stop]
    assert (c.core.phase, len(c.core.members.workers)) == ("running", 3)
    assert all(len(c.holders(p)) == 2 for p in range(3))


# ---- workers that were given up and live


def test_a_slot_is_opened_in_place_of_a_worker_that_was_given_up_and_may_live() -> None:
    """Its task ends well, so Spark does not start it again; should it have died meanwhile, the next attempt goes home."""
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.fail(0, c.now))
    assert c.core.places.tasked == {0, 1, 2}
    c.take(c.core.on_report("w0.0", Goodbye(node=0), c.now))
    assert c.core.places.tasked == {1, 2}
    assert c.core.missing_slots() == [3]
    c.take(c.core.on_tasks_ended([0], "the Spark job", "its tasks ended before the query"))
    c.join(0, attempt=5)
    assert [type(order) for order in c.told("w0.5")] == [Stop]
    c.core.tasks_started([3])
    c.join(3)
    c.settle()
    assert (c.core.phase, len(c.core.members.workers)) == ("running", 3)


def test_a_worker_taken_for_dead_that_lives_goes_home_and_its_slot_is_renewed_once() -> None:
    c = Cluster(slots=3, partitions=3)
    c.lose(0)
    assert c.core.missing_slots() == [], "Spark starts the task of a dead one again"
    for connection in ("back", "back again"):
        c.take(c.core.on_report(connection, register(0, node=0), c.now))
        assert 0 not in c.told(connection)[0].table.endpoints
    c.take(c.core.on_report("back again", Goodbye(node=0), c.now))
    assert c.core.missing_slots() == [3]


@pytest.mark.parametrize(("room", "at_once"), [(None, False), (2, False), (3, False), (4, True)])
def test_a_task_in_place_of_one_that_may_still_be_there_takes_no_slot_that_is_kept_for_others(
    room: int | None, at_once: bool
) -> None:
    """A stopped worker kept its task slot, the one in its place took that of the tasks that fetch output: they never ran."""
    c = Cluster(slots=3, partitions=3)
    if room is not None:
        c.core.allow(room, f"room for {room} workers")
    c.take(c.core.fail(0, c.now))
    assert c.core.missing_slots() == ([3] if at_once else [])
    c.take(c.core.on_report("w0.0", Goodbye(node=0), c.now))
    assert c.core.missing_slots() == [3], "where one is gone another may come"


def test_it_comes_also_when_the_task_is_known_to_have_ended_without_a_word() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.fail(0, c.now))
    assert c.core.missing_slots() == []
    c.join(0, attempt=1)  # Spark has started it again: it is told to stop
    assert c.core.missing_slots() == [3]


def test_as_many_renewed_slots_are_filled_as_there_is_room_for() -> None:
    c = Cluster(slots=4, partitions=3, replicas=1)
    c.core.allow(5, "room for 5 workers")
    empty = [node for node in c.core.members.workers if node not in all_holders(c)]
    c.take(c.core.fail(empty[0], c.now))
    c.join(4)
    c.core.tasks_started([4])
    c.take(c.core.fail(c.join(4), c.now))
    assert (c.core.places.open[-1], c.core.missing_slots()) == (5, []), "four tasks and that of the second"
    c.core.allow(6, "room for 6 workers")
    assert c.core.missing_slots() == [5]


def test_a_worker_whose_task_has_another_attempt_must_not_end_well() -> None:
    """Spark would take its end for that of the task, and kill the other attempt."""
    c = Cluster(slots=3, partitions=3)
    c.lose(0)
    c.join(0, attempt=1)
    c.take(c.core.on_report("back", register(0, node=0), c.now))
    assert [type(order) for order in c.told("back")] == [Rejected]
    assert c.core.missing_slots() == []


def test_growing_while_a_worker_still_leaves_takes_another_slot() -> None:
    c = Cluster(slots=3, partitions=3)
    scale(c, 2)
    scale(c, 3)
    assert c.core.missing_slots() == [3]
    c.settle()
    assert sorted(member.about.index for member in c.core.members.workers.values()) == [0, 1]


def test_shrinking_below_what_the_replicas_need_is_refused_and_nothing_leaves() -> None:
    c = Cluster(slots=4, replicas=3)
    with pytest.raises(UsageError, match="Sums has replicas=3, and without workers 2, 3"):
        scale(c, 2)
    assert c.core.report()["leaving"] == []
    assert len(c.core.places.open) == 4


@pytest.mark.parametrize("workers", [0, -1, 5000])
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers: int) -> None:
    with pytest.raises(UsageError, match="1 to 4096 are accepted"):
        scale(Cluster(), workers)


def test_as_many_as_there_are_changes_nothing() -> None:
    c = Cluster(slots=3)
    scale(c, 3)
    assert (c.events("scale"), c.core.missing_slots()) == ([], [])


@pytest.mark.parametrize(("room", "accepted"), [(2, False), (3, False), (4, True)])
def test_more_workers_than_there_are_task_slots_are_refused_with_the_arithmetic(room: int, accepted: bool) -> None:
    c = Cluster(slots=3)
    c.core.allow(room, f"{room} task slots exist")
    scale(c, 3)  # no more than there are
    if accepted:
        scale(c, 4)
        assert c.core.missing_slots() == [3]
    else:
        with pytest.raises(UsageError, match=f"cannot scale to 4 workers: {room} task slots exist"):
            scale(c, 4)
        assert c.core.missing_slots() == []


# ---- Spark tasks that are over


def test_tasks_that_end_before_the_query_end_it_unless_their_slots_are_closed() -> None:
    c = Cluster(slots=4)
    drain(c, 3)
    c.settle()
    c.take(c.core.on_tasks_ended([3], "the Spark job", "it is over"))
    assert (c.core.phase, c.core.error) == ("running", None)
    c.take(c.core.on_tasks_ended([1, 3], "the Spark job", "it is over"))
    assert isinstance(c.core.error, QueryFailed)
    assert str(c.core.error) == "the Spark job failed: it is over (slot 1)"


def test_workers_that_leave_together_give_nothing_to_each_other() -> None:
    c = Cluster(slots=5, partitions=5)
    c.take(c.core.leave([0, 1], "their executor goes", c.now))
    seen = {move.target for move in c.core.moves_pending()} - {-1}
    c.settle()
    assert not seen & {0, 1}
    assert not all_holders(c) & {0, 1}
    assert [event.why for event in c.events("drain")] == ["their executor goes"] * 2
    assert all(event.worker not in (0, 1) for event in c.events("move"))


# ---- rehearsals


def test_a_worker_that_is_failed_for_a_rehearsal_is_fenced_and_its_copies_are_repaired() -> None:
    c = Cluster(slots=3)
    c.take(c.core.fail(0, c.now))
    assert c.holders()[0] == 1
    last = c.told("w0.0")[-1]
    assert isinstance(last, NewTable)
    assert 0 not in last.table.endpoints
    assert c.events("loss")[0].why == "declared lost for a rehearsal"
    c.settle()
    assert len(c.holders()) == 2


def test_a_rehearsal_with_the_only_copy_ends_the_query() -> None:
    c = Cluster(slots=2, replicas=1)
    c.take(c.core.fail(0, c.now))
    assert isinstance(c.core.error, QueryFailed)


def test_an_unknown_worker_cannot_fail() -> None:
    c = Cluster()
    with pytest.raises(UsageError, match="there is no worker 5"):
        c.core.fail(5, c.now)


# ---- workers whose executors go


def test_a_worker_whose_executor_goes_is_replaced_where_there_is_room_and_emptied() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.replace([0], 3, c.now))
    assert (c.core.missing_slots(), len(c.core.places.open)) == ([3], 3)
    c.take(c.core.leave([0], "its executor goes", c.now))
    c.core.tasks_started([3])
    c.join(3)
    c.settle()
    assert sorted(member.about.index for member in c.core.members.workers.values()) == [1, 2, 3]
    c.take(c.core.replace([], 9, c.now))
    assert (c.core.missing_slots(), len(c.core.places.open)) == ([], 3), "once"
    assert [event.why for event in c.events("scale")] == [
        "another worker in place of the one in slot 0, whose executor goes"
    ]


def test_where_there_is_no_room_it_is_replaced_when_room_comes() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.replace([0], 2, c.now))
    assert c.core.missing_slots() == []
    c.take(c.core.leave([0], "its executor goes", c.now))
    c.settle()
    c.take(c.core.replace([], 2, c.now))
    assert (c.core.missing_slots(), len(c.core.members.workers)) == ([], 2)
    c.take(c.core.replace([], 3, c.now))
    assert c.core.missing_slots() == [3]
    c.core.tasks_started([3])
    assert c.join(3) == 3
    assert len(c.core.members.workers) == 3


def test_its_replacement_comes_first_where_the_drain_would_leave_too_few() -> None:
    c = Cluster(slots=2, partitions=2)
    c.take(c.core.replace([0], 2, c.now))
    with pytest.raises(UsageError, match="add workers first"):
        c.core.leave([0], "its executor goes", c.now)
    c.join(2)
    c.take(c.core.replace([0], 2, c.now))
    c.take(c.core.leave([0], "its executor goes", c.now))
    c.settle()
    assert sorted(member.about.index for member in c.core.members.workers.values()) == [1, 2]
    assert all_holders(c) == {1, 2}


def test_a_worker_that_is_lost_with_its_executor_after_it_was_replaced_does_not_come_back() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.replace([0], 3, c.now))
    c.lose(0)
    c.join(0, attempt=1)
    assert isinstance(c.told("w0.1")[-1], Stop)


def test_a_worker_that_spark_starts_again_elsewhere_needs_no_replacement() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.replace([0], 2, c.now))
    c.lose(0)
    c.join(0, attempt=1)
    c.take(c.core.replace([], 9, c.now))
    assert (c.core.missing_slots(), len(c.core.members.workers)) == ([], 3)


def test_a_number_of_workers_that_is_asked_for_later_counts() -> None:
    c = Cluster(slots=4, partitions=3)
    c.take(c.core.replace([0], 3, c.now))
    c.take(c.core.leave([0], "its executor goes", c.now))
    scale(c, 3)
    c.take(c.core.replace([], 9, c.now))
    assert (c.core.missing_slots(), len(c.core.places.open)) == ([], 3)


def test_a_worker_that_is_drained_by_hand_is_not_replaced() -> None:
    c = Cluster(slots=4, partitions=3)
    drain(c, 0)
    c.take(c.core.replace([0], 9, c.now))
    assert (c.core.missing_slots(), len(c.core.places.open)) == ([], 3)
