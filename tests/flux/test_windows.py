"""Windows of aggregates against a model in plain Python, with any cuts, watermarks, copies and changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.errors import SchemaError, UsageError
from flux.operators import windowed_groups
from flux.operators.attributes import open_operator
from flux.operators.batches import given_batches
from flux.operators.operator import EventTimers, facts_of, last_output, move_watermarks, says_needs
from flux.operators.windowed_groups import TIMER
from flux.windows import open_panes, pane_state, session_state
from flux.windows.durations import microseconds
from flux.windows.times import TIME_MAX, microseconds_of
from flux.windows.window import NEVER, SessionWindow, Window
from partitioning.errors import StateMismatchError
from partitioning.keyed_state import KeyedState, TypedMeasure

SCHEMA = pa.schema([("user", pa.int64()), ("ts", pa.timestamp("us", tz="UTC")), ("amount", pa.int64())])
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: A time of a clock, at which doubles tell a quarter of a microsecond.
BASE_S = 1_700_000_000
BASE_US = BASE_S * 1_000_000
#: Microseconds, user, amount.
Row = tuple[int | None, int | None, int | None]


def batch(*rows: Row) -> pa.RecordBatch:
    times = pa.array([ts for ts, _, _ in rows], pa.int64()).cast(SCHEMA.field("ts").type)
    users, amounts = (pa.array([row[i] for row in rows], pa.int64()) for i in (1, 2))
    return pa.RecordBatch.from_arrays([users, times, amounts], schema=SCHEMA)


def stage(window: Any, mode: str | None = None) -> Any:
    @flux.stage(key="user", window=window, output_mode=mode)
    class Spent(flux.Aggregate):
        n = flux.count()
        total = flux.sum("amount")
        least = flux.min("amount")
        kinds = flux.count_distinct("amount")

    return Spent


def rows_of(table: pa.Table) -> list[tuple]:
    """Return rows with their times in microseconds."""
    times = [microseconds_of(table.column(name).combine_chunks()).tolist() for name in ("window_start", "window_end")]
    values = [table.column(name).to_pylist() for name in ("n", "total", "least", "kinds")]
    return list(zip(table.column("user").to_pylist(), *times, *values, strict=True))


def summed(amounts: list[int | None]) -> tuple[int, int | None, int | None, int]:
    known = [amount for amount in amounts if amount is not None]
    return len(amounts), sum(known) if known else None, min(known, default=None), len(set(known))


def expected_windows(rows: list[Row], window: Window) -> dict[tuple, tuple]:
    groups = defaultdict(list)
    for ts, user, amount in rows:
        if ts is not None:
            start = (ts - window.offset) // window.slide * window.slide + window.offset
            while start + window.size > ts:
                groups[user, start, start + window.size].append(amount)
                start -= window.slide
    return {group: summed(amounts) for group, amounts in groups.items()}


def expected_sessions(rows: list[Row], gap: int) -> dict[tuple, tuple]:
    groups: dict[tuple, tuple] = {}
    for user in {user for _, user, _ in rows}:
        rows_of_user = ((ts, amount) for ts, owner, amount in rows if owner == user and ts is not None)
        mine = sorted(rows_of_user, key=lambda each: each[0])
        while mine:
            size = next((i for i in range(1, len(mine)) if mine[i][0] - mine[i - 1][0] > gap), len(mine))
            session, mine = mine[:size], mine[size:]
            groups[user, session[0][0], session[-1][0] + gap] = summed([amount for _, amount in session])
    return groups


@st.composite
def streams(draw: Any) -> tuple[list[list[Row]], list[int | None]]:
    """Draw batches and the watermark behind each; no row is below the watermark before it."""
    batches: list[list[Row]] = []
    watermarks: list[int | None] = []
    time, watermark = draw(st.integers(-60, 60)), NEVER
    for _ in range(draw(st.integers(1, 12))):
        time += draw(st.integers(0, 9))
        rows: list[Row] = []
        for _ in range(draw(st.integers(1, 8))):
            ts = None if draw(st.integers(0, 15)) == 0 else max(watermark, time - draw(st.integers(0, 12)))
            user = draw(st.sampled_from([1, 2, 3, None]))
            rows.append((ts, user, draw(st.sampled_from([-3, 0, 2, None]))))
        batches.append(rows)
        if draw(st.booleans()):
            watermark = max(watermark, time - draw(st.integers(0, 10)))
        watermarks.append(None if watermark == NEVER else watermark)
    return batches, watermarks


WINDOWS = st.builds(
    lambda size, slide, offset: Window("ts", size, min(slide, size), offset % min(slide, size)),
    st.sampled_from([1, 4, 10, 12]),
    st.integers(1, 12),
    st.integers(0, 11),
)


def applied(declared: Any, mode: str | None, drawn: tuple, restart: int | None = None, kept: int | None = None) -> list:
    batches, watermarks = drawn
    table = flux.testing.apply(
        stage(declared, mode), [batch(*rows) for rows in batches], watermarks=watermarks, restart_after=restart,
        checkpoint_after=kept,
    )  # fmt: skip
    assert table is not None
    return rows_of(table)


@settings(max_examples=60, deadline=None)
@given(drawn=streams(), window=WINDOWS, data=st.data())
def test_windows_are_those_of_the_model_and_each_comes_once(drawn: tuple, window: Window, data: Any) -> None:
    restart = data.draw(st.none() | st.integers(0, len(drawn[0])))
    kept = None if restart is None else data.draw(st.none() | st.integers(0, restart))
    given_ = applied(window, None, drawn, restart, kept)
    found = {row[:3]: row[3:] for row in given_}
    assert len(found) == len(given_)
    assert found == expected_windows([row for rows in drawn[0] for row in rows], window)


@settings(max_examples=60, deadline=None)
@given(drawn=streams(), gap=st.integers(1, 9), data=st.data())
def test_sessions_are_those_of_the_model_and_each_comes_once(drawn: tuple, gap: int, data: Any) -> None:
    restart = data.draw(st.none() | st.integers(0, len(drawn[0])))
    kept = None if restart is None else data.draw(st.none() | st.integers(0, restart))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_state, "SLOTS_MIN", 4)  # so that few sessions move together
        given_ = applied(SessionWindow("ts", gap), None, drawn, restart, kept)
    found = {row[:3]: row[3:] for row in given_}
    assert len(found) == len(given_)
    assert found == expected_sessions([row for rows in drawn[0] for row in rows], gap)


def opened(declared: Any, mode: str | None = None) -> Any:
    """Make an operator with a context of its own."""
    made = stage(declared, mode)
    operator, context = (
        made.make(),
        flux.Context("Spent", key=("user",), schemas=(SCHEMA,), output_mode=made.output_mode),
    )
    open_operator(operator, context)
    return operator


def steps_of(drawn: tuple, late: list[int]) -> list[Any]:
    """Return steps: batches, and the watermarks behind them. The ``late`` batches begin with a row below the watermark."""
    steps: list[Any] = []
    for number, (rows, mark) in enumerate(zip(*drawn, strict=True)):
        before = max([step for step in steps if isinstance(step, int)], default=NEVER)
        behind = [(before - 1, 1, 5)] if number in late and before != NEVER else []
        steps += [batch(*behind, *rows), *([] if mark is None else [mark])]
    return steps


def applied_from(operator: Any, steps: list[Any], first: int) -> Any:
    """Apply steps from ``first`` on. Yield the output of each, and the first step whose rows matter behind it. The
    watermark at the first step is that of a replay point."""
    context = operator.context
    context.watermarks = [max([step for step in steps[:first] if isinstance(step, int)], default=NEVER)]
    for context.step in range(first, len(steps)):
        step = steps[context.step]
        moves = isinstance(step, int)
        given_ = move_watermarks(operator, context, [step]) if moves else given_batches(operator.process(step))
        yield [made.to_pylist() for made in given_], operator.needs_from()
    yield [made.to_pylist() for made in last_output(operator, context)], None


@settings(max_examples=80, deadline=None)
@given(drawn=streams(), declared=WINDOWS | st.builds(SessionWindow, st.just("ts"), st.integers(1, 9)), data=st.data())
def test_windows_that_begin_empty_at_the_step_they_need_give_the_same(drawn: tuple, declared: Any, data: Any) -> None:
    mode = "update" if isinstance(declared, Window) and data.draw(st.booleans()) else None
    steps = steps_of(drawn, data.draw(st.lists(st.integers(0, 11), max_size=6)))
    whole = list(applied_from(opened(declared, mode), steps, 0))
    at = data.draw(st.integers(0, len(steps) - 1))
    needed = whole[at][1]
    assert 0 <= needed <= at + 1
    assert all(before <= needed for _, before in whole[:at]), "it never goes back"
    first = data.draw(st.just(needed) | st.integers(0, needed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_state, "SLOTS_MIN", data.draw(st.sampled_from([2, 1024])))
        again = list(applied_from(opened(declared, mode), steps, first))
    assert [made for made, _ in again[at + 1 - first :]] == [made for made, _ in whole[at + 1 :]]


@pytest.mark.parametrize(("keys", "gap", "rows"), [(50, 1000, 777), (20_000, 3, 5000), (1, 2, 64), (300, 60, 20_000)])
def test_many_rows_have_the_sessions_that_sorted_rows_have(keys: int, gap: int, rows: int) -> None:
    random, total = np.random.default_rng(keys), 20_000
    users, amounts = random.integers(0, keys, total), random.integers(0, 9, total)
    times = np.sort(random.integers(0, 5 * total, total)) + random.integers(0, 500, total)
    fields, measures = [pa.field("user", pa.int64())], {"total": TypedMeasure("sum", "amount", pa.int64())}
    state = session_state.SessionState(fields, measures, SessionWindow("ts", gap))
    found: list[tuple[int, ...]] = []
    for cut in range(0, total, rows):
        of = slice(cut, cut + rows)
        state.add(times[of], [pa.array(users[of])], [pa.array(amounts[of])])
        for ended in state.close(int(times[cut + rows :].min(initial=1 << 62)), 700):
            columns = (ended.keys[0].tolist(), ended.starts.tolist(), ended.ends.tolist(), ended.values[0].tolist())
            found += zip(*columns, strict=True)
    order = np.lexsort((times, users))
    users, times, amounts = users[order], times[order], amounts[order]
    begins = np.flatnonzero(np.append(True, (users[1:] != users[:-1]) | (times[1:] - times[:-1] > gap)))
    ends = times[np.append(begins[1:], total) - 1] + gap
    sums = np.add.reduceat(amounts, begins)
    expected = [column.tolist() for column in (users[begins], times[begins], ends, sums)]
    assert sorted(found) == sorted(zip(*expected, strict=True))
    assert not len(state)


@pytest.mark.parametrize(("spread", "most"), [(1, 7), (3, 7), (400, 64), (10**7, 7), (10**15, 64)])
def test_sessions_that_end_together_come_in_order_part_by_part(spread: int, most: int) -> None:
    """Sort by the last row, the first row, and the place of the first row; other partitions have turns between
    parts."""
    random, total = np.random.default_rng(spread), 500
    state = session_state.SessionState([pa.field("user", pa.int64())], {}, SessionWindow("ts", 2))
    times = random.integers(0, spread, total) * 10 - 5 * spread
    state.add(times, [pa.array(np.arange(total))], [])
    state.add(times + random.integers(0, 2, total), [pa.array(np.arange(total))], [])
    parts = list(state.close(10 * spread + 10, most))
    assert max(len(part.starts) for part in parts) <= most
    lasts = np.concatenate([part.ends for part in parts])
    found = np.concatenate([part.keys[0].to_numpy() for part in parts])
    by_user = np.empty(total, np.int64)
    by_user[found] = lasts
    assert found.tolist() == np.lexsort((np.arange(total), times, by_user)).tolist()
    assert not len(state)


def test_windows_that_begin_empty_leave_out_rows_below_the_watermark_of_their_first_step() -> None:
    steps = [batch((5, 1, 1)), 15, batch((12, 1, 1), (33, 1, 1)), 40]
    for declared in (Window("ts", 10, 10), SessionWindow("ts", 5)):
        given_ = [made for first in (0, 2) for made, _ in list(applied_from(opened(declared), steps, first))[-2:]]
        assert given_[:2] == given_[2:]
        assert sum(len(rows) for rows in given_[0]) == 1


def test_windows_need_the_first_step_that_an_open_one_has_a_row_of() -> None:
    for declared in (Window("ts", 10, 5), SessionWindow("ts", 10)):
        operator = opened(declared)
        assert operator.needs_from() == 1
        steps = [batch((1, 1, 1)), batch((50, 1, 1)), 30, batch((52, 1, 1)), 99]
        assert [needed for _, needed in applied_from(operator, steps, 0)][:-1] == [0, 0, 1, 1, 5]


def test_sessions_that_end_together_come_in_the_order_of_their_first_rows_whatever_ended_before() -> None:
    steps = [batch((0, 1, 1)), 100, batch((200, 2, 1), (200, 1, 1)), batch((203, 3, 1), (199, 3, 1), (200, 2, 1)), 300]
    for first in (0, 2):
        *_, (found, _), _ = applied_from(opened(SessionWindow("ts", 5)), steps, first)
        assert [row["user"] for row in found[0]] == [2, 1, 3]


def test_windows_that_end_together_are_one_batch_as_far_as_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give such windows as one batch: a batch costs as much as thousands of rows, and old data that is read fast ends
    thousands of windows at once."""
    monkeypatch.setattr(windowed_groups, "RESULT_ROWS_MAX", 7)
    for mode, steps in ((None, [batch(*((10 * i, i % 2, 1) for i in range(20))), 150]), ("update", [])):
        operator = opened(Window("ts", 10, 10), mode)
        wide = [batch(*((at, user, 1) for at in range(0, 30, 10) for user in range(5)))]
        for given_ in applied_from(operator, steps or wide, 0):
            sizes = [len(made) for made in given_[0]]
            found = [row["window_end"] for made in given_[0] for row in made]
            assert found == sorted(found)
            assert all(one + other > 7 for one, other in pairwise(sizes))
            assert max(sizes, default=0) <= 7
    operator = opened(Window("ts", 10, 10))
    (_, (found, _), _) = applied_from(operator, [batch(*((0, user, 1) for user in range(17))), 10], 0)
    assert [len(made) for made in found] == [7, 7, 3]


