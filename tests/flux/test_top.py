"""Ranks against a model in plain Python, with any order of arrival, cuts, watermarks, copies and changes."""

from __future__ import annotations

import math
from decimal import Decimal
from functools import cmp_to_key, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.errors import SchemaError
from flux.operators import batches
from flux.ranks import best_rows, first_rows, row_arena, top
from flux.ranks.best_rows import BestOrder, BestRows
from flux.ranks.order_keys import SortColumn, order_keys
from flux.ranks.row_arena import RowArena
from flux.ranks.top import Last, OrderColumn, RankSpec, Top, TopOfWindow
from flux.windows.window import END_OF_TIME, NEVER, Window
from tests.flux.ordered import compared
from tests.flux.stepped import CHECKPOINT, FROM_CHECKPOINT, Stepped, events, rows_of

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([
    ("key", pa.string()), ("a", pa.float64()), ("b", pa.string()), ("ts", TIME), ("c", pa.decimal128(9, 2)),
    ("d", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.int64()))])), ("n", pa.int64()),
])  # fmt: skip
NAMES = SCHEMA.names
KEY, A, TS = 0, 1, 3
Row = tuple


def batch(rows: list[Row]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [[] for _ in SCHEMA]
    arrays = [
        pa.array(column, pa.int64()).cast(TIME) if field.type == TIME else pa.array(column, field.type)
        for column, field in zip(columns, SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


ROWS = st.tuples(
    st.sampled_from(["p", "q", None]),
    st.sampled_from([1.0, 0.0, -0.0, math.nan, None, -math.inf, 2.5]),
    st.sampled_from(["", "x", "x\0", "xy", None, "\u00e9"]),
    st.integers(-30, 60),
    st.sampled_from([Decimal("1.00"), Decimal("-7.25"), None]),
    st.sampled_from([None, {"x": 1, "y": None}, {"x": 1, "y": []}, {"x": None, "y": [3, None]}, {"x": 1, "y": [3]}]),
    st.integers(0, 2),
)
ORDERS = st.lists(
    st.builds(OrderColumn, st.sampled_from(["a", "b", "c", "d", "ts"]), st.booleans(), st.booleans()),
    min_size=1, max_size=2, unique_by=lambda each: each.name,
)  # fmt: skip


def by_compared(one: Row, other: Row, by: list[OrderColumn]) -> int:
    for each in by:
        at = NAMES.index(each.name)
        if found := compared(one[at], other[at], each.descending, each.nulls_last):
            return found
    return 0


def sorted_rows(rows: list[Row], by: list[OrderColumn]) -> list[Row]:
    others = [OrderColumn(name) for name in NAMES if name not in {each.name for each in by}]
    return sorted(rows, key=cmp_to_key(lambda one, other: by_compared(one, other, [*by, *others])))


def best(rows: list[Row], by: list[OrderColumn], limit: int, ties: bool) -> list[tuple[Row, int]]:
    """Return the first rows and their ranks: ROW_NUMBER, or RANK with ``ties``."""
    found: list[tuple[Row, int]] = []
    for number, row in enumerate(sorted_rows(rows, by), 1):
        same = ties and found and by_compared(found[-1][0], row, by) == 0
        found.append((row, found[-1][1] if same else number))
    return [each for each in found if each[1] <= limit]


def plain(row: Row) -> tuple:
    """Return a row with equal values alike, as the model compares them."""
    return tuple(repr(0.0 if value == 0.0 else abs(value) if math.isnan(value) else value) if isinstance(value, float)
                 else value for value in row)  # fmt: skip


def same(found: list[tuple], expected: list[tuple]) -> bool:
    return [repr(_alike(row)) for row in found] == [repr(_alike(row)) for row in expected]


def _alike(row: tuple) -> tuple:
    return tuple("0.0" if value == "-0.0" else value for value in row)


# ---- keys of order


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROWS, max_size=12), by=ORDERS, cut=st.integers(0, 4))
def test_keys_of_order_have_the_order_of_the_rows(rows: list[Row], by: list[OrderColumn], cut: int) -> None:
    whole = batch(rows).slice(min(cut, len(rows)))
    order = [SortColumn(NAMES.index(each.name), each.descending, each.nulls_last) for each in by]
    keys = order_keys(whole.columns, order, whole.num_rows)
    texts, heads = keys.column().to_pylist(), keys.heads().tolist()
    for one, (x, a) in zip(rows[cut:], zip(texts, heads, strict=True), strict=True):
        for other, (y, b) in zip(rows[cut:], zip(texts, heads, strict=True), strict=True):
            expected = by_compared(one, other, by)
            assert (x > y) - (x < y) == expected
            assert a <= b if expected <= 0 else a >= b
            assert x == y or not y.startswith(x)


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.int8(), [-128, -1, 0, 127]),
        (pa.uint64(), [0, 1, 1 << 63, (1 << 64) - 1]),
        (pa.float32(), [-math.inf, -1.5, 0.0, 2.0, math.inf, math.nan]),
        (pa.bool_(), [False, True]),
        (pa.binary(), [b"", b"\0", b"\0\0", b"\0\1", b"\1", b"\xff"]),
        (pa.large_string(), ["", "a", "a\0", "b"]),
        (pa.list_(pa.int64(), 2), [[-1, 5], [0, 1], [0, 2]]),
        (pa.map_(pa.string(), pa.int32()), [[], [("a", None)], [("a", 1)], [("a", 1), ("b", 0)], [("b", 0)]]),
        (pa.date32(), [-5, 0, 9]),
    ],
)
def test_each_type_has_its_order_also_in_a_slice(type_: pa.DataType, values: list[Any]) -> None:
    column = pa.array([values[-1], None, *values], type_).slice(1)
    keys = order_keys([column], [SortColumn(0)], len(column)).column().to_pylist()
    assert sorted(keys) == keys
    assert len(set(keys)) == len(keys)
    falling = order_keys([column], [SortColumn(0, True, True)], len(column)).column().to_pylist()
    assert sorted(falling, reverse=True) == [falling[0], *falling[1:]]


