"""Rows looked up and aggregated per second and core: pytest benchmarks/test_keyed_state.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.operators import aggregate as agg
from flux.operators.operator import Context
from partitioning.key_index import KeyIndex

ROWS, KEYS = 131_072, 16_384
_RNG = np.random.default_rng(1)
_NUMBERS = _RNG.choice(1 << 40, KEYS, replace=False)[_RNG.integers(0, KEYS, ROWS)]
_VALUES = {f"v{i}": _RNG.random(ROWS) for i in range(7)}
_STRINGS = pa.array([f"{number:012d}"[-12:] for number in _NUMBERS])

BATCHES = {
    "int64 key, 2 columns": (pa.record_batch({"key": _NUMBERS, "v0": _VALUES["v0"]}), ("key",)),
    "string key, 8 columns": (pa.record_batch({"key": _STRINGS, **_VALUES}), ("key",)),
    "two keys": (
        pa.record_batch({"key": _STRINGS, "day": (_NUMBERS % 7).astype(np.int32), "v0": _VALUES["v0"]}),
        ("key", "day"),
    ),
    "no key": (pa.record_batch({"v0": _VALUES["v0"]}), ()),
}


class Totals(agg.Aggregate):
    rows = agg.count()
    total = agg.sum("v0")


def report(benchmark: Any, rows: int) -> None:
    """Add the rate to the report (there are no figures with --benchmark-disable)."""
    if benchmark.stats is not None:
        benchmark.extra_info["M rows/s"] = round(rows / benchmark.stats.stats.median / 1e6)


@pytest.mark.parametrize("rows", [2_048, ROWS])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("mode", ["complete", "update"])
def test_count_and_sum_over_16_384_keys(benchmark: Any, name: str, rows: int, mode: str) -> None:
    batch, key = BATCHES[name]
    operator = Totals()
    operator.open(Context("totals", key=key, schemas=(batch.schema,), output_mode=mode))
    operator.process(batch)
    slices = [batch.slice(start, rows) for start in range(0, ROWS, rows)]

    def every_slice() -> None:
        for part in slices:
            operator.process(part)

    benchmark.pedantic(every_slice, rounds=20, warmup_rounds=2)
    report(benchmark, ROWS)


def test_new_keys(benchmark: Any) -> None:
    """Look up new keys only: inserting and doubling included."""
    column = pa.array(np.arange(ROWS))
    field = pa.field("key", pa.int64())
    benchmark.pedantic(lambda: KeyIndex([field]).slots([column]), rounds=20, warmup_rounds=2)
    report(benchmark, ROWS)


class Newest(agg.Aggregate):
    rows = agg.count()
    latest = agg.max("v")


@pytest.mark.parametrize("partitions", [1, 5, 64])
@pytest.mark.parametrize("way", ["each alone", "in one call"])
def test_15_rows_for_each_of_several_partitions(benchmark: Any, partitions: int, way: str) -> None:
    rows, schema = 15, pa.schema([("key", pa.int64()), ("v", pa.int64())])
    operators = [Newest() for _ in range(partitions)]
    for partition, operator in enumerate(operators):
        operator.open(Context("newest", partition, partitions, ("key",), (schema,), "update"))
    keys = pa.array(_RNG.integers(0, 1000, rows * partitions))
    batch = pa.record_batch([keys, keys], schema=schema)
    parts = [batch.slice(start, rows) for start in range(0, len(keys), rows)]

    def alone() -> None:
        for operator, part in zip(operators, parts, strict=True):
            operator.process(part)

    def together() -> None:
        Newest.process_many(operators, batch, [rows] * partitions)

    benchmark.pedantic(alone if way == "each alone" else together, rounds=200, warmup_rounds=20)