def test_a_session_that_joins_others_keeps_the_place_of_the_earliest_row() -> None:
    """Keep the place of the earliest row: the cut into batches decides which sessions there are before, and not in
    which order they come."""
    rows = [(9, 7, 1), (0, 8, 1), (0, 7, 1), (9, 8, 1), (4, 8, 1), (5, 7, 1)]
    for cut in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
        table = flux.testing.apply(stage(SessionWindow("ts", 5)), [batch(*each) for each in cut])
        assert table.column("user").to_pylist() == [7, 8]


@pytest.mark.parametrize(("mode", "may"), [(None, True), ("update", True), ("complete", False)])
def test_windows_that_end_may_be_upstream(mode: str | None, may: bool) -> None:
    made = stage(Window("ts", 10, 10), mode)
    assert says_needs(made.make(), made.output_mode) is may


def test_an_aggregate_without_windows_or_with_methods_of_its_own_is_not_upstream() -> None:
    class Noted(flux.Aggregate):
        n = flux.count()

        def process(self, rows: pa.RecordBatch) -> Any:
            self.seen = rows.num_rows
            return super().process(rows)

    assert not says_needs(stage(None).make(), "complete")
    assert not says_needs(flux.stage(key="user", window=Window("ts", 10, 10))(Noted).make(), "append")


