"""The progress of a producer towards one worker, and the messages made of log entries for it (design: handshake, run).

    GREETING -> CATCHING_UP -> READING         the worker has answered with Resume: data is sent
        |  ^         |            |
        |  +---------+------------+            it has answered with Reset: it is greeted again
        v
    STANDING_BY                                it reads the stream from another replica of the producer

A Resume leads to CATCHING_UP from any phase, an answer ReadsElsewhere to STANDING_BY.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pyarrow as pa

from flux.exchange.consumer_map import ConsumersAt, Ranks
from flux.exchange.log import NEVER, Log, LogEntry, Rows
from flux.exchange.slices import RUN_BYTES, RUN_CELLS, RUN_LEAST, SMALL_BYTES, SMALL_ROWS, Span, pack, span
from flux.windows.window import NEVER as NO_TIME
from flux.wire.messages import RUN_BATCHES, Borrow, Bound, Data, Resume
from partitioning import kernels
from partitioning.ids import StreamId

#: In resend timeouts: the longest time that a stream with rows to send stands still after any loss and any silence. A consumer
#: that comes back from a long step finds one greeting for each such time. These cost little, because everything sent before
#: them is received before them.
PATIENCE_MAX = 4.0
#: In link timeouts: the longest time between two tellings of a worker that reads elsewhere, and acks nothing.
UNREAD_PATIENCE_MAX = 8.0
#: Elements of a log among which the newest is looked for that a worker has not acked.
UNREAD_LOOK = 1024
#: Ack in a place without a replica: never the minimum.
NOBODY = np.iinfo(np.int64).max


class HandshakePhase(Enum):
    """A phase of the handshake with one worker."""

    #: No data may be sent before the worker answers a greeting.
    GREETING = "greeting"
    #: Data is sent, and some replicas want more of it than others.
    CATCHING_UP = "catching up"
    #: Data is sent to all replicas alike.
    READING = "reading"
    #: The worker reads the stream from another replica of the producer, and acks it here.
    STANDING_BY = "standing by"


GREETING, CATCHING_UP, READING, STANDING_BY = HandshakePhase


@dataclass(slots=True)
class ConsumerProgress:
    """The progress of a producer towards one worker (design: handshake, consumers-at). The methods ``become_...`` alone change
    its phase, and all that depends on the phase."""

    #: The replicas on the worker.
    at: ConsumersAt
    #: By replica: the element through which it has acked.
    acked: np.ndarray
    #: The epoch of the table that brought the last change of these replicas.
    epoch: int
    phase: HandshakePhase = GREETING
    #: The worker has answered a greeting.
    answered: bool = False
    #: It has answered one before its replicas last changed.
    was_known: bool = False
    #: That of the last Resume; None: no data may be sent before the next one.
    nonce: int | None = None
    #: The number of the next message under the nonce.
    number: int = 0
    #: The next element of the log that is not sent yet.
    next: int = 0
    #: The first batch that no message under the nonce has covered yet.
    first: int = 0
    #: By replica: the first batch that it wants, by the last Resume.
    wanted_from: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int64))
    #: While it catches up: elements below this may be wanted by some of the replicas only.
    catching_up_to: int = 0
    #: The watermark behind the elements below ``next``, as far as it is known (design: watermark-statements).
    bound: int = NO_TIME
    #: The last statement that the worker was told, and the time of that.
    told: int = NO_TIME
    told_idle: bool = False
    told_at: float = -inf
    #: The worker waits to hear that no row below this number comes any more; 0: it has heard it, or does not ask.
    front: int = 0
    #: Payload sent under the nonce.
    sent_bytes: int = 0
    #: Payload that may be sent under the nonce.
    granted: int = 0
    #: Time of the next greeting.
    hello_due: float = 0.0
    #: Factor of the resend timeout until the next greeting.
    patience: float = 1.0
    #: Time from which the silence of the worker counts: it owes an ack, and was last known to receive messages then. None: it
    #: owed none at the last look.
    owes_since: float | None = 0.0
    #: The last look is out of date: there are newer acks, or newer elements to be acked.
    look_again: bool = True
    #: While it stands by: time since which the worker has acked nothing of the elements that it could have read here; infinite:
    #: it owes no ack. And the factor of the link timeout after which it is told so.
    unread_since: float = inf
    unread_patience: float = 1.0
    #: While it stands by, there may be such elements, and were none at the last look.
    unread_look: bool = False

    @classmethod
    def after(cls, before: ConsumerProgress | None, at: ConsumersAt, epoch: int, now: float) -> ConsumerProgress:
        """Begin with a greeting, and the acks of the replicas that the worker had ``before``."""
        acked = np.full(len(at.partitions), -1) if before is None else at.kept_from(before.at, before.acked, -1)
        known = before is not None and before.known
        return cls(at, acked, epoch, was_known=known, hello_due=now, owes_since=now)

    @property
    def known(self) -> bool:
        """The worker has once answered a greeting of this life, perhaps before its replicas last changed. It reads the stream,
        and its acks and its loans need no other handshake."""
        return self.answered or self.was_known

    def become_greeting(self, now: float) -> None:
        """Send no data before the next answer."""
        self.phase, self.nonce = GREETING, None
        self.hello_due = min(self.hello_due, now)
        self._reads_here()

    def greet(self, now: float, resend_s: float) -> None:
        """Note that the worker is greeted. Each greeting waits twice as long as the one before. A consumer that comes back from a
        long step then finds a few greetings, and not a queue of them with a retransmission each."""
        self.hello_due = now + resend_s * self.patience
        self.heard(now)
        self.patience = min(2 * self.patience, PATIENCE_MAX)

    def become_standing_by(self, hello_due: float) -> None:
        """Send no data, because the worker reads elsewhere. Greet it now and then, in case its Resume for this replica was
        lost."""
        self.unread_look |= self.phase is not STANDING_BY
        self.phase, self.nonce = STANDING_BY, None
        self.hello_due = hello_due
        self.patience = 1.0  # the consumer listens, so a loss after a later Resume is noticed soon

    def become_catching_up(self, resume: Resume, wanted: np.ndarray, base: int, front: int, now: float) -> None:
        """Send to each replica from its place on. ``wanted``, by replica: its first element, beyond all elements for a replica
        that wants nothing until it says so in another Resume; ``base``: the first element in the log, below which all that are
        listed have acked."""
        self.phase, self.nonce, self.number = CATCHING_UP, resume.nonce, 0
        self.first = int(wanted.min())
        self.next = max(self.first, base)
        newest = int(wanted.max())
        self.wanted_from, self.catching_up_to = wanted, NEVER if newest == NOBODY else newest
        self.sent_bytes, self.granted, self.front = 0, resume.granted, front
        self.bound = self.told = NO_TIME
        self.told_idle, self.told_at = False, -inf
        self.hello_due = inf
        self._reads_here()
        self.heard(now)
        if self.next >= self.catching_up_to:
            self.become_reading()

    def become_reading(self) -> None:
        """Send to all replicas alike: none lacks an element that others have."""
        self.phase = READING

    def heard(self, now: float) -> None:
        """Note that the worker is known to receive messages."""
        if self.owes_since is not None:
            self.owes_since = now

    def _reads_here(self) -> None:
        self.unread_since, self.unread_patience, self.unread_look = inf, 1.0, False

    def note_unread(self, owes: bool, now: float) -> None:
        """Note, of a worker that reads elsewhere, whether it has still to ack elements that it could have read here. It has just
        acked others, or there were none until now."""
        self.unread_since, self.unread_patience, self.unread_look = now if owes else inf, 1.0, False

    def sum_and_least(self, last: np.ndarray, end: int) -> tuple[int, int]:
        """Return the sum of the acks, and the least one of a replica that has still to ack elements through ``end``. ``last``: by
        partition, the newest element with rows for it."""
        owed = self.acked[self.at.reads & (self.acked < np.minimum(last[self.at.partitions], end))]
        return int(self.acked.sum()), int(owed.min(initial=NOBODY))

    def lent(self, asked: Borrow, gone: np.ndarray) -> ConsumerProgress | None:
        """Return the beginning of a loan to one partition of the worker, with the nonce and the credit of that loan alone. None:
        its replica is not known here yet, or rows for it that another life of it has acked are ``gone`` from the log."""
        if asked.partition not in self.at.at or asked.next <= gone[asked.partition]:
            return None
        loan = ConsumerProgress(self.at, self.acked, self.epoch, CATCHING_UP, nonce=asked.nonce)
        loan.wanted_from = np.full(len(self.acked), NOBODY, np.int64)
        loan.wanted_from[self.at.at[asked.partition]] = asked.next
        loan.first = loan.next = asked.next
        loan.catching_up_to, loan.granted = NEVER, asked.room
        return loan

    @property
    def looks_for_unread(self) -> bool:
        """The worker owed no ack at the last look, or it has been told of elements: newer ones do not wait for the patience of
        these."""
        return self.unread_since == inf or self.unread_patience > 1

    def unread_due(self, link_s: float) -> float:
        """Return the time at which the worker is to be told of unread elements here; infinite: it owes no ack."""
        return self.unread_since + link_s * self.unread_patience

    def unread_end(self, log: Log, end: int) -> int:
        """Return the end of the elements below ``end`` that the worker has not acked, which is about to be told so; 0: it has
        acked all that are for its replicas. Each telling waits twice as long as the one before, until an ack brings something
        new."""
        self.unread_patience = min(2 * self.unread_patience, UNREAD_PATIENCE_MAX)
        acked = np.full(len(self.at.hosts), NOBODY)
        acked[self.at.partitions[self.at.reads]] = self.acked[self.at.reads]
        for sequence in range(end - 1, max(log.base, end - UNREAD_LOOK) - 1, -1):
            if (acked[log[sequence].touches] < sequence).any():
                return sequence + 1
        return 0

    def validate(self, worker: int) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        sends = self.phase in (CATCHING_UP, READING)
        assert sends == (self.nonce is not None), f"worker {worker} is {self.phase.value} under nonce {self.nonce}"
        stands_by = self.phase is STANDING_BY
        assert stands_by or self.unread_since == inf, (
            f"worker {worker} is {self.phase.value} and counted as one that reads elsewhere"
        )
        assert not sends or self.answered, f"worker {worker} is sent what it has not asked for"
        assert not sends or self.first <= self.next, f"worker {worker} is told of {self.first}, sent up to {self.next}"


#: Credit for a message beside its rows, so that credit also bounds the number of small messages.
MESSAGE_BYTES = 256

_FROM_ANY, _ALL = np.zeros(0, np.int64), np.empty(0, bool)

Sent = tuple[Data, tuple[pa.RecordBatch, ...]]
#: A message of a loan with its payload.
Lent = tuple[Data | Bound, tuple[pa.RecordBatch, ...]]


class Spans:
    """The last span. The workers of a stream are often equally far, and then get runs of the same batches."""

    def __init__(self) -> None:
        self._key = (0, 0, 0)
        self._span: Span | None = None

    def of(self, entries: list[LogEntry]) -> Span:
        key = entries[0].sequence, entries[-1].sequence, len(entries)
        if self._span is None or self._key != key:
            self._key = key
            batches = [entry.element.data for entry in entries if isinstance(entry.element, Rows)]
            self._span = span(batches, [entry.sequence for entry in entries])
        return self._span

    def forget(self) -> None:
        self._span = None


class OutgoingEntries:
    """Messages made from entries of a log, for one worker: a large entry alone, small ones together as a run (design: run).

    ``messages`` gives them, in the order of the entries.
    ``nbytes`` are those of entries still kept for a run, no more than the credit allows."""

    def __init__(
        self, stream: StreamId, cursor: ConsumerProgress, ranks: Ranks, run_max_rows: int, spans: Spans
    ) -> None:
        """Begin without entries. ``run_max_rows`` are the most rows of one run; 0: every entry travels alone."""
        self.nbytes = 0
        self._stream = stream
        self._cursor = cursor
        self._ranks = ranks
        self._small_rows = min(SMALL_ROWS, run_max_rows)
        self._run_max_rows = run_max_rows
        self._spans = spans
        self._kept: list[LogEntry] = []
        self._rows = 0

    def messages(self, log: Log, end: int) -> Iterator[Sent]:
        """Make the messages that the worker may get now: entries below ``end``, as far as its credit goes."""
        cursor = self._cursor
        # Entries without rows for this worker may have been evicted while it was out of credit.
        cursor.next = max(cursor.next, log.base)
        # Repeated, because entries kept for a run count as if each travelled alone, and whole: there may be credit left.
        while cursor.next < end and cursor.sent_bytes < cursor.granted:
            while cursor.next < end and (credit := cursor.granted - cursor.sent_bytes - self.nbytes) > 0:
                for entry in log.some(cursor.next, end, credit):
                    if cursor.sent_bytes + self.nbytes >= cursor.granted:
                        break
                    cursor.next = entry.sequence + 1
                    if entry.watermark > cursor.bound:
                        cursor.bound = entry.watermark
                    if cursor.phase is not READING and entry.sequence >= cursor.catching_up_to and not self._kept:
                        cursor.become_reading()
                    yield from self._add(entry)
            yield from self._rest()

    def _add(self, entry: LogEntry) -> Iterator[Sent]:
        rows = entry.element.data.batch.num_rows if isinstance(entry.element, Rows) else -1
        small = 0 <= rows <= self._small_rows and entry.nbytes <= SMALL_BYTES
        if self._kept and not (small and self._takes(rows, entry.nbytes)):
            yield from self._rest()
        if small:
            self._kept.append(entry)
            self._rows += rows
            self.nbytes += entry.nbytes + MESSAGE_BYTES  # as if each travelled alone, which a new table may lead to
        else:
            yield from self._alone(entry)

    def _takes(self, rows: int, nbytes: int) -> bool:
        """Tell whether one more entry fits into the run."""
        return (
            len(self._kept) < RUN_BATCHES
            and self._rows + rows <= self._run_max_rows
            and self.nbytes + nbytes <= RUN_BYTES
        )

    def _rest(self) -> Iterator[Sent]:
        kept, self._kept, self._rows, self.nbytes = self._kept, [], 0, 0
        return self._together(kept)

    def _together(self, entries: list[LogEntry]) -> Iterator[Sent]:
        """Make one message of a run of small entries. Few entries travel alone, which costs less; a run with too many cells
        (batches times partitions) is made in two halves."""
        if len(entries) < RUN_LEAST:
            for entry in entries:
                yield from self._alone(entry)
            return
        at, wanted_from = self._cursor.at, _FROM_ANY
        if self._cursor.phase is CATCHING_UP:
            wanted_from = np.zeros(len(at.hosts), np.int64)
            wanted_from[at.partitions] = self._cursor.wanted_from
        packed = pack(self._spans.of(entries), at.hosts, wanted_from, self._ranks)
        if packed is None:
            return
        mine = [entries[at] for at in packed.which]
        if len(mine) < RUN_LEAST:
            yield from self._alone(mine[0])
        elif len(packed.counts) > RUN_CELLS:
            middle = len(entries) // 2
            yield from self._together(entries[:middle])
            yield from self._together(entries[middle:])
        else:
            last, width = mine[-1], len(packed.partitions)
            message = self._message(
                last.sequence, packed.partitions, packed.rows, [width], packed.nbytes, Rows.kind,
                last.checksum, min([entry.created for entry in mine]), [entry.sequence for entry in mine], packed.counts,
                last.mark, *self._stated(last),
            )  # fmt: skip
            yield message, (packed.batch,)

    def _wanted(self, entry: LogEntry) -> np.ndarray:
        """Mark the partitions of the entry that are on the worker and do not have it; empty: all that are on the worker."""
        cursor = self._cursor
        if cursor.phase is READING:
            return _ALL
        mine: np.ndarray = cursor.at.hosts[entry.touches]
        wanted = cursor.wanted_from[np.searchsorted(cursor.at.partitions, entry.touches[mine])]
        mine[mine] = wanted <= entry.sequence
        return mine

    def _alone(self, entry: LogEntry) -> Iterator[Sent]:
        """Make the message of one entry, with the slices that partitions on the worker lack; none if they lack nothing of it."""
        wanted, element = self._wanted(entry), entry.element
        partitions: list[int] = []
        rows: list[int] = []
        runs: list[int] = []
        pieces: tuple[pa.RecordBatch, ...] = ()
        nbytes = 0
        if isinstance(element, Rows):
            data = element.data
            # Rows of ``out``: for each slice its partition and its number of rows, then for each piece its slices, begin and end.
            out = np.empty((5, len(data.by_rank)), np.int64)
            found, several = kernels.choose_slices(data.by_rank, data.offsets, self._cursor.at.hosts, wanted, out)
            if not found:
                return
            partitions, rows = out[:2, :found].tolist()
            runs, begins, ends = out[2:, :several].tolist()
            pieces = tuple([data.batch.slice(begin, end - begin) for begin, end in zip(begins, ends, strict=True)])
            nbytes = entry.nbytes * sum(rows) // data.batch.num_rows
        elif not (wanted if wanted.size else self._cursor.at.hosts[entry.touches]).any():
            return
        message = self._message(
            entry.sequence, partitions, rows, runs, nbytes, element.kind,
            entry.checksum, entry.created, [], [], entry.mark, *self._stated(entry),
        )  # fmt: skip
        yield message, pieces

    def _stated(self, entry: LogEntry) -> tuple[int | None, int, int, int]:
        """Return the watermark behind an entry, which its message tells, and the late and doubted rows through it."""
        judged = entry.late, entry.doubted, entry.doubted_from
        if entry.watermark == NO_TIME:
            return None, *judged
        cursor = self._cursor
        if entry.watermark >= cursor.told:
            cursor.told, cursor.told_idle = entry.watermark, False
        return entry.watermark, *judged

    def _message(
        self, sequence: int, partitions: list[int], rows: list[int], runs: list[int], nbytes: int, *more: Any
    ) -> Data:
        cursor = self._cursor
        assert cursor.nonce is not None
        nbytes += MESSAGE_BYTES
        message = Data(
            *self._stream, cursor.nonce, cursor.number, cursor.first, sequence, partitions, rows, runs, nbytes, *more
        )  # fmt: skip
        cursor.number += 1
        cursor.sent_bytes += nbytes
        cursor.first = sequence + 1
        return message
