"""An executor is killed that has the only replicas of some partitions: they begin empty, and are whole behind the horizon."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from striking import WAIT_S, strike, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.long]

KEYS, PARTITIONS = 30, 3
#: Milliseconds of event time, and of the clock, between two batches; and the batches in a window.
BATCH_MS, IN_WINDOW = 50, 20
ROWS = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])


def live(gate: str) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Read a row of each key of a partition every 50 ms, until the gate is there."""

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        keys = pa.array(np.arange(KEYS) * PARTITIONS + partition)
        begun = time.time() - start * BATCH_MS / 1e3
        for number in range(start, 1 << 30):
            while time.time() < begun + number * BATCH_MS / 1e3:
                yield None
            if Path(gate).exists():
                return
            times = pa.array(np.full(KEYS, number * BATCH_MS * 1000), ROWS.field("ts").type)
            yield pa.record_batch([keys, times], schema=ROWS)

    return read


@flux.stage(key="key", partitions=6, replicas=1, window=flux.window("ts", "1 second"), on_loss="converge")
class Counted(flux.Aggregate):
    n = flux.count()


class Results(flux.Sink):
    """Results and position in one transaction."""

    traits = flux.SinkTraits(exactly_once=True)

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self, context: flux.SinkContext) -> None:
        self.database = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
        self.database.execute("INSERT OR IGNORE INTO reached VALUES (?, 0)", (context.partition,))

    def committed(self, partition: int) -> int:
        return int(self.database.execute("SELECT next FROM reached WHERE partition = ?", (partition,)).fetchone()[0])

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        self.database.execute("BEGIN IMMEDIATE")
        moved = self.database.execute(
            "UPDATE reached SET next = next + 1 WHERE partition = ? AND next = ?",
            (position.partition, position.sequence),
        )
        if moved.rowcount:
            ends = batch.column("window_end").cast(pa.int64()).to_pylist()
            found = zip(batch.column("key").to_pylist(), ends, batch.column("n").to_pylist(), strict=True)
            rows = [(position.partition, *row) for row in found]
            self.database.executemany("INSERT INTO seen VALUES (?, ?, ?, ?)", rows)
        self.database.execute("COMMIT")

    def is_transient(self, error: Exception) -> bool:
        return "locked" in str(error)

    def close(self) -> None:
        self.database.close()


@pytest.mark.costs_an_executor
@pytest.mark.usefixtures("nothing_left_behind")
def test_partitions_of_a_killed_executor_begin_empty_and_are_whole_again(cluster: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "results.db")
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE reached (partition INTEGER PRIMARY KEY, next INTEGER)")
        database.execute("CREATE TABLE seen (partition INTEGER, key INTEGER, ends INTEGER, n INTEGER)")
    source = flux.source(live(str(tmp_path / "gate")), ROWS, partitions=PARTITIONS).withWatermark("ts", "0 seconds")
    query = flux.start(Counted(source).to(Results(path)), spark=cluster, workers=3, progress_interval="100ms")

    def newest() -> int:
        with sqlite3.connect(path, timeout=60.0) as database:
            return int(database.execute("SELECT coalesce(max(ends), 0) FROM seen").fetchone()[0])

    def told() -> dict[str, Any]:
        progress = query.lastProgress
        return {} if progress is None else dict(progress["stages"][0])

    try:
        until(lambda: newest() >= 3_000_000, "three windows")
        lost = strike(query, signal.SIGKILL, executor=True, stage=0)
        until(lambda: lost not in query.members(), "the loss is noticed")
        until(lambda: told().get("incompleteThrough"), "the horizon is known")
        through = round(datetime.fromisoformat(told()["incompleteThrough"]).astimezone(UTC).timestamp() * 1e6)
        until(lambda: newest() >= through + 5_000_000, "whole windows behind the horizon")
        (tmp_path / "gate").touch()
        assert query.awaitTermination(WAIT_S)
        began = told()["begunEmpty"]
    finally:
        query.stop()
    events = [event for event in query.events() if event.kind == "begins empty"]
    assert len(events) == began > 0
    emptied = {event.partition for event in events}
    assert 0 < len(emptied) < 6
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT partition, key, ends, n FROM seen").fetchall()
    end = newest() - 1_000_000  # the last windows are cut short by the end of the input
    of_key = {key: partition for partition, key, _, _ in rows}
    assert len(of_key) == KEYS * PARTITIONS
    assert all(n <= IN_WINDOW for _, _, _, n in rows), "no row counts twice"
    for key, partition in of_key.items():
        after = through if partition in emptied else 0
        found = sorted((ends, n) for _, other, ends, n in rows if other == key and after < ends <= end)
        whole = [(ends, IN_WINDOW) for ends in range(1_000_000, end + 1, 1_000_000) if ends > after]
        assert found == whole, f"key {key} of partition {partition}"
