"""Workers that are forked by a process which has loaded Flux (design: forked-ready)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import py4j
import pyspark
import pytest
from pyspark.sql import functions as F  # noqa: N812
from striking import rows_in, strike, until

import flux
from spark_integration.daemon import SAID_BYTES, without_archives
from spark_integration.tasks.worker_tasks import collect_in_tasks

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0

PROGRAM = """
import faulthandler, json, os, shutil, signal, sys
import psutil
faulthandler.dump_traceback_later(120, exit=True)  # it says where it is if it hangs
import flux
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from striking import rows_in, strike, until

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
        "pid": os.getpid(), "loaded": "flux.shell.worker_loop" in sys.modules, "drawn": float(numpy.random.rand()),
        "pyspark": pyspark.__file__, "threads": [type(each).__name__ for each in threading.enumerate()],
    }


def forked():
    import time
    def body(numbers):
        time.sleep(1)  # so that each is in a process of its own
        yield from about(numbers)
    return spark.sparkContext.parallelize(range(4), 4).mapPartitions(body).collect()


def sql():
    parent = F.udf(lambda number: os.getppid(), "long")
    return [row.parent for row in spark.range(1).select(parent("id").alias("parent")).collect()]


class Sums(flux.Aggregate):
    rows = flux.count()
    total = flux.sum("n")


said = {"forked": forked()}
numbers = spark.range(0, 2_000_000, 1, 3).select((F.col("id") % 1000).alias("key"), F.col("id").alias("n"))
shutil.rmtree(spark.sparkContext._temp_dir)  # as those do who clean up temporary folders
query = flux.stage(key="key", partitions=4, replicas=2)(Sums)(numbers).start(spark=spark, workers=2, keep_output=True)
until(lambda: rows_in(query), "rows", 60)
workers = [member.about.pid for member in query.members().values()]
said["daemons"] = sorted({psutil.Process(pid).ppid() for pid in workers} | set(sql()))
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
@pytest.mark.long  # the next test shows the same with the executors that are there, and workers that are used again
@pytest.mark.timeout(300)
def test_workers_are_forked_with_flux_loaded_and_survive_a_kill_where_each_has_one_task(tmp_path: Path) -> None:
    said = _said(tmp_path, PROGRAM, "false")
    look_at_forked(said["forked"])
    assert len(said["daemons"]) == 1, ONE_DAEMON
    assert said["equal"]
    assert said["keys"] == 1000
    assert said["udf"] == [[1], [2], [3]]


#: The law of the environment of worker tasks (design: worker).
ONE_DAEMON = "workers and tasks of SQL are forked by different daemons, each of which loads Flux"


def look_at_forked(forked: list[dict[str, Any]]) -> None:
    assert len({each["pid"] for each in forked}) == 4
    assert all(each["loaded"] for each in forked)
    # pyzmq keeps a thread in a process that has sent a large frame.
    assert {name for each in forked for name in each["threads"]} <= {"_MainThread", "GarbageCollectorThread"}
    assert len({each["drawn"] for each in forked}) == 4, "workers draw the same random numbers"
    assert {each["pyspark"] for each in forked} == {pyspark.__file__}


class Sums(flux.Aggregate):
    rows = flux.count()
    total = flux.sum("n")


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_workers_are_forked_with_flux_loaded_and_survive_a_kill(cluster: Any, nothing_left_behind: None) -> None:
    def about(numbers: Any) -> Iterator[dict[str, Any]]:
        """Look for the kernels in the process that forked the worker: a worker that is used again may have loaded Flux itself."""
        import threading
        import time

        import numpy
        import pyspark

        loaded = "llvmlite" in Path(f"/proc/{os.getppid()}/maps").read_text()
        time.sleep(1)  # so that each is in a process of its own
        yield {
            "pid": os.getpid(), "loaded": loaded, "drawn": float(numpy.random.rand()), "pyspark": pyspark.__file__,
            "threads": [type(each).__name__ for each in threading.enumerate()],
        }  # fmt: skip

    def parent(number):  # type: ignore[no-untyped-def]  # pyspark would look at the types, too
        import time

        time.sleep(0.2)  # so that each executor has some
        return os.getppid()

    look_at_forked(collect_in_tasks(cluster, about, 4))
    numbers = cluster.range(0, 1_000_000, 1, 3).select((F.col("id") % 1000).alias("key"), F.col("id").alias("n"))
    shutil.rmtree(cluster.sparkContext._temp_dir)  # as those do who clean up temporary folders
    stage = flux.stage(key="key", partitions=4, replicas=2)(Sums)
    query = stage(numbers).start(spark=cluster, workers=2, keep_output=True)
    try:
        until(lambda: rows_in(query), "rows")
        of_workers = {psutil.Process(member.about.pid).ppid() for member in query.members().values()}
        strike(query, signal.SIGKILL, stage=0)
        found = {row.key: (row.rows, row.total) for row in query.toDF().collect()}
    finally:
        query.stop()
    parents = F.udf(parent, "long")  # in more tasks than there are executors, each of which has a free slot
    of_sql = {row.parent for row in cluster.range(0, 6, 1, 6).select(parents("id").alias("parent")).collect()}
    assert of_workers <= of_sql, ONE_DAEMON
    theirs = numbers.groupBy("key").agg(F.count("n").alias("rows"), F.sum("n").alias("total"))
    assert found == {row.key: (row.rows, row.total) for row in theirs.collect()}
    assert len(found) == 1000


