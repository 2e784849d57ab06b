"""Keyed count and sum over parquet files, in Flux and in Spark Structured Streaming, side by side in one run.

Both read the same files from the first row to the last result; the peer may read a part of them, because it is slower and its
rate does not depend on the number of rows. Both run a warm-up query first; start-up (workers, query planning) is reported
separately. The answer of Flux is compared with one computed by Spark's batch engine.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from rich.console import Console

import flux
from benchmarks import data, session
from benchmarks.operating import await_any_progress
from benchmarks.timeline import Report, of_progress
from spark_integration.query.output import fetch_all
from spark_integration.query.start import start_query

#: Rows that the peer reads at most.
PEER_ROWS = 5_000_000
#: Runs with and without replicas, unless given: a single run varies by a tenth.
ROUNDS = 10
#: Files that both sides read once before they are measured.
WARM_UP_FILES = 10
#: The best of 1, 2, 4, 8 and 200 on two cores.
PEER_SHUFFLE_PARTITIONS = 2


class Totals(flux.Aggregate):
    n = flux.count()
    total = flux.sum("value")


def run(
    rows: int,
    source: str,
    workers: int,
    peer: bool,
    shape_name: str,
    partitions: int,
    console: Console,
    replicas: int = 1,
    rounds: int | None = None,
    **options: Any,
) -> Report:
    """Run the benchmark.

    ``replicas`` above 1 are measured against one replica, and against as many replicas that are not kept in order. ``rounds``
    is the number of runs, in turn with those of the other replicas, and then as many of the peer; medians count, and the last
    run is drawn."""
    shape = data.SHAPES[shape_name]
    console.print(f"writing or finding {rows:,} rows ({shape.name})")
    paths = data.files(shape, rows)
    spark, startup = session.start(workers, 2)  # a second slot each: for reading the input and fetching the output
    try:
        result: dict[str, Any] = {"benchmark": "throughput", "rows": rows, "source": source, "workers": workers}
        result |= {"shape": shape.name, "partitions": partitions, "spark_startup_s": round(startup, 2)}
        console.print("a warm-up query over a few files, as for the peer: executors and page cache settle")
        some = paths[:WARM_UP_FILES]
        warm_rows = min(rows, len(some) * data.ROWS_PER_FILE)
        measure(spark, shape, some, warm_rows, source, workers, partitions, console, **options)
        reports: list[dict[str, Any]] = []
        runs = []
        for _ in range(1 if replicas > 1 else rounds or 1):
            reports.clear()
            runs.append(
                measure(spark, shape, paths, rows, source, workers, partitions, console, reports=reports, **options)
            )
        result |= _median(runs, "rows_per_s")
        if replicas > 1:
            result |= _replicated(
                spark, shape, paths, rows, source, workers, partitions, console, replicas, rounds or ROUNDS, options
            )
        if peer:
            # Not in turn, because garbage in the heap of the executors may slow the runs that come after the peer.
            peer_runs = [measure_peer(spark, shape, paths, rows, console) for _ in range(rounds or 1)]
            result |= _median(peer_runs, "peer_rows_per_s")
            result["ratio"] = round(result["rows_per_s"] / result["peer_rows_per_s"], 2)
    finally:
        spark.stop()
    return Report(result, [of_progress("rows", reports, 0)], "latency of steps, p99 (ms)")


def _median(runs: list[dict[str, Any]], rate: str) -> dict[str, Any]:
    """Return the figures of the run whose rate is the median, the lower one of two; of several runs, all rates as well."""
    ordered = sorted(runs, key=lambda run: run[rate])
    several = {f"{rate}_each": [run[rate] for run in runs]} if len(runs) > 1 else {}
    return ordered[(len(ordered) - 1) // 2] | several


def _replicated(
    spark: SparkSession,
    shape: data.Shape,
    paths: list[str],
    rows: int,
    source: str,
    workers: int,
    partitions: int,
    console: Console,
    replicas: int,
    rounds: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Measure rates with one replica, with several, and with several that are not kept in order, interleaved; medians count.
    Each kind runs first, second and last equally often, because a run finds the memory and caches that the run before has
    left."""
    kinds = [("one", 1, True), ("replicas", replicas, True), ("unordered", replicas, False)]
    rates: dict[str, list[float]] = {name: [] for name, _, _ in kinds}
    for round_ in range(rounds):
        console.print(f"with and without replicas, ordered and unordered: round {round_ + 1} of {rounds}")
        for name, copies, ordered in kinds:
            given = options | {"replicas": copies, "replicas_ordered": ordered}
            measured = measure(spark, shape, paths, rows, source, workers, partitions, console, **given)
            rates[name].append(measured["rows_per_s"])
        kinds = kinds[1:] + kinds[:1]
    one, pairs, unordered = (float(np.median(rates[name])) for name in ("one", "replicas", "unordered"))
    return {
        "replicas": replicas,
        "rounds": rounds,
        "one_copy_rows_per_s": round(one),
        "replicated_rows_per_s": round(pairs),
        "unordered_rows_per_s": round(unordered),
        "replicated_ratio": round(pairs / one, 3),
        "order_cost": round(1 - pairs / unordered, 3),
    }


