"""The shadow of one replica: deadlines, policies, the overlay, revisions, corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flux.dataflow.availability import Availability
from flux.shadows.calendar import MARKS_MAX, MarkCalendar
from flux.shadows.overlay import TentativeEntry, TentativeRoom
from flux.shadows.shadow import (
    CorrectionDone,
    MarkOutput,
    Shadow,
    ShadowEffect,
    TentativeState,
    Undone,
    WantedMarks,
)
from flux.shadows.tentative_operator import OverlayRows
from flux.windows.statements import StreamBound
from flux.windows.window import NEVER
from partitioning.ids import StreamId

SECOND = 1_000_000
ONE, OTHER = StreamId(0, 0), StreamId(0, 1)


def rows(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": list(values)})


class Noted:
    """An operator that gives its overlay's rows, and one row of its own for each mark."""

    reach: int | None = 0
    aligned = True
    nbytes = 0

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, list[int]]] = []
        self.forgotten = 0

    def mark(self, after: int, through: int, overlay: Sequence[OverlayRows]) -> list[pa.RecordBatch] | None:
        self.asked.append((after, through, [each.through for each in overlay]))
        return [rows(through // SECOND)]

    def output_watermark(self, watermark: int) -> int:
        return watermark

    def forget(self) -> None:
        self.forgotten += 1

    def stable(self, step: Any) -> None: ...
    def close(self) -> None: ...


class Case:
    """A shadow with two streams, X = 3 s, and windows of a second."""

    def __init__(self, failure: str = "process", stabilization: str = "process", **given: Any) -> None:
        self.operator = Noted()
        self.room = TentativeRoom(1 << 20)
        about = Availability(3 * SECOND, failure, stabilization)
        self.shadow = Shadow(self.operator, about, given.pop("quantum", SECOND), self.room, **given)

    def look(self, now: float, watermark: int, one: int, other: int) -> list[ShadowEffect]:
        at = {ONE: StreamBound(one * SECOND), OTHER: StreamBound(other * SECOND)}
        return self.shadow.look(now, watermark * SECOND, at)

    def work(self, now: float) -> list[ShadowEffect]:
        return self.shadow.work(now)

    def given(self, effects: Sequence[ShadowEffect]) -> list[tuple[int, int]]:
        marks = [each for each in effects if isinstance(each, MarkOutput)]
        return [(each.after // SECOND, each.through // SECOND) for each in marks]


def entry(through: int, stream: StreamId = OTHER, **more: Any) -> TentativeEntry:
    given: dict[str, Any] = {
        "life": 1,
        "revision": through,
        "after": (through - 1) * SECOND,
        "sequence": 5,
        "created": 0.0,
    }
    return TentativeEntry(
        stream, 0, through=through * SECOND, batch=more.pop("batch", rows(through)), **{**given, **more}
    )


def test_a_mark_is_due_nine_tenths_of_the_bound_after_the_first_stream_has_come_to_it() -> None:
    case = Case(to_sink=True)
    assert not case.look(100.0, 10, 10, 10)
    assert not case.look(100.5, 10, 11, 10)
    assert case.shadow.due_at == pytest.approx(100.5 + 2.7)
    assert not case.work(103.1)
    assert case.given(case.work(103.2)) == [(10, 11)]
    assert case.shadow.state is TentativeState.UP_FAILURE
    assert case.shadow.windows == 1


def test_a_row_dates_its_mark_by_its_creation() -> None:
    case = Case()
    case.look(100.0, 10, 10, 10)
    case.shadow.note_step(SimpleNamespace(slices=[SimpleNamespace(stream=ONE, sequence=3, created=99.0)], rows=1))  # type: ignore[arg-type]
    case.look(100.5, 10, 11, 10)
    assert case.shadow.due_at == pytest.approx(99.0 + 2.7)


def test_stages_in_front_are_due_a_hop_earlier_for_each_stage_behind() -> None:
    case = Case(stages_behind=2)
    case.look(100.0, 10, 11, 10)
    assert case.shadow.due_at == pytest.approx(100.0 + 2.7 - 0.1)


def test_nothing_is_due_while_the_stable_watermark_comes_in_time() -> None:
    case = Case()
    for second in range(10, 20):
        assert not case.look(100.0 + second, second, second + 1, second)
    assert case.shadow.fired == 0
    assert case.shadow.state is TentativeState.STABLE


@pytest.mark.parametrize(("policy", "due"), [("process", 0.35), ("delay", 2.7)])
def test_later_marks_wait_as_the_policy_says(policy: str, due: float) -> None:
    case = Case(policy)
    case.look(100.0, 10, 11, 10)
    case.work(102.7)
    case.look(103.0, 10, 12, 10)
    assert not case.work(103.0 + due - 0.01)
    assert case.given(case.work(103.0 + due)) == [(11, 12)]


def test_suspend_gives_one_mark_and_then_nothing_before_all_is_stable_and_nothing_overdue() -> None:
    case = Case("suspend", "suspend")
    case.look(100.0, 10, 11, 10)
    assert case.given(case.work(102.7)) == [(10, 11)]
    case.look(103.0, 10, 16, 10)
    assert not case.work(110.0)
    case.look(110.1, 11, 16, 11)  # the stable watermark has reached the tentative one, and five marks are overdue
    assert case.shadow.state is not TentativeState.STABLE
    assert not case.work(110.1)
    case.look(110.2, 16, 16, 16)
    assert case.shadow.state is TentativeState.STABLE


def test_stable_results_are_announced_by_an_undo_and_the_last_by_the_end_of_the_correction() -> None:
    case = Case(to_sink=True)
    case.look(100.0, 10, 12, 10)
    case.work(102.7)
    case.work(102.7)
    assert case.shadow.reached == 12 * SECOND
    assert case.look(104.0, 11, 12, 11) == [Undone(10 * SECOND, 11 * SECOND)]
    assert case.shadow.state is TentativeState.STABILIZATION
    assert case.look(104.1, 12, 12, 12) == [Undone(11 * SECOND, 12 * SECOND), CorrectionDone(12 * SECOND)]
    assert case.shadow.idle


def test_a_stream_that_stands_again_is_a_failure_again() -> None:
    case = Case()
    case.look(100.0, 10, 13, 10)
    for _ in range(3):
        case.work(102.7)
    case.look(104.0, 11, 13, 11)
    assert case.shadow.state is TentativeState.STABILIZATION
    case.look(105.0, 11, 13, 11)
    assert case.shadow.state is TentativeState.UP_FAILURE
    assert case.shadow.standing(105.0) == [OTHER]
    assert case.shadow.since == 102.7


def test_a_watermark_within_a_mark_has_the_rest_of_it_given_again_where_results_come_at_any_time() -> None:
    case = Case(to_sink=True)
    case.operator.aligned = False
    case.look(100.0, 10, 11, 10)
    case.work(102.7)
    bounds = {ONE: StreamBound(11 * SECOND), OTHER: StreamBound(10 * SECOND + 5)}
    assert case.shadow.look(103.0, 10 * SECOND + 5, bounds) == [Undone(10 * SECOND, 11 * SECOND)]
    case.work(103.0)
    assert case.operator.asked[-1][:2] == (10 * SECOND + 5, 11 * SECOND)


def test_a_mark_to_which_every_stream_has_come_is_due_at_once() -> None:
    case = Case()
    case.look(100.0, 10, 11, 10)
    assert case.shadow.take(entry(11, created=100.0), 100.2)
    assert case.shadow.due_at == 100.2
    assert case.given(case.work(100.2)) == [(10, 11)]
    assert case.operator.asked == [(10 * SECOND, 11 * SECOND, [11 * SECOND])]


def test_a_failure_does_not_begin_where_all_streams_have_passed_the_mark_or_move() -> None:
    """Begin no failure, because the watermark of such streams is late by load."""
    case = Case()
    case.look(100.0, 10, 11, 11)
    assert case.shadow.due_at == float("inf")
    case = Case()
    case.look(100.0, 10, 11, 10)
    for tenth in range(50):
        bounds = {ONE: StreamBound(20 * SECOND), OTHER: StreamBound(10 * SECOND + tenth)}
        case.shadow.look(100.1 + tenth / 10, 10 * SECOND, bounds)
    assert not case.work(105.1)
    assert case.shadow.due_at == pytest.approx(105.0 + 0.75)
    assert case.given(case.work(105.8)) == [(10, 11)]


def test_a_stream_whose_rows_wait_here_is_not_the_one_that_is_late() -> None:
    case = Case()
    bounds = {ONE: StreamBound(11 * SECOND), OTHER: StreamBound(10 * SECOND)}
    case.shadow.look(100.0, 10 * SECOND, bounds, waiting={OTHER})
    assert not case.work(110.0)
    case.shadow.look(110.0, 10 * SECOND, bounds)
    assert case.given(case.work(110.0)) == [(10, 11)]


def test_a_mark_is_given_again_when_its_overlay_changes_ten_times_a_second_at_most() -> None:
    case = Case(to_sink=True)
    case.look(100.0, 10, 11, 10)
    case.shadow.take(entry(11), 100.0)
    case.work(100.0)
    assert case.shadow.take(entry(11, revision=20), 100.02)
    assert case.shadow.take(entry(11, revision=21), 100.03)
    assert not case.work(100.05)
    again = case.work(100.1)
    assert again[0] == Undone(10 * SECOND, 11 * SECOND)
    assert case.given(again) == [(10, 11)]
    assert case.shadow.revised == 1


def test_older_marks_repetitions_and_stable_ones_are_refused() -> None:
    case = Case()
    case.look(100.0, 10, 11, 10)
    assert case.shadow.take(entry(12, life=2, revision=5), 100.0)
    assert not case.shadow.take(entry(12, life=2, revision=5), 100.0)
    assert not case.shadow.take(entry(12, life=2, revision=4), 100.0)
    assert not case.shadow.take(entry(13, life=1, revision=9), 100.0)
    assert not case.shadow.take(entry(10, life=2, revision=9), 100.0)
    assert case.shadow.overlay.stale == 4


def test_a_new_life_voids_the_marks_of_older_ones() -> None:
    case = Case()
    case.look(100.0, 10, 12, 10)
    case.shadow.take(entry(11), 100.0)
    case.shadow.take(entry(12), 100.0)
    case.shadow.take(entry(11, life=2, revision=1), 100.0)
    assert [each.through for each in case.shadow.overlay.rows(20 * SECOND)] == [11 * SECOND]


def test_a_stable_bound_voids_the_marks_that_it_has_reached() -> None:
    case = Case()
    case.look(100.0, 10, 12, 10)
    case.shadow.take(entry(11), 100.0)
    case.shadow.take(entry(12), 100.0)
    case.look(100.1, 10, 12, 11)
    assert [each.through for each in case.shadow.overlay.rows(20 * SECOND)] == [12 * SECOND]
    assert case.operator.forgotten == 1


def test_rows_are_void_once_a_later_stable_element_of_their_stream_is_applied() -> None:
    case = Case()
    case.look(100.0, 10, 12, 10)
    case.shadow.take(entry(11, sequence=5), 100.0)
    case.shadow.note_rows(OTHER, 4)
    assert case.shadow.overlay.rows(20 * SECOND)
    case.shadow.note_rows(OTHER, 5)
    assert not case.shadow.overlay.rows(20 * SECOND)
    assert case.shadow.take(entry(12, sequence=5), 100.0)
    assert not case.shadow.overlay.rows(20 * SECOND)
    assert case.shadow.overlay.newest(OTHER) == 12 * SECOND


def test_a_gap_of_the_lane_is_asked_for_and_its_marks_are_dated_backwards() -> None:
    case = Case(lanes={0})
    case.look(100.0, 10, 10, 10)
    case.shadow.take(entry(11, created=100.0), 100.0)
    case.shadow.take(entry(14, created=103.5), 106.0)
    effects = case.look(106.0, 10, 10, 10)
    assert WantedMarks(OTHER, 11 * SECOND) in effects
    dates = {mark // SECOND: created for mark, created, _ in case.shadow.calendar.between(0, 20 * SECOND)}
    assert dates == {11: 100.0, 12: 101.5, 13: 102.5, 14: 103.5}


def test_missing_marks_are_asked_for_again_four_times_within_the_bound() -> None:
    case = Case(lanes={0})
    case.look(100.0, 10, 11, 10)
    case.work(102.7)
    asked = [
        time
        for time in range(1027, 1070)
        if any(isinstance(each, WantedMarks) for each in case.look(time / 10, 10, 11, 10))
    ]
    assert asked == [1027, 1035, 1043, 1051, 1059, 1067]


def test_kept_outputs_answer_who_has_missed_them_until_they_are_stable() -> None:
    case = Case()
    case.look(100.0, 10, 12, 10)
    case.work(102.7)
    case.work(102.7)
    assert [each.through // SECOND for each in case.shadow.kept(NEVER)] == [11, 12]
    assert [each.through // SECOND for each in case.shadow.kept(11 * SECOND)] == [12]
    case.look(103.0, 11, 12, 11)
    assert [each.through // SECOND for each in case.shadow.kept(NEVER)] == [12]
    case.shadow.close()
    assert case.room.bytes == 0


def test_results_that_go_to_a_sink_and_to_stages_are_taken_back_there_and_kept_for_these() -> None:
    case = Case(to_sink=True, to_stages=True)
    case.operator.mark = lambda after, through, overlay: [] if through > 11 * SECOND else [rows(1)]  # type: ignore[method-assign]
    case.look(100.0, 10, 10, 10)
    case.look(100.5, 10, 12, 10)
    assert case.given(case.work(103.3)) + case.given(case.work(103.7)) == [(10, 11), (11, 12)], "also one without rows"
    assert [each.through // SECOND for each in case.shadow.kept(NEVER)] == [11, 12]
    assert case.look(104.0, 11, 12, 11)[0] == Undone(10 * SECOND, 11 * SECOND)
    only = Case(to_sink=True)
    only.look(100.0, 10, 11, 10)
    assert only.given(only.work(103.3)) == [(10, 11)]
    assert only.shadow.kept(NEVER) == []


def test_overlay_and_kept_output_stay_within_their_bytes_and_lose_the_oldest_marks() -> None:
    case = Case()
    case.room.bytes_max = 3 * rows(1).nbytes
    case.look(100.0, 10, 12, 10)
    for second in range(11, 20):
        case.shadow.take(entry(second), 100.0)
    assert [each.through // SECOND for each in case.shadow.overlay.rows(20 * SECOND)] == [17, 18, 19]
    assert case.room.dropped == 6
    assert case.room.bytes <= case.room.bytes_max


def test_marks_are_merged_where_one_takes_longer_than_a_quantum() -> None:
    case = Case()
    case.look(100.0, 10, 20, 10)
    case.shadow.note_cost(1.5)
    assert case.given(case.work(103.0)) == [(10, 12)]
    assert case.given(case.work(103.0)) == [(12, 14)]
    assert case.shadow.skipped == 2


def test_a_lost_shadow_of_a_sink_takes_everything_back_at_first() -> None:
    case = Case(to_sink=True, again=True, watermark=7 * SECOND)
    assert case.look(100.0, 10, 10, 10)[0] == Undone(7 * SECOND, None)


def test_idle_and_ended_streams_hold_nothing_back() -> None:
    case = Case()
    bounds: Mapping[StreamId, StreamBound] = {ONE: StreamBound(11 * SECOND), OTHER: StreamBound(10 * SECOND, idle=True)}
    case.shadow.look(100.0, 10 * SECOND, bounds)
    case.work(102.7)
    assert case.shadow.standing(110.0) == []


def test_marks_that_an_ended_stream_has_brought_are_due_as_before() -> None:
    """Keep such marks due: the stream may have ended before the shadow has looked at its last rows."""
    case = Case()
    case.look(100.0, 10, 10, 10)
    bounds = {ONE: StreamBound(12 * SECOND, ended=True), OTHER: StreamBound(10 * SECOND)}
    case.shadow.look(100.5, 10 * SECOND, bounds)
    assert case.given(case.work(103.2)) == [(10, 11)]
    assert case.shadow.reached == 11 * SECOND


def test_a_jump_of_event_time_keeps_a_bounded_number_of_marks() -> None:
    calendar = MarkCalendar(SECOND)
    calendar.hear(10 * SECOND, 1.0, 1.5, 5 * SECOND)
    calendar.hear(10_000_000 * SECOND, 2.0, 2.5, 5 * SECOND)
    assert len(calendar) == 5 + MARKS_MAX
    assert calendar.after(5 * SECOND) == (6 * SECOND, 1.0, 1.5)


def test_without_windows_the_marks_are_those_of_the_stage_before() -> None:
    case = Case(quantum=0)
    case.look(100.0, 10, 50, 10)
    assert case.shadow.due_at == float("inf")
    case.shadow.take(entry(12, created=100.0), 100.1)
    assert case.given(case.work(100.1)) == [(10, 12)]
    case.shadow.take(entry(11, created=100.0), 100.2)  # it was late, and is part of the mark that was given
    assert case.given(case.work(100.3)) == [(10, 12)]
    assert case.operator.asked[-1][2] == [11 * SECOND, 12 * SECOND]


def test_a_mark_is_told_again_once_stable_rows_in_front_of_it_have_come_to_rest() -> None:
    """Bring back one of two missing inputs: its stable rows void the rows of later marks in the stages behind."""
    case = Case()
    case.look(0.0, 0, 0, 0)
    case.look(1.0, 0, 5, 0)
    given = [mark for now in range(36, 80) for mark in case.given(case.work(now / 10))]
    assert given == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    case.look(9.0, 1, 5, 1)
    assert case.given(case.work(9.01)) == [], "further stable rows may follow at once"
    case.look(9.015, 2, 5, 2)
    assert case.given(case.work(9.03)) == []
    assert [mark for now in (9.04, 9.05, 9.06, 9.07) for mark in case.given(case.work(now))] == [(2, 3), (3, 4), (4, 5)]
    assert case.shadow.revised == 3


def test_a_sink_alone_is_told_nothing_again() -> None:
    case = Case(to_sink=True)
    case.look(0.0, 0, 0, 0)
    case.look(1.0, 0, 3, 0)
    for now in range(36, 80):
        case.work(now / 10)
    case.look(9.0, 1, 3, 1)
    assert case.given(case.work(9.5)) == []
