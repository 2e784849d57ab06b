"""The operator of a replica, and errors of user code with their place: stage, partition, stream, sequence and first bad row
(design: user-error)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from flux.dataflow.plan import StagePlan
from flux.errors import SnapshotError, UserCodeError
from flux.operators.attributes import attribute_count, open_operator
from flux.operators.operator import Batches, Context, EventTimers, Operator, Timers, facts_of, last_output
from flux.operators.user_code import described, text_of, user_traceback
from flux.replica.snapshot import check_snapshot
from flux.replica.step_queue import ReplicaStep

T = TypeVar("T")


class UserCodeGuard:
    """The operator of one replica, and the guard of each call of it."""

    def __init__(self, where: str, stage: StagePlan, context: Context) -> None:
        """Open the operator. ``where``: stage and partition, for messages."""
        self._where = where
        self._stage = stage
        self._context = context
        self.operator: Operator = self.call("open", None, self._open)
        # A state that cannot travel cannot be repaired or moved: raise the error before there is any state.
        self.check_state()
        self.facts = facts_of(self.operator)
        #: The operator, or the first one of a chain.
        self.first = self.facts.first
        # Most attributes that cannot travel exist after the first rows at the latest.
        self._proven = attribute_count(self.first) if self.first._keeps_attributes else None

    def _open(self) -> Operator:
        operator = self._stage.make()
        open_operator(operator, self._context)
        return operator

    # ---- steps

    def process(self, step: ReplicaStep) -> Batches:
        """Return the output of the operator for the rows of a step, which it may still have to make."""
        assert step.rows is not None
        return self.call("process", step, self.operator.process, step.rows)

    def finish(self) -> Batches:
        return self.call("finish", None, last_output, self.operator, self._context)

    def prove(self, first: bool) -> None:
        """Check that attributes created by a step, and the contents that the ``first`` rows gave to the other attributes, can
        travel: the time of a loss is too late to find out."""
        if self._proven is None:
            return
        count = attribute_count(self.first)
        if first or count != self._proven:
            self._proven = count
            self.check_state()

    # ---- state

    def check_state(self) -> None:
        """Check that the state can travel. SnapshotError says why it cannot."""
        check_snapshot(self.snapshot(), self._where, self.operator.snapshot_classes)

    def snapshot(self) -> Any:
        return self.call("snapshot", None, self.operator.snapshot)

    def changes(self) -> Any:
        """Return the operator's changes since the last call. None: they are not known."""
        return self.call("changes", None, self.operator.changes)

    def needs_from(self) -> int | None:
        """Return the first step whose rows still matter. None: all rows matter."""
        return self.call("needs_from", None, self.operator.needs_from)

    def output_watermark(self) -> int:
        """Return the watermark of the output behind the applied steps, as the operator knows it."""
        if type(self.first).output_watermark is Operator.output_watermark:
            return self._context.watermark
        return self.call("output_watermark", None, lambda: int(self.operator.output_watermark()))

    def left_out(self) -> tuple[int, int]:
        """Return the rows that the operator has left out: those below the watermark of their step, and those without a time."""
        return self.first._flux_left_out()

    def state_bytes(self) -> int:
        """Return the operator's estimate of the size of its state. 0: it has none."""
        return max(self.call("state_bytes", None, lambda: int(self.operator.state_bytes() or 0)), 0)

    def restore(self, snapshot: Any, changes: Iterable[Any] = ()) -> None:
        if snapshot is not None:
            self.call("restore", None, self.operator.restore, snapshot)
        for each in changes:
            self.call("apply_changes", None, self.operator.apply_changes, each)

    # ---- errors

    def call(self, doing: str, step: ReplicaStep | None, code: Callable[..., T], *given: Any) -> T:
        """Call user code. UserCodeError, for any error that it raises. ``doing``: its method; empty: the one that the context
        names. ``step``: the step that is applied, if there is one."""
        try:
            return code(*given)
        except SnapshotError as error:  # a state that does not fit; this error does not know its place
            raise SnapshotError(f"{self._where}: {error.summary}", error.traceback) from error
        except UserCodeError:
            raise
        except BaseException as error:  # also sys.exit() in it: a worker that obeys looks like a lost one
            raise self.error(doing or self._context._flux_method, step, error) from error

    def error(self, doing: str, step: ReplicaStep | None, error: BaseException) -> UserCodeError:
        """Make the error that ``call`` raises from an existing one."""
        text = f"{self._where}: {doing}() raised {described(error)}"
        if step is not None and step.rows is not None:
            slices = step.slices
            names = ", ".join(f"stream {s.stream} sequence {s.sequence}" for s in slices[:3])
            more = ", ..." if len(slices) > 3 else ""
            text += f" (at {names}{more}; {self._first_bad_row(step.rows, type(error))})"
        return UserCodeError(text, user_traceback(error))

    def _first_bad_row(self, batch: pa.RecordBatch, kind: type[BaseException]) -> str:
        """Look for the shortest prefix that fails on a fresh operator: the failing one may be half-way through."""

        def fails(rows: int) -> bool:
            try:
                operator = self._stage.make()
                open_operator(operator, replace(self._context, timers=Timers(), event_timers=EventTimers()))
                for _ in operator.process(batch.slice(0, rows)) or ():
                    pass
            except BaseException as error:
                return isinstance(error, kind)
            return False

        if not fails(batch.num_rows):
            return f"no single row is at fault, it fails with the state built before, {batch.num_rows} rows in the step"
        low, high = 0, batch.num_rows  # fails(high), not fails(low)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle, high)
        # Python has no dates behind the year 9999, and no text for bytes that are not UTF-8.
        text = text_of(batch.slice(high - 1, 1), lambda row: str(row.to_pylist()[0]))
        return f"first bad row is number {high - 1} of the step: {text if len(text) < 500 else text[:500] + '...'}"
