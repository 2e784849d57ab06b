"""A reader of an output by cursor, in any process that reaches the location (design: output-cursor).

Law: a reader that goes on from the cursor of its last answer gets each row of a partition once and in order, or is told the
positions of those that retention has removed. The order between partitions is free.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pyarrow as pa

from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import open_log
from flux.eventlog.records import rows_of
from flux.outputs.catalogue import OutputCatalogue, OutputDefinition
from flux.outputs.cursor import NEWEST, OLDEST, OutputCursor, cursor_of
from flux.vault.location import Place, there

#: Seconds until an output that had nothing new is asked again: at first, and at most. An object store has a request each time.
ASK_S, ASK_MAX_S, ASK_REMOTE_S = 0.004, 0.032, 0.2
#: Looks at the segments of a log while its owner removes some.
_LOOKS_MAX = 10


class MissedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows that a reader cannot get any more, because they were removed after ``retain``."""

    partition: int
    #: The first of their positions, and the position behind the last: that of the first row that is there.
    first: int
    next: int


class OutputPiece(NamedTuple):
    """Rows of one partition that follow each other."""

    partition: int
    #: The position of the first row.
    first: int
    rows: pa.RecordBatch


class OutputRows(NamedTuple):
    """An answer to a reader."""

    pieces: list[OutputPiece]
    #: The place behind these rows.
    cursor: OutputCursor
    missed: list[MissedRows]

    @property
    def batches(self) -> list[pa.RecordBatch]:
        return [piece.rows for piece in self.pieces]


class PartitionScan:
    """The rows of one partition from a position on."""

    def __init__(self, reader: LogReader, partition: int, columns: pa.Schema) -> None:
        self._reader, self._partition, self._columns = reader, partition, columns
        #: The position of the row that comes next.
        self.next = reader.next
        self._pieces: deque[OutputPiece] = deque()

    def read(self, missed: list[MissedRows]) -> bool:
        """Read ahead from the disk, unless there are rows. Return whether there are some now; add those that are gone to
        ``missed``."""
        if self._pieces:
            return True
        records = self._reader.read()
        first = records[0].stored.first if records else self._reader.next
        if first > self.next:
            missed.append(MissedRows(self._partition, self.next, first))
            self.next = first
        for record in records:
            self._pieces.append(OutputPiece(self._partition, record.stored.first, rows_of(record, self._columns)))
        if records and self.next > first:  # the cursor lies within the first record
            self._pieces[0] = self._behind(self._pieces[0], self.next - first)
        return bool(self._pieces)

    def take(self, most: int) -> OutputPiece:
        """Return the next rows that were read, up to ``most``."""
        piece = self._pieces.popleft()
        if piece.rows.num_rows > most:
            self._pieces.appendleft(self._behind(piece, most))
            piece = piece._replace(rows=piece.rows.slice(0, most))
        self.next = piece.first + piece.rows.num_rows
        return piece

    @staticmethod
    def _behind(piece: OutputPiece, rows: int) -> OutputPiece:
        return OutputPiece(piece.partition, piece.first + rows, piece.rows.slice(rows))

    def close(self) -> None:
        self._reader.close()


class OutputScan:
    """One reader on its way through an output, with its files open."""

    def __init__(self, place: Place, of: OutputDefinition, positions: tuple[int, ...]) -> None:
        self.of = of
        catalogue, columns = OutputCatalogue(place), of.columns()
        self._parts: list[PartitionScan] = []
        for partition, start in enumerate(positions):
            where = f"partition {partition} of output {of.name!r}"
            reader = LogReader(open_log(catalogue.log_place(of, partition)), where, start)
            self._parts.append(PartitionScan(reader, partition, columns))

    @property
    def cursor(self) -> OutputCursor:
        """Return the place behind all rows that were given."""
        return OutputCursor(self.of.id, tuple(part.next for part in self._parts))

    def rows(self, most: int, bytes_most: int) -> OutputRows:
        """Return the next rows, up to ``most``, and about as many bytes at most; none if there are none now."""
        pieces: list[OutputPiece] = []
        missed: list[MissedRows] = []
        for part in self._parts:
            while most > 0 and bytes_most > 0 and part.read(missed):
                piece = part.take(most)
                pieces.append(piece)
                most, bytes_most = most - piece.rows.num_rows, bytes_most - piece.rows.nbytes
        return OutputRows(pieces, self.cursor, missed)

    def rows_before(self, positions: tuple[int, ...]) -> tuple[list[OutputPiece], list[MissedRows]]:
        """Return all rows below some positions, which the output has reached, and those of them that are gone."""
        pieces: list[OutputPiece] = []
        missed: list[MissedRows] = []
        for part, end in zip(self._parts, positions, strict=True):
            while part.next < end and part.read(missed) and part.next < end:
                pieces.append(part.take(end - part.next))
        return pieces, missed

    def close(self) -> None:
        for part in self._parts:
            part.close()


