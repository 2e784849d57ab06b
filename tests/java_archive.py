"""An archive of the classes that Spark loads, so that each of the many JVMs of the tests starts in half the processor time.

A JVM maps the archive instead of reading, checking and linking nine thousand classes (class-data sharing). ``tests/run.py``
makes it once, beside the packages; ``tests/conftest.py`` names it to all JVMs. A JVM with other jars, or another release of Java,
ignores it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

#: Beside the packages whose classes it holds, and named after their release.
PATH = Path(sys.prefix) / f"spark-{version('pyspark')}.jsa"
#: Options of all JVMs of tests: the JVMs live for seconds, and to optimise their code takes more time than it saves.
FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
WAIT_S = 600.0
#: Does the work of most tests: rows from Python, a shuffle, and files. Its tasks run in the driver, so that one archive has the
#: classes of drivers and executors.
PROGRAM = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
rows = spark.range(0, 100, 1, 2).selectExpr("id % 7 AS k").mapInArrow(lambda batches: batches, "k long")
rows.groupBy("k").count().write.parquet(sys.argv[1])
spark.read.parquet(sys.argv[1]).collect()
java = spark.sparkContext._gateway.proc
spark.stop()
java.stdin.close()  # it ends, and writes the archive
java.wait(500)
"""


def options() -> str:
    """Return the options of a JVM of the tests; a missing archive is left out."""
    return f"{FLAGS} -XX:SharedArchiveFile={PATH} -Xlog:disable" if PATH.exists() else FLAGS


def make() -> None:
    """Make the archive where it is missing. Without it the tests take longer, so a failure is no error."""
    if PATH.exists():
        return
    part = PATH.with_suffix(".part")
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    environment["JDK_JAVA_OPTIONS"] = f"{FLAGS} -XX:ArchiveClassesAtExit={part} -Xlog:disable"
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", PROGRAM, f"{folder}/rows"]
            subprocess.run(command, env=environment, capture_output=True, timeout=WAIT_S, check=True)
        part.rename(PATH)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"JVMs of the tests start slowly, without an archive of their classes: {error}", flush=True)