@settings(max_examples=40, deadline=None)
@given(drawn=streams(), window=WINDOWS, restart=st.none() | st.just(1))
def test_update_mode_gives_changed_groups_after_each_batch_and_nothing_at_the_end(
    drawn: tuple, window: Window, restart: int | None
) -> None:
    batches, _ = drawn
    given_ = applied(window, "update", drawn, restart)
    last = {row[:3]: row[3:] for row in given_}
    assert last == expected_windows([row for rows in batches for row in rows], window)
    touched = sum(len(expected_windows(rows, window)) for rows in batches)
    assert len(given_) == touched


@settings(max_examples=20, deadline=None)
@given(drawn=streams(), window=WINDOWS)
def test_complete_mode_gives_all_windows_at_the_end(drawn: tuple, window: Window) -> None:
    given_ = applied(window, "complete", drawn)
    assert {row[:3]: row[3:] for row in given_} == expected_windows([row for rows in drawn[0] for row in rows], window)


@settings(max_examples=40, deadline=None)
@given(drawn=streams(), size=st.integers(17, 60), slide=st.integers(1, 9), offset=st.integers(0, 8), data=st.data())
def test_windows_of_many_panes_are_those_of_the_model_in_the_order_of_their_first_rows(
    drawn: tuple, size: int, slide: int, offset: int, data: Any
) -> None:
    window = Window("ts", size, slide, offset % slide)
    restart = data.draw(st.none() | st.integers(0, len(drawn[0])))
    kept = None if restart is None else data.draw(st.none() | st.integers(0, restart))
    given_ = applied(window, None, drawn, restart, kept)
    assert {row[:3]: row[3:] for row in given_} == expected_windows([row for rows in drawn[0] for row in rows], window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pane_state, "PANES_MERGED_MAX", 60)
        assert given_ == applied(window, None, drawn)


