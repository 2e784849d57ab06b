"""Runs: small batches of a stream that travel in one message and wait as one slice (design: run).

Travelling and numbering are independent. Batches keep their numbers in the log, in orders and in acks; a message may carry a
run of them, and a slice then has the rows of several batches. So the cost of a stream of small batches is the cost of its
messages, and the further behind a consumer is, the longer the runs are.

Law: however the batches of a stream are divided into runs, each partition gets the same rows in the same order, and a slice can
be cut behind each batch that has rows in it.

``RowNumbers`` numbers single rows, so that a stream can be cut anywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flux.dataflow.plan import NUMBER
from flux.exchange.consumer_map import Ranks
from partitioning import kernels
from partitioning.clustering import Clustered, take

#: Without a key, this number of rows go to one partition before the next one has its turn. The turn follows from the number of
#: a row, because batches may be others when the rows are read again.
ROTATION_ROWS = 4096


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The numbers of the rows of a slice, int64[rows], ascending (design: numbered-rows). It answers for single rows the same
    questions as ``SliceRun`` for batches.

    A reader with positions of its own cuts its rows as they come, and elsewhere when it reads them again. So the elements of its
    streams are numbered by rows: a batch has the number of its last row, a slice that of its last row for the partition. The
    numbers travel as one column more, and the stream can be cut anywhere. A receiver cuts a slice at any row that an order names,
    and behind the rows that it has already."""

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


#: A batch with more rows for a worker travels alone, because a copy of it gains little.
SMALL_ROWS = 512
#: Fewer batches travel one by one.
RUN_LEAST = 2
#: Rows of a run at most. A run waits as one slice, and a slow operator should not get more at a time.
RUN_ROWS = 4096
#: Batches of a run times partitions: the most numbers in its header.
RUN_CELLS = 8192
#: A batch with more bytes travels alone as well.
SMALL_BYTES = 64 << 10
#: Bytes of a run at most: a frame far below the bound of a port, and a small part of a stream's credit, which returns as one.
RUN_BYTES = 256 << 10


class Span(NamedTuple):
    """Batches one behind the other, each clustered by partition, with any order of partitions. The run of each worker is chosen
    from them.

        batch       all their rows
        partitions  int32[s]: the partition of each slice, batch by batch
        offsets     int64[s+n]: the slices of each batch within that batch, and its end
        slices      int64[n]: the number of slices of each batch
        nbytes      int64[n]: the size of each batch
        sequences   int64[n]: the numbers of the batches in the stream"""

    batch: pa.RecordBatch
    partitions: np.ndarray
    offsets: np.ndarray
    slices: np.ndarray
    nbytes: np.ndarray
    sequences: np.ndarray


class Packed(NamedTuple):
    """A run as it travels: one batch, partition by partition and in each in the order of the stream.

    ``which`` are the batches of the span that have rows in it; ``rows`` those of each partition; ``counts`` those of each of
    these batches for each partition, batch by batch."""

    batch: pa.RecordBatch
    which: list[int]
    partitions: list[int]
    rows: list[int]
    counts: list[int]
    nbytes: int


class SliceRun(NamedTuple):
    """The batches with rows in a slice, and their numbers of rows."""

    sequences: list[int]
    rows: list[int]

    @property
    def first(self) -> int:
        return self.sequences[0]

    @property
    def last(self) -> int:
        return self.sequences[-1]

    @property
    def rows_in_all(self) -> int:
        return sum(self.rows)

    def several(self) -> SliceRun | None:
        """Return the run itself; None: it is a single batch."""
        return self if len(self.rows) > 1 else None

    def from_(self, at: int) -> SliceRun:
        return SliceRun(self.sequences[at:], self.rows[at:])

    def cut(self, through: int, exact: bool = True) -> tuple[SliceRun, SliceRun] | None:
        """Cut behind a batch, which must not be the last. ``exact``: it must be one of them, else it may be gone."""
        at = bisect_right(self.sequences, through)
        if not 0 < at < len(self.sequences) or (exact and self.sequences[at - 1] != through):
            return None
        return SliceRun(self.sequences[:at], self.rows[:at]), self.from_(at)


def span(batches: Sequence[Clustered], sequences: Sequence[int]) -> Span:
    return Span(
        pa.concat_batches([each.batch for each in batches]),
        np.concatenate([each.by_rank for each in batches]),
        np.concatenate([each.offsets for each in batches]),
        np.array([len(each.by_rank) for each in batches]),
        np.array([each.nbytes for each in batches]),
        np.array(sequences),
    )


def pack(span: Span, hosts: np.ndarray, wanted_from: np.ndarray, ranks: Ranks) -> Packed | None:
    """Choose the rows for a worker, sorted by the ranks of their partitions; None: there are none.

    The worker ``hosts`` the partitions. Each of them wants the batches from ``wanted_from`` on; empty: all batches."""
    numbers, found, rows, counts, which, nbytes = kernels.choose_run(
        span.partitions, span.offsets, span.slices, span.nbytes, span.sequences, hosts, wanted_from, ranks.rank_of
    )
    if not len(which):
        return None
    batch = take(span.batch, numbers)
    return Packed(batch, which.tolist(), ranks.by_rank[found].tolist(), rows.tolist(), counts.tolist(), int(nbytes))


def unpack(
    batch: pa.RecordBatch, sequences: list[int], rows: Sequence[int], counts: list[int]
) -> Iterator[tuple[SliceRun, pa.RecordBatch]]:
    """Yield, for each partition of a run with its ``rows``, the batches that have rows for it, and these rows."""
    width, start = len(rows), 0
    for at, total in enumerate(rows):
        of_each = counts[at::width]
        if 0 in of_each:
            some = [(sequence, count) for sequence, count in zip(sequences, of_each, strict=True) if count]
            run = SliceRun([sequence for sequence, _ in some], [count for _, count in some])
        else:
            run = SliceRun(sequences, of_each)
        yield run, batch.slice(start, total)
        start += total
