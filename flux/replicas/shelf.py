"""The store of a worker's standbys: in memory. The vault has another store (design: vault)."""

from __future__ import annotations

from collections.abc import Callable

from flux.replicas.standby import Checkpoint, Standby
from partitioning.ids import PartitionKey


class Shelf:
    def standby(self, key: PartitionKey, incarnation: int, taken: Callable[[Standby], None]) -> Standby:
        """Make a standby that begins here, with the stored content of its partition, or empty. ``taken``: see ``Standby``."""
        return Standby(key, incarnation, taken)

    def put(self, key: PartitionKey, checkpoint: Checkpoint) -> Checkpoint:
        """Keep a checkpoint, and return it as it is kept. The call may come from any thread, and take long."""
        return checkpoint

    def landed(self, key: PartitionKey, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint that was put has been offered to its standby, or is of no use any more."""
