"""The receiving end of one stream at one worker, as a state machine without I/O (design: handshake, credit).

Law: each partition takes every sequence once and in order. A repetition is dropped and counted. A message of another
handshake is dropped too. A message after a gap changes nothing and leads to a new handshake.

Left to others: applying slices (``flux.replica``), sockets (``flux.shell.transport``).

``PartitionProgress`` is the progress of each partition of the worker in the stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from flux.arguments import ALL, ONE
from flux.exchange.feed import BROKEN, IN_ORDER, UNREAD, Counters, Feed
from flux.exchange.log import WORDS, End, Word
from flux.exchange.marks import Marks
from flux.exchange.slices import RowNumbers, SliceRun, unpack, without_numbers
from flux.windows.statements import Statement, StreamBound, bound_of
from flux.windows.window import NEVER as NO_TIME
from flux.wire.messages import Ack, AppliedThrough, Bound, Data, ElementKind, Mark, Needed, Reset, Resume, end_mark
from partitioning.ids import StreamId


class PartitionProgress:
    """The progress of each partition of a worker in one stream: ``received[p]`` is the next sequence that the joined partition p
    needs (design: consumers-at).

    Nearly all partitions are equally far: the rows of a message come to all of them at once. So the progress is one number, and a
    number for each partition ahead of it, not one for each partition of the stage."""

    def __init__(self) -> None:
        self.least = 0
        self._ahead: dict[int, int] = {}  # partitions ahead of it

    def __getitem__(self, partition: int) -> int:
        return self._ahead.get(partition, self.least)

    def join(self, partition: int, at: int, others: Collection[int]) -> None:
        """Add a partition that needs ``at``. ``others`` have joined before."""
        self._ahead.pop(partition, None)
        if not others:
            self.least, self._ahead = at, {}
        elif at < self.least:
            self._ahead = {other: self[other] for other in others}
            self.least = at
        elif at > self.least:
            self._ahead[partition] = at
            if len(self._ahead) > len(others):  # the partition was the last that needed the least
                self._rise(min(self._ahead.values()))

    def leave(self, partition: int, others: Collection[int]) -> None:
        """Remove a partition. ``others`` stay."""
        self._ahead.pop(partition, None)
        if not others:
            self.least, self._ahead = 0, {}
        elif len(self._ahead) >= len(others):
            self._rise(min(self._ahead.values()))

    def reach(self, end: int) -> None:
        """Note that all partitions have everything below ``end``."""
        if end > self.least:
            self._rise(end)

    def _rise(self, least: int) -> None:
        self.least = least
        if self._ahead:
            self._ahead = {partition: at for partition, at in self._ahead.items() if at > least}

    @property
    def most(self) -> int:
        return max(self._ahead.values(), default=self.least)

    def behind(self, end: int, members: Iterable[int]) -> list[int]:
        """Return the ``members`` that need something below ``end``."""
        if end <= self.least:
            return []
        return [partition for partition in members if self[partition] < end]


@dataclass(slots=True)
class Packet:
    """One received message. Its bytes count against the stream's credit until its last slice is applied."""

    inbound: Inbound
    nbytes: int
    pending: int


class Slice(msgspec.Struct, frozen=True):
    """An element of a stream in one partition, waiting to be applied: one of the two classes below.

    ``held``: it counts against the stream's credit. Slices of a secondary do not (design: secondary-credit). Both classes have
    ``watermark``: that of the stream, as the partition knew it before the element (design: watermark-statements)."""

    stream: StreamId
    sequence: int
    packet: Packet
    input: int
    created: float
    held: bool

    @property
    def first(self) -> int:
        """The first batch with rows in it; ``sequence`` is the last."""
        return self.sequence

    @property
    def rows(self) -> int:
        return 0

    @property
    def ends_stream(self) -> bool:
        return False


