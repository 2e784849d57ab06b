"""Timers in the loops of real workers, with sockets and clocks, without Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from harness import ThreadQuery

import flux

SCHEMA = pa.schema([("x", pa.int64())])


def batch(x: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array([x], pa.int64())})


def test_a_timer_that_is_always_due_does_not_keep_a_worker_from_reading_its_source() -> None:
    seen: list[int] = []

    class Always(flux.Operator):
        def open(self, context: flux.Context) -> None:
            super().open(context)
            context.set_timer(0)

        def process(self, batch: pa.RecordBatch) -> None:
            seen.extend(batch.column("x").to_pylist())

        def on_timer(self, name: str) -> None:
            self.context.set_timer(0)

    source = flux.source(lambda partition: map(batch, range(20)), SCHEMA, 1)
    with ThreadQuery(flux.stage(partitions=1)(Always)(source), workers=1) as query:
        query.wait()
    assert seen == list(range(20))


def test_a_stage_without_rows_is_called_when_its_time_has_come() -> None:
    fired: list[tuple[float, float, float]] = []  # set for, told, true

    class Once(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None:
            self.at = self.context.now + 0.05
            self.context.set_timer(self.at)

        def on_timer(self, name: str) -> Any:
            fired.append((self.at, self.context.now, time.time()))

    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        yield batch(1)
        while not fired:
            yield None

    with ThreadQuery(flux.stage(partitions=1)(Once)(flux.source(read, SCHEMA, 1)), workers=2) as query:
        query.wait()
    ((at, told, true),) = fired
    assert at <= told <= true
