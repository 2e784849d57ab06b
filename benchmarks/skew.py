"""Uneven load, with static placement and with load balance.

Three workers stand for three machines: a step of the keyed stage takes a fixed time for each row, which is slept and not
computed, because on a machine with two cores the work of one worker would slow down the others. On a slow worker a step takes
``slow`` times as long. A small file with the id of its process names the slow worker; the operator compares it with its own.
Two questions:

    slow  after some seconds one worker becomes slow. How many rows arrive per second, and how late are they, with partitions
          that stay and with partitions that move?
    zipf  keys follow a Zipf distribution. How even does the load become, and does it then stay calm?
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.arrivals import Seen, Span, collect, percentile, sink
from benchmarks.operating import Operator
from benchmarks.paced import END, SCHEMA, START, Script
from benchmarks.timeline import Line, Mark, Report, of_arrivals
from controller.report.events import Event
from spark_integration.query.start import start_query

WORKERS = 3
KEYS = 50_000
#: Time of one row on a worker that is not slow.
ROW_S = 20e-6
#: Partitions of the keyed stage: with a slow worker, and with Zipf keys.
PARTITIONS, ZIPF_PARTITIONS = 24, 64
#: Rows offered, as a part of the capacity of all workers, one of them being slow. The rest is needed for messages, and to work
#: off the rows that have waited until the partitions had moved.
OFFERED = 0.6
#: Rows of a source that are due together, of few and of many partitions. There are few and larger slices, because the rate of
#: messages that two cores can take is not the subject.
TICK_S, ZIPF_TICK_S = 0.1, 0.2
#: Log of one partition of a source, with either placement: some seconds of rows, so that it is full, and all workers wait for
#: the slow one, before rows are counted. The default would put that off for more than a minute.
LOG = "3m"
#: Steady flow before one worker becomes slow.
BEFORE_S = 5.0
#: Time after that for reaching the target. From then on rows and latency are counted.
SETTLED_LIMIT_S = 15.0
#: After this time without a move, the placement has settled.
CALM_S = 5.0
#: Small steps: a slow one must not hold up all the others of its worker for long.
STEP_ROWS = 512
#: Most time that is made up for: a process that was stopped for long need not make up for all of it.
AHEAD_MAX_S = 0.01
#: Time between two looks of a worker whether it has become slow.
LOOK_S = 0.05


class Rest:
    """A thread's sleep. The excess of a sleep, on a machine that has much to do, is taken off the next ones."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def take(self, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(max(seconds - self._ahead_s, 0.0))
        self._ahead_s = min(self._ahead_s + time.perf_counter() - began - seconds, AHEAD_MAX_S)


#: The sleep of this process, which has one thread of work.
_REST = Rest()


