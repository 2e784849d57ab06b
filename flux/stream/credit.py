"""Credit of a worker's inbound streams: shares of the bytes that the worker is ready to hold (design: credit-halves).

Streams of sources, which are few and fast, share one half, and streams of stages the other, as in the logs of their senders.
Otherwise a source beside a stage of many partitions would get the share of one partition, and wait for acks all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flux.stream.receiver import Inbound
from partitioning.ids import StreamId


@dataclass
class Half:
    """One half of the credit. ``expected`` is the number of streams that will come, as far as is known, so that the first
    streams do not get the share of later ones."""

    expected: int = 0
    streams: dict[StreamId, Inbound] = field(default_factory=dict)


@dataclass
class Credit:
    """The credit of all inbound streams. ``floor`` is the least credit of a stream: with less than the size of a typical batch,
    every message would wait for an ack."""

    bytes_max: int
    floor: int = 64 << 10
    sources: Half = field(default_factory=Half)
    stages: Half = field(default_factory=Half)

    def expect(self, sources: int, stages: int) -> None:
        """Note the numbers of streams that will come from sources and from stages."""
        self.sources.expected, self.stages.expected = sources, stages

    def admit(self, inbound: Inbound, of_source: bool) -> None:
        (self.sources if of_source else self.stages).streams[inbound.stream] = inbound
        halves = [half for half in (self.sources, self.stages) if half.expected or half.streams]
        for half in halves:
            share = self.bytes_max // len(halves) // max(len(half.streams), half.expected, 1)
            for other in half.streams.values():
                other.credit = max(share, self.floor)

    def release(self, stream: StreamId) -> None:
        """Release the credit of a stream that has ended."""
        self.sources.streams.pop(stream, None)
        self.stages.streams.pop(stream, None)