def test_sums_of_doubles_are_the_same_on_a_replica_that_begins_anywhere() -> None:
    """Sums of panes are made of the same panes in the same order, no matter which sums were computed before."""
    random = np.random.default_rng(3)
    state, measures = [], {"x": TypedMeasure("sum", "x", pa.float64())}
    for _ in range(2):
        state.append(pane_state.PaneState([pa.field("k", pa.int64())], measures, Window("ts", 40, 1)))
    first, second = state
    for second_ in range(200):
        times, keys = np.full(4, second_), [pa.array(random.integers(0, 3, 4))]
        values = [pa.array(random.random(4) * 10.0 ** random.integers(-9, 9, 4))]
        first.add(times, keys, values)
        second.add(times, keys, values)
        if second_ % 7 == 0:  # the other one closes at other times, and is copied
            second.restore(second.snapshot())
        given_ = [
            [(w.end, *(c.to_pylist() for c in w.state.results(w.slots))) for w in each.close(second_)] for each in state
        ]
        assert given_[0] == given_[1]
    assert len(first._spans._spans) <= 40


def test_a_window_of_many_panes_is_merged_from_few(monkeypatch: pytest.MonkeyPatch) -> None:
    state = pane_state.PaneState([pa.field("k", pa.int64())], {"n": TypedMeasure("count")}, Window("ts", 60, 1))
    merges = []
    merge = KeyedState.merge
    monkeypatch.setattr(KeyedState, "merge", lambda one, other: merges.append(0) or merge(one, other))
    state.add(np.arange(600), [pa.array(np.arange(600) % 5)], [None])
    assert sum(1 for _ in state.close(600)) == 600
    assert len(merges) < 10 * 600, "each window has sixty panes"
    assert sum(len(each.slots) for each in state.close(1 << 60)) == 59 * 5 - 10
    assert not state._spans._spans


