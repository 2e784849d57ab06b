"""Windows, sessions, joins and state per key over parquet files, in Flux and in Spark Structured Streaming, side by side in one
run; the cost of a watermark; and the age of a window's result and of a joined row at a sink.

    tumble           count and sum per key and 10 s, one million keys
    hop              count per item and 10 s, every 2 s, ten thousand items
    session          count per user and session with gaps of at most 10 s, one million users
    keyed            a Python method per key: ``flux.KeyedOperator`` beside ``transformWithState``
    interval_join    rows with equal keys within 2.5 s of each other, one million keys, one million rows that wait
    watermark_alone  count and sum per key over a source with a watermark, in turn with the same source without: no peer

Both sides read the same files with the same watermark and give final rows (append mode); the peer may read a part of the files,
because it is slower and its rate does not depend on the number of rows. Each side runs a warm-up query first. Each answer of Flux
is compared with that of Spark's batch engine, late rows included: the files have none. Only the execution of the peer's
micro-batches is counted, neither planning nor writing offsets.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.join_age import measure_join_age
from benchmarks.operating import await_any_progress
from benchmarks.result_age import measure_age
from benchmarks.timeline import Report
from spark_integration.query.output import fetch_all
from spark_integration.query.query import Query
from spark_integration.query.start import start_query

#: Events per second of event time, and rows of a file: two and a half seconds.
RATE, FILE_ROWS = 200_000, 500_000
#: Rows come out of order by less than this.
DISORDER_S, DELAY = 1.0, "4 seconds"
KEYS, ITEMS, USERS, FEW_USERS = 1_000_000, 10_000, 1_000_000, 10_000
READ_ROWS = 131_072
PARTITIONS = 16
#: Rows that the peer reads at most: windows, joins, and a Python method per key.
PEER_ROWS, PEER_JOIN_ROWS, PEER_KEYED_ROWS = 4_000_000, 2_000_000, 100_000
#: Files of a micro-batch of the peer.
PEER_FILES = 2
PEER_SHUFFLE_PARTITIONS = 2
WARM_UP_FILES = 2
WAIT_S = 600.0
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [("auction", pa.int64()), ("item", pa.int64()), ("user", pa.int64()), ("price", pa.int64()), ("ts", TIME)]
)


@dataclass(frozen=True)
class Case:
    """One program on both sides."""

    name: str
    #: The columns that both sides read.
    columns: tuple[str, ...]
    #: The stage of Flux.
    stage: Callable[[], Any]
    #: The query in Spark: over a DataFrame, streaming or not.
    spark: Callable[[DataFrame], DataFrame]
    #: The answer of Flux in the columns of ``spark``.
    shown: Callable[[DataFrame], DataFrame]
    rows: float = 1.0
    peer_rows: int = PEER_ROWS
    output_mode: str = "append"
    #: Times that each row of the files is read, once for each input.
    inputs: int = 1


class CountAndSum(flux.Aggregate):
    n = flux.count()
    total = flux.sum("price")


class Count(flux.Aggregate):
    n = flux.count()


class Spent(flux.KeyedOperator):
    """Count and sum per user, given after the rows of each step."""

    state_schema = "n BIGINT, total BIGINT"

    def on_rows(self, key: Any, rows: list[Any], state: Any) -> Any:
        state.n = (state.n or 0) + len(rows)
        state.total = (state.total or 0) + sum(row.price for row in rows)
        return *key, state.n, state.total


SPENT = "user BIGINT, n BIGINT, total BIGINT"


def spent_in_spark(rows: DataFrame) -> DataFrame:
    """Make the same with ``transformWithState``, which needs a stream; of a DataFrame, make the last result of each user."""
    if not rows.isStreaming:
        return rows.groupBy("user").agg(F.count("*").alias("n"), F.sum("price").alias("total"))
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Processor(StatefulProcessor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.state = handle.getValueState("state", "n BIGINT, total BIGINT")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
            n, total = self.state.get() if self.state.exists() else (0, 0)
            for row in rows:
                n, total = n + 1, total + row.price
            self.state.update((n, total))
            yield Row(user=key[0], n=n, total=total)

        def close(self) -> None: ...

    return rows.groupBy("user").transformWithState(Processor(), SPENT, "Update", "None")


def _of(key: str, window: Any, measures: type) -> Callable[[], Any]:
    return lambda: flux.stage(key=key, window=window, partitions=PARTITIONS)(measures)


def _grouped(window: Any, key: str, *measures: Any) -> Callable[[DataFrame], DataFrame]:
    def grouped(rows: DataFrame) -> DataFrame:
        groups = rows.withWatermark("ts", DELAY) if rows.isStreaming else rows
        return groups.groupBy(window(), key).agg(*(make() for make in measures))

    return grouped


def _flat(rows: DataFrame) -> DataFrame:
    """Return the columns of a window as Flux names them."""
    if "window" not in rows.columns and "session_window" not in rows.columns:
        return rows
    window = rows.columns[0]
    key, *measures = rows.columns[1:]
    return rows.select(key, f"{window}.start", f"{window}.end", *measures).toDF(
        key, "window_start", "window_end", *measures
    )


#: Rows of both sides that wait: those of twice this time.
NEAR = "l.auction = r.user AND l.ts BETWEEN r.ts - INTERVAL 2500 MILLISECONDS AND r.ts + INTERVAL 2500 MILLISECONDS"


def _joined(rows: Any) -> Any:
    """Join rows with others of the same source: in Flux and in Spark alike."""
    columns = F.col("l.auction"), F.col("l.ts").alias("ts"), F.col("r.ts").alias("other_ts")
    return rows.alias("l").join(rows.alias("r"), F.expr(NEAR)).select(*columns)


def _join_in_flux(rows: Any) -> Any:
    return _joined(rows).withStage(partitions=PARTITIONS)


def _join_in_spark(rows: DataFrame) -> Any:
    return _joined(rows.withWatermark("ts", DELAY) if rows.isStreaming else rows)


def _n() -> Any:
    return F.count("*").alias("n")


def _last(rows: DataFrame) -> DataFrame:
    """Return the last result of each user: counts only grow."""
    return rows.groupBy("user").agg(F.max("n").alias("n"), F.max_by("total", "n").alias("total"))


def _same(rows: DataFrame) -> DataFrame:
    return rows


CASES = {
    case.name: case
    for case in (
        Case(
            "tumble",
            ("auction", "price", "ts"),
            _of("auction", flux.window("ts", "10 seconds"), CountAndSum),
            _grouped(lambda: F.window("ts", "10 seconds"), "auction", _n, lambda: F.sum("price").alias("total")),
            _same,
        ),
        Case(
            "hop",
            ("item", "ts"),
            _of("item", flux.window("ts", "10 seconds", "2 seconds"), Count),
            _grouped(lambda: F.window("ts", "10 seconds", "2 seconds"), "item", _n),
            _same,
        ),
        Case(
            "session",
            ("user", "ts"),
            _of("user", flux.session_window("ts", "10 seconds"), Count),
            _grouped(lambda: F.session_window("ts", "10 seconds"), "user", _n),
            _same,
        ),
        Case(
            "keyed",
            ("user", "price", "ts"),
            lambda: flux.stage(key="user", schema=SPENT, partitions=PARTITIONS)(Spent),
            spent_in_spark,
            _last,
            rows=0.25,
            peer_rows=PEER_KEYED_ROWS,
            output_mode="update",
        ),
        Case(
            "interval_join",
            ("auction", "user", "ts"),
            lambda: _join_in_flux,
            _join_in_spark,
            _same,
            rows=0.5,
            peer_rows=PEER_JOIN_ROWS,
            inputs=2,
        ),
    )
}
#: The case without a peer and without an answer of Spark: half of its runs have no event time.
WATERMARK_ALONE = "watermark_alone"
NAMES = (*CASES, WATERMARK_ALONE)


def run(
    names: list[str],
    rows: int,
    workers: int,
    peer: bool,
    seconds: float,
    rate: int,
    console: Console,
    rounds: int = 1,
    join_rate: int = 20_000,
) -> Report:
    """Run the cases, and then measure the age of results for ``seconds`` at ``rate`` rows per second, and that of joined rows at
    ``join_rate`` rows per second on each side; 0 seconds: do not."""
    settings: dict[str, Any] = {"spark.sql.session.timeZone": "UTC", "spark.sql.files.maxPartitionBytes": 1 << 30}
    spark, startup = session.start(workers, 2, **settings)
    result: dict[str, Any] = {"benchmark": "eventtime", "rows": rows, "workers": workers}
    result |= {"spark_startup_s": round(startup, 2), "flux": "one replica, no checkpoint location; state in memory"}
    if peer:
        result["peer"] = "Spark Structured Streaming, available-now, checkpoint in a local folder, default state store"
        result["peer_keyed"] = "transformWithState, RocksDB state store"
    try:
        for name in names or NAMES:
            if name == WATERMARK_ALONE:
                result |= _watermark_alone(spark, rows, workers, rounds, console)
            else:
                result |= _case(spark, CASES[name], rows, workers, peer, rounds, console)
        if seconds:
            result |= measure_age(spark, rate, seconds, workers, console)
            result |= measure_join_age(spark, join_rate, seconds, workers, console)
    finally:
        spark.stop()
    return Report(result)


def _case(
    spark: SparkSession, case: Case, rows: int, workers: int, peer: bool, rounds: int, console: Console
) -> dict[str, Any]:
    paths = files(max(int(rows * case.rows) // FILE_ROWS, 1), case.name == "keyed")
    total = len(paths) * FILE_ROWS * case.inputs
    _measure(spark, case, paths[:WARM_UP_FILES], workers)
    rates = [total / _measure(spark, case, paths, workers) for _ in range(rounds)]
    found: dict[str, Any] = {f"{case.name}_rows": total, f"{case.name}_rows_per_s": round(_median(rates))}
    console.print(f"{case.name}: {total:,} rows, {', '.join(f'{rate:,.0f}' for rate in rates)} rows/s")
    if peer:
        try:
            found |= _peer(spark, case, paths, rounds, console)
        except (PySparkException, ImportError) as error:  # such as a package that it lacks
            found[f"{case.name}_peer"] = f"cannot run: {str(error).splitlines()[0][:200]}"
            return found
        found[f"{case.name}_ratio"] = round(found[f"{case.name}_rows_per_s"] / found[f"{case.name}_peer_rows_per_s"], 2)
    return found


def _watermark_alone(spark: SparkSession, rows: int, workers: int, rounds: int, console: Console) -> dict[str, Any]:
    """Measure a stage whose rows have a watermark and no window, in turn with the same stage without one."""
    paths = files(max(rows // FILE_ROWS, 1), False)
    total, columns = len(paths) * FILE_ROWS, CASES["tumble"].columns
    schema = pa.schema([SCHEMA.field(name) for name in columns])

    def rate(timed: bool, some: list[str]) -> float:
        source: Any = flux.source(reader(some, workers, columns), schema, partitions=workers)
        rows = source.withWatermark("ts", DELAY) if timed else source
        flow = flux.stage(key="auction", partitions=PARTITIONS, output_mode="complete")(CountAndSum)(rows)
        return len(some) * FILE_ROWS / _seconds(spark, flow, workers)

    rates: dict[bool, list[float]] = {False: [], True: []}
    for timed in rates:
        rate(timed, paths[:WARM_UP_FILES])
    for _ in range(rounds):
        for timed, found in rates.items():
            found.append(rate(timed, paths))
    without, alone = _median(rates[False]), _median(rates[True])
    console.print(f"watermark alone: {total:,} rows, {alone:,.0f} rows/s with one and {without:,.0f} without")
    return {
        "watermark_alone_rows": total,
        "watermark_alone_rows_per_s": round(alone),
        "without_watermark_rows_per_s": round(without),
        "watermark_alone_ratio": round(alone / without, 3),
    }


def _median(rates: list[float]) -> float:
    """Return the median, the lower one of two."""
    return sorted(rates)[(len(rates) - 1) // 2]


# ---- rows


def files(count: int, few: bool) -> list[str]:
    """Return the paths of parquet files, the same rows in every run. ``few``: of few users."""
    folder = Path(tempfile.gettempdir()) / f"flux-bench-{os.getuid()}" / f"events-{'few-' if few else ''}{count}"
    if not (folder / "_SUCCESS").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number in range(count):
            table = _rows(number, FEW_USERS if few else USERS)
            pq.write_table(table, folder / f"part-{number:04}.parquet", compression="none", use_dictionary=False)
        (folder / "_SUCCESS").touch()
    paths = sorted(str(path) for path in folder.glob("*.parquet"))
    for path in paths:  # into the page cache, from which the system may have taken them since the last run
        Path(path).read_bytes()
    return paths


def _rows(number: int, users: int) -> pa.Table:
    random = np.random.default_rng(number)
    at = np.arange(number * FILE_ROWS, (number + 1) * FILE_ROWS) / RATE - random.random(FILE_ROWS) * DISORDER_S
    columns = [random.integers(0, keys, FILE_ROWS) for keys in (KEYS, ITEMS, users, 1000)]
    times = pa.array((at * 1e6).astype(np.int64)).view(TIME)
    return pa.Table.from_arrays([*map(pa.array, columns), times], schema=SCHEMA)


def reader(paths: list[str], partitions: int, columns: tuple[str, ...]) -> Any:
    """Make a source for the workers: partition p reads every ``partitions``-th file."""

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch]:
        for path in paths[partition::partitions]:
            with pq.ParquetFile(path, memory_map=True) as file:
                batches = -(-file.metadata.num_rows // READ_ROWS)
                if start < batches:
                    given = file.iter_batches(batch_size=READ_ROWS, columns=list(columns), use_threads=False)
                    yield from islice(given, start, None)
                start = max(start - batches, 0)

    return read


# ---- Flux


def _measure(spark: SparkSession, case: Case, paths: list[str], workers: int) -> float:
    """Run the flow once, and return its seconds from the first row to the last result. Raise if its answer is wrong."""
    schema = pa.schema([SCHEMA.field(name) for name in case.columns])
    source: Any = flux.source(reader(paths, workers, case.columns), schema, partitions=workers)
    flow = case.stage()(source.withWatermark("ts", DELAY))

    def check(query: Query) -> None:
        found, expected = _digest(case.shown(fetch_all(query))), _answer(spark, case.name, tuple(paths))
        if found != expected:
            raise AssertionError(
                f"{case.name}: the answer differs from Spark's batch answer: {found} against {expected}"
            )

    return _seconds(spark, flow, workers, check)


def _seconds(
    spark: SparkSession, flow: Any, workers: int, check: Callable[[Query], None] = lambda query: None
) -> float:
    """Run a flow once, and return its seconds from the first row to the last result. ``check`` gets the query with its
    output."""
    query = start_query([flow], "eventtime", spark, keep_output=True, workers=workers, progress_interval="500ms")
    try:
        progress, end = None, time.monotonic() + WAIT_S
        while (progress := await_any_progress(query, progress, 120)) is not None and time.monotonic() < end:
            if query.phase not in ("starting", "running"):
                break
        query.wait_for_output()
        last = query.lastProgress
        assert last is not None
        check(query)
        return float(last["finishedAt"] - last["firstRowAt"])
    finally:
        query.stop()


@lru_cache(maxsize=16)
def _answer(spark: SparkSession, name: str, paths: tuple[str, ...]) -> Row:
    """Compute a digest of the batch answer, once for all runs over the same files."""
    return _digest(_flat(CASES[name].spark(spark.read.parquet(*paths))))


def _digest(groups: DataFrame) -> Row:
    """Return the number of groups, and the sum of their hashes."""
    digest = groups.agg(F.count("*"), F.sum(F.xxhash64(F.struct("*")).cast("decimal(38,0)"))).first()
    assert digest is not None
    return digest


# ---- the peer


def _peer(spark: SparkSession, case: Case, paths: list[str], rounds: int, console: Console) -> dict[str, Any]:
    """Measure Spark Structured Streaming over the same files or a part of them, after a warm-up query."""
    settings = {"spark.sql.shuffle.partitions": str(PEER_SHUFFLE_PARTITIONS)}
    if case.name == "keyed":
        settings["spark.sql.streaming.stateStore.providerClass"] = ROCKSDB
    before = {key: spark.conf.get(key, None) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    count = min(case.peer_rows // FILE_ROWS, len(paths))
    part = paths[:count] if count else [_part(paths[0], case.peer_rows)]
    rows = count * FILE_ROWS or case.peer_rows
    try:
        _stream(spark, case, part[:WARM_UP_FILES])
        rates = [rows * case.inputs / _stream(spark, case, part) for _ in range(rounds)]
    finally:
        for key, old in before.items():
            spark.conf.unset(key) if old is None else spark.conf.set(key, old)
    console.print(f"{case.name}: peer {rows:,} rows, {', '.join(f'{rate:,.0f}' for rate in rates)} rows/s")
    return {f"{case.name}_peer_rows": rows * case.inputs, f"{case.name}_peer_rows_per_s": round(_median(rates))}


def _part(path: str, rows: int) -> str:
    """Write the first rows of a file to another one."""
    part = Path(path).with_suffix(f".first-{rows}")
    if not part.exists():
        pq.write_table(pq.read_table(path).slice(0, rows), part, compression="none", use_dictionary=False)
    return str(part)


def _stream(spark: SparkSession, case: Case, paths: list[str]) -> float:
    """Measure the seconds in which the micro-batches were executed."""
    folder = tempfile.mkdtemp(prefix="flux-bench-peer-")
    try:
        os.mkdir(f"{folder}/in")
        for path in paths:
            os.symlink(path, f"{folder}/in/{Path(path).stem}.parquet")
        schema = spark.read.parquet(paths[0]).schema
        stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", PEER_FILES).parquet(f"{folder}/in")
        query = (
            case.spark(stream.select(*case.columns))
            .writeStream.outputMode(case.output_mode)
            .format("noop")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        if not query.awaitTermination(int(WAIT_S)):
            query.stop()
            raise AssertionError(f"{case.name}: the peer has not ended after {WAIT_S:g} s")
        return float(sum(progress["durationMs"].get("addBatch", 0) for progress in query.recentProgress)) / 1e3
    finally:
        shutil.rmtree(folder, ignore_errors=True)
