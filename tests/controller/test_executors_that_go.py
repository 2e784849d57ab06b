"""Workers whose executors go: another comes in the place of each, where and when there is room."""

from __future__ import annotations

from typing import Any

import pytest

from controller.decide.registration import ELSEWHERE_MAX, ELSEWHERE_MOST_S
from flux.errors import UsageError
from flux.wire.control import Stop
from tests.controller.cluster import Cluster


def test_a_worker_whose_executor_goes_is_replaced_where_there_is_room_and_emptied() -> None:
    c = Cluster(slots=3, partitions=3)
    assert not c.core.driver.awaits_workers
    c.take(c.core.driver.replace([0], 3, c.now))
    assert c.core.driver.awaits_workers
    assert (c.core.driver.missing_slots(), len(c.core.places.open)) == ([3], 3)
    c.take(c.core.leave([0], "its executor goes", c.now))
    c.core.driver.tasks_started([3])
    c.join(3)
    c.settle()
    assert sorted(member.about.index for member in c.core.members.workers.values()) == [1, 2, 3]
    c.take(c.core.driver.replace([], 9, c.now))
    assert (c.core.driver.missing_slots(), len(c.core.places.open)) == ([], 3), "once"
    assert [event.why for event in c.events("scale")] == [
        "another worker in place of the one in slot 0, whose executor goes"
    ]


def test_where_there_is_no_room_it_is_replaced_when_room_comes() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.driver.replace([0], 2, c.now))
    assert c.core.driver.missing_slots() == []
    c.take(c.core.leave([0], "its executor goes", c.now))
    c.settle()
    c.take(c.core.driver.replace([], 2, c.now))
    assert (c.core.driver.missing_slots(), len(c.core.members.workers)) == ([], 2)
    c.take(c.core.driver.replace([], 3, c.now))
    assert c.core.driver.missing_slots() == [3]
    c.core.driver.tasks_started([3])
    assert c.join(3) == 3
    assert len(c.core.members.workers) == 3


def test_its_replacement_comes_first_where_the_drain_would_leave_too_few() -> None:
    c = Cluster(slots=2, partitions=2)
    c.take(c.core.driver.replace([0], 2, c.now))
    with pytest.raises(UsageError, match="that takes more workers, or fewer replicas"):
        c.core.leave([0], "its executor goes", c.now)
    c.join(2)
    c.take(c.core.driver.replace([0], 2, c.now))
    c.take(c.core.leave([0], "its executor goes", c.now))
    c.settle()
    assert sorted(member.about.index for member in c.core.members.workers.values()) == [1, 2]
    assert c.all_holders() == {1, 2}


def test_a_worker_that_is_lost_with_its_executor_after_it_was_replaced_does_not_come_back() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.driver.replace([0], 3, c.now))
    c.lose(0)
    c.join(0, attempt=1)
    assert isinstance(c.told("w0.1")[-1], Stop)


def test_a_worker_that_spark_starts_again_elsewhere_needs_no_replacement() -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.driver.replace([0], 2, c.now))
    c.lose(0)
    c.join(0, attempt=1)
    c.take(c.core.driver.replace([], 9, c.now))
    assert (c.core.driver.missing_slots(), len(c.core.members.workers)) == ([], 3)


def test_a_number_of_workers_that_is_asked_for_later_counts() -> None:
    c = Cluster(slots=4, partitions=3)
    c.take(c.core.driver.replace([0], 3, c.now))
    c.take(c.core.leave([0], "its executor goes", c.now))
    c.scale(3)
    c.take(c.core.driver.replace([], 9, c.now))
    assert (c.core.driver.missing_slots(), len(c.core.places.open)) == ([], 3)


def test_a_worker_that_is_drained_by_hand_is_not_replaced() -> None:
    c = Cluster(slots=4, partitions=3)
    c.drain(0)
    c.take(c.core.driver.replace([0], 9, c.now))
    assert (c.core.driver.missing_slots(), len(c.core.places.open)) == ([], 3)


# ---- workers that Spark starts again on the executor of another one


def test_a_worker_that_comes_to_the_executor_of_another_one_while_replicas_lack_executors_is_started_elsewhere() -> (
    None
):
    c = Cluster(slots=2, partitions=2)
    c.lose(1)
    c.executors[1] = "e0"
    assert c.join(1, attempt=1) == -1
    assert c.stops("w1.1")
    assert c.core.driver.missing_slots() == [2]
    c.core.driver.tasks_started([2])
    c.join(2)
    c.settle()
    assert [sorted(c.holders(partition)) for partition in range(2)] == [[0, 2], [0, 2]]
    assert c.core.driver.missing_slots() == []


@pytest.mark.parametrize(("timeout", "longest"), [(60.0, ELSEWHERE_MOST_S), (1.0, 1.0)], ids=["usual", "short"])
def test_after_some_attempts_in_succession_it_is_admitted_and_a_warning_says_so(timeout: float, longest: float) -> None:
    """Before the time-out that ends a worker without answers, each worker gets an answer."""
    c = Cluster(slots=2, partitions=2, controller_timeout=timeout)
    c.lose(1)
    c.executors |= dict.fromkeys(range(1, 20), "e0")
    slot = 1
    for number in range(ELSEWHERE_MAX):
        assert c.join(slot, attempt=int(slot == 1)) == -1, number
        assert c.stops(f"w{slot}.{int(slot == 1)}"), number
        (slot,) = c.core.driver.missing_slots()
        before = len(c.orders)
        assert c.join(slot) == -1, "too soon: it gets no answer, and registers again"
        assert (c.orders[before:], c.core.driver.missing_slots()) == ([], [slot])
        c.tick(longest)
        c.core.driver.tasks_started([slot])
    worker = c.join(slot)
    assert worker >= 0
    assert c.core.driver.missing_slots() == []
    (warning,) = [event.why for event in c.events("warning") if "executor" in event.why]
    assert "gets a worker on the executor of worker 0" in warning
    assert c.all_holders() == {0}


@pytest.mark.parametrize(
    ("given", "executor"),
    [({"slots": 3}, "e0"), ({"slots": 2, "same_executor": True}, "e0"), ({"slots": 2}, "e7")],
    ids=["executors enough", "they may share one", "an executor of its own"],
)
def test_a_worker_is_admitted_where_its_executor_hinders_nothing(given: dict[str, Any], executor: str) -> None:
    c = Cluster(partitions=2, **given)
    c.lose(1)
    c.executors[1] = executor
    assert c.join(1, attempt=1) >= 0
    assert c.core.driver.missing_slots() == []
