"""Tentative results of duplicates and ranks: those of a copy that gets the same rows and watermark, and nothing changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from flux.ranks import first_rows
from flux.ranks.dedup import Dedup, DedupSpec
from flux.ranks.top import Last, OrderColumn, RankSpec, Top, TopOfWindow
from flux.windows.window import Window
from tests.flux.peeked import PeekedLine, examples, followed, rises

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.string()), ("ts", TIME), ("n", pa.int64()), ("text", pa.string())])
NAMES = tuple(SCHEMA.names)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]), st.integers(0, 40), st.integers(0, 3), st.sampled_from(["", "x", None])
    ),
    min_size=1,
    max_size=6,
)


def batch(rows: list[tuple]) -> pa.RecordBatch:
    arrays = [
        pa.array(column, pa.int64()).cast(TIME) if field.type == TIME else pa.array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


STEPS = st.lists(st.tuples(st.just(0), ROWS.map(batch)) | rises(1), min_size=1, max_size=8)
OVERLAY = st.lists(st.tuples(st.integers(0, 8), st.just(0), ROWS.map(batch)), max_size=3)
BY = (OrderColumn("n", descending=True),)


@examples(12)
@given(steps=STEPS, overlay=OVERLAY, key=st.sampled_from([("key",), ("key", "n")]), whole=st.booleans(), data=st.data())
def test_duplicates_are_peeked_at(steps: Any, overlay: Any, key: Any, whole: bool, data: Any) -> None:
    time = data.draw(st.sampled_from(["ts", None]))
    before = first_rows.WHOLE_MAX
    try:
        first_rows.WHOLE_MAX = before if whole else 3
        made = partial(Dedup, DedupSpec(5, time))
        followed(lambda: PeekedLine(made, key, [SCHEMA], "append"), steps, overlay, data)
    finally:
        first_rows.WHOLE_MAX = before


@examples(12)
@given(
    steps=STEPS, overlay=OVERLAY, window=st.sampled_from([Window("ts", 4, 4), Window("ts", 9, 3, 1)]),
    limit=st.integers(1, 3), ties=st.booleans(), key=st.sampled_from([("key",), ()]), data=st.data(),
)  # fmt: skip
def test_ranks_of_windows_are_peeked_at(
    steps: Any, overlay: Any, window: Window, limit: int, ties: bool, key: Any, data: Any
) -> None:
    made = partial(TopOfWindow, RankSpec(limit, BY, NAMES, ties, window))
    followed(lambda: PeekedLine(made, key, [SCHEMA], "append"), steps, overlay, data)


@examples(12)
@given(steps=STEPS, overlay=OVERLAY, limit=st.integers(1, 3), key=st.sampled_from([("key",), ()]), data=st.data())
def test_ranks_until_now_are_peeked_at(steps: Any, overlay: Any, limit: int, key: Any, data: Any) -> None:
    made = partial(Top, RankSpec(limit, BY, NAMES))
    followed(lambda: PeekedLine(made, key, [SCHEMA], "update"), steps, overlay, data)


@examples(12)
@given(steps=STEPS, overlay=OVERLAY, ttl=st.sampled_from([None, 6]), data=st.data())
def test_last_rows_are_peeked_at(steps: Any, overlay: Any, ttl: int | None, data: Any) -> None:
    time = data.draw(st.sampled_from(["ts", None])) if ttl is not None else None
    made = partial(Last, RankSpec(1, (OrderColumn("ts", True, True),), NAMES, ttl=ttl, time=time, backward=True))
    followed(lambda: PeekedLine(made, ("key",), [SCHEMA], "update"), steps, overlay, data)
