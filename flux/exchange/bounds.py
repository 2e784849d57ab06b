"""Statements about one stream, from its producer to the workers that consume it (design: watermark-statements).

A batch says the watermark behind itself. A worker for which the stream has no rows, or no more than it has, gets a ``Bound``
instead. Only the newest of several statements counts, so a producer tells each worker its newest one: at once if a window may
close by it, otherwise after an interval, and again now and then, because a statement may be lost. Credit is no condition: the
stream that holds everything back may be the one without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from flux.exchange.consumer_progress import ConsumerProgress
from flux.windows.statements import Statement
from flux.windows.window import NEVER
from flux.wire.messages import Bound
from partitioning.ids import StreamId


class WatermarkPace(NamedTuple):
    """The pace of watermarks: of statements about streams, and of steps that move the watermark of a partition."""

    #: Microseconds of event time: a watermark that passes a multiple of it is told at once. 0: none is.
    quantum: int
    #: Seconds after which a watermark is told in any case.
    interval_s: float

    def passes(self, before: int, watermark: int) -> bool:
        """Tell whether a window may end between two watermarks."""
        return self.quantum > 0 and watermark // self.quantum > before // self.quantum


def bound_behind(stream: StreamId, loan: ConsumerProgress, bounds: OutgoingBounds | None) -> Bound:
    """Return the statement behind all that is sent of a loan, by the newest one about the stream (design: read-loans)."""
    said = Statement() if bounds is None else bounds.said
    watermark = max(said.watermark, loan.bound) if said.sequence <= loan.next else loan.bound
    assert loan.nonce is not None
    return Bound(*stream, loan.nonce, loan.number, loan.first, loan.next, watermark)


class OutgoingBounds:
    """The statements of one producer. ``due_at``: the time at which ``poll`` must be called again at the latest."""

    def __init__(self, stream: StreamId, pace: WatermarkPace, again_s: float) -> None:
        """Begin without a statement. ``again_s``: seconds after which one is repeated."""
        self._stream = stream
        self._pace = pace
        self._again_s = again_s
        self.due_at = inf
        #: The newest statement that may be told.
        self.said = Statement()

    def note(self, sequence: int, watermark: int, idle: bool = False) -> None:
        """Note that no row below a watermark comes behind the elements below ``sequence``."""
        self.said = self.said.newer(Statement(sequence, watermark, idle))

    def poll(self, cursors: Mapping[int, ConsumerProgress], now: float) -> Iterator[tuple[int, Bound]]:
        """Yield the statements that are due, each with its worker."""
        self.due_at, said = inf, self.said
        for worker, cursor in cursors.items():
            if cursor.nonce is None:
                continue
            watermark, idle = cursor.bound, False
            if cursor.next >= said.sequence:
                watermark, idle = max(said.watermark, watermark), said.idle
            if watermark < cursor.told or (watermark == NEVER and not idle):
                continue
            at = cursor.told_at + self._again_s
            if (watermark, idle) != (cursor.told, cursor.told_idle):
                at = cursor.told_at + self._pace.interval_s
                if idle != cursor.told_idle or self._pace.passes(cursor.told, watermark):
                    at = -inf
            if now >= at:
                yield (
                    worker,
                    Bound(*self._stream, cursor.nonce, cursor.number, cursor.first, cursor.next, watermark, idle),
                )
                cursor.told, cursor.told_idle, cursor.told_at = watermark, idle, now
                at = now + self._again_s
            self.due_at = min(self.due_at, at)