class RowSlice(Slice, frozen=True):
    """Rows of one batch; or of the batches of a ``run`` that ends with ``sequence``; or numbered rows, of which ``sequence`` is
    the last."""

    batch: pa.RecordBatch
    run: SliceRun | RowNumbers | None = None
    watermark: int = NO_TIME

    @property
    def rows(self) -> int:
        return int(self.batch.num_rows)

    @property
    def first(self) -> int:
        return self.sequence if self.run is None else self.run.first

    def rows_through(self, through: int) -> int:
        """Count the rows of the batches through this one."""
        parts = None if self.run is None else self.run.cut(through, exact=False)
        if parts is not None:
            return parts[0].rows_in_all
        return self.rows if self.sequence <= through else 0

    def cut(self, through: int, partition: int, exact: bool = True) -> tuple[RowSlice, RowSlice] | None:
        """Cut behind a batch; None: one of the two parts would have no rows, or the batch is none of the slice's and is to be
        ``exact``. The parts are applied one after the other."""
        runs: tuple[SliceRun | RowNumbers, SliceRun | RowNumbers] | None
        runs = None if self.run is None else self.run.cut(through, exact)
        if runs is None:
            return None
        rows = runs[0].rows_in_all
        parts = self.batch.slice(0, rows), self.batch.slice(rows)
        mine, theirs = runs
        some = replace(self, sequence=mine.last, batch=parts[0], run=mine.several())
        others = replace(self, sequence=theirs.last, batch=parts[1], run=theirs.several())
        self.packet.pending += self.held
        self.packet.inbound.note_cut(partition, some.first, others.first)
        return some, others


class WordSlice(Slice, frozen=True):
    """An element without rows, which comes to every partition."""

    word: Word
    watermark: int = NO_TIME

    @property
    def ends_stream(self) -> bool:
        return isinstance(self.word, End)


class Delivery(NamedTuple):
    """A slice, and its partition."""

    partition: int
    slice: Slice


class Spoilt(NamedTuple):
    """The last batch that could not be decoded, and the number of times in a row."""

    sequence: int
    times: int


