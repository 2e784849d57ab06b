"""Runs: small batches of a stream that travel in one message and wait as one slice (design: run).

What travels and what is numbered are two things. Batches keep their numbers in the log, in orders and in acks; a message may
carry a run of them, and a slice then has the rows of several batches. So a stream of small batches costs what its messages
cost, and the further behind a consumer is, the longer the runs are.

Law: however the batches of a stream are divided into runs, each partition gets the same rows in the same order, and a slice
can be cut behind each batch that has rows in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.wire.messages import Mark

#: A batch with more rows for a worker travels alone: little is gained by a copy of it.
SMALL_ROWS = 512
#: Fewer batches travel one by one: to pack and to unpack them costs as much.
RUN_LEAST = 4
#: Batches of a run times partitions: so many numbers its header has at most.
RUN_CELLS = 8192
#: Bytes of a run: a frame far below what a port accepts, a small part of a stream's credit, which returns as one.
RUN_BYTES = 256 << 10


class Part(NamedTuple):
    """The rows of one batch for one worker, in the order of the ranks of their partitions, which ascend. ``counts``: rank and
    rows of each partition."""

    sequence: int
    counts: list[tuple[int, int]]
    batches: list[pa.RecordBatch]
    nbytes: int
    checksum: int
    created: float
    mark: Mark | None = None


class Packed(NamedTuple):
    """A run as it travels: one batch, and how many of its rows are for each rank. ``counts``: of each batch of the run for each
    rank, batch by batch."""

    batch: pa.RecordBatch
    ranks: list[int]
    rows: list[int]
    counts: list[int]


class Run(NamedTuple):
    """The batches with rows in a slice, and how many rows of each."""

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

    def several(self) -> Run | None:
        """None: a batch is no run."""
        return self if len(self.rows) > 1 else None

    def from_(self, at: int) -> Run:
        return Run(self.sequences[at:], self.rows[at:])

    def cut(self, through: int) -> tuple[Run, Run] | None:
        """The batches through this one, which must be among them, and the others, which must not be none."""
        at = bisect_right(self.sequences, through)
        if not 0 < at < len(self.sequences) or self.sequences[at - 1] != through:
            return None
        return Run(self.sequences[:at], self.rows[:at]), self.from_(at)


def pack(parts: Sequence[Part]) -> Packed:
    """The rows stay in the order of the batches: to sort them by partition is the receiver's affair."""
    ranks = sorted({rank for part in parts for rank, _ in part.counts})
    place, width = {rank: at for at, rank in enumerate(ranks)}, len(ranks)
    counts = [0] * (width * len(parts))
    for number, part in enumerate(parts):
        for rank, rows in part.counts:
            counts[number * width + place[rank]] = rows
    batch = pa.concat_batches([batch for part in parts for batch in part.batches])
    return Packed(batch, ranks, [sum(counts[at::width]) for at in range(width)], counts)


def unpack(
    batch: pa.RecordBatch, sequences: list[int], rows: Sequence[int], counts: list[int]
) -> Iterator[tuple[Run, pa.RecordBatch]]:
    """For each partition of a run, which has so many ``rows`` in all: which batches have rows for it, and these."""
    width = len(rows)
    if width > 1:
        whose = np.repeat(np.tile(np.arange(width), len(sequences)), counts)
        batch = pc.take(batch, pa.array(np.argsort(whose, kind="stable")), boundscheck=False)
    start = 0
    for at, total in enumerate(rows):
        of_each = counts[at::width]
        if 0 in of_each:
            some = [(sequence, count) for sequence, count in zip(sequences, of_each, strict=True) if count]
            run = Run([sequence for sequence, _ in some], [count for _, count in some])
        else:
            run = Run(sequences, of_each)
        yield run, batch.slice(start, total)
        start += total