def test_archives_of_the_same_release_are_left_out(tmp_path: Path) -> None:
    path = _installed(tmp_path)
    assert without_archives(["work", *path[:2], "jobs-src.zip", *path[2:]]) == ["work", "jobs-src.zip", path[2]]


FAULTS = {
    "py4j is not installed": lambda folder: shutil.rmtree(folder / "site" / "py4j"),
    "pyspark is not installed": lambda folder: shutil.rmtree(folder / "site" / "pyspark"),
    "another pyspark": lambda folder: (folder / "site" / "pyspark" / "version.py").write_text("4.2.9"),
    "another py4j": lambda folder: (folder / "site" / "py4j" / "version.py").write_text("2"),
    "no archive": lambda folder: (folder / "pyspark.zip").unlink(),
    "a damaged archive": lambda folder: (folder / "py4j-1-src.zip").write_bytes(b"no archive"),
    "a folder of that name before": lambda folder: (folder / "mine" / "pyspark").mkdir(parents=True),
    "a module of that name before": lambda folder: _write(folder / "mine" / "py4j.py"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_archives_stay_where_the_same_is_not_installed(tmp_path: Path, fault: str) -> None:
    path = _installed(tmp_path)
    FAULTS[fault](tmp_path)
    path = ["", *path[:2], str(tmp_path / "mine"), path[2]]
    assert without_archives(path) == path


def test_the_archives_of_this_installation_are_left_out() -> None:
    library = Path(pyspark.__file__).parent / "python" / "lib"
    archives = [str(each) for each in sorted(library.glob("*.zip"))]
    installed = str(Path(pyspark.__file__).parents[1])
    assert Path(py4j.__file__).is_relative_to(installed)
    assert len(archives) == 2
    assert without_archives([*archives, installed]) == [installed]


AT_ONCE = """
import json
import flux
from pyspark.sql import SparkSession
from spark_integration.tasks.worker_tasks import executors_there

said = []
for number in range(2):  # the second session has a warm JVM of a driver, and executors that are still starting
    spark = SparkSession.builder.master("local-cluster[2,2,1024]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    there = executors_there(spark)
    numbers = spark.range(0, 1000, 1, 1).selectExpr("id % 10 AS key", "id")
    sums = flux.stage(key="key", partitions=2, replicas=2)(type("Sums", (flux.Aggregate,), {"rows": flux.count()}))
    said.append({"there": there, "rows": sums(numbers).toDF(spark=spark, workers=2).agg({"rows": "sum"}).collect()[0][0]})
    spark.stop()
print(json.dumps(said))
"""


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_query_that_is_started_before_the_executors_have_joined_waits_for_them(tmp_path: Path) -> None:
    """Before, the first executor got all workers, and the query failed for want of another executor."""
    said = _said(tmp_path, AT_ONCE)
    assert any(each["there"] < 2 for each in said), "the executors were there before"
    assert [each["rows"] for each in said] == [1000, 1000]


TALKS = """
import os, sys
import spark_integration.daemon as daemon
import pyspark.daemon

def load():
    os.write(1, b"from a library")
    print("from Python")
    os.write(2, b"x" * 200_000)
    raise {error}

daemon.load = load
pyspark.daemon.manager = lambda: os.write(1, b"PORT")
daemon.main(["pyspark.worker"])
"""


@pytest.mark.parametrize("error", ["SystemExit(1)", "ImportError('what is missing')", "KeyboardInterrupt"])
def test_what_is_said_while_loading_neither_garbles_the_port_nor_stands_in_the_way(error: str) -> None:
    done = subprocess.run([sys.executable, "-c", TALKS.format(error=error)], cwd=ROOT, capture_output=True, timeout=60)
    assert done.stdout == b"PORT"
    assert error.partition("(")[0].encode() in done.stderr
    assert len(done.stderr) <= SAID_BYTES


def test_kernels_that_are_not_compiled_yet_are_left_to_the_workers() -> None:
    """Compiling would take time in the daemon, for which all tasks of the executor wait."""
    program = (
        "import partitioning.warm_up as kernels, flux.shell.liveness_thread as pulse\n"
        "kernels.is_warm = lambda: False\n"
        "kernels.warm_up = pulse.warm_up = lambda: print('compiled')\n"
        "from spark_integration.daemon import load; load(); print('loaded')\n"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert said.splitlines()[-1] == "loaded"
    assert "compiled" not in said


def _said(folder: Path, text: str, *arguments: str) -> Any:
    """Run a program and return the last line of its output, parsed."""
    program = folder / "program.py"
    program.write_text(text)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "spark")]),
    }
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def _installed(folder: Path) -> list[str]:
    """Make archives and an installation of the same releases, as on ``sys.path``."""
    found = []
    for package, archive, version in (("pyspark", "pyspark.zip", "4.3.0"), ("py4j", "py4j-1-src.zip", "1")):
        _write(folder / "site" / package / "version.py", version)
        with zipfile.ZipFile(folder / archive, "w") as opened:
            opened.writestr(f"{package}/version.py", version)
        found.append(str(folder / archive))
    return [*found, str(folder / "site")]


def _write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
