"""Tentative results of duplicates and ranks: those of a copy that gets the same rows and watermark, and nothing changes."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from flux.ranks import first_rows
from flux.ranks.dedup import Dedup, DedupSpec
from flux.ranks.top import Last, OrderColumn, RankSpec, Top, TopOfWindow
from flux.windows.window import Window
from tests.flux.peeked import SEEDS, PeekedLine, examples, followed

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.string()), ("ts", TIME), ("n", pa.int64()), ("text", pa.string())])
NAMES = tuple(SCHEMA.names)


def drawn(number: int, random: Random) -> pa.RecordBatch:
    choices: list[list[Any]] = [["a", "b", None], list(range(40)), [0, 1, 2, 3], ["", "x", None]]
    rows = [tuple(map(random.choice, choices)) for _ in range(random.randint(1, 6))]
    arrays = [
        pa.array(column, pa.int64()).cast(TIME) if field.type == TIME else pa.array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


BY = (OrderColumn("n", descending=True),)


@examples(4)
@given(key=st.sampled_from([("key",), ("key", "n")]), whole=st.booleans(), seed=SEEDS)
def test_duplicates_are_peeked_at(key: Any, whole: bool, seed: int) -> None:
    time = ["ts", None][seed % 2]
    before = first_rows.WHOLE_MAX
    try:
        first_rows.WHOLE_MAX = before if whole else 3
        made = partial(Dedup, DedupSpec(5, time))
        followed(lambda: PeekedLine(made, key, [SCHEMA], "append"), drawn, seed)
    finally:
        first_rows.WHOLE_MAX = before


@examples(4)
@given(
    window=st.sampled_from([Window("ts", 4, 4), Window("ts", 9, 3, 1)]),
    limit=st.integers(1, 3), ties=st.booleans(), key=st.sampled_from([("key",), ()]), seed=SEEDS,
)  # fmt: skip
def test_ranks_of_windows_are_peeked_at(window: Window, limit: int, ties: bool, key: Any, seed: int) -> None:
    made = partial(TopOfWindow, RankSpec(limit, BY, NAMES, ties, window))
    followed(lambda: PeekedLine(made, key, [SCHEMA], "append"), drawn, seed)


@examples(4)
@given(limit=st.integers(1, 3), key=st.sampled_from([("key",), ()]), seed=SEEDS)
def test_ranks_until_now_are_peeked_at(limit: int, key: Any, seed: int) -> None:
    made = partial(Top, RankSpec(limit, BY, NAMES))
    followed(lambda: PeekedLine(made, key, [SCHEMA], "update"), drawn, seed)


@examples(4)
@given(ttl=st.sampled_from([None, 6]), seed=SEEDS)
def test_last_rows_are_peeked_at(ttl: int | None, seed: int) -> None:
    time = ["ts", None][seed % 2] if ttl is not None else None
    made = partial(Last, RankSpec(1, (OrderColumn("ts", True, True),), NAMES, ttl=ttl, time=time, backward=True))
    followed(lambda: PeekedLine(made, ("key",), [SCHEMA], "update"), drawn, seed)
