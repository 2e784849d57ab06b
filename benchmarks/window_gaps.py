"""Gaps in the results of windows when executors are killed, with replicas that share an order of steps and with others.

Rows come at a steady rate to one partition of a source, and carry the time at which they are due as their event time. Windows of
50 ms are counted in several partitions, and arrive at a sink of one partition. An executor is killed that neither reads the
source nor leads the sink: a source has one reader, and a sink one primary, with either order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.arrivals import Seen, collect, percentile, sink
from benchmarks.failover import CALM_S, KEYS, LOOK_S, WARM_UP_S, WORKERS, Fault, Faults
from benchmarks.paced import END, SCHEMA, START, Script
from benchmarks.timeline import Mark, Report, of_arrivals
from controller.replicas.membership import Member
from spark_integration.query.start import start_query

WINDOW, WINDOW_MS = "50 milliseconds", 50.0
TIMED = SCHEMA.append(pa.field("ts", pa.timestamp("us", "UTC")))


class WindowCounts(flux.Aggregate):
    rows = flux.count()
    due_ns = flux.max("due_ns")


class FaultsElsewhere(Faults):
    """Faults of workers that neither read the source nor lead the sink."""

    def victim(self, members: list[Member], number: int) -> Member:
        table = self.query._server.core.board.table
        assert table is not None
        sinks = len(table.stages) - 2  # behind it stands the stage that keeps the output
        kept = {table.sources[0][0], table.stages[sinks][0][0].worker, table.stages[sinks + 1][0][0].worker}
        free = [member for member in members if member.node not in kept]
        return (free or members)[number % len(free or members)]


def timed(script: Script) -> Any:
    """Make the reader of the script's rows with their event time."""

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        for batch in script.read(partition, start):
            if batch is None:
                yield None
                continue
            ts = pa.array(batch.column("due_ns").to_numpy() // 1000).view(TIMED.field("ts").type)
            yield pa.RecordBatch.from_arrays([*batch.columns, ts], schema=TIMED)

    return read


def flow(
    script: Script, order: str, replicas: int, partitions: int, window: str = WINDOW, sink_replicas: int | None = None
) -> Any:
    """Make the flow. ``sink_replicas`` None: as many as the count has."""
    counts: dict[str, Any] = {
        "key": "key",
        "window": flux.window("ts", window),
        "partitions": partitions,
        "order": order,
    }
    counted = flux.stage(**counts, replicas=replicas)(WindowCounts)
    kept: Any = sink(script.keys, partitions, newest=False)
    arrivals = flux.stage(key="key", partitions=1, replicas=sink_replicas or replicas)(kept)
    source: Any = flux.source(timed(script), TIMED, partitions=script.partitions)
    return arrivals(counted(source.withWatermark("ts", "0 seconds")))


def run(
    order: str, fault: str, rate: int, times: int, replicas: int, partitions: int, console: Console, **options: Any
) -> Report:
    spark, startup = session.start(
        WORKERS, 2, 1024, idle_jvm=True, **{"spark.task.maxFailures": 1000, "spark.excludeOnFailure.enabled": "false"}
    )
    try:
        return measure(spark, startup, order, fault, rate, times, replicas, partitions, console, **options)
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()


def measure(
    spark: SparkSession, startup: float, order: str, kind: str, rate: int, times: int, replicas: int, partitions: int,
    console: Console, **options: Any,
) -> Report:  # fmt: skip
    script = Script(rate, 1, KEYS)
    query = start_query(
        [flow(script, order, replicas, partitions)], "gaps", spark, keep_output=True, workers=WORKERS, **options
    )
    faults = FaultsElsewhere(query, kind, times, WORKERS, console, query.plan.settings.heartbeat_timeout + 1.0)
    try:
        query.wait_until_running(60)
        start_at = time.time() + 1.0
        script.say(START, start_at)
        time.sleep(1.0 + WARM_UP_S + CALM_S)
        faults.run()
        script.say(END, script.batch_due_at(time.time() + LOOK_S))
        query.wait_for_output()
        seen, expected = collect(query, script), script.expected()
    finally:
        query.stop()
        script.clear()
    gaps = [gap_ms(seen, each, partitions) for each in faults.done]
    for number, (each, gap) in enumerate(zip(faults.done, gaps, strict=True), 1):
        console.print(
            f"  {kind} {number}: worker {each.worker}, longest gap {gap:.0f} ms beyond the pace of the windows"
        )
    calm = Fault(start_at + WARM_UP_S, -1)
    result = {
        "benchmark": "failover", "order": order, "fault": kind, "rate": rate, "times": times, "replicas": replicas,
        "partitions": partitions, "spark_startup_s": round(startup, 2), "faults": len(faults.done),
        "gap_ms_max": percentile(gaps, 100), "gap_ms_p50": percentile(gaps, 50), "gap_ms": [round(gap, 1) for gap in gaps],
        "gap_before_ms": round(gap_ms(seen, calm, partitions, CALM_S), 1), **seen.exactness(expected),
    }  # fmt: skip
    marks = [Mark(each.at, each.at + (each.repaired_s or 0.0), f"{kind}, until whole again") for each in faults.done]
    line = of_arrivals("results", seen, marks, start_at, float(seen.at.max(initial=start_at)))
    wrong = result["lost"] or result["duplicated"]
    return Report(result, [line], failed="rows were lost or counted twice" if wrong else None)


def gap_ms(seen: Seen, fault: Fault, partitions: int, look_s: float = LOOK_S) -> float:
    """Compute the longest time without a result of one partition around a fault, beyond the distance of the windows."""
    spans = [(fault.at - 0.1, fault.at + look_s)]
    gaps = [seen.longest_gap_ms(partition, *span) for span in spans for partition in range(partitions)]
    return float(np.max(gaps)) - WINDOW_MS
