"""Rows added to windows and sessions per second and core, results included: pytest benchmarks/test_windows.py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from flux.operators.attributes import open_operator
from flux.operators.operator import Context, move_watermarks
from flux.windows.window import NEVER

#: Rows of all steps, keys, and rows per second of event time: one partition of sixteen for a million keys.
ROWS, KEYS, RATE = 262_144, 62_500, 6_250
SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("price", pa.int64())])


class Totals(flux.Aggregate):
    n = flux.count()
    total = flux.sum("price")


WINDOWS: dict[str, Any] = {
    "tumbling 10 s": flux.window("ts", "10 seconds"),
    "hopping 10 s / 2 s": flux.window("ts", "10 seconds", "2 seconds"),
    "sessions, gap 10 s": flux.session_window("ts", "10 seconds"),
}


def steps(rows: int) -> list[tuple[pa.RecordBatch, int]]:
    """Return batches of ``rows`` rows, a second out of order, each with the watermark behind it."""
    random, made = np.random.default_rng(1), []
    for start in range(0, ROWS, rows):
        times = ((np.arange(start, start + rows) / RATE - random.random(rows)) * 1e6).astype(np.int64)
        columns = [random.integers(0, KEYS, rows), times, random.integers(0, 1000, rows)]
        arrays = [pa.array(column).view(type_) for column, type_ in zip(columns, SCHEMA.types, strict=True)]
        made.append((pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), int(times.max()) - 4_000_000))
    return made


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("rows", [4_096, 65_536])
@pytest.mark.parametrize("name", WINDOWS)
def test_count_and_sum_by_window(benchmark: Any, name: str, rows: int) -> None:
    given = steps(rows)

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        operator = flux.stage(key="key", window=WINDOWS[name])(Totals).make()
        context = Context("totals", key=("key",), schemas=(SCHEMA,), output_mode="append", watermarks=[NEVER])
        open_operator(operator, context)
        return (operator,), {}

    def every_step(operator: Any) -> int:
        results = 0
        for batch, watermark in given:
            operator.process(batch)
            results += sum(made.num_rows for made in move_watermarks(operator, operator.context, [watermark]))
        return results

    results = benchmark.pedantic(every_step, setup=fresh, rounds=8, warmup_rounds=1)
    assert results > ROWS // 20
    if benchmark.stats is not None:
        benchmark.extra_info["M rows/s"] = round(ROWS / benchmark.stats.stats.min / 1e6, 1)


@pytest.mark.parametrize("partitions", [5, 64, 100])
@pytest.mark.parametrize("way", ["each alone", "in one call"])
def test_15_rows_for_each_of_several_partitions(benchmark: Any, partitions: int, way: str) -> None:
    rows, random = 15, np.random.default_rng(1)
    made: Any = flux.stage(key="key", window=WINDOWS["tumbling 10 s"])(Totals)
    operators: list[Any] = [made.make() for _ in range(partitions)]
    for partition, operator in enumerate(operators):
        context = Context("totals", partition, partitions, ("key",), (SCHEMA,), "append", watermarks=[NEVER])
        open_operator(operator, context)
    every = rows * partitions
    columns = [random.integers(0, 1000, every), np.arange(every), random.integers(0, 9, every)]
    arrays = [pa.array(column).view(type_) for column, type_ in zip(columns, SCHEMA.types, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    parts = [batch.slice(start, rows) for start in range(0, every, rows)]

    def alone() -> None:
        for operator, part in zip(operators, parts, strict=True):
            list(operator.process(part))

    def together() -> None:
        Totals.process_many(operators, batch, [rows] * partitions)

    benchmark.pedantic(alone if way == "each alone" else together, rounds=200, warmup_rounds=20)
