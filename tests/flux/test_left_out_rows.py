"""Counts of rows that windows have left out, and the bytes of state, as progress reports give them: exact after a loss, also
where the next replica begins empty (design: windows-upstream)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery
from outside_store import lose, until

import flux

SCHEMA = pa.schema([("number", pa.int64()), ("ts", pa.timestamp("us"))])
#: Each batch has one row without a time, and one that is late for the stage, whose watermark another column has moved.
BATCHES, ROWS = 60, 10
GATE = threading.Event()


def read(partition: int, start: int) -> Any:
    for number in range(start, BATCHES):
        while number >= BATCHES // 2 and not GATE.is_set():
            yield None
        yield from [None] * 8  # so that watermarks pass between batches
        times = np.arange(number * ROWS, (number + 1) * ROWS) * 100_000
        mask = np.arange(ROWS) == 3
        yield pa.record_batch(
            [pa.array(np.full(ROWS, number)), pa.array(times, mask=mask).cast(SCHEMA.field(1).type)], schema=SCHEMA
        )


@flux.stage(partitions=1, event_time="ts")
def older(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Give one row of each batch a time that is below the watermark, against its promise."""
    times = batch.column("ts").cast(pa.int64()).to_pylist()
    times[7] -= 5_000_000
    return pa.record_batch([batch.column("number"), pa.array(times).cast(SCHEMA.field(1).type)], schema=SCHEMA)


class Counts(flux.Aggregate):
    n = flux.count()


@pytest.mark.parametrize("recovery", ["upstream", pytest.param("active", marks=pytest.mark.long)])
def test_rows_that_were_left_out_are_counted_once_though_their_primary_is_lost(recovery: str) -> None:
    GATE.clear()
    source: Any = flux.source(read, SCHEMA, 1, "rows")
    window = flux.window("ts", "1 second")
    stage = flux.stage(partitions=1, replicas=2, recovery=recovery, window=window, name="counts")(Counts)
    rows = Rows(partitions=1)
    flow = rows.stage(stage(older(source.withWatermark("ts", "0 seconds"))))
    with ThreadQuery(
        flow,
        workers=3,
        operate=False,
        replicas_allow_same_executor=True,
        progress_interval="50ms",
        checkpoint_interval="50ms",
        watermark_interval="1ms",
        step_max_rows=ROWS,
    ) as query:
        query.started()
        core = query.server.core

        def of_stage() -> Any:
            reports = query.server.progress
            return next(each for each in reports[-1]["stages"] if each["name"] == "counts") if reports else {}

        def rows_without_time() -> int:
            return int(of_stage().get("eventTime", {}).get("rowsWithoutTime", 0))

        until(lambda: rows_without_time() == BATCHES // 2, "half of the rows")
        until(lambda: of_stage()["stateBytes"] > 0, "the state of the open window")
        before = of_stage()["eventTime"]["rowsBehindWatermark"]
        assert before > BATCHES // 4
        number = next(stage.id for stage in query.plan.stages if stage.name == "counts")
        assert core.table is not None
        lose(query, core.table.stages[number][0][0].worker)
        GATE.set()
        query.wait()
        told = query.server.progress[-1]["stages"][number]["eventTime"]
    assert told["rowsWithoutTime"] == BATCHES
    assert sum(row["n"] for row in rows) + told["rowsBehindWatermark"] + BATCHES == BATCHES * ROWS
