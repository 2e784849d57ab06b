"""Speculated tasks of micro-batches: Spark runs a task a second time while the first attempt still sends, and both send rows.

    PYTHONPATH=. .venv/bin/python tests/spark/speculated.py

A program of its own, because a session begins with ``spark.speculation`` or not at all. Through ``flux.stream(df)`` and through
``writeStream.format("flux")`` each row must count once, as in Spark's batch answer. In each batch the first attempt of a task
sends some rows and waits until another attempt has sent more, so that no batch passes without both. Exit code 0: all is equal,
and every batch had a speculated task."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from pyspark import TaskContext
from pyspark.sql import SparkSession, functions

import flux
from benchmarks.ports import free_port

BATCHES, ROWS, TASKS, FEW = 3, 4_000, 4, 100
WAIT_S = 120.0
COLUMNS = "k BIGINT, v BIGINT"


@flux.stage(key="k", partitions=4, replicas=2)
class PerKey(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")


@flux.stage(key="k", partitions=4, replicas=2)
def rows_of_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def slow_at_first(
    notes: str,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Hold the first attempt of the first task of a batch until another one is half through its rows; note both."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task: Any = TaskContext.get()
        first = task.attemptNumber() == 0
        half = Path(notes) / f"{task.getLocalProperty('streaming.sql.batchId')}-half"
        sent = 0
        for batch in batches:
            for start in range(0, batch.num_rows, FEW):
                sent += FEW
                if task.partitionId() == 0 and sent == 3 * FEW:
                    end = time.monotonic() + WAIT_S
                    while first and not half.exists() and time.monotonic() < end:
                        time.sleep(0.01)
                if task.partitionId() == 0 and not first:
                    time.sleep(0.02)  # neither is much ahead
                    if sent > 5 * FEW:
                        half.touch()
                yield batch.slice(start, FEW)

    return run


def streaming(spark: SparkSession, folder: Path, notes: Path) -> Any:
    """Write files of ``TASKS`` partitions, one for each."""
    notes.mkdir()
    df = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", TASKS).parquet(str(folder))
    return df.mapInArrow(slow_at_first(str(notes)), COLUMNS)


def through_stream(spark: SparkSession, folder: Path, notes: Path) -> list[Any]:
    source = flux.stream(streaming(spark, folder, notes), trigger={"availableNow": True})
    return [tuple(row) for row in PerKey(source).collect(spark=spark, workers=2)]


def through_format(spark: SparkSession, folder: Path, notes: Path) -> list[Any]:
    out = notes.parent / "rows"
    flow = rows_of_keys(flux.stream(COLUMNS)).to_parquet(out, roll_every="100ms")
    query = flow.start(queryName="speculated", spark=spark, workers=2)
    try:
        query.wait_until_running(WAIT_S)
        writer = streaming(spark, folder, notes).writeStream.format("flux").option("query", "speculated")
        writer = writer.option("checkpointLocation", str(notes.parent / "checkpoint")).trigger(availableNow=True)
        writer.start().awaitTermination()
        query.processAllAvailable(WAIT_S)
    finally:
        query.stop()
    return answer(spark, out)


def answer(spark: SparkSession, folder: Path) -> list[Any]:
    """Compute Spark's own answer of a batch."""
    rows = spark.read.parquet(str(folder)).groupBy("k").agg(functions.count("*"), functions.sum("v"))
    return list(map(tuple, rows.collect()))


@contextlib.contextmanager
def cluster(scratch: Path) -> Iterator[str]:
    """Run a master and two workers with addresses of their own: Spark speculates no task on the host that it is on already."""
    home, port = Path(pyspark.__file__).parent, free_port()
    master = f"spark://127.0.0.1:{port}"
    started = []

    def start(kind: str, *arguments: str) -> None:
        command = [
            str(home / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{kind}",
            *arguments,
            "--webui-port",
            "0",
        ]
        with open(scratch / f"{len(started)}.log", "w") as log:
            started.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "SPARK_HOME": str(home)},
                )
            )

    try:
        start("master.Master", "--host", "127.0.0.1", "--port", str(port))
        for number in (2, 3):
            folder = scratch / f"worker-{number}"
            start(
                "worker.Worker",
                "--host",
                f"127.0.0.{number}",
                "-c",
                "4",
                "-m",
                "1g",
                "-d",
                str(folder),
                master,
            )
        yield master
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="flux-speculated-") as scratch, cluster(Path(scratch)) as master:
        return compared(master, Path(scratch))


def compared(master: str, scratch: Path) -> int:
    """Run both ways and return how many of them gave other rows."""
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(master).appName("speculated")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "1g",
        "spark.executorEnv.PYTHONPATH": python_path,
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.sql.files.openCostInBytes": "1g",  # a task for each file
        "spark.sql.shuffle.partitions": "4",
        "spark.flux.workers.timeout": "180s",
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    wrong = 0
    try:
        folder = scratch / "in"
        rows = spark.range(0, BATCHES * ROWS, 1, BATCHES * TASKS).selectExpr("id % 7 k", "id v")
        rows.write.parquet(str(folder))
        expected = sorted(answer(spark, folder))
        for name, way in (
            ("flux.stream", through_stream),
            ("format('flux')", through_format),
        ):
            notes = scratch / name.replace("'", "") / "notes"
            notes.parent.mkdir()
            found = sorted(way(spark, folder, notes))
            twice = len(list(notes.iterdir()))
            good = found == expected and twice == BATCHES
            wrong += not good
            print(f"{name}: {sum(n for _, n, _ in found):,} rows of {BATCHES * ROWS:,}, {twice} of {BATCHES} batches with a "
                  f"speculated task: {'as expected' if good else f'{found} is not {expected}'}")  # fmt: skip
    finally:
        spark.stop()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
