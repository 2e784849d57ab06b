"""As-of joins against a model in plain Python, with any cuts, watermarks of both inputs, copies and changes."""

from __future__ import annotations

import math
from functools import cmp_to_key, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from controller.planning.checks import check_ends
from flux.errors import SchemaError, UsageError
from flux.joins import as_of, held_back_rows
from flux.joins.as_of import AsOfJoin, AsOfSpec
from flux.operators import batches
from flux.operators.operator import move_watermarks
from flux.ranks import row_arena
from flux.windows.window import NEVER
from tests.flux.ordered import compared
from tests.flux.stepped import CHECKPOINT, FROM_CHECKPOINT, Stepped, events, rows_of
from tests.flux.test_top_flows import Endless, compiled

TIME = pa.timestamp("us", "UTC")
LEFT = pa.schema([("item", pa.float64()), ("ts", TIME), ("n", pa.int64())])
RIGHT = pa.schema([("at", TIME), ("item", pa.float64()), ("price", pa.string())])


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


def batch(schema: pa.Schema, rows: list[tuple]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [[] for _ in schema]
    arrays = [
        pa.array(column, pa.int64()).cast(TIME) if field.type == TIME else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


ITEMS = st.sampled_from([0.0, 0.0, -0.0, math.nan, None])
TIMES = st.sampled_from([*range(-3, 10), None])
LEFTS = st.tuples(ITEMS, TIMES, st.integers(0, 3))
RIGHTS = st.tuples(TIMES, ITEMS, st.sampled_from(["", "a", "b", None]))


@st.composite
def steps(draw: Any) -> list[Any]:
    """Draw rows of either input, and watermarks of both; a few rows are below the least of them."""
    made: list[Any] = []
    marks = [NEVER, NEVER]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.integers(0, 2))
        if kind == 2:
            some = draw(st.integers(0, 4))  # the sides that move, most often both
            mark = draw(st.integers(-3, 9))
            marks = [max(was, mark) if some != side else was for side, was in enumerate(marks)]
            made.append(tuple(marks))
            continue
        made.append((kind, draw(st.lists(RIGHTS if kind else LEFTS, max_size=7))))
    return made


def by_columns(one: tuple, other: tuple) -> int:
    return next((found for a, b in zip(one, other, strict=True) if (found := compared(a, b))), 0)


def expected(lefts: list[tuple], rights: list[tuple], tolerance: int | None, outer: bool) -> list[tuple]:
    """Return the joined rows by the time of the left ones, and by arrival."""
    made = []
    for left in sorted(lefts, key=lambda row: row[1]):
        fits = [
            row for row in rights
            if left[0] is not None and row[1] is not None and compared(row[1], left[0]) == 0
            and row[0] <= left[1] and (tolerance is None or row[0] >= left[1] - tolerance)
        ]  # fmt: skip
        if fits:
            at, _, price = max(fits, key=cmp_to_key(by_columns))
            made.append((*rows_of(batch(LEFT, [left]))[0], at, price))
        elif outer:
            made.append((*rows_of(batch(LEFT, [left]))[0], None, None))
    return made


@settings(max_examples=60, deadline=None)
@given(drawn=steps(), tolerance=st.none() | st.integers(0, 6), outer=st.booleans(), data=st.data())
def test_each_left_row_has_the_newest_right_row_at_or_before_its_time(
    drawn: list, tolerance: int | None, outer: bool, data: Any
) -> None:
    lefts: list[tuple] = []
    rights: list[tuple] = []
    left_out = [0, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(as_of, "KEYS_MIN", data.draw(st.sampled_from([1, 1024])))
        patch.setattr(as_of, "ROWS_MAX", data.draw(st.sampled_from([1, 2, 1024])))
        patch.setattr(as_of, "TEXT_MAX", data.draw(st.sampled_from([1, 1024])))
        patch.setattr(batches, "TAKEN_BYTES_MAX", data.draw(st.sampled_from([1, 1024])))
        patch.setattr(row_arena, "CHUNK_BYTES_MAX", data.draw(st.sampled_from([50, 1 << 20])))
        patch.setattr(as_of, "RESULT_ROWS_MAX", data.draw(st.sampled_from([1, 1024])))
        patch.setattr(held_back_rows, "ROWS_MIN", data.draw(st.sampled_from([1, 1024])))
        stepped = Stepped(partial(AsOfJoin, AsOfSpec(("ts", "at"), tolerance, outer)), [LEFT, RIGHT], ("item",))
        found: list[tuple] = []
        watermark = NEVER
        for step, event in zip(drawn, data.draw(events(len(drawn))), strict=True):
            stepped.happen(event)
            if not isinstance(step[1], list):
                watermark = min(step)
                given_ = stepped.move(*step)
                assert all(row[1] < watermark for row in given_)
                found += given_
                continue
            number, rows = step
            cut = data.draw(st.integers(0, len(rows)))
            for part in (rows[:cut], rows[cut:]):
                alone = [row for row in part if number == 0 and outer and row[1] is None]
                given_ = stepped.give(batch(LEFT if number == 0 else RIGHT, part), number)
                assert given_ == [(*row, None, None) for row in rows_of(batch(LEFT, alone))]
            for row in rows:
                time = row[0] if number else row[1]
                if time is None and number == 0 and outer:
                    continue
                if time is None or time < watermark:
                    left_out[time is None] += 1
                else:
                    (rights if number else lefts).append(row)
        found += stepped.end()
        assert stepped.operator._flux_left_out() == tuple(left_out)
    assert [repr(row).replace("-0.0", "0.0") for row in found] == [
        repr(row).replace("-0.0", "0.0") for row in expected(lefts, rights, tolerance, outer)
    ]


def test_long_text_of_one_partner_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split long output: a thousand left rows of a partner of 3 MiB are 3 GiB, and 2 GiB do not fit into a column."""
    monkeypatch.setattr(batches, "TAKEN_BYTES_MAX", 1 << 16)
    stepped = Stepped(partial(AsOfJoin, AsOfSpec(("ts", "at"))), [LEFT, RIGHT], ("item",))
    stepped.give(batch(RIGHT, [(1, 0.0, "x" * 9000), (1, 1.5, "short")]), 1)
    stepped.move(2, 2)
    stepped.give(batch(RIGHT, [(3, 0.0, "y" * 20_000)]), 1)
    stepped.give(batch(LEFT, [(0.0, at // 50 + 2, at) for at in range(100)] + [(1.5, 3, 100)]))
    given_ = list(move_watermarks(stepped.operator, stepped.context, [4, 4]))
    assert all(each.nbytes < (1 << 16) + 40_000 for each in given_)
    prices = pa.Table.from_batches(given_).column("price").to_pylist()
    assert [each[0] for each in prices] == ["x"] * 50 + ["y"] * 50 + ["s"]


def test_changes_have_the_kept_rows_and_the_rows_that_wait() -> None:
    stepped = Stepped(partial(AsOfJoin, AsOfSpec(("ts", "at"))), [LEFT, RIGHT], ("item",))
    stepped.give(batch(RIGHT, [(1, 0.0, "a"), (7, 0.0, "late")]), 1)
    stepped.happen(CHECKPOINT)
    stepped.give(batch(RIGHT, [(2, 0.0, "b"), (2, 1.5, "c")]), 1)
    stepped.give(batch(LEFT, [(1.5, 4, 0)]))
    assert stepped.move(3, 3) == []
    stepped.happen(CHECKPOINT)
    stepped.give(batch(LEFT, [(0.0, 5, 1), (0.0, 8, 2)]))
    stepped.happen(FROM_CHECKPOINT)
    assert stepped.move(6, 6) == [("1.5", 4, 0, 2, "c"), ("0.0", 5, 1, 2, "b")]
    assert stepped.end() == [("0.0", 8, 2, 7, "late")]


def test_state_is_the_newest_row_of_each_key_and_with_a_tolerance_that_of_new_keys() -> None:
    sizes = []
    for tolerance in (None, 1_000):
        stepped = Stepped(partial(AsOfJoin, AsOfSpec(("ts", "at"), tolerance)), [LEFT, RIGHT], ("item",))
        for step in range(40):
            items = np.arange(200 * step, 200 * step + 200).astype(float)
            times = np.full(200, 100 * step)
            stepped.give(batch(RIGHT, list(zip(times, items, ["x"] * 200, strict=True))), 1)
            stepped.give(batch(LEFT, list(zip(items + 1e9, times, times, strict=True))), 0)  # keys without right rows
            stepped.move(100 * step + 1, 100 * step + 1)
        operator = stepped.operator
        assert [len(each) for each in operator._waiting] == [0, 0]
        sizes.append(len(operator._newest))
    assert 8_000 <= sizes[0] <= 2 * 8_000
    assert sizes[1] <= 2 * 2_200 + 1_024


# ---- plans


def source(name: str, schema: pa.Schema, time: str | None, endless: bool = False) -> Any:
    made: Any = flux.source(Endless() if endless else lambda partition, start: iter(()), schema, 1, name)
    return made if time is None else made.withWatermark(time, "10 seconds")


def test_the_output_has_the_columns_of_both_sides_and_the_event_time_of_the_left() -> None:
    orders, prices = source("orders", LEFT, "ts", True), source("prices", RIGHT, "at", True)
    flow = flux.asof_join(orders, prices, on="item", tolerance="1 hour", how="left")
    plan = compiled(flux.dedup(flow, key="n", ttl="1 hour").foreach_batch(print))
    check_ends(plan)
    join, dedup = plan.stages
    assert join.name == "orders.asof_join"
    assert join.make()._spec == AsOfSpec(("ts", "at"), 3_600_000_000, True)
    assert join.output_schema.names == ["item", "ts", "n", "at", "price"]
    assert (join.key, join.timed_inputs) == (("item",), (0, 1))
    assert dedup.make()._spec.time == "ts"
    assert repr(flow).endswith("asof_join(on=['item'], tolerance='1 hour', how='left')")


def test_mistakes_are_refused_with_what_to_write() -> None:
    orders, prices = source("orders", LEFT, "ts"), source("prices", RIGHT, "at")
    with pytest.raises(UsageError, match=r"source prices has none.*withWatermark\('ts', '10 seconds'\)"):
        compiled(flux.asof_join(orders, source("prices", RIGHT, None), on="item"))
    with pytest.raises(UsageError, match="how must be 'inner' or 'left'"):
        flux.asof_join(orders, prices, on="item", how="full")
    with pytest.raises(UsageError, match="on must name the columns"):
        flux.asof_join(orders, prices, on=[])
    with pytest.raises(UsageError, match=r"on must be the name of a column, .*as in on='user'"):
        flux.asof_join(orders, prices, on=5)
    with pytest.raises(UsageError, match="a duration of zero or more"):
        flux.asof_join(orders, prices, on="item", tolerance="-1 second")
    with pytest.raises(SchemaError, match="key 'n' is not a column"):
        compiled(flux.asof_join(orders, prices, on="n"))
    with pytest.raises(
        SchemaError, match=r"column 'ts' is on both sides: rename it.*withColumnRenamed\('ts', 'right_ts'\)"
    ):
        compiled(flux.asof_join(orders, source("others", LEFT, "ts"), on=["item", "n"]))
    other = pa.schema([("at", TIME), ("item", pa.string())])
    with pytest.raises(SchemaError, match="'item' is double on the left and string on the right; cast one of them"):
        compiled(flux.asof_join(orders, source("names", other, "at"), on="item"))
    with pytest.raises(UsageError, match="asof_join takes two flows"):
        flux.asof_join(orders, prices, on="item").connect(orders)
