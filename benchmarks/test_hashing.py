"""Rows hashed and given a partition per second: pytest benchmarks/test_hashing.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from partitioning.clustering import hash_columns, partition_ids

ROWS = 131_072
_NUMBERS = np.random.default_rng(1).integers(0, 1 << 20, ROWS)

KEYS = {
    "int64": [pa.array(_NUMBERS)],
    "int64 with nulls": [pa.array(_NUMBERS, mask=_NUMBERS % 5 == 0)],
    "int32": [pa.array(_NUMBERS.astype(np.int32))],
    "string": [pa.array([f"key-{number:08d}" for number in _NUMBERS])],
    "int64, string": [pa.array(_NUMBERS), pa.array([f"key-{number:08d}" for number in _NUMBERS])],
}


def report(benchmark: Any, rows: int) -> None:
    """Add the rate to the report (there are no figures with --benchmark-disable)."""
    if benchmark.stats is not None:
        benchmark.extra_info["M rows/s"] = round(rows / benchmark.stats.stats.median / 1e6)


@pytest.mark.parametrize("key", KEYS)
def test_hash_and_partition(benchmark: Any, key: str) -> None:
    columns = KEYS[key]
    partition_ids(hash_columns(columns), 64)  # loads the kernels
    benchmark.pedantic(lambda: partition_ids(hash_columns(columns), 64), rounds=100, warmup_rounds=5)
    report(benchmark, ROWS)
