"""The receiving end of one stream at one worker, as a state machine without I/O (DESIGN 3).

Law: each partition takes every sequence once and in order. What was taken before is dropped and counted; what skips
something, or answers another handshake, changes nothing and leads to a new handshake.

Left to others: applying slices (replica), sockets (transport).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from flux.marks import Marks
from flux.messages import Ack, Data, Mark, Reset, Resume
from partitioning.ids import StreamId


@dataclass(slots=True)
class Packet:
    """One received message. Its bytes count against the stream's credit until its last slice is applied."""

    inbound: Inbound
    nbytes: int
    pending: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one batch for one partition, waiting to be applied. ``last``: the stream ends here, without rows.
    ``held``: counts against the stream's credit. A secondary's slices do not: it waits for its primary, which may wait
    for acks that need these very bytes to move on elsewhere; the producer's log bounds them."""

    stream: StreamId
    sequence: int
    batch: pa.RecordBatch | None
    packet: Packet
    input: int
    last: bool
    created: float
    held: bool = True


@dataclass
class Counters:
    """What was refused, and why. ``duplicate``: slices taken before; ``stale``: of another handshake, life or
    epoch. ``switched``: streams that went on from another replica of their producer."""

    duplicate: int = 0
    stale: int = 0
    gap: int = 0
    misrouted: int = 0
    refused: int = 0
    malformed: int = 0
    switched: int = 0


