"""Workers whose executors go: another comes in the place of each, where and when there is room."""

from __future__ import annotations

import pytest

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
