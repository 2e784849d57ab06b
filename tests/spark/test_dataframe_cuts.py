"""A DataFrame that is read again by a session with other cores, on a checkpoint location."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from striking import rows_in, until

import flux
from spark_integration.session import for_bulk_transfer
from spark_integration.tasks.dataframe_partitions import (
    ADAPTIVE,
    FILES_LEAST,
    LEAVES,
    cutting_by,
    partitions_of,
    settings_of,
)

ROOT = Path(__file__).resolve().parents[2]
FILES, ROWS = 5, 3000
WAIT_S = 180.0
pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]

PROGRAM = """
import json, os, sys, time
import pyarrow.dataset
import flux
from pathlib import Path
from pyspark.sql import SparkSession
from striking import rows_in, until

folder, cores, last = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "last"
spark = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")


class Sums(flux.Aggregate):
    rows = flux.count()
    total = flux.sum("n")


def slowly(batches):
    for batch in batches:
        for start in range(0, batch.num_rows, 50):
            if not last:
                time.sleep(0.02)
            yield batch.slice(start, 50)


def start(df, name):
    flow = flux.stage(key="key", partitions=3)(Sums)(df).to_parquet(str(folder / name), roll_every="100ms")
    return flow.start(spark=spark, workers=1, checkpointLocation=folder / f"{name}-location", progress_interval="50ms")


files = spark.read.parquet(str(folder / "in")).where("n >= 0")  # found by the session, and not only planned by it
files = files.mapInArrow(slowly, files.schema)
said = {"cut": files.rdd.getNumPartitions(), "adaptive": spark.conf.get("spark.sql.adaptive.enabled")}
query = start(files, "out")
if last:
    query.awaitTermination(120)
    found = pyarrow.dataset.dataset(folder / "out", format="parquet").to_table().to_pylist()
    said["found"] = sorted((row["key"], row["rows"], row["total"]) for row in found)
else:
    until(lambda: rows_in(query) > 300, "some rows")
query.stop()
said["kept"] = json.loads((folder / "out-location" / "flux.json").read_text())["kept"]["sources"]
try:
    start(spark.range(5000).selectExpr("id % 7 as key", "id as n"), "range").stop()
except flux.UsageError as error:
    said["refused"] = str(error)
