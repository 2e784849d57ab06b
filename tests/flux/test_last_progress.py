"""The last progress report of a query that has come to its end is about its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from attacked import until
from harness import Rows, ThreadQuery, dataframe

import flux
from controller.decide.board import Tell
from flux.wire.control import Heartbeat

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


class Slow:
    """The connection of a worker that has primaries. Its heartbeats arrive ``turns`` turns of the controller after the end of
    the query; all its other messages arrive at once. None: they never arrive."""

    def __init__(self, query: ThreadQuery, worker: int, turns: int | None) -> None:
        self.core, self.worker, self.left = query.server.core, worker, turns
        self._held: list[tuple[Any, Heartbeat, float]] = []
        self._hear, self._tick = self.core.on_report, self.core.on_tick
        self.core.on_report = self._on_report  # type: ignore[method-assign]
        self.core.on_tick = self._on_tick  # type: ignore[method-assign]

    def _on_report(self, connection: Any, message: Any, now: float) -> list[Tell]:
        if isinstance(message, Heartbeat) and message.node == self.worker and self.left != 0:
            self._held.append((connection, message, now))
            return []
        return self._hear(connection, message, now)

    def _on_tick(self, now: float) -> list[Tell]:
        if self.core.phase == "ended" and self.left:
            self.left -= 1
            if not self.left:
                return [tell for held in self._held for tell in self._hear(*held)] + self._tick(now)
        return self._tick(now)


@pytest.mark.parametrize(("turns", "rows"), [(3, 2 * BATCHES * ROWS), (None, 0)], ids=["late", "never"])
def test_the_end_waits_for_reports_that_are_slower_than_the_one_that_ends_the_query(
    turns: int | None, rows: int
) -> None:
    """Wait for slow reports: those of different workers come on different connections, so a heartbeat that was sent
    first may arrive last."""
    slow = threading.Event()

    def waits(partition: int) -> Iterator[pa.RecordBatch | None]:
        while not slow.is_set():
            yield None
        yield from batches(partition)

    source = flux.source(waits, SCHEMA, partitions=2)
    with ThreadQuery(Rows(partitions=1).stage(passed(source)), workers=2, **SELDOM) as query:
        query.server.last_reports_s = 0.2
        core = query.started().server.core
        query.server.look(lambda: [Slow(query, worker, turns) for worker in core.members.workers])
        slow.set()
        query.wait()
        last = query.server.progress[-1]
    assert last["totalInputRows"] == rows
    assert [(stage["rowsIn"], stage["finished"]) for stage in last["stages"]] == [
        (rows, 3 * bool(rows)), (rows, bool(rows)),
    ]  # fmt: skip


def paced(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
    for number in range(start, BATCHES):
        time.sleep(0.02)
        yield pa.record_batch([pa.array(range(number, number + 10 + number % 7))], schema=SCHEMA)


def test_rows_are_counted_to_the_last_after_another_worker_has_gone_on_reading() -> None:
    """Count on from the last report of the former reader, which may have read further since."""
    flow = Rows().stage(passed(flux.source(paced, SCHEMA, partitions=2)))
    with ThreadQuery(flow, workers=3, heartbeat_interval="250ms") as query:
        core = query.started().server.core
        until(lambda: core.inputs.total > 0)
        reader = query.server.look(lambda: core.table.sources[0][0])  # type: ignore[union-attr]
        query.server.command(lambda now: core.drain(reader, now))
        query.wait()
        assert reader in core.departures.dismissed
        assert query.server.progress[-1]["totalInputRows"] == 2 * sum(10 + number % 7 for number in range(BATCHES))
