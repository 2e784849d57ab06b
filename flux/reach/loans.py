"""Rows that a primary cannot get, lent by a secondary that has them, or out of the log of a reader (design: borrowed-rows,
read-loans).

A secondary tells its primary which slices no order names. The primary asks for those that it lacks, and gets them under their
numbers, for its partition alone. ``Lender`` is the secondary's side, for all replicas of a worker; ``Borrower`` the primary's. A
primary without such a secondary borrows from the reader of a source that asks for acks over a third worker.

Left to others: taking a lent message (``flux.exchange.inbound``), the order of lent slices, which is as for any others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from flux.exchange.consumer_progress import MESSAGE_BYTES
from flux.exchange.feed import Counters
from flux.exchange.inbound import Delivery, Inbound, RowSlice, Slice
from flux.exchange.producer import ToWorker
from flux.exchange.slices import RowNumbers, with_numbers
from flux.replica.replica import Replica
from flux.windows.window import NEVER
from flux.wire.messages import Borrow, Bound, Data, ElementKind, Mark, Unordered, UnorderedRows, WantAck
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import Table

#: In link timeouts: the time between two looks at the slices of secondaries, and the first and the longest time for which a slice
#: may be without order before the primary is told. Together with a look they are the timeout.
LOOK, FIRST, LONGEST = 1 / 3, 2 / 3, 8.0
#: In link timeouts: the time after its last slice for which a loan is still reported. Statements come at least as often.
SHOWN = LONGEST + 2

Replicas = Mapping[PartitionKey, Replica]
Streams = Mapping[StreamId, Inbound]


@dataclass(slots=True)
class UnorderedHead:
    """The oldest pending slice of a stream at a secondary that no order names: its first number, the time since which it is the
    oldest, and the time until the primary is told of the slices behind the last order."""

    first: int
    since: float
    patience_s: float


class Lender:
    """The secondaries of a worker as lenders to their primaries. Nothing is sent before it is asked for, because a primary that
    orders nothing may have the rows, and wait for room."""

    def __init__(
        self,
        worker: int,
        link_s: float,
        replicas: Replicas,
        streams: Streams,
        out_of_reach: Callable[[int], bool] = lambda worker: False,
    ) -> None:
        """Begin without slices. ``replicas`` and ``streams``: those of the worker, live mappings; ``out_of_reach`` tells of a
        worker whose primaries borrow over a third one: these are told of new slices with the next look."""
        self._worker = worker
        self._out_of_reach = out_of_reach
        self._link_s = link_s
        self._replicas = replicas
        self._streams = streams
        self._lent: deque[ToWorker] = deque()
        self._look_at = -np.inf
        self._heads: dict[tuple[PartitionKey, StreamId], UnorderedHead] = {}

    def poll(self, table: Table | None, now: float) -> Iterator[ToWorker]:
        """Yield lent slices, and messages to the primaries of slices here that have been without an order for long. It is called
        as often as there is occasion, and needs no time of its own: a worker beats ten times a second."""
        while self._lent:
            yield self._lent.popleft()
        if table is not None and now >= self._look_at:
            yield from self.look(table, now)

    def look(self, table: Table, now: float) -> Iterator[ToWorker]:
        """Look at the oldest pending slices of the secondaries."""
        self._look_at = now + LOOK * self._link_s
        known, self._heads = self._heads, {}
        told: dict[int, list[UnorderedRows]] = {}
        for key, replica in self._replicas.items():
            for stream, slices in () if replica.primary else replica.waits.by_stream.items():
                primary, ordered = table.replicas(*key)[0].worker, replica.order.ordered_below(stream)
                if slices[-1].sequence < ordered:
                    continue
                # Slices in front of it may wait long: for rows of their step that do not come, or for its commit.
                first = next(slice_.first for slice_ in slices if slice_.sequence >= ordered)
                head = known.get((key, stream))
                if head is None or head.first != first:
                    patience = LOOK if self._out_of_reach(primary) else FIRST
                    head = UnorderedHead(first, now, patience * self._link_s)
                elif now >= head.since + head.patience_s:
                    head.since = now
                    head.patience_s = min(2 * max(head.patience_s, FIRST * self._link_s), LONGEST * self._link_s)
                    rows = UnorderedRows(*key, replica.incarnation, *stream, slices[-1].sequence + 1)
                    told.setdefault(primary, []).append(rows)
                self._heads[key, stream] = head
        for worker, items in told.items():
            yield ToWorker(worker, Unordered(self._worker, items))

    def lend(self, worker: int, message: Borrow) -> None:
        """Lend slices to a primary on a worker, which ``poll`` yields."""
        self._lent.extend(ToWorker(worker, *lent) for lent in self.slices(message))

    def slices(self, message: Borrow) -> Iterator[tuple[Data | Bound, tuple[pa.RecordBatch, ...]]]:
        """Yield the slices that a primary asks for, up to its room, and the statement about the stream behind them."""
        key, stream = PartitionKey(message.stage, message.partition), StreamId(message.edge, message.producer)
        replica, inbound = self._replicas.get(key), self._streams.get(stream)
        if replica is None or inbound is None or replica.primary or replica.incarnation != message.incarnation:
            return
        number, first, room, partition = 0, message.next, message.room, key.partition
        mark = inbound.marks.newest if inbound.marks.newest.sequence >= 0 else None
        for slice_ in replica.waits.by_stream.get(stream, ()):
            if slice_.sequence < message.next:
                continue
            if room <= 0:
                return
            lent, batches = _lent(slice_, message, number, first, mark)
            yield lent, batches
            number, first, room = number + 1, slice_.sequence + 1, room - lent.nbytes
        said = inbound.said
        if said.watermark != NEVER and inbound.received[partition] >= said.sequence:
            last = max(first, said.sequence)
            yield Bound(*stream, message.nonce, number, first, last, said.watermark), ()


def _lent(
    slice_: Slice, asked: Borrow, number: int, first: int, mark: Mark | None
) -> tuple[Data, tuple[pa.RecordBatch, ...]]:
    """Return a slice as a message for one partition, whose rows before ``first`` its receiver has."""
    about = asked.edge, asked.producer, asked.nonce, number, first, slice_.sequence
    if not isinstance(slice_, RowSlice):
        kind = ElementKind.END
        return Data(*about, [], [], [], MESSAGE_BYTES, kind, created=slice_.created, mark=mark), ()
    batch, run = slice_.batch, slice_.run
    batches: list[int] = []
    counts: list[int] = []
    if isinstance(run, RowNumbers):
        batch = with_numbers(batch, run.numbers)
    elif run is not None:
        batches, counts = run.sequences, run.rows
    message = Data(
        *about, [asked.partition], [batch.num_rows], [1], int(batch.nbytes) + MESSAGE_BYTES, created=slice_.created,
        batches=batches, counts=counts, mark=mark,
    )  # fmt: skip
    return message, (batch,)


@dataclass(slots=True)
class Loan:
    """Slices of a stream on their way to a primary here. ``number``: that of the next message."""

    connection: Hashable
    key: PartitionKey
    incarnation: int
    stream: StreamId
    lender: int
    #: They come out of the log of their producer, a source on worker ``lender``.
    of_log: bool = False
    #: The time of the beginning, or of the last message.
    at: float = 0.0
    number: int = 0


@dataclass(slots=True)
class LentStream:
    """Slices of a stream that a primary here has got from a secondary on worker ``lender``, in one loan after another: the times
    of the first and the last one, and their number. ``direct``: messages that the producer itself has brought until now, the
    last one before ``alone_since``."""

    lender: int
    since: float
    last: float
    alone_since: float
    direct: int
    slices: int = 0


class Borrower:
    """The primaries of a worker as borrowers. A loan has a nonce like a handshake, so its messages are told from those of the
    producer, and one that is lost ends it. ``slices``: the number of those that have been lent."""

    def __init__(
        self,
        replicas: Replicas,
        besides: Callable[[Replica], Collection[int]],
        of_stream: Callable[[StreamId], Inbound],
        nonce: Callable[[], int],
        counters: Counters,
        link_s: float,
    ) -> None:
        """Begin without loans. ``replicas``: those on the worker, a live mapping; ``besides`` gives the other partitions of a
        replica's stage there, ``nonce`` one that no handshake has."""
        self._replicas = replicas
        self._besides = besides
        self._of_stream = of_stream
        self._nonce = nonce
        self._counters = counters
        self._link_s = link_s
        self._loans: dict[int, Loan] = {}
        self._of: dict[tuple[PartitionKey, StreamId], int] = {}
        self._lent: dict[tuple[PartitionKey, StreamId], LentStream] = {}
        self.slices = 0

    def ask(self, connection: Hashable, message: Unordered) -> Iterator[Borrow]:
        """Yield the questions to the secondaries on a worker for slices that primaries here lack."""
        for rows in message.items:
            replica = self._replicas.get(PartitionKey(rows.stage, rows.partition))
            peer = None if replica is None else replica.order.peers.get(message.worker)
            known = peer is not None and peer.incarnation == rows.incarnation
            if replica is None or not known or not replica.primary or rows.edge not in replica.stage.edges_in:
                self._counters.stale += 1
            elif not replica.finished:
                yield from self._question(connection, replica, rows, message.worker)

    def ask_reader(
        self, connection: Hashable, stream: StreamId, message: WantAck, reader: int, now: float
    ) -> Iterator[Borrow]:
        """Yield the questions to the reader of a source, which does not hear this worker, for rows in its log. Each is for a
        primary to which no secondary can lend any, and may be for ordered rows: that primary has taken over with their order.
        Nothing is asked for as long as messages of the loan before may be on their way (design: read-loans)."""
        inbound = self._of_stream(stream)
        for replica in self._replicas.values():
            if stream.edge not in replica.stage.edges_in or not replica.primary or replica.finished:
                continue
            alone = replica.orders_itself or not any(p.live and p.kind.applies for p in replica.order.peers.values())
            at, before = inbound.received[replica.partition], self._loans.get(self._of.get((replica.key, stream), -1))
            if before is not None and before.of_log and now < before.at + self._link_s:
                continue  # all that has not come would travel once more
            if alone and at < message.end and inbound.has_room and not inbound.may_lose:
                room = inbound.credit if inbound.urgent else inbound.credit - inbound.held_bytes
                loan = Loan(connection, replica.key, replica.incarnation, stream, reader, of_log=True, at=now)
                nonce = self._begin(loan)
                yield Borrow(*replica.key, message.incarnation, *stream, nonce, at, room, of_log=True)

    def _begin(self, loan: Loan) -> int:
        """Begin a loan, in place of an earlier one, and return its nonce."""
        name = loan.key, loan.stream
        self._loans.pop(self._of.get(name, -1), None)
        nonce = self._of[name] = self._nonce()
        self._loans[nonce] = loan
        return nonce

    def _question(self, connection: Hashable, replica: Replica, rows: UnorderedRows, lender: int) -> Iterator[Borrow]:
        """Yield the question for slices that a primary lacks, unless it is behind the order, or has no room.

        Ordered rows are not asked for: the secondary may have applied them. It has all others behind the rows here, because it
        applies only steps that this primary has ordered, and this primary orders only rows that it has."""
        stream, partition = StreamId(rows.edge, rows.producer), replica.partition
        inbound = self._of_stream(stream)
        at, room = inbound.received[partition], inbound.credit - inbound.held_bytes
        if at >= rows.end or room <= 0 or inbound.may_lose or replica.order.ordered_below(stream) > at:
            return
        nonce = self._begin(Loan(connection, replica.key, replica.incarnation, stream, lender))
        yield Borrow(*replica.key, rows.incarnation, *stream, nonce, at, room)

    def knows(self, connection: Hashable, message: Data | Bound) -> bool:
        """Tell whether a message belongs to a loan, and comes from its lender."""
        loan = self._loans.get(message.nonce)
        return loan is not None and loan.connection == connection and loan.stream == (message.edge, message.producer)

    def take(self, message: Data, batches: Sequence[pa.RecordBatch], now: float) -> list[Delivery]:
        """Take the next message of a loan, and return its slices."""
        replica, loan = self._next(message), self._loans.get(message.nonce)
        if replica is None or loan is None or not _of(message, replica.partition):
            return []
        inbound, others, loan.at = self._of_stream(loan.stream), self._besides(replica), now
        taken = inbound.borrow(message, batches, replica.partition, others, self._counters, loan.of_log)
        if taken:
            self.slices += len(taken)
            lent, direct = self._lent.get((loan.key, loan.stream)), inbound.taken - inbound.borrowed
            if lent is None or lent.lender != loan.lender:
                lent = self._lent[loan.key, loan.stream] = LentStream(loan.lender, now, now, now, direct)
            if lent.direct != direct:
                lent.alone_since, lent.direct = now, direct
            lent.last, lent.slices = now, lent.slices + len(taken)
        return taken

    @property
    def lent(self) -> Collection[LentStream]:
        """The streams of which slices have been lent lately."""
        return self._lent.values()

    def alone(self, since: float) -> Iterator[tuple[PartitionKey, StreamId, int]]:
        """Yield the streams of which a primary has got nothing but loans ``since`` then or for longer, each with the primary's
        partition and the worker of the lender."""
        for (key, stream), lent in self._lent.items():
            inbound = self._of_stream(stream)
            if lent.alone_since <= since and lent.direct == inbound.taken - inbound.borrowed:
                yield key, stream, lent.lender

    def forget(self, now: float) -> None:
        """Forget streams of which nothing has been lent for long."""
        if self._lent:
            self._lent = {key: lent for key, lent in self._lent.items() if now <= lent.last + SHOWN * self._link_s}

    def drop(self, stream: StreamId) -> None:
        """Forget a stream whose edge is removed."""
        for name in [name for name in self._of if name[1] == stream]:
            self._loans.pop(self._of.pop(name), None)
        self._lent = {name: lent for name, lent in self._lent.items() if name[1] != stream}

    def hear(self, message: Bound) -> bool:
        """Take the statement at the end of a loan, and tell whether it says anything."""
        replica, loan = self._next(message), self._loans.pop(message.nonce, None)
        if replica is None or loan is None:
            return False
        self._of_stream(loan.stream).borrow_bound(message, replica.partition, self._besides(replica))
        return True

    def _next(self, message: Data | Bound) -> Replica | None:
        """Return the primary to which the next message of a loan goes; None: the loan is over."""
        loan = self._loans[message.nonce]
        replica = self._replicas.get(loan.key)
        good = replica is not None and replica.primary and replica.incarnation == loan.incarnation
        if not good or message.number != loan.number:
            self._counters.stale += 1
            del self._loans[message.nonce]
            return None
        loan.number += 1
        return replica


def _of(message: Data, partition: int) -> bool:
    """Tell whether a lent message is for a partition alone."""
    return message.partitions == ([] if message.element is ElementKind.END else [partition])
