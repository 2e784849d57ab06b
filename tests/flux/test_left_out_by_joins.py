"""Counts of rows that joins, ranks and deduplication leave out, and the bytes of their state, as progress reports give them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery
from outside_store import until

import flux
from flux.joins.join import Join
from flux.joins.join_spec import LEFT, JoinSpec, TimeBound
from flux.ranks.top import OrderColumn, RankSpec, TopOfWindow
from flux.windows.window import Window

SCHEMA = pa.schema([("number", pa.int64()), ("ts", pa.timestamp("us"))])
OTHERS = pa.schema([("number", pa.int64()), ("at", pa.timestamp("us"))])
#: Each batch has one row without a time, and one that is below the watermark.
BATCHES, ROWS = 6, 10
GATE = threading.Event()


def read(schema: pa.Schema) -> Any:
    def batches(partition: int, start: int) -> Any:
        for number in range(start, BATCHES):
            while number == BATCHES - 1 and not GATE.is_set():
                yield None
            yield from [None] * 8  # so that watermarks pass between batches
            times = np.arange(number * ROWS, (number + 1) * ROWS) * 100_000
            times = pa.array(times, mask=np.arange(ROWS) == 3).cast(schema.field(1).type)
            yield pa.record_batch([pa.array(np.arange(ROWS) + number * ROWS), times], schema=schema)

    return batches


def older(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Give one row of each batch a time that is below the watermark, against its promise."""
    times = batch.column(1).cast(pa.int64()).to_pylist()
    times[7] -= 5_000_000
    return pa.record_batch([batch.column(0), pa.array(times).cast(batch.schema.field(1).type)], schema=batch.schema)


def sides(*schemas: pa.Schema) -> list[Any]:
    made = []
    for number, schema in enumerate(schemas):
        rows: Any = flux.source(read(schema), schema, 1, f"rows{number}")
        name = schema.names[1]
        made.append(
            flux.stage(partitions=1, event_time=name, name=f"older{number}")(older)(
                rows.withWatermark(name, "0 seconds")
            )
        )
    return made


def join() -> Any:
    spec = JoinSpec("inner", ((0,), (0,)), (("number", 0), ("at", 3)), (1, 1),
                    (TimeBound(LEFT, False, 1, 0), TimeBound(LEFT, True, 1, 1_000_000)), time_of=LEFT)  # fmt: skip
    return flux.stage(key="number", partitions=1, name="counted")(Join)(spec, SCHEMA, OTHERS)(*sides(SCHEMA, OTHERS))


def as_of() -> Any:
    return flux.asof_join(*sides(SCHEMA, OTHERS), on="number").withStage(name="counted", partitions=1)


def dedup() -> Any:
    return flux.dedup(sides(SCHEMA)[0], key="number", ttl="1 second").withStage(name="counted", partitions=1)


def top() -> Any:
    spec = RankSpec(1, (OrderColumn("number"),), ("number",), window=Window("ts", 1_000_000, 1_000_000))
    return flux.stage(key="number", partitions=1, name="counted")(TopOfWindow)(spec)(*sides(SCHEMA))


@pytest.mark.parametrize("flow", [join, as_of, dedup, top])
def test_progress_tells_state_and_rows_that_were_left_out(flow: Any) -> None:
    GATE.clear()
    rows = Rows(partitions=1)
    settings = {"progress_interval": "50ms", "watermark_interval": "1ms", "step_max_rows": ROWS}
    with ThreadQuery(rows.stage(flow()), workers=1, operate=False, **settings) as query:
        query.started()

        def told() -> Any:
            reports = query.server.progress
            return next(each for each in reports[-1]["stages"] if each["name"] == "counted") if reports else {}

        until(lambda: told().get("stateBytes"), "the state of rows that wait")
        GATE.set()
        query.wait()
        inputs = len(query.plan.stages) - 2
        found = told()["eventTime"]
    assert found["rowsWithoutTime"] == inputs * BATCHES
    assert inputs * BATCHES // 2 < found["rowsBehindWatermark"] <= inputs * BATCHES
