"""The Spark tasks of workers: tasks that count, consequences of their ends, and tasks in place of others."""

from __future__ import annotations

import pytest

from flux.errors import QueryFailed, UsageError
from flux.wire.control import Goodbye, NewTable, Rejected, Stop
from tests.controller.cluster import Cluster, register

# ---- tasks that are over


def test_tasks_that_end_before_the_query_end_it_unless_their_slots_are_closed() -> None:
    c = Cluster(slots=4)
    c.drain(3)
    c.settle()
    c.take(c.core.driver.on_tasks_ended([3], "the Spark job", "it is over"))
    assert (c.core.phase, c.core.error) == ("running", None)
    c.take(c.core.driver.on_tasks_ended([1, 3], "the Spark job", "it is over"))
    assert isinstance(c.core.error, QueryFailed)
    assert str(c.core.error) == "the Spark job failed: it is over (slot 1)"


def test_the_tasks_of_a_slot_that_was_closed_may_end_at_any_time_after_others_were_opened() -> None:
    """Such an end ended the query: the task of slot 2 was over after the slot had been opened again for another task."""
    c = Cluster(slots=3, partitions=3)
    c.scale(2)
    c.settle()
    c.scale(3)
    c.take(c.core.driver.on_tasks_ended([2], "the Spark job", "its tasks ended before the query"))
    assert (c.core.phase, c.core.error) == ("running", None)


def test_a_task_counts_until_its_worker_says_that_it_ends() -> None:
    c = Cluster(slots=3, partitions=3)
    c.scale(2)
    c.settle()
    assert c.stops("w2.0")
    assert c.core.places.tasked == {0, 1, 2}, "told to go, not gone"
    c.take(c.core.on_report("stranger", Goodbye(node=2), c.now))
    assert c.core.places.tasked == {0, 1, 2}
    c.take(c.core.on_report("w2.0", Goodbye(node=2), c.now))
    assert c.core.places.tasked == {0, 1}


def test_a_task_counts_no_more_when_its_worker_is_gone_and_its_last_word_was_lost() -> None:
    """Otherwise the task counted for good: its slot was free, and no other task could have it."""
    c = Cluster(slots=3, partitions=3)
    c.scale(2)
    c.settle()
    c.lose(2)
    assert c.core.places.tasked == {0, 1}
    assert (c.core.phase, c.events("loss")) == ("running", [])


def test_who_comes_in_place_of_a_worker_that_was_given_up_comes_also_when_that_was_gone_without_a_word() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.fail(0, c.now))
    assert c.core.driver.missing_slots() == []
    c.lose(0)
    assert c.core.driver.missing_slots() == [3]


def test_a_dismissed_worker_that_dies_before_it_hears_of_it_leaves_an_attempt_that_is_answered() -> None:
    c = Cluster(slots=3, partitions=3)
    c.scale(2)
    c.settle()
    c.scale(3)
    c.core.driver.tasks_started([3])
    c.join(3)
    c.lose(2)  # its kernel closes its connection; Spark starts its task again
    c.join(2, attempt=9)
    assert [type(order) for order in c.told("w2.9")] == [Stop]
    assert len(c.core.members.workers) == 3


def test_rolling_decommission_never_takes_the_end_of_one_task_for_that_of_another() -> None:
    """Executors go one after the other; the tasks of their workers end, or come again, long after others have come."""
    c = Cluster(slots=3, partitions=3)
    for turn in range(6):
        worker = min(c.core.members.workers)
        slot = c.core.members.workers[worker].about.index
        c.take(c.core.driver.replace([worker], 3, c.now))
        c.take(c.core.leave([worker], "its executor goes", c.now))
        (missing,) = c.core.driver.missing_slots()
        assert missing == 3 + turn, "a number that was never used"
        c.core.driver.tasks_started([missing])
        c.join(missing)
        c.settle()
        assert worker not in c.core.members.workers
        if turn % 2:
            c.take(c.core.driver.on_tasks_ended([slot], "the Spark job", "its tasks ended before the query"))
        else:
            c.join(slot, attempt=100 + turn)
            assert [type(order) for order in c.told(f"w{slot}.{100 + turn}")] == [Stop]
    assert (c.core.phase, len(c.core.members.workers)) == ("running", 3)
    assert all(len(c.holders(p)) == 2 for p in range(3))


