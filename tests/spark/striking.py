"""Rows at a steady pace, and strikes against the workers that they go through."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

import flux
from spark_integration.query.query import Query

KEYS, PARTITIONS, ROUNDS, LAST_ROUNDS = 100, 3, 200, 20
ROUND_S = 0.02
#: A machine under load takes its time; nothing here is judged by it.
WAIT_S = 180.0
ROWS = pa.schema([("key", pa.int64()), ("sequence", pa.int64())])
SEEN = "key long, sequence long, seen long"


class Seen(flux.Operator):
    """How many rows of its key have come before each row, as far as this state knows: a row that is lost, doubled or out of
    order shows in all that follow. Its attributes are its state."""

    def open(self, context: flux.Context) -> None:
        self.counts: dict[int, int] = {}

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        before = []
        for key in batch.column("key").to_pylist():
            before.append(self.counts.get(key, 0))
            self.counts[key] = before[-1] + 1
        return pa.record_batch([*batch.columns, pa.array(before, pa.int64())], names=["key", "sequence", "seen"])


def paced(gate: Path) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Round n has sequence number n of every key of the partition; a round every ``ROUND_S``, the last ones when there
    is a file at ``gate``: so the fault comes in mid-stream on a slow machine too."""
    gate_path = str(gate)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        begun = time.time() - start * ROUND_S
        for number in range(start, ROUNDS):
            while time.time() < begun + number * ROUND_S:
                yield None
            while number == ROUNDS - LAST_ROUNDS and not os.path.exists(gate_path):
                yield None
            keys = np.arange(KEYS) * PARTITIONS + partition
            yield pa.record_batch([pa.array(keys), pa.array(np.full(KEYS, number))], schema=ROWS)

    return read


def rounds_until_told(gate: Path) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Round n has sequence number n of every key of the partition, at a steady pace. The file at ``gate`` says how many
    rounds there are in all: until then they go on, however long a test has to wait."""
    gate_path = str(gate)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        begun, keys = time.time() - start * ROUND_S, pa.array(np.arange(KEYS) * PARTITIONS + partition)
        for number in range(start, 1 << 30):
            while time.time() < begun + number * ROUND_S:
                yield None
            said = Path(gate_path)
            if said.exists() and number >= int(said.read_text()):
                return
            yield pa.record_batch([keys, pa.array(np.full(KEYS, number))], schema=ROWS)

    return read


def tell(gate: Path, begun: float) -> int:
    """Let the rounds end some time after now. ``begun``: a time before any reader began, so no reader is farther."""
    rounds = int((time.time() - begun) / ROUND_S) + 150
    made = gate.with_suffix(".new")
    made.write_text(str(rounds))
    made.rename(gate)  # a reader that sees the file sees all of it
    return rounds


def strike(query: Query, signal_number: int, executor: bool = False, stage: int = 1, worker: int | None = None) -> int:
    """Signal the process of a worker, or its executor; returns the worker's id. By default it is primary of something."""
    table = query._server.core.table
    assert table is not None
    worker = table.stages[stage][0][0].worker if worker is None else worker
    about = query.members()[worker].about
    os.kill(int(about.executor.rpartition(":")[2]) if executor else about.pid, signal_number)
    return worker


def until(condition: Callable[[], object], what: str, limit_s: float = WAIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit_s:g} s"
        time.sleep(0.01)


def rows_in(query: Query) -> int:
    return (query.lastProgress or {"totalInputRows": 0})["totalInputRows"]
