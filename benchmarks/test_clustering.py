"""Rows clustered per second, all in (hash, sort, copy): pytest benchmarks/test_clustering.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from partitioning.clustering import Clustering

ROWS = 131_072
_RNG = np.random.default_rng(1)
_KEYS = _RNG.integers(0, 1 << 20, ROWS)
_DOUBLES = {f"v{i}": _RNG.random(ROWS) for i in range(7)}

BATCHES = {
    "int64 key, 4 columns": pa.record_batch({"key": _KEYS, **dict(list(_DOUBLES.items())[:3])}),
    "string key, 8 columns": pa.record_batch({"key": [f"key-{key:08d}" for key in _KEYS], **_DOUBLES}),
}


def report(benchmark: Any, rows: int) -> None:
    """Add the rate to the report (there are no figures with --benchmark-disable)."""
    if benchmark.stats is not None:
        benchmark.extra_info["M rows/s"] = round(rows / benchmark.stats.stats.median / 1e6)


@pytest.mark.parametrize("rows", [64, 8_192, ROWS])
@pytest.mark.parametrize("batch", BATCHES)
def test_cluster_into_64_partitions(benchmark: Any, batch: str, rows: int) -> None:
    rows_given = BATCHES[batch].slice(0, rows)
    clustering = Clustering(rows_given.schema, [0], 64)
    clustering.by_key(rows_given)  # loads the kernels
    benchmark.pedantic(lambda: clustering.by_key(rows_given), rounds=50, warmup_rounds=5)
    report(benchmark, rows)


@pytest.mark.parametrize("batch", BATCHES)
def test_copy_to_one_partition(benchmark: Any, batch: str) -> None:
    clustering = Clustering(BATCHES[batch].schema, [], 64)
    benchmark.pedantic(lambda: clustering.whole(BATCHES[batch], 0), rounds=50, warmup_rounds=5)
    report(benchmark, ROWS)
