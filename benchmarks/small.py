"""Small batches at a steady rate, which no source joins: the cost of a batch, however few rows it has.

Rows pass a keyed count and arrive at a sink, both with ``replicas`` replicas. Every batch becomes due as a whole; a source that
is late gives the batches that are due one after the other, as they are. The age of a row counts from its due time. Three
questions: the age of rows and the CPU time of workers at one rate; without a rate, the highest rate at which at most one row in
a hundred gets older than a bound; and with ``hold``, the time until rows are through that were all kept back for ``hold``
seconds.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.arrivals import Seen, collect, sink
from benchmarks.paced import END, HOLD, SCHEMA, START, Script
from benchmarks.timeline import Line, Report, of_arrivals
from spark_integration.query.query import Query
from spark_integration.query.start import start_query

KEYS = 10_000
EXECUTORS = 3
#: The first seconds are not counted: connections are made, code is compiled, pages are touched for the first time.
WARM_UP_S = 3.0
#: Time between two looks of sources for files of the driver. A look with every small batch would be a good part of the
#: measurement.
LOOK_S = 0.02
#: Rates to try: the first, and the ratio of failed to passed rate at which the search ends.
FIRST_RATE, CLOSE = 500.0, 1.1


class Counts(flux.Aggregate):
    rows = flux.count()
    due_ns = flux.max("due_ns")


def run(
    batch_rows: int,
    batches_per_s: float | None,
    seconds: float,
    sources: int,
    partitions: int,
    replicas: int,
    hold_s: float,
    p99_ms: float,
    console: Console,
    **options: Any,
) -> Report:
    spark, startup = session.start(EXECUTORS, 2, 1024, idle_jvm=True)
    result: dict[str, Any] = {"benchmark": "small", "batch_rows": batch_rows, "sources": sources}
    result |= {"partitions": partitions, "replicas": replicas, "spark_startup_s": round(startup, 2)}

    def at(rate: float) -> tuple[dict[str, Any], Line]:
        return _measure(spark, batch_rows, rate, seconds, sources, partitions, replicas, hold_s, console, **options)

    try:
        if batches_per_s is not None:
            figures, line = at(batches_per_s)
        else:
            figures, line = _fastest(at, p99_ms)
            result["p99_ms_bound"] = p99_ms
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()
    return Report(result | figures, [line], failed=None if figures else f"no rate keeps p99 below {p99_ms:g} ms")


def _fastest(at: Any, p99_ms: float) -> tuple[dict[str, Any], Line]:
    """Search the highest rate whose 99th percentile is below the bound: double the rate until one fails, then try between the
    two."""
    passed, failed = 0.0, 0.0
    best: tuple[dict[str, Any], Line] | None = None
    rate = FIRST_RATE
    while not (passed and failed) or failed / passed > CLOSE:
        found = at(rate)
        if found[0]["p99_ms"] <= p99_ms:
            passed, best = rate, found
        else:
            failed = rate
            if best is None and rate < FIRST_RATE / 16:
                return {}, found[1]
        rate = np.sqrt(passed * failed) if passed and failed else rate * 2 if passed else rate / 2
    assert best is not None
    return best


def _measure(
    spark: SparkSession,
    batch_rows: int,
    batches_per_s: float,
    seconds: float,
    sources: int,
    partitions: int,
    replicas: int,
    hold_s: float,
    console: Console,
    **options: Any,
) -> tuple[dict[str, Any], Line]:
    script = Script(batches_per_s * batch_rows, sources, KEYS, tick_s=sources / batches_per_s, look_s=LOOK_S)
    assert script.per_batch == batch_rows
    counts = flux.stage(key="key", partitions=partitions, replicas=replicas, output_mode="update")(Counts)
    arrivals = flux.stage(key="key", partitions=EXECUTORS, replicas=replicas)(sink(KEYS, partitions))
    source = flux.source(script.read, SCHEMA, partitions=sources)
    query = start_query([arrivals(counts(source))], "small", spark, keep_output=True, workers=EXECUTORS, **options)
    try:
        query.wait_until_running(60)
        script.say(START, time.time() + 1.0)
        time.sleep(1.0 + WARM_UP_S)
        if hold_s:
            script.say(HOLD, time.time() + hold_s)
            time.sleep(hold_s)
        before, begin = _cpu_s(query), time.time()
        time.sleep(seconds)
        span = (begin, time.time())
        cores = (_cpu_s(query) - before) / (span[1] - span[0])
        script.say(END, script.batch_due_at(time.time() + 10 * LOOK_S))
        seen = collect(query, script)
        exactness = seen.exactness(script.expected())
    finally:
        query.stop()
        script.clear()
    figures: dict[str, Any] = {
        "batches_per_s": round(batches_per_s),
        "rows_per_s": round(batches_per_s * batch_rows),
        **exactness,
    }
    figures |= ages(seen, *span) | {"cores": round(cores, 2)}
    if hold_s:
        figures |= {"hold_s": hold_s, "worked_off_s": worked_off_s(seen, begin)}
    console.print(f"  {figures}", highlight=False)
    return figures, of_arrivals("rows", seen, [], *span)


def _cpu_s(query: Query) -> float:
    """Return the CPU seconds of all workers, by their last heartbeats."""
    return sum(float(member.stats.get("cpu_s", 0.0)) for member in query.members().values())


def ages(seen: Seen, start: float, end: float) -> dict[str, float]:
    """Compute the ages of rows that were due in this span. Each counts with the age of the oldest row that arrived with it."""
    due = seen.due_between(start, end)
    order = np.argsort(seen.age_ms[due])
    rows = np.cumsum(seen.rows[due][order])
    if not len(rows):
        raise AssertionError("no row arrived that was due while it was measured")
    at = np.searchsorted(rows, [0.5 * rows[-1], 0.99 * rows[-1], rows[-1]])
    p50, p99, most = seen.age_ms[due][order][at].round(3).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": most}


def worked_off_s(seen: Seen, released: float) -> float:
    """Return the time after the release at which the last row arrived that had been held back."""
    held = (seen.due > 0) & (seen.due < released)
    return round(float(seen.at[held].max()) - released, 3)
