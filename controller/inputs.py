"""How many rows the query has read: every row once, however often its partition of a source is read (DESIGN 3).

A partition of a source is read again when its Spark task is retried, or by another worker when its reader is lost or
leaves. The count of a partition is the greatest that any reader came to, counted from the first row; the sum of these
never falls. A reader that begins in the middle (sources that seek) counts from what was reported of the rows before its
first batch: at most as many as there were, so that none is counted twice, and fewer by what came between two reports.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

#: Reports kept of each partition, to know how many rows came before a batch. A new reader begins within the log of the
#: one before, which is some seconds of its reports.
MARKS_KEPT = 256


class _Partition:
    def __init__(self) -> None:
        self.rows = 0
        self._batches = [0]  # ascending: so many batches ...
        self._rows = [0]  # ... had at least so many rows
        self._before: dict[tuple[int, int], int] = {}  # reader, its first batch -> rows before that

    def note(self, reader: int, start: int, end: int, rows: int) -> None:
        """``reader`` has read batches ``start`` .. ``end`` - 1 with so many rows."""
        before = self._before.get((reader, start))
        if before is None:
            before = self._before[reader, start] = self._rows[bisect.bisect_right(self._batches, start) - 1]
        absolute = before + rows
        if end > self._batches[-1] and absolute >= self._rows[-1]:
            self._batches.append(end)
            self._rows.append(absolute)
            del self._batches[1:-MARKS_KEPT], self._rows[1:-MARKS_KEPT]
        self.rows = max(self.rows, absolute)


class InputRows:
    def __init__(self) -> None:
        self._partitions: dict[Any, _Partition] = {}

    @property
    def total(self) -> int:
        return sum(partition.rows for partition in self._partitions.values())

    def from_worker(self, worker: int, sources: Iterable[Sequence[int]]) -> None:
        """Of each partition of a source that it reads: source, partition, first batch, batches after that, rows."""
        for source, partition, start, batches, rows in sources:
            self._of((source, partition)).note(worker, start, start + batches, rows)

    def from_ingress(self, edges: Sequence[int], partition: int, rows: int) -> None:
        """An attempt of a Spark task, which reads its partition from the start."""
        counted = self._of((tuple(edges), partition))
        counted.rows = max(counted.rows, rows)

    def _of(self, key: Any) -> _Partition:
        return self._partitions.setdefault(key, _Partition())
