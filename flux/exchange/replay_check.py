"""Evidence of earlier lives of a stream, shown by consumers: the points at which another life may begin, and the rows that it
has to give again (design: marks, same-rows).

Left to others: the points that a consumer keeps (``marks``), and the progress of consumers (``consumer_progress``).
"""

from __future__ import annotations

from typing import NamedTuple

from flux.errors import DataLost, FluxError, NonDeterministicInputError
from flux.exchange.consumer_progress import NOBODY
from flux.exchange.log import LogEntry, Rows
from flux.windows.window import NEVER as NO_TIME
from flux.wire.messages import Mark, end_mark
from partitioning.ids import StreamId


class Shown(NamedTuple):
    """A mark, and the worker that has shown it."""

    mark: Mark
    worker: int


class Beginning(NamedTuple):
    """The beginning of another life of a stream: its first element, the checksum of the stream before it, and the position from
    which its reader makes it. Empty position: from the start, or the reader counts its batches."""

    sequence: int
    checksum: int
    position: bytes = b""
    #: See ``Mark``.
    watermark: int = NO_TIME
    late: int = 0
    doubted: int = 0
    doubted_from: int = NO_TIME

    @classmethod
    def behind(cls, mark: Mark, sequence: int, checksum: int) -> Beginning:
        """Make the beginning with element ``sequence``, behind a mark."""
        judged = mark.late, mark.doubted, mark.doubted_from
        return cls(sequence, checksum, mark.position, mark.watermark, *judged)


#: The beginning of a stream without any known earlier life.
START = Beginning(0, 0)
_NOTHING = Mark(-1, 0)


class Birth(NamedTuple):
    """The first beginning of a stream, for good: in the middle of a source, whose rows before it are for other streams (design:
    edge-of-a-source)."""

    #: The first element. Elements have the numbers that they have in the other streams of the source.
    number: int
    #: The newest point before it from which the source can be read again; sequence -1: the start of the source.
    mark: Mark = _NOTHING

    @classmethod
    def at(cls, beginning: Beginning) -> Birth:
        """Make the birth at which another life of the source begins, too."""
        at = beginning
        mark = Mark(
            at.sequence - 1, at.checksum, -1, at.position, -1, at.watermark, at.late, at.doubted, at.doubted_from
        )
        return cls(at.sequence, mark)