class Work(flux.Operator):
    """Operator that counts rows by key and hands them on, at a fixed cost. Its answer does not depend on its worker."""

    schema = pa.schema([("key", pa.int64()), ("due_ns", pa.int64()), ("rows", pa.int64())])
    folder = ""
    slow = 1.0

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.counts = np.zeros(KEYS, np.int64)

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        _REST.take(batch.num_rows * ROW_S * _pace(self.folder, self.slow, time.monotonic() // LOOK_S))
        np.add.at(self.counts, batch.column("key").to_numpy(), 1)
        one = pa.array(np.ones(batch.num_rows, np.int64))
        yield pa.RecordBatch.from_arrays([batch.column("key"), batch.column("due_ns"), one], schema=self.schema)

    def snapshot(self) -> Any:
        return self.counts

    def restore(self, snapshot: Any) -> None:
        self.counts = snapshot.copy()

    def state_bytes(self) -> int:
        return self.counts.nbytes


@functools.lru_cache(maxsize=4)
def _pace(folder: str, slow: float, _look: float) -> float:
    """Return the factor by which a row takes longer in this process. It is looked up anew with every other ``_look``."""
    try:
        return slow if int(Path(folder, "slow").read_text()) == os.getpid() else 1.0
    except (FileNotFoundError, ValueError):
        return 1.0


def work(folder: str, slow: float) -> type[Work]:
    return type("Worked", (Work,), {"folder": folder, "slow": slow, "__module__": __name__})


@dataclass(frozen=True)
class Ran:
    """One query. ``start`` is the time at which rows began to be due; ``slow_at`` that at which one worker became slow;
    ``placement`` maps partitions to workers at the end."""

    start: float
    slow_at: float
    end: float
    seen: Seen
    moves: list[Event]
    placement: dict[int, int]
    expected: np.ndarray

    def line(self, name: str, marked: bool) -> Line:
        marks = [Mark(event.at, event.at, "move") for event in self.moves]
        if marked:
            marks.append(Mark(self.slow_at, self.slow_at + 0.2, "one worker becomes slow"))
        return of_arrivals(name, self.seen, marks, self.start, self.end)


def run(slow: float, zipf: float | None, seconds: float, console: Console, **options: Any) -> Report:
    """Run the benchmark. ``seconds`` is the time of each placement after the slow-down. Rows and latency are counted from
    ``SETTLED_LIMIT_S`` on; of a shorter run, in its second half."""
    spark, startup = session.start(WORKERS, 2, 1024, idle_jvm=True)
    try:
        figures: dict[str, Any] = {"benchmark": "skew", "spark_startup_s": round(startup, 2)}
        report = (
            _slow(spark, slow, seconds, console, **options)
            if zipf is None
            else _zipf(spark, zipf, seconds, console, **options)
        )
        return Report(figures | report.figures, report.lines, report.latency)
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()


# ---- one slow worker


def _slow(spark: SparkSession, slow: float, seconds: float, console: Console, **options: Any) -> Report:
    rate = OFFERED * (WORKERS - 1 + 1 / slow) / ROW_S
    ran = {}
    for name, balanced in (("static", False), ("adaptive", True)):
        console.print(f"{name} placement: {rate:,.0f} rows/s, one of {WORKERS} workers becomes {slow:g} times slower")
        script = Script(rate, WORKERS, KEYS, tick_s=TICK_S)
        ran[name] = _run(spark, script, PARTITIONS, slow, seconds, balance_enabled=balanced, **options)
        console.print(f"  {ran[name].seen.rate(*_counted(ran[name])):,.0f} rows/s, {len(ran[name].moves)} moves")
    figures = {"slow": slow, "rate": round(rate), "partitions": PARTITIONS, "seconds": seconds}
    return Report(
        figures | slow_summary(ran["static"], ran["adaptive"]),
        [each.line(name, marked=True) for name, each in ran.items()],
    )


def slow_summary(static: Ran, adaptive: Ran) -> dict[str, Any]:
    """Summarise both placements.

    Throughput counts rows that arrived in the counted time. Latency counts rows that were due in it, whenever they arrived,
    because otherwise the rows that wait longest would not count. The slow worker is fast again after that time, which is to the
    benefit of the static placement."""
    rows = {name: ran.seen.rate(*_counted(ran)) for name, ran in (("static", static), ("adaptive", adaptive))}
    ages = {name: _mean_age(ran, *_counted(ran)) for name, ran in (("static", static), ("adaptive", adaptive))}
    slow, fast = ages["static"], ages["adaptive"]
    after = [event.at for event in adaptive.moves if event.at > adaptive.slow_at]
    exact = [ran.seen.exactness(ran.expected) for ran in (static, adaptive)]
    return {
        "static_rows_per_s": round(rows["static"]),
        "adaptive_rows_per_s": round(rows["adaptive"]),
        "throughput_ratio": round(rows["adaptive"] / rows["static"], 2) if rows["static"] else None,
        "static_latency_ms": slow,
        "adaptive_latency_ms": fast,
        "latency_ratio": round(slow / fast, 1) if slow and fast else None,
        "adaptive_p99_ms": percentile(adaptive.seen.age_ms[adaptive.seen.due_between(*_counted(adaptive))], 99),
        "moves": len(after),
        "settled_s": settled_s(after, adaptive.slow_at, adaptive.end),
        "lost": sum(each["lost"] for each in exact),
        "duplicated": sum(each["duplicated"] for each in exact),
    }


def _counted(ran: Ran) -> Span:
    return Span(min(ran.slow_at + SETTLED_LIMIT_S, (ran.slow_at + ran.end) / 2), ran.end)


def _mean_age(ran: Ran, start: float, end: float) -> float | None:
    inside = ran.seen.due_between(start, end)
    rows = ran.seen.rows[inside]
    return round(float(np.average(ran.seen.age_ms[inside], weights=rows)), 3) if rows.sum() else None


def settled_s(moves: Sequence[float], since: float, end: float) -> float | None:
    """Return the time of the first move after which there was none for ``CALM_S``; 0: none was needed; None: never."""
    times = [since, *sorted(moves)]
    for at, following in zip(times, [*times[1:], np.inf], strict=True):
        if min(following, end) - at >= CALM_S and (at > since or not moves):
            return round(at - since, 3)
    return None


# ---- Zipf keys


def _zipf(spark: SparkSession, zipf: float, seconds: float, console: Console, **options: Any) -> Report:
    rate = OFFERED * WORKERS / ROW_S
    console.print(f"{rate:,.0f} rows/s, keys as in Zipf {zipf:g}, {ZIPF_PARTITIONS} partitions on {WORKERS} workers")
    lines, figures = [], {"zipf": zipf, "rate": round(rate), "partitions": ZIPF_PARTITIONS, "seconds": seconds}
    ran = {}
    for name, balanced in (("static", False), ("adaptive", True)):
        script = Script(rate, WORKERS, KEYS, zipf=zipf, tick_s=ZIPF_TICK_S)
        ran[name] = _run(spark, script, ZIPF_PARTITIONS, 1.0, seconds, balance_enabled=balanced, **options)
        console.print(f"  {name} placement: {len(ran[name].moves)} moves")
        lines.append(ran[name].line(name, marked=False))
    return Report(figures | zipf_summary(ran["static"], ran["adaptive"]), lines)


def zipf_summary(static: Ran, adaptive: Ran) -> dict[str, Any]:
    """Summarise both placements. The load of a worker is the rows of its partitions in the counted time, which all take the
    same time. A placement has settled when it has been calm for a while; moves after that are reported per round."""
    moves = [event.at for event in adaptive.moves]
    settled = settled_s(moves, adaptive.start, adaptive.end)
    after = [at for at in moves if settled is not None and at > adaptive.start + settled]
    rounds = max(adaptive.end - adaptive.start - (settled or 0.0), 1.0)
    rows = _rows_by_partition(adaptive)
    exact = [ran.seen.exactness(ran.expected) for ran in (static, adaptive)]
    return {
        "static_rows_per_s": round(static.seen.rate(*_counted(static))),
        "adaptive_rows_per_s": round(adaptive.seen.rate(*_counted(adaptive))),
        "static_latency_ms": _mean_age(static, *_counted(static)),
        "adaptive_latency_ms": _mean_age(adaptive, *_counted(adaptive)),
        "static_load_over_mean": load_over_mean(_rows_by_partition(static), static.placement),
        "load_over_mean": load_over_mean(rows, adaptive.placement),
        "load_over_mean_attainable": attainable(rows, WORKERS),
        "heaviest_partition_share": round(float(rows.max() / max(rows.sum(), 1)), 4),
        "moves": len(moves),
        "settled_s": settled,
        "moves_after_settling": len(after),
        "moves_per_round_after_settling": round(len(after) / rounds, 3),
        "lost": sum(each["lost"] for each in exact),
        "duplicated": sum(each["duplicated"] for each in exact),
    }


def _rows_by_partition(ran: Ran) -> np.ndarray:
    start, end = _counted(ran)
    inside = (ran.seen.at >= start) & (ran.seen.at < end)
    size = max(ran.placement) + 1
    return np.bincount(ran.seen.partition[inside], weights=ran.seen.rows[inside], minlength=size)


def load_over_mean(rows: np.ndarray, placement: Mapping[int, int]) -> float:
    """Return the rows of the worker with the most rows, over the mean of all workers that have any."""
    workers = sorted(set(placement.values()))
    loads = [sum(rows[partition] for partition, at in placement.items() if at == worker) for worker in workers]
    return round(float(max(loads) / np.mean(loads)), 3)


def attainable(rows: np.ndarray, workers: int) -> float:
    """Return load over mean if each partition, the heaviest first, went to the worker with the least load. This is as even as
    these partitions can be placed, or within a third of it (Graham 1969), and never below the share of the heaviest partition."""
    loads = np.zeros(workers)
    for each in np.sort(rows)[::-1]:
        loads[loads.argmin()] += each
    return round(float(loads.max() / loads.mean()), 3)


# ---- both


def _run(spark: SparkSession, script: Script, partitions: int, slow: float, seconds: float, **options: Any) -> Ran:
    """Run one query: some seconds of steady flow, then ``seconds`` with a slow worker, unless ``slow`` is 1."""
    keyed = flux.stage(key="key", partitions=partitions, name="Work")(work(script.folder, slow))
    # A stage without a key gets whole batches, one message each.
    arrived = flux.stage(partitions=WORKERS, name="Arrivals")(sink(KEYS, partitions, newest=False))
    source = flux.source(script.read, SCHEMA, partitions=WORKERS)
    given: dict[str, Any] = {"workers": WORKERS, "step_max_rows": STEP_ROWS, "source_log_bytes": LOG} | options
    query = start_query([arrived(keyed(source))], "skew", spark, keep_output=True, **given)
    try:
        query.wait_until_running(120)
        start = time.time() + 0.5
        script.say(START, start)
        time.sleep(0.5 + BEFORE_S)
        victim = min(query.members().values(), key=lambda member: member.about.index)
        slow_at = time.time()
        if slow != 1.0:
            script.say("slow", victim.about.pid)
        time.sleep(seconds)
        end = time.time()
        with Operator(query, "Work") as operator:
            placement = {partition: held[0] for partition, held in operator.placement().items()}
            script.say(END, script.batch_due_at(end))
            script.say("slow", 0)  # waiting rows are worked off sooner
            seen = collect(query, script)
            moves = [event for event in operator.moves() if event.at < end]
        return Ran(start, slow_at, end, seen, moves, placement, script.expected())
    finally:
        query.stop()
        script.clear()
