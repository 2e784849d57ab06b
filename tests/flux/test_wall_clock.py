"""The wall clock is set back while a query runs: nothing waits for it to come to the old time again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery, dataframe

import flux

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
BACK_S, BATCHES = 3600.0, 80


@flux.stage(key="k", partitions=4, replicas=2)
class Total(flux.Aggregate):
    total = flux.sum("v")


def test_a_wall_clock_that_is_set_back_stops_neither_rows_nor_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock back in the middle: it stopped the query for as long as it was set back."""
    real, back = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() - back[0])

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(BATCHES):
            time.sleep(0.02)
            if number == BATCHES // 4:
                back[0] = BACK_S
            while number == BATCHES - 1 and not reported():
                time.sleep(0.01)
            yield pa.RecordBatch.from_arrays([pa.array([number % 5]), pa.array([1])], schema=SCHEMA)

    def reported() -> bool:
        """Tell whether a report came in the second half, or the query has ended and can report no more."""
        shown = [report["totalInputRows"] for report in query.server.progress]
        return query.server.phase != "running" or any(BATCHES // 2 < rows_in < BATCHES for rows_in in shown)

    rows = Rows()
    options = {"replicas_allow_same_executor": True, "progress_interval": "50ms"}
    with ThreadQuery(rows.stage(Total(dataframe(SCHEMA))), workers=2, **options) as query:
        query.started()
        query.feed([batches()])
        query.wait()
        assert not [event for event in query.server.core.repairs.history if event.kind == "loss"]
        assert not query.raised
    assert sum(row["total"] for row in rows) == BATCHES
