"""Real faults under a running query with replicas: the answer is exact after any process is killed or stopped.

A detector per key remembers the last four sequence numbers and counts every step that is not the next one, so that a
lost, doubled or reordered row shows even where totals would hide it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812
from striking import KEYS, PARTITIONS, ROUNDS, ROWS, WAIT_S, paced, rows_in, strike, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@flux.stage(key="key", partitions=4, replicas=2)
def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(key="key", partitions=3, replicas=2)
class Detector(flux.Operator):
    """A detector whose attributes are its state."""

    schema = pa.schema([(name, pa.int64()) for name in ("key", "rows", "wrong", "s1", "s2", "s3", "s4")])

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.seen: dict[int, list[int]] = {}  # key -> rows, wrong steps, last four sequence numbers

    def process(self, batch: pa.RecordBatch) -> None:
        for key, sequence in zip(batch.column("key").to_pylist(), batch.column("sequence").to_pylist(), strict=True):
            known = self.seen.setdefault(key, [0, 0, -4, -3, -2, -1])
            known[0] += 1
            known[1] += sequence != known[-1] + 1
            known[2:] = [*known[3:], sequence]

    def finish(self) -> Iterator[pa.RecordBatch]:
        rows = np.array([[key, *known] for key, known in sorted(self.seen.items())], np.int64).reshape(-1, 7)
        yield pa.RecordBatch.from_arrays([pa.array(column) for column in rows.T], schema=self.schema)


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("executor killed", marks=pytest.mark.costs_an_executor),
        "worker killed",
        pytest.param("worker stopped and continued", marks=pytest.mark.long),
    ],
)
def test_no_row_is_lost_doubled_or_out_of_order_when(cluster, tmp_path: Path, fault: str) -> None:  # type: ignore[no-untyped-def]
    source = flux.source(paced(tmp_path / "gate"), ROWS, partitions=PARTITIONS)
    query = flux.start(
        Detector(echo(source)), spark=cluster, workers=3, keep_output=True, progress_interval="100ms", queryName=fault
    )
    try:
        total = KEYS * PARTITIONS * ROUNDS
        until(lambda: rows_in(query) > total // 4, "a quarter of the rows")
        stopped = None
        if fault == "executor killed":
            lost = strike(query, signal.SIGKILL, executor=True)
        elif fault == "worker killed":
            lost = strike(query, signal.SIGKILL)
        else:
            stopped = next(iter(query.members().values())).about.pid
            lost = strike(query, signal.SIGSTOP)
            stopped = query.members()[lost].about.pid
        until(lambda: lost not in query.members(), "the loss is noticed")
        if stopped is not None:
            os.kill(stopped, signal.SIGCONT)
        until(query.is_whole, "full replication")
        assert rows_in(query) < total, "the fault must come in mid-stream"
        (tmp_path / "gate").touch()
        if fault == "worker killed":  # once more, when the copy is all that is left of the kept output
            assert query.awaitTermination(WAIT_S)
            strike(query, signal.SIGKILL, stage=2)
        out = query.toDF().collect()
    finally:
        query.stop()
    events = query.events()
    assert {"take-over", "repair"} <= {event.kind for event in events}
    assert all(event.kind != "divergence" for event in events)
    assert len(out) == KEYS * PARTITIONS
    for row in out:
        assert (row.rows, row.wrong) == (ROUNDS, 0), row
        assert [row.s1, row.s2, row.s3, row.s4] == list(range(ROUNDS - 4, ROUNDS)), row


def held_up(gate: Path, struck: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Give the rows, the last fifth of them when there is a file at ``gate``. A first attempt goes on when there is one
    at ``struck``: Spark does not end a task whose process was killed before it has another row for it."""
    gate_path, struck_path = str(gate), str(struck)

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        attempt = TaskContext.get().attemptNumber()
        given = 0

        def held() -> bool:
            goes_on = os.path.exists(gate_path) or (attempt == 0 and os.path.exists(struck_path))
            return given >= PER_PARTITION * 4 // 5 and not goes_on

        for batch in batches:
            for start in range(0, batch.num_rows, 2000):
                time.sleep(0.02)
                while held():
                    time.sleep(0.02)
                given += 2000
                yield batch.slice(start, 2000)

    return slowly


PER_PARTITION = 250_000


@pytest.mark.long  # the test before shows the faults of workers, and test_ingress_retry.py those of ingress tasks
@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("fault", ["ingress task killed", "worker killed"])
def test_the_answer_is_sparks_own_over_a_dataframe_when(cluster, tmp_path: Path, fault: str) -> None:  # type: ignore[no-untyped-def]
    per_partition, keys = PER_PARTITION, 500
    gate, struck = tmp_path / "gate", tmp_path / "struck"
    numbers = cluster.range(0, 3 * per_partition, 1, 3).selectExpr(
        f"id div {per_partition} * {keys} + (id % {per_partition}) % {keys} as key",
        f"(id % {per_partition}) div {keys} as sequence",
    )
    query = flux.start(
        Detector(echo(numbers.mapInArrow(held_up(gate, struck), "key long, sequence long"))),
        spark=cluster, workers=3, keep_output=True, progress_interval="100ms", batch_max_rows=2000,
    )  # fmt: skip
    try:
        until(lambda: rows_in(query) > per_partition // 2, "some rows")
        if fault == "worker killed":
            strike(query, signal.SIGKILL)
        else:
            members = query._server.core.members.ingress
            victim = next(member for member in members.values() if not member.left)
            os.kill(victim.about.pid, signal.SIGKILL)
            struck.touch()
            key = tuple(victim.about.edges), victim.about.index
            until(lambda: members[key].about.attempt > victim.about.attempt, "the next attempt")
        assert rows_in(query) < 3 * per_partition, "the fault must come in mid-stream"
        gate.touch()
        out = query.toDF()
        found = {row.key: (row.rows, row.wrong, row.s4) for row in out.collect()}
    finally:
        query.stop()
    expected = numbers.groupBy("key").agg(F.count("*").alias("rows"), F.max("sequence").alias("last")).collect()
    assert found == {row.key: (row.rows, 0, row.last) for row in expected}
