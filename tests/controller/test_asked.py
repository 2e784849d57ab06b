"""Every request of a person has a number, which its events carry and under which it is followed to its end."""

from __future__ import annotations

import pytest

from controller.balance.load import Move
from controller.decide import request_book as asked_
from controller.decide.request_book import State
from flux.errors import UsageError
from flux.wire.control import PartitionFinished
from tests.controller.cluster import Cluster


def moved(c: Cluster, *moves: tuple[int, int, int]) -> int:
    """Ask for moves, each given by partition, source and target; return the number of the request."""
    number = c.core.next_request()
    c.take(c.core.move([Move(0, *move) for move in moves], "asked for", c.now, number))
    return number


def state(c: Cluster, number: int) -> State:
    return c.core.request(number).standing.state


def free(c: Cluster, partition: int = 0) -> int:
    return next(worker for worker in c.table.endpoints if worker not in c.holders(partition))


def test_a_request_for_moves_waits_is_under_way_and_is_done() -> None:
    c = Cluster(slots=4, partitions=2)
    number = moved(c, (0, c.holders(0)[0], free(c, 0)), (1, c.holders(1)[0], free(c, 1)))
    assert state(c, number) is State.UNDER_WAY
    assert c.core.request(number).standing.left.startswith("moves of Sums/0 to worker ")
    assert [asked.number for asked in c.core.open_requests()] == [number]
    c.settle()
    assert state(c, number) is State.DONE
    assert [event.request for event in c.events("move")] == [number, number]
    assert c.core.open_requests() == []


def test_a_request_whose_target_is_lost_is_given_up_and_says_why() -> None:
    c = Cluster(slots=4)
    target = free(c)
    number = moved(c, (0, c.holders()[0], target))
    c.lose(target)
    standing = c.core.request(number).standing
    assert standing.state is State.GIVEN_UP
    assert standing.why == c.events("move given up")[0].why
    assert [event.request for event in c.events("move given up")] == [number]


def test_what_happens_after_the_end_of_a_request_is_not_its_doing() -> None:
    """Before, outcomes of requests were read off the placement, where a later move could hide them."""
    c = Cluster(slots=4)
    source, target = c.holders()[0], free(c)
    number = moved(c, (0, source, target))
    c.settle()
    back = moved(c, (0, target, source))
    c.settle()
    assert (state(c, number), state(c, back)) == (State.DONE, State.DONE)


def test_who_asks_for_the_same_again_follows_the_same_move_under_a_number_of_their_own() -> None:
    c = Cluster(slots=4)
    move = (0, c.holders()[0], free(c))
    first, second = moved(c, move), moved(c, move)
    assert first != second
    c.settle()
    assert (state(c, first), state(c, second)) == (State.DONE, State.DONE)
    assert [event.request for event in c.events("move")] == [first], "it was moved once"


def test_a_drain_is_done_when_the_worker_has_left_and_given_up_when_it_is_lost_before() -> None:
    for lost in (False, True):
        c = Cluster(slots=4, partitions=4)
        number = c.core.next_request()
        c.take(c.core.drain(0, c.now, number))
        assert c.core.request(number).standing.left == "2 replicas on worker 0"
        if lost:
            c.lose(0)
            assert c.core.request(number).standing.why == "worker 0 was lost before being empty"
        c.settle()
        assert state(c, number) is (State.GIVEN_UP if lost else State.DONE)
        assert {event.request for event in c.events("drain")} == {number}


def test_a_request_to_scale_waits_for_workers_and_stays_done_when_one_is_lost_later() -> None:
    c = Cluster(slots=3, partitions=4, balance_enabled=False)
    number = c.core.next_request()
    c.take(c.core.scale(4, c.now, number))
    assert c.core.request(number).standing.left == "3 workers there, 4 wanted, slot 3 empty"
    c.join(3)
    assert state(c, number) is State.DONE
    c.lose(0)
    assert state(c, number) is State.DONE


def test_a_later_request_to_scale_is_the_end_of_the_earlier_one() -> None:
    c = Cluster(slots=3)
    first, second = c.core.next_request(), c.core.next_request()
    c.take(c.core.scale(5, c.now, first))
    c.take(c.core.scale(4, c.now, second))
    assert c.core.request(first).standing.why == f"request {second} asks for 4 workers"
    assert state(c, second) is State.WAITING


def test_a_rehearsed_loss_is_done_at_once_and_its_event_has_the_number() -> None:
    c = Cluster(slots=3)
    number = c.core.next_request()
    c.take(c.core.fail(2, c.now, number))
    assert state(c, number) is State.DONE
    assert [event.request for event in c.events("loss")] == [number]


