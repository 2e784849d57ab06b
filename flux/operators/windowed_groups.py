"""Groups of an aggregate by window: rows in, results out when the watermark has passed a window (design: windows).

Windows of processing time take the time of the step in place of a column, and are closed by a timer.

The link between an aggregate, which knows columns and batches, and the state of its windows (``flux.windows``), which knows
times, keys and values. Results have the key, ``window_start`` and ``window_end``, then the measures.

Left out are rows without a time, as Spark leaves them out, and rows below the watermark. Both are counted, and the counts are
part of the state. A source gives no row below its own watermark; such a row comes from an idle source that is back, or from an
operator that has moved times back.
"""

from __future__ import annotations

import builtins
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.errors import SchemaError
from flux.marks.canonical import in_canonical_order, mark_at, mark_step
from flux.operators.operator import RESULT_ROWS_MAX, Context
from flux.operators.schema import position, positions
from flux.windows.pane_state import PaneState, WindowGroups, add_to_each
from flux.windows.session_state import SessionState
from flux.windows.times import TIME_MAX, microseconds_at, microseconds_of
from flux.windows.window import END_OF_TIME, NEVER, Closing, SessionWindow, Window
from partitioning.errors import FailedPartition
from partitioning.keyed_state import TypedMeasure

if TYPE_CHECKING:
    from flux.operators.tentative import TentativeRows

#: The columns of a window in the output.
WINDOW_COLUMNS = ("window_start", "window_end")
#: The name of the timer that closes windows of processing time.
TIMER = "flux windows"
#: The type of a window's times if they come from no column.
CLOCK_TYPE = pa.timestamp("us", "UTC")


class WindowState(Protocol):
    """The state of the open windows of a partition, which ``flux.windows`` has in several forms."""

    @property
    def nbytes(self) -> int: ...
    @property
    def needs_from(self) -> int | None: ...
    @property
    def next_end(self) -> int | None: ...
    def snapshot(self) -> Any: ...
    def restore(self, snapshot: Any) -> None: ...
    def changes(self, share_max: float = 1.0) -> Any: ...
    def apply_changes(self, changes: Any) -> None: ...
    def part(self, times: np.ndarray, keys: Sequence[Sequence[pa.Array]], watermark: int, after: int) -> Any: ...


State = TypeVar("State", bound=WindowState)


def check_time(schema: pa.Schema, column: str, who: str) -> pa.Field:
    """Return the field of the times of rows. SchemaError: there is none of this name, or it holds no times."""
    if len(positions(schema, column)) != 1:
        raise SchemaError(f"{who}: the window's times are in no column {column!r}; there are {', '.join(schema.names)}")
    field = schema.field(position(schema, column))
    if not pa.types.is_timestamp(field.type):
        raise SchemaError(
            f"{who}: the window's column {column!r} is {field.type}, and windows need a TIMESTAMP; cast it first, as in "
            f"df.withColumn({column!r}, F.col({column!r}).cast('timestamp'))"
        )
    return field


def window_columns(window: Window | SessionWindow) -> tuple[str, ...]:
    """Return the names of the columns of a window in the output."""
    return (str(window.column),) if isinstance(window, Closing) else WINDOW_COLUMNS


def window_type(times: pa.DataType) -> pa.DataType:
    """Return the type of the columns of a window over times of this type: microseconds, for times of any unit. A window
    may begin between two whole seconds, and the end of a window with the last nanosecond of 64 bits fits into no number of
    nanoseconds."""
    return pa.timestamp("us", times.tz)


