"""Costs of each recovery technique without faults, and its gain when an executor is killed: one table in one run.

Every technique protects the same keyed count; in the last rows of the table, a stage without state before it, which passes rows
on. The rates are those of a finite input that workers read, one technique after the other in several rounds. Latencies and
faults are those of rows at a steady rate. The stages behind are protected by active replicas in each row of the table, so that
only the technique differs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from pyspark.sql import SparkSession
from rich.console import Console

from benchmarks import data, failover, session, throughput
from benchmarks.timeline import Line, Report

PARTITIONS, WORKERS, KEYS = 8, 3, 1_000_000
#: The technique against which all others are measured.
NONE = "none"
STATELESS = "stateless: none"
#: Part of the highest rate at which executors are killed as well.
LOADED = 0.6
FLUSHES, FLUSHED_BYTES = 200, 4096


@dataclass(frozen=True)
class Technique:
    """One technique.

    ``interval_s`` is the time between two checkpoints. ``durable``: with a checkpoint location, a new one for each run.
    ``passed``: it protects a stage without state, which passes rows on to the count. ``against`` is the technique with which
    its rate is compared."""

    name: str
    replicas: int
    recovery: str = "active"
    interval_s: float | None = None
    durable: bool = False
    passed: bool = False
    against: str = NONE

    @property
    def survives(self) -> bool:
        """The query survives the loss of an executor."""
        return self.replicas > 1 or self.durable

    @property
    def protects(self) -> dict[str, Any]:
        """The protected stage, as an argument of ``failover.flow``."""
        return {"passed" if self.passed else "counts": (self.replicas, self.recovery)}

    @contextmanager
    def options(self) -> Iterator[dict[str, Any]]:
        given: dict[str, Any] = {} if self.interval_s is None else {"checkpoint_interval": f"{self.interval_s}s"}
        if not self.durable:
            yield given
            return
        with tempfile.TemporaryDirectory(prefix="flux-bench-") as folder:
            yield given | {"checkpoint_location": f"{folder}/location"}


def techniques(intervals: list[float]) -> list[Technique]:
    return [
        Technique(NONE, 1),
        Technique("active", 2),
        *(Technique(f"standby, {seconds:g} s", 2, "standby", seconds) for seconds in intervals),
        *(Technique(f"disk, {seconds:g} s", 1, interval_s=seconds, durable=True) for seconds in intervals),
        Technique(STATELESS, 1, passed=True, against=STATELESS),
        Technique("stateless: active", 2, passed=True, against=STATELESS),
        Technique("stateless: upstream", 2, "upstream", passed=True, against=STATELESS),
    ]


def run(rows: int, rate: int, rounds: int, times: int, intervals: list[float], peer: bool, console: Console) -> Report:
    """Run the benchmark: ``rows`` of each run at full speed; ``rate`` of the steady runs, in rows per second; ``times``
    executors killed in each of these; ``intervals`` between checkpoints, in seconds."""
    spark, startup = session.start(
        WORKERS, 2, 2048, idle_jvm=not peer,
        **{"spark.task.maxFailures": 1000, "spark.excludeOnFailure.enabled": "false"},
    )  # fmt: skip
    chosen = techniques(intervals)
    try:
        fast = _rates(spark, chosen, rows, rounds, console)
        steady = {each.name: _steady(spark, each, rate, times, console) for each in chosen}
        loaded = {each.name: _loaded(spark, each, times, console) for each in chosen if each.survives and times}
        found = [
            _row(each, fast[each.name], fast[each.against], steady[each.name][0], loaded.get(each.name))
            for each in chosen
        ]
        result: dict[str, Any] = {"benchmark": "techniques", "rows": rows, "rate": rate, "rounds": rounds}
        result |= {"kills": times, "keys": KEYS, "spark_startup_s": round(startup, 2), "fdatasync_ms": fdatasync_ms()}
        result["techniques"] = found
        if peer:
            paths = data.files(data.NARROW, rows)
            result |= throughput.measure_peer(spark, data.NARROW, paths, rows, console)
            result["peer_gap_ms_max"] = failover.measure_peer(spark, rate, console)
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()
    return Report(result, [line for _, line in steady.values()], failed=why_failed(found))


def _rates(
    spark: SparkSession, chosen: list[Technique], rows: int, rounds: int, console: Console
) -> dict[str, dict[str, float]]:
    """Measure rates: medians over the rounds. Each technique comes first, second and last in turn."""
    paths = data.files(data.NARROW, rows)
    quiet = Console(quiet=True)
    throughput.measure(spark, data.NARROW, paths[:4], 4 * data.ROWS_PER_FILE, "worker", WORKERS, PARTITIONS, quiet)
    found: dict[str, list[dict[str, float]]] = {each.name: [] for each in chosen}
    for round_ in range(rounds):
        for each in chosen[round_ % len(chosen) :] + chosen[: round_ % len(chosen)]:
            sent = _loopback_bytes()
            reports: list[dict[str, Any]] = []
            with each.options() as options:
                measured = throughput.measure(
                    spark, data.NARROW, paths, rows, "worker", WORKERS, PARTITIONS, quiet, each.replicas, reports,
                    each.recovery, each.passed, **options,
                )  # fmt: skip
            written = max((report.get("checkpoint", {}).get("writtenBytes", 0) for report in reports), default=0)
            memory = [sum(worker["rssBytes"] for worker in report["workers"]) for report in reports]
            found[each.name].append(
                {
                    "rows_per_s": measured["rows_per_s"],
                    "bytes_per_row_sent": (_loopback_bytes() - sent) / rows,
                    "bytes_per_row_written": written / rows,
                    "order_bytes_per_slice": max(
                        (report.get("checkpoint", {}).get("orderBytesPerSlice", 0.0) for report in reports), default=0.0
                    ),
                    "memory_mib": max(memory, default=0) / (1 << 20),
                }
            )
            console.print(f"  round {round_ + 1} of {rounds}, {each.name}: {measured['rows_per_s']:,.0f} rows/s")
    return {name: _medians(runs) for name, runs in found.items()}


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.median([run[key] for run in runs])) for key in runs[0]}


def _loopback_bytes() -> int:
    """Count the bytes from process to process on this machine, including heartbeats and the collected output."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def _steady(
    spark: SparkSession, each: Technique, rate: int, times: int, console: Console
) -> tuple[dict[str, Any], Line]:
    """Measure a technique at a steady rate. Without a replica the query would not survive a fault, so there is none."""
    console.print(f"{rate:,} rows/s, {each.name}")
    with each.options() as options:
        return failover.measure(
            spark, "kill-executor", rate, times if each.survives else 0, 2, PARTITIONS, console,
            keys=KEYS, **each.protects, **options,
        )  # fmt: skip


