"""Tentative results of windows and aggregates: those of a copy that gets the same rows and watermark, and nothing changes."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import flux
from flux.operators.windowed_rows import EachGroupFunction, GroupKey, GroupsFunction
from flux.windows.window import Closing, SessionWindow, Window
from tests.flux.peeked import PeekedLine, examples, followed, rises

SCHEMA = pa.schema([
    ("user", pa.string()), ("place", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("amount", pa.int64()),
    ("price", pa.float64()), ("exact", pa.decimal128(9, 2)), ("text", pa.string()),
])  # fmt: skip
Row = tuple[str | None, int | None, int | None, int | None, float | None, int | None, str | None]


def batch(rows: list[Row]) -> pa.RecordBatch:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in SCHEMA]
    columns[5] = [None if cents is None else Decimal(cents) / 100 for cents in columns[5]]
    columns[2] = pa.array(columns[2], pa.int64()).cast(SCHEMA.field("ts").type)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


class Spent(flux.Aggregate):
    n = flux.count()
    known = flux.count("price")
    kinds = flux.count_distinct("text")
    total = flux.sum("amount")
    paid = flux.sum("price")
    exact = flux.sum("exact")
    middle = flux.mean("price")
    mean_of_exact = flux.mean("exact")
    least, greatest = flux.min("price"), flux.max("amount")
    first, last = flux.min("text"), flux.max("text")
    least_exact = flux.max("exact")


def spent(window: Any) -> Any:
    def make() -> Spent:
        made = Spent()
        made._flux_window = window
        return made

    return make


def each_group(table: pa.Table) -> pa.Table:
    return table.select(["user", "amount"]).append_column("rows", pa.array([table.num_rows] * table.num_rows))


def all_groups(rows: pa.RecordBatch, offsets: Any) -> pa.RecordBatch:
    return rows.select(["user", "amount"]).append_column("group", pa.array(range(rows.num_rows)))


GROUP_SCHEMA = pa.schema([("user", pa.string()), ("amount", pa.int64()), ("rows", pa.int64())])


def functions(window: Any) -> list[Any]:
    return [
        lambda: EachGroupFunction(each_group, GROUP_SCHEMA, window, GroupKey((0,), len(SCHEMA))),
        lambda: GroupsFunction(all_groups, GROUP_SCHEMA, window),
    ]


#: Small numbers, so that rows meet in groups; doubles whose sums depend on their order.
ROWS = st.tuples(
    st.sampled_from(["a", "b", None]), st.sampled_from([1, 2, None]), st.integers(0, 40) | st.none(),
    st.sampled_from([-3, 0, 2, None]), st.sampled_from([0.1, 1e16, -1e16, None]), st.sampled_from([5, 1999, None]),
    st.sampled_from(["", "x", "yz", None]),
)  # fmt: skip
#: Rows of a step, or a rise of the watermark; then tentative rows, as given by rising tentative watermarks.
STEPS = st.lists(
    st.tuples(st.just(0), st.lists(ROWS, min_size=1, max_size=6).map(batch)) | rises(1), min_size=1, max_size=7
)
OVERLAY = st.lists(st.tuples(st.integers(0, 8), st.just(0), st.lists(ROWS, max_size=5).map(batch)), max_size=3)
WINDOWS = st.builds(
    lambda size, slide, offset: Window("ts", size, min(slide, size), offset % min(slide, size)),
    st.sampled_from([1, 4, 10, 24]),
    st.integers(1, 12),
    st.integers(0, 11),
)
KEYS = st.sampled_from([("user",), ("user", "place"), ("place",), ()])


def followed_with(make: Any, key: tuple[str, ...], mode: str, steps: Any, overlay: Any, data: Any) -> None:
    followed(lambda: PeekedLine(make, key, [SCHEMA], mode), steps, overlay, data)


@examples(15)
@given(
    steps=STEPS, overlay=OVERLAY, window=WINDOWS, key=KEYS, mode=st.sampled_from(["append", "update"]), data=st.data()
)
def test_windows_are_peeked_at(steps: Any, overlay: Any, window: Window, key: Any, mode: str, data: Any) -> None:
    followed_with(spent(window), key, mode, steps, overlay, data)


@examples(10)
@given(steps=STEPS, overlay=OVERLAY, gap=st.sampled_from([1, 3, 8]), key=KEYS, data=st.data())
def test_sessions_are_peeked_at(steps: Any, overlay: Any, gap: int, key: Any, data: Any) -> None:
    followed_with(spent(SessionWindow("ts", gap)), key, "append", steps, overlay, data)


@examples(8)
@given(steps=STEPS, overlay=OVERLAY, key=KEYS, data=st.data())
def test_groups_that_close_at_a_known_time_are_peeked_at(steps: Any, overlay: Any, key: Any, data: Any) -> None:
    followed_with(spent(Closing("ts")), key, "append", steps, overlay, data)


@examples(8)
@given(steps=STEPS, overlay=OVERLAY, key=KEYS, data=st.data())
def test_groups_without_windows_are_peeked_at_in_update_mode(steps: Any, overlay: Any, key: Any, data: Any) -> None:
    followed_with(spent(None), key, "update", steps, overlay, data)


@examples(10)
@given(
    steps=STEPS, overlay=OVERLAY, window=WINDOWS | st.builds(SessionWindow, st.just("ts"), st.sampled_from([1, 3, 8])),
    key=st.sampled_from([("user",), ("user", "place")]), number=st.integers(0, 1), data=st.data(),
)  # fmt: skip
def test_functions_over_windows_are_peeked_at(
    steps: Any, overlay: Any, window: Any, key: Any, number: int, data: Any
) -> None:
    followed_with(functions(window)[number], key, "append", steps, overlay, data)
