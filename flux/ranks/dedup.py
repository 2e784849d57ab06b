"""The operator that leaves out duplicates: rows whose key came before, within a time (design: duplicates).

With event time, rows are compared by their own times, and a key is forgotten when the watermark has passed it. Without, times are
those of the steps, which are the same on every replica and in every repetition; another run of the query has others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa

from flux.errors import SchemaError
from flux.operators.operator import Batches, Context
from flux.operators.schema import position
from flux.operators.tentative import ReadableOperator, TentativeRows
from flux.ranks.first_rows import FirstRows
from flux.ranks.warm_up import warm_up
from flux.windows.durations import words
from flux.windows.timely_rows import TimelyRows
from flux.windows.times import microseconds_at
from flux.windows.window import NEVER
from partitioning.errors import StateMismatchError


@dataclass(frozen=True)
class DedupSpec:
    """A deduplication by the key of its stage."""

    #: Microseconds in which a key comes once.
    ttl: int
    #: The column with the event time of rows; None: they have none, and the time of the step counts.
    time: str | None

    def __str__(self) -> str:
        return f"once in {words(self.ttl)} of {'the clock' if self.time is None else self.time}"


class Dedup(ReadableOperator):
    """A deduplication. It gives the rows that are no duplicates, as they are and in their order."""

    snapshot_classes = ()
    restores_in_background = True
    _flux_counts_rows = True

    def __init__(self, spec: DedupSpec) -> None:
        self._spec = spec

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        warm_up()
        return schemas[0]

    def open(self, context: Context) -> None:
        super().open(context)
        warm_up()
        schema, time = context.schemas[0], self._spec.time
        self._keys_at = [position(schema, column) for column in context.key]
        self._time_at = None if time is None else position(schema, time)
        self._rows = TimelyRows()
        self._first = FirstRows([schema.field(at) for at in self._keys_at], self._spec.ttl)

    def process(self, batch: pa.RecordBatch) -> Batches:
        if self._time_at is None:
            now = microseconds_at(self.context.now)
            self._first.forget(now)
            times = np.full(batch.num_rows, now)
        else:
            self._rows.advance(self.context.watermark)
            if self._first.behind:
                self._first.forget(self._rows.watermark)
            batch, times = self._rows.take(batch, batch.column(self._time_at))
        if not len(times):
            return None
        first = self._first.take([batch.column(at) for at in self._keys_at], times)
        if len(first) == len(times):
            return [batch]
        return [batch.take(pa.array(first))] if len(first) else None

    def on_watermark(self) -> Batches:
        if self._time_at is not None and self.context.watermark != NEVER:
            self._rows.advance(self.context.watermark)
            self._first.forget(self._rows.watermark)
        return None

    @property
    def _flux_reach(self) -> int | None:
        return None if self._time_at is None else self._spec.ttl

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside = self._flux_aside()
        aside._rows = copy.copy(self._rows)
        aside._first = self._first.part([[rows.batch.column(at) for at in self._keys_at] for rows in overlay])
        return aside

    def _flux_left_out(self) -> tuple[int, int]:
        return self._rows.left_out

    def _flux_times(self, inputs: Sequence[Sequence[str]]) -> tuple[str, ...]:
        return tuple(inputs[0])

    def _flux_looks_at(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> list[int]:
        time = self._spec.time
        return [position(schemas[0], column) for column in [*key, *([] if time is None else [time])]]

    def _flux_text(self) -> str:
        return f"duplicates left out, by key: {self._spec}"

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        return {"duplicates": str(self._spec)}

    def snapshot(self) -> dict[str, Any]:
        return {"rows": self._rows.state(), "keys": self._first.snapshot()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._rows.put(snapshot["rows"])
        self._put(self._first.restore, snapshot["keys"])

    def changes(self) -> dict[str, Any] | None:
        changed = self._first.changes()
        return None if changed is None else {"rows": self._rows.state(), "keys": changed}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        self._rows.put(changes["rows"])
        self._put(self._first.apply_changes, changes["keys"])

    def _put(self, put: Any, state: Any) -> None:
        try:
            put(state)
        except StateMismatchError as error:
            raise SchemaError(f"{type(self).__name__}: {error}; the state is that of another operator") from error

    def state_bytes(self) -> int:
        return self._first.nbytes
