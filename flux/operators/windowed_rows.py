"""Functions over the rows of a group, called when its window is final (design: functions-over-windows).

    @flux.stage(key="user", window=flux.session_window("ts", "5 minutes"), schema="user BIGINT, pages BIGINT")
    def paths(rows, offsets): ...                                all groups that end together, one behind the other

    clicks.groupBy(F.session_window("ts", "5 minutes"), "user").applyInArrow(path_of, "user BIGINT, path STRING")

Law: the groups of a call, and their rows, depend on the rows, their order and the watermarks alone. A function has no state: its
rows are kept until their window ends, each of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from flux.errors import SchemaError, UsageError
from flux.operators.batches import conform
from flux.operators.operator import BARRIER, PEEK, RESULT_ROWS_MAX, Batches, Context
from flux.operators.schema import check_columns, position
from flux.operators.tentative import ReadableOperator, TentativeRows
from flux.operators.user_code import gives_nothing, named, signature, takes
from flux.operators.windowed_groups import (
    CLOCK_TYPE,
    TIMER,
    WINDOW_COLUMNS,
    WindowedPartition,
    check_time,
    times_as,
    window_type,
)
from flux.windows.kept_rows import GroupRows
from flux.windows.row_panes import RowPanes
from flux.windows.session_rows import SessionRows
from flux.windows.window import END_OF_TIME, NEVER, Closing, SessionWindow, Window
from partitioning.clustering import check_key_type
from partitioning.errors import StateMismatchError

#: Rows of a call, unless one group has more.
CALL_ROWS_MAX = 65_536


class WindowedRows(WindowedPartition[RowPanes | SessionRows]):
    """The rows of one partition of a stage until their windows end."""

    def __init__(
        self, window: Window | SessionWindow, times_at: Sequence[int], schema: pa.Schema, keys_at: Sequence[int],
        give: Callable[[GroupRows], Iterator[pa.RecordBatch]],
    ) -> None:  # fmt: skip
        """``schema``: that of rows; ``keys_at``: the positions of the keys in it; ``give`` makes the output of groups."""
        super().__init__(window, times_at, "append")
        self._give = give
        if isinstance(window, SessionWindow):
            self._state = SessionRows(schema, keys_at, window)
        else:
            self._state = RowPanes(schema, keys_at, window)

    def add(self, batch: pa.RecordBatch, context: Context) -> None:
        """Add the rows of the step that the context tells."""
        rows, times = self.timed(batch, context)
        if len(times):
            self._state.add(times, rows, context.step)
            self.set_timer(context)

    def _close(self, watermark: int) -> Iterator[pa.RecordBatch]:
        waiting: list[GroupRows] = []
        rows = 0
        for groups in self._state.close(watermark, CALL_ROWS_MAX):
            if waiting and rows + groups.rows.num_rows > CALL_ROWS_MAX:
                yield from self._give(_joined(waiting))
                waiting, rows = [], 0
            waiting.append(groups)
            rows += groups.rows.num_rows
        if waiting:
            yield from self._give(_joined(waiting))


def _joined(parts: Sequence[GroupRows]) -> GroupRows:
    if len(parts) == 1:
        return parts[0]
    rows = pa.concat_batches([part.rows for part in parts])
    return GroupRows(rows, *(np.concatenate(each) for each in list(zip(*parts, strict=True))[1:]))


class WindowFunction(ReadableOperator):
    """Base of operators that keep rows until their window ends, and then call a function with its groups."""

    restores_in_background = True
    snapshot_classes = ()
    _flux_counts_rows = True
    _flux_grouped = True
    #: ``changes`` gives nothing if more than this part of the sessions has changed.
    _told_share = 1 / 2
    _flux_rows: WindowedRows

    def __init__(self, function: Callable[..., Any], schema: Any, window: Window | SessionWindow) -> None:
        self._function, self.schema, self._flux_window = function, schema, window
        self._name = named(function)

    def _outputs(self, groups: GroupRows) -> Iterator[pa.RecordBatch]:
        """Yield the output of the function for groups that are final."""
        raise NotImplementedError

    # ---- the exchange's side

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        """Return the declared schema. SchemaError: inputs have different columns, or there is no time in the window's column."""
        first, window = schemas[0], self._flux_window
        for number, schema in enumerate(schemas):
            who = self._name if len(schemas) == 1 else f"{self._name}, input {number}"
            if window is not None and window.column is not None:
                check_time(schema, window.column, who)
            if (schema.names, schema.types) != (first.names, first.types):
                raise SchemaError(
                    f"{self._name}: its inputs must have the same columns, because the function gets the rows of all of them "
                    f"together; input 0 has {_columns(first)}, and input {number} has {_columns(schema)}"
                )
        for column in key:
            check_key_type(column, first.field(position(first, column)).type)
        return self.schema

    def open(self, context: Context) -> None:
        super().open(context)
        window = self._flux_window
        assert window is not None
        schemas = context.schemas
        self._input = schemas[0]
        times_at = [] if window.column is None else [position(schema, window.column) for schema in schemas]
        self._time_type = CLOCK_TYPE if window.column is None else window_type(schemas[0].field(times_at[0]).type)
        self._keys_at = [position(self._input, column) for column in context.key]
        self._flux_rows = WindowedRows(window, times_at, self._input, self._keys_at, self._outputs)

    def process(self, batch: pa.RecordBatch) -> Batches:
        if batch.num_rows:
            if batch.schema != self._input:  # of another input: which columns may be null is no part of its rows
                batch = pa.RecordBatch.from_arrays(batch.columns, schema=self._input)
            self._flux_rows.add(batch, self.context)
        return None

    def on_watermark(self) -> Batches:
        return self._flux_rows.advance(self.context.watermark)

    def on_timer(self, name: str) -> Batches:
        return self._flux_rows.tick(self.context) if name == TIMER else super().on_timer(name)

    def finish(self) -> Batches:
        return self._flux_rows.finish(END_OF_TIME)

    @property
    def _flux_timed(self) -> bool:
        return self._flux_window is not None and self._flux_window.by_clock

    @property
    def _flux_tentative(self) -> str:
        return BARRIER if self._flux_window is not None and self._flux_window.by_clock else PEEK

    @property
    def _flux_reach(self) -> int | None:
        return self._flux_window.size if isinstance(self._flux_window, Window) else None

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside = self._flux_aside()
        keys_at = [self._keys_at] * len(self.context.schemas)
        aside._flux_rows = self._flux_rows.part(overlay, keys_at, watermark, after)
        return aside

    def _flux_left_out(self) -> tuple[int, int]:
        return self._flux_rows.behind_watermark, self._flux_rows.without_time

    def output_watermark(self) -> int:
        """Return the watermark of the output: a session is final when the watermark is *above* its end."""
        watermark = self.context.watermark
        ends_later = isinstance(self._flux_window, SessionWindow) and NEVER < watermark < END_OF_TIME
        return watermark - 1 if ends_later else watermark

    def needs_from(self) -> int:
        """Return the first step that an open window has a row of."""
        first = self._flux_rows.needs_from
        return self.context.step + 1 if first is None else first

    def _flux_text(self) -> str:
        return f"function {self._name} of the rows of a group"

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        return {"window": str(self._flux_window), "rows": _columns(schemas[0])}

    def snapshot(self) -> dict[str, Any]:
        return self._flux_rows.snapshot()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._flux_rows.restore(snapshot)

    def changes(self) -> dict[str, Any] | None:
        return self._flux_rows.changes(self._told_share)

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        try:
            self._flux_rows.apply_changes(changes)
        except StateMismatchError as error:
            raise SchemaError(f"{self._name}: {error}") from error

    def state_bytes(self) -> int:
        """Return the bytes of memory that the rows of open windows hold."""
        return self._flux_rows.nbytes


