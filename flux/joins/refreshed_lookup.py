"""The operator of a lookup whose table is read anew while the query runs (design: refreshed-lookup).

Its right input brings the rows of each version of the table, with the number of the version in their last column, and the
watermark of that input is above the number of a version when no row of it comes any more. So a version counts from an ordered
step on: the step that moves the watermark. Law: each left row meets the version that was in force before its step, on each
replica and in each repetition of the step. Versions that a partition passes over are not looked at, and a version that the end
of the input has cut is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from flux.expressions.steps import RowSteps
from flux.joins.join_spec import LEFT, RIGHT
from flux.joins.lookup import LookupTable
from flux.operators.operator import Batches, Context
from flux.operators.tentative import ReadableOperator, TentativeRows
from flux.windows.window import END_OF_TIME, FIRST_VERSION


@dataclass(frozen=True)
class RefreshedSpec:
    """A lookup whose table is read anew."""

    #: The version with which the query begins: all rows, as each worker has them.
    first: LookupTable
    #: Conditions and columns behind the lookup.
    behind: RowSteps
    #: The time between two readings, in words.
    every: str
    #: A key that is there twice would make several rows of one.
    unique: bool = True
    #: The number of the version with which the query begins.
    number: int = FIRST_VERSION

    def twice(self, rows: pa.Table) -> str:
        """Return a key that several rows of a version have, where that is not allowed, in words; empty: there is none."""
        found = self.first.with_rows(rows).first_twice() if self.unique else None
        return "" if found is None else f"several rows have {self.first.name} = {', '.join(map(repr, found))}"


class RefreshedLookup(ReadableOperator):
    """A lookup of one partition. The version in force is that of the plan, or the rows of this partition of a later one."""

    snapshot_classes = ()
    restores_in_background = True
    _flux_each_watermark = True
    _flux_passes_changes = True
    _flux_reach = 0

    def __init__(self, spec: RefreshedSpec) -> None:
        self.spec = spec
        #: The number of the version in force.
        self.version = spec.number
        #: Its rows; None: those of the plan.
        self._rows: pa.Table | None = None
        #: Rows of later versions, with the column of versions, in the order of arrival.
        self._later: list[pa.RecordBatch] = []
        #: The version in force at the last call of ``changes``.
        self._told: int | None = None
        self._table = spec.first

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        return self.spec.behind.output

    def open(self, context: Context) -> None:
        super().open(context)
        self._schema = context.schemas[RIGHT]

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if self.context.input == LEFT:
            yield self.spec.behind.apply(self._table(batch))
        elif batch.num_rows:
            self._later.append(batch)

    def on_watermark(self) -> Batches:
        watermark = self.context.watermarks[RIGHT]
        if watermark == END_OF_TIME:
            self._later = []
        else:
            self._put_in_force(watermark - 1)
        return None

    def _put_in_force(self, version: int) -> None:
        """Look rows up in a version from here on, of which all rows of this partition have come, perhaps none."""
        if version <= self.version:
            return
        rows = pa.Table.from_batches(self._later, self._schema)
        numbers = rows.column(-1).cast(pa.int64())
        self.version = version
        self._use(rows.filter(pc.equal(numbers, version)).select(range(len(self._schema) - 1)))
        later = rows.filter(pc.greater(numbers, version)).combine_chunks()
        self._later = [batch for batch in later.to_batches() if batch.num_rows]

    def _use(self, rows: pa.Table | None) -> None:
        self._rows = rows
        self._table = self.spec.first if rows is None else self.spec.first.with_rows(rows)

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside = self._flux_aside()
        aside._later = list(self._later)
        return aside

    def _flux_times(self, inputs: Sequence[Sequence[str]]) -> tuple[str, ...]:
        return tuple(name for column in inputs[LEFT] for name in self.spec.behind.names_of(column))

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        return {"lookup": self.spec.first.name}

    def _flux_text(self) -> str:
        return f"look up {self.spec.first.name}, which is read anew every {self.spec.every}; {self.spec.behind}"

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        return self._state(self._rows)

    def _state(self, rows: pa.Table | None) -> dict[str, Any]:
        return {"version": self.version, "rows": rows, "later": pa.Table.from_batches(self._later, self._schema)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._put(snapshot)
        self._use(snapshot["rows"])

    def changes(self) -> dict[str, Any] | None:
        told, self._told = self._told, self.version
        if told is None:
            return None
        return self._state(None if told == self.version else self._rows) | {"same": told == self.version}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        self._put(changes)
        if not changes["same"]:
            self._use(changes["rows"])

    def _put(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        self._later = [batch for batch in state["later"].to_batches() if batch.num_rows]

    def state_bytes(self) -> int:
        return sum(each.nbytes for each in (*self._later, *([] if self._rows is None else [self._rows])))