def times_as(at: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return microseconds since the epoch as a column of times."""
    return pa.array(at.astype(np.int64, copy=False)).view(pa.timestamp("us", kind.tz)).cast(kind, safe=False)


class WindowedPartition(Generic[State]):
    """The windows of one partition of a stage: times of rows, rows that are left out, the watermark, and the timer of windows of
    processing time. The ``_state`` of the windows is a subclass's."""

    _state: State

    def __init__(self, window: Window | SessionWindow, times_at: Sequence[int], output_mode: str) -> None:
        """``times_at``: by input, the position of the times; ``output_mode``: see ``flux.stage``."""
        self._times_at = times_at
        self._by_clock = window.by_clock
        self._mode = output_mode
        self._watermark = NEVER
        #: Rows without a time.
        self.without_time = 0
        #: Rows below the watermark of their step.
        self.behind_watermark = 0

    @property
    def nbytes(self) -> int:
        return self._state.nbytes

    @property
    def needs_from(self) -> int | None:
        """The first step that an open window has a row of. None: no window is open."""
        return self._state.needs_from

    def timed(self, batch: pa.RecordBatch, context: Context) -> tuple[pa.RecordBatch, np.ndarray]:
        """Return the rows of the step that the context tells that count, and their times in microseconds."""
        if self._by_clock:
            return batch, np.full(batch.num_rows, microseconds_at(context.now))
        self.meet(context.watermark)
        return self._countable(batch, batch.column(self._times_at[context.input]))

    def meet(self, watermark: int) -> int:
        """Return the watermark below which rows do not count, given that of a step. It counts, too, because a replica that begins
        empty at a replay point has closed nothing yet."""
        self._watermark = builtins.max(self._watermark, watermark)
        return self._watermark

    def _countable(self, batch: pa.RecordBatch, column: pa.Array) -> tuple[pa.RecordBatch, np.ndarray]:
        """Return the rows that count, and their times."""
        if column.null_count:
            self.without_time += column.null_count
            batch = batch.filter(pc.is_valid(column))
            column = column.drop_null()
        times = microseconds_of(column)
        if len(times) and not -TIME_MAX <= times.min() <= times.max() <= TIME_MAX:
            raise ValueError(f"a time more than {TIME_MAX:,} us away from 1970 is in no window: are the times right?")
        if len(times) and times.min() < self._watermark:
            kept = times >= self._watermark
            self.behind_watermark += int(len(times) - np.count_nonzero(kept))
            batch, times = batch.filter(pa.array(kept)), times[kept]
        return batch, times

    def set_timer(self, context: Context) -> None:
        """Have windows of processing time closed when the first of them ends. Later rows open later windows, and sessions only
        grow, so a timer that is set is early enough."""
        if self._by_clock and self._mode != "complete" and TIMER not in context.timers.pending:
            end = self._state.next_end
            if end is not None:
                context.set_timer(end / 1_000_000, TIMER)

    def tick(self, context: Context) -> Iterator[pa.RecordBatch]:
        """Yield the results of the windows of processing time that have ended."""
        self._watermark = microseconds_at(context.now)
        yield from self._close(self._watermark)
        self.set_timer(context)

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Yield the results of the windows that are final by this watermark. In complete mode nothing is final before the end of
        the input, and windows of processing time have no watermark."""
        if self._by_clock:
            return
        self._watermark = builtins.max(self._watermark, watermark)
        if self._mode != "complete":
            yield from self._close(self._watermark)

    def finish(self, end_of_time: int) -> Iterator[pa.RecordBatch]:
        """Yield the results of all windows that are left."""
        self._watermark = end_of_time
        yield from self._close(end_of_time)

    def _close(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Yield the results of the windows that are final by this watermark, or of all of them at the end of time."""
        raise NotImplementedError

    def part(
        self, overlay: Sequence[TentativeRows], keys_at: Sequence[Sequence[int]], watermark: int, after: int
    ) -> Self:
        """Return windows whose changes leave these as they are, for tentative rows and for the windows that end by the watermark
        and not by ``after``. ``keys_at``: by input, the positions of the keys."""
        times, keys = [np.zeros(0, np.int64)], []
        for rows in overlay:
            batch, at = rows.batch, self._times_at[rows.input]
            if batch.column(at).null_count:
                batch = batch.filter(pc.is_valid(batch.column(at)))
            times.append(microseconds_of(batch.column(at)))
            keys.append([batch.column(each) for each in keys_at[rows.input]])
        made = copy.copy(self)
        made._state = self._state.part(np.concatenate(times), keys, watermark, after)
        return made

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        return {**self._counts(), "windows": self._state.snapshot()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._take_counts(snapshot)
        self._state.restore(snapshot["windows"])

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        changed = self._state.changes(share_max)
        return None if changed is None else {**self._counts(), "windows": changed}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        self._take_counts(changes)
        self._state.apply_changes(changes["windows"])

    def _counts(self) -> dict[str, int]:
        return {"watermark": self._watermark, "no_time": self.without_time, "behind": self.behind_watermark}

    def _take_counts(self, state: Mapping[str, Any]) -> None:
        self._watermark, self.without_time, self.behind_watermark = (
            state["watermark"],
            state["no_time"],
            state["behind"],
        )


class _WindowResults(NamedTuple):
    """Results of one window, or of a part of its groups."""

    start: int
    end: int
    rows: int
    #: The keys, then the measures.
    columns: list[pa.Array]


class WindowedGroups(WindowedPartition[PaneState | SessionState]):
    """The groups of one partition of an aggregate with windows."""

    def __init__(
        self,
        window: Window | SessionWindow,
        times_at: Sequence[int],
        output: pa.Schema,
        keys: int,
        measures: Mapping[str, TypedMeasure],
        output_mode: str,
        at_marks: bool = False,
    ) -> None:
        """``times_at``: by input, the position of the times; ``output``: the schema of results, with ``keys`` key columns first;
        ``output_mode``: see ``flux.stage``; ``at_marks``: results come at marks, in canonical order (design: independent)."""
        super().__init__(window, times_at, output_mode)
        self._output, self._keys = output, keys
        #: Microseconds between two marks; 0: results come with each watermark, in the order of slots.
        self._mark_step = mark_step(window) if at_marks else 0
        self._columns = len(window_columns(window))
        key_fields = [output.field(i) for i in range(keys)]
        if isinstance(window, SessionWindow):
            self._state = SessionState(key_fields, measures, window)
        else:
            self._state = PaneState(key_fields, measures, window, output_mode == "update")

    def add(
        self, batch: pa.RecordBatch, context: Context, keys_at: Sequence[int], values_at: Sequence[int | None]
    ) -> list[pa.RecordBatch]:
        """Add the rows of the step that the context tells. Return the changed groups in update mode."""
        batch, times = self.timed(batch, context)
        if not len(times):
            return []
        keys = [batch.column(i) for i in keys_at]
        values = [None if at is None else batch.column(at) for at in values_at]
        changed = self._state.add(times, keys, values, context.step)
        self.set_timer(context)
        return list(self._joined(changed or ()))

    @property
    def joins(self) -> bool:
        """Whether ``add_each`` takes these groups: they are in panes, and give nothing before windows end."""
        return isinstance(self._state, PaneState) and not self._by_clock and self._state.joins

    @classmethod
    def add_each(
        cls,
        groups: Sequence[WindowedGroups],
        contexts: Sequence[Context],
        batch: pa.RecordBatch,
        rows: Sequence[int],
        keys_at: Sequence[int],
        values_at: Sequence[int | None],
    ) -> None:
        """``add`` rows of a step of each of several partitions in one call: ``rows[k]`` rows, at least one, behind those of
        partition k - 1. ``joins`` holds for all. Raises FailedPartition.

        If some rows do not count, or do not fit, each partition gets its own rows in a call of ``add``."""
        column = batch.column(groups[0]._times_at[contexts[0].input])
        watermarks = [each.meet(context.watermark) for each, context in zip(groups, contexts, strict=True)]
        times = None if column.null_count else microseconds_of(column)
        if times is not None and _all_count(times, watermarks, rows):
            states = [each._state for each in groups]
            keys = [batch.column(i) for i in keys_at]
            values = [None if at is None else batch.column(at) for at in values_at]
            add_to_each(states, [context.step for context in contexts], rows, times, keys, values)  # type: ignore[arg-type]
            return
        begin = 0
        for at, (each, context, count) in enumerate(zip(groups, contexts, rows, strict=True)):
            try:
                each.add(batch.slice(begin, count), context, keys_at, values_at)
            except Exception as error:
                raise FailedPartition(at, error) from error
            begin += count

    @property
    def mark(self) -> int:
        """The watermark through which all results have been given. Sessions may be final between two marks, and wait for the
        second; other windows end at marks alone."""
        by_mark = self._mark_step and isinstance(self._state, SessionState)
        if not by_mark or not NEVER < self._watermark < END_OF_TIME:
            return self._watermark
        return self._watermark // self._mark_step * self._mark_step

    def _close(self, watermark: int) -> Iterator[pa.RecordBatch]:
        if not self._mark_step:
            yield from self._ended(watermark)
        elif self._mode == "complete":  # all windows, once
            yield from self._in_order(self._ended(watermark))
        else:
            yield from self._at_marks(watermark)

    def _at_marks(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Yield the results of each mark that the watermark has passed, those of one mark after those of another.

        Marks by which nothing ends are passed over. All rows below a mark are there when a watermark has passed it, so the same
        windows end at it on every copy, however far their watermarks jump."""
        while self._state.may_end(watermark) and (end := self._state.next_end) is not None:
            mark = mark_at(end, self._mark_step)
            if mark > watermark:
                return
            yield from self._in_order(self._ended(mark))

    def _in_order(self, results: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return in_canonical_order(results, self._keys, self._keys + self._columns, RESULT_ROWS_MAX)

    def _ended(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Yield the results of the windows that are final by this watermark, in the order in which they end, and in that of
        slots."""
        if isinstance(self._state, PaneState):
            yield from self._joined(self._state.close(watermark))
            return
        for ended in self._state.close(watermark, RESULT_ROWS_MAX):
            kind = self._output.field(self._keys).type
            times = [times_as(ended.starts, kind), times_as(ended.ends, kind)][: self._columns]
            yield pa.RecordBatch.from_arrays([*ended.keys, *times, *ended.values], schema=self._output)

    def _joined(self, windows: Iterable[WindowGroups]) -> Iterator[pa.RecordBatch]:
        """Yield the results of windows in batches of ``RESULT_ROWS_MAX`` rows at most, several small windows in one: a batch on
        its way costs as much as thousands of rows, and old data that is read fast closes thousands of windows at once."""
        parts: list[_WindowResults] = []
        rows = 0
        for groups in windows:
            for begin in range(0, len(groups.slots), RESULT_ROWS_MAX):
                slots = groups.slots[begin : begin + RESULT_ROWS_MAX]
                if rows + len(slots) > RESULT_ROWS_MAX:
                    yield self._batch(parts)
                    parts, rows = [], 0
                # Computed now: the state of a window may be gone when the next one is there.
                parts.append(_WindowResults(groups.start, groups.end, len(slots), groups.state.results(slots)))
                rows += len(slots)
        if parts:
            yield self._batch(parts)

    def _batch(self, parts: Sequence[_WindowResults]) -> pa.RecordBatch:
        if len(parts) == 1:
            columns = list(parts[0].columns)
        else:
            columns = [pa.concat_arrays(chunks) for chunks in zip(*(part.columns for part in parts), strict=True)]
        rows = [part.rows for part in parts]
        columns[self._keys : self._keys] = [
            times_as(np.repeat(np.array(at, np.int64), rows), self._output.field(self._keys).type)
            for at in ([part.start for part in parts], [part.end for part in parts])
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._output)


def _all_count(times: np.ndarray, watermarks: Sequence[int], rows: Sequence[int]) -> bool:
    """Tell whether all times of several partitions, one behind the other, are fit for windows and not below the watermark of
    theirs."""
    least = int(times.min())
    if not -TIME_MAX <= least <= int(times.max()) <= TIME_MAX:
        return False
    return least >= builtins.max(watermarks) or bool((times >= np.repeat(np.array(watermarks), rows)).all())
