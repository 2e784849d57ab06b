"""The event time of a replica: the watermarks that its order has, and as primary the next ones (design: watermark-statements).

The primary writes watermarks into the order, and all replicas take them from there: each of them has heard something else of the
streams. Law: a watermark of the order never falls, and none is below one that an earlier primary has ordered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.messages import OrderEntry


class EventClock:
    """The watermarks of one replica, by input. Inputs without event time are at the end of time from the start."""

    def __init__(self, inputs: int, timed: Sequence[int]) -> None:
        #: The inputs whose watermarks count.
        self.timed = timed
        #: The newest watermarks in the order.
        self.ordered = [NEVER if number in timed else END_OF_TIME for number in range(inputs)]
        #: As primary: the watermarks to order next; None: they have not risen.
        self.offered: list[int] | None = None
        #: As primary: time of the last offer, by the monotonic clock.
        self.offered_at = float("-inf")

    @property
    def watermark(self) -> int:
        """The least of the newest watermarks in the order."""
        return min(self.ordered)

    def lead(self, known: Sequence[int], ordered: Iterable[OrderEntry]) -> None:
        """Go on behind the watermarks of the applied steps, and of those that are ordered and not applied."""
        self.offered = None
        self.ordered = list(known)
        for entry in ordered:
            if entry.watermarks:
                self.ordered = list(entry.watermarks)

    def offer(self, watermarks: Sequence[int], now: float) -> None:
        """Have watermarks ordered. They were true for all rows that are not ordered, and stay true for later ones."""
        self.offered, self.offered_at = list(watermarks), now

    def take(self) -> list[int]:
        """Return the watermarks that are ordered now."""
        assert self.offered is not None
        self.ordered = [max(pair) for pair in zip(self.ordered, self.offered, strict=True)]
        self.offered = None
        return list(self.ordered)
