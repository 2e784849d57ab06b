"""What a reader of output asks, and of whom: the rules, without sockets and clock (design: readers).

A reader keeps a position for each partition that it reads, and asks the worker of the primary from there on. Batch n of a
partition is the same whoever sends it, so an answer is right from whichever worker it comes, and the same question may be asked
again anywhere. What a reader has for good it says with its next question; a worker forgets that.
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

#: A question that is not answered for so long is asked again, of whoever leads by the newest table. A worker lets a question
#: wait for at most ``offering.WAIT_S``.
PATIENCE_S = 0.5
#: How soon the table is asked for again, and a worker that has said that it does not lead.
TABLE_EVERY_S = 0.1
#: How often what a reader has for good is said again when all is over: the worker may have been deposed before it heard it, or
#: be lost before anybody else knows (design: reader-last-word).
OVER_EVERY_S = 0.5


class Ask(NamedTuple):
    """To be sent to the data port of a worker."""

    endpoint: str
    pull: Pull


class Got(NamedTuple):
    """Batch ``position`` of a partition's output."""

    partition: int
    position: int
    batch: pa.RecordBatch


@dataclass
class Part:
    """Of one partition: the next batch is ``position``; the reader has those below ``acknowledged`` for good.

    ``until``: the position at which it ends; None: where the output ends. ``left``, ``end``, ``finished``, ``full``: as the
    worker has said last; ``told``: it has said so at all. ``asked_at``: -inf if no question is open; it has said that what is
    below ``said`` is acknowledged. ``again_at``: not to be asked before. ``queued``: batches that have come and were not taken
    yet."""

    position: int
    acknowledged: int
    until: int | None = None
    left: int = 0
    end: int = 0
    finished: bool = False
    full: bool = False
    told: bool = False
    asked_at: float = -math.inf
    said: int = 0
    again_at: float = -math.inf
    queued: int = 0


