"""The Python process of an ingress task is killed half-way: Spark runs the task again, and no row is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

F = pytest.importorskip("pyspark.sql.functions")
WAIT_S = 120.0
BATCH, BATCHES, PARTITIONS = 500, 24, 3
#: The partition whose task is killed, and the number of batches that it gives before it slows down and waits for that.
KILLED, GIVEN = 1, 8
#: How long it waits before each of the others: an ingress task only sends when it gets another batch.
PAUSE_S = 5.0
#: Bytes that make a batch larger than the buffers of pipes between the processes.
PAD = 400


def held_up(gate: str, tried: str, changing: bool) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Rows as they are, but the first attempt at one partition slows down half-way until the gate file is there. Every
    attempt leaves a file. ``changing``: the second column tells the attempts apart."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        partition, attempt = task.partitionId(), task.attemptNumber()
        Path(f"{tried}/{partition}.{attempt}").touch()
        for number, batch in enumerate(batches):
            if partition == KILLED and attempt == 0:
                end = time.monotonic() + (PAUSE_S if number >= GIVEN else 0.0)
                while time.monotonic() < end and not os.path.exists(gate):
                    time.sleep(0.02)
            v = pa.array([attempt] * batch.num_rows, pa.int64()) if changing else batch.column("v")
            pad = pa.array(["x" * PAD] * batch.num_rows)
            yield pa.RecordBatch.from_arrays([batch.column("k"), v, pad], ["k", "v", "pad"])

    return run


@flux.stage(key="k", partitions=4)
class PerKey(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")
    pad = flux.max("pad")  # so that it travels


def until(look: Callable[[], Any], what: Any) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.02)
    return found


def kill_half_way(query: Any, tmp_path: Path) -> Any:
    """Kill -9 of the process that sends partition KILLED, once rows of it are applied. Returns its registration."""

    def member() -> Any:
        return {at: m for (_, at), m in list(query._server.core.members.ingress.items())}.get(KILLED)

    def applied() -> int:
        return sum(m.stats.get("rows_in", 0) for m in list(query._server.core.members.workers.values()))

    # All rows of the other partitions, and of this one more than is left on the way.
    others = (PARTITIONS - 1) * BATCH * BATCHES
    about = until(member, "the ingress task has not registered").about
    until(lambda: applied() > others + BATCH * GIVEN // 4, lambda: f"{applied()} rows are applied")
    process = psutil.Process(about.pid)
    assert "pyspark" in " ".join(process.cmdline())
    os.kill(about.pid, signal.SIGKILL)
    gone, _ = psutil.wait_procs([process], timeout=WAIT_S)
    assert gone
    assert query.isActive
    (tmp_path / "gate").touch()
    return about, member


def start(slots: Any, tmp_path: Path, changing: bool) -> tuple[Any, Any]:
    """Start a query over an input that is held up; return it with the same rows for Spark itself."""
    (tmp_path / "tried").mkdir()
    plain = slots.range(0, BATCH * BATCHES * PARTITIONS, 1, PARTITIONS).selectExpr("id % 41 as k", "id as v")
    slow = held_up(str(tmp_path / "gate"), str(tmp_path / "tried"), changing)
    name = str(tmp_path / "out")

    @flux.stage(partitions=1)
    class Sink(flux.Operator):
        def open(self, context: flux.Context) -> None:
            self.rows: list[dict[str, Any]] = []

        def process(self, batch: pa.RecordBatch) -> None:
            self.rows += batch.to_pylist()

        def finish(self) -> None:
            Path(name).write_text(json.dumps(self.rows))

    flow = Sink(PerKey(plain.mapInArrow(slow, "k long, v long, pad string")))
    return flow.start(batch_max_rows=BATCH, workers=2, queryName="retried"), plain


def test_a_killed_ingress_task_is_run_again_and_the_result_is_exact(slots: Any, tmp_path: Path) -> None:
    query, plain = start(slots, tmp_path, changing=False)
    try:
        killed, member = kill_half_way(query, tmp_path)
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    again = member().about
    assert again.pid != killed.pid
    assert again.attempt > killed.attempt
    assert {path.name for path in (tmp_path / "tried").iterdir()} == {"0.0", "1.0", "1.1", "2.0"}
    ours = sorted(json.loads((tmp_path / "out").read_text()), key=repr)
    theirs = plain.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"), F.lit("x" * PAD).alias("pad"))
    assert ours == sorted((row.asDict() for row in theirs.collect()), key=repr)
    duplicates = sum(worker["counters"]["stale"] for worker in query.lastProgress["workers"])
    assert duplicates == 0


def test_an_input_that_gives_other_rows_when_it_is_read_again_is_refused_by_name(slots: Any, tmp_path: Path) -> None:
    query, _ = start(slots, tmp_path, changing=True)
    try:
        kill_half_way(query, tmp_path)
        with pytest.raises(flux.NonDeterministicInputError, match=rf"partition {KILLED} .*not deterministic"):
            query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert isinstance(query.exception(), flux.NonDeterministicInputError)
    assert not (tmp_path / "out").exists()