def test_a_column_of_nulls_is_equal_everywhere_and_odd_types_are_refused() -> None:
    keys = order_keys([pa.nulls(3)], [SortColumn(0)], 3)
    assert keys.column().to_pylist() == [b"\0"] * 3
    with pytest.raises(SchemaError, match="no order of values of type"):
        order_keys([pa.array([], pa.month_day_nano_interval())], [SortColumn(0)], 0)


def test_rows_of_an_arena_are_taken_in_any_order() -> None:
    arena, rng = RowArena(pa.schema([("x", pa.int64())])), np.random.default_rng(1)
    total = 0
    for size in [3, 1, 40, 0, 7, 7, 2, 90, 1]:
        arena.append(pa.record_batch({"x": pa.array(np.arange(total, total + size))}))
        total += size
        for count in (0, 1, 9) if total else (0,):
            numbers = rng.integers(0, max(total, 1), count)
            assert arena.take(numbers).column(0).to_pylist() == numbers.tolist()
    assert len(arena) == total


def test_an_arena_has_more_text_than_a_column_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_arena, "CHUNK_BYTES_MAX", 1000)
    monkeypatch.setattr(batches, "TAKEN_BYTES_MAX", 300)
    kinds = pa.struct([("b", pa.binary()), ("of", pa.list_(pa.string()))])
    arena = RowArena(pa.schema([("t", pa.string()), ("s", kinds)]))
    rows = []
    for at in range(60):
        long = "x" * (at % 7 * 20)
        row = {"t": long if at % 3 else None, "s": {"b": long.encode(), "of": [long, None, "a"]} if at % 5 else None}
        rows.append(row)
        arena.append(pa.RecordBatch.from_pylist([row], schema=arena.schema))
    assert len(arena._chunks) > 9
    assert all(chunk.nbytes <= 1000 for chunk in arena._chunks)
    numbers = np.random.default_rng(1).permutation(60)
    table = arena.table(numbers)
    assert table.to_pylist() == [rows[at] for at in numbers]
    assert len(list(arena.parts(numbers))) == table.column(0).num_chunks > 9
    assert all(each.nbytes < 1000 for each in table.to_batches())
    lengths = [len(row["t"] or "") + len(row["s"]["b"]) + len(row["s"]["b"]) + 1 + 24 if row["s"] else len(row["t"] or "")
               for row in rows]  # fmt: skip
    assert np.asarray(arena.lengths(numbers)).tolist() == [lengths[at] for at in numbers]
    assert np.asarray(row_arena.lengths_of(arena._chunks[0].slice(1))).tolist() == lengths[1 : len(arena._chunks[0])]
    assert arena.table(numbers[:0]).num_rows == 0


