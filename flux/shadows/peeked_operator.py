"""Tentative results that the stable operator itself gives, without a change of its state (design: peek)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from flux.errors import UserCodeError
from flux.operators.operator import Operator, chain_of
from flux.operators.tentative import TentativeRows
from flux.replica.snapshot import checksum_of_snapshot
from flux.windows.window import SessionWindow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flux.replica.replica import Replica
    from flux.replica.step_queue import ReplicaStep
    from flux.shadows.tentative_operator import OverlayRows

#: One in this number of marks is checked for a change of the state. A check reads all of the state twice.
CHECKED_EVERY = 256


class PeekedOperator:
    """The operator of a replica, read for tentative results."""

    def __init__(self, replica: Replica, checked_every: int = CHECKED_EVERY) -> None:
        self._replica, self._checked_every = replica, checked_every
        self._marks = 0

    @property
    def reach(self) -> int | None:
        return chain_of(self._replica.operator)[0]._flux_reach

    @property
    def aligned(self) -> bool:
        return gives_at_ends(self._replica)

    @property
    def nbytes(self) -> int:
        return 0

    def stable(self, step: ReplicaStep) -> None:
        """Do nothing, as the operator has taken the step itself."""

    def mark(self, after: int, through: int, overlay: Sequence[OverlayRows]) -> list[pa.RecordBatch]:
        """Return the results of a mark. UserCodeError: the operator raised an error, or has changed its state."""
        self._marks += 1
        guard, rows = self._replica.guard, [TentativeRows(*each[:3]) for each in overlay]
        if self._marks % self._checked_every:
            return guard.call("peek", None, self._replica.operator.peek, through, rows, after)
        with self._unchanged():
            return guard.call("peek", None, self._replica.operator.peek, through, rows, after)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Raise UserCodeError if the state is not the same afterwards."""
        before = self._checksum()
        yield
        if self._checksum() != before:
            kind = type(chain_of(self._replica.operator)[0]).__name__
            raise UserCodeError(
                f"{self._replica.where}: {kind}.peek() has changed the state of the operator, which replicas share; it must only "
                "read it. There are no more tentative results of this partition"
            )

    def _checksum(self) -> Any:
        replica = self._replica
        timers = replica.context.timers.pending, replica.context.event_timers.pending
        state = checksum_of_snapshot(replica.guard.snapshot(), replica.where, replica.operator.snapshot_classes)
        return state, *map(dict, timers), list(replica.context.watermarks)

    def output_watermark(self, watermark: int) -> int:
        return watermark_behind(self._replica.operator, watermark)

    def forget(self) -> None:
        """Do nothing, as there are no tentative rows in the operator."""

    def close(self) -> None:
        """Do nothing, as the operator is the replica's."""


def gives_at_ends(replica: Replica) -> bool:
    """Return whether results come at the ends of windows alone, which are multiples of the quantum."""
    window = chain_of(replica.operator)[0]._flux_window
    return window is not None and not isinstance(window, SessionWindow) and replica.stage.output_mode == "append"


def watermark_behind(operator: Operator, watermark: int) -> int:
    """Return the watermark of the output of an operator if that of its inputs were this one."""
    first = copy.copy(chain_of(operator)[0])
    context = first.context.aside()
    context.watermarks = [max(each, watermark) for each in context.watermarks]
    object.__setattr__(first, "context", context)
    return min(int(first.output_watermark()), watermark)
