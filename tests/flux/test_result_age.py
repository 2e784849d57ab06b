"""Waits of a window's result on its way to a sink, in virtual time: two workers, two replicas (design: watermark-pace)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import flux
from tests.flux.one_worker import planned
from tests.flux.virtual_workers import VirtualWorkers

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us"))])
#: Windows end out of step with the interval of watermarks, 50 ms.
RATE, TICK_S, SIZE_US, SECONDS = 5_000, 0.005, 70_000, 1.0


class Counted(flux.Aggregate):
    n = flux.count()


def source(clock: Any) -> Any:
    """Make a source of rows that carry the time at which they are due, at a steady rate in each of two partitions."""

    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        random, sent = np.random.default_rng(partition), 0
        while True:
            due = int(clock() // TICK_S * TICK_S * RATE / 2)
            if due <= sent:
                yield None
                continue
            times = (np.arange(sent, due) / RATE * 2e6).astype(np.int64)
            columns = [pa.array(random.integers(0, 1000, due - sent)), pa.array(times).view(SCHEMA.field(1).type)]
            yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
            sent = due

    return flux.source(read, SCHEMA, partitions=2).withWatermark("ts", "0 seconds")


def ages(replicas: int) -> list[float]:
    """Return the virtual milliseconds from the end of each window until its last result is at the sink."""
    found: dict[int, float] = {}

    class Ages(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None:
            for end in set(batch.column("window_end").view(pa.int64()).to_pylist()):
                found[end] = (workers.clock() - end / 1e6) * 1e3

    window = flux.window("ts", f"{SIZE_US} microseconds")
    counts = flux.stage(key="key", window=window, partitions=2, replicas=replicas)(Counted)
    plan = planned(counts, flux.stage(partitions=1)(Ages), source=source(lambda: workers.clock()))
    workers = VirtualWorkers(plan, 2)
    workers.run(SECONDS)
    inner = sorted(found)[3:-1]  # connections are made in the first windows
    assert len(inner) >= 8
    return [found[end] for end in inner]


def test_a_result_waits_for_its_row_for_messages_and_for_no_interval() -> None:
    """Bound the age: a row waits for a tick, a watermark for a look, and a result with two replicas for an order and
    its answer."""
    assert max(ages(1)) < 14
    assert max(ages(2)) < 17
