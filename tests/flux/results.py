"""Output logs with results, written without a query."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from flux.dataflow.sink import Position, SinkContext
from flux.eventlog.streams import Retention
from flux.outputs.sink import OutputLogSink

COLUMNS = pa.schema([pa.field("value", pa.int64())])


def opened_sink(
    folder: Path, name: str = "delays", query: str = "query-1", retain: Retention | None = None, partitions: int = 1
) -> OutputLogSink:
    """Open the sink of partition 0 of a query."""
    folder.chmod(0o700)
    sink = OutputLogSink(str(folder), name, retain)
    sink.check(COLUMNS)
    sink.prepare(partitions, None)
    sink.open(SinkContext(query, 3, name, 0, partitions))
    return sink


def results(*values: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int64())], schema=COLUMNS)


def written(sink: OutputLogSink, sequence: int, batch: pa.RecordBatch) -> None:
    """Write a batch at an exit; it is durable."""
    assert sink.write(batch, Position(0, sequence)) is None
