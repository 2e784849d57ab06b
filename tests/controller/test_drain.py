"""A worker is drained: it gives everything away, nothing is lost if others die meanwhile, and its task ends well."""

from __future__ import annotations

import pytest

from controller.balance.load import Move
from controller.decide.departures import DRAIN_TOLD_S
from flux.errors import UsageError
from flux.wire.control import Heartbeat, RegisterAgain, Stop
from tests.controller.cluster import Cluster, register


def test_a_worker_that_is_drained_gives_everything_away_and_then_is_told_to_stop() -> None:
    c = Cluster(slots=4, partitions=4, stages=2)
    held = sum(0 in c.holders(p, s) for s in (0, 1) for p in range(4))
    c.drain(0)
    assert c.core.report()["leaving"] == [0]
    order = c.settle()
    assert (len(order), order) == (held, sorted(order)), "in topological order"
    assert 0 not in c.all_holders()
    assert 0 not in c.table.endpoints
    assert all(len(c.holders(p, s)) == 2 for s in (0, 1) for p in range(4))
    assert [stop.reason for stop in c.stops("w0.0")] == ["worker 0 has left the query: asked for"]
    assert not c.stops("w1.0")
    assert (c.core.report()["leaving"], c.core.moving.done) == ([], held)
    (event,) = c.events("drain")
    assert (event.worker, event.why) == (0, "asked for")


def test_the_others_get_about_as_much_each() -> None:
    c = Cluster(slots=4, partitions=12)
    c.drain(0)
    c.settle()
    copies = [sum(worker in c.holders(p) for p in range(12)) for worker in (1, 2, 3)]
    assert max(copies) - min(copies) <= 1


def test_a_worker_that_leaves_gets_nothing_more() -> None:
    c = Cluster(slots=4, partitions=4)
    c.drain(0)
    c.lose(1)
    c.settle()
    assert 0 not in c.all_holders()
    assert c.core.error is None


def test_nothing_can_be_moved_to_a_worker_that_leaves() -> None:
    c = Cluster(slots=4, partitions=4)
    c.drain(3)
    partition = next(p for p in range(4) if 3 not in c.holders(p))
    with pytest.raises(UsageError, match="worker 3 is leaving"):
        c.core.move([Move(0, partition, c.holders(partition)[0], 3)], "by hand", c.now)


def test_what_others_gave_it_just_now_is_given_to_somebody_else() -> None:
    """Drained while it is a target, of a move or of a repair, a worker loses the new replica as well."""
    c = Cluster(slots=5)
    c.take(c.core.move([Move(0, 0, 0, 3)], "by hand", c.now))
    c.drain(3)
    assert "worker 3" in c.events("move given up")[0].why
    assert c.holders() == [0, 1]
    c.lose(1)
    target = c.holders()[1]
    c.drain(target)
    c.settle()
    assert c.holders()[1] not in (3, target)
    assert set(c.core.members.workers) == {0, c.holders()[1]}


def test_its_partitions_of_sources_are_read_by_those_that_stay_from_the_first_moment() -> None:
    c = Cluster(slots=4, readers=8)
    before = c.table.sources[0]
    c.drain(3)
    c.drain(0)
    after = c.table.sources[0]
    assert not {0, 3} & set(after)
    assert all(new == old for new, old in zip(after, before, strict=True) if old not in (0, 3))
    assert max(after.count(1), after.count(2)) - min(after.count(1), after.count(2)) <= 2


def test_a_loss_gives_no_source_to_a_worker_that_leaves() -> None:
    c = Cluster(slots=4, partitions=4, readers=8)
    c.drain(3)
    assert 3 in c.core.members.workers
    c.lose(0)
    assert 3 not in c.table.sources[0]


def test_asking_twice_is_asking_once() -> None:
    c = Cluster(slots=4)
    c.drain(0)
    before = (c.table.epoch, len(c.core.moves_pending()))
    c.drain(0)
    assert (c.table.epoch, len(c.core.moves_pending())) == before


def test_an_idle_worker_leaves_at_once() -> None:
    c = Cluster(slots=4)
    c.drain(3)
    assert 3 not in c.table.endpoints
    assert c.stops("w3.0")


