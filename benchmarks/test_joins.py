"""Rows joined per second and core, with a million rows that wait: pytest benchmarks/test_joins.py.

Rows of both inputs in the order of their times, a million keys, bounds of half a million rows before and behind: each row has
half a partner that waits. Each batch of rows is followed by a watermark, and as many rows are forgotten as come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.test_keyed_state import report
from flux.joins.join import Join
from flux.joins.join_spec import LEFT, RIGHT, JoinSpec, TimeBound
from flux.operators.operator import Context, move_watermarks
from flux.windows.window import NEVER

KEYS, HALF = 1_000_000, 500_000
SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("value", pa.int64())])
OUTPUTS = (("key", 0), ("ts", 1), ("value", 2), ("other", 5))
BOUNDS = (TimeBound(LEFT, False, 1, -HALF), TimeBound(LEFT, True, 1, HALF))
#: Batches of each input that are measured.
ROWS = 1_000_000


def steps(rows: int) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch, int]]:
    """Yield batches of both inputs, and the watermark behind them, without end."""
    random, now = np.random.default_rng(1), 0
    while True:
        batches = []
        for _ in (LEFT, RIGHT):
            keys, times = random.integers(0, KEYS, rows), np.sort(now + random.integers(0, rows, rows))
            columns = [pa.array(keys), pa.array(times).cast(SCHEMA.field("ts").type), pa.array(keys)]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        now += rows
        yield batches[LEFT], batches[RIGHT], now


@pytest.mark.parametrize("rows", [10_000, 100_000])
@pytest.mark.parametrize("how", ["inner", "full_outer", "left_semi"])
def test_join_with_a_million_rows_that_wait(benchmark: Any, how: str, rows: int) -> None:
    outputs = OUTPUTS[:3] if how == "left_semi" else OUTPUTS
    operator = Join(JoinSpec(how, ((0,), (0,)), outputs, (1, 1), BOUNDS, time_of=LEFT), SCHEMA, SCHEMA)
    context = Context("joined", schemas=(SCHEMA, SCHEMA), output_mode="append", watermarks=[NEVER, NEVER])
    operator.open(context)
    drawn = steps(rows)

    def apply(left: pa.RecordBatch, right: pa.RecordBatch, watermark: int) -> int:
        given: list[pa.RecordBatch] = []
        for context.input, batch in enumerate((left, right)):
            given += operator.process(batch)
        given += move_watermarks(operator, context, [watermark, watermark])
        return len(given)

    def step() -> tuple[tuple[pa.RecordBatch, pa.RecordBatch, int], dict[str, Any]]:
        return next(drawn), {}

    warm = (2 * HALF if benchmark.enabled else 2 * rows) // rows
    for _ in range(warm):
        apply(*next(drawn))
    benchmark.pedantic(apply, setup=step, rounds=ROWS // rows if benchmark.enabled else 1)
    report(benchmark, 2 * rows)
