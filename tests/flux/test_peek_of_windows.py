"""Tentative results of windows and aggregates: those of a copy that gets the same rows and watermark, and nothing changes."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import flux
from flux.operators.windowed_rows import EachGroupFunction, GroupKey, GroupsFunction
from flux.windows.window import Closing, SessionWindow, Window
from tests.flux.peeked import SEEDS, PeekedLine, examples, followed

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


def drawn(number: int, random: Random) -> pa.RecordBatch:
    """Draw rows like ``ROWS``."""
    choices: list[list[Any]] = [
        ["a", "b", None], [1, 2, None], [*range(40), None], [-3, 0, 2, None], [0.1, 1e16, -1e16, None], [5, 1999, None],
        ["", "x", "yz", None],
    ]  # fmt: skip
    return batch([tuple(map(random.choice, choices)) for _ in range(random.randint(1, 6))])  # type: ignore[misc]


WINDOWS = st.builds(
    lambda size, slide, offset: Window("ts", size, min(slide, size), offset % min(slide, size)),
    st.sampled_from([1, 4, 10, 24]),
    st.integers(1, 12),
    st.integers(0, 11),
)
KEYS = st.sampled_from([("user",), ("user", "place"), ("place",), ()])


def followed_with(make: Any, key: tuple[str, ...], mode: str, seed: int) -> None:
    followed(lambda: PeekedLine(make, key, [SCHEMA], mode), drawn, seed)


@examples(6)
@given(window=WINDOWS, key=KEYS, mode=st.sampled_from(["append", "update"]), seed=SEEDS)
def test_windows_are_peeked_at(window: Window, key: Any, mode: str, seed: int) -> None:
    followed_with(spent(window), key, mode, seed)


@examples(5)
@given(gap=st.sampled_from([1, 3, 8]), key=KEYS, seed=SEEDS)
def test_sessions_are_peeked_at(gap: int, key: Any, seed: int) -> None:
    followed_with(spent(SessionWindow("ts", gap)), key, "append", seed)


@examples(4)
@given(key=KEYS, seed=SEEDS)
def test_groups_that_close_at_a_known_time_are_peeked_at(key: Any, seed: int) -> None:
    followed_with(spent(Closing("ts")), key, "append", seed)


@examples(4)
@given(key=KEYS, seed=SEEDS)
def test_groups_without_windows_are_peeked_at_in_update_mode(key: Any, seed: int) -> None:
    followed_with(spent(None), key, "update", seed)


@examples(5)
@given(
    window=WINDOWS | st.builds(SessionWindow, st.just("ts"), st.sampled_from([1, 3, 8])),
    key=st.sampled_from([("user",), ("user", "place")]), number=st.integers(0, 1), seed=SEEDS,
)  # fmt: skip
def test_functions_over_windows_are_peeked_at(window: Any, key: Any, number: int, seed: int) -> None:
    followed_with(functions(window)[number], key, "append", seed)
