"""Faults, seen from outside: rows flow at a steady rate while workers are killed or stopped.

Rows pass a keyed stage with ``replicas`` replicas and arrive at a sink with as many. Every row carries the time at which it was
due. The sink notes for each step when it was applied (the step's time, the same on every replica, so that the notes survive
faults, too) and the newest count of each key. At the end the counts are compared with those computed from the source alone:
rows that are missing were lost, rows that are too many were counted twice.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.arrivals import Seen, collect, percentile, sink
from benchmarks.operating import await_any_progress, furthest
from benchmarks.paced import END, FLAT, SCHEMA, START, TICK_S, Script
from benchmarks.throughput import pass_on
from benchmarks.timeline import Line, Mark, Report, of_arrivals
from controller.replicas.membership import Member
from spark_integration.query.query import Query
from spark_integration.query.start import start_query

KEYS, WORKERS = 10_000, 3
WARM_UP_S = 3.0
#: Time after a fault in which outputs are examined for a gap; longest wait for a repair.
LOOK_S, REPAIR_S = 4.0, 30.0
#: Time in which rows come as fast as possible; batches after it, because sources are ahead of their last reports.
FLAT_S, END_AHEAD = 4.0, 400
#: Steady flow between the end of a repair and the next fault.
CALM_S = 2.0
#: Events that are shown if the query fails, the last ones.
EVENTS = 40
#: Milliseconds. A row that arrives later after such a fault shows that some stream has stood still for longer than detection,
#: take-over and further reading take, even if everything else flows. A pause is noticed after the heartbeat time-out.
OLDEST_MS = {"kill-executor": 1000.0, "kill-worker": 400.0, "pause": 1500.0}


class Counts(flux.Aggregate):
    rows = flux.count()
    due_ns = flux.max("due_ns")


@dataclass
class Fault:
    at: float
    worker: int
    repaired_s: float | None = None
    oldest_ms: float | None = None
    caught_up_s: float | None = None


@dataclass
class Faults:
    """A series of faults. Each happens when the query is whole again and has as many ``workers`` as at its start: a fault that
    leaves one worker alone would measure the capacity of that worker."""

    query: Query
    kind: str
    times: int
    workers: int
    console: Console
    pause_s: float
    done: list[Fault] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)

    def run(self) -> None:
        for number in range(self.times):
            if not self._calm(REPAIR_S) or self.query.phase != "running":
                self.console.print(f"  no fault {number + 1}: query {self.query.phase}, {self._why_not()}")
                return
            members = sorted(self.query.members().values(), key=lambda member: member.about.index)
            victim = self.victim(members, number)
            fault = Fault(time.time(), victim.node)
            self._strike(victim)
            self.done.append(fault)
            # The losses of workers of one executor are noticed one by one, and between them all may look whole.
            gone = {m.node for m in members if m.about.executor == victim.about.executor}
            gone = gone if self.kind == "kill-executor" else {victim.node}
            self._until(lambda gone=gone: not gone & self.query.members().keys(), REPAIR_S)
            if self._whole(REPAIR_S):
                fault.repaired_s = time.time() - fault.at
            took = self._why_not() if fault.repaired_s is None else f"whole again after {fault.repaired_s:.2f} s"
            self.console.print(f"  {self.kind} {number + 1} of {self.times}: worker {victim.node}, {took}")

    def victim(self, members: list[Member], number: int) -> Member:
        """Choose the worker of the next fault, each in its turn."""
        return members[number % len(members)]

    def _why_not(self) -> str:
        progress: dict[str, Any] = self.query.lastProgress or {}
        where = {member.node: member.about.executor for member in self.query.members().values()}
        low, busy = progress.get("underReplicated"), progress.get("repairsUnderWay")
        return f"not whole after {REPAIR_S:g} s: too few replicas of {low}, under way {busy}, workers {where}"

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

    def _calm(self, limit_s: float) -> bool:
        """Tell whether the query is whole with all workers, and has been for a while: a worker that has just joined may still
        be given partitions."""
        since = time.monotonic()

        def calm() -> bool:
            nonlocal since
            if not self.query.is_whole() or len(self.query.members()) < self.workers:
                since = time.monotonic()
            return time.monotonic() - since >= CALM_S

        return self._until(calm, limit_s)

    @staticmethod
    def _until(condition: Any, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


def run(
    fault: str,
    rate: int,
    times: int,
    replicas: int,
    partitions: int,
    peer: bool,
    console: Console,
    oldest_ms: float | None = None,
    **options: Any,
) -> Report:
    """Run the benchmark. ``oldest_ms`` is the age that no row may exceed, in milliseconds; None: that of ``OLDEST_MS``."""
    bound = OLDEST_MS[fault] if oldest_ms is None else oldest_ms
    spark, startup = session.start(
        WORKERS,
        2,
        1024,
        idle_jvm=not peer,
        **{"spark.task.maxFailures": 1000, "spark.excludeOnFailure.enabled": "false"},
    )
    try:
        result: dict[str, Any] = {"benchmark": "failover", "fault": fault, "rate": rate, "times": times}
        result |= {"replicas": replicas, "partitions": partitions, "spark_startup_s": round(startup, 2)}
        measured, line = measure(spark, fault, rate, times, replicas, partitions, console, **options)
        result |= measured | {"oldest_ms_bound": bound}
        if peer:
            result["peer_gap_ms_max"] = measure_peer(spark, rate, console)
            result["ratio"] = round(result["peer_gap_ms_max"] / result["gap_ms_max"], 1)
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()
    return Report(result, [line], failed=_too_old(result))


def _too_old(result: dict[str, Any]) -> str | None:
    """Return the reason why the run counts as failed; None: no row was too old."""
    oldest, bound = result["oldest_ms_max"], result["oldest_ms_bound"]
    if oldest is None or oldest <= bound:
        return None
    late = sum(age > bound for age in result["oldest_ms"])
    return f"rows were up to {oldest:.0f} ms old after {late} of {len(result['oldest_ms'])} faults, {bound:g} ms are allowed"


def flow(
    script: Script,
    replicas: int,
    partitions: int,
    counts: tuple[int, str] | None = None,
    passed: tuple[int, str] | None = None,
) -> Any:
    """Make the flow.

    ``counts`` has the replicas of the count, and the kind of the replicas beside its primary; None: as the sink has them.
    ``passed`` has the same of a stage without state before it, which passes rows on."""
    count_replicas, recovery = counts or (replicas, "active")
    counted = flux.stage(
        key="key", partitions=partitions, replicas=count_replicas, recovery=recovery, output_mode="update"
    )(Counts)
    arrivals = flux.stage(key="key", partitions=WORKERS, replicas=replicas)(sink(script.keys, partitions))
    given: Any = flux.source(script.read, SCHEMA, partitions=WORKERS)
    if passed is not None:
        through = flux.stage(key="key", partitions=partitions, replicas=passed[0], recovery=passed[1])
        given = through(pass_on)(given)
    return arrivals(counted(given))


def saturated(
    spark: SparkSession,
    replicas: int,
    partitions: int,
    keys: int = KEYS,
    counts: tuple[int, str] | None = None,
    passed: tuple[int, str] | None = None,
    **options: Any,
) -> tuple[float, dict[str, int]]:
    """Measure the rows per second that the count takes when rows come as fast as possible, without faults, and count lost and
    duplicated rows."""
    script = Script(WORKERS / TICK_S, WORKERS, keys)
    given = flow(script, replicas, partitions, counts, passed)
    options = {"progress_interval": "250ms", **options}
    query = start_query([given], "failover", spark, keep_output=True, workers=WORKERS, **options)
    try:
        query.wait_until_running(60)
        script.say(FLAT, 0)
        script.say(START, time.time())
        time.sleep(WARM_UP_S)
        before = await_any_progress(query, query.lastProgress, REPAIR_S)
        time.sleep(FLAT_S)
        after = await_any_progress(query, query.lastProgress, REPAIR_S)
        script.say(END, furthest(query) + END_AHEAD)
        seen = collect(query, script)
        return rate_between(before, after), seen.exactness(script.expected())
    finally:
        query.stop()
        script.clear()


def rate_between(before: dict[str, Any] | None, after: dict[str, Any] | None) -> float:
    """Compute the rows per second that the count has taken between two progress reports."""
    if before is None or after is None:
        raise flux.QueryTimeout(f"no progress report has come within {REPAIR_S:g} s")
    rows, at = zip(*(_counted(report) for report in (before, after)), strict=True)
    return float((rows[1] - rows[0]) / (at[1] - at[0]))


def _counted(report: dict[str, Any]) -> tuple[int, float]:
    [rows] = [stage["rowsIn"] for stage in report["stages"] if stage["name"] == Counts.__name__]
    return rows, datetime.fromisoformat(report["timestamp"]).timestamp()


def measure(
    spark: SparkSession,
    kind: str,
    rate: int,
    times: int,
    replicas: int,
    partitions: int,
    console: Console,
    keys: int = KEYS,
    counts: tuple[int, str] | None = None,
    passed: tuple[int, str] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], Line]:
    """Measure faults at a steady rate. ``counts`` and ``passed``: see ``flow``."""
    script = Script(rate, WORKERS, keys)
    given = flow(script, replicas, partitions, counts, passed)
    query = start_query([given], "failover", spark, keep_output=True, workers=WORKERS, **options)
    faults = Faults(query, kind, times, WORKERS, console, query.plan.settings.heartbeat_timeout + 1.0)
    try:
        query.wait_until_running(60)
        start_at = (
            time.time() + 1.0
        )  # workers must be there before, because rows of a backlog are old without any fault
        script.say(START, start_at)
        time.sleep(1.0 + WARM_UP_S)
        faults.run()
        script.say(END, script.batch_due_at(time.time() + LOOK_S))
        query.wait_for_output()
        progress: dict[str, Any] = query.lastProgress or {}
        events = query.events()
        seen = collect(query, script)
        expected = script.expected()
    except flux.FluxError:
        for event in query.events()[-EVENTS:]:
            console.print(f"  {event}", highlight=False)
        raise
    finally:
        query.stop()
        script.clear()
    stalls = [event.stall_ms for event in events if event.kind == "repair"]
    repaired = [fault.repaired_s for fault in faults.done if fault.repaired_s is not None]
    marks = [
        Mark(fault.at, fault.at + (fault.repaired_s or 0.0), f"{kind}, until whole again") for fault in faults.done
    ]
    line = of_arrivals("rows", seen, marks, start_at, float(seen.at.max(initial=start_at)))
    note_oldest(seen, faults.done)
    note_caught_up(seen, faults.done)
    for number, fault in enumerate(faults.done, 1):
        console.print(f"  {kind} {number}: oldest row {fault.oldest_ms or 0.0:.0f} ms", highlight=False)
    return _summary(seen, faults.done, start_at) | {
        "faults": len(faults.done),
        **seen.exactness(expected),
        "repair_s": percentile(repaired, 50),
        "repair_s_max": percentile(repaired, 100),
        "not_repaired": len(faults.done) - len(repaired),
        "repairs": len(stalls),
        "stall_ms_p50": percentile(stalls, 50),
        "stall_ms_p99": percentile(stalls, 99),
        "take_overs": progress.get("takeOvers", 0),
        "epoch": progress.get("epoch", 0),
    }, line


def note_oldest(seen: Seen, faults: list[Fault]) -> None:
    """Note the age of the oldest row that arrived between each fault and the next one. It shows a stream that stands still
    until the table changes again."""
    ends = [*(fault.at for fault in faults), np.inf][1:]
    for fault, end in zip(faults, ends, strict=True):
        ages = seen.age_ms[seen.between(fault.at, end)]
        fault.oldest_ms = percentile(ages, 100)


def note_caught_up(seen: Seen, faults: list[Fault]) -> None:
    """Note the arrival of the last row after each fault that was twice as old as 99 in a hundred before it, and older than 50
    ms."""
    for number, fault in enumerate(faults):
        end = faults[number + 1].at if number + 1 < len(faults) else np.inf
        before = seen.age_ms[seen.between(fault.at - CALM_S, fault.at)]
        usual = max(2 * float(np.percentile(before, 99)), 50.0) if len(before) else 50.0
        late = seen.between(fault.at, end) & (seen.age_ms > usual)
        fault.caught_up_s = round(float(seen.at[late].max()) - fault.at, 3) if late.any() else 0.0


def _summary(seen: Seen, faults: list[Fault], start_at: float) -> dict[str, Any]:
    """Summarise gaps between outputs after each fault, and the age of rows before, during and after."""
    times, ages = seen.at, seen.age_ms
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
    oldest = [fault.oldest_ms for fault in faults if fault.oldest_ms is not None]
    return {
        "oldest_ms_max": percentile(oldest, 100),
        "oldest_ms_p50": percentile(oldest, 50),
        "oldest_ms": oldest,
        "caught_up_s": max([fault.caught_up_s for fault in faults if fault.caught_up_s is not None], default=None),
        "gap_ms_max": percentile(gaps, 100),
        "gap_ms_p50": percentile(gaps, 50),
        "gap_before_ms_max": percentile(calm_gaps, 100),
        "p50_before_ms": percentile(ages[before], 50),
        "p99_before_ms": percentile(ages[before], 99),
        "p99_during_ms": percentile(ages[during], 99),
        "max_during_ms": percentile(ages[during], 100),
        "p99_after_ms": percentile(ages[after], 99),
        "max_after_ms": percentile(ages[after], 100),
    }


def measure_peer(spark: SparkSession, rate: int, console: Console) -> float:
    """Measure the longest gap between outputs of Spark Structured Streaming around the loss of one executor, in milliseconds."""
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
    """Find the processes of the executors of this application."""
    import psutil

    def is_executor(process: psutil.Process) -> bool:
        try:
            return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
        except psutil.Error:
            return False

    return [process.pid for process in psutil.Process().children(recursive=True) if is_executor(process)]
