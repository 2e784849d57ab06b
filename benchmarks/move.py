"""Moves of partitions, seen from outside, while rows flow.

Rows pass a keyed stage whose partitions have ``state_mb`` MiB of state each (keys that were loaded first) and arrive at a sink.
First at a steady rate: each partition is moved once, and the gaps between its arrivals and the latency of rows of other
partitions are compared with the time before, of the same run. Then as fast as possible: rows per second without moves, and
while every partition is moved again, one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.arrivals import Seen, Span, collect, percentile, sink
from benchmarks.operating import Operator, furthest, until
from benchmarks.paced import END, FLAT, SCHEMA, START, Script
from benchmarks.timeline import Line, Mark, Report, of_arrivals
from controller.report.events import Event
from spark_integration.query.query import Query
from spark_integration.query.start import start_query

#: Bytes of a copy of the state for each key: the key itself and six measures.
BYTES_PER_KEY = 72
#: Steady flow: before the measurement, to compare with, and between two moves.
WARM_UP_S, CALM_S, PAUSE_S = 2.0, 10.0, 0.5
#: Time around a move in which outputs are examined: before its request, and after its end.
BEFORE_S, AFTER_S = 0.05, 0.25
#: Rows as fast as possible: time until the rate is steady, and time of measurement without moves.
FLAT_WARM_UP_S, FLAT_S = 2.0, 4.0
#: Longest time of loading, and of one move. If it takes longer, something is wrong.
LOAD_LIMIT_S, MOVE_LIMIT_S = 600.0, 60.0
#: Batches by which sources at full speed are told of the end ahead.
END_AHEAD = 100


class Totals(flux.Aggregate):
    rows = flux.count()
    due_ns = flux.max("due_ns")
    total = flux.sum("value")
    least = flux.min("value")
    most = flux.max("value")
    mean = flux.mean("value")


@dataclass(frozen=True)
class Window:
    """A move, from its request to its end."""

    partition: int
    start: float
    end: float


@dataclass
class Times:
    """Times of the parts of a run. ``flat_*`` is the part in which rows come as fast as possible."""

    start: float = 0.0
    first_move: float = 0.0
    windows: list[Window] = field(default_factory=list)
    flat_start: float = 0.0
    flat_moves: Span = field(default_factory=lambda: Span(0.0, 0.0))


def run(
    state_mb: float, partitions: int, rate: int, workers: int, replicas: int, console: Console, **options: Any
) -> Report:
    spark, startup = session.start(workers, 2, 1024, idle_jvm=True)
    try:
        figures: dict[str, Any] = {"benchmark": "move", "state_mb": state_mb, "partitions": partitions, "rate": rate}
        figures |= {"workers": workers, "replicas": replicas, "spark_startup_s": round(startup, 2)}
        measured, line = _measure(spark, state_mb, partitions, rate, workers, replicas, console, **options)
        return Report(figures | measured, [line])
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()


def _measure(
    spark: SparkSession,
    state_mb: float,
    partitions: int,
    rate: int,
    workers: int,
    replicas: int,
    console: Console,
    **options: Any,
) -> tuple[dict[str, Any], Line]:
    keys = max(math.ceil(state_mb * (1 << 20) / BYTES_PER_KEY), 1) * partitions
    script = Script(rate, workers, keys, load=True)
    totals = flux.stage(key="key", partitions=partitions, replicas=replicas, output_mode="update", name="Totals")(
        Totals
    )
    arrived = flux.stage(key="key", partitions=workers, name="Arrivals")(sink(keys, partitions))
    source = flux.source(script.read, SCHEMA, partitions=workers)
    given: dict[str, Any] = {"workers": workers, "balance_enabled": False, "progress_interval": "200ms"} | options
    query = start_query([arrived(totals(source))], "move", spark, keep_output=True, **given)
    try:
        query.wait_until_running(120)
        console.print(f"loading {keys:,} keys")
        until(lambda: _applied(query) >= keys, LOAD_LIMIT_S, f"{keys:,} keys are loaded")
        with Operator(query, "Totals") as operator:
            times = _move_at_a_rate(script, operator, console)
            _move_flat_out(script, query, operator, times, console)
        seen = collect(query, script)
        moves = operator.moves()
    finally:
        query.stop()
        expected = script.expected() if script.said(END) is not None else np.zeros(keys, np.int64)
        script.clear()
    marks = [Mark(window.start, window.end, "move") for window in times.windows]
    line = of_arrivals("rows", seen, [*marks, Mark(*times.flat_moves, "move")], times.start, float(seen.at[-1]))
    return summary(seen, times, moves, partitions) | seen.exactness(expected), line


def _applied(query: Query) -> int:
    """Count the rows that have arrived at the sink. Raise the error of a query that has failed."""
    if (error := query.exception()) is not None:
        raise error
    progress = query.lastProgress
    return progress["stages"][1]["rowsIn"] if progress else 0


def _move_at_a_rate(script: Script, operator: Operator, console: Console) -> Times:
    times = Times(start=time.time() + 0.5)
    script.say(START, times.start)
    time.sleep(0.5 + WARM_UP_S + CALM_S)
    times.first_move = time.time()
    for partition, target in sorted(operator.targets().items()):
        asked = time.time()
        operator.move({partition: target}, MOVE_LIMIT_S)
        times.windows.append(Window(partition, asked, time.time()))
        event = operator.moves()[-1]
        console.print(f"  partition {partition}: {event.bytes / (1 << 20):,.1f} MiB in {event.seconds:.3f} s")
        time.sleep(PAUSE_S + AFTER_S)
    return times


def _move_flat_out(script: Script, query: Query, operator: Operator, times: Times, console: Console) -> None:
    console.print("rows as fast as they go, and every partition moved once more")
    script.say(FLAT, script.batch_due_at(time.time() + 0.5))
    time.sleep(0.5 + FLAT_WARM_UP_S)
    times.flat_start = time.time()
    time.sleep(FLAT_S)
    targets = operator.targets()
    start = time.time()
    operator.move(targets, MOVE_LIMIT_S * len(targets))
    times.flat_moves = Span(start, time.time())
    script.say(END, furthest(query) + END_AHEAD)


# ---- outcome


def summary(seen: Seen, times: Times, moves: Sequence[Event], partitions: int) -> dict[str, Any]:
    """Summarise a run.

    ``stall_ms`` is the longest gap between arrivals of a partition around its move, less the median of the longest gaps in
    windows of the same length without a move. ``controller_stall_ms`` is the time for which the primary stood still for the
    copy. ``flat_*`` are those of the moves while rows come as fast as possible; their copies have more rows in their output
    logs."""
    calm = Span(times.start + WARM_UP_S, times.first_move)
    gaps = [_gap(seen, window) for window in times.windows]
    usual = [usual_gap_ms(seen, window, calm, partitions) for window in times.windows]
    stalls = np.maximum(np.array(gaps) - np.array(usual), 0.0)
    others = np.zeros(len(seen.at), bool)
    for window in times.windows:
        others |= seen.between(window.start, window.end) & (seen.partition != window.partition)
    before = seen.age_ms[seen.between(*calm)]
    during = seen.age_ms[others]
    flat_before = seen.rate(times.flat_start, times.flat_moves.start)
    flat_during = seen.rate(*times.flat_moves)
    copied = [event.stall_ms for event in moves[: len(times.windows)]]
    copied_flat = [event.stall_ms for event in moves[len(times.windows) :]]
    return {
        "moved": len(moves),
        "moved_bytes": sum(event.bytes for event in moves),
        "state_bytes": round(float(np.median([event.bytes for event in moves]))),
        "stall_ms_p50": percentile(stalls, 50),
        "stall_ms_p99": percentile(stalls, 99),
        "gap_ms_p50": percentile(gaps, 50),
        "gap_ms_max": percentile(gaps, 100),
        "usual_gap_ms_p50": percentile(usual, 50),
        "controller_stall_ms_p50": percentile(copied, 50),
        "controller_stall_ms_p99": percentile(copied, 99),
        "flat_controller_stall_ms_p50": percentile(copied_flat, 50),
        "move_s_p50": percentile([event.seconds for event in moves], 50),
        "move_s_max": percentile([event.seconds for event in moves], 100),
        "p50_before_ms": percentile(before, 50),
        "p50_during_ms": percentile(during, 50),
        "p99_before_ms": percentile(before, 99),
        "p99_during_ms": percentile(during, 99),
        "latency_ratio": _ratio(percentile(during, 99), percentile(before, 99)),
        "throughput_before": round(flat_before),
        "throughput_during": round(flat_during),
        "throughput_ratio": _ratio(flat_during, flat_before),
        "rolling_move_s": round(times.flat_moves.end - times.flat_moves.start, 3),
    }


def _gap(seen: Seen, window: Window) -> float:
    return seen.longest_gap_ms(window.partition, window.start - BEFORE_S, window.end + AFTER_S)


def usual_gap_ms(seen: Seen, window: Window, calm: Span, partitions: int) -> float:
    """Compute the longest gap in the calm time: the median over all windows of the same length, and over all partitions."""
    length = BEFORE_S + window.end - window.start + AFTER_S
    starts = np.arange(calm.start, max(calm.end - length, calm.start) + 1e-3, length)
    gaps = [seen.longest_gap_ms(p, start, start + length) for start in starts for p in range(partitions)]
    return float(np.median(gaps))


def _ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 3) if value is not None and base else None
