"""Output of users' programs, in processes of their own: it reports Spark's work behind a query, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.spark, pytest.mark.starts_spark, pytest.mark.timeout(1000)]

PROGRAM = r"""
import sys, tempfile, time
from datetime import datetime, timezone
import pyarrow as pa
from pyspark.sql import SparkSession
import flux

#: A machine under load takes its time; nothing here is judged by it.
WAIT_S = 180

def session():
    builder = SparkSession.builder.master("local[3,3]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.flux.workers.timeout", f"{WAIT_S}s").config("spark.flux.heartbeat.timeout", "5s")
    spark = builder.config("spark.ui.showConsoleProgress", "true").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark

def say(what):
    print("###", what, file=sys.stderr, flush=True)

def bad(batches):
    raise ValueError("bad row 7")
    yield

def ticks(partition):
    while True:
        yield pa.RecordBatch.from_pydict({"k": [1, 2]})
        yield None

@flux.stage(key="k", partitions=2, replicas=2)
class Counts(flux.Aggregate):
    n = flux.count()

spark = session()
say("an input that fails")
query = Counts(spark.range(9).mapInArrow(bad, "k long")).start(queryName="failing", workers=2, keep_output=True)
try:
    say(f"ended: {query.awaitTermination(WAIT_S)}")
except flux.FluxError as error:
    say(error)

say("spark.stop()")
query = Counts(flux.source(ticks, schema="k BIGINT", partitions=2)).start(workers=2, keep_output=False)
query.processAllAvailable(WAIT_S)
time.sleep(1.5)
bar = spark.sparkContext._jsc.sc().progressBar().isDefined()
spark.stop()
try:
    query.awaitTermination(WAIT_S)
except flux.FluxError as error:
    say(error)
say(f"active: {query.isActive}, bar: {bar}")

spark = session()
say("the first examples of the README and of docs/stages.md")
flights = [("LAX", "AA", 10.0), ("LAX", "AA", -5.0), ("LAX", "DL", 20.0), ("ORD", "UA", 3.0), ("ORD", "UA", None)]
flights_df = spark.createDataFrame(flights, "dest STRING, carrier STRING, arr_delay DOUBLE")
for page in sys.argv[1:]:
    exec(open(page).read().partition("```python\n")[2].partition("```")[0])
    say(sorted(tuple(row) for row in result.collect()))

say("windows of the README")
def orders(partition):
    at = [datetime(2024, 1, 1, 12, minute, tzinfo=timezone.utc) for minute in (0, 4, 9, 1, 47)]
    amounts = pa.array([5.0, 7.0, -1.0, 100.0, 2.0])
    yield pa.record_batch([pa.array([1] * 5), amounts, pa.array(at, pa.timestamp("us", "UTC"))], ["user", "amount", "at"])

events = flux.source(orders, "user BIGINT, amount DOUBLE, at TIMESTAMP", partitions=1)
code = open(sys.argv[1]).read().partition("## Windows")[2].partition("```python\n")[2].partition("```")[0]
with tempfile.TemporaryDirectory() as folder:
    exec(code.replace("/data", folder))
    query.awaitTermination(WAIT_S)
    for name, columns in (("spent", "minute(window.start), orders, largest"), ("visits", "count"), ("late", "amount")):
        read = spark.read.parquet(f"{folder}/{name}").selectExpr(*columns.split(", "))
        say(f"{name}: {sorted(tuple(row) for row in read.collect())}")

say("a program that ends")
query = Counts(flux.source(ticks, schema="k BIGINT", partitions=2)).start(queryName="left", workers=2, keep_output=False)
query.processAllAvailable(WAIT_S)
"""


def test_a_program_hears_what_spark_does_behind_its_queries_and_ends_without_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, str(path), str(ROOT / "README.md"), str(ROOT / "docs" / "stages.md")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    failing, stopped, ending = (part for part in done.stderr.split("### ") if part.startswith(("an ", "spark", "a ")))
    reason = r"query failing: \d+ tasks? that read the input failed, the last with: ValueError: bad row 7"
    assert re.search(reason, failing), failing
    assert "Spark starts a task again until it has failed 3 times (spark.task.maxFailures)" in failing
    said = [line for line in done.stderr.splitlines() if line.startswith("### the")]
    assert any("ingress of DataFrame' failed: ValueError: bad row 7" in line for line in said), said
    assert "### Spark's session was stopped while the query was running" in done.stderr
    assert "### active: False, bar: False" in done.stderr
    assert "[Stage" not in stopped, "Spark's progress bar would stay for as long as the query runs"
    assert "### [('LAX', 'AA', 1, 10.0), ('LAX', 'DL', 1, 20.0), ('ORD', 'UA', 1, 3.0)]\n" in done.stderr, (
        "three slots do"
    )
    assert "### [('LAX', 'DL', 20.0), ('ORD', 'UA', 3.0)]\n" in done.stderr
    assert "### spent: [(0, 2, 7.0), (40, 1, 2.0), (45, 1, 2.0), (55, 2, 7.0)]\n" in done.stderr
    assert "### visits: [(1,), (3,)]\n### late: [(100.0,)]\n" in done.stderr
    assert "the program ends while query left is running: it is stopped" in ending
    assert "Python worker exited unexpectedly" not in ending
    assert "Traceback" not in ending
