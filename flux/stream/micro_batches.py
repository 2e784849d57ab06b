"""The streams of one partition of a source whose rows come in micro-batches, each from a task of its own (design:
micro-batches).

Spark runs the batches of a streaming query one after the other: batch N + 1 begins when every task of batch N has ended, and a
task ends when every consumer has applied its rows. So the rows that a task finds in the streams belong either to its own batch,
of which an earlier attempt has sent a part, or to completed batches. Each position says which batch it is in, and at which row
that batch began. The beginning of the task follows:

    newest position of a batch before  behind its row: this batch has sent nothing yet
    newest position of this batch      behind one of its rows that every consumer has applied, or at its first row
    newest position of a later batch   nowhere: the task is left over from long ago

A partition that a batch does not have, or in which it has no rows, leaves no trace, and needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flux.dataflow.plan import EdgePlan
from flux.errors import QueryFailed, RefusedError, UsageError
from flux.stream.earlier import START, Beginning
from flux.stream.positions import packed, unpacked
from flux.stream.producer import Producer
from flux.stream.source_streams import SourceStreams


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch. ``query`` is Spark's id of the streaming query, the same after a restart from its checkpoint; ``least``
    the rows that the partition had in the batches before, if that is known."""

    query: str
    number: int
    least: int = 0

    def position(self, base: int) -> bytes:
        """Make the position of any of its rows in a stream in which it began with row ``base``."""
        return packed([self.query, self.number, base])


class MicroBatchStreams(SourceStreams):
    """The streams of one task, with the rows of one partition of a batch."""

    def __init__(
        self,
        edges: Sequence[EdgePlan],
        producers: Sequence[Producer],
        name: str,
        batch: MicroBatch,
        batch_bytes: int,
    ) -> None:
        super().__init__(edges, producers, name, seeks=True, positions=True, batch_bytes=batch_bytes)
        self.batch = batch
        self._base = 0  # number of the first row of the batch
        self._position = b""

    def place(self) -> bool:
        """Find the beginning, and tell whether it is known. UsageError: another streaming query has written here."""
        if self.first is None:
            applied = [producer.applied_by_all() for producer in self.producers]
            known = [at for at in applied if at is not None]
            if len(known) == len(applied):
                found = [self._beginning(producer, at) for producer, at in zip(self.producers, known, strict=True)]
                bases = {base for base, _ in found}
                if len(bases) > 1:
                    raise QueryFailed(
                        f"source {self.name}: the stages that it feeds have different rows of earlier batches"
                    )
                self._base = bases.pop()
                if self._base < self.batch.least:
                    raise QueryFailed(
                        f"source {self.name}: the state of this query has {self._base} rows of partition "
                        f"{self.producers[0].stream.producer}, and Spark has committed {self.batch.least}: it goes on from "
                        "an older checkpoint than Spark's streaming query, which does not give its rows again"
                    )
                self._position = self.batch.position(self._base)
                self._begin(min(start for _, start in found))
        return self.first is not None

    def _begin(self, beginning: Beginning) -> None:
        self._start, self.first, self._checksum = beginning, beginning.sequence, beginning.checksum
        for producer in self.producers:
            producer.begin_at(self.first, self._checksum, settled=self.first == self._base)

    def _beginning(self, producer: Producer, applied: int) -> tuple[int, Beginning]:
        """Return the number of the first row of the batch in a stream, and the beginning of this task there."""
        newest = producer.earlier.newest()
        if newest is None:
            return 0, START
        said: Any = unpacked(newest.position)
        query, number, base = said
        if query != self.batch.query:
            raise UsageError(
                f"source {self.name} has rows of streaming query {query}, and those of another, {self.batch.query}, come: an "
                "input takes one streaming query. Start that again with its own checkpoint, or give each an input of its own"
            )
        if number > self.batch.number:
            raise RefusedError("stale", f"batch {self.batch.number} of source {self.name} is over: {number} has come")
        if number < self.batch.number:
            end = newest.sequence + 1
            return end, Beginning(end, 0)
        # Spark has all rows of its batch: the last ones that are applied are made once more, and compared.
        known = producer.earlier.before(applied - 1)
        return base, known if known.sequence > base else Beginning(base, 0)

    @property
    def left_out(self) -> int:
        """The rows at the beginning of the partition that every consumer has applied."""
        assert self.first is not None
        return self.first - self._base

    def give(self, batch: pa.RecordBatch, created: float) -> pa.RecordBatch:
        """Append the first rows, as many as may be one batch, and return the others."""
        rows = self.until_cut(batch.num_rows)
        self.append(batch.slice(0, rows), created, self._position)
        return batch.slice(rows)

    def finish_batch(self, left_out: int) -> None:
        """Finish the batch, which had ``left_out`` rows before the rows that were given. NonDeterministicInputError: an earlier
        attempt had more."""
        assert self.first is not None
        if left_out < self.left_out:
            raise self.producers[0].earlier.not_deterministic(self.first - 1, -1)
        for producer in self.producers:
            producer.rest()
