"""Tentative results of a copy of the operator (design: fork).

The copy is made from a snapshot between two steps, when the first result is wanted, and gets each step from then on and the
tentative rows and watermarks: of each stream and mark the first ones that stand, also if they come after the mark was given.
Nothing can be taken out of it again. So a result is given once, and the copy is thrown
away when stable rows take the place of tentative ones: the next result comes from a new copy, but not more often than once in the
bound X, because a copy costs as much as one for a new replica. In between, results may count rows twice.

Law: nothing that the copy does reaches the operator of the replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from flux.operators.attributes import open_operator
from flux.operators.batches import given_batches
from flux.operators.operator import Operator, move_watermarks
from flux.operators.tentative import TentativeRows, tentative_output
from flux.replica.snapshot import decode_snapshot, encode_snapshot
from flux.shadows.peeked_operator import gives_at_ends, watermark_behind
from flux.windows.window import NEVER
from flux.wire.messages import StepKind
from partitioning.ids import StreamId

if TYPE_CHECKING:
    from flux.replica.replica import Replica
    from flux.replica.step_queue import ReplicaStep
    from flux.shadows.tentative_operator import OverlayRows


class ForkedOperator:
    """A copy of the operator of a replica, which goes on with tentative rows."""

    def __init__(self, replica: Replica, bound_s: float) -> None:
        """``bound_s``: the least time between two copies, in seconds of the clock of steps."""
        self._replica, self._bound_s = replica, bound_s
        self._copy: Operator | None = None
        self._copied_at = -inf
        self._bytes = 0
        #: The tentative watermark of the copy.
        self._reached = NEVER
        #: The marks of each stream of which the copy has rows.
        self._had: set[tuple[StreamId | None, int]] = set()
        #: Tentative rows that the copy may have got are void.
        self._void = False

    @property
    def reach(self) -> int | None:
        return None

    @property
    def aligned(self) -> bool:
        return gives_at_ends(self._replica)

    @property
    def nbytes(self) -> int:
        """The bytes of the copy, as far as they are known."""
        return 0 if self._copy is None else max(self._copy.state_bytes(), self._bytes)

    # ---- the copy

    def _fork(self) -> Operator:
        """Make a copy of the operator as it is between two steps."""
        replica = self._replica
        classes = replica.operator.snapshot_classes
        state = encode_snapshot(replica.guard.snapshot(), replica.where, classes=classes)
        context = replica.context.aside()
        copied = replica.stage.make()
        replica.guard.call("open", None, open_operator, copied, context)
        snapshot = decode_snapshot(state, classes=classes)
        if snapshot is not None:
            replica.guard.call("restore", None, copied.restore, snapshot)
        context.timers.replace(replica.context.timers.pending)  # the copy has set timers of its own
        context.event_timers.replace(replica.context.event_timers.pending)
        self._copied_at, self._bytes, self._reached, self._void = replica.context.now, len(state), NEVER, False
        self._had.clear()
        return copied

    def _drop(self) -> None:
        copied, self._copy, self._bytes = self._copy, None, 0
        if copied is not None:
            self._replica.guard.call("close", None, copied.close)

    # ---- steps and marks

    def stable(self, step: ReplicaStep) -> None:
        """Take a step that the replica has applied. Its output is the replica's."""
        if self._copy is not None:
            self._replica.guard.call(step.method, step, self._followed, self._copy, step)

    def _followed(self, copied: Operator, step: ReplicaStep) -> None:
        context, entry = copied.context, step.entry
        context.now, context.created, context.step = entry.now, entry.created, step.number
        context._flux_method = step.method
        for _ in self._output(copied, step):
            pass

    def _output(self, copied: Operator, step: ReplicaStep) -> Iterator[Any]:
        context, entry = copied.context, step.entry
        if step.rows is not None:
            context.input = step.slices[0].input
            yield from given_batches(copied.process(step.rows))
        elif entry.kind is StepKind.TICK:
            for name in context.timers.due(entry.now):
                if context.timers.take(name, entry.now):
                    yield from given_batches(copied.on_timer(name))
        elif entry.kind.moves_watermarks:
            # The rows that were missing come now. Some of them are behind the watermark of the copy.
            self._void = True
            marks = zip(context.watermarks, entry.watermarks, strict=True)
            yield from move_watermarks(copied, context, [max(pair) for pair in marks])

    def mark(self, after: int, through: int, overlay: Sequence[OverlayRows]) -> list[pa.RecordBatch] | None:
        """Return the results of a mark; None: the copy has given it, or a later one. UserCodeError: the operator raised an
        error."""
        if self._void and self._replica.context.now - self._copied_at >= self._bound_s:
            self._drop()
        if self._copy is None:
            self._copy = self._fork()
        if after < self._reached:
            return None
        new = [each for each in overlay if (each.stream, each.through) not in self._had]
        self._had.update((each.stream, each.through) for each in new)
        rows = [TentativeRows(*each[:3]) for each in new]
        given = self._replica.guard.call("process", None, _listed, self._copy, through, rows, after)
        self._reached = through
        return given

    def output_watermark(self, watermark: int) -> int:
        return watermark_behind(self._replica.operator if self._copy is None else self._copy, watermark)

    def forget(self) -> None:
        self._void = True

    def close(self) -> None:
        self._drop()


def _listed(operator: Operator, watermark: int, rows: Sequence[TentativeRows], after: int) -> list[pa.RecordBatch]:
    return list(tentative_output(operator, watermark, rows, after))