class GroupsFunction(WindowFunction):
    """A function that is called with the rows of all groups that end together: ``function(rows, offsets)``."""

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        found = super().output_schema(schemas, key)
        taken = {name.casefold() for name in schemas[0].names} & set(self._columns_of_window())
        if taken:
            raise SchemaError(
                f"{self._name}: the input has columns {', '.join(sorted(taken))}, and the function gets those of the window by "
                "these names; rename them in front of it"
            )
        return found

    def _columns_of_window(self) -> tuple[str, ...]:
        return () if isinstance(self._flux_window, Closing) else WINDOW_COLUMNS

    def _outputs(self, groups: GroupRows) -> Iterator[pa.RecordBatch]:
        rows = groups.rows
        for name, at in zip(self._columns_of_window(), (groups.starts, groups.ends), strict=False):
            rows = rows.append_column(name, times_as(np.repeat(at, groups.counts), self._time_type))
        given = self._function(rows, np.append(0, np.cumsum(groups.counts)))
        if isinstance(given, pa.Table):
            yield from given.to_batches()
        elif isinstance(given, pa.RecordBatch):
            yield given
        else:
            raise SchemaError(
                f"{self._name}: expected a pyarrow.RecordBatch or Table for the groups, got {type(given).__name__}; give one "
                "without rows if there is nothing to give"
            )


