"""Real faults under a running query with replicas: whatever is killed or stopped, the answer is exact.

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

import flux
from spark_integration.query import Query

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

KEYS, PARTITIONS, ROUNDS, LAST_ROUNDS = 300, 3, 400, 40
#: A machine under load takes its time; nothing here is judged by it.
WAIT_S = 180.0
ROWS = pa.schema([("key", pa.int64()), ("sequence", pa.int64())])


@flux.stage(key="key", partitions=4, replicas=2)
def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(key="key", partitions=3, replicas=2)
class Detector(flux.Operator):
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

    def snapshot(self) -> dict[int, list[int]]:
        return self.seen

    def restore(self, snapshot: dict[int, list[int]]) -> None:
        self.seen = snapshot


def paced(gate: Path) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Round n has sequence number n of every key of the partition; a round every ten milliseconds, the last ones when
    there is a file at ``gate``: so the fault comes in mid-stream on a slow machine too."""
    gate_path = str(gate)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        begun = time.time() - start * 0.01
        for number in range(start, ROUNDS):
            while time.time() < begun + number * 0.01:
                yield None
            while number == ROUNDS - LAST_ROUNDS and not os.path.exists(gate_path):
                yield None
            keys = np.arange(KEYS) * PARTITIONS + partition
            yield pa.record_batch([pa.array(keys), pa.array(np.full(KEYS, number))], schema=ROWS)

    return read


def strike(query: Query, signal_number: int, executor: bool = False, stage: int = 1) -> int:
    """Signal the process of a worker that is primary of something, or its executor; returns the worker's id."""
    table = query._server.core.table
    assert table is not None
    worker = table.stages[stage][0][0].worker
    about = query.members()[worker].about
    os.kill(int(about.executor.rpartition(":")[2]) if executor else about.pid, signal_number)
    return worker


def until(condition: Callable[[], object], what: str, limit_s: float = WAIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit_s:g} s"
        time.sleep(0.01)


def rows_in(query: Query) -> int:
    return (query.lastProgress or {"totalInputRows": 0})["totalInputRows"]


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("executor killed", marks=pytest.mark.costs_an_executor),
        "worker killed",
        "worker stopped and continued",
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
        if fault == "worker killed":  # once more, when its copy is all that is left of what it keeps to be fetched
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
    """Gives the rows, the last fifth of them when there is a file at ``gate``. A first attempt goes on when there is one
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
