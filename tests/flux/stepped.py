"""Steps of one operator in tests: rows, watermarks and times, with copies and checkpoints of the state in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from flux.operators.attributes import open_operator
from flux.operators.batches import given_batches
from flux.operators.operator import Context, Operator, last_output, move_watermarks
from flux.replica.snapshot import decode_snapshot, encode_snapshot

#: Things that may happen to an operator before a step.
NOTHING, COPY, CHECKPOINT, FROM_CHECKPOINT = "nothing", "copy", "checkpoint", "from checkpoint"
EVENTS = (NOTHING, COPY, CHECKPOINT, CHECKPOINT, FROM_CHECKPOINT)


def events(steps: int) -> st.SearchStrategy[list[str]]:
    """Draw one event for each step, which happens before it."""
    return st.lists(st.sampled_from(EVENTS), min_size=steps, max_size=steps)


class Stepped:
    """An operator that goes through steps. ``give`` and ``move`` return the rows that the step gives, as tuples."""

    def __init__(self, make: Callable[[], Operator], schemas: Sequence[pa.Schema], key: tuple[str, ...] = ()) -> None:
        self._make = make
        self.context = Context("stage", key=key, schemas=tuple(schemas), watermarks=[-(1 << 63)] * len(schemas))
        self.operator = self._opened()
        self.output: pa.Schema = self.operator.output_schema(self.context.schemas, key)
        self._kept: bytes | memoryview | None = None
        self._changes: list[bytes | memoryview] = []

    def _opened(self) -> Operator:
        operator = self._make()
        open_operator(operator, self.context)
        return operator

    def _encoded(self, state: Any) -> bytes | memoryview:
        return encode_snapshot(state, "test", classes=self.operator.snapshot_classes)

    def happen(self, event: str) -> None:
        """Copy the operator, take a checkpoint, or go on from the last checkpoint and the changes since then."""
        if event == CHECKPOINT or (event == FROM_CHECKPOINT and self._kept is None):
            changed = self.operator.changes()
            if changed is None or self._kept is None:
                self._kept, self._changes = self._encoded(self.operator.snapshot()), []
            else:
                self._changes.append(self._encoded(changed))
        elif event == FROM_CHECKPOINT:
            changed = self.operator.changes()
            if changed is None:
                self._replace(self._encoded(self.operator.snapshot()), [])
            else:
                assert self._kept is not None
                self._replace(self._kept, [*self._changes, self._encoded(changed)])
            self._kept = None
        elif event == COPY:
            self._replace(self._encoded(self.operator.snapshot()), [])
            self._kept = None

    def _replace(self, state: Any, changes: Sequence[Any]) -> None:
        fresh = self._opened()
        fresh.restore(decode_snapshot(state, classes=fresh.snapshot_classes))
        for each in changes:
            fresh.apply_changes(decode_snapshot(each, classes=fresh.snapshot_classes))
        self.operator = fresh

    def give(self, batch: pa.RecordBatch, number: int = 0) -> list[tuple]:
        self.context.input = number
        return self._taken(given_batches(self.operator.process(batch)))

    def move(self, *watermarks: int) -> list[tuple]:
        return self._taken(move_watermarks(self.operator, self.context, watermarks))

    def end(self) -> list[tuple]:
        return self._taken(last_output(self.operator, self.context))

    def _taken(self, output: Any) -> list[tuple]:
        self.context.step += 1
        rows: list[tuple] = []
        for batch in output:
            assert batch.schema.equals(self.output), (batch.schema, self.output)
            rows += rows_of(batch)
        return rows


def rows_of(batch: pa.RecordBatch) -> list[tuple]:
    """Return rows as tuples, times in microseconds."""
    return list(zip(*[_values(column) for column in batch.columns], strict=True)) if batch.num_rows else []


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64()).to_pylist()
    return [repr(each) if isinstance(each, float) else each for each in column.to_pylist()]
