"""A place outside for the sinks of a query of threads, and the rows that flow there."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pyarrow as pa
from harness import LIMIT_S, ThreadQuery

import flux

SCHEMA = pa.schema([("x", pa.int64())])
ALONE = {"operate": False, "replicas_allow_same_executor": True, "batch_max_rows": 10}


@flux.stage(key="x", partitions=2, replicas=2, schema=SCHEMA)
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Store:
    """An outside that keeps rows and positions together, as a database does in a transaction."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.batches: dict[int, list[list[int]]] = defaultdict(list)
        self.calls: list[tuple[str, Any]] = []
        self.again = 0

    def rows(self) -> list[int]:
        return sorted(row for batches in self.batches.values() for rows in batches for row in rows)


class Table(flux.Sink):
    """A sink that writes exactly once into a ``Store``."""

    traits = flux.SinkTraits(exactly_once=True)
    #: Stores by name, because each partition works with a copy of the sink.
    stores: ClassVar[dict[str, Store]] = defaultdict(Store)

    def __init__(self, name: str, before: Callable[[flux.Position], None] | None = None) -> None:
        self.name = name
        self.before = before

    def open(self, context: flux.SinkContext) -> None:
        self.store = self.stores[self.name]
        self.store.calls.append(("open", context.partition))

    def committed(self, partition: int) -> int:
        return len(self.store.batches[partition])

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        if self.before is not None:
            self.before(position)
        with self.store.lock:
            there = self.store.batches[position.partition]
            if position.sequence == len(there):
                there.append(batch.column("x").to_pylist())
            else:
                self.store.again += 1
                assert there[position.sequence] == batch.column("x").to_pylist(), "the same rows at the same position"

    def close(self) -> None:
        self.store.calls.append(("close", None))


def batches(rows: int, each: int = 10) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, each):
        yield pa.record_batch([pa.array(range(start, min(start + each, rows)))], schema=SCHEMA)


def until(there: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def lose(query: ThreadQuery, worker: int) -> None:
    query.server.command(lambda now: query.server.core.on_closed(worker, now))


def slowly(given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in given:
        time.sleep(0.002)
        yield batch


class HeldTable(Table):
    """A table whose function is not copied: the threads of the test share its events."""

    def __deepcopy__(self, memo: Any) -> HeldTable:
        return type(self)(self.name, self.before)


class StrictTable(HeldTable):
    """A table that refuses batches that it has."""

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        before = self.store.again
        super().write(batch, position)
        if self.store.again != before:
            raise RuntimeError(f"{position} was written by another")
