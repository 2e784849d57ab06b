"""CPU per row of real workers on this machine: 2, 4 and 8 of them share one load, in batches of 8,192 rows.

The workers have more processes than the machine has cores, so the load leaves most of the machine idle. The comparison is of
the cost of a row, not of the highest rate. Each number of workers is measured several times, in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.arrivals import collect, sink
from benchmarks.paced import END, SCHEMA, START, Script
from spark_integration.query.query import Query
from spark_integration.query.start import start_query

BATCH_ROWS, SOURCES, PARTITIONS, KEYS = 8192, 8, 16, 100_000
#: The first seconds are not counted: connections are made, code is compiled, pages are touched for the first time.
WARM_UP_S = 4.0
#: Times that each number of workers is measured.
ROUNDS = 3


class Counts(flux.Aggregate):
    rows = flux.count()
    due_ns = flux.max("due_ns")


def run(sizes: Sequence[int], console: Console, rate: int, seconds: float, rounds: int = ROUNDS) -> dict[str, Any]:
    spark, _ = session.start(max(sizes), 2, 1024, idle_jvm=True)
    found: dict[int, list[float]] = {workers: [] for workers in sizes}
    exact = {"lost": 0, "duplicated": 0}
    try:
        for number in range(rounds):
            for workers in sizes if number % 2 == 0 else reversed(sizes):
                ns, exactness = _measure(spark, workers, rate, seconds)
                found[workers].append(ns)
                exact = {key: exact[key] + exactness[key] for key in exact}
                console.print(f"{workers} workers: {ns:.1f} ns of CPU per row")
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()
    medians = {workers: statistics.median(values) for workers, values in found.items()}
    return {
        "real_rows_per_s": rate,
        **{f"real_{workers}_workers_ns_per_row": round(ns, 2) for workers, ns in medians.items()},
        "real_most_over_fewest": round(medians[max(sizes)] / medians[min(sizes)], 3),
        **{f"real_{key}": value for key, value in exact.items()},
    }


def _measure(spark: SparkSession, workers: int, rate: int, seconds: float) -> tuple[float, dict[str, int]]:
    """Measure the CPU nanoseconds of all workers per row, and count lost and duplicated rows."""
    batches_per_s = rate / BATCH_ROWS
    script = Script(rate, SOURCES, KEYS, tick_s=SOURCES / batches_per_s)
    counts = flux.stage(key="key", partitions=PARTITIONS, output_mode="update")(Counts)
    arrivals = flux.stage(key="key", partitions=PARTITIONS)(sink(KEYS, PARTITIONS))
    source = flux.source(script.read, SCHEMA, partitions=SOURCES)
    query = start_query([arrivals(counts(source))], "scale", spark, keep_output=True, workers=workers)
    try:
        query.wait_until_running(120)
        script.say(START, time.time() + 1.0)
        time.sleep(1.0 + WARM_UP_S)
        before, began = _cpu_s(query), time.time()
        time.sleep(seconds)
        cpu_s, ended = _cpu_s(query) - before, time.time()
        script.say(END, script.batch_due_at(ended))
        exactness = collect(query, script).exactness(script.expected())
    finally:
        query.stop()
        script.clear()
    return cpu_s / (rate * (ended - began)) * 1e9, exactness


def _cpu_s(query: Query) -> float:
    """Return the CPU seconds of all workers, by their last heartbeats."""
    return sum(float(member.stats.get("cpu_s", 0.0)) for member in query.members().values())
