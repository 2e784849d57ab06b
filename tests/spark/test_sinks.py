"""Output in files and in a table while workers and executors are killed: every row once, as the source has them."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from endless import command
from striking import KEYS, PARTITIONS, ROUNDS, ROWS, WAIT_S, paced, rows_in, strike, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOTAL = KEYS * PARTITIONS * ROUNDS


@flux.stage(key="key", partitions=4, replicas=2)
def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(key="key", partitions=4, replicas=2, schema="key BIGINT, sequence BIGINT, part STRING", name="echo")
def parted(batch: pa.RecordBatch) -> pa.RecordBatch:
    parts = pa.array([["a:b", "", "c"][key % 3] for key in batch.column("key").to_pylist()])
    return batch.append_column("part", parts)


class Table(flux.Sink):
    """Rows and position in one transaction, of a database that all workers reach: a file."""

    traits = flux.SinkTraits(exactly_once=True)

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self, context: flux.SinkContext) -> None:
        self.database = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
        self.partition = context.partition
        self.database.execute("INSERT OR IGNORE INTO reached VALUES (?, 0)", (self.partition,))

    def committed(self, partition: int) -> int:
        return int(self.database.execute("SELECT next FROM reached WHERE partition = ?", (partition,)).fetchone()[0])

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        self.database.execute("BEGIN IMMEDIATE")
        moved = self.database.execute(
            "UPDATE reached SET next = next + 1 WHERE partition = ? AND next = ?", (self.partition, position.sequence)
        )
        if moved.rowcount:
            rows = zip(batch.column("key").to_pylist(), batch.column("sequence").to_pylist(), strict=True)
            self.database.executemany("INSERT INTO seen VALUES (?, ?)", rows)
        self.database.execute("COMMIT")

    def is_transient(self, error: Exception) -> bool:
        return "locked" in str(error)

    def close(self) -> None:
        self.database.close()


def struck(spark: Any, gate: Path, flow: Any, executor: bool, stage: int) -> Any:
    """Run the flow to its end, with a strike in the middle; its last status."""
    query = flux.start(flow, spark=spark, workers=3, progress_interval="100ms")
    try:
        until(lambda: rows_in(query) > TOTAL // 4, "a quarter of the rows")
        lost = strike(query, signal.SIGKILL, executor, stage)
        until(lambda: lost not in query.members(), "the loss is noticed")
        until(query.is_whole, "full replication")
        assert rows_in(query) < TOTAL, "the fault must come in mid-stream"
        status = query.status
        shown = " ".join(command("status").output.split())
        assert "goes to" in shown, shown
        gate.touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert "take-over" in {event.kind for event in query.events()}
    return status


@pytest.mark.usefixtures("nothing_left_behind")
def test_spark_finds_each_row_once_in_the_files(slots: Any, tmp_path: Path) -> None:
    files_are_whole(slots, tmp_path, executor=False)


@pytest.mark.long
@pytest.mark.costs_an_executor
@pytest.mark.usefixtures("nothing_left_behind")
def test_spark_finds_each_row_once_in_the_files_where_an_executor_is_killed(cluster: Any, tmp_path: Path) -> None:
    files_are_whole(cluster, tmp_path, executor=True)


def files_are_whole(spark: Any, tmp_path: Path, executor: bool) -> None:
    """Kill the worker of a stage with files at its end, or the executor of the worker, and look for each row."""
    folder = tmp_path / "rows"
    by = None if executor else ["part"]
    flow = (parted if by else echo)(flux.source(paced(tmp_path / "gate"), ROWS, partitions=PARTITIONS))
    to_files = flow.to_parquet(str(folder), partitionBy=by, partitions=2, roll_bytes="64k", roll_every="200ms")
    status = struck(spark, tmp_path / "gate", to_files, executor, stage=1)
    assert status["sinks"] == [f"echo.files to parquet files in {folder}{' by part' if by else ''}, exactly once"]
    found = spark.read.parquet(str(folder))
    assert found.distinct().count() == found.count() == TOTAL
    if by:
        assert {row.part for row in found.where("key % 3 < 2").select("part").distinct().collect()} == {"a:b", None}
    assert {row.key for row in found.select("key").distinct().collect()} == set(range(KEYS * PARTITIONS))
    assert len(list(folder.rglob("part-*.parquet"))) > 10
    assert not list(folder.rglob(".*.parquet.*")) or executor, "hidden files are of those that were killed"


@pytest.mark.long  # tests/spark/test_postgres.py shows the same with a database
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_table_with_positions_has_each_row_once(slots: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "table.db")
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE reached (partition INTEGER PRIMARY KEY, next INTEGER)")
        database.execute("CREATE TABLE seen (key INTEGER, sequence INTEGER)")
    flow = echo(flux.source(paced(tmp_path / "gate"), ROWS, partitions=PARTITIONS)).to(Table(path))
    status = struck(slots, tmp_path / "gate", flow, False, stage=0)
    assert status["sinks"] == ["echo to Table, exactly once"]
    with sqlite3.connect(path) as database:
        total, distinct = database.execute(
            "SELECT count(*), count(DISTINCT key * 1000000 + sequence) FROM seen"
        ).fetchone()
    assert (total, distinct) == (TOTAL, TOTAL)


def noted(folder: str) -> Any:
    def note(batch: pa.RecordBatch, position: flux.Position) -> None:
        with open(os.path.join(folder, f"{position.partition}-{position.sequence}"), "a") as file:
            file.write(f"{sum(batch.column('id').to_pylist())}\n")

    return note


@flux.stage(partitions=3)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_function_gets_every_batch_of_a_dataframe(spark, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    query = passed(spark.range(0, 50_000, 1, 4)).foreach_batch(noted(str(tmp_path))).start(spark=spark, workers=2)
    assert query.awaitTermination(WAIT_S)
    assert query.exception() is None
    numbers: dict[int, list[int]] = {}
    for file in tmp_path.iterdir():
        partition, sequence = map(int, file.name.split("-"))
        numbers.setdefault(partition, []).append(sequence)
    assert all(sorted(found) == list(range(len(found))) for found in numbers.values()), "positions have no gaps"
    assert sum(int(line) for file in tmp_path.iterdir() for line in file.read_text().split()) == 50_000 * 49_999 // 2
