"""Functions and readers of a service's plan that run in workers.

Law: this module loads nothing of Spark and nothing of the compiler. A worker loads it before its first row, and with them it
would take a second of a processor in each worker at each start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from flux.dataflow.sink import Position
from flux.dataflow.source_reader import PartitionReader, SourceReader

#: The only column of the source that never has a row.
IDLE_COLUMN = "nothing"


def pass_on(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows as they are."""
    return batch


def nothing(batch: pa.RecordBatch, position: Position) -> None:
    """Take no rows."""


def loaded(_: Iterable[int]) -> Iterator[int]:
    """Load the modules of sources and sinks in a process that will be a worker. Yield the id of the process that forked it."""
    import flux.eventlog.source
    import flux.outputs.sink  # noqa: F401

    yield os.getppid()


class IdleReader(SourceReader):
    """A source that never has a row."""

    endless = True
    row_numbers = True
    partitions = 1
    schema = pa.schema([(IDLE_COLUMN, pa.int64())])

    def read(self, partition: int, start: Any) -> PartitionReader:
        return _Idle()


class _Idle(PartitionReader):
    def next(self) -> None:
        return None

    def when_ready(self, ring: Callable[[], None]) -> None:
        """Never ring."""