# ---- the operators


@st.composite
def steps(draw: Any) -> list[Any]:
    """Draw lists of rows, and watermarks that no later row is below."""
    made: list[Any] = []
    watermark = NEVER
    for _ in range(draw(st.integers(1, 7))):
        if draw(st.integers(0, 2)) == 0:
            watermark = max(watermark, draw(st.integers(-30, 40)))
            made.append(watermark)
            continue
        rows = draw(st.lists(ROWS, max_size=8))
        made.append([(*row[:TS], max(row[TS], watermark), *row[TS + 1 :]) for row in rows])
    return made


def all_rows(drawn: list[Any]) -> list[Row]:
    return [row for step in drawn if not isinstance(step, int) for row in step]


WINDOWS = st.sampled_from([Window("ts", 10, 10), Window("ts", 12, 4, 1), Window("ts", 1, 1), Window("ts", 10, 7, 3)])


@settings(max_examples=40, deadline=None)
@given(
    drawn=steps(), window=WINDOWS, by=ORDERS, limit=st.integers(1, 3), ties=st.booleans(), data=st.data(),
    key=st.sampled_from([("key",), (), ("key", "n")]),
)  # fmt: skip
def test_ranks_within_windows_are_those_of_the_model(
    drawn: list, window: Window, by: list, limit: int, ties: bool, key: tuple, data: Any
) -> None:
    spec = RankSpec(limit, tuple(by), tuple(NAMES), ties, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_rows, "ROWS_MIN", data.draw(st.sampled_from([2, 1024])))
        patch.setattr(top, "RESULT_ROWS_MAX", data.draw(st.sampled_from([1, 3, 1024])))
        for of in (top, batches):
            patch.setattr(of, "TAKEN_BYTES_MAX", data.draw(st.sampled_from([1, 1024])))
        stepped = Stepped(partial(TopOfWindow, spec), [SCHEMA], key)
        found: list[tuple] = []
        for step, event in zip(drawn, data.draw(events(len(drawn))), strict=True):
            stepped.happen(event)
            if isinstance(step, int):
                given_ = stepped.move(step)
                assert all(row[-2] <= step for row in given_)
                found += given_
                continue
            cut = data.draw(st.integers(0, len(step)))
            for part in (step[:cut], step[cut:]):
                assert stepped.give(batch(part)) == []
        found += stepped.end()
        assert stepped.operator._windows == {}
    groups: dict[tuple, list[Row]] = {}
    keys_at = [NAMES.index(name) for name in key]
    for row in all_rows(drawn):
        start = (row[TS] - window.offset) // window.slide * window.slide + window.offset
        while start + window.size > row[TS]:
            groups.setdefault((start + window.size, start, *(row[at] for at in keys_at)), []).append(row)
            start -= window.slide
    expected = [
        (*rows_of(batch([row]))[0], group[1], group[0], rank)
        for group, rows in sorted(groups.items(), key=lambda each: each[0][:2])  # keys stay in the order of first rows
        for row, rank in best(rows, by, limit, ties)
    ]
    assert same(found, expected)


class Board:
    """A reader of ``Top``: the last row of each key and rank."""

    def __init__(self, keys_at: list[int]) -> None:
        self.keys_at = keys_at
        self.rows: dict[tuple, tuple] = {}

    def take(self, given_: list[tuple]) -> None:
        for row in given_:
            self.rows[(*(row[at] for at in self.keys_at), row[-1])] = row