def test_a_row_at_exactly_the_gap_joins_a_session_that_the_watermark_has_just_reached() -> None:
    declared = stage(SessionWindow("ts", 10))
    table = flux.testing.apply(
        declared, [batch((0, 1, 1)), batch((10, 1, 1)), batch((25, 1, 1))], watermarks=[10, 20, 25]
    )
    assert rows_of(table) == [(1, 0, 20, 2, 2, 1, 1), (1, 25, 35, 1, 1, 1, 1)]


def test_a_row_between_two_sessions_joins_them() -> None:
    declared = stage(SessionWindow("ts", 5))
    rows = [batch((0, 1, 1), (9, 1, 2), (30, 1, 4)), batch((5, 1, 8))]
    for restart in (None, 1):
        table = flux.testing.apply(declared, rows, restart_after=restart)
        assert rows_of(table) == [(1, 0, 14, 3, 11, 1, 3), (1, 30, 35, 1, 4, 4, 1)]


def test_rows_behind_the_watermark_and_rows_without_a_time_are_left_out_and_counted() -> None:
    operator = opened(Window("ts", 10, 10))
    operator.process(batch((3, 1, 1), (None, 1, 1)))
    operator.context.watermarks = [5]
    assert not list(operator.on_watermark())
    operator.process(batch((4, 1, 1), (5, 1, 1), (None, 1, 1)))
    assert (operator._flux_groups.without_time, operator._flux_groups.behind_watermark) == (2, 1)
    (found,) = operator.finish()
    assert found.column("n").to_pylist() == [2]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([1, 2, None]), st.integers(0, 3)), min_size=1, max_size=12
    ),
    declared=WINDOWS | st.builds(SessionWindow, st.just("ts"), st.integers(1, 9)),
    data=st.data(),
)
def test_windows_of_processing_time_take_the_times_of_steps(rows: list, declared: Any, data: Any) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    mode = data.draw(st.sampled_from(["append", "complete"]))
    restart = data.draw(st.none() | st.integers(0, len(rows)))
    table = flux.testing.apply(
        stage(replace(declared, column=None), mode), [batch((None, user, amount)) for _, user, amount in rows],
        times=[*(BASE_S + at / 1e6 for at, _, _ in rows), BASE_S + 1], restart_after=restart,
    )  # fmt: skip
    timed = [(BASE_US + at, user, amount) for at, user, amount in rows]
    if isinstance(declared, Window):
        expected = expected_windows(timed, declared)
    else:
        expected = expected_sessions(timed, declared.gap)
    given_ = rows_of(table)
    assert {row[:3]: row[3:] for row in given_} == expected
    assert len(given_) == len(expected)


def test_a_window_of_processing_time_is_given_by_its_timer_and_not_by_a_watermark() -> None:
    operator = opened(flux.window(flux.NOW, "10 seconds", "5 seconds"))
    context = operator.context
    context.now = 1003.0
    operator.process(batch((None, 1, 5)))
    assert not list(move_watermarks(operator, context, [10**18]))
    assert context.timers.pending == {TIMER: 1005.0}
    found = []
    for context.now in (1005.0, 1010.0):
        assert context.timers.take(TIMER, context.now)
        found += [made.select(["window_end", "n"]).to_pylist() for made in operator.on_timer(TIMER)]
    ends = [EPOCH + timedelta(seconds=1005), EPOCH + timedelta(seconds=1010)]
    assert found == [[{"window_end": end, "n": 1}] for end in ends]
    assert not context.timers.pending
    assert facts_of(operator).timed
    assert not facts_of(opened(Window("ts", 10, 10))).timed, "else its steps could not be ordered ahead"