def test_what_policies_move_has_no_number() -> None:
    c = Cluster(slots=4)
    c.move(c.holders()[0], free(c))
    c.settle()
    assert [event.request for event in c.events("move")] == [0]
    assert c.core.open_requests() == []


def test_requests_that_are_over_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_, "KEPT", 2)
    c = Cluster(slots=4)
    numbers = []
    for _ in range(5):
        numbers.append(moved(c, (0, c.holders()[0], free(c))))
        c.settle()
        state(c, numbers[-1])
    assert state(c, numbers[-1]) is State.DONE
    with pytest.raises(UsageError, match=f"there is no request {numbers[0]}; the newest is {numbers[-1]}"):
        c.core.request(numbers[0])


def asked_to_scale(c: Cluster, workers: int) -> int:
    number = c.core.next_request()
    c.take(c.core.scale(workers, c.now, number))
    return number


def asked_to_drain(c: Cluster, worker: int) -> int:
    number = c.core.next_request()
    c.take(c.core.drain(worker, c.now, number))
    return number


def test_a_drain_ends_a_change_of_scale_that_still_waits_and_is_named_as_the_reason() -> None:
    """After the drain the slot of the worker is closed, so the number of workers that was asked for would never be reached."""
    c = Cluster(slots=4, partitions=4, balance_enabled=False)
    scaled = asked_to_scale(c, 5)
    drained = asked_to_drain(c, 1)
    standing = c.core.request(scaled).standing
    assert standing.state is State.GIVEN_UP
    assert standing.why == f"request {drained} drains worker 1, and 4 workers are wanted since"
    c.join(4)
    c.settle()
    assert state(c, drained) is State.DONE
    assert len(c.core.members.workers) == 4
    assert c.core.open_requests() == []


def test_a_change_of_scale_after_a_drain_counts_the_worker_that_leaves_no_more() -> None:
    c = Cluster(slots=4, partitions=4, balance_enabled=False)
    drained, scaled = asked_to_drain(c, 1), asked_to_scale(c, 4)
    assert c.core.driver.missing_slots() == [4], "another worker comes in its place"
    c.join(4)
    c.settle()
    assert (state(c, drained), state(c, scaled)) == (State.DONE, State.DONE)


def test_who_asks_for_the_same_number_of_workers_again_ends_no_request() -> None:
    c = Cluster(slots=3, partitions=4, balance_enabled=False)
    first, second = asked_to_scale(c, 4), asked_to_scale(c, 4)
    assert (state(c, first), state(c, second)) == (State.WAITING, State.WAITING)
    c.join(3)
    assert (state(c, first), state(c, second)) == (State.DONE, State.DONE)


def test_a_worker_that_is_replaced_because_its_executor_goes_ends_no_change_of_scale() -> None:
    c = Cluster(slots=3, partitions=3, balance_enabled=False)
    number = asked_to_scale(c, 4)
    c.take(c.core.driver.replace([0], 3, c.now))
    c.take(c.core.leave([0], "its executor goes", c.now))
    assert state(c, number) is State.UNDER_WAY, "another worker is owed in its place"
    c.settle()
    c.join(3)
    c.take(c.core.driver.replace([], 9, c.now))
    assert state(c, number) is State.WAITING
    c.join(4)
    assert state(c, number) is State.DONE


@pytest.mark.parametrize("collect", [0, 1])
def test_requests_that_are_open_when_the_query_comes_to_its_end_are_given_up(collect: int) -> None:
    c = Cluster(slots=4, partitions=1, collect=collect)
    drained, scaled = asked_to_drain(c, 0), asked_to_scale(c, 5)
    for key in list(c.core.unfinished):
        c.report(0, PartitionFinished(node=0, stage=key.stage, partition=key.partition))
    assert c.core.phase == ("finished" if collect else "ended")
    assert c.core.open_requests() == []
    for number in (drained, scaled):
        standing = c.core.request(number).standing
        assert (standing.state, standing.why) == (State.GIVEN_UP, "the query has come to its end")


def test_requests_that_are_open_when_the_query_fails_say_so() -> None:
    c = Cluster(slots=3)
    number = asked_to_scale(c, 4)
    c.take(c.core.driver.on_job_failed("the Spark job 'workers'", "no executor is left"))
    assert c.core.request(number).standing.why == (
        "the query has failed: the Spark job 'workers' failed: no executor is left"
    )