# ---- workers that were given up and live


def test_a_slot_is_opened_in_place_of_a_worker_that_was_given_up_and_may_live() -> None:
    """Tasks of such workers end well, so Spark does not start them again; if one has died meanwhile, the next attempt is
    dismissed."""
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.fail(0, c.now))
    assert c.core.places.tasked == {0, 1, 2}
    c.take(c.core.on_report("w0.0", Goodbye(node=0), c.now))
    assert c.core.places.tasked == {1, 2}
    assert c.core.driver.missing_slots() == [3]
    c.take(c.core.driver.on_tasks_ended([0], "the Spark job", "its tasks ended before the query"))
    c.join(0, attempt=5)
    assert [type(order) for order in c.told("w0.5")] == [Stop]
    c.core.driver.tasks_started([3])
    c.join(3)
    c.settle()
    assert (c.core.phase, len(c.core.members.workers)) == ("running", 3)


def test_a_worker_taken_for_dead_that_lives_goes_home_and_its_slot_is_renewed_once() -> None:
    c = Cluster(slots=3, partitions=3)
    c.lose(0)
    assert c.core.driver.missing_slots() == [], "Spark starts the task of a dead one again"
    for connection in ("back", "back again"):
        c.take(c.core.on_report(connection, register(0, node=0), c.now))
        assert 0 not in c.told(connection)[0].table.endpoints
    c.take(c.core.on_report("back again", Goodbye(node=0), c.now))
    assert c.core.driver.missing_slots() == [3]


@pytest.mark.parametrize(("room", "at_once"), [(None, False), (2, False), (3, False), (4, True)])
def test_a_task_in_place_of_one_that_may_still_be_there_takes_no_slot_that_is_kept_for_others(
    room: int | None, at_once: bool
) -> None:
    """While a stopped worker kept its task slot, the worker in its place took the slot of the tasks that fetch output: these
    never ran."""
    c = Cluster(slots=3, partitions=3)
    if room is not None:
        c.core.driver.allow(room, f"room for {room} workers")
    c.take(c.core.fail(0, c.now))
    assert c.core.driver.missing_slots() == ([3] if at_once else [])
    c.take(c.core.on_report("w0.0", Goodbye(node=0), c.now))
    assert c.core.driver.missing_slots() == [3], "where one is gone another may come"


def test_it_comes_also_when_the_task_is_known_to_have_ended_without_a_word() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.fail(0, c.now))
    assert c.core.driver.missing_slots() == []
    c.join(0, attempt=1)  # Spark has started it again: it is told to stop
    assert c.core.driver.missing_slots() == [3]


def test_as_many_renewed_slots_are_filled_as_there_is_room_for() -> None:
    c = Cluster(slots=4, partitions=3, replicas=1)
    c.core.driver.allow(5, "room for 5 workers")
    empty = [node for node in c.core.members.workers if node not in c.all_holders()]
    c.take(c.core.fail(empty[0], c.now))
    c.join(4)
    c.core.driver.tasks_started([4])
    c.take(c.core.fail(c.join(4), c.now))
    assert (c.core.places.open[-1], c.core.driver.missing_slots()) == (5, []), "four tasks and that of the second"
    c.core.driver.allow(6, "room for 6 workers")
    assert c.core.driver.missing_slots() == [5]


def test_a_worker_whose_task_has_another_attempt_must_not_end_well() -> None:
    """Spark would take its end for that of the task, and kill the other attempt."""
    c = Cluster(slots=3, partitions=3)
    c.lose(0)
    c.join(0, attempt=1)
    c.take(c.core.on_report("back", register(0, node=0), c.now))
    assert [type(order) for order in c.told("back")] == [Rejected]
    assert c.core.driver.missing_slots() == []


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