@settings(max_examples=60, deadline=None)
@given(drawn=streams(), data=st.data())
def test_a_group_that_closes_is_given_when_the_watermark_has_passed_its_column(drawn: tuple, data: Any) -> None:
    restart = data.draw(st.none() | st.integers(0, len(drawn[0])))
    made = flux.stage(key="user", closes="ts")(Sold)
    batches, marks = [batch(*rows) for rows in drawn[0]], drawn[1]
    table = flux.testing.apply(made, batches, watermarks=marks, restart_after=restart)
    times = microseconds_of(table.column("ts").combine_chunks()).tolist()
    given_ = list(zip(table.column("user").to_pylist(), times, table.column("n").to_pylist(), strict=True))
    expected = Counter((user, ts) for rows in drawn[0] for ts, user, _ in rows if ts is not None)
    assert sorted(given_, key=repr) == sorted(((*group, n) for group, n in expected.items()), key=repr)
    assert table.schema.names == ["user", "ts", "n"]


def test_a_group_waits_while_the_watermark_is_at_its_column() -> None:
    operator = flux.stage(key="user", closes="ts")(Sold).make()
    open_operator(operator, flux.Context("Sold", key=("user",), schemas=(SCHEMA,), output_mode="append"))
    operator.process(batch((5, 1, 1), (7, 1, 1), (5, 1, 1)))
    assert not list(move_watermarks(operator, operator.context, [5]))
    operator.process(batch((5, 1, 1)))
    (found,) = move_watermarks(operator, operator.context, [6])
    assert found.column("n").to_pylist() == [3]
    assert operator.needs_from() == 0


class Sold(flux.Aggregate):
    n = flux.count()


def test_state_is_that_of_open_windows_alone() -> None:
    keys, measures = [pa.field("user", pa.int64())], {"n": TypedMeasure("count")}
    panes = pane_state.PaneState(keys, measures, Window("ts", 10, 5))
    sessions = session_state.SessionState(keys, measures, SessionWindow("ts", 5))
    sizes = []
    for second in range(200):  # keys that never come back
        times = np.full(1000, 10 * second)
        users = [pa.array(np.arange(1000) + 1000 * second)]
        panes.add(times, users, [None])
        sessions.add(times, users, [None])
        assert sum(len(groups.slots) for groups in panes.close(10 * second)) == (2000 if second else 0)
        assert sum(len(ended.starts) for ended in sessions.close(10 * second)) == (1000 if second else 0)
        sizes.append(panes.nbytes + sessions.nbytes)
    assert max(sizes) == max(sizes[:20])


def test_rows_at_random_times_open_a_bounded_number_of_panes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_panes, "PANES_MAX", 100)
    with pytest.raises(
        open_panes.TooManyPanes,
        match=r"100 panes of 1 microsecond are open, and a row at 1970-01-01T00:00:00.001000 UTC",
    ):
        flux.testing.apply(stage(Window("ts", 1, 1)), [batch(*((10 * i, 1, 1) for i in range(101)))])


@pytest.mark.parametrize("window", [Window("ts", 10, 4), SessionWindow("ts", 5)])
@pytest.mark.parametrize("time", [(1 << 63) - 1, 1 - (1 << 63)])
def test_a_time_whose_window_fits_into_no_number_is_refused(window: Any, time: int) -> None:
    with pytest.raises(ValueError, match="away from 1970"):
        flux.testing.apply(stage(window), batch((time, 1, 1)))


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_a_time_of_a_coarse_unit_does_not_wrap_around(unit: str) -> None:
    """Bound such a time: its product with a million was a time near 1970, which is in a window."""
    far = (1 << 64) // (1_000_000 if unit == "s" else 1_000) + 1
    found = microseconds_of(pa.array([far, -far], pa.timestamp(unit)))
    assert found[0] > TIME_MAX
    assert found[1] < -TIME_MAX
    assert microseconds_of(pa.array([-7], pa.timestamp(unit))).tolist() == [-7_000_000 if unit == "s" else -7_000]


