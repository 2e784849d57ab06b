"""Output that is kept until readers have it for good (design: readers).

Readers come to the worker of the primary and ask from a position on. Nothing is handed on, so a reader that is slow, or that
is not there, is a bound that is reached, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from flux.replicas.exit import Exit

#: Batches for which there is always room.
ALWAYS = 2


class Offer(Exit):
    """Output for readers. Batches are shown from their commit on, and forgotten when a reader says that it has them for good."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """There is room. It is always there for two batches: Spark acknowledges a batch when it has got another one (design:
        full-readers)."""
        return super().has_room or len(self._handed) + len(self._waiting) < ALWAYS

    @property
    def base(self) -> int:
        """The first batch that readers cannot read yet. Rows count as through when they can be read, because readers may never
        come."""
        return self.shown

    @property
    def shown(self) -> int:
        """Positions below this are committed. A new primary may not have made all of them again: it need not make batches that
        readers have."""
        return max(self._waiting[0].position if self._waiting else self.position, self.left)

    def restores(self) -> None:
        """Do nothing: readers say themselves which batches they have."""

    def restored(self, note: Any) -> None:
        """Do nothing, for the same reason."""

    def show(self, below: int) -> None:
        """Note that the steps below are committed."""
        for _ in self.hand_on(below):
            pass

    def acknowledge(self, below: int) -> None:
        """Note that a reader has the positions below for good. It cannot have batches that were not shown: then it is told
        nothing, and asks again."""
        self.forget(min(below, self.shown))

    def since(self, position: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
        """Yield shown batches from ``position`` on: up to ``bytes_max`` bytes, at least one if there is any."""
        if position < self.left or not bytes_max:
            return
        for kept in islice(self._handed, position - self.left, None):
            yield kept.batch
            bytes_max -= kept.nbytes
            if bytes_max <= 0:
                return
