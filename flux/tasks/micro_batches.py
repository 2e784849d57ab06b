"""The streams of one partition of a source whose rows come in micro-batches of Structured Streaming (design: micro-batches)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flux.dataflow.plan import NUMBER, EdgePlan, EventTime
from flux.errors import QueryFailed, RefusedError, UsageError
from flux.exchange.log import Rows
from flux.exchange.producer import Producer
from flux.exchange.replay_check import Beginning
from flux.exchange.source_streams import SourceStreams, packed, unpacked
from flux.windows.lateness import BatchLateness
from flux.windows.window import NEVER


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one partition. ``query`` is Spark's id of the streaming query, the same after a restart from its
    checkpoint."""

    query: str
    number: int
    #: The rows that the partition had in the batches before, if that is known.
    least: int = 0
    #: By edge that leaves the source: the number behind the last of these rows that travelled. Empty: all did.
    sent: tuple[int, ...] = ()
    #: Rows with a time below it are late: the greatest time of the rows in the batches before, less the delay.
    watermark: int = NEVER

    def position(self, base: int) -> bytes:
        """Make the position of any of its rows in a stream in which it began with row ``base``."""
        return packed([self.query, self.number, base])


class MicroBatchStreams(SourceStreams):
    """The streams of one task, with the rows of one partition of a batch, of a source whose rows come in micro-batches, each from
    a task of its own (design: micro-batches).

    Spark runs the batches of a streaming query one after the other: batch N + 1 begins when every task of batch N has ended, and
    a task ends when every consumer has applied its rows. So the rows that a task finds in the streams belong either to its own
    batch, of which an earlier attempt has sent a part, or to completed batches. Each position says which batch it is in, and at
    which row that batch began. The beginning of the task follows:

        newest position of this batch      behind one of its rows that every consumer has applied, or at its first row
        newest position of a later batch   nowhere: the task is left over from long ago
        neither                            behind all rows of earlier batches, by the count of the driver, or of the edge that
                                           knows most: the last rows of a batch may have been left out on their way

    A partition that a batch does not have, or of which no row travels, leaves no trace, and needs none."""

    def __init__(
        self,
        edges: Sequence[EdgePlan],
        producers: Sequence[Producer],
        name: str,
        batch: MicroBatch,
        batch_bytes: int,
        event_time: EventTime | None = None,
    ) -> None:
        super().__init__(
            edges, producers, name, seeks=True, positions=True, batch_bytes=batch_bytes,
            event_time=event_time, judge=BatchLateness(batch.watermark),
        )  # fmt: skip
        self.batch = batch
        self._base = 0  # number of the first row of the batch
        self._position = b""
        #: By edge: the number behind the last row that has travelled, in any batch.
        self._sent = list(batch.sent or [batch.least] * len(edges))

    def find_start(self) -> bool:
        """Find the beginning, and tell whether it is known. UsageError: another streaming query has written here."""
        if self.first is None:
            applied = [producer.applied_by_all() for producer in self.producers]
            known = [at for at in applied if at is not None]
            if len(known) == len(applied):
                begun = [self._begun_at(producer) for producer in self.producers]
                self._base = self._base_of(begun)
                self._position = self.batch.position(self._base)
                starts = []
                for producer, at, own in zip(self.producers, known, begun, strict=True):
                    # Spark has all rows of its batch: the last ones that are applied are made once more, and compared.
                    made = None if own is None else producer.earlier.before(at - 1)
                    starts.append(made if made and made.sequence > self._base else Beginning(self._base, 0))
                self._begin(min(starts))
        return self.first is not None

    def _begin(self, beginning: Beginning) -> None:
        self._start, self.first, self._checksum = beginning, beginning.sequence, beginning.checksum
        self.next_number = beginning.sequence
        for producer in self.producers:
            producer.begin_at(self.first, self._checksum, settled=self.first == self._base)

    def _begun_at(self, producer: Producer) -> int | None:
        """Return the row at which this batch began in a stream, if a consumer has any of its rows."""
        newest = producer.earlier.newest()
        if newest is None:
            return None
        said: Any = unpacked(newest.position)
        query, number, base = said
        if query != self.batch.query:
            raise UsageError(
                f"source {self.name} has rows of streaming query {query}, and those of another, {self.batch.query}, come: an "
                "input takes one streaming query. Start that again with its own checkpoint, or give each an input of its own"
            )
        if number > self.batch.number:
            raise RefusedError("stale", f"batch {self.batch.number} of source {self.name} is over: {number} has come")
        return int(base) if number == self.batch.number else None

    def _base_of(self, begun: Sequence[int | None]) -> int:
        """Return the number of the first row of the batch. QueryFailed: rows of earlier batches are missing."""
        ends = []  # by edge: the number behind the last row of earlier batches that consumers have shown
        for edge, producer, sent, own in zip(self.edges, self.producers, self._sent, begun, strict=True):
            newest = producer.earlier.newest()
            end = own if own is not None else 0 if newest is None else newest.sequence + 1
            if end < sent:
                raise QueryFailed(
                    f"source {self.name}: the state of this query has {end} rows of partition "
                    f"{producer.stream.producer}, and Spark has committed {sent}: it goes on from an older checkpoint than "
                    "Spark's streaming query, which does not give its rows again"
                )
            ends.append((end, own is not None or not edge.drops))
        base = max([self.batch.least, *(end for end, _ in ends)])
        if any(exact and end != base for end, exact in ends):
            raise QueryFailed(f"source {self.name}: the stages that it feeds have different rows of earlier batches")
        return base

    @property
    def left_out(self) -> int:
        """The rows at the beginning of the partition that every consumer has applied."""
        assert self.first is not None
        return self.first - self._base

    def give(self, batch: pa.RecordBatch, created: float) -> pa.RecordBatch:
        """Append the first rows, as many as may be one batch, and return the others."""
        rows = self.until_cut(batch.num_rows)
        self.append(batch.slice(0, rows), created, self._position)
        for at, (edge, producer) in enumerate(zip(self.edges, self.producers, strict=True)):
            if not edge.drops:
                self._sent[at] = producer.next_sequence
            elif len(numbers := self._numbers_of_last(producer)):
                self._sent[at] = int(pc.max(numbers).as_py()) + 1
        return batch.slice(rows)

    @staticmethod
    def _numbers_of_last(producer: Producer) -> pa.Array:
        """Return the numbers of the rows that travel of the last element. An element without any leaves the log at once."""
        log = producer.log
        last = log[log.end - 1].element if len(log) else None
        return last.data.batch.column(NUMBER.name) if isinstance(last, Rows) else pa.array([], NUMBER.type)

    @property
    def sent(self) -> list[int]:
        """The numbers behind the last row that has travelled, by edge. It is the row and not its batch, because other attempts
        may cut batches elsewhere."""
        return list(self._sent)

    def finish_batch(self, left_out: int) -> None:
        """Finish the batch, which had ``left_out`` rows before the rows that were given. NonDeterministicInputError: an earlier
        attempt had more."""
        assert self.first is not None
        if left_out < self.left_out:
            raise self.producers[0].earlier.not_deterministic(self.first - 1, -1)
        for producer in self.producers:
            producer.rest()
