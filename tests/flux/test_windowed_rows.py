"""Functions over the rows of windows against a model in plain Python, with any cuts, watermarks and copies."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.dataflow.flow import Stage
from flux.errors import SchemaError, UsageError
from flux.operators import windowed_rows
from flux.operators.attributes import open_operator
from flux.operators.operator import Operator, facts_of, says_needs
from flux.operators.windowed_rows import EachGroupFunction, GroupKey
from flux.windows import kept_rows, row_panes, session_rows, session_state
from flux.windows.times import microseconds_of
from flux.windows.window import SessionWindow, Window
from partitioning.errors import StateMismatchError
from tests.flux.test_windows import (
    BASE_S,
    BASE_US,
    OF_UNITS,
    SCHEMA,
    WINDOWS,
    Row,
    applied_from,
    batch,
    steps_of,
    streams,
)

GIVEN = "user BIGINT, start BIGINT, end BIGINT, amounts STRING, call BIGINT"
SESSIONS = st.builds(SessionWindow, st.just("ts"), st.integers(1, 9))


def listed(rows: pa.RecordBatch, offsets: np.ndarray) -> pa.RecordBatch:
    """Give a row for each group, with its rows as text."""
    first = pa.array(offsets[:-1])
    amounts = rows.column("amount").to_pylist()
    texts = [str(amounts[begin:end]) for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]
    times = [
        pa.array(microseconds_of(rows.column(name).take(first).cast(pa.timestamp("us"))))
        for name in ("window_start", "window_end")
    ]
    call = pa.array([len(rows)] * len(texts), pa.int64())
    return pa.RecordBatch.from_arrays(
        [rows.column("user").take(first), *times, pa.array(texts, pa.string()), call],
        names=["user", "start", "end", "amounts", "call"],
    )


def stage(window: Any) -> Any:
    return flux.stage(key="user", window=window, schema=GIVEN)(listed)


def found_in(table: Any) -> list[tuple]:
    """Return groups with their rows. The sizes of calls are no part of them."""
    return [tuple(row.values())[:4] for row in table.to_pylist()]


def expected(rows: list[Row], declared: Any) -> dict[tuple, list]:
    """Return the amounts of each group, in the order in which the function gets them."""
    groups = defaultdict(list)
    timed = [(at, *row) for at, row in enumerate(rows) if row[0] is not None]
    if isinstance(declared, Window):
        for at, ts, user, amount in timed:
            start = (ts - declared.offset) // declared.slide * declared.slide + declared.offset
            while start + declared.size > ts:
                groups[user, start, start + declared.size].append((declared.panes(np.array([ts]))[0], at, amount))
                start -= declared.slide
    else:
        for user in {user for _, _, user, _ in timed}:
            mine = sorted((ts, at, amount) for at, ts, owner, amount in timed if owner == user)
            while mine:
                size = next((i for i in range(1, len(mine)) if mine[i][0] - mine[i - 1][0] > declared.gap), len(mine))
                session, mine = mine[:size], mine[size:]
                group = user, session[0][0], session[-1][0] + declared.gap
                groups[group] = [(0, at, amount) for _, at, amount in session]
    return {group: [amount for _, _, amount in sorted(each)] for group, each in groups.items()}


def applied(declared: Any, drawn: tuple, data: Any, made: Any = None) -> Any:
    restart = data.draw(st.none() | st.integers(0, len(drawn[0])))
    kept = None if restart is None else data.draw(st.none() | st.integers(0, restart))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_state, "SLOTS_MIN", data.draw(st.sampled_from([2, 1024])))
        patch.setattr(kept_rows, "ROWS_MIN", data.draw(st.sampled_from([2, 1024])))
        patch.setattr(kept_rows, "BATCH_ROWS_MAX", data.draw(st.sampled_from([2, 5, 65_536])))
        patch.setattr(windowed_rows.WindowFunction, "_told_share", 1.0)  # so that few sessions are told as changes
        patch.setattr(windowed_rows, "CALL_ROWS_MAX", data.draw(st.sampled_from([1, 6, 65_536])))
        return flux.testing.apply(
            stage(declared) if made is None else made, [batch(*rows) for rows in drawn[0]], watermarks=drawn[1],
            restart_after=restart, checkpoint_after=kept,
        )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(drawn=streams(), declared=WINDOWS | SESSIONS, data=st.data())
def test_functions_get_the_groups_of_the_model_and_each_once(drawn: tuple, declared: Any, data: Any) -> None:
    groups = found_in(applied(declared, drawn, data))
    wanted = expected([row for rows in drawn[0] for row in rows], declared)
    assert {group[:3]: group[3] for group in groups} == {group: str(amounts) for group, amounts in wanted.items()}
    assert len(groups) == len(wanted)


@pytest.mark.parametrize(("unit", "declared", "times", "wanted"), OF_UNITS)
def test_functions_get_exact_bounds_whatever_the_unit_of_the_times(
    unit: str, declared: Any, times: list[int], wanted: list[tuple[int, int]]
) -> None:
    kind = pa.timestamp(unit, "Europe/Berlin")
    rows = pa.record_batch({"user": [1] * len(times), "ts": pa.array(times).cast(kind), "amount": [1] * len(times)})
    assert [group[1:3] for group in found_in(flux.testing.apply(stage(declared), rows))] == wanted


@settings(max_examples=60, deadline=None)
@given(drawn=streams(), declared=WINDOWS | SESSIONS, data=st.data())
def test_the_order_of_groups_is_that_of_one_call(drawn: tuple, declared: Any, data: Any) -> None:
    batches, marks = drawn
    last = max((mark for mark in marks if mark is not None), default=None)
    whole = [row for rows in batches for row in rows]
    once = flux.testing.apply(stage(declared), [batch(*whole)], watermarks=[last])
    assert sorted(found_in(applied(declared, drawn, data)), key=str) == sorted(found_in(once), key=str)
    cut = flux.testing.apply(
        stage(declared), [batch(row) for row in whole], watermarks=[None] * (len(whole) - 1) + [last]
    )
    assert found_in(cut) == found_in(once)


@settings(max_examples=50, deadline=None)
@given(drawn=streams(), declared=WINDOWS | SESSIONS, data=st.data())
def test_functions_that_begin_empty_at_the_step_they_need_give_the_same(drawn: tuple, declared: Any, data: Any) -> None:
    steps = steps_of(drawn, data.draw(st.lists(st.integers(0, 11), max_size=6)))
    whole = list(applied_from(opened(declared), steps, 0))
    at = data.draw(st.integers(0, len(steps) - 1))
    needed = whole[at][1]
    assert 0 <= needed <= at + 1
    again = list(applied_from(opened(declared), steps, data.draw(st.just(needed) | st.integers(0, needed))))
    behind = len(whole) - at - 1
    assert [made for made, _ in again[-behind:]] == [made for made, _ in whole[at + 1 :]]


def opened(declared: Any) -> Any:
    operator = stage(declared).make()
    open_operator(operator, flux.Context("listed", key=("user",), schemas=(SCHEMA,), output_mode="append"))
    return operator


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 2, None]), st.integers(0, 3)), min_size=1),
    data=st.data(),
)
def test_windows_of_processing_time_take_the_times_of_steps(rows: list, data: Any) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    declared = data.draw(WINDOWS | SESSIONS)
    made = flux.testing.apply(
        stage(replace(declared, column=None)), [batch((None, user, amount)) for _, user, amount in rows],
        times=[*(BASE_S + at / 1e6 for at, _, _ in rows), BASE_S + 1],
        restart_after=data.draw(st.none() | st.integers(0, len(rows))),
    )  # fmt: skip
    wanted = expected([(BASE_US + at, user, amount) for at, user, amount in rows], declared)
    assert {group[:3]: group[3] for group in found_in(made)} == {group: str(each) for group, each in wanted.items()}
    assert facts_of(opened(replace(declared, column=None))).timed
    assert not facts_of(opened(declared)).timed, "else its steps could not be ordered ahead"


def test_groups_that_end_together_are_one_call_and_no_group_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed_rows, "CALL_ROWS_MAX", 6)
    rows = batch(*((10 * i, i % 2, i) for i in range(8)), *((95, 7, i) for i in range(9)), (96, 8, 1))
    for declared in (Window("ts", 10, 10), SessionWindow("ts", 5)):
        calls = [row["call"] for row in flux.testing.apply(stage(declared), rows).to_pylist()]
        assert calls == [6] * 6 + [2] * 2 + [9, 1]


def test_a_group_without_a_key_is_that_of_the_window() -> None:
    made = flux.stage(window=Window("ts", 10, 10), schema=GIVEN)(listed)
    table = flux.testing.apply(made, batch((1, 1, 1), (2, 2, 2), (12, 1, 3)))
    assert [row[1:] for row in found_in(table)] == [(0, 10, "[1, 2]"), (10, 20, "[3]")]


def test_rows_of_groups_that_close_are_given_when_the_watermark_has_passed_their_column() -> None:
    @flux.stage(key="user", closes="ts", schema="rows BIGINT, names STRING")
    def sizes(rows: pa.RecordBatch, offsets: np.ndarray) -> pa.Table:
        return pa.table({"rows": np.diff(offsets), "names": [", ".join(rows.schema.names)] * (len(offsets) - 1)})

    table = flux.testing.apply(sizes, [batch((5, 1, 1), (7, 1, 1)), batch((5, 1, 2))], watermarks=[5, 9])
    assert table.column("rows").to_pylist() == [2, 1]
    assert table.column("names")[0].as_py() == "user, ts, amount"


def test_rows_that_are_kept_are_those_of_open_windows_alone() -> None:
    """Give keys that never come back, and batches that are views into a larger text."""
    schema = pa.schema([("user", pa.int64()), ("text", pa.string())])
    panes = row_panes.RowPanes(schema, [0], Window("ts", 10, 5))
    sessions = session_rows.SessionRows(schema, [0], SessionWindow("ts", 5))
    sizes = []
    for second in range(60):
        times = np.full(1000, 10 * second)
        users = pa.array(np.arange(1000) + 1000 * second)
        larger = pa.RecordBatch.from_arrays([users, pa.array(["x" * 20] * 1000)], schema=schema)
        for state in (panes, sessions):
            state.add(times[:10], larger.slice(500, 10))
        assert sum(len(groups.counts) for groups in panes.close(10 * second)) == (20 if second else 0)
        assert sum(len(groups.counts) for groups in sessions.close(10 * second)) == (10 if second else 0)
        sizes.append((panes.nbytes, sessions.nbytes))
    early, late = sizes[:20], sizes[20:]
    assert max(each for each, _ in late) <= max(each for each, _ in early) < 2_000
    assert max(each for _, each in late) < 400_000


def test_many_rows_of_sessions_are_those_that_sorted_rows_have() -> None:
    random, total, gap = np.random.default_rng(5), 20_000, 40
    users, amounts = random.integers(0, 300, total), np.arange(total)
    times = np.sort(random.integers(0, 5 * total, total)) + random.integers(0, 500, total)
    schema = pa.schema([("user", pa.int64()), ("at", pa.int64())])
    state = session_rows.SessionRows(schema, [0], SessionWindow("ts", gap))
    found: list[list[int]] = []
    for cut in range(0, total, 777):
        of = slice(cut, cut + 777)
        state.add(times[of], pa.RecordBatch.from_arrays([pa.array(users[of]), pa.array(amounts[of])], schema=schema))
        for groups in state.close(int(times[cut + 777 :].min(initial=1 << 62)), 700):
            at, ends = groups.rows.column("at").to_numpy(), np.cumsum(groups.counts)
            found += [each.tolist() for each in np.split(at, ends[:-1])]
    order = np.lexsort((times, users))
    breaks = (users[order][1:] != users[order][:-1]) | (np.diff(times[order]) > gap)
    wanted = [np.sort(each).tolist() for each in np.split(order, np.flatnonzero(breaks) + 1)]
    assert sorted(found) == sorted(wanted)
    assert len(state._rows) < kept_rows.ROWS_MIN


class Applied(Stage):
    """A stage of ``applyInArrow``, as a resolved grouping makes it."""

    def __init__(self, function: Any, window: Any, key: GroupKey) -> None:
        schema = pa.schema([("user", pa.int64()), ("text", pa.string())])
        super().__init__(Operator, ("user",), 1, 1, None, "append", "applied")
        self._made_of = function, schema, window, key

    def make(self) -> Operator:
        return EachGroupFunction(*self._made_of)


def test_a_function_is_called_for_each_group_with_its_key_and_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = batch((1, 1, 10), (2, 2, 20), (3, 1, 30), (12, None, 40))

    def of_key(key: tuple, table: pa.Table) -> pa.Table:
        window, user, again = (part.as_py() for part in key)
        assert user == again
        return pa.table({"text": [f"{window['start']:%S.%f} {window['end']:%S.%f} {table.column_names} {table.num_rows}"],
                         "user": pa.array([user], pa.int32())})  # fmt: skip

    for most in (1, 65_536):
        monkeypatch.setattr(windowed_rows, "RESULT_ROWS_MAX", most)
        made = flux.testing.apply(Applied(of_key, Window("ts", 10, 10), GroupKey((None, 0, 0), 2)), rows)
        assert made.to_pylist() == [
            {"user": 1, "text": "00.000000 00.000010 ['user', 'ts'] 2"},
            {"user": 2, "text": "00.000000 00.000010 ['user', 'ts'] 1"},
            {"user": None, "text": "00.000010 00.000020 ['user', 'ts'] 1"},
        ]
    alone = Applied(lambda table: table.select(["user"]).slice(0, 1).append_column("text", [["x"]]), SessionWindow("ts", 5),
                    GroupKey((0,), 3))  # fmt: skip
    assert flux.testing.apply(alone, rows).column("user").to_pylist() == [2, 1, None]
    with pytest.raises(
        SchemaError, match=r"applyInArrow\(<lambda>\): expected a pyarrow.Table for each group, got dict"
    ):
        flux.testing.apply(Applied(lambda table: {}, Window("ts", 10, 10), GroupKey((0,), 3)), rows)
    with pytest.raises(SchemaError, match=r"output of applyInArrow\(<lambda>\): .*'text' is missing"):
        flux.testing.apply(Applied(lambda table: table.select(["user"]), Window("ts", 10, 10), GroupKey((0,), 3)), rows)


@pytest.mark.parametrize("kept", [None, 0, 1, 2])
def test_rows_of_sessions_that_join_come_as_they_came(monkeypatch: pytest.MonkeyPatch, kept: int | None) -> None:
    monkeypatch.setattr(windowed_rows.WindowFunction, "_told_share", 1.0)
    rows = [batch((0, 1, 0), (9, 1, 1), (30, 1, 9)), batch((1, 1, 2), (10, 1, 3)), batch((5, 1, 4), (2, 1, 5))]
    for restart in range(0 if kept is None else kept, 4):
        made = flux.testing.apply(stage(SessionWindow("ts", 5)), rows, restart_after=restart, checkpoint_after=kept)
        assert found_in(made) == [(1, 0, 15, "[0, 1, 2, 3, 4, 5]"), (1, 30, 35, "[9]")]


def test_functions_over_windows_may_be_upstream() -> None:
    assert says_needs(stage(Window("ts", 10, 10)).make(), "append")


def test_changes_of_another_state_are_refused() -> None:
    rows, times = batch((1, 1, 1), (2, 2, 2)), np.array([1, 2])
    for make in (lambda: row_panes.RowPanes(SCHEMA, [0], Window("ts", 10, 10)),
                 lambda: session_rows.SessionRows(SCHEMA, [0], SessionWindow("ts", 10))):  # fmt: skip
        state, other = make(), make()
        state.add(times, rows)
        assert state.changes() is None
        state.add(times, rows)
        with pytest.raises(StateMismatchError):
            other.apply_changes(state.changes())


def test_functions_that_cannot_be_called_are_refused() -> None:
    window = Window("ts", 10, 10)
    with pytest.raises(UsageError, match=r"two arguments, \(rows, offsets\), to be a stage with window="):
        flux.stage(window=window)(lambda rows: rows)
    with pytest.raises(UsageError, match=r"of \(rows, offsets\), or a class that derives from flux.Aggregate"):
        flux.stage(window=window)(type("Mine", (flux.Operator,), {"process": lambda self, rows: rows}))
    with pytest.raises(UsageError, match="is for an aggregate"):
        flux.stage(window=window, output_mode="update")(listed)
    with pytest.raises(SchemaError, match="has columns window_end, and the function gets those of the window"):
        flux.testing.apply(stage(window), batch((1, 1, 1)).append_column("Window_End", pa.array([1])))
    with pytest.raises(SchemaError, match="must have the same columns"):
        flux.testing.apply(stage(window), [batch((1, 1, 1))], [batch((1, 1, 1)).append_column("more", pa.array([1]))])
    with pytest.raises(SchemaError, match="windows need a TIMESTAMP"):
        flux.testing.apply(stage(Window("amount", 10, 10)), batch((1, 1, 1)))
    with pytest.raises(SchemaError, match="RecordBatch or Table for the groups, got NoneType"):
        flux.testing.apply(
            flux.stage(window=window, schema="n BIGINT")(lambda rows, offsets: None if rows else 0), batch((1, 1, 1))
        )
