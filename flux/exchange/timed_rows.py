"""Rows of one source partition by their event time: on time or late, for the edges that want one or the other (design:
late-rows).

Rows are judged behind the steps in front of ``withWatermark`` and before those behind it. So a row that such a step drops moves
no watermark, and a row that a later condition drops does. Rows without a time are on time: the stage that groups by time leaves
them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.dataflow.plan import EdgePlan, EventTime, FromSource, Timed
from flux.errors import UserCodeError
from flux.operators.schema import picked
from flux.windows.lateness import NOTHING, Judgement, Lateness
from flux.windows.times import TIME_MAX, microseconds_of
from flux.windows.window import NEVER

#: The rows of an edge, and the index of each among the rows as they were read; None: all of them travel.
EdgeRows = tuple[pa.RecordBatch, np.ndarray | None]


class TimedRows:
    """The judge of the rows of one source partition."""

    def __init__(self, event_time: EventTime, edges: Sequence[EdgePlan], judge: Lateness | None = None) -> None:
        """Begin at the first row. ``judge``: None: each row is judged by those before it."""
        self._event_time = event_time
        self._edges = edges
        self._judge = judge or self._judge_behind(NOTHING)
        #: The time of the newest row that was late.
        self.late_time = NEVER

    def begin(self, watermark: int, *judged: int) -> None:
        """Go on behind rows with this watermark, where ``self.judged`` was ``judged``."""
        newest = NEVER if watermark == NEVER else watermark + self._event_time.delay
        self._judge = self._judge_behind(Judgement(newest, *judged))

    def _judge_behind(self, known: Judgement) -> Lateness:
        time = self._event_time
        return Lateness(time.delay, known, time.max_ahead, time.believed_after)

    @property
    def watermark(self) -> int:
        return self._judge.watermark

    @property
    def newest(self) -> int:
        """The greatest time until now."""
        return self._judge.newest

    @property
    def late(self) -> int:
        """Late rows until now."""
        return self._judge.late

    @property
    def judged_until_now(self) -> tuple[int, int, int]:
        """Late rows until now, doubted ones in succession, and the least time of these, as marks have them."""
        _, late, doubted, doubted_from = self._judge.known
        return late, doubted, doubted_from

    def judged(self, batch: pa.RecordBatch, sizes: Sequence[int], where: Callable[[], str]) -> Judged:
        """Judge rows, which are ``sizes`` batches one behind the other, without going on behind them: ``accept`` does."""
        event_time = self._event_time
        rows, kept = event_time.rows_of(batch, where)
        ends = np.cumsum(sizes)
        if kept is not None:
            ends = np.searchsorted(kept, ends)
        column = rows.column(event_time.at)
        valid = None
        if column.null_count:
            valid = np.flatnonzero(pc.is_valid(column).to_numpy(zero_copy_only=False))
            column = column.drop_null()
            ends = np.searchsorted(valid, ends)
        times = microseconds_of(column)
        sure = self._sure(rows, valid)
        if len(times) and not -TIME_MAX <= times.min() <= times.max() <= TIME_MAX:
            raise UserCodeError(
                f"{where()}: a time more than {TIME_MAX:,} us away from 1970 is in column {event_time.column!r}: are the times "
                "right? Leave such rows out in front of withWatermark"
            )
        judge = copy(self._judge)
        behind: list[Judgement] = []
        late = np.zeros(0, np.int64)
        begin = 0
        found = []
        for end in ends.tolist():
            mask = judge.judge(times[begin:end], None if sure is None else sure[begin:end])
            if mask is not None:
                found.append(begin + np.flatnonzero(mask))
                self.late_time = int(times[found[-1][-1]])
            behind.append(judge.known)
            begin = end
        if found:
            late = np.concatenate(found)
            late = late if valid is None else valid[late]
        return Judged(batch, rows, kept, late, behind, self._edges, where)

    def _sure(self, rows: pa.RecordBatch, valid: np.ndarray | None) -> np.ndarray | None:
        """Return the greatest time of each row with a time that is believed, by its column of sure times; None: there is none. A
        row without a sure time is not believed."""
        at, most = self._event_time.sure, self._event_time.max_ahead
        if at is None or most is None:
            return None
        column = rows.column(at)
        times = np.clip(microseconds_of(column.fill_null(0)), -TIME_MAX, TIME_MAX) + most
        if column.null_count:
            times[pc.is_null(column).to_numpy(zero_copy_only=False)] = NEVER
        found: np.ndarray = times if valid is None else times[valid]
        return found

    def see(self, batch: pa.RecordBatch) -> None:
        """Take the times of rows that do not travel again."""
        self.accept(self.judged(batch, [batch.num_rows], str).behind[0])

    def accept(self, judgement: Judgement) -> None:
        """Go on behind the rows of a judgement."""
        self._judge.known = judgement


class Judged(NamedTuple):
    """Rows that were judged. ``behind``: the judgement behind each of their batches."""

    batch: pa.RecordBatch
    #: The rows behind the first steps, and the index of each in ``batch``; None: all of them.
    rows: pa.RecordBatch
    kept: np.ndarray | None
    #: The late ones of these rows, by index, ascending.
    late: np.ndarray
    behind: list[Judgement]
    edges: Sequence[EdgePlan]
    where: Callable[[], str]

    def of_edges(self) -> list[EdgeRows]:
        """Return the rows of each edge."""
        return [self._of_edge(edge) for edge in self.edges]

    def _of_edge(self, edge: EdgePlan) -> EdgeRows:
        timed = edge.timed if isinstance(edge, FromSource) else Timed.ALL
        if timed is Timed.ALL:
            rows, passed = edge.rows_of(self.batch, self.where)
            return rows, None if passed is None else passed.to_numpy()
        chosen: np.ndarray | None = self.late
        if timed is Timed.ON_TIME:
            chosen = np.delete(np.arange(self.rows.num_rows), self.late) if len(self.late) else None
        rows = picked(self.rows, edge.columns)  # first: rows are copied where some are left out
        rows = rows if chosen is None else rows.take(pa.array(chosen))
        kept = _composed(self.kept, chosen)
        rows, passed = edge.computed(rows, self.where)
        return rows, kept if passed is None else _composed(kept, passed.to_numpy())


def _composed(kept: np.ndarray | None, chosen: np.ndarray | None) -> np.ndarray | None:
    """Return the indices of rows that were chosen of those kept before; None: all."""
    if kept is None or chosen is None:
        return chosen if kept is None else kept
    composed: np.ndarray = kept[chosen]
    return composed


def columns_read(event_time: EventTime | None, edges: Sequence[EdgePlan]) -> list[int] | None:
    """Return the columns of a source's rows that any edge, or the event time, looks at, by position; None: all."""
    wanted: list[tuple[int, ...] | None] = []
    for edge in edges:
        if event_time is None or not isinstance(edge, FromSource) or edge.timed is Timed.ALL:
            wanted.append(edge.columns)
        elif event_time.columns is None and event_time.steps is None:
            # The rows that are judged are those of the source.
            wanted += [edge.columns, event_time.looked_at]
        else:
            wanted.append(event_time.columns)
    return None if None in wanted else sorted({column for columns in wanted for column in columns or ()})
