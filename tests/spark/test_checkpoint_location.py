"""A checkpoint location with real processes: kills of an executor, of the vault, of the driver and everything with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kept_location
import psutil
import pyarrow as pa
import pyarrow.dataset
import pytest
from striking import KEYS, PARTITIONS, ROUNDS, ROWS, SEEN, WAIT_S, Seen, paced, rows_in, strike, until

import flux
from spark_integration.query.query import Query
from tests.object_store import serving, uri_in

ROOT = Path(__file__).resolve().parents[2]
FLUX = [sys.executable, "-m", "flux"]
TOTAL = KEYS * PARTITIONS * ROUNDS
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def passed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on: a user's function in front of the stage, of which the plan in the location tells, and which no vault runs."""
    yield from batches


SEEN_OF_FOUR = flux.stage(key="key", partitions=4, schema=SEEN)(Seen)


def started(
    spark: Any, tmp_path: Path, workers: int = 3, location: str = "", folder: str = "rows", **options: Any
) -> Query:
    """Rows go into files: (key, sequence) tells each row from all others."""
    rows = flux.source(paced(tmp_path / "gate"), ROWS, partitions=PARTITIONS).mapInArrow(passed, ROWS)
    flow = SEEN_OF_FOUR(rows).to_parquet(str(tmp_path / folder), roll_every="200ms")
    return flow.start(
        spark=spark, workers=workers, checkpointLocation=location or tmp_path / "location", progress_interval="100ms",
        checkpoint_interval="200ms", **options,
    )  # fmt: skip


def check_rows(tmp_path: Path) -> None:
    found = pyarrow.dataset.dataset(tmp_path / "rows", format="parquet", exclude_invalid_files=True).to_table()
    rows = Counter(zip(found["key"].to_pylist(), found["sequence"].to_pylist(), strict=True))
    assert len(rows) == rows.total() == TOTAL
    assert found["seen"].to_pylist() == found["sequence"].to_pylist()


