"""Rows that carry their number, so that their stream can be cut anywhere (design: numbered-rows).

A reader with positions of its own cuts its rows as they come, and elsewhere when it reads them again. So the elements of its
streams are numbered by rows: a batch has the number of its last row, a slice that of its last row for the partition. The
numbers travel as one column more. A receiver cuts a slice at any row that an order names, and behind the rows that it has
already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from flux.dataflow.plan import NUMBER

#: Without a key, this number of rows go to one partition before the next one has its turn. The turn follows from the number of
#: a row, because batches may be others when the rows are read again.
ROTATION_ROWS = 4096


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The numbers of the rows of a slice, int64[rows], ascending. It answers for single rows the same questions as ``Run`` for
    batches."""

    numbers: np.ndarray

    @property
    def first(self) -> int:
        return int(self.numbers[0])

    @property
    def last(self) -> int:
        return int(self.numbers[-1])

    @property
    def rows_in_all(self) -> int:
        return len(self.numbers)

    def several(self) -> RowNumbers:
        return self

    def cut(self, through: int, exact: bool = True) -> tuple[RowNumbers, RowNumbers] | None:
        """Cut behind a row, which must not be the last. ``exact``: it must be one of them, else it may be gone."""
        at = self.before(through + 1)
        if not 0 < at < len(self.numbers) or (exact and self.numbers[at - 1] != through):
            return None
        return RowNumbers(self.numbers[:at]), RowNumbers(self.numbers[at:])

    def before(self, number: int) -> int:
        """Count the rows before this number."""
        return int(np.searchsorted(self.numbers, number))


def with_numbers(batch: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*batch.columns, pa.array(numbers)], schema=batch.schema.append(NUMBER))


def without_numbers(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, RowNumbers]:
    last = batch.num_columns - 1
    return batch.select(range(last)), RowNumbers(batch.column(last).to_numpy())
