"""Requests of a worker's state machine to its shell, in one list for all its parts."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import pyarrow as pa

from flux.exchange.producer import ToWorker
from flux.replica.order_exchange import CaughtUp, Diverged
from flux.state.sender import Aside
from flux.wire.control import Checkpointed, PartitionFinished, ReplicaCaughtUp, ReplicaDiverged, TableSeen
from flux.wire.messages import Answered

#: The connection of a worker to itself.
LOCAL = "local"


class ToConnection(msgspec.Struct, frozen=True):
    """Effect: answer on a connection to the data port."""

    connection: Hashable
    message: Answered
    payload: bytes | pa.Buffer | None = None


class ToController(msgspec.Struct, frozen=True):
    """Effect: report to the controller."""

    message: PartitionFinished | TableSeen | ReplicaCaughtUp | ReplicaDiverged | Checkpointed


Effect = ToWorker | ToConnection | ToController | Aside


def to_control(node: int, report: CaughtUp | Diverged) -> ReplicaCaughtUp | ReplicaDiverged:
    """Return the report for the controller about an observation of a primary on this worker."""
    kind = ReplicaCaughtUp if isinstance(report, CaughtUp) else ReplicaDiverged
    return kind(node=node, **vars(report))
