"""How a worker shares the bytes that it is ready to hold among its inbound streams (DESIGN 3, flow control).

Streams of sources, which are few and fast, have one half and those of stages the other, as in the log of their senders: a
source that feeds a stage of many partitions would else get the share of one of them, and wait for acks all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flux.receiver import Inbound
from partitioning.ids import StreamId


@dataclass
class Half:
    """``expected``: as many streams will come as far as is known, so that the first do not get the share of the others."""

    expected: int = 0
    streams: dict[StreamId, Inbound] = field(default_factory=dict)


@dataclass
class Credit:
    """Reason for the floor: below the size of a typical batch every message would wait for an ack."""

    bytes_max: int
    floor: int = 64 << 10
    sources: Half = field(default_factory=Half)
    stages: Half = field(default_factory=Half)

    def expect(self, sources: int, stages: int) -> None:
        """So many streams of either kind."""
        self.sources.expected, self.stages.expected = sources, stages

    def admit(self, inbound: Inbound, of_source: bool) -> None:
        (self.sources if of_source else self.stages).streams[inbound.stream] = inbound
        halves = [half for half in (self.sources, self.stages) if half.expected or half.streams]
        for half in halves:
            share = self.bytes_max // len(halves) // max(len(half.streams), half.expected, 1)
            for other in half.streams.values():
                other.credit = max(share, self.floor)

    def release(self, stream: StreamId) -> None:
        """The stream has come to its end."""
        self.sources.streams.pop(stream, None)
        self.stages.streams.pop(stream, None)
