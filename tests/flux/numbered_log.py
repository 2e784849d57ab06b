"""A source with positions, for tests of the contract of sources: numbers, by partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

import flux


class Numbers(flux.SourceReader):
    """The numbers 0, 1, 2 ... in two partitions, even and odd. A position is the index of a row in its partition."""

    schema = pa.schema([("n", pa.int64())])
    partitions = 2

    def __init__(self, rows: int, rows_at_once: int = 7) -> None:
        self.rows, self.rows_at_once = rows, rows_at_once

    def read(self, partition: int, start: Any) -> flux.PartitionReader:
        return NumbersOfPartition(self, partition, start)


class NumbersOfPartition(flux.PartitionReader):
    """The reader of one partition."""

    def __init__(self, source: Numbers, partition: int, start: Any) -> None:
        self.source, self.partition = source, partition
        if isinstance(start, flux.RowStart):
            start = start.number
        self.at = start or 0

    def next(self) -> flux.Positioned | None:
        rows = min(self.source.rows_at_once, self.source.rows - self.at)
        if not rows:
            raise StopIteration
        indices = np.arange(self.at, self.at + rows)
        self.at += rows
        values = pa.array(indices * self.source.partitions + self.partition)
        batch = pa.record_batch([values], schema=self.source.schema)
        return flux.Positioned(batch, self.at, indices if self.source.row_numbers else None)
