"""The rules of watermarks: the model of them keeps all laws, and a model without any one of them breaks a law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.windows.lateness import Judgement, Lateness
from flux.windows.statements import Statement, StreamBound, bound_of, least
from flux.windows.window import END_OF_TIME, NEVER
from tests.laws.watermark_model import BREAKS, LawBroken, World

#: For each rule, a schedule that breaks a law without it. ``python -m tests.laws.watermark_model --without RULE`` looks for
#: others.
CAUGHT_AT = {
    "own": 0, "ahead": 38, "rows": 2, "uncommitted": 336, "reread": 136, "early": 4, "falls": 3, "silence": 19, "ended": 0,
}  # fmt: skip


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_schedules_keep_all_laws(first: int) -> None:
    for seed in range(first, first + 50):
        World(seed).run()


def test_each_rule_that_can_be_left_out_is_tried() -> None:
    assert CAUGHT_AT.keys() == BREAKS.keys()


@pytest.mark.parametrize("rule", BREAKS)
def test_a_model_without_a_rule_breaks_a_law(rule: str) -> None:
    with pytest.raises(LawBroken):
        World(CAUGHT_AT[rule], rule).run()
    World(CAUGHT_AT[rule]).run()


TIMES = st.lists(st.integers(-30, 30) | st.sampled_from([NEVER, END_OF_TIME]), max_size=40)


@given(times=TIMES, cuts=st.lists(st.integers(0, 40)), delay=st.sampled_from([0, 1, 5, 100]))
def test_late_rows_are_those_below_the_greatest_time_before_them_however_they_are_cut(
    times: list[int], cuts: list[int], delay: int
) -> None:
    judge, found = Lateness(delay), []
    edges = [0, *sorted(min(cut, len(times)) for cut in cuts), len(times)]
    for begin, end in zip(edges, edges[1:], strict=False):
        if begin % 3 == 0:  # a reader that begins here knows the greatest time from its mark
            judge = Lateness(delay, Judgement(judge.newest))
        late = judge.judge(np.array(times[begin:end], np.int64))
        found += [False] * (end - begin) if late is None else late.tolist()
    assert found == [bool(times[:place]) and time < max(times[:place]) - delay for place, time in enumerate(times)]
    assert judge.watermark == (max(max(times) - delay, NEVER) if times else NEVER)


def judged_one_by_one(times: list[int], delay: int, most: int, after: int) -> tuple[list[bool], int | None]:
    """Return which rows are late, and the newest time that is believed, in the words of the documents."""
    newest, doubted, late = None, list[int](), list[bool]()
    for time in times:
        late.append(newest is not None and time < newest - delay)
        if newest is None or time <= newest + most:
            newest, doubted = time if newest is None else max(newest, time), []
        else:
            doubted.append(time)
            if len(doubted) == after:
                newest, doubted = min(doubted), []
    return late, newest


@settings(deadline=None)  # the kernel may have to be compiled
@given(
    times=st.lists(st.integers(-30, 30) | st.integers(50, 60), max_size=60),
    cuts=st.lists(st.integers(0, 60)),
    delay=st.sampled_from([0, 1, 5, 100]),
    most=st.sampled_from([1, 4, 20, 50]),
    after=st.sampled_from([1, 2, 3, 7]),
)
def test_a_time_far_ahead_is_believed_when_some_rows_in_succession_have_such_times_however_they_are_cut(
    times: list[int], cuts: list[int], delay: int, most: int, after: int
) -> None:
    judge, found = Lateness(delay, max_ahead=most, believed_after=after), list[bool]()
    edges = [0, *sorted(min(cut, len(times)) for cut in cuts), len(times)]
    for begin, end in zip(edges, edges[1:], strict=False):
        if begin % 3 == 0:  # a reader that begins here goes on from its mark
            judge = Lateness(delay, Judgement(*judge.known), most, after)
        late = judge.judge(np.array(times[begin:end], np.int64))
        found += [False] * (end - begin) if late is None else late.tolist()
    expected, newest = judged_one_by_one(times, delay, most, after)
    assert found == expected
    assert judge.newest == (NEVER if newest is None else newest)
    assert judge.late == sum(expected)


@given(
    rows=st.lists(st.tuples(st.integers(-30, 60), st.integers(-30, 30) | st.just(NEVER))),
    cuts=st.lists(st.integers(0, 40)),
)
def test_a_time_above_a_sure_one_moves_nothing(rows: list[tuple[int, int]], cuts: list[int]) -> None:
    judge, found = Lateness(3, max_ahead=10), list[bool]()
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for begin, end in zip(edges, edges[1:], strict=False):
        times, sure = (np.array([row[at] for row in rows[begin:end]], np.int64) for at in (0, 1))
        late = judge.judge(times, sure)
        found += [False] * (end - begin) if late is None else late.tolist()
    believed = [[time for time, most in rows[:place] if time <= most] for place in range(len(rows))]
    assert found == [bool(before) and time < max(before) - 3 for (time, _), before in zip(rows, believed, strict=True)]


def test_a_statement_counts_for_a_partition_that_has_all_elements_in_front_of_it() -> None:
    said = Statement(10, 500)
    assert bound_of(said, 10, None, False) == StreamBound(500)
    assert bound_of(said, 9, None, False) == StreamBound(NEVER)
    assert bound_of(said, 10, 300, False) == StreamBound(300), "slices that are not ordered come before it"
    assert bound_of(said, 10, None, True) == StreamBound(ended=True)


def test_the_newest_statement_counts_and_its_watermark_never_falls() -> None:
    first = Statement(10, 500)
    assert first.newer(Statement(9, 900)) == first
    assert first.newer(Statement(11, 400, True)) == Statement(11, 500, True)
    assert first.newer(Statement(10, 600)) == Statement(10, 600)


@pytest.mark.parametrize(
    ("bounds", "watermark"),
    [
        ([StreamBound(5), StreamBound(3)], 3),
        ([StreamBound(5), StreamBound(3, idle=True)], 5),
        ([StreamBound(5, idle=True), StreamBound(3, idle=True)], 5),
        ([StreamBound(5), StreamBound(ended=True)], 5),
        ([StreamBound(5, idle=True), StreamBound(ended=True)], 5),
        ([StreamBound(), StreamBound(5)], NEVER),
        ([StreamBound(ended=True)], END_OF_TIME),
    ],
)
def test_the_watermark_of_an_input_is_the_least_of_its_open_streams_that_are_not_idle(
    bounds: list[StreamBound], watermark: int
) -> None:
    assert least(bounds) == watermark
