"""Ids of streams, partitions and sources, and the kinds of replicas.

A worker id is given by the controller to one life of a worker process and is never used again, so that a worker
that died and came back is another worker. The incarnation of a replica is the epoch of the table that introduced it.
"""

from __future__ import annotations

from typing import NamedTuple


class StreamId(NamedTuple):
    """One producer partition on one edge, with batches 0, 1, 2, ... (design: stream)."""

    edge: int
    producer: int

    def __str__(self) -> str:
        return f"{self.edge}.{self.producer}"


class PartitionKey(NamedTuple):
    """One partition of a stage.

    A key equals the plain pair, and a dict finds one by the other. Do not make a key where an existing pair will do."""

    stage: int
    partition: int


class SourcePartition(NamedTuple):
    """One partition of a source. It equals the plain pair."""

    source: int
    partition: int


#: The kind of a replica that applies every step itself.
ACTIVE = "active"
#: The kind of a replica that holds a checkpoint and the order of the steps after it.
STANDBY = "standby"
#: The kind of a replica that holds no state, only the point from which to begin again and the order of the steps after it.
UPSTREAM = "upstream"
#: The kind of a replica that applies rows as they come, in an order of its own.
INDEPENDENT = "independent"
#: The kind of a replica that keeps a checkpoint and the order after it in a directory, and outlives every worker.
DISK = "disk"
