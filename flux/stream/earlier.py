"""What consumers have shown of earlier lives of a stream: where another life may begin, and what it has to give again (design:
marks, same-rows).

Left to others: which points a consumer keeps (marks), and who has applied what (producer).
"""

from __future__ import annotations

from typing import NamedTuple

from flux.errors import FluxError, NonDeterministicInputError
from flux.stream.elements import Rows
from flux.stream.log import LogEntry
from flux.wire.messages import Mark, end_mark
from partitioning.ids import StreamId


class Shown(NamedTuple):
    """A mark, and the worker that has shown it."""

    mark: Mark
    worker: int


class Beginning(NamedTuple):
    """The first element of another life of a stream, the checksum of the stream before it, and the position from which its
    reader makes it; empty: from the start, or the reader counts its batches."""

    sequence: int
    checksum: int
    position: bytes = b""


#: Where a stream begins if nothing is known of an earlier life.
START = Beginning(0, 0)


class Earlier:
    """Marks of elements that this life has not made yet."""

    def __init__(self, stream: StreamId) -> None:
        self._stream = stream
        self._expected: dict[int, Shown] = {}  # by sequence
        self.numbered = False  # rows: only marks with a position are beginnings
        self.front = 0  # numbered rows below have been given before, as far as consumers have said

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, mark: Mark, worker: int) -> None:
        self._expected[mark.sequence] = Shown(mark, worker)

    def before(self, applied: int) -> Beginning:
        """The latest point before ``applied`` that a worker has shown."""
        known = self._expected.items()
        at = max((at for at, shown in known if at < applied and (shown.mark.position or not self.numbered)), default=-1)
        if at < 0:
            return START
        mark = self._expected[at].mark
        return Beginning(at + 1, mark.checksum, mark.position)

    def newest(self) -> Mark | None:
        """The last one with a position that any worker has shown."""
        marks = [shown.mark for shown in self._expected.values() if shown.mark.position]
        return max(marks, key=lambda mark: mark.sequence, default=None)

    def forget_below(self, sequence: int) -> None:
        self._expected = {at: shown for at, shown in self._expected.items() if at >= sequence}

    def cuts(self, begin: int, end: int) -> list[int]:
        """Where rows ``begin`` to ``end`` - 1 are to be cut, so that they can be compared with what was shown. Of rows that are
        not numbered the reader makes the same batches again."""
        if not self._expected:
            return []
        points = {point for shown in self._expected.values() for point in (shown.mark.begin, shown.mark.sequence + 1)}
        return sorted(point for point in points if begin < point < end)

    def on_made(self, entry: LogEntry) -> None:
        """NonDeterministicInputError if the entry differs from what an earlier life has made."""
        shown = self._expected.pop(entry.sequence, None)
        if shown is not None:
            self.compare(entry, shown.mark, shown.worker)

    def compare(self, entry: LogEntry, mark: Mark, worker: int) -> None:
        """Numbered rows can be compared only where they are cut alike; nothing else may be where their end was."""
        if self.numbered and mark == end_mark(mark.sequence):
            if isinstance(entry.element, Rows):
                raise self.not_deterministic(mark.sequence, worker)
            return
        if (entry.sequence, entry.begin) == (mark.sequence, mark.begin) and entry.checksum != mark.checksum:
            raise self.not_deterministic(mark.sequence, worker)

    def on_end(self, end: int) -> None:
        """The stream ends below ``end``. NonDeterministicInputError if an earlier life has gone on."""
        if self.front > end:
            raise self.not_deterministic(self.front - 1, -1)
        if self._expected:
            sequence = max(self._expected)
            raise self.not_deterministic(sequence, self._expected[sequence].worker)

    def not_deterministic(self, sequence: int, worker: int) -> FluxError:
        """``worker``: that has said so; -1: some."""
        who = f"worker {worker}" if worker >= 0 else "a worker"
        return NonDeterministicInputError(
            f"partition {self._stream.producer} of the input of edge {self._stream.edge} was read again after a retry and gave "
            f"other rows at or before batch {sequence} than {who} had received: the input is not deterministic. "
            "Sort it within partitions, or write it out (df.checkpoint(), df.write) and read that"
        )
