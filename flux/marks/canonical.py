"""Results of one mark, in an order that follows from the rows alone (design: canonical-order).

Copies of a partition without a common order of steps have got the same rows below a mark, each in another order. Their groups are
the same, but lie in other slots. So results are sorted, and those of one mark share no batch with those of another: then batches
have the same numbers on every copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from flux.windows.window import SessionWindow, Window
from partitioning.clustering import hash_columns

#: Microseconds between two marks where windows may end at any time, as sessions do. A result waits for the next mark.
MARK_US = 100_000


def mark_step(window: Window | SessionWindow) -> int:
    """Return the microseconds of event time between two marks of windows. Windows of one size all end at marks."""
    if isinstance(window, Window):
        return window.grid
    return min(max(window.gap // 4, 1), MARK_US) if window.gap else MARK_US


def mark_at(end: int, step: int) -> int:
    """Return the first mark at this time or after it."""
    return -(-end // step) * step


def in_canonical_order(
    results: Iterable[pa.RecordBatch], keys: int, columns: int, rows_max: int
) -> Iterator[pa.RecordBatch]:
    """Yield all results of one mark, sorted by the hash of their ``keys`` key columns, then by these and the columns behind them,
    ``columns`` in all, in batches of ``rows_max`` rows at most. No two results are equal in these columns."""
    batches = [batch for batch in results if batch.num_rows]
    if not batches:
        return
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    by = [*([pa.array(hash_columns(whole.columns[:keys]))] if keys else []), *whole.columns[:columns]]
    if by:
        names = [str(number) for number in range(len(by))]
        order = pc.sort_indices(
            pa.RecordBatch.from_arrays(by, names=names), sort_keys=[(name, "ascending") for name in names]
        )
        whole = whole.take(order)
    whole = _without_spare_bitmaps(whole)
    for begin in range(0, whole.num_rows, rows_max):
        yield whole.slice(begin, rows_max)


def _without_spare_bitmaps(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop bitmaps of validity without a null: whether there is one may differ from copy to copy, and it counts as bytes where
    batches are cut."""
    plain: Sequence[pa.Array] = [
        column
        if column.null_count or column.buffers()[0] is None
        else pa.Array.from_buffers(column.type, len(column), [None, *column.buffers()[1:]], 0, column.offset)
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(plain, schema=batch.schema)