@settings(max_examples=40, deadline=None)
@given(
    drawn=steps(), by=ORDERS, limit=st.sampled_from([1, 2, 3, 20]), data=st.data(), key=st.sampled_from([("key",), ()])
)
def test_a_reader_of_ranks_has_the_best_rows_after_each_step(
    drawn: list, by: list, limit: int, key: tuple, data: Any
) -> None:
    keys_at = [NAMES.index(name) for name in key]
    board, past = Board(keys_at), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_rows, "ROWS_MIN", data.draw(st.sampled_from([2, 1024])))
        stepped = Stepped(partial(Top, RankSpec(limit, tuple(by), tuple(NAMES))), [SCHEMA], key)
        for step, event in zip(drawn, data.draw(events(len(drawn))), strict=True):
            stepped.happen(event)
            if isinstance(step, int):
                assert stepped.move(step) == []
                continue
            before = dict(board.rows)
            board.take(given_ := stepped.give(batch(step)))
            past += step
            groups: dict[tuple, list[Row]] = {}
            for row in past:
                groups.setdefault(tuple(row[at] for at in keys_at), []).append(row)
            expected = {
                (*group, rank): (*rows_of(batch([row]))[0], rank)
                for group, rows in groups.items()
                for row, rank in best(rows, by, limit, False)
            }
            assert board.rows.keys() == expected.keys()
            assert all(same([board.rows[at]], [expected[at]]) for at in expected)
            for row in given_:  # nothing is given that the reader has already
                at = (*(row[place] for place in keys_at), row[-1])
                assert at not in before or not same([before[at]], [row])
        assert stepped.end() == []


@settings(max_examples=40, deadline=None)
@given(drawn=steps(), by=ORDERS, ttl=st.none() | st.integers(1, 25), data=st.data())
def test_the_last_row_of_each_key_is_that_of_the_model(drawn: list, by: list, ttl: int | None, data: Any) -> None:
    spec = RankSpec(
        1, tuple(OrderColumn(each.name, not each.descending, not each.nulls_last) for each in by), tuple(NAMES),
        ttl=ttl, time=None if ttl is None else "ts", backward=True,
    )  # fmt: skip
    lasts: dict[Any, Row] = {}
    newest: dict[Any, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_rows, "KEYS_MIN", 1)
        patch.setattr(best_rows, "KEYS_MIN", data.draw(st.sampled_from([1, 1024])))
        patch.setattr(best_rows, "ROWS_MIN", data.draw(st.sampled_from([2, 1024])))
        stepped = Stepped(partial(Last, spec), [SCHEMA], ("key",))
        for step, event in zip(drawn, data.draw(events(len(drawn))), strict=True):
            stepped.happen(event)
            if isinstance(step, int):
                assert stepped.move(step) == []
                continue
            changed: dict[Any, Row | None] = {}
            for row in step:
                key, time = row[KEY], row[TS]
                before = lasts.get(key)
                changed.setdefault(key, before)
                if before is None or (ttl is not None and time > newest[key] + ttl):
                    lasts[key] = row
                else:
                    lasts[key] = sorted_rows([before, row], by)[-1]
                newest[key] = max(newest.get(key, NEVER), time)
            expected = {
                key: rows_of(batch([lasts[key]]))[0]
                for key, before in changed.items()
                if before is None or sorted_rows([before], by) != [lasts[key]]
            }
            found = {row[KEY]: row for row in stepped.give(batch(step))}
            for key, row in expected.items():
                was = changed[key]
                if was is None or not same([rows_of(batch([was]))[0]], [row]):
                    assert same([found.pop(key)], [row])
            assert not found


def test_changes_tell_that_a_key_stays_longer_though_its_last_row_stays() -> None:
    spec = RankSpec(1, (OrderColumn("a", True, True),), ("a",), ttl=12, time="ts", backward=True)
    stepped = Stepped(partial(Last, spec), [SCHEMA], ("key",))
    assert stepped.give(batch([("p", 5.0, "", 0, None, None, 0)])) == [("5.0",)]
    stepped.happen(CHECKPOINT)
    assert stepped.give(batch([("p", 1.0, "", 1, None, None, 0)])) == []
    stepped.happen(FROM_CHECKPOINT)
    assert stepped.give(batch([("p", 2.0, "", 13, None, None, 0)])) == []
    assert stepped.give(batch([("p", 3.0, "", 26, None, None, 0)])) == [("3.0",)]