class Pulling:
    """Reads the output of a stage from a position of each partition on: ``take`` until ``over``.

    Batches that were taken are the reader's for good when the next one of their partition is taken, or when it says so
    (``acknowledge``), unless it is not to be ``acknowledging`` at all: then they can be read again."""

    def __init__(
        self,
        stage: int,
        positions: Mapping[int, int],
        bytes_max: int,
        until: Mapping[int, int] | None = None,
        acknowledging: bool = True,
        where: Mapping[int, str] | None = None,
    ) -> None:
        """``until``: positions at which it ends. ``where``: endpoints of the primaries by an earlier table, to begin with."""
        self.parts = {
            partition: Part(position, position if acknowledging else 0, None if until is None else until[partition])
            for partition, position in positions.items()
        }
        self._stage = stage
        self._bytes_max = bytes_max
        self._acknowledging = acknowledging
        self._table: Table | None = None
        self._where = where or {}
        self._table_asked_at = -math.inf
        self._stale = not where  # the table is to be asked for
        self._ready: deque[Got] = deque()
        self._taken: Got | None = None

    # ---- what it has

    @property
    def over(self) -> bool:
        """Whether everything has come and was taken, and is acknowledged where that is to be, as far as the workers have said.
        A reader that cannot come again goes on asking until the query knows it too."""
        return not self._ready and all(self._is_over(part) for part in self.parts.values())

    @property
    def all_read(self) -> bool:
        """The same, but the worker may not have heard it yet."""
        return not self._ready and all(self._is_read(part) for part in self.parts.values())

    def take(self) -> Got | None:
        """The next batch; None: there is none just now."""
        self.settle()
        if not self._ready:
            return None
        self._taken = self._ready.popleft()
        self.parts[self._taken.partition].queued -= 1
        return self._taken

    def settle(self) -> None:
        """Whoever has taken a batch is done with it."""
        if self._taken is not None and self._acknowledging:
            self.acknowledge(self._taken.partition, self._taken.position + 1)
        self._taken = None

    def acknowledge(self, partition: int, below: int) -> None:
        part = self.parts[partition]
        part.acknowledged = max(part.acknowledged, below)

    @property
    def acknowledged(self) -> dict[int, int]:
        return {partition: part.acknowledged for partition, part in self.parts.items()}

    def _is_read(self, part: Part) -> bool:
        if part.until is not None:
            return part.position >= part.until
        return part.told and part.finished and part.position >= part.end

    def _is_over(self, part: Part) -> bool:
        return self._is_read(part) and part.left >= part.acknowledged

    # ---- whom it asks

    def wants_table(self, now: float) -> bool:
        """Whether to ask the controller for the newest table now. To be asked once for each time that it is."""
        if not self._stale or now < self._table_asked_at + TABLE_EVERY_S:
            return False
        self._table_asked_at = now
        return True

    def on_table(self, table: Table) -> None:
        if self._table is None or table.epoch >= self._table.epoch:
            self._table, self._stale = table, False

    def asks(self, now: float) -> Iterator[Ask]:
        """Questions to be sent now: one at a time for each partition, when all that has come of it is taken, and once more when
        there is more to acknowledge: the worker of a question that waits may wait for just that. Of a partition that is over now
        and then, for whoever asks for so long."""
        for partition, part in self.parts.items():
            if part.queued or now < part.again_at:
                continue
            if part.asked_at > -math.inf:
                late = now >= part.asked_at + PATIENCE_S
                if not late and part.acknowledged <= part.said:
                    continue
                self._stale |= late  # its worker may be lost; what an older table says is tried again all the same
            endpoint = self.endpoint(partition)
            if endpoint is None:
                self._stale = True
                continue
            part.asked_at, part.said = now, part.acknowledged
            yield Ask(endpoint, self._question(partition, part))

    def _question(self, partition: int, part: Part) -> Pull:
        waits = not self._is_read(part)
        return Pull(self._stage, partition, part.position, part.acknowledged, self._bytes_max, waits)

    def endpoint(self, partition: int) -> str | None:
        """Of the worker of the primary, as far as it is known."""
        if self._table is None:
            return self._where.get(partition)
        replicas = self._table.stages[self._stage][partition]
        return self._table.endpoints[replicas[0].worker] if replicas else None

    def last_words(self) -> Iterator[Ask]:
        """What the workers should know when the reader goes: what it has for good."""
        for partition, part in self.parts.items():
            endpoint = self.endpoint(partition)
            if part.acknowledged > part.left and endpoint is not None:
                yield Ask(endpoint, Pull(self._stage, partition, part.position, part.acknowledged, 0, False))

    def due(self, now: float) -> float:
        """When there may be something to ask, if nothing comes before."""
        times = [self._table_asked_at + TABLE_EVERY_S] if self._stale else []
        for part in self.parts.values():
            if not part.queued:
                times.append(part.asked_at + PATIENCE_S if part.asked_at > -math.inf else max(part.again_at, now))
        return min(times, default=math.inf)

    # ---- what it hears

    def on_pulled(self, answer: Pulled, batches: Sequence[pa.RecordBatch], now: float) -> None:
        """ProtocolError where header and payload do not agree; QueryFailed where rows are gone that it has not read."""
        part = self.parts.get(answer.partition)
        if part is None or answer.stage != self._stage or answer.position != part.position or part.queued:
            return  # to an earlier question, or asked twice
        if len(batches) != answer.count:
            raise ProtocolError(f"{len(batches)} batches of output, the header announces {answer.count}")
        part.asked_at = -math.inf
        if not answer.leads:
            part.again_at, self._stale = now + TABLE_EVERY_S, True
            return
        part.left, part.end = max(part.left, answer.left), max(part.end, answer.end)
        part.finished |= answer.finished
        part.told, part.full = True, answer.full
        if answer.left > part.position and not self._is_read(part):
            raise gone(answer.partition, part.position, answer.left)
        if part.finished and not part.position <= part.end:
            raise QueryFailed(
                f"partition {answer.partition} has come to its end with {part.end} batches of output, and is to be read from "
                f"batch {part.position} on: the position is of another run of the query"
            )
        if not batches and part.left < part.acknowledged:
            part.again_at = now + TABLE_EVERY_S  # a primary that is not as far yet does not take it
        elif self._is_over(part) and not batches:
            part.again_at, self._stale = now + OVER_EVERY_S, True
        for batch in batches:
            if part.until is not None and part.position >= part.until:
                break
            self._ready.append(Got(answer.partition, part.position, batch))
            part.position += 1
            part.queued += 1


class Survey(Pulling):
    """How far the output of each partition is, without reading it; the workers hear what the reader has for good."""

    def __init__(self, stage: int, acknowledged: Mapping[int, int], table: Table | None = None) -> None:
        super().__init__(stage, acknowledged, 0)
        if table is not None:
            self.on_table(table)

    @property
    def table(self) -> Table | None:
        return self._table

    def _is_read(self, part: Part) -> bool:
        return part.told

    def _is_over(self, part: Part) -> bool:
        return part.told

    def _question(self, partition: int, part: Part) -> Pull:
        return Pull(self._stage, partition, part.position, part.acknowledged, 0, False)

    def on_pulled(self, answer: Pulled, batches: Sequence[pa.RecordBatch], now: float) -> None:
        """Batches were asked for by whoever used the connection before."""
        super().on_pulled(msgspec.structs.replace(answer, count=0), [], now)

    def latest(self, start: Mapping[int, int]) -> dict[int, int]:
        """Where a reader that is at ``start`` may read to. Of a partition that is full it leaves one batch: the reader needs
        another one to acknowledge these, and the query gives no other before (design: full-readers)."""
        found = {}
        for partition, part in self.parts.items():
            begun = start[partition]
            end = max(part.end, begun)  # a new primary may not be as far yet
            found[partition] = end - 1 if part.full and end - begun > 1 else end
        return found


def gone(partition: int, position: int, left: int) -> QueryFailed:
    return QueryFailed(
        f"output of partition {partition} is wanted from batch {position} on, and the batches below {left} are gone: another "
        "reader has acknowledged them. An output has one reader: give each of them a flow.to_readers() of its own"
    )
