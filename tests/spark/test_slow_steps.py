"""Steps of the user's code that take longer than a worker may be silent, and workers that were given up and live."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from endless import WAIT_S, rows_flow, ticks, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
#: Time of a step: longer than a worker may be silent.
STEP_S, SILENCE = 2.0, "1500ms"
BATCHES, PARTITIONS = 2, 2


def rows(partition: int) -> Iterator[pa.RecordBatch]:
    for number in range(BATCHES):
        keys = pa.array([partition * 100 + number])
        yield pa.RecordBatch.from_arrays([keys, pa.array([number])], schema=SCHEMA)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def keep_the_interpreter(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


class Slow(flux.Operator):
    schema = SCHEMA
    how: Callable[[float], None]

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        type(self).how(STEP_S)
        yield batch


class Sleeps(Slow):
    how = staticmethod(sleep)


class KeepsTheInterpreter(Slow):
    how = staticmethod(keep_the_interpreter)


@pytest.mark.long  # test_long_steps.py shows the same between processes without Spark
@pytest.mark.parametrize("kind", [Sleeps, KeepsTheInterpreter])
def test_long_steps_with_two_copies_cost_no_worker(slots: Any, kind: Any, nothing_left_behind: None) -> None:
    """Ten workers were lost, and then the query."""
    slow = flux.stage(key="k", partitions=4, replicas=2, name="Slow")(kind)
    source = flux.source(rows, SCHEMA, partitions=PARTITIONS)
    options = {"step_max_rows": 1, "heartbeat_timeout": SILENCE}
    query = flux.start(slow(source), spark=slots, keep_output=True, workers=3, **options)
    out = query.toDF().collect()
    expected = [(partition * 100 + number, number) for partition in range(PARTITIONS) for number in range(BATCHES)]
    assert sorted((row.k, row.v) for row in out) == expected
    assert not [event for event in query.events() if event.kind in ("loss", "divergence")]


class Kept(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None:
        pass


def failed_tasks(spark: Any, query: Any) -> int:
    tracker = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(f"flux-{query.id}")]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return sum(stage.numFailedTasks for stage in stages if stage is not None)


def test_a_worker_that_was_given_up_and_lives_is_no_failed_task(slots: Any, nothing_left_behind: None) -> None:
    """Spark bears a few failures of a task, then the query ended."""
    kept = flux.stage(key="k", partitions=4, replicas=2, name="Kept")(Kept)
    flow = kept(flux.source(ticks, schema="k BIGINT", partitions=3))
    query = flux.start(flow, spark=slots, workers=3, balance_enabled=False)
    try:
        query.wait_until_running(WAIT_S)
        rows_flow(query)
        for _ in range(2):
            members = query.members()
            assert len(members) == 3
            worker = max(members)
            query._server.command(lambda now, worker=worker: query._server.core.fail(worker, now))
            until(lambda: len(query.members()) == 3, "another has come in its place")
            until(lambda: query.tasks == 3, "the task of the other has ended")
        assert failed_tasks(slots, query) == 0
        assert query.exception() is None
    finally:
        query.stop()