def test_rows_that_come_too_late_or_without_a_window_are_counted() -> None:
    stepped = Stepped(
        partial(TopOfWindow, RankSpec(1, (OrderColumn("a"),), ("a",), False, Window("ts", 10, 10))), [SCHEMA]
    )
    row = ("p", 1.0, "", 5, None, None, 0)
    stepped.give(batch([row]))
    assert stepped.move(10) == [("1.0", 0, 10, 1)]
    stepped.give(batch([row, (*row[:TS], None, *row[TS + 1 :]), (*row[:TS], 12, *row[TS + 1 :])]))
    assert stepped.operator._flux_left_out() == (1, 1)
    assert stepped.move(END_OF_TIME) == [("1.0", 10, 20, 1)]


def test_bounds_of_windows_are_exact_whatever_the_unit_of_the_times() -> None:
    rows = pa.record_batch({"a": [1], "ts": pa.array([5]).cast(pa.timestamp("s", "UTC"))})
    spec = RankSpec(1, (OrderColumn("a"),), ("a",), False, Window("ts", 1_500_000, 1_500_000))
    stepped = Stepped(partial(TopOfWindow, spec), [rows.schema])
    stepped.give(rows)
    assert stepped.move(6_000_000) == [(1, 4_500_000, 6_000_000, 1)]


@pytest.mark.parametrize("names", [("window",), ("window_start", "window_end")])
def test_windows_of_an_earlier_stage_are_closed_by_their_ends(names: tuple[str, ...]) -> None:
    start, end = (pa.array(times, pa.int64()).cast(TIME) for times in ([0, 0, 10, None], [10, 10, 20, None]))
    windows = [pa.StructArray.from_arrays([start, end], ["start", "end"])] if len(names) == 1 else [start, end]
    rows = pa.RecordBatch.from_arrays([*windows, pa.array([3, 5, 4, 9])], [*names, "n"])
    stepped = Stepped(partial(TopOfWindow, RankSpec(1, (OrderColumn("n", True),), ("n",))), [rows.schema])
    assert stepped.give(rows) == []
    assert stepped.move(9) == []
    assert stepped.move(10) == [(5, 1)]
    assert stepped.give(rows.slice(0, 1)) == []
    assert stepped.operator._flux_left_out() == (1, 1)
    assert stepped.move(25) == [(4, 1)]


def test_a_rank_among_the_columns_is_refused() -> None:
    schema = pa.schema([("a", pa.int64()), ("Rank", pa.int64())])
    with pytest.raises(SchemaError, match=r"adds a column 'rank', and there is one: rename it"):
        Top(RankSpec(1, (OrderColumn("a"),), ("a", "Rank"))).output_schema([schema], ())


def test_many_rows_of_one_key_and_of_many_keys_leave_the_best() -> None:
    rng = np.random.default_rng(5)
    schema = pa.schema([("key", pa.int64()), ("price", pa.int64())])
    rows = BestRows(schema, [0], BestOrder(10, (SortColumn(1, True),)))
    keys, prices = rng.integers(0, 500, 40_000), rng.integers(0, 1 << 40, 40_000)
    keys[::3] = 7
    for at in range(0, 40_000, 1_000):
        cut = slice(at, at + 1_000)
        rows.add(pa.RecordBatch.from_arrays([pa.array(keys[cut]), pa.array(prices[cut])], schema=schema))
    found = pa.Table.from_batches([each.rows for each in rows.ranked(1_000)])
    by_key: dict[int, list[int]] = {}
    for key, price in zip(*(column.to_pylist() for column in found.columns), strict=True):
        by_key.setdefault(key, []).append(price)
    for key, given_ in by_key.items():
        assert given_ == sorted(prices[keys == key].tolist(), reverse=True)[:10]
    assert len(rows) == found.num_rows
    assert len(rows._arena) <= max(2 * len(rows), 1024)
