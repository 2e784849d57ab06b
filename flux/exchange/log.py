"""The log of a stream: a batch stays until every consumer that may still ask for it has acked it (design: log,
eviction).

One deque serves as the retransmission log of SIGMOD 2004 and, because each destination has a cursor of its own, as the
buffer for short imbalances of ICDE 2003. Law: bytes <= bytes_max + one batch, and a batch is never dropped, only
evicted when acked.

An entry holds one element of the stream: rows, or a word for every partition of the consumer (design: element, end-of-stream).
All elements are numbered, logged, sent, acked and ordered alike. Only the two ends of a stream look into them: the owner of the
producer, and the replica that applies them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from flux.windows.window import NEVER as NO_TIME
from flux.wire.messages import ElementKind, Mark
from partitioning import kernels
from partitioning.clustering import Clustered

#: Limit of entries that are taken from a log at a time.
AT_ONCE = 64
#: No sequence is held back.
NEVER = 1 << 62


class Rows(msgspec.Struct, frozen=True):
    """A batch, clustered by partition. It goes to the partitions that have rows in it."""

    data: Clustered
    #: The number of rows as they were read, of which steps may have left some out; -1: that of the batch.
    read: int = -1
    kind: ClassVar[ElementKind] = ElementKind.ROWS


class End(msgspec.Struct, frozen=True):
    """The end of the stream."""

    kind: ClassVar[ElementKind] = ElementKind.END


Element = Rows | End
Word = End

#: Words: elements without rows, which go to every partition. A new one needs a class, a line here, and its meaning for a
#: replica.
WORDS: dict[ElementKind, Word] = {End.kind: End()}


class LogEntry(msgspec.Struct, frozen=True):
    """One element in a log.

    ``touches`` (int32) are the partitions that have rows in it, or must hear of it; ``nbytes`` is its share of the log's bound.
    ``begin`` is the first row of a batch of numbered rows; ``mark`` the newest mark of such rows through this entry."""

    sequence: int
    element: Element
    touches: np.ndarray
    nbytes: int
    checksum: int
    created: float
    begin: int = -1
    mark: Mark | None = None
    #: The stream's watermark behind the entry (design: watermark-statements), and the fields of its mark beside it.
    watermark: int = NO_TIME
    late: int = 0
    doubted: int = 0
    doubted_from: int = NO_TIME


@dataclass
class LogMeter:
    """Bytes in all logs of a process: now, and the highest number until now."""

    bytes: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)


class LogRoom:
    """The room in the logs of one owner, which gives the same output to all of them. Each log tells it once when the log fills,
    and once when the log drains, so that its owner reads a field before each step and each read (design: told-room)."""

    __slots__ = ("full",)

    def __init__(self) -> None:
        #: The number of logs that take nothing now: the logs at their bounds, and the ones whose streams have ended.
        self.full = 0


class Log:
    """Entries ``base`` to ``end`` - 1, the oldest first. Numbers may be missing: an entry of numbered rows has the number of
    its last row, and rows may have gaps between them."""

    def __init__(self, bytes_max: int, meter: LogMeter | None = None, base: int = 0, partitions: int = 0) -> None:
        self.gone = np.full(partitions, -1, np.int64)  # by partition: the highest evicted sequence with rows for it
        self.bytes_max = bytes_max
        self.bytes = 0
        self.meter = meter or LogMeter()
        self.base = self.end = base
        #: There is room for one more entry, by its bytes.
        self.has_room = self._fits()
        #: Nothing more comes in this life of the stream.
        self.closed = False
        self._room = LogRoom()
        self._entries: deque[LogEntry] = deque()
        self._held_by = (-1, -1)  # the oldest entry, and a partition that has not acked it
        self._end: LogEntry | None = None  # the end of the stream, evicted

    def __len__(self) -> int:
        return len(self._entries)

    # ---- room

    def tell(self, room: LogRoom) -> None:
        """Tell another owner from now on when the log fills and drains."""
        takes_nothing = self.closed or not self.has_room
        self._room.full -= takes_nothing
        room.full += takes_nothing
        self._room = room

    def close(self) -> None:
        """Note that nothing more comes in this life of the stream. A closed log counts as full, also when it drains."""
        if not self.closed:
            self._room.full += self.has_room
            self.closed = True

    def bound(self, bytes_max: int) -> None:
        """Set another bound."""
        self.bytes_max = bytes_max
        self._note_room()

    def _fits(self) -> bool:
        return self.bytes < self.bytes_max

    def _note_room(self) -> None:
        """Tell the owner if the log has filled or drained."""
        fits = self._fits()
        if fits != self.has_room:
            self.has_room = fits
            if not self.closed:
                self._room.full += -1 if fits else 1

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        assert self.has_room == self._fits(), (
            f"{self.bytes} of {self.bytes_max} bytes are logged, has_room is {self.has_room}"
        )

    # ---- entries

    def append(self, entry: LogEntry) -> None:
        assert self.end == entry.sequence if entry.begin < 0 else self.end <= entry.begin, (entry, self.end)
        self._entries.append(entry)
        self.end = entry.sequence + 1
        self.bytes += entry.nbytes
        self.meter.add(entry.nbytes)
        if self.has_room and not self._fits():
            self._note_room()

    def adopt(self, entries: Iterable[LogEntry], gone: np.ndarray) -> None:
        """Take the entries of another log, each after the one before, and its marks of the entries that are gone."""
        before = self.bytes
        for entry in entries:
            assert self.end == entry.sequence, (entry, self.end)
            self._entries.append(entry)
            self.end += 1
            self.bytes += entry.nbytes
        self.gone[:] = gone
        self.meter.add(self.bytes - before)
        self._note_room()

    def __getitem__(self, sequence: int) -> LogEntry:
        """Return the first entry from ``sequence`` on."""
        return self._entries[self._place(sequence)]

    def some(self, sequence: int, end: int, nbytes: int) -> list[LogEntry]:
        """Return entries from ``sequence`` on, below ``end``: until they have this number of bytes, and not too many at once."""
        if sequence == self.end - 1:  # most workers have all but the newest
            return [self._entries[-1]]
        found: list[LogEntry] = []
        begin = self._place(sequence)
        for place in range(begin, min(begin + AT_ONCE, len(self._entries))):
            entry = self._entries[place]
            if nbytes <= 0 or entry.sequence >= end:
                break
            found.append(entry)
            nbytes -= entry.nbytes
        return found

    def _place(self, sequence: int) -> int:
        assert self.base <= sequence < self.end, (self.base, sequence, self.end)
        if len(self._entries) == self.end - self.base:
            return sequence - self.base
        return bisect_left(self._entries, sequence, key=lambda entry: entry.sequence)

    def entries(self) -> list[LogEntry]:
        return list(self._entries)

    def evict(self, acked: np.ndarray) -> int:
        """Drop the oldest entries that all partitions they touch have acked, and return their number. ``acked[p]`` is the
        highest sequence that every replica of partition p has acked."""
        dropped = 0
        while self._entries:
            head = self._entries[0]
            sequence, partition = self._held_by
            if sequence == head.sequence and acked[partition] < sequence:
                break  # called for every ack, and most acks change nothing for the oldest entry
            first = kernels.first_below(acked, head.touches, head.sequence)
            if first >= 0:
                self._held_by = head.sequence, int(head.touches[first])
                break
            self._entries.popleft()
            self.bytes -= head.nbytes
            self.meter.add(-head.nbytes)
            self.base = head.sequence + 1
            dropped += 1
            if len(self.gone):
                self.gone[head.touches] = head.sequence
            self._end = head if isinstance(head.element, End) else None
        if dropped and not self.has_room and self._fits():
            self._note_room()
        return dropped

    def restore_end(self) -> None:
        """Put the end of the stream back, if it is evicted: a replica that begins empty has not heard it (design: converge)."""
        if self._end is not None:
            self._entries.append(self._end)
            self.base, self._end, self._held_by = self._end.sequence, None, (-1, -1)

    def begin_at(self, sequence: int, settled: bool = False) -> None:
        """Begin at ``sequence``. Entries before it were never here. ``settled``: no consumer misses them."""
        assert not self._entries
        self.base = self.end = sequence
        if not settled:
            self.gone[:] = sequence - 1

    def clear(self) -> None:
        """Give up the stream. No consumer will ask this process for its batches."""
        self.meter.add(-self.bytes)
        self.bytes = 0
        self.base = self.end
        self._entries.clear()
        self._note_room()
