"""Output that is kept until readers have it for good (design: readers).

Readers come to the worker of the primary and ask from a position on. Nothing is handed on, so a reader that is slow, or that
is not there, is a bound that is reached, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa

from flux.replicas.exit import Exit

#: Batches for which there is always room.
ALWAYS = 2


class Offer(Exit):
    """Batches are shown from their commit on, and forgotten when a reader says that it has them for good."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Always for two batches: Spark acknowledges a batch when it has got another one (design: full-readers)."""
        return super().has_room or len(self._handed) + len(self._waiting) < ALWAYS

    @property
    def base(self) -> int:
        """Rows are through when they can be read: nobody waits for readers who may never come."""
        return self.shown

    @property
    def shown(self) -> int:
        """Positions below are committed. A primary that is new may not have made all of them again: what readers have, it
        need not make."""
        return max(self._waiting[0].position if self._waiting else self.position, self.left)

    def show(self, below: int) -> None:
        """The steps below are committed."""
        for _ in self.hand_on(below):
            pass

    def acknowledge(self, below: int) -> None:
        """A reader has the positions below for good. It cannot have what was not shown: then it is told nothing, and asks
        again."""
        self.forget(min(below, self.shown))

    def since(self, position: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
        """Batches that are shown from ``position`` on: up to so many bytes, at least one if there is any."""
        if position < self.left or not bytes_max:
            return
        for kept in islice(self._handed, position - self.left, None):
            yield kept.batch
            bytes_max -= kept.nbytes
            if bytes_max <= 0:
                return
