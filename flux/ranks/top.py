"""Operators of ranks: the best rows of each key within a window, those of each key until now, and the last one (design: ranks).

Within a window, rows are given with their ranks, once, when the watermark has reached the end of the window. Without a window,
the rows are given whose rank was another row's before the step; a reader that keeps the last row of each key and rank has the
best rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.errors import SchemaError
from flux.operators.batches import TAKEN_BYTES_MAX, logical_bytes
from flux.operators.operator import RESULT_ROWS_MAX, Batches, Context, Operator
from flux.operators.schema import position
from flux.operators.tentative import ReadableOperator, TentativeRows
from flux.operators.windowed_groups import WINDOW_COLUMNS, times_as, window_type
from flux.ranks.best_rows import BestOrder, BestRows, RankedRows
from flux.ranks.order_keys import SortColumn, check_order
from flux.ranks.warm_up import warm_up
from flux.windows.durations import words
from flux.windows.open_panes import PANES_MAX, TABLE_BYTES, TooManyPanes
from flux.windows.timely_rows import TimelyRows
from flux.windows.times import as_text, microseconds_at, microseconds_of
from flux.windows.window import NEVER, Window
from partitioning.errors import StateMismatchError

#: The name of the column of ranks.
RANK = "rank"
#: The name of the column of a window of a fluent flow, a struct of start and end.
WINDOW = "window"


@dataclass(frozen=True)
class OrderColumn:
    """A column of an order, by its name."""

    name: str
    descending: bool = False
    nulls_last: bool = False

    def __str__(self) -> str:
        return f"{self.name} {'DESC' if self.descending else 'ASC'} NULLS {'LAST' if self.nulls_last else 'FIRST'}"


@dataclass(frozen=True)
class RankSpec:
    """A declaration of ranks by the key of its stage."""

    limit: int
    by: tuple[OrderColumn, ...]
    #: Names of the given columns of rows: others are there for the order only.
    outputs: tuple[str, ...]
    #: Rows that are equal in the order share a rank.
    ties: bool = False
    #: The windows of rows, if rows do not come with the windows of an earlier stage.
    window: Window | None = None
    #: Microseconds, and the column with the event time that it goes by; None there: the time of the step.
    ttl: int | None = None
    time: str | None = None
    #: The last rows of the order are the best.
    backward: bool = False

    def order(self, schema: pa.Schema) -> BestOrder:
        by = tuple(SortColumn(position(schema, each.name), each.descending, each.nulls_last) for each in self.by)
        return BestOrder(self.limit, by, self.ties, self.ttl, self.backward)

    def __str__(self) -> str:
        said = f"{self.limit} by {', '.join(map(str, self.by))}"
        said += ", with ties" if self.ties else ""
        said += "" if self.window is None else f", {self.window}"
        said += "" if self.ttl is None else f", kept for {words(self.ttl)} of {self.time or 'the clock'}"
        return said


class _Ranks(ReadableOperator):
    """Base of the operators of ranks."""

    snapshot_classes = ()
    restores_in_background = True
    _flux_counts_rows = True
    _flux_grouped = True

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        warm_up()
        (schema,), name = schemas, type(self).__name__
        try:
            check_order(schema, self._spec.order(schema).whole(len(schema)))
        except SchemaError as error:
            raise SchemaError(
                f"{name}: {error}; all columns take part, so that ranks do not depend on the order of arrival"
            ) from None
        fields = [schema.field(position(schema, column)) for column in self._spec.outputs]
        for field in self._added(schema):
            if field.name.casefold() in (each.name.casefold() for each in fields):
                raise SchemaError(
                    f"{name} adds a column {field.name!r}, and there is one: rename it in front, as in "
                    f"withColumnRenamed({field.name!r}, {'old_' + field.name!r})"
                )
            fields.append(field)
        return pa.schema(fields)

    def _added(self, schema: pa.Schema) -> list[pa.Field]:
        """Return the columns behind those of the row."""
        return [pa.field(RANK, pa.int32(), nullable=False)]

    def open(self, context: Context) -> None:
        super().open(context)
        self._output = self.output_schema(context.schemas, context.key)
        (schema,) = context.schemas
        self._outputs_at = [position(schema, column) for column in self._spec.outputs]
        keys_at = [position(schema, column) for column in context.key]
        self._best = BestRows(schema, keys_at, self._spec.order(schema))

    def _given(self, found: RankedRows, *added: pa.Array) -> pa.RecordBatch:
        columns = [found.rows.column(at) for at in self._outputs_at]
        return pa.RecordBatch.from_arrays([*columns, *added], schema=self._output)

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        return {"ranks": str(self._spec)}

    def _put(self, put: Any, state: Any) -> None:
        try:
            put(state)
        except StateMismatchError as error:
            raise SchemaError(f"{type(self).__name__}: {error}; the state is that of another operator") from error


class TopOfWindow(_Ranks):
    """The best rows of each key in each window. Each window is a piece of the state, by its end and start."""

    _flux_waits = True

    def _added(self, schema: pa.Schema) -> list[pa.Field]:
        if (window := self._spec.window) is None:
            return super()._added(schema)
        type_ = window_type(schema.field(position(schema, str(window.column))).type)
        return [*(pa.field(name, type_) for name in WINDOW_COLUMNS), *super()._added(schema)]

    def open(self, context: Context) -> None:
        super().open(context)
        self._rows = TimelyRows()
        self._windows: dict[tuple[int, int], BestRows] = {}  # by end and start
        self._begun: dict[tuple[int, int], int] = {}  # the step of the first row of each
        self._told: set[tuple[int, int]] | None = None  # windows at the last call of ``changes``

    def _flux_looks_at(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> list[int] | None:
        if not self._spec.ties:
            return None  # all columns decide between rows that are equal in the order
        (schema,), window = schemas, self._spec.window
        names = [*key, *(each.name for each in self._spec.by)]
        windows = {"window", *WINDOW_COLUMNS} if window is None else {str(window.column)}
        found = {position(schema, name) for name in names}
        return sorted(found | {at for at, name in enumerate(schema.names) if name in windows})

    def _flux_narrowed(self, make: Callable[[], Operator], names: Sequence[str]) -> Callable[[], Operator]:
        there = set(names)
        return partial(TopOfWindow, replace(self._spec, outputs=tuple(n for n in self._spec.outputs if n in there)))

    def process(self, batch: pa.RecordBatch) -> Batches:
        self._rows.advance(self.context.watermark)
        rows, starts, ends = self._placed(batch)
        if not rows.num_rows:
            return None
        if starts.min() == starts.max() and ends.min() == ends.max():
            self._piece(int(ends[0]), int(starts[0])).add(rows)
            return None
        order = np.lexsort((starts, ends))
        starts, ends = starts[order], ends[order]
        rows = rows.take(pa.array(order))
        cuts = np.flatnonzero((starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(order)], strict=True):
            self._piece(int(ends[begin]), int(starts[begin])).add(rows.slice(begin, end - begin))
        return None

    def _placed(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray]:
        """Return rows with the start and the end of the window of each."""
        window, schema = self._spec.window, batch.schema
        if window is not None:
            rows, times = self._rows.take(batch, batch.column(position(schema, str(window.column))))
            found = window.starts(times) if len(times) else [(times, None)]
            if len(found) == 1:
                return rows, found[0][0], found[0][0] + window.size
            every = np.arange(len(times))
            places = np.concatenate([every if there is None else every[there] for _, there in found])
            starts = np.concatenate([starts if there is None else starts[there] for starts, there in found])
            order = np.argsort(places, kind="stable")
            return rows.take(pa.array(places[order])), starts[order], starts[order] + window.size
        rows, times = self._rows.take(batch, _times_of(batch)[1], before=1)
        return rows, microseconds_of(_times_of(rows)[0]), times + 1

    def _piece(self, end: int, start: int) -> BestRows:
        piece = self._windows.get((end, start))
        if piece is None:
            if len(self._windows) >= PANES_MAX:
                raise TooManyPanes(
                    f"{PANES_MAX:,} windows are open, and a row of the window from {as_text(start)} to {as_text(end)} "
                    "would open one more: are the times right? Ranks are for windows that keys share, not for sessions"
                )
            piece = self._windows[end, start] = self._best.empty()
            self._begun[end, start] = self.context.step
            if self._told is not None:
                piece.changes()  # the first call begins to note changes, and gives nothing
        return piece

    def on_watermark(self) -> Batches:
        self._rows.advance(self.context.watermark)
        over = sorted(window for window in self._windows if window[0] <= self._rows.watermark)
        return self._closed(over) if over else None

    def _closed(self, windows: Sequence[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of windows, the earliest first, in batches that windows share."""
        parts: list[pa.RecordBatch] = []
        count = nbytes = 0
        for end, start in windows:
            for found in self._windows[end, start].ranked(RESULT_ROWS_MAX):
                if parts and (count + len(found.ranks) > RESULT_ROWS_MAX or nbytes > TAKEN_BYTES_MAX):
                    yield pa.concat_batches(parts)
                    parts, count, nbytes = [], 0, 0
                parts.append(self._of_window(found, start, end))
                count += len(found.ranks)
                nbytes += logical_bytes(parts[-1])
            del self._windows[end, start], self._begun[end, start]
        if parts:
            yield pa.concat_batches(parts)

    def _of_window(self, found: RankedRows, start: int, end: int) -> pa.RecordBatch:
        added: list[pa.Array] = []
        if self._spec.window is not None:
            type_ = self._output.field(WINDOW_COLUMNS[0]).type
            added = [times_as(np.full(len(found.ranks), at), type_) for at in (start, end)]
        return self._given(found, *added, pa.array(found.ranks))

    @property
    def _flux_reach(self) -> int:
        return 1 if self._spec.window is None else self._spec.window.size  # the time of a window is just below its end

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside = self._flux_aside()
        aside._rows, aside._begun, aside._told = copy.copy(self._rows), dict(self._begun), None
        aside._windows = {at: piece for at, piece in self._windows.items() if at[0] > after}
        touched: set[tuple[int, int]] = set()
        for rows in overlay:
            _, starts, ends = copy.copy(aside)._placed(rows.batch)
            touched.update(zip(ends.tolist(), starts.tolist(), strict=True))
        for at in touched & aside._windows.keys():
            given = at[0] <= watermark
            aside._windows[at] = self._windows[at].copied() if given else self._best.empty()
        return aside

    def needs_from(self) -> int:
        """Return the first step that an open window has a row of."""
        return min(self._begun.values(), default=self.context.step + 1)

    def _flux_left_out(self) -> tuple[int, int]:
        return self._rows.left_out

    def _flux_times(self, inputs: Sequence[Sequence[str]]) -> tuple[str, ...]:
        if self._spec.window is not None:
            return (WINDOW_COLUMNS[1],)
        return tuple(name for name in (WINDOW, WINDOW_COLUMNS[1]) if name in self._spec.outputs)[:1]

    def _flux_text(self) -> str:
        return f"the first {self._spec}, of each window when the watermark has passed it"

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        windows = [(*at, self._begun[at], self._windows[at].snapshot()) for at in sorted(self._windows)]
        return {"rows": self._rows.state(), "windows": windows}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._rows.put(snapshot["rows"])
        self._windows, self._begun, self._told = {}, {}, None
        for end, start, begun, state in snapshot["windows"]:
            self._take(end, start, begun, state)

    def _take(self, end: int, start: int, begun: int, state: Mapping[str, Any]) -> None:
        piece = self._windows[end, start] = self._best.empty()
        self._begun[end, start] = begun
        self._put(piece.restore, state)

    def changes(self) -> dict[str, Any] | None:
        """Return the windows that changed since the last call: each as its own changes, or whole where it is new; and those that
        are gone. None: there was no call before."""
        first, told = self._told is None, self._told or set()
        self._told = set(self._windows)
        changed, whole = [], []
        for at in sorted(self._windows):
            piece = self._windows[at]
            found = piece.changes()
            if found is None or at not in told:
                whole.append((*at, self._begun[at], None if first else piece.snapshot()))
            elif len(found["slots"]):
                changed.append((*at, found))
        if first:
            return None
        gone = sorted(told - self._told)
        return {"rows": self._rows.state(), "changed": changed, "whole": whole, "gone": gone}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        self._rows.put(changes["rows"])
        for end, start in changes["gone"]:
            del self._windows[end, start], self._begun[end, start]
        for end, start, begun, state in changes["whole"]:
            self._take(end, start, begun, state)
        for end, start, found in changes["changed"]:
            self._put(self._windows[end, start].apply_changes, found)

    def state_bytes(self) -> int:
        return sum(piece.nbytes + TABLE_BYTES for piece in self._windows.values())


