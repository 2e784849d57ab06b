"""Several queries on one machine, and one whose driver dies: the flux command finds them and knows them apart."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from endless import ROOT, WAIT_S, Nothing, command, command_elsewhere, endless, parsed, rows_flow, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left_behind")]

pytest.importorskip("pyspark")


def all_have_reported() -> bool:
    status = parsed("status", "clicks")
    return status["stages"][0]["rows_in"] > 0 and all(worker["rss_bytes"] for worker in status["workers"])


def test_more_workers_that_are_asked_for_when_the_input_ends_are_no_failure(spark: Any, tmp_path: Path) -> None:
    """``scale`` raised QueryFailed, though nothing had failed."""
    gate = str(tmp_path / "gate")

    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        while not os.path.exists(gate):
            yield None
        yield pa.RecordBatch.from_pydict({"k": [partition]})

    query = Nothing(flux.source(read, "k BIGINT", partitions=2)).start(spark=spark, workers=1, queryName="ends")
    try:
        with ThreadPoolExecutor(1) as pool:
            scaled = pool.submit(query.scale, 2, timeout=WAIT_S)
            until(lambda: parsed("status", "ends")["requests"], "nothing was asked for")
            Path(gate).touch()
            assert query.awaitTermination(WAIT_S)
            assert scaled.result(WAIT_S) is None
    finally:
        query.stop()
    assert query.exception() is None


def test_queries_of_one_application_are_found_looked_at_and_gone_when_they_end(spark: Any) -> None:
    clicks = endless().start(queryName="clicks", spark=spark, workers=2, progress_interval="100ms", metrics_port=0)
    views = endless().start(queryName="views", spark=spark, workers=1, progress_interval="100ms")
    try:
        for query in (clicks, views):
            rows_flow(query)
        until(all_have_reported, "a worker has not reported yet")
        listed = parsed("list")["queries"]
        assert [(q["name"], q["id"], q["phase"], q["pid"]) for q in listed] == [
            ("clicks", clicks.id, "running", os.getpid()),
            ("views", views.id, "running", os.getpid()),
        ]
        assert spark.sparkContext.applicationId in listed[0]["application"]

        status = parsed("status", "clicks")
        assert (status["id"], status["phase"], status["epoch"]) == (clicks.id, "running", clicks.lastProgress["epoch"])
        assert status["stages"][0]["name"] == "Nothing"
        assert status["stages"][0]["rows_in"] > 0
        assert status["rows_in"] > 0
        assert [worker["rss_bytes"] > 0 for worker in status["workers"]] == [True, True]
        assert len(parsed("status", views.id[:13])["workers"]) == 1

        replicas = parsed("partitions", "clicks", "--stage", "Nothing")["replicas"]
        assert [(r["partition"], r["role"], r["safe"]) for r in replicas] == [(p, "primary", True) for p in range(4)]
        assert parsed("history", "clicks")["events"] == []

        text = parsed("metrics", "clicks")["text"]
        assert f'flux_rows_in_total{{id="{clicks.id}",query="clicks",stage="Nothing"}}' in text
        with urllib.request.urlopen(status["metrics"], timeout=WAIT_S) as response:
            over_http = response.read().decode()
        assert f'id="{clicks.id}"' in over_http
        assert views.id not in over_http, "it was not asked to serve its metrics"

        nameless = command_elsewhere("status")
        assert (nameless.returncode, "say which: clicks" in nameless.stderr) == (2, True)
    finally:
        clicks.stop()
        views.stop()
    assert parsed("list") == {"queries": []}
    assert command("status", "clicks").exit_code == 3


@pytest.mark.long  # tests/controller/test_connection_file.py shows the same with a process that has no Spark
@pytest.mark.starts_spark
def test_a_driver_that_dies_leaves_a_file_that_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_RUNTIME_DIR", str(tmp_path / "flux"))
    program = tmp_path / "program.py"
    program.write_text(
        "import time\n"
        "from pyspark.sql import SparkSession\n"
        "from endless import endless\n"
        "spark = SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "query = endless().start(queryName='doomed', spark=spark, workers=1)\n"
        "query.wait_until_running(120)\n"
        "print('running', flush=True)\n"
        "time.sleep(600)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ
        | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'spark'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert driver.stdout is not None
        assert "running" in driver.stdout.readline()
        assert parsed("status")["name"] == "doomed"
    finally:
        driver.kill()
        driver.communicate()
    (stale,) = parsed("list")["queries"]
    assert (stale["name"], stale["phase"], stale["stale"]) == ("doomed", None, f"its process {driver.pid} is gone")
    assert parsed("list") == {"queries": []}
    assert list((tmp_path / "flux").iterdir()) == []
