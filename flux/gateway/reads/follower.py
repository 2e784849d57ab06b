"""One reader's way through an output: from the disk, then from memory (design: result-tails)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor
from typing import NamedTuple

from flux.gateway.reads.ring import Positions, RingEntry, entries_of
from flux.gateway.reads.tails import OutputTail
from flux.gateway.reads.tentative_tail import TentativeFollower
from flux.outputs.cursor import OutputCursor
from flux.outputs.reader import MissedRows, OutputScan

#: Bytes of the rows of one answer, about: a reader that does not read costs no more memory.
BYTES_MAX = 8 << 20


class FoundRows(NamedTuple):
    """Rows for a reader, behind those that it has missed."""

    entries: list[RingEntry]
    missed: list[MissedRows]


class ResultFollower:
    """A reader of one output, in a loop. ``positions`` is its place behind the rows that it was given."""

    def __init__(
        self, tail: OutputTail, positions: Positions, pool: Executor, tentative: TentativeFollower | None = None
    ) -> None:
        self.positions = positions
        #: The way of the same reader through tentative rows; None: it has asked for stable ones alone.
        self.tentative = tentative
        self._tail = tail
        self._pool = pool
        #: The way through the disk, unless a thread reads there: a reader may leave meanwhile.
        self._scan: OutputScan | None = None
        self._guard = threading.Lock()
        self._left = False

    @property
    def cursor(self) -> OutputCursor:
        return OutputCursor(self._tail.of.id, self.positions)

    def cursor_at(self, positions: Positions) -> OutputCursor:
        return OutputCursor(self._tail.of.id, positions)

    async def read(self, rows_max: int, wait_s: float) -> FoundRows:
        """Return the next rows, up to ``rows_max``; none if none have come for ``wait_s`` seconds, or if there is tentative news.

        NoSuchOutput: the output was removed; FluxError, OSError: it cannot be read."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        end = loop.time() + wait_s
        with self._tail.waking(changed):
            while True:
                changed.clear()
                if self._tail.error is not None:
                    raise self._tail.error
                entries = self._tail.after(self.positions)
                if entries:
                    return self._taken(entries, rows_max)
                if entries is None:
                    found = await loop.run_in_executor(self._pool, self._from_disk, rows_max)
                    if found.entries or found.missed:
                        return found
                if self.tentative is not None and self.tentative.has_news(self.positions):
                    return FoundRows([], [])
                try:
                    async with asyncio.timeout_at(end):
                        await changed.wait()
                except TimeoutError:
                    return FoundRows([], [])

    def _taken(self, entries: list[RingEntry], rows_max: int) -> FoundRows:
        self._give_back()
        taken: list[RingEntry] = []
        left = BYTES_MAX
        for entry in entries:
            taken.append(entry.up_to(rows_max))
            rows_max, left = rows_max - entry.piece.rows.num_rows, left - entry.piece.rows.nbytes
            if rows_max <= 0 or left <= 0:
                break
        self.positions = taken[-1].after
        return FoundRows(taken, [])

    def _from_disk(self, rows_max: int) -> FoundRows:
        with self._guard:
            scan, self._scan = self._scan, None
        scan = scan or self._tail.taken_scan(self.positions)
        try:
            found = scan.rows(rows_max, BYTES_MAX)
        except BaseException:
            scan.close()
            raise
        with self._guard:
            if self._left:
                scan.close()
            else:
                self._scan, self.positions = scan, found.cursor.positions
        if self.tentative is not None and self._tail.tentative is not None:
            self._tail.tentative.poll()  # the disk may be ahead of the tail
        return FoundRows(entries_of(found), found.missed)

    def close(self) -> None:
        """Leave: the next request that goes on here gets the way through the disk."""
        with self._guard:
            self._left = True
        self._give_back()

    def _give_back(self) -> None:
        with self._guard:
            scan, self._scan = self._scan, None
        if scan is not None:
            self._tail.give_back(scan)
