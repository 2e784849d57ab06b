"""More workers or fewer are asked for: slots are opened and closed, and impossible numbers are refused with the arithmetic."""

from __future__ import annotations

import pytest

from flux.errors import UsageError
from flux.wire.control import Stop, Welcome
from tests.controller.cluster import Cluster


def test_growing_opens_slots_whose_tasks_are_to_be_started() -> None:
    c = Cluster(slots=2)
    assert c.core.driver.missing_slots() == []
    c.scale(4)
    assert (c.core.slots, c.core.driver.missing_slots()) == (4, [2, 3])
    c.core.driver.tasks_started([2, 3])
    assert c.core.driver.missing_slots() == []
    assert c.join(2) == 2
    assert c.join(3) == 3
    assert sorted(c.table.endpoints) == [0, 1, 2, 3]
    assert [event.why for event in c.events("scale")] == ["from 2 to 4 workers"]
    assert len(c.events("join")) == 2


def test_who_joins_is_told_how_many_workers_the_query_began_with() -> None:
    """Logs give each stream a share by this number, and the share must be the same for every replica, always."""
    c = Cluster(slots=2)
    c.scale(4)
    c.join(2)
    assert c.told("w2.0")[0] == Welcome(node=2, incarnation=0, workers=2)


def test_shrinking_drains_the_workers_in_the_highest_slots() -> None:
    c = Cluster(slots=4, partitions=4)
    c.scale(2)
    assert c.core.report()["leaving"] == [2, 3]
    c.settle()
    assert (sorted(c.core.members.workers), c.all_holders()) == ([0, 1], {0, 1})
    assert c.stops("w2.0")
    assert c.stops("w3.0")
    assert c.core.driver.missing_slots() == []


def test_slots_that_nobody_has_come_for_are_closed_first() -> None:
    c = Cluster(slots=2)
    c.scale(4)
    c.scale(2)
    assert (c.core.report()["leaving"], c.core.driver.missing_slots()) == ([], [])
    c.join(3)
    assert isinstance(c.told("w3.0")[-1], Stop)


def test_growing_after_shrinking_takes_a_number_that_was_never_used() -> None:
    """Tasks of a closed slot may live on, or die and come again: they are not taken for the task of the new worker."""
    c = Cluster(slots=4, partitions=4)
    c.scale(2)
    c.settle()
    c.scale(3)
    assert (c.core.slots, c.core.driver.missing_slots()) == (5, [4])
    c.join(4, attempt=9)
    assert len(c.core.members.workers) == 3


def test_growing_while_a_worker_still_leaves_takes_another_slot() -> None:
    c = Cluster(slots=3, partitions=3)
    c.scale(2)
    c.scale(3)
    assert c.core.driver.missing_slots() == [3]
    c.settle()
    assert sorted(member.about.index for member in c.core.members.workers.values()) == [0, 1]


def test_shrinking_below_what_the_replicas_need_is_refused_and_nothing_leaves() -> None:
    c = Cluster(slots=4, replicas=3)
    with pytest.raises(UsageError, match="Sums has replicas=3, and without workers 2, 3"):
        c.scale(2)
    assert c.core.report()["leaving"] == []
    assert len(c.core.places.open) == 4


@pytest.mark.parametrize("workers", [0, -1, 5000])
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers: int) -> None:
    with pytest.raises(UsageError, match="1 to 4096 are accepted"):
        Cluster().scale(workers)


def test_as_many_as_there_are_changes_nothing() -> None:
    c = Cluster(slots=3)
    c.scale(3)
    assert (c.events("scale"), c.core.driver.missing_slots()) == ([], [])


@pytest.mark.parametrize(("room", "accepted"), [(2, False), (3, False), (4, True)])
def test_more_workers_than_there_are_task_slots_are_refused_with_the_arithmetic(room: int, accepted: bool) -> None:
    c = Cluster(slots=3)
    c.core.driver.allow(room, f"{room} task slots exist")
    c.scale(3)  # no more than there are
    if accepted:
        c.scale(4)
        assert c.core.driver.missing_slots() == [3]
    else:
        with pytest.raises(UsageError, match=f"cannot scale to 4 workers: {room} task slots exist"):
            c.scale(4)
        assert c.core.driver.missing_slots() == []


def test_shrinking_below_what_the_replicas_need_is_refused_in_its_own_words() -> None:
    c = Cluster(slots=3)
    with pytest.raises(
        UsageError, match=r"cannot scale to 1 worker: stage Sums has replicas=2, .*: that takes more workers"
    ):
        c.scale(1)
    assert (c.core.report()["leaving"], c.core.slots) == ([], 3)


def test_the_slot_of_a_worker_that_is_about_to_come_back_is_not_closed_where_its_replicas_need_it() -> None:
    """Scaling had no worker to drain, so nothing was checked; the drain of another worker could then never end."""
    c = Cluster(slots=3)
    c.drain(0)
    c.lose(2)
    with pytest.raises(
        UsageError, match="cannot scale to 1 worker: stage Sums has replicas=2: that takes more workers"
    ):
        c.scale(1)
    c.join(2, attempt=1)
    c.settle()
    assert sorted(member.about.index for member in c.core.members.workers.values()) == [1, 2]