@pytest.mark.parametrize(("slots", "replicas", "leaves"), [(2, 2, [0]), (4, 3, [0, 1]), (1, 1, [0])])
def test_a_drain_that_leaves_too_few_workers_is_refused_with_the_arithmetic(
    slots: int, replicas: int, leaves: list[int]
) -> None:
    c = Cluster(slots=slots, replicas=replicas)
    *first, last = leaves
    for worker in first:
        c.drain(worker)
    before = c.core.report()["leaving"]
    advice = "that takes more workers, or fewer replicas" if replicas > 1 else "that takes more workers$"
    with pytest.raises(UsageError, match=rf"Sums has replicas={replicas}, and without workers? .*: {advice}"):
        c.drain(last)
    assert c.core.report()["leaving"] == before


def test_workers_on_one_executor_count_as_one_unless_copies_may_share() -> None:
    shared = {0: "a", 1: "b", 2: "b"}
    with pytest.raises(UsageError, match="2 workers on 1 executor:"):
        Cluster(slots=3, executors=shared).drain(0)
    c = Cluster(slots=3, executors=shared, same_executor=True)
    c.drain(0)
    c.settle()
    assert c.all_holders() == {1, 2}


def test_an_unknown_worker_cannot_be_drained() -> None:
    with pytest.raises(UsageError, match=r"there is no worker 9; there are 0, 1, 2"):
        Cluster().drain(9)


def test_workers_that_leave_together_give_nothing_to_each_other() -> None:
    c = Cluster(slots=5, partitions=5)
    c.take(c.core.leave([0, 1], "their executor goes", c.now))
    seen = {move.target for move in c.core.moves_pending()} - {-1}
    c.settle()
    assert not seen & {0, 1}
    assert not c.all_holders() & {0, 1}
    assert [event.why for event in c.events("drain")] == ["their executor goes"] * 2
    assert all(event.worker not in (0, 1) for event in c.events("move"))


# ---- losses during a drain


def test_a_worker_that_is_lost_while_it_is_emptied_is_an_ordinary_loss_and_its_task_does_not_come_back() -> None:
    c = Cluster(slots=4, partitions=4)
    c.drain(0)
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
    c.drain(0)
    (addition,) = c.core.repairs.under_way.values()
    c.lose(addition.worker)
    c.settle()
    assert 0 not in c.all_holders()
    assert addition.worker not in c.all_holders()
    assert not c.events("move given up"), "it goes wherever there is room"


def test_when_the_rest_cannot_hold_everything_any_more_the_worker_stays_until_somebody_comes() -> None:
    c = Cluster(slots=3)
    c.drain(0)
    c.lose(2)
    assert c.holders()[0] in (0, 1)
    c.settle()
    assert 0 in c.all_holders()
    assert c.core.report()["movesWaiting"] == ["no other worker may hold a replica of it"]
    c.tick(DRAIN_TOLD_S + 1.0)
    (warning,) = c.events("warning")
    assert (warning.worker, warning.why) == (0, "still holds 1 replicas after 31 s")
    c.join(2, attempt=1)
    c.settle()
    assert 0 not in c.core.members.workers
    assert len(c.holders()) == 2


def test_the_survivor_of_a_pair_may_be_the_one_that_leaves() -> None:
    """Left with the last safe copy, such a worker becomes primary, the repair copies from it, and only then does it go."""
    c = Cluster(slots=4)
    c.drain(1)
    c.lose(0)
    assert c.holders()[0] == 1
    c.settle()
    assert (1 in c.all_holders(), len(c.holders()), c.core.error) == (False, 2, None)


# ---- answers to a dismissed worker


def test_a_stop_that_was_lost_is_told_again() -> None:
    c = Cluster(slots=4)
    c.drain(3)
    c.orders.clear()
    c.take(c.core.on_report("w3.0", Heartbeat(node=3, progress=1, stats={}), c.now))
    assert c.told("w3.0") == [RegisterAgain()]
    c.take(c.core.on_report("w3.0", register(3, node=3), c.now))
    assert isinstance(c.told("w3.0")[-1], Stop)


def test_a_second_attempt_of_a_task_whose_slot_is_closed_is_told_to_stop() -> None:
    c = Cluster(slots=4)
    c.drain(3)
    c.join(3, attempt=1)
    (stop,) = c.told("w3.1")
    assert "slot 3 was closed" in stop.reason