class GroupKey(NamedTuple):
    """The parts of a group's key, as ``applyInArrow`` gives it: positions of columns, and None for the window."""

    places: tuple[int | None, ...]
    #: The number of columns that the function gets. Columns behind them are computed keys.
    columns: int


class EachGroupFunction(WindowFunction):
    """A function that is called for each group, as by ``applyInArrow``: ``function(table)`` or ``function(key, table)``."""

    def __init__(
        self, function: Callable[..., Any], schema: pa.Schema, window: Window | SessionWindow, key: GroupKey
    ) -> None:
        super().__init__(function, schema, window)
        self._key, self._takes_key = key, takes_key(function)

    def _outputs(self, groups: GroupRows) -> Iterator[pa.RecordBatch]:
        rows, offsets = groups.rows, np.append(0, np.cumsum(groups.counts)).tolist()
        table = pa.Table.from_batches([rows.select(list(range(self._key.columns)))])
        keys = self._keys(groups, offsets) if self._takes_key else None
        made: list[pa.RecordBatch] = []
        count = 0
        for group, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            mine = table.slice(begin, end - begin)
            given = self._function(mine) if keys is None else self._function(keys[group], mine)
            if not isinstance(given, pa.Table):
                raise SchemaError(
                    f"applyInArrow({self._name}): expected a pyarrow.Table for each group, got {type(given).__name__}"
                )
            for batch in given.to_batches():
                made.append(conform(batch, self.schema, f"output of applyInArrow({self._name})"))
                count += batch.num_rows
            if count >= RESULT_ROWS_MAX:
                yield pa.concat_batches(made)
                made, count = [], 0
        if made:
            yield pa.concat_batches(made)

    def _keys(self, groups: GroupRows, offsets: Sequence[int]) -> list[tuple[pa.Scalar, ...]]:
        """Return the key of each group, as scalars."""
        first = pa.array(offsets[:-1])
        times = [times_as(at, self._time_type) for at in (groups.starts, groups.ends)]
        window = pa.StructArray.from_arrays(times, ["start", "end"])
        parts = [window if at is None else groups.rows.column(at).take(first) for at in self._key.places]
        return list(zip(*parts, strict=True))


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def takes_key(function: Callable[..., Any]) -> bool:
    """Tell whether a function takes the key of its group in front of the rows."""
    said = signature(function)
    return said is not None and not takes(said, 1)


def check_group_function(function: Any, schema: Any) -> None:
    """Raise UsageError or SchemaError unless ``applyInArrow`` can take these, as far as that can be told without a session."""
    if not callable(function):
        raise UsageError(f"applyInArrow: expected a function of a pyarrow.Table, got {type(function).__name__}")
    said = signature(function)
    if said is not None and not (takes(said, 1) or takes(said, 2)):
        raise UsageError(f"applyInArrow: the function must take (table), or (key, table); got {named(function)}{said}")
    if gives_nothing(function):
        raise UsageError(f"applyInArrow: {named(function)} returns nothing: return a pyarrow.Table for each group")
    if schema is None:
        raise UsageError(
            "applyInArrow: the schema of the rows that the function gives is missing: schema='user BIGINT, path STRING'"
        )
    check_columns("applyInArrow", schema)
