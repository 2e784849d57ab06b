"""The questions of a reader of output, and their addressees: the rules, without sockets and clock (design: readers).

A reader keeps a position for each partition that it reads, and asks the worker of the primary from there on. Batch n of a
partition is the same from every worker, so an answer is right whichever worker sends it, and a question may be repeated at any
worker. With its next question a reader acknowledges the batches that it has for good; the worker forgets these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pyarrow as pa

from flux.errors import ProtocolError, QueryFailed
from flux.wire.messages import Pull, Pulled
from partitioning.table import Table

#: Seconds after which an unanswered question is asked again, of the primary by the newest table. A worker lets a question wait
#: for at most ``output_delivery.WAIT_S``.
PATIENCE_S = 0.5
#: Seconds after which the table is asked for again, and so is a worker that has answered that it is not primary.
TABLE_EVERY_S = 0.1
#: Seconds between repeated acknowledgements when all is over: the worker may have been deposed before it got the last one, or be
#: lost before any other worker knows it (design: reader-last-word).
OVER_EVERY_S = 0.5


class StageRemoved(QueryFailed):
    """The removal of a stage whose output is being read."""


class PullQuestion(NamedTuple):
    """A question to send to the data port of a worker."""

    endpoint: str
    pull: Pull


class Got(NamedTuple):
    """Batch ``position`` of a partition's output."""

    partition: int
    position: int
    batch: pa.RecordBatch


@dataclass
class PulledPartition:
    """The progress of one partition."""

    #: Position of the next batch.
    position: int
    #: The reader has the batches below this for good.
    acknowledged: int
    #: Position at which it ends; None: it ends with the output.
    until: int | None = None
    #: The worker has forgotten the batches below this, by its last answer.
    left: int = 0
    #: End of the committed output, by the worker's last answer.
    end: int = 0
    #: The output has ended, by the worker's last answer.
    finished: bool = False
    #: The worker has no room for more output, by its last answer.
    full: bool = False
    #: The worker has answered at least once.
    told: bool = False
    #: Time of the open question; -inf: there is none.
    asked_at: float = -math.inf
    #: The open question has acknowledged the batches below this.
    said: int = 0
    #: It is not asked for before this time.
    again_at: float = -math.inf
    #: Batches that have come and were not taken yet.
    queued: int = 0


