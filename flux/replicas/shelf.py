"""Where a worker keeps what its standbys hold: in memory. The vault has another shelf (design: vault)."""

from __future__ import annotations

from collections.abc import Callable

from flux.replicas.standby import Checkpoint, Standby
from partitioning.ids import PartitionKey


class Shelf:
    def standby(self, key: PartitionKey, incarnation: int, taken: Callable[[Standby], None]) -> Standby:
        """One that begins here: with what is kept of its partition, or empty. ``taken``: as in ``Standby``."""
        return Standby(key, incarnation, taken)

    def put(self, key: PartitionKey, checkpoint: Checkpoint) -> Checkpoint:
        """The same checkpoint, kept. It may be called in any thread, and take long."""
        return checkpoint

    def landed(self, key: PartitionKey, checkpoint: Checkpoint) -> None:
        """A checkpoint that was put has been offered to its standby, or is of no use any more."""
