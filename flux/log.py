"""The log of a stream: batches stay until everyone that may still ask for them has acked them (DESIGN 3).

One deque serves as the retransmission log of SIGMOD 2004 and, because each destination has a cursor of its own, as
the transient skew buffer of ICDE 2003. Law: bytes <= bytes_max + one batch, and a batch is never dropped, only
evicted when acked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from partitioning.cluster import Clustered


@dataclass(frozen=True, slots=True)
class Entry:
    """Batch ``sequence`` of a stream. ``touches[p]``: partition p has rows in it, or must hear that the stream ends."""

    sequence: int
    data: Clustered | None
    touches: np.ndarray
    nbytes: int
    last: bool
    checksum: int
    created: float


@dataclass
class Meter:
    """Bytes in all logs of a process, and the most there ever were."""

    bytes: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)


class Log:
    """Entries ``base`` .. ``end`` - 1, the oldest first."""

    def __init__(self, bytes_max: int, meter: Meter | None = None, base: int = 0, partitions: int = 0) -> None:
        self.gone = np.full(partitions, -1, np.int64)  # highest sequence with rows for a partition that was evicted
        self.bytes_max = bytes_max
        self.bytes = 0
        self.meter = meter or Meter()
        self.base = base
        self._entries: deque[Entry] = deque()

    @property
    def end(self) -> int:
        return self.base + len(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_room(self) -> bool:
        return self.bytes < self.bytes_max

    def append(self, entry: Entry) -> None:
        assert entry.sequence == self.end, (entry.sequence, self.end)
        self._entries.append(entry)
        self.bytes += entry.nbytes
        self.meter.add(entry.nbytes)

    def __getitem__(self, sequence: int) -> Entry:
        assert self.base <= sequence < self.end, (self.base, sequence, self.end)
        return self._entries[sequence - self.base]

    def entries(self) -> list[Entry]:
        return list(self._entries)

    def evict(self, acked: np.ndarray) -> int:
        """Drop the oldest entries that all partitions they touch have acked; ``acked[p]`` is the highest sequence
        that every replica of partition p has acked. Returns how many were dropped."""
        dropped = 0
        while self._entries:
            head = self._entries[0]
            if (acked[head.touches] < head.sequence).any():
                break
            self._entries.popleft()
            self.bytes -= head.nbytes
            self.meter.add(-head.nbytes)
            self.base += 1
            dropped += 1
            if len(self.gone):
                self.gone[head.touches] = head.sequence
        return dropped

    def clear(self) -> None:
        """The stream is no longer ours: nobody will ask this process for its batches."""
        self.meter.add(-self.bytes)
        self.bytes = 0
        self.base = self.end
        self._entries.clear()
