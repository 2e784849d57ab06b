"""One object answers which worker may hold which replica, and why not, for all code that places replicas."""

from __future__ import annotations

from controller.replicas.placement import FarApart
from controller.replicas.spread import WorkerPlace

#: Two hosts of two executors each; worker 4 is on the executor of worker 0.
PLACES = {
    worker: WorkerPlace.of("", host, executor)
    for worker, host, executor in [(0, "a", "e0"), (1, "a", "e1"), (2, "b", "e2"), (3, "b", "e3"), (4, "a", "e0")]
}
KEY = (0, 0)


def by_number(worker: int) -> int:
    return worker


def test_every_obstacle_has_its_words() -> None:
    placement = FarApart(PLACES, leaving=[3])
    assert placement.obstacle(9, []) == "there is no worker 9; there are 0, 1, 2, 3, 4"
    assert placement.obstacle(3, [0]) == "worker 3 is leaving"
    assert placement.obstacle(0, [2, 0]) == "worker 0 holds a replica already"
    assert "on the same executor as worker 0" in str(placement.obstacle(4, [2, 0]))
    assert placement.obstacle(1, [0]) is None


def test_two_copies_may_share_an_executor_where_the_settings_allow_it() -> None:
    assert not FarApart(PLACES).may_hold(4, [0])
    assert FarApart(PLACES, same_executor=True).may_hold(4, [0])


def test_candidates_come_by_rank_and_equals_as_the_caller_likes() -> None:
    placement = FarApart(PLACES, same_executor=True)
    assert placement.candidates(KEY, [0], then=by_number) == [2, 3, 1, 4]
    assert placement.candidates(KEY, [0], then=lambda worker: -worker) == [3, 2, 1, 4]
    assert placement.candidates(KEY, [0], then=by_number, without={2}) == [3, 1, 4]


def test_what_the_caller_puts_first_counts_more_than_rank() -> None:
    failed = {2: 1, 3: 1}
    found = FarApart(PLACES).candidates(KEY, [0], first=lambda worker: failed.get(worker, 0), then=by_number)
    assert found == [1, 2, 3], "where it has failed before, it is tried last"


def test_who_is_leaving_is_no_candidate_and_sets_no_standard() -> None:
    placement = FarApart(PLACES, leaving=[2, 3])
    assert placement.candidates(KEY, [0], then=by_number) == [1]
    assert placement.rank(KEY, 1, [0]) == placement.best(KEY, [0])


def test_a_secondary_that_could_be_farther_away_is_misplaced_before_its_primary() -> None:
    placement = FarApart(PLACES)
    assert placement.misplaced(KEY, [0, 1]) == 1
    assert placement.misplaced(KEY, [0, 2]) is None
    assert placement.misplaced(KEY, [0]) is None
