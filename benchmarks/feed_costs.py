"""Costs of further feeds while all links are well: bytes over links, and rows a second (design: feeds).

Bytes are those of all links of the network laboratory. Rows get a payload in a stage with two replicas and go on to a stage with
as many, so nearly all bytes are of the stream whose copies may be read. Rates are those of a count at full speed on the same
hosts, before packets go through the laboratory's forwarder, which is slower than the network.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks.arrivals import collect, sink
from benchmarks.failover import KEYS, WORKERS, saturated
from benchmarks.paced import END, SCHEMA, START, Script
from benchmarks.paths import count_bytes, laboratory, travelled
from benchmarks.timeline import Report
from spark_integration.query.start import start_query

if TYPE_CHECKING:
    from tests.netlab.lab import Lab

PARTITIONS, REPLICAS = 6, 2
#: Rows per second, and bytes that the stage adds to each.
RATE, PAYLOAD = 1_200, 8_192
#: Seconds before bytes are counted, and the seconds for which they are.
WARM_UP_S, COUNTED_S = 3.0, 8.0
#: Runs at full speed of each way of reading.
ROUNDS = 3
WIDE = pa.schema([("key", pa.int64()), ("due_ns", pa.int64()), ("rows", pa.int64()), ("payload", pa.binary())])
#: The number of different payloads. Each row has that of its key, so equal rows have equal ones on every replica.
PAYLOADS = 64


@functools.cache
def payloads() -> pa.Array:
    """Return payloads that no compression makes smaller."""
    chance = np.random.default_rng(7)
    return pa.array([chance.bytes(PAYLOAD) for _ in range(PAYLOADS)], pa.binary())


def widened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with a payload."""
    key = batch.column("key")
    payload = payloads().take(pa.array(key.to_numpy() % PAYLOADS))
    ones = pa.array(np.ones(batch.num_rows, np.int64))
    return pa.RecordBatch.from_arrays([key, batch.column("due_ns"), ones, payload], schema=WIDE)


def run(ways: Sequence[str], console: Console) -> Report:
    """Measure the cost of each way of reading. UsageError: there can be no laboratory here, with the reason."""
    with laboratory() as (lab, spark):
        found = measure(spark, lab, ways, console)
    for way, each in found.items():
        console.print(told(way, each), highlight=False)
    figures = {"benchmark": "paths", "calm": True, "payload_bytes": PAYLOAD, "rounds": ROUNDS, "feeds": found}
    wrong = any(each["lost"] or each["doubled"] for each in found.values())
    return Report(figures, failed="rows were lost or counted twice" if wrong else None)


def measure(spark: SparkSession, lab: Lab, ways: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    """Return rates and bytes of each way of reading. The first one is the base of the ratios."""
    rates: dict[str, list[float]] = {way: [] for way in ways}
    wrong = dict.fromkeys(ways, (0, 0))
    for number in range(ROUNDS):
        for way in ways:
            rate, exact = saturated(spark, REPLICAS, PARTITIONS, feeds=way)
            rates[way].append(rate)
            wrong[way] = wrong[way][0] + exact["lost"], wrong[way][1] + exact["duplicated"]
            console.print(f"  round {number + 1}, feeds={way}: {rate:,.0f} rows/s", highlight=False)
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        nbytes, exact = carried(spark, lab, way)
        found[way] = {
            "bytes": nbytes,
            "rows_per_s": round(float(np.median(rates[way]))),
            "lost": wrong[way][0] + exact["lost"],
            "doubled": wrong[way][1] + exact["duplicated"],
        }
    base = found[ways[0]]
    for each in found.values():
        each["bytes_ratio"] = round(each["bytes"] / base["bytes"], 2) if base["bytes"] else None
        each["ratio"] = round(each["rows_per_s"] / base["rows_per_s"], 2) if base["rows_per_s"] else None
    return found


def carried(spark: SparkSession, lab: Lab, way: str) -> tuple[int, dict[str, int]]:
    """Return the bytes that go over all links in ``COUNTED_S`` at a steady rate, and the exactness of the run."""
    count_bytes(lab)
    script = Script(RATE, WORKERS, KEYS)
    rows = flux.source(script.read, SCHEMA, partitions=WORKERS)
    wide: Any = flux.stage(key="key", partitions=PARTITIONS, replicas=REPLICAS, schema=WIDE)(widened)(rows)
    arrivals = flux.stage(key="key", partitions=WORKERS, replicas=REPLICAS)(sink(KEYS, PARTITIONS, newest=False))
    query = start_query([arrivals(wide)], f"paths {way}", spark, keep_output=True, workers=WORKERS, feeds=way)
    try:
        query.wait_until_running(60)
        script.say(START, time.time() + 1)
        time.sleep(1 + WARM_UP_S)
        before = travelled(lab)
        time.sleep(COUNTED_S)
        after = travelled(lab)
        script.say(END, script.batch_due_at(time.time() + 1))
        seen = collect(query, script)
        return after - before, seen.exactness(script.expected())
    finally:
        query.stop()
        script.clear()


def told(way: str, found: dict[str, Any]) -> str:
    """Put the figures of one way into words."""
    return (
        f"feeds={way}: {found['bytes'] / 1e6:.1f} MB over links ({found['bytes_ratio']} times), {found['rows_per_s']:,} rows/s "
        f"({found['ratio']} times); {found['lost']} lost, {found['doubled']} counted twice"
    )
