"""Errors of user code with their place: stage, partition, stream, sequence and first bad row (design: user-error)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import pyarrow as pa

from flux.dataflow.plan import StagePlan
from flux.errors import SnapshotError, UserCodeError
from flux.exchange.inbound import RowSlice, Slice
from flux.operators.attributes import open_operator
from flux.operators.operator import Context, Timers
from flux.operators.user_code import described, text_of, user_traceback

T = TypeVar("T")


def joined(slices: list[Slice]) -> pa.RecordBatch:
    """Join the rows of one step to one batch."""
    if len(slices) == 1:
        assert isinstance(slices[0], RowSlice)
        return slices[0].batch
    return pa.concat_batches([slice_.batch for slice_ in slices if isinstance(slice_, RowSlice)])


@dataclass(frozen=True, slots=True)
class UserCodeGuard:
    """The guard of one replica's calls of user code."""

    where: str
    stage: StagePlan
    context: Context

    def guard(self, doing: str, slices: list[Slice] | None, call: Callable[[], T]) -> T:
        """Call user code. UserCodeError, for any error that it raises. ``slices`` are the rows of the step, if the call is
        about rows."""
        try:
            return call()
        except SnapshotError as error:  # a state that does not fit; this error does not know its place
            raise SnapshotError(f"{self.where}: {error.summary}", error.traceback) from error
        except UserCodeError:
            raise
        except BaseException as error:  # also sys.exit() in it: a worker that obeys looks like a lost one
            raise self.error(doing, slices, error) from error

    def error(self, doing: str, slices: list[Slice] | None, error: BaseException) -> UserCodeError:
        """Make the error that ``guard`` raises from an existing one."""
        text = f"{self.where}: {doing}() raised {described(error)}"
        if slices:
            names = ", ".join(f"stream {s.stream} sequence {s.sequence}" for s in slices[:3])
            text += f" (at {names}{', ...' if len(slices) > 3 else ''}; {self._first_bad_row(slices, type(error))})"
        return UserCodeError(text, user_traceback(error))

    def _first_bad_row(self, slices: list[Slice], kind: type[BaseException]) -> str:
        """Look for the shortest prefix that fails on a fresh operator: the failing one may be half-way through."""
        batch = joined(slices)

        def fails(rows: int) -> bool:
            try:
                operator = self.stage.make()
                open_operator(operator, replace(self.context, timers=Timers()))
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