def _times_of(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Return the starts and ends of the windows that rows come with."""
    if WINDOW_COLUMNS[1] in batch.schema.names:
        start, end = (batch.column(position(batch.schema, name)) for name in WINDOW_COLUMNS)
        return start, end
    window = batch.column(position(batch.schema, WINDOW))
    return pc.struct_field(window, "start"), pc.struct_field(window, "end")


class Top(_Ranks):
    """The best rows of each key until now. After each step it gives the rows whose rank was another row's before, by key in the
    order of their first changes, and by rank."""

    _flux_gives_changes = True

    def process(self, batch: pa.RecordBatch) -> Batches:
        if not batch.num_rows:
            return None
        return list(map(self._with_rank, self._best.add(batch, tell=True)))

    def _with_rank(self, found: RankedRows) -> pa.RecordBatch:
        return self._given(found, pa.array(found.ranks))

    def _flux_times(self, inputs: Sequence[Sequence[str]]) -> tuple[str, ...]:
        return ()

    def _flux_text(self) -> str:
        return f"the first {self._spec}, given when they change"

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside = self._flux_aside()
        aside._best = self._best.part([rows.batch for rows in overlay])
        return aside

    def snapshot(self) -> dict[str, Any]:
        return self._best.snapshot()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._put(self._best.restore, snapshot)

    def changes(self) -> dict[str, Any] | None:
        return self._best.changes()

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        self._put(self._best.apply_changes, changes)

    def state_bytes(self) -> int:
        return self._best.nbytes


class Last(Top):
    """The last row of each key, given when it changes. With ``ttl`` a key is forgotten this long behind its newest row."""

    def _added(self, schema: pa.Schema) -> list[pa.Field]:
        return []

    def open(self, context: Context) -> None:
        super().open(context)
        self._rows = TimelyRows()

    def process(self, batch: pa.RecordBatch) -> Batches:
        if self._spec.ttl is None:
            return super().process(batch)
        if self._spec.time is None:
            now = microseconds_at(self.context.now)
            self._best.forget(now)
            times = np.full(batch.num_rows, now)
        else:
            self._rows.advance(self.context.watermark)
            batch, times = self._rows.take(batch, batch.column(position(batch.schema, self._spec.time)))
        return list(map(self._with_rank, self._best.add(batch, times, tell=True))) if len(times) else None

    def on_watermark(self) -> Batches:
        if self._spec.time is not None and self.context.watermark != NEVER:
            self._rows.advance(self.context.watermark)
            self._best.forget(self._rows.watermark)
        return None

    def _with_rank(self, found: RankedRows) -> pa.RecordBatch:
        return self._given(found)

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside = super()._flux_part(watermark, overlay, after)
        aside._rows = copy.copy(self._rows)
        return aside

    def _flux_left_out(self) -> tuple[int, int]:
        return self._rows.left_out

    def snapshot(self) -> dict[str, Any]:
        return {"rows": self._rows.state(), "best": super().snapshot()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._rows.put(snapshot["rows"])
        super().restore(snapshot["best"])

    def changes(self) -> dict[str, Any] | None:
        changed = super().changes()
        return None if changed is None else {"rows": self._rows.state(), "best": changed}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        self._rows.put(changes["rows"])
        super().apply_changes(changes["best"])
