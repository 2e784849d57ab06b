"""Sessions that end when nothing comes for a while: only a timer can tell, and it must also when its worker has died."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from test_faults import strike, until

import flux
from spark_integration.query.query import Query

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left_behind")]

KEYS, PARTITIONS, BURSTS = 200, 2, 4
IDLE_S = 1.0
#: A machine under load takes its time; nothing here is judged by it.
WAIT_S = 180.0
KEY = pa.schema([("key", pa.int64())])


@flux.stage(key="key", partitions=3, replicas=2)
def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(key="key", partitions=3, replicas=2)
class Sessions(flux.Operator):
    """How many rows of a key came until there was none for ``IDLE_S``. The state is a table of the open sessions, with a
    deadline each; one timer is set for the earliest."""

    schema = pa.schema(
        [("key", pa.int64()), ("rows", pa.int64()), ("deadline", pa.float64()), ("closed", pa.float64())]
    )

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.sessions = pa.RecordBatch.from_pylist([], self.schema.remove(3))

    def process(self, batch: pa.RecordBatch) -> None:
        rows, deadline = pa.repeat(1, batch.num_rows), pa.repeat(self.context.now + IDLE_S, batch.num_rows)
        came = pa.RecordBatch.from_arrays([batch.column("key"), rows, deadline], schema=self.sessions.schema)
        both = pa.Table.from_batches([self.sessions, came]).group_by("key")
        found = both.aggregate([("rows", "sum"), ("deadline", "max")]).select(["key", "rows_sum", "deadline_max"])
        self._keep(found.rename_columns(self.sessions.schema.names).combine_chunks().to_batches()[0])

    def on_timer(self, name: str) -> Iterator[pa.RecordBatch]:
        over = pc.less_equal(self.sessions.column("deadline"), self.context.now)
        closed = self.sessions.filter(over)
        self._keep(self.sessions.filter(pc.invert(over)))
        at = pa.repeat(self.context.now, closed.num_rows)
        yield pa.RecordBatch.from_arrays([*closed.columns, at], schema=self.schema)

    def _keep(self, sessions: pa.RecordBatch) -> None:
        self.sessions = sessions
        if sessions.num_rows:
            self.context.set_timer(pc.min(sessions.column("deadline")).as_py())

    def snapshot(self) -> pa.RecordBatch:
        return self.sessions

    def restore(self, snapshot: pa.RecordBatch) -> None:
        self.sessions = snapshot


def bursts(gates: Path) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Burst n has n + 1 rows of every key, and comes when there is a file n in the folder; so does the end."""
    folder = str(gates)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        keys = [key for key in range(KEYS) if key % PARTITIONS == partition]
        for number in range(BURSTS + 1):
            while not os.path.exists(os.path.join(folder, str(number))):
                yield None
            if start <= number < BURSTS:
                yield pa.record_batch({"key": pa.array(keys * (number + 1), pa.int64())})

    return read


def seen(query: Query) -> dict[str, int]:
    """Return the counts of the sessions' stage in the newest report."""
    if query.exception() is not None:
        raise query.exception()
    return query.lastProgress["stages"][1] if query.lastProgress else {"rowsIn": 0, "rowsOut": 0}


def test_sessions_are_closed_in_time_also_by_a_copy_that_has_taken_over(slots: Any, tmp_path: Path) -> None:
    flow = Sessions(echo(flux.source(bursts(tmp_path), KEY, partitions=PARTITIONS)))
    query = flux.start(
        flow, spark=slots, workers=3, keep_output=True, progress_interval="50ms", heartbeat_timeout="5s",
        workers_timeout=WAIT_S,
    )  # fmt: skip
    try:
        for number in range(BURSTS):
            (tmp_path / str(number)).touch()
            if number == 1:
                until(lambda: seen(query)["rowsIn"] == 3 * KEYS, "rows of two bursts", WAIT_S)
                lost = strike(query, signal.SIGKILL)
                until(lambda lost=lost: lost not in query.members(), "the loss is noticed", WAIT_S)  # type: ignore[misc]
            until(lambda n=number: seen(query)["rowsOut"] >= KEYS * (n + 1), "every session is closed", WAIT_S)  # type: ignore[misc]
            until(query.is_whole, "full replication", WAIT_S)
        (tmp_path / str(BURSTS)).touch()
        found = query.toDF().collect()
    finally:
        query.stop()
    kinds = {event.kind for event in query.events()}
    assert "take-over" in kinds
    assert "divergence" not in kinds
    assert Counter((row.key, row.rows) for row in found) == Counter(
        (key, number + 1) for key in range(KEYS) for number in range(BURSTS)
    )
    assert all(row.closed >= row.deadline for row in found)
    reported = [report["stages"][1]["rowsOut"] for report in query.recentProgress]
    assert reported == sorted(reported), "a count fell, or a partition was counted twice while it moved"
    assert reported[-1] == KEYS * BURSTS