def _loaded(spark: SparkSession, each: Technique, times: int, console: Console) -> dict[str, Any]:
    """Measure faults at a part of the rate that the same rows reach with this technique at full speed."""
    with each.options() as options:
        rate, exact = failover.saturated(spark, 2, PARTITIONS, keys=KEYS, **each.protects, **options)
    console.print(f"{rate:,.0f} rows/s at most, {LOADED:.0%} of it now, {each.name}")
    with each.options() as options:
        measured, _ = failover.measure(
            spark, "kill-executor", round(rate * LOADED), times, 2, PARTITIONS, console,
            keys=KEYS, **each.protects, **options,
        )  # fmt: skip
    added = {name: measured[name] + exact[name] for name in ("lost", "duplicated")}
    return measured | added | {"saturated_rows_per_s": rate}


def fdatasync_ms() -> float:
    """Measure the median of one flush in the folder of the checkpoint locations: the least wait for an answer of the disk."""
    took = []
    with tempfile.TemporaryFile(prefix="flux-bench-") as file:
        for _ in range(FLUSHES):
            os.write(file.fileno(), bytes(FLUSHED_BYTES))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return round(float(np.median(took)) * 1e3, 3)


def why_failed(rows: list[dict[str, Any]]) -> str | None:
    """Return the reason why the run counts as failed; None: no row was lost or duplicated."""
    for row in rows:
        if row["lost"] or row["duplicated"]:
            return f"{row['technique']}: {row['lost']} rows lost, {row['duplicated']} duplicated, 0 are allowed"
    return None


def _row(
    each: Technique,
    fast: dict[str, float],
    none: dict[str, float],
    steady: dict[str, Any],
    loaded: dict[str, Any] | None,
) -> dict[str, Any]:
    """Make a row of the table: ``caught_up_s`` is at the given rate, ``loaded_caught_up_s`` at ``loaded_rows_per_s``."""
    most = None if loaded is None else loaded["saturated_rows_per_s"]
    return {
        "technique": each.name,
        "rows_per_s": round(fast["rows_per_s"]),
        "ratio_to_none": round(fast["rows_per_s"] / none["rows_per_s"], 3),
        "bytes_per_row_sent": round(fast["bytes_per_row_sent"], 1),
        "bytes_per_row_written": round(fast["bytes_per_row_written"], 1),
        "order_bytes_per_slice": round(fast["order_bytes_per_slice"], 1),
        "memory_mib": round(fast["memory_mib"]),
        "p50_ms": steady["p50_before_ms"],
        "p99_ms": steady["p99_before_ms"],
        "gap_ms_max": steady["gap_ms_max"],
        "oldest_ms_max": steady["oldest_ms_max"],
        "caught_up_s": steady["caught_up_s"],
        "loaded_rows_per_s": None if most is None else round(most * LOADED),
        "loaded_caught_up_s": None if loaded is None else loaded["caught_up_s"],
        "lost": steady["lost"] + (0 if loaded is None else loaded["lost"]),
        "duplicated": steady["duplicated"] + (0 if loaded is None else loaded["duplicated"]),
    }
