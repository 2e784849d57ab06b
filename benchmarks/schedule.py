"""The order of checkpoints: each partition in its turn, or first the one whose recovery would take longest per byte to copy
(MIN-MAX).

Partitions have very unequal rates, and states of unequal sizes that are independent of the rates. The bytes that a worker may
send per second are too few for all checkpoints that are due. After a while the worker whose primaries take the most rows is
killed, and the time counts until all of these partitions give fresh rows again. Each kill has a query of its own, because it
changes the primaries; the two schedules take turns, with the same rows and the same time before the kill.

The operator sleeps for each row in place of work. So the time to repeat rows depends less on other load of the machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.arrivals import Seen, collect, percentile, sink
from benchmarks.failover import Faults
from benchmarks.operating import Operator
from benchmarks.paced import END, SCHEMA, START, Script
from benchmarks.timeline import Line, Mark, Report, of_arrivals
from controller.replicas.membership import Member
from flux.worker.checkpoint_scheduler import POLICIES
from partitioning.clustering import hash_columns, partition_ids
from spark_integration.query.start import start_query

WORKERS = 3
#: State of the partitions in MiB. Each size belongs to three partitions that begin on different workers.
SIZES_MIB = (4, 8, 2, 8, 1, 4, 8, 2)
PARTITIONS = WORKERS * len(SIZES_MIB)
#: The k-th partition gets rows in proportion to 1 / k ** ZIPF.
ZIPF = 1.2
#: Time of a row, and time between two batches of a source.
ROW_S, TICK_S = 0.0025, 0.25
INTERVAL_S = 0.25
#: A row is fresh if it comes within this time.
FRESH_MS = 500.0
#: The kill comes at a random time between the first two, and after it rows flow for the third.
FIRST_S, LAST_S, SETTLE_S = 12.0, 22.0, 10.0
SEED = 14


def names(partitions: int) -> np.ndarray:
    """Find one key of each partition."""
    keys = np.arange(partitions * 64)
    ids = partition_ids(hash_columns([pa.array(keys)]), partitions)
    return np.array([int(np.flatnonzero(ids == partition)[0]) for partition in range(partitions)])


@dataclass
class Unequal(Script):
    """A script that draws partitions, the first most often, and gives their keys. ``keys`` is the number of partitions."""

    names: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def _draw(self, partition: int, first: int, rows: int) -> np.ndarray:
        drawn: np.ndarray = self.names[super()._draw(partition, first, rows)]
        return drawn

    def expected(self) -> np.ndarray:
        end = self.said(END)
        assert end is not None
        counts = np.zeros(int(self.names.max()) + 1, np.int64)
        for partition in range(self.partitions):
            drawn = self._draw(partition, 0, self._first_row(int(end), None))
            counts += np.bincount(drawn, minlength=len(counts))
        return counts


class Laborious(flux.Operator):
    """Operator that passes rows on, each after a while. Its state never changes, and is part of each checkpoint as a whole."""

    schema = pa.schema([("key", pa.int64()), ("due_ns", pa.int64()), ("rows", pa.int64())])

    def __init__(self, row_s: float) -> None:
        self.row_s = row_s

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state = np.zeros(SIZES_MIB[context.partition // WORKERS] << 20, np.uint8)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(batch.num_rows * self.row_s)
        ones = pa.array(np.ones(batch.num_rows, np.int64))
        return pa.record_batch([batch.column("key"), batch.column("due_ns"), ones], schema=self.schema)

    def snapshot(self) -> Any:
        return self.state

    def restore(self, snapshot: Any) -> None:
        self.state = snapshot

    def state_bytes(self) -> int:
        return self.state.nbytes


@dataclass
class Busiest(Faults):
    """Fault that kills the worker whose primaries take the most rows, after ``wait_s``. ``led`` has their partitions."""

    wait_s: float = 0.0
    led: list[int] = field(default_factory=list)

    def victim(self, members: list[Member], number: int) -> Member:
        time.sleep(self.wait_s)
        leads: dict[int, list[int]] = {member.node: [] for member in members}
        with Operator(self.query, "Laborious") as operator:
            for partition, workers in operator.placement().items():
                leads[workers[0]].append(partition)
        weights = 1 / np.arange(1, PARTITIONS + 1) ** ZIPF
        busiest = max(members, key=lambda member: float(weights[leads[member.node]].sum()))
        self.led = leads[busiest.node]
        return busiest


def recovery_s(seen: Seen, killed_at: float, led: list[int]) -> float:
    """Compute the time until each lost partition has given a row that was due after the loss, and in time. Infinite: one never
    has."""
    found = []
    for partition in led:
        fresh = (seen.partition == partition) & (seen.due >= killed_at) & (seen.age_ms <= FRESH_MS)
        found.append(float(seen.at[fresh].min(initial=np.inf)) - killed_at)
    return max(found, default=np.inf)


@dataclass(frozen=True)
class Kill:
    """One kill. ``recovered_s`` is None if the query was not whole in time to kill a worker, or a partition gave no fresh row
    again."""

    recovered_s: float | None
    rows: int
    lost: int
    duplicated: int


def run(times: int, rate: int, mb_per_s: float, console: Console) -> Report:
    """Run the benchmark. ``times`` are the workers killed for each schedule; ``mb_per_s`` the MiB that a worker may send per
    second."""
    spark, startup = session.start(
        WORKERS, 2, 1024, idle_jvm=True, **{"spark.task.maxFailures": 1000, "spark.excludeOnFailure.enabled": "false"}
    )
    random = np.random.default_rng(SEED)
    kills: dict[str, list[Kill]] = {policy: [] for policy in POLICIES}
    lines: list[Line] = []
    try:
        for number in range(times):
            wait_s = float(random.uniform(FIRST_S, LAST_S))
            for policy in list(POLICIES)[:: 1 if number % 2 == 0 else -1]:
                kill, line = _kill(spark, policy, rate, mb_per_s, wait_s, console)
                kills[policy].append(kill)
                lines.append(line)
                took = "not recovered" if kill.recovered_s is None else f"recovered after {kill.recovered_s:.2f} s"
                console.print(f"  {policy}, kill {number + 1} of {times}: {took}")
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()
    result: dict[str, Any] = {"benchmark": "schedule", "rate": rate, "partitions": PARTITIONS, "kills": times}
    result |= {"state_mb": WORKERS * sum(SIZES_MIB), "mb_per_s": mb_per_s, "spark_startup_s": round(startup, 2)}
    return Report(result | summary(kills), lines, failed=why_failed(kills))


def _kill(
    spark: SparkSession, policy: str, rate: int, mb_per_s: float, wait_s: float, console: Console
) -> tuple[Kill, Line]:
    keys = names(PARTITIONS)
    script = Unequal(rate, WORKERS, PARTITIONS, zipf=ZIPF, tick_s=TICK_S, names=keys)
    arrived = sink(int(keys.max()) + 1, PARTITIONS, newest=False)
    worked = flux.stage(key="key", partitions=PARTITIONS, replicas=2, recovery="standby")(Laborious)
    arrivals = flux.stage(key="key", partitions=WORKERS, replicas=2)(arrived)
    source = flux.source(script.read, SCHEMA, partitions=WORKERS)
    query = start_query(
        [arrivals(worked(row_s=ROW_S)(source))], "schedule", spark, keep_output=True, workers=WORKERS,
        checkpoint_policy=policy, checkpoint_interval=f"{INTERVAL_S}s", balance_enabled=False,
        checkpoint_max_bytes_per_second=int(mb_per_s * (1 << 20)),
    )  # fmt: skip
    faults = Busiest(query, "kill-worker", 1, WORKERS, console, 0.0, wait_s=wait_s)
    try:
        query.wait_until_running(60)
        start_at = time.time() + 1.0
        script.say(START, start_at)
        faults.run()
        script.say(END, script.batch_due_at(time.time() + SETTLE_S))
        seen = collect(query, script, int(keys.max()) + 1)
        exact = seen.exactness(script.expected())
    finally:
        query.stop()
        script.clear()
    line = of_arrivals(policy, seen, [], start_at, float(seen.at.max(initial=start_at)))
    recovered = np.inf
    for fault in faults.done:
        line.marks.append(Mark(fault.at, fault.at, "kill-worker"))
        recovered = recovery_s(seen, fault.at, faults.led)
    return Kill(recovered if np.isfinite(recovered) else None, **exact), line


def summary(kills: dict[str, list[Kill]]) -> dict[str, Any]:
    """Make a row for each schedule, and the ratio of the slowest recoveries, in turn over MIN-MAX."""
    rows = [_row(policy, found) for policy, found in kills.items()]
    p95 = {row["schedule"]: row["p95_s"] for row in rows}
    longer = round(p95["round-robin"] / p95["min-max"], 2) if all(p95.values()) else None
    return {"schedules": rows, "p95_ratio": longer}


def _row(policy: str, kills: list[Kill]) -> dict[str, Any]:
    took = [kill.recovered_s for kill in kills if kill.recovered_s is not None]
    row: dict[str, Any] = {"schedule": policy, "recovered": len(took)}
    row |= {name: percentile(took, percent) for name, percent in (("p50_s", 50), ("p95_s", 95), ("max_s", 100))}
    row |= {name: sum(getattr(kill, name) for kill in kills) for name in ("rows", "lost", "duplicated")}
    return row | {"recovered_s": [round(each, 2) for each in took]}


def why_failed(kills: dict[str, list[Kill]]) -> str | None:
    """Return the reason why the run counts as failed; None: no row was lost or duplicated, and all partitions came back after
    every kill."""
    for policy, found in kills.items():
        lost, duplicated = sum(kill.lost for kill in found), sum(kill.duplicated for kill in found)
        if lost or duplicated:
            return f"{policy}: {lost} rows lost, {duplicated} duplicated, 0 are allowed"
        missing = sum(kill.recovered_s is None for kill in found)
        if missing:
            return f"{policy}: after {missing} of {len(found)} kills not all partitions gave rows within {FRESH_MS:g} ms again"
    return None