def vaults() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "flux.shell.vault_process" in child.cmdline()]


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.costs_an_executor
def test_partitions_without_another_replica_go_on_from_the_vault(cluster: Any, tmp_path: Path) -> None:
    query = started(cluster, tmp_path)
    try:
        until(lambda: rows_in(query) > TOTAL // 4, "a quarter of the rows")
        lost = strike(query, signal.SIGKILL, executor=True, stage=0)
        until(lambda: lost not in query.members(), "the loss is noticed")
        assert rows_in(query) < TOTAL, "the fault must come in mid-stream"
        (vault,) = vaults()
        # It has its share of the processors together with the driver, and a Ctrl-C in the driver's terminal does not end it.
        assert os.getsid(vault.pid) == os.getsid(0)
        assert os.getpgid(vault.pid) == vault.pid
        (tmp_path / "gate").touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert "take-over" in {event.kind for event in query.events()}
    check_rows(tmp_path)
    assert not vaults()


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.costs_an_executor
def test_a_query_that_loses_all_its_workers_goes_on_when_others_have_come(cluster: Any, tmp_path: Path) -> None:
    query = started(cluster, tmp_path, workers=2)
    try:
        until(lambda: rows_in(query) > TOTAL // 4, "a quarter of the rows")
        until(lambda: len(query.members()) == 2, "both workers are there")
        lost = {member.about.pid for member in query.members().values()}
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not lost & {member.about.pid for member in query.members().values()}, "the losses are noticed")
        # On a busy machine others may have come before this is seen.
        assert query.phase == "running" or "Waiting for 2 workers" in query.status["message"]
        until(lambda: query.phase == "running", "others have come")
        (tmp_path / "gate").touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    check_rows(tmp_path)


@pytest.mark.long  # tests/flux/test_moved_location.py shows the same without Spark
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_location_that_is_renamed_or_removed_under_a_query_ends_it_and_nothing_comes_twice(
    slots: Any, tmp_path: Path
) -> None:
    location, elsewhere = tmp_path / "location", tmp_path / "elsewhere"
    for part, why in ((8, f"{location} was moved to {elsewhere} while"), (3, "shown was written there again")):
        query = started(slots, tmp_path)
        try:
            until(lambda query=query, part=part: rows_in(query) > TOTAL // part, "some of the rows")
            if part == 8:
                location.rename(elsewhere)
                with pytest.raises(flux.UsageError, match=r"that query has not ended yet|was moved to"):
                    started(slots, tmp_path)
            else:
                shutil.rmtree(location)
            with pytest.raises(flux.QueryFailed, match=why):
                query.awaitTermination(WAIT_S)
            assert rows_in(query) < TOTAL, "the fault must come in mid-stream"
        finally:
            query.stop()
        if part == 8:
            with pytest.raises(flux.UsageError, match=f"was moved to {elsewhere} while a query wrote to it"):
                started(slots, tmp_path)
            elsewhere.rename(location)
    (tmp_path / "gate").touch()
    query = started(slots, tmp_path)
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    check_rows(tmp_path)
    assert not (tmp_path / ".location.flux").exists()


@pytest.mark.long  # tests/flux/test_older_copies.py and a test of Kafka through Spark show the same
@pytest.mark.usefixtures("nothing_left_behind")
def test_an_older_copy_of_a_location_is_refused_and_its_output_can_be_forgotten(slots: Any, tmp_path: Path) -> None:
    location, older, newest = tmp_path / "location", tmp_path / "older", tmp_path / "newest"
    for part, copy in ((4, older), (2, newest)):
        query = started(slots, tmp_path)
        until(lambda query=query, part=part: rows_in(query) > TOTAL // part, "some of the rows")
        query.stop()
        shutil.copytree(location, copy)
    there = rows_there(tmp_path)
    shutil.rmtree(location)
    shutil.copytree(older, location)
    (tmp_path / "gate").touch()
    query = started(slots, tmp_path)
    with pytest.raises(
        flux.QueryFailed, match=rf"the checkpoint location {location} is an older copy.*--forget-output"
    ):
        query.awaitTermination(WAIT_S)
    query.stop()
    shutil.copytree(tmp_path / "rows", tmp_path / "rows of the newest")
    shutil.rmtree(location)
    shutil.copytree(newest, location)
    query = started(slots, tmp_path)
    assert query.awaitTermination(WAIT_S)
    query.stop()
    check_rows(tmp_path)
    shutil.rmtree(location)
    shutil.copytree(older, location)
    shutil.rmtree(tmp_path / "rows")
    (tmp_path / "rows of the newest").rename(tmp_path / "rows")
    forgotten = subprocess.run([*FLUX, "checkpoints", str(location), "--forget-output"], capture_output=True, text=True)
    assert forgotten.returncode == 0, forgotten.stderr
    query = started(slots, tmp_path)
    assert query.awaitTermination(WAIT_S)
    query.stop()
    found = pyarrow.dataset.dataset(tmp_path / "rows", format="parquet", exclude_invalid_files=True).to_table()
    rows = Counter(zip(found["key"].to_pylist(), found["sequence"].to_pylist(), strict=True))
    assert len(rows) == TOTAL, "nothing is left out"
    assert TOTAL < rows.total() <= TOTAL + there, "output since the copy is there again"


@pytest.mark.usefixtures("nothing_left_behind")
def test_output_that_goes_to_another_folder_from_now_on_is_not_left_out(slots: Any, tmp_path: Path) -> None:
    query = started(slots, tmp_path)
    until(lambda: rows_in(query) > TOTAL // 3, "some of the rows")
    query.stop()
    (tmp_path / "gate").touch()
    query = started(slots, tmp_path, folder="others")
    assert query.awaitTermination(WAIT_S)
    query.stop()
    tables = [
        pyarrow.dataset.dataset(tmp_path / folder, format="parquet", exclude_invalid_files=True).to_table()
        for folder in ("rows", "others")
    ]
    assert all(table.num_rows for table in tables)
    found = pa.concat_tables(tables)
    rows = Counter(zip(found["key"].to_pylist(), found["sequence"].to_pylist(), strict=True))
    assert len(rows) == TOTAL, "nothing is left out"
    assert rows.total() - TOTAL < tables[0].num_rows / 2, "files that were under way at the stop, at most"


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_query_that_was_stopped_or_lost_its_vault_goes_on_with_other_numbers_of_workers(
    slots: Any, tmp_path: Path
) -> None:
    ids = set()
    for workers, part in ((3, 8), (2, 3)):
        query = started(slots, tmp_path, workers)
        ids.add(query.id)
        try:
            until(lambda query=query, part=part: rows_in(query) > TOTAL // part, "some of the rows")
            with pytest.raises(flux.UsageError, match=r"is active, and checkpointLocation=.*: stop it first"):
                started(slots, tmp_path, 9)  # who runs a cell of a notebook again hears this, and not of slots
            if part == 3:
                (vault,) = vaults()
                vault.kill()
                with pytest.raises(flux.QueryFailed, match="Start the query again with the same location"):
                    query.awaitTermination(WAIT_S)
        finally:
            query.stop()
    refuses_what_does_not_fit(slots, tmp_path)
    (tmp_path / "gate").touch()
    query = started(slots, tmp_path, 3)
    ids.add(query.id)
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert len(ids) == 1
    check_rows(tmp_path)
    again = started(slots, tmp_path, 2)  # all is there already
    try:
        assert again.awaitTermination(WAIT_S)
    finally:
        again.stop()
    check_rows(tmp_path)


def refuses_what_does_not_fit(slots: Any, tmp_path: Path) -> None:
    location = tmp_path / "location"
    other = flux.stage(key="key", partitions=8, schema=SEEN)(Seen)
    rows = other(flux.source(paced(tmp_path / "gate"), ROWS, partitions=PARTITIONS))
    flow = flux.to_parquet(rows, str(tmp_path / "other"))
    with pytest.raises(flux.UsageError, match="stage 'Seen': partitions was 4 and is 8"):
        flow.start(spark=slots, workers=2, checkpointLocation=location)
    location.chmod(0o755)
    with pytest.raises(flux.UsageError, match=r"mode 0755.*chmod 700"):
        started(slots, tmp_path)
    location.chmod(0o700)
    for where, why in (("zz://bucket/x", "Unrecognized filesystem"), (tmp_path / "rows", "mode")):
        with pytest.raises(flux.UsageError, match=why):
            flow.start(spark=slots, workers=2, checkpointLocation=where)


PROGRAM = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from test_checkpoint_location import started

spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
query = started(spark, Path(sys.argv[1]), int(sys.argv[3]), sys.argv[2])
query.awaitTermination()
print("through", flush=True)
"""


def rows_there(tmp_path: Path) -> int:
    """Count the rows of the files that have appeared."""
    if not (tmp_path / "rows").exists():
        return 0
    return int(pyarrow.dataset.dataset(tmp_path / "rows", format="parquet", exclude_invalid_files=True).count_rows())


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_location_from_before_modules_were_moved_goes_on_and_gives_the_plain_answer(
    slots: Any, tmp_path: Path
) -> None:
    """Such a location holds checkpoints, and steps ordered since."""
    location = tmp_path / "location"
    shutil.copytree(ROOT / "tests" / "flux" / "data" / "location", location)
    location.chmod(0o700)
    for file in location.iterdir():
        file.chmod(0o600)
    (tmp_path / "gate").write_text(str(kept_location.ALL))
    query = kept_location.start(slots, location, tmp_path / "gate", tmp_path / "results")
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    found = pyarrow.dataset.dataset(tmp_path / "results", format="parquet", exclude_invalid_files=True).to_table()
    assert sorted(found.to_pylist(), key=lambda row: str(row["name"])) == kept_location.answer()
    since = kept_location.PARTITIONS * (kept_location.ALL - kept_location.CHECKPOINTED)
    assert query.lastProgress["totalInputRows"] <= since, "it went on, and did not begin anew"


@pytest.mark.long  # test_streaming_in_faults.py kills the driver of such a query once
@pytest.mark.starts_spark
@pytest.mark.parametrize("location", ["a directory", "an object store"])
def test_after_the_driver_and_all_its_processes_are_killed_the_program_goes_on_when_it_is_run_again(
    tmp_path: Path, location: str
) -> None:
    if location == "a directory":
        killed_again_and_again(tmp_path, "")
    else:
        with serving() as endpoint:
            killed_again_and_again(tmp_path, uri_in(endpoint))
        assert not (tmp_path / "location").exists()


def killed_again_and_again(tmp_path: Path, location: str) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), location]
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable}
    for life, workers in enumerate((2, 3)):
        driver = subprocess.Popen([*program, str(workers)], env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            wanted = TOTAL * (life + 1) // 4
            until(
                lambda wanted=wanted, driver=driver: driver.poll() is not None or rows_there(tmp_path) > wanted,
                f"{wanted} rows in files",
            )
            assert driver.poll() is None, "it must be killed in mid-stream"
        finally:
            family = [*psutil.Process(driver.pid).children(recursive=True), psutil.Process(driver.pid)]
            for process in family if life else family[::-1]:
                process.kill()
            driver.wait()
            psutil.wait_procs(family, 10)
    (tmp_path / "gate").touch()
    last = subprocess.run([*program, "2"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert "through" in last.stdout, last.stderr[-2000:]
    check_rows(tmp_path)
    time.sleep(0.5)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