@pytest.mark.parametrize("by_window", [False, True])
def test_a_watermark_that_ends_no_window_looks_at_no_pane(by_window: bool) -> None:
    """Look at none, because a watermark may move twenty times a second, and thousands of panes may be open."""
    state = pane_state.PaneState([], {"n": TypedMeasure("count")}, Window("ts", 10, 5), by_window)
    state.add(np.arange(0, 1000, 5), [], [None])
    looks = []
    with pytest.MonkeyPatch.context() as patch:
        ends, last_end = Window.ends, Window.last_end
        patch.setattr(Window, "ends", lambda *given: looks.append(given) or ends(*given))
        patch.setattr(Window, "last_end", lambda *given: looks.append(given) or last_end(*given))
        assert not list(state.close(4))
        assert len(list(state.close(5))) == (not by_window)
        looks.clear()
        for watermark in (6, 7, 8, 9):
            assert not list(state.close(watermark))
        assert state.closed == 9
        assert not looks
        assert len(list(state.close(10))) == (not by_window)
        state.add(np.array([12]), [], [None])
        assert len(list(state.close(15))) == (not by_window)


def test_a_snapshot_of_other_measures_is_refused() -> None:
    keys = [pa.field("user", pa.int64())]
    for kind in (pane_state.PaneState, session_state.SessionState):
        window: Any = Window("ts", 10, 10) if kind is pane_state.PaneState else SessionWindow("ts", 10)
        state, other = (
            kind(keys, {"n": TypedMeasure("count")}, window),
            kind(keys, {"m": TypedMeasure("count")}, window),
        )
        state.add(np.array([1]), [pa.array([1])], [None])
        with pytest.raises(StateMismatchError):
            other.restore(state.snapshot())