class PriorAttempts:
    """The marks of elements that this life has not made yet."""

    def __init__(self, stream: StreamId) -> None:
        self._stream = stream
        #: By sequence: the elements that consumers have shown, and that this life has not made yet.
        self.expected: dict[int, Shown] = {}
        self.numbered = False  # rows are numbered: only marks with a position are beginnings
        self.own_numbers = False  # numbered rows bring their numbers: any of them is a beginning, and some may be gone
        self.timed = (
            False  # rows are late or not by the rows before: only marks, which know the watermark, are beginnings
        )
        self.front = 0  # numbered rows below this have been given before, as far as consumers have shown
        self.left_out = 0  # comparisons that were not made, because rows are gone since
        #: The first beginning of the stream; None: it began with the source.
        self.birth: Birth | None = None

    def __len__(self) -> int:
        return len(self.expected)

    def expect(self, mark: Mark, worker: int) -> None:
        self.expected[mark.sequence] = Shown(mark, worker)

    def before(self, applied: int) -> Beginning:
        """Return the beginning of a life if the elements through ``applied`` are applied everywhere: behind them if rows bring
        their numbers, else behind the latest point that a worker has shown.

        Rows need not be made again for a comparison: a log may have lost them, and rows that are applied are never needed.
        Counted batches are made again from one batch before, because the last one may be the end of the stream. Elements before
        the birth of the stream are none of it, and the last one of these is no end."""
        if self.birth is not None:
            applied = max(applied, self.birth.number - self.numbered)
        least = applied if self.numbered else applied - 1
        below = (mark for mark in self._marks() if mark.sequence <= least and (mark.position or not self.numbered))
        mark = max(below, default=_NOTHING, key=lambda mark: mark.sequence)
        if self.own_numbers and 0 <= applied < NOBODY:
            # Nothing comes behind the end, which has to have the same number again.
            ends = [at for at, shown in self.expected.items() if at <= applied and shown.mark == end_mark(at)]
            applied = mark.sequence if self.timed else min([applied, *(at - 1 for at in ends)])
            return Beginning.behind(mark, applied + 1, 0)
        return START if mark.sequence < 0 else Beginning.behind(mark, mark.sequence + 1, mark.checksum)

    def _marks(self) -> list[Mark]:
        """Return the marks that workers have shown, and the one before the birth of the stream."""
        shown = [shown.mark for shown in self.expected.values()]
        return shown if self.birth is None else [*shown, self.birth.mark]

    def is_born_at(self, sequence: int) -> bool:
        """Tell whether the stream began with this element: nothing of it is owed from before."""
        return self.birth is not None and self.birth.number == sequence

    @property
    def shown_end(self) -> int:
        """The number behind the last element that a worker has shown and this life has not made."""
        return max(self.expected, default=-1) + 1

    def newest(self) -> Mark | None:
        """Return the last known mark with a position."""
        marks = [mark for mark in self._marks() if mark.position]
        return max(marks, key=lambda mark: mark.sequence, default=None)

    def forget_below(self, sequence: int) -> None:
        self.expected = {at: shown for at, shown in self.expected.items() if at >= sequence}

    def cuts(self, begin: int, end: int) -> list[int]:
        """Return the points at which rows ``begin`` to ``end`` - 1 have to be cut, so that they can be compared with earlier
        lives. If rows are not numbered, the reader makes the same batches again."""
        if not self.expected:
            return []
        points = {point for shown in self.expected.values() for point in (shown.mark.begin, shown.mark.sequence + 1)}
        return sorted(point for point in points if begin < point < end)

    def on_made(self, entry: LogEntry) -> None:
        """Compare a new entry with earlier lives. NonDeterministicInputError: an earlier life has made another one."""
        if self.own_numbers:
            # The last row before a mark may be gone, so that no entry ends there.
            for at in sorted(at for at in self.expected if at <= entry.sequence):
                shown = self.expected.pop(at)
                self.compare(entry, shown.mark, shown.worker)
            return
        made = self.expected.pop(entry.sequence, None)
        if made is not None:
            self.compare(entry, made.mark, made.worker)

    def compare(self, entry: LogEntry, mark: Mark, worker: int) -> None:
        """Compare an entry with a mark at its number, or before it if rows bring their numbers. Numbered rows can be compared
        only if they are cut alike, and at the place of an earlier end there may be nothing else."""
        if self.numbered and mark == end_mark(mark.sequence):
            if isinstance(entry.element, Rows):
                raise self.not_deterministic(mark.sequence, worker)
            return
        alike = (entry.sequence, entry.begin) == (mark.sequence, mark.begin)
        if self.own_numbers and not (alike and self._as_many(entry, mark)):
            self.left_out += 1
        elif alike and (entry.checksum != mark.checksum or self._judged_otherwise(entry, mark)):
            raise self.not_deterministic(mark.sequence, worker)

    def _judged_otherwise(self, entry: LogEntry, mark: Mark) -> bool:
        """Tell whether an earlier life had another watermark behind the same rows. Rows before them that are gone from a log may
        have had later times."""
        return entry.watermark != mark.watermark and not self.own_numbers

    @staticmethod
    def _as_many(entry: LogEntry, mark: Mark) -> bool:
        """Tell whether no row is gone between the first and the last one. More rows than before are other rows."""
        if not isinstance(entry.element, Rows):
            return False
        read = entry.element.read
        return (entry.element.data.batch.num_rows if read < 0 else read) >= mark.rows

    def end_number(self, least: int) -> int:
        """Return the number of the end of a stream whose next number is ``least``.

        Rows that bring their numbers may be gone from the end of their log. Consumers have some of them, or have ordered steps
        with them, and would take an end with such a number for a row that they know. An end that was shown keeps its number."""
        if not self.own_numbers:
            return least
        ends = [at for at, shown in self.expected.items() if at >= least and shown.mark == end_mark(at)]
        return min(ends, default=max(least, self.front))

    def on_end(self, end: int) -> None:
        """Check the end of the stream, below ``end``. NonDeterministicInputError: an earlier life has gone on."""
        if self.front > end:
            raise self.not_deterministic(self.front - 1, -1)
        if self.expected:
            sequence = max(self.expected)
            raise self.not_deterministic(sequence, self.expected[sequence].worker)

    def behind_end(self, sequence: int, worker: int, end: int) -> FluxError:
        """Make the error for a worker that shows an element behind the end of the stream, which is below ``end``."""
        if not self.own_numbers:
            return self.not_deterministic(sequence, worker)
        return DataLost(
            f"partition {self._stream.producer} of the input of edge {self._stream.edge} ended with number {end - 1}, and worker "
            f"{worker} has rows that were read before with numbers up to {sequence}: the log has lost its last rows since. Keep "
            "records for longer than a query may be down after a kill, and start again"
        )

    def not_deterministic(self, sequence: int, worker: int) -> FluxError:
        """Make the error. ``worker`` has shown the evidence; -1: it is not known which one."""
        who = f"worker {worker}" if worker >= 0 else "a worker"
        return NonDeterministicInputError(
            f"partition {self._stream.producer} of the input of edge {self._stream.edge} was read again after a retry and gave "
            f"other rows at or before batch {sequence} than {who} had received: the input is not deterministic. "
            "Sort it within partitions, or write it out (df.checkpoint(), df.write) and read that"
        )
