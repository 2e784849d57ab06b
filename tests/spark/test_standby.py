"""Standbys in place of secondaries while workers and executors are killed: the same rows as without a fault."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from striking import (
    KEYS,
    LAST_ROUNDS,
    PARTITIONS,
    ROUND_S,
    ROUNDS,
    ROWS,
    SEEN,
    WAIT_S,
    Seen,
    paced,
    rows_in,
    strike,
    until,
)

import flux
from spark_integration.query.query import Query

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOTAL = KEYS * PARTITIONS * ROUNDS


#: A silent worker is given up after half a second, and its standbys take over within another one. This allows for a machine
#: under load, and is a third of the time after which a worker with the last replica is given up.
NOTICED_S = 20.0

COUNTED = flux.stage(key="key", partitions=4, replicas=2, recovery="standby", schema=SEEN)(Seen)


@flux.stage(key="key", partitions=3, replicas=2, recovery="upstream")
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Pass rows on, as a stage without state: after a loss, its rows come once more from the stage before."""
    return batch


def rows_of_first_partition(query: Query) -> int:
    """Return how many rows primaries have applied of the partition that is struck."""
    reports = [dict(member.stats) for member in query.members().values()]
    primaries = [primary for stats in reports if "stages" in stats for primary in stats["stages"][0]["primaries"]]
    return max((rows_in for partition, rows_in, _, _ in primaries if partition == 0), default=0)


@pytest.mark.long  # the next test shows the same with an operator that gives its changes
@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("executor killed", marks=pytest.mark.costs_an_executor),
        "worker killed",
        "worker stopped",
    ],
)
def test_each_row_has_met_the_state_of_all_before_it_after(cluster, tmp_path: Path, fault: str) -> None:  # type: ignore[no-untyped-def]
    folder, gate = tmp_path / "rows", tmp_path / "gate"
    flow = COUNTED(passed(flux.source(paced(gate), ROWS, partitions=PARTITIONS)))
    query = flow.to_parquet(str(folder), roll_every="200ms").start(
        spark=cluster, workers=3, progress_interval="100ms", checkpoint_interval="200ms"
    )
    try:
        until(lambda: rows_in(query) > TOTAL // 4, "a quarter of the rows")
        pids = {worker: member.about.pid for worker, member in query.members().items()}
        lost = strike(query, signal.SIGSTOP if fault == "worker stopped" else signal.SIGKILL, fault[0] == "e", stage=0)
        until(lambda: lost not in query.members(), "the loss is noticed", NOTICED_S)
        if fault == "worker stopped":
            before = rows_of_first_partition(query)
            until(lambda: rows_of_first_partition(query) > before, "the partition goes on", NOTICED_S)
            os.kill(pids[lost], signal.SIGCONT)
        until(query.is_whole, "full replication")
        assert rows_in(query) < TOTAL, "the fault must come in mid-stream"
        gate.touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert "take-over" in {event.kind for event in query.events()}
    found = cluster.read.parquet(str(folder))
    assert found.distinct().count() == found.count() == TOTAL
    assert found.where("seen != sequence").count() == 0


#: Keys in all, and those that each round has after the first one: few have changed at each checkpoint.
MANY_KEYS, HOT_KEYS = 20_000, 4
#: Changes of its state that each primary has sent before one of them is lost.
SAID = 3


def few_of_many(gate: Path) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Make a reader of all keys at first, then of a few in each round, ``ROUND_S`` after the round before; the last ones come
    when there is a file at ``gate``."""
    gate_path = str(gate)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        for number in range(start, ROUNDS):
            not_before = time.monotonic() + ROUND_S
            while time.monotonic() < not_before:
                yield None
            while number == ROUNDS - LAST_ROUNDS and not os.path.exists(gate_path):
                yield None
            yield pa.record_batch(list(few_rows(partition, number)), schema=ROWS)

    return read


def few_rows(partition: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([partition, number])
    keys = np.arange(MANY_KEYS) if number == 0 else rng.integers(0, MANY_KEYS, HOT_KEYS)
    return keys, rng.integers(0, 1000, len(keys))


class Totals(flux.Aggregate):
    """Sums that leave a line in a file for each sent change, and in another for each applied one."""

    n = flux.count()
    total = flux.sum("sequence")
    least = flux.min("sequence")

    def __init__(self, said: str, applied: str) -> None:
        self.said, self.applied = said, applied

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.partition = context.partition

    def changes(self) -> Any:
        with open(self.said, "a") as file:
            file.write(f"{self.partition}\n")
        return super().changes()

    def apply_changes(self, changes: Any) -> None:
        super().apply_changes(changes)
        with open(self.applied, "a") as file:
            file.write(f"{len(changes['state'])}\n")


@pytest.mark.usefixtures("nothing_left_behind")
def test_totals_from_a_checkpoint_and_the_changes_since_are_those_of_spark(slots, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, gate, said, applied = (tmp_path / name for name in ("rows", "gate", "said", "applied"))
    said.touch()
    stage = flux.stage(key="key", partitions=4, replicas=2, recovery="standby")(Totals)
    flow = stage(str(said), str(applied))(passed(flux.source(few_of_many(gate), ROWS, partitions=PARTITIONS)))
    rows = PARTITIONS * (MANY_KEYS + (ROUNDS - 1) * HOT_KEYS)
    query = flow.to_parquet(str(folder)).start(
        spark=slots, workers=3, progress_interval="100ms", checkpoint_interval="200ms"
    )
    try:
        until(lambda: rows_in(query) > rows - PARTITIONS * HOT_KEYS * ROUNDS // 2, "half of the changes")
        until(
            lambda: all(said.read_text().split().count(str(each)) >= SAID for each in range(4)),
            "checkpoints of changes",
        )
        lost = strike(query, signal.SIGKILL, stage=1)
        until(lambda: lost not in query.members(), "the loss is noticed")
        until(query.is_whole, "full replication")
        assert rows_in(query) < rows, "the fault must come in mid-stream"
        gate.touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert "take-over" in {event.kind for event in query.events()}
    sizes = [int(size) for size in applied.read_text().split()]
    assert sizes, "the standby that took over had changes to apply"
    assert max(sizes) < MANY_KEYS // 8, "each of them is of a few keys"
    read = [
        np.concatenate(parts)
        for parts in zip(*(few_rows(p, n) for p in range(PARTITIONS) for n in range(ROUNDS)), strict=True)
    ]
    given = slots.createDataFrame(pa.table(dict(zip(ROWS.names, read, strict=True))).to_pandas())
    given.createOrReplaceTempView("given")
    expected = slots.sql("SELECT key, count(*), sum(sequence), min(sequence) FROM given GROUP BY key")
    found = slots.read.parquet(str(folder)).select("key", "n", "total", "least")
    assert found.count() == MANY_KEYS
    assert {tuple(row) for row in found.collect()} == {tuple(row) for row in expected.collect()}