class Inbound:
    """``received[p]``: next sequence partition p needs. Only the partitions in ``hosted`` are kept up."""

    def __init__(self, stream: StreamId, input: int, partitions: int, credit: int, marked: bool = True) -> None:
        """``marked``: its producer may have to read its input again, and keeps checksums."""
        self.stream = stream
        self.input = input
        self.credit = credit
        self.received = np.zeros(partitions, np.int64)
        self.incarnation = -1
        self.connection: Hashable = None
        self.epoch = -1  # of the table that the producer went by when it said Hello
        self.source = -1  # worker whose replica of the producer is read; -1: not a stage's, or none yet
        self.offers: dict[int, Hashable] = {}  # worker -> connection on which its replica of the producer said Hello
        self.nonce = -1
        self.number = 0
        self.broken = False
        self.received_bytes = 0
        self.held_bytes = 0
        self.marks = Marks()
        self.shown: list[Mark] = []  # the marks as the producer's earlier lives had left them
        self._marked = marked
        self.waiting: dict[int, deque[int]] = {}  # partition -> sequences received and not yet applied
        self.ack_due = False
        self.unacked_bytes = 0
        self._spoilt = (-1, 0)  # batch that came last and could not be decoded, and how often it has
        self.urgent = False  # more is let in than the credit allows: what holds it may wait for these very rows

    # ---- handshake

    def greet(self, incarnation: int, connection: Hashable, nonce: int, epoch: int = 0, source: int = -1) -> None:
        """Start over on a new connection."""
        if 0 <= self.incarnation < incarnation:
            # Kept and shown with every Resume to this life, because the first one may be lost.
            self.shown = self.marks.shown()
        self.incarnation = incarnation
        self.connection = connection
        self.epoch = epoch
        self.source = source
        self.nonce = nonce
        self.number = 0
        self.broken = False
        self.received_bytes = 0

    def resume(self, epoch: int, hosted: np.ndarray, awaited: Sequence[int] = ()) -> Resume:
        ack = self.ack(epoch, hosted, awaited)
        return Resume(
            *self.stream, self.nonce, epoch, [(p, int(self.received[p])) for p in hosted.tolist()],
            ack.through, ack.behind, ack.granted, self.shown,
        )  # fmt: skip

    def leave(self) -> None:
        """Read from nobody until a producer says Hello."""
        self.connection, self.source, self.nonce, self.epoch = None, -1, -1, -1

    # ---- data

    def take(
        self,
        message: Data,
        batches: Sequence[pa.RecordBatch],
        hosted: np.ndarray,
        secondary: Collection[int],
        counters: Counters,
    ) -> list[tuple[int, Slice]] | Reset:
        """Slices to queue by partition, or a Reset if something is missing, or nothing for what is old. ``secondary``:
        those of the hosted partitions that follow a primary elsewhere."""
        if message.nonce != self.nonce or self.broken:
            counters.stale += 1
            return []
        if message.number != self.number or (len(hosted) and message.first > int(self.received[hosted].min())):
            counters.gap += 1
            self.broken = True  # what follows under this nonce cannot be in order either
            return Reset(*self.stream, f"message {message.number} came where {self.number} was expected")
        self.number += 1
        nbytes = message.nbytes
        self.received_bytes += nbytes
        packet = Packet(self, nbytes, 0)
        slices = self._slices(message, batches, hosted, secondary, packet, counters)
        self.received[hosted] = np.maximum(self.received[hosted], message.sequence + 1)
        if self._marked and message.sequence > self.marks.newest.sequence:
            self.marks.newest = Mark(message.sequence, message.checksum)
            if message.sequence >= self.marks.due:
                self.marks.keep(lambda: self._applied_by_all(hosted))
        packet.pending = sum(slice_.held for _, slice_ in slices)
        if packet.pending:
            self.held_bytes += nbytes
        else:
            self.unacked_bytes += nbytes
            self.ack_due = True
        for partition, _ in slices:
            self.waiting.setdefault(partition, deque()).append(message.sequence)
        return slices

    def _slices(
        self,
        message: Data,
        batches: Sequence[pa.RecordBatch],
        hosted: np.ndarray,
        secondary: Collection[int],
        packet: Packet,
        counters: Counters,
    ) -> list[tuple[int, Slice]]:
        slices: list[tuple[int, Slice]] = []
        mine = set(hosted.tolist())

        def take(partition: int, rows: pa.RecordBatch | None) -> None:
            if self.received[partition] > message.sequence:
                counters.duplicate += 1
                return
            held = partition not in secondary
            slice_ = Slice(self.stream, message.sequence, rows, packet, self.input, rows is None, message.created, held)
            slices.append((partition, slice_))

        index = 0
        for run, batch in zip(message.runs, batches, strict=True):
            offset = 0
            named = slice(index, index + run)
            for partition, rows in zip(message.partitions[named], message.rows[named], strict=True):
                if partition in mine:
                    take(partition, batch.slice(offset, rows))
                else:
                    counters.misrouted += 1
                offset += rows
            index += run
        if message.last:
            for partition in hosted.tolist():
                take(partition, None)
        return slices

    def spoilt(self, sequence: int) -> int:
        """A batch cannot be decoded, and what follows under this nonce cannot be in order either. How often it was this
        one."""
        self.broken = True
        self._spoilt = (sequence, self._spoilt[1] + 1 if self._spoilt[0] == sequence else 1)
        return self._spoilt[1]

    # ---- progress

    def applied(self, partition: int, slice_: Slice) -> None:
        """The oldest waiting slice of the partition has been applied to its state and its output log."""
        assert self.waiting[partition][0] == slice_.sequence
        self.waiting[partition].popleft()
        packet = slice_.packet
        packet.pending -= slice_.held
        if slice_.held and packet.pending == 0:
            self.held_bytes -= packet.nbytes
            self.unacked_bytes += packet.nbytes
        self.ack_due = True

    @property
    def ack_urgent(self) -> bool:
        """Whether the producer may be short of credit unless it hears soon."""
        return self.unacked_bytes * 4 >= self.credit

    def discard(self, partition: int, slices: Sequence[Slice]) -> None:
        """The replica of a partition is gone, and with it what waited for it."""
        self.waiting.pop(partition, None)
        self.received[partition] = 0
        for slice_ in slices:
            slice_.packet.pending -= slice_.held
            if slice_.held and slice_.packet.pending == 0:
                self.held_bytes -= slice_.packet.nbytes
        self.ack_due = True

    def next_to_apply(self, partition: int) -> int:
        """Sequence of the first batch that the partition's state does not have yet."""
        waiting = self.waiting.get(partition)
        return waiting[0] if waiting else int(self.received[partition])

    def _applied_by_all(self, hosted: np.ndarray) -> int:
        return min((self.next_to_apply(partition) for partition in hosted.tolist()), default=0) - 1

    def adopt(self, incarnation: int, marks: Sequence[Mark]) -> None:
        """A replica comes from another worker, which had read the stream for it so far, last from this life of its
        producer. Shown to a life that has greeted already, too: its marks here may all lie beyond that position."""
        if self.connection is None and marks and marks[-1].sequence > self.marks.newest.sequence:
            self.incarnation = incarnation
        self.marks.merge(marks)
        shown = {mark.sequence: mark for mark in (*self.shown, *marks)}
        self.shown = [shown[sequence] for sequence in sorted(shown)]

    def ack(self, epoch: int, hosted: np.ndarray, awaited: Sequence[int] = ()) -> Ack:
        """Cumulative ack of everything applied, and the credit that follows from what is still held. ``awaited``:
        partitions that the table places here and whose state has not come yet."""
        received = self.received[hosted]
        through = int(received.max()) - 1 if len(received) else -1
        behind = [
            (p, r - 1)
            for p, r in zip(hosted.tolist(), received.tolist(), strict=True)
            if r - 1 < through and not self.waiting.get(p)
        ]
        behind += [(p, self.waiting[p][0] - 1) for p in hosted.tolist() if self.waiting.get(p)]
        behind += [(p, -1) for p in awaited]
        self.ack_due = False
        self.unacked_bytes = 0
        held = 0 if self.urgent else self.held_bytes
        granted = self.received_bytes + max(self.credit - held, 0)
        return Ack(*self.stream, self.nonce, epoch, through, behind, granted)
