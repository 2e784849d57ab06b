"""The last progress report of a query that has come to its end is about its end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from attacked import until
from harness import Rows, ThreadQuery, dataframe

import flux

SCHEMA = pa.schema([("k", pa.int64())])
BATCHES, ROWS = 40, 50
#: Heartbeats are far apart, so that none of them comes between the end and the report by chance.
SELDOM = {"heartbeat_interval": "2s", "progress_interval": "1h"}


@flux.stage(key="k", partitions=3, schema=SCHEMA)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def batches(partition: int) -> Iterator[pa.RecordBatch]:
    for number in range(BATCHES):
        yield pa.record_batch([pa.array(range(number, number + ROWS))], schema=SCHEMA)


@pytest.mark.parametrize("fed_by", ["a source", "a DataFrame"])
def test_the_last_report_has_all_rows_of_all_stages_and_nothing_that_waits(fed_by: str) -> None:
    source = flux.source(batches, SCHEMA, partitions=2) if fed_by == "a source" else dataframe(SCHEMA)
    with ThreadQuery(Rows().stage(passed(source)), workers=3, **SELDOM) as query:
        if fed_by == "a DataFrame":
            query.feed([batches(0), batches(1)])
        query.wait()
        last = query.server.progress[-1]
    assert last["totalInputRows"] == 2 * BATCHES * ROWS
    assert [(stage["rowsIn"], stage["finished"]) for stage in last["stages"]] == [
        (2 * BATCHES * ROWS, 3), (2 * BATCHES * ROWS, 2),
    ]  # fmt: skip
    assert last["backlog"] == {"slices": 0, "bytes": 0}


def paced(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
    for number in range(start, BATCHES):
        time.sleep(0.02)
        yield pa.record_batch([pa.array(range(number, number + 10 + number % 7))], schema=SCHEMA)


def test_rows_are_counted_to_the_last_after_another_worker_has_gone_on_reading() -> None:
    """The new reader counts on from the last report of the one before it, which may have read further since."""
    flow = Rows().stage(passed(flux.source(paced, SCHEMA, partitions=2)))
    with ThreadQuery(flow, workers=3, heartbeat_interval="250ms") as query:
        core = query.started().server.core
        until(lambda: core.inputs.total > 0)
        reader = query.server.look(lambda: core.table.sources[0][0])  # type: ignore[union-attr]
        query.server.command(lambda now: core.drain(reader, now))
        query.wait()
        assert reader in core.departures.dismissed
        assert query.server.progress[-1]["totalInputRows"] == 2 * sum(10 + number % 7 for number in range(BATCHES))
