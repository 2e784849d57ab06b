"""What a worker's state machine asks its shell to do, in one list for all its parts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from flux.replicas.transfers import Aside
from flux.stream.producer import ToWorker
from flux.wire.control import PartitionFinished, ReplicaCaughtUp, ReplicaDiverged, TableSeen
from flux.wire.messages import Ack, Acks, Chunk, Installed, OrdersSeen, ReadsElsewhere, Refuse, Reset, Resume

#: The connection of a worker to itself.
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class ToConnection:
    """Effect: answer on a connection to the data port."""

    connection: Hashable
    message: Resume | ReadsElsewhere | Ack | Acks | Reset | Refuse | Chunk | OrdersSeen | Installed
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class ToController:
    """Effect: report to the controller."""

    message: PartitionFinished | TableSeen | ReplicaCaughtUp | ReplicaDiverged


Effect = ToWorker | ToConnection | ToController | Aside
