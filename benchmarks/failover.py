"""What a fault looks like from the outside: rows flow at a steady rate while workers are killed or stopped.

Rows pass a keyed stage with ``replicas`` copies and arrive at a sink with as many. Every row carries the time at which
it was due. The sink notes for each step when it was applied (the step's time, the same on every replica, so that the
notes survive faults too) and the newest count of each key; at the end the counts are compared with those computed
from the source alone: what is missing was lost, what is too much was counted twice.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from rich.console import Console

import flux
from benchmarks import session
from controller.membership import Member
from spark_integration.egress import fetch_all
from spark_integration.query import Query, start_query

SCHEMA = pa.schema([("key", pa.int64()), ("due_ns", pa.int64())])
KEYS = 10_000
#: Rows of one batch of a source, due together.
TICK_S = 0.01
WARM_UP_S = 3.0
#: How long after a fault outputs are looked at for a gap, and how long to wait for repair.
LOOK_S, REPAIR_S = 4.0, 30.0
#: Steady flow between the end of a repair and the next fault.
CALM_S = 2.0
FAULTS = ("kill-executor", "kill-worker", "pause")


def keys_of(partition: int, first: int, rows: int) -> np.ndarray:
    """Keys of rows ``first`` and following of a source partition: a fixed sequence, so that they can be made again."""
    number = np.arange(first, first + rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(partition)
    return ((number >> np.uint64(33)) % np.uint64(KEYS)).astype(np.int64)


def paced(rate: float, partitions: int, start_at: float, end_file: str):  # type: ignore[no-untyped-def]
    """A source that seeks: batch n has the rows that are due between n and n + 1 ticks after ``start_at``. It ends with
    the batch whose number ``end_file`` has, once it is there."""
    per_batch = max(round(rate / partitions * TICK_S), 1)

    def read_paced(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        for number in itertools.count(start):
            due = start_at + (number + 1) * TICK_S
            while time.time() < due:
                yield None
            if os.path.exists(end_file) and number >= int(Path(end_file).read_text()):
                return
            keys = keys_of(partition, number * per_batch, per_batch)
            due_ns = np.full(per_batch, round(due * 1e9))
            yield pa.RecordBatch.from_arrays([pa.array(keys), pa.array(due_ns)], schema=SCHEMA)

    return read_paced


class Counts(flux.Aggregate):
    rows = flux.count()
    due_ns = flux.max("due_ns")


class Arrivals(flux.Operator):
    """Times and ages of arriving steps, and the newest count of every key."""

    schema = pa.schema([("kind", pa.string()), ("a", pa.int64()), ("b", pa.int64())])

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.newest = np.zeros(KEYS, np.int64)
        self.steps: list[tuple[int, int]] = []  # when applied, when the oldest of its rows was due; in ns

    def process(self, batch: pa.RecordBatch) -> None:
        keys, rows = batch.column("key").to_numpy(), batch.column("rows").to_numpy()
        np.maximum.at(self.newest, keys, rows)
        self.steps.append((round(self.context.now * 1e9), int(batch.column("due_ns").to_numpy().min())))

    def finish(self) -> Iterator[pa.RecordBatch]:
        used = np.flatnonzero(self.newest)
        yield self._rows("count", used, self.newest[used])
        steps = np.array(self.steps, np.int64).reshape(-1, 2)
        yield self._rows("step", steps[:, 0], steps[:, 1])

    def _rows(self, kind: str, a: np.ndarray, b: np.ndarray) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array([kind] * len(a)), pa.array(a), pa.array(b)], schema=self.schema)

    def snapshot(self) -> Any:
        return self.newest, list(self.steps)

    def restore(self, snapshot: Any) -> None:
        self.newest, self.steps = snapshot[0].copy(), list(snapshot[1])


@dataclass
class Fault:
    at: float
    worker: int
    repaired_s: float | None = None


@dataclass
class Faults:
    """Injects faults one after the other, each when the query is whole again."""

    query: Query
    kind: str
    times: int
    console: Console
    pause_s: float
    done: list[Fault] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)

    def run(self) -> None:
        for number in range(self.times):
            if not self._whole(REPAIR_S) or self.query.phase != "running":
                return
            time.sleep(CALM_S)
            members = sorted(self.query.members().values(), key=lambda member: member.about.index)
            victim = members[number % len(members)]
            fault = Fault(time.time(), victim.node)
            self._strike(victim)
            self.done.append(fault)
            # Workers of one executor are noticed one by one, and between them all may look whole.
            gone = {m.node for m in members if m.about.executor == victim.about.executor}
            gone = gone if self.kind == "kill-executor" else {victim.node}
            self._until(lambda gone=gone: not gone & self.query.members().keys(), REPAIR_S)
            if self._whole(REPAIR_S):
                fault.repaired_s = time.time() - fault.at
            took = self._why_not() if fault.repaired_s is None else f"whole again after {fault.repaired_s:.2f} s"
            self.console.print(f"  {self.kind} {number + 1} of {self.times}: worker {victim.node}, {took}")

    def _why_not(self) -> str:
        progress = self.query.lastProgress or {}
        where = {member.node: member.about.executor for member in self.query.members().values()}
        low, busy = progress.get("underReplicated"), progress.get("repairsUnderWay")
        return f"not whole after {REPAIR_S:g} s: too few copies of {low}, under way {busy}, workers {where}"

    def _strike(self, victim: Member) -> None:
        pid = victim.about.pid
        if self.kind == "kill-executor":
            os.kill(int(victim.about.executor.rpartition(":")[2]), signal.SIGKILL)
        elif self.kind == "kill-worker":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            self.stopped.append(pid)
            threading.Timer(self.pause_s, self._go_on, [pid]).start()

    def _go_on(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    def _whole(self, limit_s: float) -> bool:
        return self._until(self.query.is_whole, limit_s)

    @staticmethod
    def _until(condition: Any, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


def run(
    fault: str, rate: int, times: int, replicas: int, partitions: int, peer: bool, console: Console, **options: Any
) -> dict[str, Any]:
    spark, startup = session.start(
        3, 2, 1024, **{"spark.task.maxFailures": 1000, "spark.excludeOnFailure.enabled": "false"}
    )
    try:
        result: dict[str, Any] = {"benchmark": "failover", "fault": fault, "rate": rate, "times": times}
        result |= {"replicas": replicas, "partitions": partitions, "spark_startup_s": round(startup, 2)}
        result |= _measure(spark, fault, rate, times, replicas, partitions, console, **options)
        if peer:
            result["peer_gap_ms_max"] = measure_peer(spark, rate, console)
            result["ratio"] = round(result["peer_gap_ms_max"] / result["gap_ms_max"], 1)
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()
    return result


def _measure(
    spark: SparkSession,
    kind: str,
    rate: int,
    times: int,
    replicas: int,
    partitions: int,
    console: Console,
    **options: Any,
) -> dict[str, Any]:
    workers = 3
    counts = flux.stage(key="key", partitions=partitions, replicas=replicas, output_mode="update")(Counts)
    arrivals = flux.stage(key="key", partitions=workers, replicas=replicas)(Arrivals)
    start_at = time.time() + 6.0  # when workers are there
    folder = tempfile.mkdtemp(prefix="flux-failover-")
    end_file = f"{folder}/end"
    source = flux.source(paced(rate, workers, start_at, end_file), SCHEMA, partitions=workers)
    query = start_query([arrivals(counts(source))], "failover", spark, keep_output=True, workers=workers, **options)
    faults = Faults(query, kind, times, console, query.plan.settings.heartbeat_timeout + 1.0)
    try:
        query.wait_until_running(60)
        time.sleep(max(start_at + WARM_UP_S - time.time(), 0))
        faults.run()
        ticks = math.ceil((time.time() + LOOK_S - start_at) / TICK_S)
        Path(f"{end_file}.new").write_text(str(ticks))
        os.rename(f"{end_file}.new", end_file)
        query.wait_for_output()
        progress = query.lastProgress or {}
        events = query.events()
        rows = fetch_all(query).collect()
    finally:
        query.stop()
        shutil.rmtree(folder, ignore_errors=True)
    steps = np.array(sorted((row.a, row.b) for row in rows if row.kind == "step"), np.int64) / 1e9
    got = np.zeros(KEYS, np.int64)
    for row in rows:
        if row.kind == "count":
            got[row.a] = row.b
    expected = _expected(rate, ticks, workers)
    stalls = [event.stall_ms for event in events if event.kind == "repair"]
    return _summary(steps, faults.done, start_at) | {
        "faults": len(faults.done),
        "rows": int(expected.sum()),
        "lost": int(np.maximum(expected - got, 0).sum()),
        "duplicated": int(np.maximum(got - expected, 0).sum()),
        "repair_s": _rounded([fault.repaired_s for fault in faults.done if fault.repaired_s is not None], 50),
        "repair_s_max": _rounded([fault.repaired_s for fault in faults.done if fault.repaired_s is not None], 100),
        "not_repaired": sum(fault.repaired_s is None for fault in faults.done),
        "repairs": len(stalls),
        "stall_ms_p50": _rounded(stalls, 50),
        "stall_ms_p99": _rounded(stalls, 99),
        "take_overs": progress.get("takeOvers", 0),
        "epoch": progress.get("epoch", 0),
    }


def _expected(rate: int, ticks: int, partitions: int) -> np.ndarray:
    total = max(round(rate / partitions * TICK_S), 1) * ticks
    return sum(np.bincount(keys_of(p, 0, total), minlength=KEYS) for p in range(partitions))  # type: ignore[return-value]


def _summary(steps: np.ndarray, faults: list[Fault], start_at: float) -> dict[str, Any]:
    """Gaps between outputs after each fault, and the age of rows before, during and after."""
    times, ages = steps[:, 0], (steps[:, 0] - steps[:, 1]) * 1e3
    gaps = []
    during = np.zeros(len(times), bool)
    for fault in faults:
        near = (times >= fault.at - 0.1) & (times <= fault.at + LOOK_S)
        during |= near
        if near.sum() > 1:
            gaps.append(float(np.diff(times[near]).max() * 1e3))
    first = faults[0].at if faults else np.inf
    before = (times > start_at + WARM_UP_S / 2) & (times < first - 0.1)
    after = ~during & (times > first)
    calm_gaps = np.diff(times[before]) * 1e3
    return {
        "gap_ms_max": _rounded(gaps, 100),
        "gap_ms_p50": _rounded(gaps, 50),
        "gap_before_ms_max": _rounded(calm_gaps, 100),
        "p50_before_ms": _rounded(ages[before], 50),
        "p99_before_ms": _rounded(ages[before], 99),
        "p99_during_ms": _rounded(ages[during], 99),
        "max_during_ms": _rounded(ages[during], 100),
        "p99_after_ms": _rounded(ages[after], 99),
        "max_after_ms": _rounded(ages[after], 100),
    }


def _rounded(values: Any, percentile: float) -> float | None:
    return round(float(np.percentile(values, percentile)), 3) if len(values) else None


def measure_peer(spark: SparkSession, rate: int, console: Console) -> float:
    """Longest gap between outputs of Spark Structured Streaming around the loss of one executor, in milliseconds."""
    console.print("the peer: Spark Structured Streaming, same rate, one executor killed")
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    outputs: list[float] = []
    rows = spark.readStream.format("rate").option("rowsPerSecond", rate).load()
    counted = rows.groupBy((F.col("value") % KEYS).alias("key")).agg(F.count("*").alias("rows"))

    def arrived(batch: Any, _: int) -> None:
        if batch.count():
            outputs.append(time.time())

    query = counted.writeStream.outputMode("update").foreachBatch(arrived).start()
    try:
        time.sleep(15)
        before = set(_executors())
        os.kill(sorted(before)[0], signal.SIGKILL)
        fault = time.time()
        time.sleep(15)
    finally:
        query.stop()
    near = [at for at in outputs if at > fault - 3]
    return round(max(np.diff(near)) * 1e3, 1)


def _executors() -> list[int]:
    """Processes of the executors of this application."""
    import psutil

    def is_executor(process: psutil.Process) -> bool:
        try:
            return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
        except psutil.Error:
            return False

    return [process.pid for process in psutil.Process().children(recursive=True) if is_executor(process)]
