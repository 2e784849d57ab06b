"""Structured Streaming into a query, with kills in the middle of a batch: each row once, as in Spark's batch answer (design:
micro-batches)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset
import pytest
import test_checkpoint_location
from pyspark.sql import functions as F  # noqa: N812
from streamed import HELD, KEYS, PAD, ROWS, WAIT_S, started, stream, write_files
from striking import until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


@flux.stage(key="key", partitions=4, replicas=2)
class PerKey(flux.Aggregate):
    n = flux.count()
    total = flux.sum("sequence")
    pad = flux.max("pad")  # so that it travels: rows without it would stay in a pipe, behind the file that stands still


@pytest.mark.usefixtures("callbacks", "nothing_left_behind")
def test_a_worker_and_a_task_are_killed_in_the_middle_of_a_batch(slots: Any, tmp_path: Path) -> None:
    write_files(slots, tmp_path / "in", 0, 4)
    query = PerKey(stream(slots, tmp_path)).start(
        spark=slots, workers=3, keep_output=True, batch_max_rows=100, progress_interval="100ms"
    )

    def applied() -> int:
        return sum(m.stats.get("rows_in", 0) for m in list(query._server.core.members.workers.values()))

    try:
        # Both replicas count, and some of the rows of the last file come before it stands still.
        until(lambda: applied() > 2 * (HELD * ROWS + ROWS // 4), "rows of the file in whose middle it stands still")
        assert query._run.streams._running[0].lastProgress["batchId"] == 0, "the second batch is under way"
        worker = next(iter(query.members()))
        os.kill(query.members()[worker].about.pid, signal.SIGKILL)
        until(lambda: worker not in query.members(), "the loss of the worker is noticed")
        task = max(query._server.core.members.ingress.values(), key=lambda member: member.left is False)
        assert not task.left
        os.kill(task.about.pid, signal.SIGKILL)
        (tmp_path / "gate").touch()  # Spark ends the task once the step before it in the JVM gives its rows
        got = sorted(map(tuple, query.toDF().collect()))
    finally:
        (tmp_path / "gate").touch()
        query.stop()
    answer = slots.read.parquet(str(tmp_path / "in")).groupBy("key")
    theirs = answer.agg(F.count("*"), F.sum("sequence"), F.lit("x" * PAD))
    assert got == sorted(map(tuple, theirs.collect()))
    assert "take-over" in {event.kind for event in query.events()}


PROGRAM = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from streamed import started
from test_checkpoint_location import started as started_beside

builder = SparkSession.builder.master("local[8]").config("spark.ui.enabled", "false")
spark = builder.config("spark.python.daemon.module", "spark_integration.daemon").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
beside = started_beside(spark, Path(sys.argv[1]) / "beside", 2)
started(spark, Path(sys.argv[1])).awaitTermination()
"""


def rows_there(tmp_path: Path) -> Any:
    return pyarrow.dataset.dataset(tmp_path / "rows", format="parquet", exclude_invalid_files=True).to_table()


def check_rows(tmp_path: Path, files: int) -> None:
    """Check that each row is there once, and that no row before it was lost or doubled in the state."""
    found = rows_there(tmp_path)
    assert sorted(found["sequence"].to_pylist()) == list(range(files * ROWS))
    seen = Counter(zip(found["key"].to_pylist(), found["seen"].to_pylist(), strict=True))
    assert len(seen) == seen.total() == files * ROWS
    assert max(count for _, count in seen) == -(-files * ROWS // KEYS) - 1


def test_the_driver_is_killed_between_the_offsets_of_a_batch_and_its_commit(spark: Any, tmp_path: Path) -> None:
    """Another query of the same driver, with a source of its own, goes on with another number of workers."""
    write_files(spark, tmp_path / "in", 0, 4)
    beside, checkpoint = tmp_path / "beside", tmp_path / "location" / "stream-stream"
    beside.mkdir()
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable}
    environment["FLUX_RUNTIME_DIR"] = str(
        tmp_path / "queries"
    )  # no other test may find the files that a killed driver leaves there
    driver = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, cwd=ROOT)

    def in_mid_stream() -> bool:
        """Tell whether one partition of the batch is applied whole and the other in part, and some rows of the other query."""
        time.sleep(0.2)
        if not (tmp_path / "rows").exists() or rows_there(tmp_path).num_rows <= HELD * ROWS + ROWS // 4:
            return driver.poll() is not None
        return test_checkpoint_location.rows_there(beside) > test_checkpoint_location.TOTAL // 4

    try:
        wanted = "rows of the file in whose middle it stands still, and of the other query"
        until(in_mid_stream, wanted, 3 * WAIT_S)  # a machine under load takes its time until both have begun
        assert driver.poll() is None, "it must be killed in mid-stream"
    finally:
        family = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        for process in family:
            process.kill()
        driver.wait()
        psutil.wait_procs(family, 10)
    (beside / "gate").touch()
    assert test_checkpoint_location.started(spark, beside, 3).awaitTermination(WAIT_S)
    test_checkpoint_location.check_rows(beside)
    assert (checkpoint / "offsets" / "1").exists()
    assert not (checkpoint / "commits" / "1").exists()
    (tmp_path / "gate").touch()
    assert started(spark, tmp_path).awaitTermination(WAIT_S)
    check_rows(tmp_path, 4)
    assert (checkpoint / "commits" / "1").exists()

    write_files(spark, tmp_path / "in", 4, 1)  # later rows are for the next start
    assert started(spark, tmp_path).awaitTermination(WAIT_S)
    check_rows(tmp_path, 5)

    flow = flux.stage(lambda batch: batch)(stream(spark, tmp_path, checkpoint=checkpoint))
    with pytest.raises(
        flux.UsageError, match=r"has batches through 2, .* not in the state of this query, which is new"
    ):
        flow.start(spark=spark, workers=1)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
