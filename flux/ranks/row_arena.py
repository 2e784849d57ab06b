"""Rows of an operator's state, by number: appended at the end, taken in any order, never changed.

Rows lie in chunks, each more than twice as large as the one behind it. So there are few chunks, and a row is copied a few times
in all, however small the batches are that come.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


class RowArena:
    """Rows with numbers from 0 on."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._chunks: list[pa.RecordBatch] = []
        self._starts = np.zeros(1, np.int64)  # of each chunk, then the number of rows

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def append(self, rows: pa.RecordBatch) -> None:
        """Append rows. The batch owns its memory: a view would hold the batch that it is a part of."""
        if not rows.num_rows:
            return
        small = [rows]
        while self._chunks and self._chunks[-1].num_rows <= 2 * sum(each.num_rows for each in small):
            small.insert(0, self._chunks.pop())
        self._chunks.append(small[0] if len(small) == 1 else pa.concat_batches(small))
        self._starts = np.cumsum([0, *(chunk.num_rows for chunk in self._chunks)])

    def take(self, numbers: np.ndarray) -> pa.RecordBatch:
        """Return the rows with these numbers, in this order."""
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(numbers))
        places = np.searchsorted(self._starts, numbers, side="right") - 1
        order = np.argsort(places, kind="stable")
        cuts = np.searchsorted(places[order], np.arange(len(self._chunks) + 1))
        parts = []
        for place, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            if end > begin:
                parts.append(self._chunks[place].take(pa.array(numbers[order[begin:end]] - self._starts[place])))
        if not parts:
            return pa.RecordBatch.from_arrays([pa.array([], type_) for type_ in self.schema.types], schema=self.schema)
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return (
            parts[0]
            if len(parts) == 1 and (np.diff(order) == 1).all()
            else pa.concat_batches(parts).take(pa.array(back))
        )
