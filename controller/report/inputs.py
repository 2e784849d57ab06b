"""Counts of the rows that the query has read: every row once, however often its partition of a source is read (design:
rows-once).

A partition of a source is read again when its Spark task is retried, or by another worker when its reader is lost or
leaves. The count of a partition is the highest count of any of its readers, from the first row on; the sum of these
counts never falls. A reader that begins in the middle (a source that seeks) continues the reported count of the rows
before its first batch. That count is never too high, so no row is counted twice; it may miss rows that came between two
reports. Progress reports make up for these by the counts of the stages behind a source (``progress``).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flux.dataflow.plan import SourcePlan

#: Reports kept of each partition, to know the number of rows before a batch. A new reader begins at a batch that was
#: still in the log of the reader before, which is some seconds of its reports.
MARKS_KEPT = 256


class PartitionReading(NamedTuple):
    """One reading of a partition: the worker that reads, and its first batch."""

    reader: int
    start: int


class _Partition:
    def __init__(self) -> None:
        self.rows = 0
        self._batches = [0]  # numbers of batches, ascending
        self._rows = [0]  # the least number of rows before each of these batches
        self._before: dict[PartitionReading, int] = {}  # rows before the first batch of the reading

    def note(self, reader: int, start: int, end: int, rows: int) -> None:
        """Note that ``reader`` has read the batches ``start`` to ``end`` - 1, with ``rows`` rows in all."""
        reading = PartitionReading(reader, start)
        before = self._before.get(reading)
        if before is None:
            before = self._before[reading] = self._rows[bisect.bisect_right(self._batches, start) - 1]
        absolute = before + rows
        if end > self._batches[-1] and absolute >= self._rows[-1]:
            self._batches.append(end)
            self._rows.append(absolute)
            del self._batches[1:-MARKS_KEPT], self._rows[1:-MARKS_KEPT]
        self.rows = max(self.rows, absolute)


class InputRows:
    """The counts of all partitions of all sources."""

    def __init__(self) -> None:
        self._partitions: dict[Any, _Partition] = {}
        #: By source, the partitions that workers have read to their ends.
        self._ended: dict[int, set[int]] = {}

    @property
    def total(self) -> int:
        return sum(partition.rows for partition in self._partitions.values())

    def of_sources(self) -> dict[int, int]:
        """Return the rows of each source whose readers are in the workers."""
        found: dict[int, int] = {}
        for (source, _), partition in self._partitions.items():
            if isinstance(source, int):
                found[source] = found.get(source, 0) + partition.rows
        return found

    def from_worker(self, worker: int, sources: Iterable[Sequence[int]]) -> None:
        """Take a worker's report on each partition that it reads: source, partition, first element, number of elements, rows."""
        for source, partition, start, batches, rows in sources:
            self._of((source, partition)).note(worker, start, start + batches, rows)

    def note_ends(self, pauses: Iterable[Sequence[int]]) -> None:
        """Take a worker's report on the pauses of each partition that it reads, which says whether the partition has ended."""
        for source, partition, _, ended in pauses:
            if ended:
                self._ended.setdefault(source, set()).add(partition)

    def have_ended(self, sources: Iterable[SourcePlan]) -> bool:
        """Tell whether all partitions that workers read have been reported as ended. Ingress tasks need no such report: the
        stages hear of the end of a Spark job after the goodbyes of its tasks, which come with their last counts."""
        return all(len(self._ended.get(source.id, ())) >= source.worker_partitions for source in sources)

    def from_ingress(self, edges: Sequence[int], partition: int, rows: int) -> None:
        """Take the report of an attempt of a Spark task, which reads its partition from the start."""
        counted = self._of((tuple(edges), partition))
        counted.rows = max(counted.rows, rows)

    def _of(self, key: Any) -> _Partition:
        return self._partitions.setdefault(key, _Partition())
