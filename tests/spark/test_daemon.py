"""Workers that are forked by a process which has loaded Flux (design: forked-ready)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import py4j
import pyspark
import pytest

from spark_integration.daemon import without_archives

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0

PROGRAM = """
import faulthandler, json, os, signal, sys
faulthandler.dump_traceback_later(120, exit=True)  # it says where it is if it hangs
import flux
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from striking import strike, until

spark = (
    SparkSession.builder.master("local[4,8]")
    .config("spark.ui.enabled", "false")
    .config("spark.python.daemon.module", "spark_integration.daemon")
    .config("spark.python.worker.reuse", sys.argv[1])
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")


def about(numbers):
    import threading, numpy, pyspark
    yield {
        "pid": os.getpid(), "loaded": "flux.shell.worker" in sys.modules, "drawn": float(numpy.random.rand()),
        "pyspark": pyspark.__file__, "threads": threading.active_count(),
    }


def forked():
    import time
    def body(numbers):
        time.sleep(1)  # so that each is in a process of its own
        yield from about(numbers)
    return spark.sparkContext.parallelize(range(4), 4).mapPartitions(body).collect()


class Sums(flux.Aggregate):
    rows = flux.count()
    total = flux.sum("n")


said = {"forked": forked()}
numbers = spark.range(0, 2_000_000, 1, 3).select((F.col("id") % 1000).alias("key"), F.col("id").alias("n"))
query = flux.stage(key="key", partitions=4, replicas=2)(Sums)(numbers).start(spark=spark, workers=2, keep_output=True)
until(lambda: (query.lastProgress or {}).get("numInputRows"), "rows")
strike(query, signal.SIGKILL)
found = {row.key: (row.rows, row.total) for row in query.toDF().collect()}
expected = {
    row.key: (row.rows, row.total)
    for row in numbers.groupBy("key").agg(F.count("n").alias("rows"), F.sum("n").alias("total")).collect()
}
udf = F.udf(lambda number: number + 1, "long")
said |= {"equal": found == expected, "keys": len(found), "udf": spark.range(3).select(udf("id")).collect()}
print(json.dumps(said))
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("reuse", ["true", "false"])
def test_workers_are_forked_with_flux_loaded_and_survive_a_kill(tmp_path: Path, reuse: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "spark")]),
    }
    done = subprocess.run(
        [sys.executable, str(program), reuse], env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr[-6000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert len({each["pid"] for each in said["forked"]}) == 4
    assert all(each["loaded"] for each in said["forked"])
    assert all(each["threads"] == 1 for each in said["forked"])
    assert len({each["drawn"] for each in said["forked"]}) == 4, "workers draw the same random numbers"
    assert {each["pyspark"] for each in said["forked"]} == {pyspark.__file__}
    assert said["equal"]
    assert said["keys"] == 1000
    assert said["udf"] == [[1], [2], [3]]


def test_archives_of_the_same_release_are_left_out(tmp_path: Path) -> None:
    installed, archive, other = tmp_path / "site", tmp_path / "pyspark.zip", tmp_path / "py4j-1-src.zip"
    (installed / "pyspark").mkdir(parents=True)
    (installed / "py4j").mkdir()
    (installed / "pyspark" / "version.py").write_text("4.3.0")
    _archive(archive, "4.3.0")
    path = ["work", str(archive), str(other), "jobs-src.zip", str(installed)]
    assert without_archives(path) == ["work", "jobs-src.zip", str(installed)]


@pytest.mark.parametrize("missing", ["py4j", "pyspark", "release", "archive", "damaged"])
def test_archives_stay_where_the_same_is_not_installed(tmp_path: Path, missing: str) -> None:
    installed, archive = tmp_path / "site", tmp_path / "pyspark.zip"
    installed.mkdir()
    if missing != "pyspark":
        (installed / "pyspark").mkdir()
        (installed / "pyspark" / "version.py").write_text("4.2.9" if missing == "release" else "4.3.0")
    if missing != "py4j":
        (installed / "py4j").mkdir()
    if missing == "damaged":
        archive.write_bytes(b"no archive")
    elif missing != "archive":
        _archive(archive, "4.3.0")
    path = ["", str(archive), "py4j-1-src.zip", str(installed)]
    assert without_archives(path) == path


def test_the_archives_of_this_installation_are_left_out() -> None:
    library = Path(pyspark.__file__).parent / "python" / "lib"
    archives = [str(each) for each in sorted(library.glob("*.zip"))]
    installed = str(Path(pyspark.__file__).parents[1])
    assert Path(py4j.__file__).is_relative_to(installed)
    assert len(archives) == 2
    assert without_archives([*archives, installed]) == [installed]


def _archive(path: Path, version: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pyspark/version.py", version)
