"""Runs: small batches of a stream that travel in one message and wait as one slice (design: run).

What travels and what is numbered are two things. Batches keep their numbers in the log, in orders and in acks; a message may
carry a run of them, and a slice then has the rows of several batches. So a stream of small batches costs what its messages
cost, and the further behind a consumer is, the longer the runs are.

Law: however the batches of a stream are divided into runs, each partition gets the same rows in the same order, and a slice
can be cut behind each batch that has rows in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: A batch with more rows for a worker travels alone: little is gained by a copy of it.
SMALL_ROWS = 512


class Part(NamedTuple):
    """The rows of one batch for one worker, in the order of the ``ranks`` of their partitions, which ascend; ``rows`` of each."""

    sequence: int
    ranks: np.ndarray
    rows: np.ndarray
    batches: list[pa.RecordBatch]
    nbytes: int
    checksum: int
    created: float


class Packed(NamedTuple):
    """A run as it travels: one batch, and how many of its rows are for each of the ``partitions``. ``counts``: of each batch
    of the run for each partition, batch by batch."""

    batch: pa.RecordBatch
    partitions: list[int]
    rows: list[int]
    counts: list[int]


class Run(NamedTuple):
    """The batches with rows in a slice, and how many rows of each (int64)."""

    sequences: np.ndarray
    rows: np.ndarray

    def cut(self, through: int) -> tuple[Run, Run] | None:
        """The batches through this one, which must be among them, and the others, which must not be none."""
        at = int(np.searchsorted(self.sequences, through, "right"))
        if not 0 < at < len(self.sequences) or self.sequences[at - 1] != through:
            return None
        return Run(self.sequences[:at], self.rows[:at]), Run(self.sequences[at:], self.rows[at:])


def pack(parts: Sequence[Part], by_rank: np.ndarray) -> Packed:
    """The rows stay in the order of the batches: to sort them by partition is the receiver's affair."""
    ranks, place = np.unique(np.concatenate([part.ranks for part in parts]), return_inverse=True)
    number = np.repeat(np.arange(len(parts)), [len(part.ranks) for part in parts])
    counts = np.zeros((len(parts), len(ranks)), np.int64)
    counts[number, place] = np.concatenate([part.rows for part in parts])
    batch = pa.concat_batches([batch for part in parts for batch in part.batches])
    return Packed(batch, by_rank[ranks].tolist(), counts.sum(axis=0).tolist(), counts.ravel().tolist())


def unpack(
    batch: pa.RecordBatch, sequences: Sequence[int], partitions: int, counts: Sequence[int]
) -> Iterator[tuple[Run, pa.RecordBatch]]:
    """For each of so many partitions of a run: which batches have rows for it, and its rows."""
    table = np.array(counts, np.int64).reshape(len(sequences), partitions)
    numbers = np.array(sequences, np.int64)
    if partitions > 1:
        whose = np.repeat(np.tile(np.arange(partitions), len(sequences)), table.ravel())
        batch = pc.take(batch, pa.array(np.argsort(whose, kind="stable")), boundscheck=False)
    start = 0
    for rows in table.T:
        some = np.flatnonzero(rows)
        run = Run(numbers[some], rows[some])
        end = start + int(run.rows.sum())
        yield run, batch.slice(start, end - start)
        start = end