def scan_from(place: Place, of: OutputDefinition, after: str) -> OutputScan:
    """Begin behind a cursor, or at "oldest" or "newest". UsageError and CursorGone: the cursor is not of this output."""
    if after == OLDEST:
        return OutputScan(place, of, _starts(place, of, LogReader.first))
    if after == NEWEST:
        scan = OutputScan(place, of, near_end(place, of))
        while scan.rows(1 << 30, 1 << 30).pieces:
            pass
        return scan
    return OutputScan(place, of, cursor_of(after, of.id, of.partitions).positions)


def start_of(place: Place, of: OutputDefinition, after: str) -> tuple[int, ...]:
    """Return the positions behind which a reader begins: at a cursor, "oldest" or "newest". Errors are those of ``scan_from``."""
    if after not in (OLDEST, NEWEST):
        return cursor_of(after, of.id, of.partitions).positions
    scan = scan_from(place, of, after)
    try:
        return scan.cursor.positions
    finally:
        scan.close()


def rows_between(
    place: Place, of: OutputDefinition, first: tuple[int, ...], behind: tuple[int, ...]
) -> tuple[list[OutputPiece], list[MissedRows]]:
    """Return the rows from some positions to before others, by partition, and those of them that are gone."""
    scan = OutputScan(place, of, first)
    try:
        return scan.rows_before(behind)
    finally:
        scan.close()


def near_end(place: Place, of: OutputDefinition) -> tuple[int, ...]:
    """Return positions near the end of an output, those of the newest segments."""
    return _starts(place, of, LogReader.newest)


def _starts(place: Place, of: OutputDefinition, start: Callable[[LogReader], int]) -> tuple[int, ...]:
    catalogue = OutputCatalogue(place)
    found: list[int] = []
    for partition in range(of.partitions):
        reader = LogReader(open_log(catalogue.log_place(of, partition)), f"partition {partition} of output {of.name!r}")
        try:
            found.append(_patiently(reader, start))
        finally:
            reader.close()
    return tuple(found)


def _patiently(reader: LogReader, start: Callable[[LogReader], int]) -> int:
    for _ in range(_LOOKS_MAX):
        with contextlib.suppress(FileNotFoundError):  # its owner has removed a segment meanwhile
            return start(reader)
    return start(reader)


class OutputReader:
    """The results of a query, read by a program that reaches the location.

    location  a directory or URI, or a place that was opened
    name      the name of the query. NoSuchOutput: it has no output there"""

    def __init__(self, location: str | Place, name: str) -> None:
        place = there(location) if isinstance(location, str) else location
        self._place, self._of = place, OutputCatalogue(place).get(name)
        self._scan: OutputScan | None = None

    def after(self, cursor: str = OLDEST, max_rows: int = 10_000, wait: float = 0.0) -> OutputRows:
        """Return rows behind a cursor, as record batches, with the next cursor and the rows that are gone.

        cursor    the text of a cursor of an earlier answer, "oldest", or "newest": rows that come from now on
        max_rows  the most rows
        wait      seconds to wait for the first one

        UsageError, CursorGone: the cursor is not of this output."""
        if self._scan is None or str(self._scan.cursor) != cursor:
            self.close()
            self._scan = scan_from(self._place, self._of, cursor)
        end, least = time.monotonic() + wait, ASK_S if self._place.flush_s == 0 else ASK_REMOTE_S
        pause = least
        while True:
            found = self._scan.rows(max_rows, 1 << 40)
            left = end - time.monotonic()
            if found.pieces or found.missed or left <= 0:
                return found
            time.sleep(min(pause, left))
            pause = max(least, min(2 * pause, ASK_MAX_S))

    def close(self) -> None:
        """Release files."""
        if self._scan is not None:
            self._scan.close()
            self._scan = None