print(json.dumps(said), flush=True)
"""


def run(folder: Path, cores: int, last: bool) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", PROGRAM, str(folder), str(cores), "last" if last else "first"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def write_files(folder: Path) -> dict[int, list[int]]:
    """Write files of rows. Return the count and the sum of the rows of each key."""
    folder.mkdir()
    expected: dict[int, list[int]] = {}
    for number in range(FILES):
        rows = [(n % 7, n) for n in range(number * ROWS, (number + 1) * ROWS)]
        pq.write_table(pa.table({"key": [k for k, _ in rows], "n": [n for _, n in rows]}), folder / f"{number}.parquet")
        for key, n in rows:
            expected.setdefault(key, [0, 0])
            expected[key][0] += 1
            expected[key][1] += n
    return expected


@pytest.mark.long  # the next test shows the same in one session, with the setting that follows from the cores
@pytest.mark.starts_spark
def test_a_query_goes_on_with_other_cores_although_spark_would_cut_its_files_otherwise(tmp_path: Path) -> None:
    expected = write_files(tmp_path / "in")
    first, last = run(tmp_path, 3, last=False), run(tmp_path, 6, last=True)
    assert first["cut"] != last["cut"], "Spark cuts them otherwise by itself"
    assert first["kept"] == last["kept"]
    (kept,) = first["kept"].values()
    assert kept["partitions"] == first["cut"]
    assert last["found"] == [[key, *expected[key]] for key in sorted(expected)]
    assert first["adaptive"] == last["adaptive"] == "true", "the session's own settings are as they were"
    assert "refused" not in first
    assert "has 6 partitions, and had 3 when the query was started for the first time" in last["refused"]
    assert "spark.default.parallelism=3" in last["refused"]


class Sums(flux.Aggregate):
    rows = flux.count()
    total = flux.sum("n")


def test_a_query_goes_on_with_the_cuts_of_its_first_start(spark: Any, tmp_path: Path) -> None:
    expected = write_files(tmp_path / "in")

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for start in range(0, batch.num_rows, 50):
                time.sleep(pause_s)
                yield batch.slice(start, 50)

    cuts, kept = [], []
    try:
        for cores in (3, 6):
            pause_s = 0.02 if cores == 3 else 0.0  # it is stopped among its rows, and then read to its end
            spark.conf.set(FILES_LEAST, str(cores))
            files = spark.read.parquet(str(tmp_path / "in")).where("n >= 0")
            files = files.mapInArrow(slowly, files.schema)
            cuts.append(files.rdd.getNumPartitions())
            flow = flux.stage(key="key", partitions=3)(Sums)(files).to_parquet(
                str(tmp_path / "out"), roll_every="100ms"
            )
            query = flow.start(
                spark=spark, workers=1, checkpointLocation=tmp_path / "location", progress_interval="50ms"
            )
            if cores == 3:
                until(lambda query=query: rows_in(query) > 300, "some rows")
            else:
                assert query.awaitTermination(WAIT_S)
            query.stop()
            kept.append(json.loads((tmp_path / "location" / "flux.json").read_text())["kept"]["sources"])
    finally:
        spark.conf.unset(FILES_LEAST)
    assert cuts[0] != cuts[1], "Spark cuts them otherwise by itself"
    assert kept[0] == kept[1]
    found = pyarrow.dataset.dataset(tmp_path / "out", format="parquet").to_table().to_pylist()
    assert sorted((row["key"], row["rows"], row["total"]) for row in found) == [
        (key, *expected[key]) for key in sorted(expected)
    ]


class Session:
    """A stub of a Spark session with the settings by which files are cut: six cores, and nothing set."""

    def __init__(self) -> None:
        self.set: dict[str, str] = {}
        self.sparkContext = SimpleNamespace(defaultParallelism=6)
        self.conf = SimpleNamespace(
            get=lambda key, default=None: self.set.get(key, default), set=self.set.__setitem__, unset=self.set.pop
        )


def test_reads_that_are_planned_at_the_same_time_do_not_take_the_settings_of_one_for_the_sessions_own() -> None:
    """Queries may read two DataFrames: the second was cut by six cores if the first was through before it."""
    session: Any = Session()
    by = {LEAVES: "3", FILES_LEAST: "3"}
    seen: list[Any] = []

    def second() -> None:
        with cutting_by(session, by):
            first_is_over.wait(WAIT_S)
            seen.append(dict(session.set))
        seen.append(settings_of(session)[LEAVES])

    first_is_over, thread = threading.Event(), threading.Thread(target=second)
    with cutting_by(session, by):
        thread.start()
        thread.join(0.3)
    first_is_over.set()
    thread.join(WAIT_S)
    assert seen == [by, "6"]
    assert session.set == {}


def test_settings_hold_while_something_is_planned_and_no_longer(spark: Any, tmp_path: Path) -> None:
    spark.range(0, 100, 1, 3).write.parquet(str(tmp_path / "in"))
    found = settings_of(spark)
    assert found[ADAPTIVE] == "false"
    assert found[LEAVES] == found[FILES_LEAST] == str(spark.sparkContext.defaultParallelism)
    assert int(found["spark.sql.shuffle.partitions"]) > 0
    before = {key: spark.conf.get(key, None) for key in found}
    df = spark.read.parquet(str(tmp_path / "in")).where("id > 2")
    for wanted in (1, 3):
        by = found | {LEAVES: str(wanted), FILES_LEAST: str(wanted), "spark.sql.files.openCostInBytes": "1000000"}
        with cutting_by(spark, by):
            planned = for_bulk_transfer(df, 1000, by)
            assert partitions_of(planned) == wanted
        assert planned.count() == 97
        with cutting_by(spark, by | {"spark.sql.shuffle.partitions": "5"}):
            shuffled = for_bulk_transfer(df.groupBy("id").count(), 1000, by | {"spark.sql.shuffle.partitions": "5"})
            assert partitions_of(shuffled) == 5, "adaptive execution would put them together"
    with pytest.raises(ZeroDivisionError), cutting_by(spark, found):
        raise ZeroDivisionError
    assert {key: spark.conf.get(key, None) for key in found} == before