class Inbound:
    """The receiving end of one stream. ``received[p]`` is the next sequence that partition p needs, of the joined partitions."""

    def __init__(self, stream: StreamId, input: int, credit: int, marked: bool = True, numbered: bool = False) -> None:
        """Begin without a connection. ``marked``: the producer may have to read its input again, and keeps checksums;
        ``numbered``: its rows carry their numbers."""
        self.stream = stream
        #: The input of the stage that the stream feeds.
        self.input = input
        #: Bytes that may be under way and waiting here.
        self.credit = credit
        self.received = PartitionProgress()
        #: The life of the producer that is read; -1: there is none.
        self.incarnation = -1
        #: The way over which it is read, and further ones to other replicas of its producer, by their workers. A message counts
        #: over whichever it comes first (design: feeds).
        self.feed = Feed()
        self.others: dict[int, Feed] = {}
        #: The way in which it is to be read: over one feed, hedged, or over all (``flux.arguments.FEEDS``).
        self.mode = ONE
        #: By worker: the connection on which its replica of the producer said Hello, and the epoch that it went by then.
        self.offers: dict[int, Hashable] = {}
        self.offered: dict[int, int] = {}
        #: Messages taken, under any nonce, and the part of them that another replica of a partition here has lent.
        self.taken = self.borrowed = 0
        #: Payload that waits here, also of earlier nonces.
        self.held_bytes = 0
        self.marks = Marks()
        #: The marks as the producer's earlier lives had left them.
        self.shown: list[Mark] = []
        self._marked = marked
        self.numbered = numbered
        #: The newest statement about the stream's watermark.
        self.said = Statement()
        #: By partition: the first batch of each slice that was received and is not applied.
        self.waiting: dict[int, deque[int]] = {}
        #: Number of waiting slices that were cut in two, because orders named a part.
        self.cuts = 0
        #: Copies of state on their way from this worker: (partition, worker, incarnation) of the new replica -> the next batch
        #: that it will want. Until the replica is live, this worker speaks for it.
        self.copies: dict[tuple[int, int, int], int] = {}
        #: There is something to ack, and the payload that was applied since the last ack.
        self.ack_due = False
        self.unacked_bytes = 0
        #: Its consumers go on without rows of it that are gone; its reader gives the numbers of its rows.
        self.may_lose = self.own_numbers = False
        self._spoilt = Spoilt(-1, 0)
        #: Rows are admitted without credit, because the rows that use it up may wait for these very rows.
        self.urgent = False

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        assert self.held_bytes >= 0, "bytes were given back twice"
        # held_bytes may exceed the received bytes of the feed, which begin anew with each handshake: slices of the handshake
        # before may still wait.
        assert self.unacked_bytes >= 0, "acked what has not come"
        self.feed.validate()
        for worker, feed in self.others.items():
            feed.validate()
            assert feed.phase is not UNREAD, f"the further feed from worker {worker} is not read"
            assert worker == feed.worker != self.feed.worker, f"worker {feed.worker} has two feeds, or another name"
        for partition, waiting in self.waiting.items():
            if waiting:
                assert waiting[0] <= waiting[-1] < self.received[partition], f"partition {partition} out of order"

    def validate_marks(self, hosted: Collection[int]) -> None:
        if hosted:
            self.marks.validate(self._applied_by_all(hosted))

    # ---- handshake

    def greet(self, incarnation: int, connection: Hashable, nonce: int, epoch: int = 0, read_from: int = -1) -> None:
        """Start over on a new connection. Further feeds stay."""
        if 0 <= self.incarnation < incarnation:
            # Kept and shown with every Resume to this life, because the first Resume may be lost.
            self.shown = self.marks.shown()
        self.incarnation = incarnation
        self.feed = Feed(connection, nonce, epoch, read_from, IN_ORDER)
        self.others.pop(read_from, None)
        self.said = self.said._replace(idle=False)  # another reader has to say so again

    @property
    def has_feeds(self) -> bool:
        """Whether it may have several feeds."""
        return self.mode != ONE

    @property
    def reads_all(self) -> bool:
        return self.mode == ALL

    def open(self, connection: Hashable, nonce: int, epoch: int, worker: int) -> None:
        """Read it also from the replica of its producer on another worker."""
        self.others[worker] = Feed(connection, nonce, epoch, worker, IN_ORDER)

    def prefer(self, worker: int) -> None:
        """Go on with a further feed in place of the present one, which is closed."""
        self.feed = self.others.pop(worker)
        self.said = self.said._replace(idle=False)

    def over(self, connection: Hashable) -> Feed | None:
        """Return the feed of a connection."""
        if self.feed.connection == connection:
            return self.feed
        return next((feed for feed in self.others.values() if feed.connection == connection), None)

    def _under(self, nonce: int) -> Feed | None:
        """Return the feed of a handshake, if its messages are taken."""
        feed: Feed | None = self.feed
        if nonce != self.feed.nonce:
            feed = next((other for other in self.others.values() if other.nonce == nonce), None)
        return feed if feed is not None and feed.phase is IN_ORDER else None

    def repeats(self, message: Data) -> bool:
        """Tell by its header whether a message of a stream with several feeds has nothing new: it is not decoded."""
        return bool(self.others) and message.sequence < self.received.least

    def resume(
        self,
        epoch: int,
        hosted: Collection[int],
        others: Sequence[AppliedThrough] = (),
        front: int = 0,
        ordered_end: int = -1,
        worker: int = -1,
    ) -> Resume:
        """Make the answer to a greeting. ``ordered_end``: the number of the end of the stream if it was ordered, perhaps by a
        worker that has received it, while this one has not; else -1. ``worker``: that of a further feed; -1: the first one."""
        ack = self.ack_over(worker, self.ack(epoch, hosted, others))
        shown = self.shown
        if ordered_end > max((mark.sequence for mark in shown), default=-1):
            shown = [*shown, end_mark(ordered_end)]
        return Resume(
            *self.stream, ack.nonce, epoch, [Needed(p, self.received[p]) for p in hosted],
            ack.through, ack.behind, ack.granted, shown, front, self.incarnation if self._marked else -1,
        )  # fmt: skip

    def leave(self) -> None:
        """Leave all connections, until a producer says Hello."""
        self.feed, self.others = Feed(), {}
        self.said = self.said._replace(idle=False)  # silence is not idleness

    def lacks(self, end: int, hosted: Collection[int]) -> bool:
        """Tell whether a partition here has not received all elements below ``end``, although there is room for them: rows that
        wait here do not use up the credit."""
        return bool(hosted) and self.received.least < end and self.has_room and bool(self.received.behind(end, hosted))

    @property
    def has_room(self) -> bool:
        """Whether rows that wait here leave credit for more."""
        return self.urgent or self.held_bytes < self.credit

    # ---- data

    def take(
        self,
        message: Data,
        batches: Sequence[pa.RecordBatch],
        hosted: Collection[int],
        secondary: Collection[int],
        counters: Counters,
    ) -> list[Delivery] | Reset:
        """Take a message. Return slices to queue, with their partitions; or a Reset after a gap; or nothing for an old message.
        ``secondary`` are hosted partitions that follow a primary elsewhere."""
        feed = self._under(message.nonce)
        if feed is None:
            counters.stale += 1
            return []
        if message.number != feed.number or (hosted and message.first > self.received.least):
            counters.gap += 1
            feed.phase = BROKEN  # later messages with this nonce cannot be in order either
            return Reset(*self.stream, f"message {message.number} came where {feed.number} was expected")
        feed.number += 1
        news, nbytes = message.sequence >= self.received.least, message.nbytes
        self.taken += news or feed is self.feed
        feed.firsts += news
        feed.received_bytes += nbytes
        packet = Packet(self, nbytes, 0)
        if self.repeats(message):
            counters.duplicate += 1
            slices: list[Delivery] = []
        else:
            slices = self._slices(message, batches, hosted, secondary, packet, counters)
        if self.others and slices:
            packet.nbytes = _share(message, slices)
        if hosted:
            self.received.reach(message.sequence + 1)
        if message.watermark is not None:
            self.said = self.said.newer(Statement(message.sequence + 1, message.watermark))
        packet.pending = sum([slice_.held for _, slice_ in slices])
        held_bytes = packet.nbytes if packet.pending else 0
        self.held_bytes += held_bytes
        if held_bytes < nbytes:
            self.unacked_bytes += nbytes - held_bytes
            self.ack_due = True
        for partition, slice_ in slices:
            self.waiting.setdefault(partition, deque()).append(slice_.first)
        # The mark is noted last, when the slices of this message already count as not applied.
        mark = self._mark(message)
        if mark is not None and mark.sequence > self.marks.newest.sequence:
            self.marks.newest = mark
            if mark.sequence >= self.marks.due:
                self.marks.keep(lambda: self._applied_by_all(hosted))
        return slices

    def _mark(self, message: Data) -> Mark | None:
        """Return the mark behind a message of the producer."""
        if self.numbered or not self._marked:
            return message.mark if self.numbered else None
        watermark = NO_TIME if message.watermark is None else message.watermark
        known = watermark, message.late, message.doubted, message.doubted_from
        return Mark(message.sequence, message.checksum, -1, b"", -1, *known)

    def borrow(
        self,
        message: Data,
        batches: Sequence[pa.RecordBatch],
        partition: int,
        others: Collection[int],
        counters: Counters,
        of_log: bool = False,
    ) -> list[Delivery]:
        """Take a message that is lent to one partition by another replica of it, or out of the log of the producer, and return
        its slices (design: borrowed-rows, read-loans). ``others`` here have not got it. Its bytes count against the credit, and
        are none of those granted to the producer."""
        if message.first > self.received[partition]:
            counters.gap += 1
            return []
        packet = Packet(self, message.nbytes, 0)
        slices = self._slices(message, batches, (partition,), (), packet, counters)
        self._advance(partition, message.sequence + 1, others)
        packet.pending = len(slices)
        self.held_bytes += message.nbytes if slices else 0
        for _, slice_ in slices:
            self.waiting.setdefault(partition, deque()).append(slice_.first)
        mark = self._mark(message) if of_log else message.mark
        if mark is not None and self._marked:
            self.adopt(self.incarnation, [mark])
        if of_log and message.watermark is not None:
            self.said = self.said.newer(Statement(message.sequence + 1, message.watermark))
        self.taken += 1
        self.borrowed += 1
        return slices

    def borrow_bound(self, message: Bound, partition: int, others: Collection[int]) -> None:
        """Take a statement that is lent to a partition. It counts for ``others`` once they have the elements before it."""
        if message.first <= self.received[partition]:
            self._advance(partition, message.sequence, others)
            if message.watermark != NO_TIME:
                self.said = self.said.newer(Statement(message.sequence, message.watermark))

    def _advance(self, partition: int, end: int, others: Collection[int]) -> None:
        if end > self.received[partition]:
            self.received.join(partition, end, others)

    def hear(self, message: Bound, hosted: Collection[int], counters: Counters) -> bool:
        """Take a statement about the stream's watermark, and tell whether it says anything new."""
        feed = self._under(message.nonce)
        if feed is None or message.number != feed.number:
            counters.stale += 1  # it is for a worker that has other messages; it is repeated
            return False
        if hosted and message.first > self.received.least:
            counters.stale += 1
            return False
        if hosted:
            self.received.reach(message.sequence)
        before = self.said
        if feed is not self.feed and (message.sequence, message.watermark) <= before[:2]:
            return False  # a replica that is behind: the stream may not be idle any more
        self.said = before.newer(Statement(message.sequence, message.watermark, message.idle))
        return self.said != before

    def bound(self, partition: int) -> StreamBound:
        """Return the bound of the rows behind all that a partition has received."""
        return bound_of(self.said, self.received[partition], None, ended=False)

    def _known(self, partition: int) -> int:
        """Return the watermark that a partition knows, for the next slice."""
        return NO_TIME if self.said.watermark == NO_TIME else self.bound(partition).watermark

    def _slices(
        self,
        message: Data,
        batches: Sequence[pa.RecordBatch],
        hosted: Collection[int],
        secondary: Collection[int],
        packet: Packet,
        counters: Counters,
    ) -> list[Delivery]:
        """Unpack the slices of a message that partitions here lack: of a run of batches, of a single batch, or of an element
        without rows. Numbered rows come in either of the first two."""
        slices: list[Delivery] = []
        if message.batches:
            runs = unpack(batches[0], message.batches, message.rows, message.counts)
            for partition, (found, rows) in zip(message.partitions, runs, strict=True):
                if partition not in hosted:
                    counters.misrouted += 1
                elif self.numbered:
                    slices += self._of_numbers(message, packet, partition, rows, secondary, counters)
                else:
                    had = bisect_left(found.sequences, self.received[partition])
                    counters.duplicate += had > 0
                    if had < len(found.rows):
                        part = self._of_run(message, packet, found, rows, had, partition, partition not in secondary)
                        slices.append(Delivery(partition, part))
            return slices
        sequence, created, received = message.sequence, message.created, self.received
        index = 0
        for run, batch in zip(message.runs, batches, strict=True):
            offset = 0
            named = slice(index, index + run)
            for partition, rows in zip(message.partitions[named], message.rows[named], strict=True):
                if partition not in hosted:
                    counters.misrouted += 1
                elif self.numbered:
                    part = batch.slice(offset, rows)
                    slices += self._of_numbers(message, packet, partition, part, secondary, counters)
                elif received[partition] > sequence:
                    counters.duplicate += 1
                else:
                    held, part = partition not in secondary, batch.slice(offset, rows)
                    one = RowSlice(
                        self.stream, sequence, packet, self.input, created, held, part, None, self._known(partition)
                    )
                    slices.append(Delivery(partition, one))
                offset += rows
            index += run
        if message.element != ElementKind.ROWS:
            slices += self._words(message, packet, hosted, secondary, counters)
        return slices

    def _of_numbers(
        self,
        message: Data,
        packet: Packet,
        partition: int,
        numbered: pa.RecordBatch,
        secondary: Collection[int],
        counters: Counters,
    ) -> Iterator[Delivery]:
        """Yield numbered rows, without those that the partition has: an earlier life may have cut them elsewhere."""
        batch, numbers = without_numbers(numbered)
        had = numbers.before(self.received[partition])
        counters.duplicate += had > 0
        if had < len(numbers.numbers):
            if had:
                batch, numbers = batch.slice(had), RowNumbers(numbers.numbers[had:])
            held = partition not in secondary
            about = self.stream, numbers.last, packet, self.input, message.created, held
            yield Delivery(partition, RowSlice(*about, batch, numbers, self._known(partition)))

    def _words(
        self,
        message: Data,
        packet: Packet,
        hosted: Collection[int],
        secondary: Collection[int],
        counters: Counters,
    ) -> Iterator[Delivery]:
        """Yield an element without rows, for every partition that does not have it."""
        word = WORDS[message.element]
        for partition in hosted:
            if self.received[partition] > message.sequence:
                counters.duplicate += 1
                continue
            held = partition not in secondary
            about = self.stream, message.sequence, packet, self.input, message.created, held
            yield Delivery(partition, WordSlice(*about, word, self._known(partition)))

    def _of_run(
        self, message: Data, packet: Packet, run: SliceRun, batch: pa.RecordBatch, had: int, partition: int, held: bool
    ) -> RowSlice:
        """Return the rows of a run for one partition, without the first batches, which it ``had`` before."""
        if had:
            batch, run = batch.slice(sum(run.rows[:had])), run.from_(had)
        return RowSlice(
            self.stream, run.last, packet, self.input, message.created, held, batch, run.several(), self._known(partition)
        )  # fmt: skip

    def note_cut(self, partition: int, first: int, second: int) -> None:
        """Note that a waiting slice of this partition is two from now on, which begin with these batches."""
        self.cuts += 1
        waiting = self.waiting[partition]
        waiting.insert(waiting.index(first) + 1, second)

    def spoilt(self, feed: Feed, sequence: int) -> int:
        """Note that a batch cannot be decoded, so that later messages of the feed cannot be in order either. Return the number of
        times in a row."""
        feed.phase = BROKEN
        self._spoilt = Spoilt(sequence, self._spoilt.times + 1 if self._spoilt.sequence == sequence else 1)
        return self._spoilt.times

    # ---- progress

    def applied(self, partition: int, slice_: Slice) -> bool:
        """Note that the oldest waiting slice of the partition has been applied to its state and its output log. Return whether
        the producer may be short of credit unless it hears of it soon."""
        assert self.waiting[partition][0] == slice_.first
        self.waiting[partition].popleft()
        packet = slice_.packet
        packet.pending -= slice_.held
        if slice_.held and packet.pending == 0:
            self.held_bytes -= packet.nbytes
            self.unacked_bytes += packet.nbytes
        self.ack_due = True
        return self.ack_urgent

    @property
    def ack_urgent(self) -> bool:
        """The producer may be short of credit unless it hears soon."""
        return self.unacked_bytes * 4 >= self.credit

    def discard(self, partition: int, slices: Sequence[Slice], others: Collection[int]) -> None:
        """Discard the waiting slices of a partition whose replica is gone. ``others`` stay."""
        self.waiting.pop(partition, None)
        self.received.leave(partition, others)
        for slice_ in slices:
            slice_.packet.pending -= slice_.held
            if slice_.held and slice_.packet.pending == 0:
                self.held_bytes -= slice_.packet.nbytes
        self.ack_due = True

    def next_to_apply(self, partition: int) -> int:
        """Return the sequence of the first batch that the partition's state does not have yet."""
        waiting = self.waiting.get(partition)
        return waiting[0] if waiting else self.received[partition]

    def _with_copies(self, behind: list[AppliedThrough], hosted: Collection[int]) -> list[AppliedThrough]:
        """Correct an ack, so that no partition is ahead of a copy of its state that is on its way."""
        said = dict(behind)
        for (partition, _, _), wanted in self.copies.items():
            if partition in hosted:
                said[partition] = min(said.get(partition, wanted), wanted - 1)
        return [AppliedThrough(*each) for each in said.items()]

    def _applied_by_all(self, hosted: Collection[int]) -> int:
        return min([*map(self.next_to_apply, hosted), *self.copies.values()], default=0) - 1

    def settle(self, mark: Mark) -> None:
        """Note that all replicas here have their rows through the mark, and that no later life begins before it. Partitions
        that got none of these rows learn of it in this way only."""
        self.received.reach(mark.sequence + 1)
        self.marks.settle(mark)
        self.ack_due = True

    def join(self, partition: int, others: Collection[int]) -> None:
        """Add a partition that needs the stream from the start. ``others`` have joined before."""
        self.received.join(partition, 0, others)
        self.marks.come_from_behind()

    def join_at(
        self, partition: int, at: int, others: Collection[int], incarnation: int, marks: Sequence[Mark]
    ) -> None:  # fmt: skip
        """Add a partition that needs the stream from batch ``at``, because its replica comes from another worker, with marks of
        that worker (see ``adopt``)."""
        self.received.join(partition, at, others)
        self.adopt(incarnation, marks)

    def adopt(self, incarnation: int, marks: Sequence[Mark]) -> None:
        """Adopt the marks of a replica that comes from another worker, which has read the stream for it until now, last from
        life ``incarnation`` of the producer.

        Its marks are shown even to a life that has greeted already, because all marks of this worker may lie beyond the
        replica's position."""
        if self.feed.connection is None and marks and marks[-1].sequence > self.marks.newest.sequence:
            self.incarnation = incarnation
        self.marks.merge(marks)
        shown = {mark.sequence: mark for mark in (*self.shown, *marks)}
        self.shown = [shown[sequence] for sequence in sorted(shown)]

    def ack(self, epoch: int, hosted: Collection[int], others: Sequence[AppliedThrough] = ()) -> Ack:
        """Make a cumulative ack of everything applied, and the credit that follows from the bytes still held. ``others`` are
        partitions that the table places here and that do not read."""
        through = self.received.most - 1 if hosted else -1
        behind = [
            AppliedThrough(p, self.received[p] - 1)
            for p in self.received.behind(through + 1, hosted)
            if not self.waiting.get(p)
        ]
        behind += [AppliedThrough(p, waiting[0] - 1) for p, waiting in self.waiting.items() if waiting and p in hosted]
        if self.copies:
            behind = self._with_copies(behind, hosted)
        behind += others
        self.ack_due = False
        self.unacked_bytes = 0
        held = 0 if self.urgent else self.held_bytes
        granted = self.feed.received_bytes + max(self.credit - held, 0)
        return Ack(*self.stream, self.feed.nonce, epoch, through, behind, granted)

    def ack_over(self, worker: int, ack: Ack) -> Ack:
        """Return an ack as it goes over the feed from a worker. Each feed is granted the room of the stream: bytes that
        come over one of them first are repetitions over the others, and give their credit back at once."""
        feed = self.others.get(worker)
        if feed is None:
            return ack
        return replace(ack, nonce=feed.nonce, granted=ack.granted - self.feed.received_bytes + feed.received_bytes)


def _share(message: Data, slices: Sequence[Delivery]) -> int:
    """Return the part of a message's bytes that is new here, by rows."""
    rows = sum(message.rows)
    return message.nbytes * sum([slice_.rows for _, slice_ in slices]) // rows if rows else message.nbytes