class OutputPull:
    """The reading of a stage's output from a position of each partition on: ``take`` until ``over``.

    A batch that was taken is the reader's for good when the next one is taken, or when the reader says so (``acknowledge``). A
    reader that is not ``acknowledging`` never says so: it can read the batches again."""

    def __init__(
        self,
        stage: int,
        positions: Mapping[int, int],
        bytes_max: int,
        until: Mapping[int, int] | None = None,
        acknowledging: bool = True,
        where: Mapping[int, str] | None = None,
    ) -> None:
        """Begin at the positions. ``until``: positions at which the partitions end. ``where``: endpoints of the primaries by an
        earlier table, to begin with."""
        self.parts = {
            partition: PulledPartition(
                position, position if acknowledging else 0, None if until is None else until[partition]
            )
            for partition, position in positions.items()
        }
        self._stage = stage
        self._bytes_max = bytes_max
        self._acknowledging = acknowledging
        self._table: Table | None = None
        self._where = where or {}
        self._table_asked_at = -math.inf
        self._stale = not where  # the table has to be asked for
        self._ready: deque[Got] = deque()
        self._taken: Got | None = None

    # ---- received batches

    @property
    def over(self) -> bool:
        """True if everything has come and was taken, and the workers have confirmed all acknowledgements that are to be made. A
        reader that cannot come again goes on asking until the query knows it, too."""
        return not self._ready and all(self._is_over(part) for part in self.parts.values())

    @property
    def all_read(self) -> bool:
        """True if everything has come and was taken, even if a worker may not have got the last acknowledgement yet."""
        return not self._ready and all(self._is_enough(part) for part in self.parts.values())

    def take(self) -> Got | None:
        """Return the next batch; None: there is none at present."""
        self.settle()
        if not self._ready:
            return None
        self._taken = self._ready.popleft()
        self.parts[self._taken.partition].queued -= 1
        return self._taken

    def settle(self) -> None:
        """Note that the reader has finished with the batch taken last."""
        if self._taken is not None and self._acknowledging:
            self.acknowledge(self._taken.partition, self._taken.position + 1)
        self._taken = None

    def acknowledge(self, partition: int, below: int) -> None:
        part = self.parts[partition]
        part.acknowledged = max(part.acknowledged, below)

    @property
    def acknowledged(self) -> dict[int, int]:
        return {partition: part.acknowledged for partition, part in self.parts.items()}

    def _is_enough(self, part: PulledPartition) -> bool:
        if part.until is not None:
            return part.position >= part.until
        return part.told and part.finished and part.position >= part.end

    def _is_over(self, part: PulledPartition) -> bool:
        return self._is_enough(part) and part.left >= part.acknowledged

    # ---- questions

    def wants_table(self, now: float) -> bool:
        """Tell whether to ask the controller for the newest table now. After True the caller asks."""
        if not self._stale or now < self._table_asked_at + TABLE_EVERY_S:
            return False
        self._table_asked_at = now
        return True

    def on_table(self, table: Table) -> None:
        """Take the newest table. StageRemoved: the query has no such stage any more, and so no output of it."""
        if not any(table.stages[self._stage : self._stage + 1]):
            raise StageRemoved(
                "the stage whose output is read was removed from the query, or has failed: see flux plan"
            )
        if self._table is None or table.epoch >= self._table.epoch:
            self._table, self._stale = table, False

    def asks(self, now: float) -> Iterator[PullQuestion]:
        """Yield the questions to send now: one at a time for each partition, once all its batches are taken. A second question
        follows if there is more to acknowledge, because the worker with the open question may wait for just that. A partition
        that is over is asked for now and then, for as long as the caller goes on asking."""
        for partition, part in self.parts.items():
            if part.queued or now < part.again_at:
                continue
            if part.asked_at > -math.inf:
                late = now >= part.asked_at + PATIENCE_S
                if not late and part.acknowledged <= part.said:
                    continue
                self._stale |= late  # its worker may be lost; meanwhile the worker of the older table is tried again
            endpoint = self.endpoint(partition)
            if endpoint is None:
                self._stale = True
                continue
            part.asked_at, part.said = now, part.acknowledged
            yield PullQuestion(endpoint, self._question(partition, part))

    def _question(self, partition: int, part: PulledPartition) -> Pull:
        waits = not self._is_enough(part)
        return Pull(self._stage, partition, part.position, part.acknowledged, self._bytes_max, waits)

    def endpoint(self, partition: int) -> str | None:
        """Return the endpoint of the primary's worker, if it is known."""
        if self._table is None:
            return self._where.get(partition)
        replicas = self._table.stages[self._stage][partition]
        return self._table.endpoints[replicas[0].worker] if replicas else None

    def last_words(self) -> Iterator[PullQuestion]:
        """Yield the last acknowledgements, for a reader that goes."""
        for partition, part in self.parts.items():
            endpoint = self.endpoint(partition)
            if part.acknowledged > part.left and endpoint is not None:
                yield PullQuestion(endpoint, Pull(self._stage, partition, part.position, part.acknowledged, 0, False))

    def due(self, now: float) -> float:
        """Return the time at which there may be something to ask, if nothing comes before."""
        times = [self._table_asked_at + TABLE_EVERY_S] if self._stale else []
        for part in self.parts.values():
            if not part.queued:
                times.append(part.asked_at + PATIENCE_S if part.asked_at > -math.inf else max(part.again_at, now))
        return min(times, default=math.inf)

    # ---- answers

    def on_pulled(self, answer: Pulled, batches: Sequence[pa.RecordBatch], now: float) -> None:
        """Take an answer. ProtocolError if header and payload do not agree; QueryFailed if rows are gone that were not read."""
        part = self.parts.get(answer.partition)
        if part is None or answer.stage != self._stage or answer.position != part.position or part.queued:
            return  # the answer to an earlier question, or to a repeated one
        if len(batches) != answer.count:
            raise ProtocolError(f"{len(batches)} batches of output, the header announces {answer.count}")
        part.asked_at = -math.inf
        if not answer.leads:
            part.again_at, self._stale = now + TABLE_EVERY_S, True
            return
        part.left, part.end = max(part.left, answer.left), max(part.end, answer.end)
        part.finished |= answer.finished
        part.told, part.full = True, answer.full
        if answer.left > part.position and not self._is_enough(part):
            raise gone(answer.partition, part.position, answer.left)
        if part.finished and not part.position <= part.end:
            raise QueryFailed(
                f"partition {answer.partition} has come to its end with {part.end} batches of output, and is to be read from "
                f"batch {part.position} on: the position is of another run of the query"
            )
        if not batches and part.left < part.acknowledged:
            part.again_at = now + TABLE_EVERY_S  # the primary is not as far yet, and does not take the acknowledgement
        elif self._is_over(part) and not batches:
            part.again_at, self._stale = now + OVER_EVERY_S, True
        for batch in batches:
            if part.until is not None and part.position >= part.until:
                break
            self._ready.append(Got(answer.partition, part.position, batch))
            part.position += 1
            part.queued += 1


class OutputSurvey(OutputPull):
    """A survey of the end of each partition's output, without reading it; it also acknowledges batches for the reader."""

    def __init__(self, stage: int, acknowledged: Mapping[int, int], table: Table | None = None) -> None:
        super().__init__(stage, acknowledged, 0)
        if table is not None:
            self.on_table(table)

    @property
    def table(self) -> Table | None:
        return self._table

    def _is_enough(self, part: PulledPartition) -> bool:
        return part.told

    def _is_over(self, part: PulledPartition) -> bool:
        return part.told

    def _question(self, partition: int, part: PulledPartition) -> Pull:
        return Pull(self._stage, partition, part.position, part.acknowledged, 0, False)

    def on_pulled(self, answer: Pulled, batches: Sequence[pa.RecordBatch], now: float) -> None:
        """Take an answer without its batches, which an earlier user of the connection asked for."""
        super().on_pulled(msgspec.structs.replace(answer, count=0), [], now)

    def latest(self, start: Mapping[int, int]) -> dict[int, int]:
        """Return the positions up to which a reader at ``start`` may read. One batch of a full partition is left: the reader
        needs another batch to acknowledge the earlier ones, and the query makes no other before that (design: full-readers)."""
        found = {}
        for partition, part in self.parts.items():
            begun = start[partition]
            end = max(part.end, begun)  # a new primary may not have come as far yet
            found[partition] = end - 1 if part.full and end - begun > 1 else end
        return found


def gone(partition: int, position: int, left: int) -> QueryFailed:
    return QueryFailed(
        f"output of partition {partition} is wanted from batch {position} on, and the batches below {left} are gone: another "
        "reader has acknowledged them. An output has one reader: give each of them a flow.to_readers() of its own"
    )
