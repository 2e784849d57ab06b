"""Rows that are kept until their windows end, and groups of them.

Rows are numbered in the order in which they came. They lie in a few batches, each of which has its memory for itself: small ones
are copied into larger ones, so that each row is copied a few times at most and a look-up visits few batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from partitioning import kernels
from partitioning.clustering import copier

#: Rows of a batch up to which it is copied into a larger one.
BATCH_ROWS_MAX = 65_536
#: Below this many rows those that are gone are not taken out.
ROWS_MIN = 1024


class GroupRows(NamedTuple):
    """Rows of groups that are final, one group behind the other."""

    rows: pa.RecordBatch
    #: The number of rows of each group.
    counts: np.ndarray
    #: The start and the end of each group's window, in microseconds.
    starts: np.ndarray
    ends: np.ndarray


class KeptRows:
    """Rows by number, from 0. They are only added; ``taken`` makes others of them."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._own = copier(schema)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self._batches)

    def add(self, batch: pa.RecordBatch, owned: bool = False) -> None:
        """Add rows. They are copied unless they share no memory with others (``owned``)."""
        if not batch.num_rows:
            return
        self._size += batch.num_rows
        batches = self._batches
        if not batches or batches[-1].num_rows + batch.num_rows > BATCH_ROWS_MAX:
            batches.append(batch if owned else self._own(batch))
            return
        behind = [batch]
        rows = batch.num_rows
        while batches and batches[-1].num_rows <= 2 * rows and batches[-1].num_rows + rows <= BATCH_ROWS_MAX:
            behind.append(batches.pop())
            rows += behind[-1].num_rows
        if len(behind) == 1:
            batches.append(batch if owned else self._own(batch))
        else:
            batches.append(pa.concat_batches(behind[::-1]))

    def aside(self) -> KeptRows:
        """Return the same rows, to which others can be added."""
        made = KeptRows(self.schema)
        made._batches, made._size = list(self._batches), self._size
        return made

    def since(self, first: int) -> pa.Table:
        """Return the rows from number ``first`` on, perhaps as views."""
        found, end = [], self._size
        for batch in reversed(self._batches):
            if end <= first:
                break
            begin = end - batch.num_rows
            found.append(batch.slice(max(first - begin, 0)))
            end = begin
        return pa.Table.from_batches(found[::-1], self.schema)

    def batches(self) -> Sequence[pa.RecordBatch]:
        return self._batches

    def taken(self, rows: np.ndarray) -> pa.RecordBatch:
        """Return the rows of these numbers, in this order."""
        return taken_of(self._batches, rows, self.schema)


def taken_of(batches: Sequence[pa.RecordBatch], rows: np.ndarray, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of these numbers, in this order, counted from the first batch on."""
    if len(batches) == 1:
        return batches[0].take(pa.array(rows))
    ends = np.cumsum([batch.num_rows for batch in batches])
    places = np.searchsorted(ends, rows, "right")
    found, order = [], []
    for at, (batch, end) in enumerate(zip(batches, ends.tolist(), strict=True)):
        here = np.flatnonzero(places == at)
        if len(here):
            found.append(batch.take(pa.array(rows[here] - (end - batch.num_rows))))
            order.append(here)
    if not found:
        return pa.RecordBatch.from_pylist([], schema=schema)
    if len(found) == 1:
        return found[0]
    back = np.empty(len(rows), np.int64)
    back[np.concatenate(order)] = np.arange(len(rows))
    whole = pa.concat_batches(found)
    return whole if np.array_equal(back, np.arange(len(rows))) else whole.take(pa.array(back))


def grouped(slots: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of rows by their group, in which rows of a group keep theirs, and where each group begins and ends.
    ``slots``: the number of the group of each row; each group has a row."""
    order = np.arange(groups, dtype=np.int32)
    scratch, present = np.empty(groups, np.int64), np.empty(groups, np.int32)
    rows, offsets = np.empty(len(slots), np.int32), np.zeros(groups + 1, np.int64)
    kernels.counting_sort(slots, order, scratch, rows, present, offsets)
    return rows, offsets


def whole_groups(offsets: np.ndarray, rows_max: int) -> Iterator[tuple[int, int]]:
    """Yield parts of groups, as begin and end, each of ``rows_max`` rows at most or of one group."""
    begin, groups = 0, len(offsets) - 1
    while begin < groups:
        end = max(int(np.searchsorted(offsets, offsets[begin] + rows_max, "right")) - 1, begin + 1)
        yield begin, end
        begin = end
