"""Names of the things that travel: one word, one thing.

A worker id is given by the controller to one life of a worker process and is never used again, so that a worker
which died and came back is another worker. The incarnation of a replica is the epoch of the table that introduced it.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", int)
StageId = NewType("StageId", int)
SourceId = NewType("SourceId", int)
EdgeId = NewType("EdgeId", int)
PartitionId = NewType("PartitionId", int)
Epoch = NewType("Epoch", int)
Incarnation = NewType("Incarnation", int)


class StreamId(NamedTuple):
    """One producer partition on one edge: batches 0, 1, 2, ... (DESIGN 3)."""

    edge: int
    producer: int

    def __str__(self) -> str:
        return f"{self.edge}.{self.producer}"