@pytest.mark.parametrize(
    ("text", "length"),
    [("10 minutes", 600_000_000), ("1 hour 30 minutes", 5_400_000_000), ("0.5 seconds", 500_000), ("-5 seconds", -5_000_000),
     ("interval 2 days", 2 * 86_400_000_000), ("1 Week", 7 * 86_400_000_000), ("1 millisecond 1 microsecond", 1_001)],
)  # fmt: skip
def test_durations_are_those_of_spark(text: str, length: int) -> None:
    assert microseconds(text, "x") == length


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: flux.window("ts", "1 month"), "a month has no fixed length"),
        (lambda: flux.window("ts", "ten minutes"), "expected numbers with units"),
        (lambda: flux.window("ts", "\uff19 days"), "expected numbers with units"),
        (lambda: flux.window("ts", "0 seconds"), "expected a duration above zero"),
        (lambda: flux.window("ts", "5 seconds", "10 seconds"), "longer than windowDuration"),
        (lambda: flux.window("ts", "1 day", "1 microsecond"), "each row is in 86,400,000,000 windows; at most 65,536"),
        (lambda: flux.window("ts", "5 seconds", startTime="5 seconds"), "shorter than the distance"),
        (lambda: flux.window("ts", timedelta(minutes=1)), "a duration as text"),
        (lambda: flux.session_window("ts", "-1 second"), "expected a duration above zero"),
        (lambda: flux.session_window("", "1 second"), "the name of a column"),
        (lambda: stage("10 minutes"), "window must be flux.window"),
        (lambda: stage(SessionWindow("ts", 5), "update"), "'append' or 'complete'"),
        (
            lambda: flux.stage(key="user", closes="ts", output_mode="update")(Sold),
            "leave it out for output_mode='update'",
        ),
        (lambda: flux.stage(key="user", closes="ts", window=Window("ts", 5, 5))(Sold), "window= or closes="),
        (lambda: flux.stage(key="user", closes=5)(Sold), "the name of a column with a time"),
        (lambda: flux.stage(closes="ts")(lambda rows: rows), "two arguments"),
        (lambda: flux.stage(window=flux.window("ts", "1 second"))(lambda rows: rows), "two arguments"),
        (
            lambda: flux.stage(output_mode="append")(type("A", (flux.Aggregate,), {"n": flux.count()})),
            "append is for a stage",
        ),
    ],
)
def test_a_window_that_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (pa.schema([("user", pa.int64()), ("amount", pa.int64())]), "the window's times"),
        (pa.schema([("user", pa.int64()), ("ts", pa.string()), ("amount", pa.int64())]), "windows need a TIMESTAMP"),
        (pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("amount", pa.int64())]), "windows need a TIMESTAMP"),
    ],
)
def test_a_column_without_times_is_refused(schema: pa.Schema, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        flux.testing.apply(stage(Window("ts", 10, 10)), pa.RecordBatch.from_pylist([], schema=schema))


#: A unit, a window, times in this unit, and start and end of the windows of these times in microseconds: they lie between two
#: whole seconds, or fit into no number of nanoseconds.
OF_UNITS = [
    ("s", Window("ts", 1_500_000, 1_500_000), [5, 7], [(4_500_000, 6_000_000), (6_000_000, 7_500_000)]),
    ("s", SessionWindow("ts", 1_500_000), [5], [(5_000_000, 6_500_000)]),
    ("ms", Window("ts", 600, 600), [1], [(600, 1_200)]),
    ("ns", Window("ts", 10**6, 10**6), [(1 << 63) - 1], [(9_223_372_036 * 10**6, 9_223_372_037 * 10**6)]),
    ("ns", Window("ts", 10**6, 10**6), [-(1 << 63)], [(-9_223_372_037 * 10**6, -9_223_372_036 * 10**6)]),
    ("ns", SessionWindow("ts", 1_000), [(1 << 63) - 1], [(9_223_372_036_854_775, 9_223_372_036_855_775)]),
]


@pytest.mark.parametrize(("unit", "declared", "times", "wanted"), OF_UNITS)
def test_bounds_of_windows_are_exact_whatever_the_unit_of_the_times(
    unit: str, declared: Any, times: list[int], wanted: list[tuple[int, int]]
) -> None:
    """Give exact bounds: a window of a second and a half that begins at 4.5 s was given as one from 4 s to 6 s, and the
    end of a window that has the last nanosecond of 64 bits as a time in 1677."""
    kind = pa.timestamp(unit, "Europe/Berlin")
    rows = pa.record_batch({"user": [1] * len(times), "ts": pa.array(times).cast(kind), "amount": [1] * len(times)})
    table = flux.testing.apply(stage(declared), rows)
    assert [row[1:3] for row in rows_of(table)] == wanted
    assert table.schema.field("window_end").type == pa.timestamp("us", "Europe/Berlin")


class Alarm(flux.Operator):
    """An operator with timers of event time: one for each row, and one that always sets the next."""

    def process(self, rows: pa.RecordBatch) -> None:
        for ts in microseconds_of(rows.column("ts")).tolist():
            self.context.set_event_timer(ts, f"row {ts}")
        self.context.set_event_timer(0, "tick")

    def on_event_timer(self, name: str) -> list[pa.RecordBatch]:
        if name == "tick":
            self.context.set_event_timer(self.context.step * 10 + 10, "tick")
        return [pa.RecordBatch.from_pydict({"name": [name], "watermark": [self.context.watermark]})]


def test_event_timers_fire_when_the_watermark_has_reached_them_and_once_at_the_end() -> None:
    declared = flux.stage(schema="name STRING, watermark BIGINT")(Alarm)
    rows = [batch((5, 1, 1)), batch((25, 1, 1))]
    for restart in (None, 1):
        table = flux.testing.apply(declared, rows, watermarks=[4, 12], restart_after=restart)
        end = flux.END_OF_TIME
        assert list(zip(*table.to_pydict().values(), strict=True)) == [
            ("tick", 4), ("tick", 12), ("row 5", 12), ("tick", end), ("row 25", end),
        ]  # fmt: skip


@pytest.mark.parametrize("at", [1.5, "12:00", None, True])
def test_a_time_of_an_event_timer_is_a_whole_number(at: Any) -> None:
    with pytest.raises(UsageError, match="whole microseconds"):
        flux.Context("x").set_event_timer(at)


@pytest.mark.parametrize("at", [flux.NEVER - 7, flux.NEVER, flux.NEVER + 1])
def test_an_event_timer_before_the_first_watermark_fires_with_it(at: int) -> None:
    """Fire a timer of any time: at or below the least number of 64 bits it never fired, not at the end either, and no
    copy could be made of the state."""

    @flux.stage(schema="name STRING, watermark BIGINT")
    class Early(Alarm):
        def process(self, rows: pa.RecordBatch) -> None:
            self.context.set_event_timer(at, "early")

    for watermarks, fired in ([[4], 4], [[None], flux.END_OF_TIME]):
        table = flux.testing.apply(Early, [batch((5, 1, 1))], watermarks=watermarks, restart_after=1)
        assert next(zip(*table.to_pydict().values(), strict=True)) == ("early", fired)
    timers = EventTimers()
    timers.set(at, "early")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(timers.pending)) == timers.pending


@pytest.mark.parametrize("given_", [[1], [2, 1], [1, "x"], [(1, 2), 3], 7, [1, 1 << 63], [-(1 << 63) - 1] * 2])
def test_watermarks_of_a_trial_are_checked(given_: Any) -> None:
    with pytest.raises(UsageError, match="watermarks"):
        flux.testing.apply(stage(Window("ts", 10, 10)), [batch((1, 1, 1)), batch((2, 1, 1))], watermarks=given_)