def pass_on(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Pass rows on: a stage without state."""
    return batch


def measure(
    spark: SparkSession,
    shape: data.Shape,
    paths: list[str],
    rows: int,
    source: str,
    workers: int,
    partitions: int,
    console: Console,
    replicas: int = 1,
    reports: list[dict[str, Any]] | None = None,
    recovery: str = "active",
    passed: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Run the flow once; raise if its answer is wrong. Its progress is appended to ``reports``.

    ``passed``: the replicas are those of a stage without state that passes rows on to the totals, which have one of each
    partition."""
    protected = flux.stage(key=shape.key, partitions=partitions, replicas=replicas, recovery=recovery)
    alone = flux.stage(key=shape.key, partitions=partitions)
    totals = (alone if passed else protected)(Totals)
    if source == "worker":
        given: Any = flux.source(data.reader(paths, workers, shape.read_rows), shape.schema, partitions=workers)
    else:
        given = spark.read.parquet(*paths)
    started = time.time()
    query = start_query(
        [totals(protected(pass_on)(given) if passed else given)],
        "throughput",
        spark,
        keep_output=True,
        workers=workers,
        progress_interval="500ms",
        **options,
    )
    try:
        progress = None
        while (progress := await_any_progress(query, progress, 120)) is not None and query.phase in (
            "starting",
            "running",
        ):
            if reports is not None:
                reports.append(progress)
            console.print(
                f"  {progress['totalInputRows']:>12,} rows in, {progress['processedRowsPerSecond']:>12,.0f} rows/s applied, "
                f"log {progress['backlog']['bytes'] >> 20:>5,} MiB"
            )
        query.wait_for_output()
        last = query.lastProgress
        assert last is not None
        check(spark, fetch_all(query), shape, tuple(paths))
    finally:
        query.stop()
    seconds = last["finishedAt"] - last["firstRowAt"]
    latency = last["stages"][0]["latencyMs"]
    return {
        "startup_s": round(last["firstRowAt"] - started, 2),
        "seconds": round(seconds, 3),
        "rows_per_s": round(rows / seconds),
        "p50_ms": latency[0],
        "p99_ms": latency[1],
        "peak_log_bytes": last["peakLogBytes"],
        "answer": "equal to Spark's batch answer",
    }


def check(spark: SparkSession, result: DataFrame, shape: data.Shape, paths: tuple[str, ...]) -> None:
    """Compare every group with the answer of Spark's batch engine."""
    found, expected = _digest(result), batch_answer(spark, shape, paths)
    if found != expected:
        raise AssertionError(f"the answer differs from Spark's batch answer: {found} against {expected}")


@lru_cache(maxsize=4)
def batch_answer(spark: SparkSession, shape: data.Shape, paths: tuple[str, ...]) -> Row:
    """Compute a digest of the groups, once for all runs over the same files."""
    rows = spark.read.parquet(*paths)
    return _digest(rows.groupBy(shape.key).agg(F.count("*").alias("n"), F.sum("value").alias("total")))


def _digest(groups: DataFrame) -> Row:
    """Return the number of groups, and the sum of their hashes."""
    row = F.xxhash64(F.struct("*")).cast("decimal(38,0)")
    digest = groups.agg(F.count("*"), F.sum(row)).first()
    assert digest is not None
    return digest


def measure_peer(
    spark: SparkSession, shape: data.Shape, paths: list[str], rows: int, console: Console
) -> dict[str, Any]:
    """Measure Spark Structured Streaming over the same files or a part of them, after a warm-up query over one file."""
    count = max(1, min(len(paths), PEER_ROWS // data.ROWS_PER_FILE))
    peer_rows = rows if count == len(paths) else count * data.ROWS_PER_FILE
    console.print(f"the peer: Spark Structured Streaming, available-now, {peer_rows:,} rows")
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", str(PEER_SHUFFLE_PARTITIONS))
    try:
        _stream(spark, shape, paths[:WARM_UP_FILES])
        started = time.time()
        seconds = _stream(spark, shape, paths[:count])
        startup = time.time() - started - seconds
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before or "200")
    return {
        "peer": "Spark Structured Streaming, available-now, default state store",
        "peer_rows": peer_rows,
        "peer_startup_s": round(startup, 2),
        "peer_seconds": round(seconds, 3),
        "peer_rows_per_s": round(peer_rows / seconds),
    }


def _stream(spark: SparkSession, shape: data.Shape, paths: list[str]) -> float:
    """Measure the seconds in which the micro-batches were executed: without planning and without writing offsets."""
    folder = tempfile.mkdtemp(prefix="flux-bench-peer-")
    try:
        stream = spark.readStream.schema(spark.read.parquet(paths[0]).schema).parquet(_linked(paths, folder))
        totals = stream.groupBy(shape.key).agg(F.count("*").alias("n"), F.sum("value").alias("total"))
        query = (
            totals.writeStream.outputMode("complete")
            .format("noop")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(600)
        return float(sum(progress["durationMs"].get("addBatch", 0) for progress in query.recentProgress)) / 1e3
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _linked(paths: list[str], folder: str) -> str:
    """Make a folder with just these files, which a file stream needs."""
    import os

    os.mkdir(f"{folder}/in")
    for path in paths:
        os.symlink(path, f"{folder}/in/{os.path.basename(path)}")
    return f"{folder}/in"
