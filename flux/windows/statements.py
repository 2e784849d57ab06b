"""Statements about streams, and the watermark that follows from them (design: watermark-statements).

A statement says of a stream: behind element ``sequence`` comes no row with a time below ``watermark``. It is state and no
element: only the newest counts, it may be lost and is repeated, and any replica of the stream's producer may make it, of
committed steps.

Law: a statement counts for a partition only if that partition itself has received and ordered all elements in front of it. So
when a watermark is ordered, no row behind it is below it, through losses, repetitions, copies and restarts in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flux.windows.window import END_OF_TIME, NEVER


class Statement(NamedTuple):
    """The newest statement about a stream that a worker has heard."""

    #: Exclusive: the statement is about the elements from this one on.
    sequence: int = 0
    #: In microseconds.
    watermark: int = NEVER
    #: The reader of the source is at its end for now, and asks others not to wait for the stream.
    idle: bool = False

    def newer(self, other: Statement) -> Statement:
        """Return the newer of two statements about one stream. A watermark never falls."""
        if other.sequence < self.sequence:
            return self
        return other._replace(watermark=max(self.watermark, other.watermark))


class StreamBound(NamedTuple):
    """The bound of one stream at one partition: the least time that its next rows may have."""

    watermark: int = NEVER
    idle: bool = False
    ended: bool = False


def bound_of(said: Statement, received: int, before_pending: int | None, ended: bool) -> StreamBound:
    """Return the bound of a stream at a partition that has received it through element ``received``, exclusive.

    ``before_pending``: the watermark that was known before the first slice that the partition has received and not ordered; None:
    there is no such slice. A partition that was copied, restored or promoted may be behind what its worker has heard for
    others."""
    if ended:
        return StreamBound(ended=True)
    if before_pending is not None:
        return StreamBound(before_pending)
    if received < said.sequence:
        return StreamBound()
    return StreamBound(said.watermark, said.idle)


def least(bounds: Iterable[StreamBound]) -> int:
    """Return the watermark of an input: the least of its streams that have neither ended nor fallen idle. If there are only idle
    ones, it is the greatest of them; if all have ended, the end of time."""
    open_ = [bound for bound in bounds if not bound.ended]
    if not open_:
        return END_OF_TIME
    waited_for = [bound.watermark for bound in open_ if not bound.idle]
    return min(waited_for) if waited_for else max(bound.watermark for bound in open_)
