"""The rules of watermarks: the model of them keeps all laws, and a model without any one of them breaks a law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux.windows.lateness import Lateness
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
            judge = Lateness(delay, judge.newest)
        late = judge.judge(np.array(times[begin:end], np.int64))
        found += [False] * (end - begin) if late is None else late.tolist()
    assert found == [bool(times[:place]) and time < max(times[:place]) - delay for place, time in enumerate(times)]
    assert judge.watermark == (max(max(times) - delay, NEVER) if times else NEVER)


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
