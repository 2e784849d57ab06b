"""Partitions move and workers come and go under a running query, and the answer stays exact.

The rows are the same for all: so many rounds of so many keys, each key with a sequence number, counted by the detector of
``test_faults``. The last rounds come only when a test has done what it came for, so that it always happens in
mid-stream, on a slow machine too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812
from test_faults import KEYS, PARTITIONS, ROWS, Detector, echo, rows_in, until

import flux
from spark_integration.query import Query

pytestmark = [pytest.mark.spark, pytest.mark.timeout(200), pytest.mark.usefixtures("nothing_left_behind")]

ROUNDS, LAST_ROUNDS = 300, 30
ROUND_S = 0.005
TOTAL = KEYS * PARTITIONS * ROUNDS
ROOT = Path(__file__).resolve().parents[2]


def rounds_until(gate: Path) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Rounds at a steady pace; the last ones when there is a file at ``gate``."""
    gate_path = str(gate)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        begun = time.time() - start * ROUND_S
        keys = pa.array(np.arange(KEYS) * PARTITIONS + partition)
        for number in range(start, ROUNDS):
            while time.time() < begun + number * ROUND_S:
                yield None
            while number == ROUNDS - LAST_ROUNDS and not os.path.exists(gate_path):
                yield None
            yield pa.record_batch([keys, pa.array(np.full(KEYS, number))], schema=ROWS)

    return read


def detect(replicas: int = 2, **options: Any) -> Any:
    """echo and Detector, with so many copies of each partition."""
    return lambda source: (
        flux.stage(key="key", partitions=3, replicas=replicas, name="Detector")(options.get("kind", Detector).operator)(
            flux.stage(key="key", partitions=4, replicas=replicas, name="echo")(echo.operator)(source)
        )
    )


@cache
def by_spark(session: Any) -> dict[int, tuple[int, int]]:
    """Spark's own answer: rows and last sequence number of every key."""
    rows = session.range(0, TOTAL, 1, 2).selectExpr(f"id % {KEYS * PARTITIONS} as key", f"id div {KEYS * PARTITIONS} as n")
    counted = rows.groupBy("key").agg(F.count("*").alias("rows"), F.max("n").alias("last")).collect()
    return {row.key: (row.rows, row.last) for row in counted}
