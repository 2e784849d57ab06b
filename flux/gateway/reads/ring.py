"""The newest results of an output in memory, which all its readers share (design: result-tails)."""

from __future__ import annotations

from collections import deque
from functools import cached_property

from flux.outputs.reader import OutputPiece, OutputRows
from flux.outputs.row_text import json_rows

#: Rows of one entry: an event of that many is written while other readers wait their turn.
ENTRY_ROWS = 1000

#: Positions of a cursor, by partition.
Positions = tuple[int, ...]


class RingEntry:
    """Rows of one partition, with the place of a reader before and behind them."""

    def __init__(self, before: Positions, piece: OutputPiece) -> None:
        self.piece = piece
        self.before = before
        at = piece.partition
        self.after = (*before[:at], piece.first + piece.rows.num_rows, *before[at + 1 :])

    @cached_property
    def json(self) -> bytes:
        """Return the rows as a JSON array. All readers share it."""
        return json_rows(self.piece.rows)

    @property
    def has_json(self) -> bool:
        return "json" in self.__dict__

    def make_json(self) -> None:
        """Make ``json``, in a thread."""
        _ = self.json

    def from_position(self, positions: Positions) -> RingEntry:
        """Return the entry without the rows that a reader has. The reader's place lies within it."""
        skipped = positions[self.piece.partition] - self.piece.first
        return self if skipped == 0 else RingEntry(positions, cut(self.piece, skipped, self.piece.rows.num_rows))

    def up_to(self, rows: int) -> RingEntry:
        """Return the entry with its first rows only."""
        return self if rows >= self.piece.rows.num_rows else RingEntry(self.before, cut(self.piece, 0, rows))

    def has_inside(self, positions: Positions) -> bool:
        """Return whether a reader's place lies within the entry, or at its beginning."""
        at = self.piece.partition
        others = (*positions[:at], self.before[at], *positions[at + 1 :]) == self.before
        return others and self.before[at] <= positions[at] < self.after[at]


def cut(piece: OutputPiece, start: int, end: int) -> OutputPiece:
    return OutputPiece(piece.partition, piece.first + start, piece.rows.slice(start, end - start))


def entries_of(found: OutputRows) -> list[RingEntry]:
    """Return rows that were read as entries of at most ``ENTRY_ROWS`` rows. The first one begins behind missed rows."""
    place = list(found.cursor.positions)
    for piece in reversed(found.pieces):
        place[piece.partition] = piece.first
    made: list[RingEntry] = []
    before = tuple(place)
    for piece in found.pieces:
        for start in range(0, piece.rows.num_rows, ENTRY_ROWS):
            entry = RingEntry(before, cut(piece, start, min(start + ENTRY_ROWS, piece.rows.num_rows)))
            made.append(entry)
            before = entry.after
    return made


class ResultRing:
    """The newest entries of an output, one behind the other. A reader whose place is on their way goes on from memory; any other
    one reads the disk first."""

    def __init__(self, start: Positions, bytes_max: int) -> None:
        #: The place behind the newest row.
        self.end = start
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: deque[RingEntry] = deque()

    def add(self, found: OutputRows) -> None:
        """Append rows that were read. The oldest entries go when there are too many bytes."""
        if found.missed:  # the way has a gap here
            self._entries.clear()
            self._bytes = 0
        for entry in entries_of(found):
            self._entries.append(entry)
            self._bytes += entry.piece.rows.nbytes
        self.end = found.cursor.positions
        while self._bytes > self._bytes_max:
            self._bytes -= self._entries.popleft().piece.rows.nbytes

    def after(self, positions: Positions) -> list[RingEntry] | None:
        """Return the entries behind a reader's place, without the rows that it has; None: its place is not on the way."""
        if positions == self.end:
            return []
        place, found = sum(positions), deque[RingEntry]()
        for entry in reversed(self._entries):
            found.appendleft(entry)
            if sum(entry.before) <= place:  # places grow along the way
                if not entry.has_inside(positions):
                    return None
                found[0] = entry.from_position(positions)
                return list(found)
        return None
