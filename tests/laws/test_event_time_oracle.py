"""The oracle of event time, the product and the model of watermarks agree: on late rows, windows and sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.windows.lateness import Lateness
from flux.windows.window import END_OF_TIME, NEVER, SessionWindow, Window
from tests.laws.watermark_model import DELAY, SIZE, SLIDE, World
from tests.oracles.event_time import EventTimeOracle

#: Time, key and amount of each row, by partition.
Sources = list[list[tuple[int | None, int, int | None]]]
TIME = pa.timestamp("us", "UTC")
SOURCES = st.lists(
    st.lists(
        st.tuples(st.integers(-20, 20) | st.none(), st.integers(0, 2), st.integers(-3, 3) | st.none()), max_size=25
    ),
    min_size=1,
    max_size=3,
)
AGGREGATES = "count(*) as n, sum(amount)::bigint as total"


def table(sources: Sources) -> pa.Table:
    """Return the rows with their partitions and numbers. The last rows come first, as only the numbers count."""
    rows = [(p, number, *row) for p, part in enumerate(sources) for number, row in enumerate(part)][::-1]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    types = (pa.int64(), pa.int64(), TIME, pa.int64(), pa.int64())
    arrays = [pa.array(column, pa.int64()).cast(type_) for column, type_ in zip(columns, types, strict=True)]
    return pa.table(arrays, names=["partition", "number", "ts", "key", "amount"])


def judged(sources: Sources, delay: int) -> list[tuple[int, int, bool]]:
    """Return partition and number of each row, and whether the product finds it late."""
    found = []
    for partition, rows in enumerate(sources):
        timed = [number for number, row in enumerate(rows) if row[0] is not None]
        late = Lateness(delay).judge(np.array([rows[number][0] for number in timed], np.int64))
        is_late = dict(zip(timed, [False] * len(timed) if late is None else late.tolist(), strict=True))
        found += [(partition, number, is_late.get(number, False)) for number in range(len(rows))]
    return found


@settings(max_examples=25, deadline=None)
@given(sources=SOURCES, delay=st.sampled_from([0, 1, 5, 100]))
def test_late_rows_are_those_of_the_product(sources: Sources, delay: int) -> None:
    oracle = EventTimeOracle(table(sources), "ts", delay)
    found = judged(sources, delay)
    assert oracle.late("partition", "number") == sorted([row[:2] for row in found if row[2]], key=repr)
    assert oracle.on_time("partition", "number") == sorted([row[:2] for row in found if not row[2]], key=repr)


def merged(sources: Sources, delay: int, cuts: list[int]) -> Iterator[tuple[pa.RecordBatch, int | None]]:
    """Yield batches of the rows that are not late, of one partition after the other, and the least watermark behind each."""
    judges, at = [Lateness(delay) for _ in sources], [0] * len(sources)
    turn = 0
    while any(start < len(rows) for start, rows in zip(at, sources, strict=True)):
        source = turn % len(sources)
        size = cuts[turn % len(cuts)] if cuts else 4
        rows, turn = sources[source][at[source] : at[source] + size], turn + 1
        at[source] += len(rows)
        timed = [row for row in rows if row[0] is not None]
        late = judges[source].judge(np.array([row[0] for row in timed], np.int64))
        kept = timed if late is None else [row for row, out in zip(timed, late.tolist(), strict=True) if not out]
        kept += [row for row in rows if row[0] is None]
        given_ = table([kept]).select(["ts", "key", "amount"]).combine_chunks()
        open_ = [judge.watermark for judge, start, part in zip(judges, at, sources, strict=True) if start < len(part)]
        watermark = min(open_, default=END_OF_TIME)
        if given_.num_rows:
            yield given_.to_batches()[0], None if watermark == NEVER else watermark


@settings(max_examples=25, deadline=None)
@given(
    sources=SOURCES,
    delay=st.sampled_from([0, 3, 20]),
    cuts=st.lists(st.integers(1, 9), max_size=4),
    window=st.sampled_from(
        [
            Window("ts", 10, 10, 3),
            Window("ts", 10, 4, 1),
            Window("ts", 9, 3),
            SessionWindow("ts", 3),
            SessionWindow("ts", 8),
        ]
    ),
)
def test_windows_and_sessions_are_those_of_the_product(
    sources: Sources, delay: int, cuts: list[int], window: Any
) -> None:
    @flux.stage(key="key", window=window)
    class Sums(flux.Aggregate):
        n = flux.count()
        total = flux.sum("amount")

    oracle = EventTimeOracle(table(sources), "ts", delay)
    batches, watermarks = zip(*merged(sources, delay, cuts), strict=True) if any(sources) else ((), ())
    result = flux.testing.apply(Sums, list(batches), watermarks=list(watermarks)) if batches else None
    found = [] if result is None else _tuples(result)
    if isinstance(window, SessionWindow):
        assert found == oracle.sessions(["key"], AGGREGATES, window.gap)
    else:
        assert found == oracle.windows(["key"], AGGREGATES, window.size, window.slide, window.offset)


def _tuples(result: pa.Table) -> list[tuple[Any, ...]]:
    columns = [
        column.cast(pa.int64()).to_pylist() if pa.types.is_timestamp(column.type) else column.to_pylist()
        for column in result.columns
    ]
    return sorted(zip(*columns, strict=True), key=repr)


@pytest.mark.parametrize("seed", [2, 4, 25])
def test_the_model_of_watermarks_gives_the_answer_of_the_oracle(seed: int) -> None:
    """Compare the most frequent keys of each window, through losses and repetitions. No source of these seeds is idle or
    endless."""
    world = World(seed)
    given_: Sources = [[(*row[:2], None) for row in reader.rows] for reader in world.readers]
    counts = world.run()
    assert not counts["idle"]
    oracle = EventTimeOracle(table(given_), "ts", DELAY)
    windows = oracle.windows(["key"], "count(*) as n", SIZE, SLIDE)
    most = {end: max(row[3] for row in windows if row[2] == end) for end in {row[2] for row in windows}}
    expected = sorted((end - 1, key, n) for key, _, end, n in windows if n == most[end])
    tops = [part.replicas[part.primary] for part in world.b]
    assert sorted(row for top in tops for batch in top.batches for rows in batch.values() for row in rows) == expected
    assert counts["late"] == len(oracle.late())


def test_rows_without_a_key_have_windows_and_sessions_too() -> None:
    oracle = EventTimeOracle(table([[(0, 1, 5), (2, 2, None), (30, 1, 1), (3, 1, 1)]]), "ts", 10)
    assert oracle.late("number", "amount") == [(3, 1)]
    assert oracle.windows([], AGGREGATES, 10) == [(0, 10, 2, 5), (30, 40, 1, 1)]
    assert oracle.sessions([], AGGREGATES, 2) == [(0, 4, 2, 5), (30, 32, 1, 1)]
