"""Twenty minutes of event time at ten times the speed, with keys that never come back: memory has to stay flat.

    make soak-windows                          # two minutes
    make soak-windows MINUTES=200 SPEED=20

Windows, sessions and a ``KeyedOperator`` with timers read one source, in which each row has a key of its own; they have two
replicas, a standby, and neither. The state of each stage and the memory of the workers are noted all the time: those of the last
quarter may hardly be above those of the second one. Each row is counted once by each of the three. Exit code 0: all of this
holds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from controller.operate.client import QueryClient, choose
from spark_integration.query.start import start_query

#: Seconds of event time in a batch, and rows of a batch.
BATCH_S, BATCH_ROWS = 1, 500
SOURCES, PARTITIONS, WORKERS = 2, 4, 2
BASE_US = 1_700_000_000_000_000
STAGES = ("windows", "sessions", "keyed")
GAP = "20 seconds"
GAP_US = 20_000_000
#: Growth from the second quarter of a run to the last one: caches of the allocator, and windows that have just begun.
STATE_GROWTH, MEMORY_GROWTH = 1.25, 1.1
WAIT_S = 300.0

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])


def paced(batches: int, speed: float) -> Any:
    """Make a source whose batches are due one after the other. Rows are out of order by up to two seconds."""

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        began = time.time() - start * BATCH_S / speed
        for number in range(start, batches):
            while time.time() < began + number * BATCH_S / speed:
                yield None
            random = np.random.default_rng([partition, number])
            times = BASE_US + number * BATCH_S * 1_000_000 + random.integers(-1_000_000, 1_000_000, BATCH_ROWS)
            keys = (number * BATCH_ROWS + np.arange(BATCH_ROWS)) * SOURCES + partition
            yield pa.RecordBatch.from_arrays(
                [pa.array(keys), pa.array(times).view(SCHEMA.field(1).type)], schema=SCHEMA
            )

    return read


class Count(flux.Aggregate):
    n = flux.count()


class Visits(flux.KeyedOperator):
    """Gives a key when it has not come for the gap, and forgets it."""

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
        self.n += int(batch.column("n").to_numpy().sum())

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([pa.array([self.stage]), pa.array([self.n])], schema=self.schema)


def flows(batches: int, speed: float) -> list[Any]:
    source: Any = flux.source(paced(batches, speed), SCHEMA, SOURCES, "visits")
    rows = source.withWatermark("ts", "5 seconds")
    hopping = flux.window("ts", "30 seconds", "10 seconds")
    stages = {
        "windows": flux.stage(key="key", partitions=PARTITIONS, replicas=2, window=hopping, name="windows")(Count),
        "sessions": flux.stage(
            key="key", partitions=PARTITIONS, replicas=2, recovery="standby", window=flux.session_window("ts", GAP),
            name="sessions",
        )(Count),
        "keyed": flux.stage(key="key", partitions=PARTITIONS, schema="key BIGINT, n BIGINT", name="keyed")(Visits),
    }  # fmt: skip
    return [flux.stage(partitions=1, name=total_of(name))(Total)(name)(stage(rows)) for name, stage in stages.items()]


def total_of(stage: str) -> str:
    return f"total of {stage}"


def grown(values: list[float]) -> float:
    """Return how many times the median of the last quarter is that of the second one."""
    quarter = len(values) // 4
    before, after = np.median(values[quarter : 2 * quarter]), np.median(values[-quarter:])
    return float(after / max(before, 1.0))


def measured(spark: SparkSession, batches: int, speed: float, console: Console) -> list[str]:
    """Run the query, and return the faults that were found."""
    query = start_query(flows(batches, speed), "soak", spark, keep_output=True, workers=WORKERS, progress_interval="1s")
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
            for stage in STAGES:
                held = client.partitions(stage).replicas
                noted.setdefault(stage, []).append(sum(replica.state_bytes for replica in held))
            noted.setdefault("workers", []).append(sum(worker["rssBytes"] for worker in progress["workers"]))
            latest = ", ".join(f"{name} {values[-1] / (1 << 20):.1f} MiB" for name, values in noted.items())
            console.print(f"{progress['totalInputRows']:>12,} rows, {latest}")
        query.wait_for_output()
        totals = {row.stage: row.n for stage in STAGES for row in query.toDF(total_of(stage)).collect()}
    finally:
        client.close()
        query.stop()
    given = batches * BATCH_ROWS * SOURCES
    expected = dict(zip(STAGES, (3 * given, given, given), strict=True))  # a row is in three windows
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
