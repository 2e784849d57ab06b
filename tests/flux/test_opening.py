"""The note of a worker about the operator that it opens, by which the controller gives each ``open`` its own time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from one_worker import planned, table

import flux
from flux.wire.pulse import KIND, OPENS, PARTITION, TURN, WHAT
from flux.worker.core import WorkerCore

#: The worker whose operators are opened, and the notes at these moments.
_core: list[WorkerCore] = []
_seen: list[tuple[int, ...]] = []


class Opened(flux.Operator):
    """An operator that looks at the note in ``open``."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        _seen.extend((core.note[KIND], core.note[WHAT], core.note[PARTITION]) for core in _core)

    def process(self, batch: pa.RecordBatch) -> Any:
        return None


def test_a_worker_notes_the_partition_that_it_opens() -> None:
    plan = planned(flux.stage(key="x", partitions=3)(Opened))
    core = WorkerCore(plan, 0)
    _core.append(core)
    try:
        core.on_table(table(plan), 0.0)
    finally:
        _core.clear()
    assert sorted(_seen) == [(OPENS, 0, partition) for partition in range(3)]
    assert core.note[KIND] == TURN
