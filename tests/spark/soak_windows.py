"""Twenty minutes of event time at ten times the speed, with keys that never come back: memory has to stay flat.

    make soak-windows                          # two minutes
    make soak-windows MINUTES=200 SPEED=20

Windows, sessions, a ``KeyedOperator`` with timers, a join, an as-of join, a deduplication, ranks of windows and last rows read
one source, in which each row has a key of its own; half of the keys have a row in a second source two seconds earlier, with
which both joins match them. Stages have two replicas, a standby, and neither. The state of each stage and the memory of the
workers are noted all the time: those of the last quarter may hardly be above those of the second one. Each row is counted once by
each stage. Exit code 0: all of this holds.

None of it depends on speed: a slow machine takes longer, and little of the input waits, because logs are small and no source is
far ahead of the other one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from rich.console import Console

import flux
from benchmarks import session
from controller.operate.client import QueryClient, choose
from spark_integration.query.start import start_query

#: Seconds of event time in a batch, and rows of a batch.
BATCH_S, BATCH_ROWS = 1, 500
SOURCES, PARTITIONS, WORKERS = 2, 4, 2
BASE_US = 1_700_000_000_000_000
GAP = "20 seconds"
GAP_US = 20_000_000
#: The stages, and how many times each counts a row: a row is in three windows, and four rows are duplicates of each other.
COUNTED = {
    "windows": 3, "sessions": 1, "keyed": 1, "joined": 1, "as_of": 1, "once": 0.25, "best": 1, "last": 1
}  # fmt: skip
#: Little input waits on its way, and no source is further ahead of the other one than this in event time.
OPTIONS = {"source_log_bytes": "256k", "credit_max_bytes": "4m", "watermark_drift": "20s"}
#: Growth from the second quarter of a run to the last one: caches of the allocator, and windows that have just begun.
STATE_GROWTH, MEMORY_GROWTH = 1.25, 1.1
WAIT_S = 1200.0

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
BOOKINGS = pa.schema([("key", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


def paced(batches: int, speed: float, schema: pa.Schema, each: int, later_us: int) -> Any:
    """Make a source whose batches are due one after the other. Rows are out of order by up to two seconds. One row in ``each`` is
    given, its time ``later_us`` later."""

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        began = time.time() - start * BATCH_S / speed
        for number in range(start, batches):
            while time.time() < began + number * BATCH_S / speed:
                yield None
            random = np.random.default_rng([partition, number])
            times = BASE_US + number * BATCH_S * 1_000_000 + random.integers(-1_000_000, 1_000_000, BATCH_ROWS)
            keys = (number * BATCH_ROWS + np.arange(BATCH_ROWS)) * SOURCES + partition
            columns = pa.array(keys[::each]), pa.array(times[::each] + later_us).view(schema.field(1).type)
            yield pa.RecordBatch.from_arrays(list(columns), schema=schema)

    return read


class Count(flux.Aggregate):
    n = flux.count()


class Visits(flux.KeyedOperator):
    """An operator that gives a key when the key has not come for the gap, and then forgets it."""

    state_schema = "n BIGINT"

    def on_rows(self, key: Any, rows: list[Any], state: Any) -> None:
        state.n = (state.n or 0) + len(rows)
        state.event_timer = round(max(row.ts for row in rows).timestamp() * 1e6) + GAP_US

    def on_key_event_timer(self, key: Any, state: Any) -> Any:
        state.clear()
        return *key, state.n


class Total(flux.Operator):
    """The sum of all rows, given at the end of the input."""

    schema = pa.schema([("stage", pa.string()), ("n", pa.int64())])

    def __init__(self, stage: str) -> None:
        self.stage, self.n = stage, 0

    def process(self, batch: pa.RecordBatch) -> None:
        counts = "n" in batch.schema.names
        self.n += int(batch.column("n").to_numpy().sum()) if counts else batch.num_rows

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([pa.array([self.stage]), pa.array([self.n])], schema=self.schema)


def flows(batches: int, speed: float) -> list[Any]:
    visits: Any = flux.source(paced(batches, speed, SCHEMA, 1, 0), SCHEMA, SOURCES, "visits")
    others: Any = flux.source(paced(batches, speed, BOOKINGS, 2, -2_000_000), BOOKINGS, SOURCES, "bookings")
    rows, bookings = visits.withWatermark("ts", "5 seconds"), others.withWatermark("at", "5 seconds")
    soon = F.expr("v.key = b.key AND v.ts BETWEEN b.at AND b.at + INTERVAL 5 SECONDS")
    ten = flux.window("ts", "10 seconds")
    stages = {
        "windows": flux.stage(key="key", window=flux.window("ts", "30 seconds", "10 seconds"))(Count)(rows),
        "sessions": flux.stage(key="key", window=flux.session_window("ts", GAP))(Count)(rows),
        "keyed": flux.stage(key="key", schema="key BIGINT, n BIGINT")(Visits)(rows),
        "joined": rows.alias("v").join(bookings.alias("b"), soon, "left"),
        "as_of": flux.asof_join(rows, bookings, on="key", tolerance="10 seconds", how="left"),
        "once": rows.selectExpr("key div 4 AS visit", "ts").dropDuplicatesWithinWatermark(["visit"]),
        "best": flux.top(rows, 1, key="key", by="ts DESC", window=ten),
        "last": flux.last(rows, key="key", by="ts", ttl="10 seconds"),
    }
    twice, standby, once = {"replicas": 2}, {"replicas": 2, "recovery": "standby"}, {"replicas": 1}
    copies: dict[str, dict[str, Any]] = {
        "windows": twice, "sessions": standby, "keyed": once, "joined": twice, "as_of": standby, "once": twice,
        "best": once, "last": standby,
    }  # fmt: skip
    return [
        counted(name, flow.withStage(name=name, partitions=PARTITIONS, **copies[name])) for name, flow in stages.items()
    ]


def counted(name: str, flow: Any) -> Any:
    """Count the rows of a stage at the end."""
    if name == "joined":
        flow = flow.select("v.key", "ts")
    return flux.stage(partitions=1, name=total_of(name))(Total)(name)(flow)


def total_of(stage: str) -> str:
    return f"total of {stage}"


def grown(values: list[float]) -> float:
    """Return how many times the median of the last quarter is that of the second one."""
    quarter = len(values) // 4
    before, after = np.median(values[quarter : 2 * quarter]), np.median(values[-quarter:])
    return float(after / max(before, 1.0))


def measured(spark: SparkSession, batches: int, speed: float, console: Console) -> list[str]:
    """Run the query, and return the faults that were found."""
    query = start_query(
        flows(batches, speed), "soak", spark, keep_output=True, workers=WORKERS, progress_interval="1s", **OPTIONS
    )
    noted: dict[str, list[float]] = {}
    client = QueryClient(choose(query.id))
    try:
        end = time.monotonic() + batches * BATCH_S / speed + WAIT_S
        before: Any = None
        while query.phase in ("starting", "running") and time.monotonic() < end:
            time.sleep(0.5)
            progress = query.lastProgress
            if progress is None or progress is before or not progress["totalInputRows"]:
                continue
            before = progress
            for stage in COUNTED:
                held = client.partitions(stage).replicas
                noted.setdefault(stage, []).append(sum(replica.state_bytes for replica in held))
            noted.setdefault("workers", []).append(sum(worker["rssBytes"] for worker in progress["workers"]))
            latest = ", ".join(f"{name} {values[-1] / (1 << 20):.1f} MiB" for name, values in noted.items())
            console.print(f"{progress['totalInputRows']:>12,} rows, {latest}")
        query.wait_for_output()
        totals = {row.stage: row.n for stage in COUNTED for row in query.toDF(total_of(stage)).collect()}
    finally:
        client.close()
        query.stop()
    given = batches * BATCH_ROWS * SOURCES
    expected = {stage: round(times * given) for stage, times in COUNTED.items()}
    wrong = [] if totals == expected else [f"counted were {totals}, expected {expected}"]
    for name, values in noted.items():
        limit = MEMORY_GROWTH if name == "workers" else STATE_GROWTH
        growth = grown(values)
        console.print(f"{name}: {growth:.2f} times as much at the end as in the second quarter")
        if growth > limit:
            wrong.append(f"{name} has grown {growth:.2f} times, and {limit} times is the limit")
    return wrong


def main(
    minutes: Annotated[float, typer.Option(min=1, help="Minutes of event time.")] = 20,
    speed: Annotated[float, typer.Option(min=1, help="Seconds of event time in a second.")] = 10,
) -> None:
    console = Console(highlight=False)
    spark, _ = session.start(WORKERS, 2, idle_jvm=True)
    try:
        wrong = measured(spark, round(minutes * 60 / BATCH_S), speed, console)
    finally:
        spark.stop()
    for each in wrong:
        console.print(f"failed: {each}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
