"""Declarations of joins: the ranges that bounds make for both sides, and refused declarations."""

from __future__ import annotations

from typing import Any

import pytest

from flux.errors import UsageError
from flux.joins.join_spec import EITHER, LEFT, RIGHT, JoinSpec, TimeBound, TimeRange

OUTPUTS = (("a", 0), ("b", 3))
KEYS = ((0,), (0,))


def spec(*bounds: TimeBound, how: str = "inner", **more: Any) -> JoinSpec:
    return JoinSpec(how, KEYS, OUTPUTS, **({"times": (1, 2), "bounds": bounds} | more))


def test_a_bound_between_event_times_says_something_of_both_sides() -> None:
    within = spec(TimeBound(LEFT, False, 2, -5), TimeBound(LEFT, True, 2, 600))
    assert within.ranges(RIGHT) == [TimeRange(2, False, -5), TimeRange(2, True, 600)]
    assert within.ranges(LEFT) == [TimeRange(1, True, 5), TimeRange(1, False, -600)]
    assert [within.evicts(side) for side in (LEFT, RIGHT)] == [True, True]
    assert [within.held_back(side) for side in (LEFT, RIGHT)] == [5, 600]


def test_a_bound_by_another_column_ends_the_wait_of_one_side() -> None:
    placed = spec(TimeBound(LEFT, False, 2, 0), TimeBound(LEFT, True, 3, 0))  # from opened to expires
    assert placed.ranges(RIGHT) == [TimeRange(2, False, 0), TimeRange(3, True, 0)]
    assert placed.ranges(LEFT) == [TimeRange(1, True, 0)]
    assert [placed.evicts(side) for side in (LEFT, RIGHT)] == [True, True]
    assert [placed.held_back(side) for side in (LEFT, RIGHT)] == [0, None]


def test_one_bound_alone_leaves_rows_of_the_other_side_for_ever() -> None:
    since = spec(TimeBound(LEFT, False, 2, 0))
    assert [since.evicts(side) for side in (LEFT, RIGHT)] == [True, False]
    assert [since.forgets(side) for side in (LEFT, RIGHT)] == [True, False]
    assert spec(TimeBound(LEFT, False, 2, 0), ttl=1).forgets(RIGHT)


def test_a_ttl_over_two_event_times_is_a_bound_of_both_sides() -> None:
    apart = spec(ttl=60).with_ttl_as_bounds()
    assert apart.ttl is None
    assert apart.ranges(RIGHT) == [TimeRange(2, False, -60), TimeRange(2, True, 60)]
    assert apart.ranges(LEFT) == [TimeRange(1, True, 60), TimeRange(1, False, -60)]
    assert [apart.held_back(side) for side in (LEFT, RIGHT)] == [60, 60]
    within = spec(TimeBound(LEFT, False, 2, 0), ttl=60).with_ttl_as_bounds()
    assert [within.held_back(side) for side in (LEFT, RIGHT)] == [0, 60]
    for times in ((1, None), (None, 2), (None, None)):
        assert spec(times=times, ttl=60).with_ttl_as_bounds().ttl == 60, "one clock alone says nothing of two times"


def test_the_time_of_the_earlier_of_several_bounds_counts() -> None:
    assert spec(TimeBound(LEFT, False, 2, -5), TimeBound(RIGHT, True, 1, 3)).held_back(LEFT) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"how": "cross"}, "a join is one of"),
        ({"keys": ((0,), (0, 1))}, "as many key columns"),
        ({"keys": ((), ())}, "at least one"),
        ({"outputs": ()}, "at least one column"),
        ({"bounds": (TimeBound(RIGHT, True, 0, 0),)}, "no event time"),
        ({"times": (0, None), "bounds": (TimeBound(LEFT, True, 0, 1 << 61),)}, "at most"),
        ({"ttl": 0}, "above zero"),
        ({"times": (0, None), "time_of": EITHER}, "a side that has none"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JoinSpec(**({"how": "inner", "keys": KEYS, "outputs": OUTPUTS} | given))
