"""One partition of a source of files: every so many of them, one after the other.

A position is the number of a file, and how many of its rows come before. The numbers are those of the ledger, so a position
means the same in each life.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from flux.dataflow.ahead import Ahead
from flux.dataflow.sources import Positioned
from flux.folders.watching import Watch


class FileRows(Ahead):
    """``start``: a position, or None. Never ends."""

    def __init__(self, watch: Watch, partition: int, partitions: int, start: Any) -> None:
        self._watch, self._partition, self._partitions = watch, partition, partitions
        self._first = (partition, 0) if start is None else (int(start[0]), int(start[1]))
        self._taken = self._first[0]
        super().__init__(self._rows, f"flux-files-{partition}")

    def __next__(self) -> Positioned | None:
        taken = super().__next__()
        if taken is not None:
            self._taken = taken.position[0]
        return taken

    def lag(self) -> tuple[int, int]:
        """In files: of the one that is read, and behind the last that was found for this partition."""
        mine = -(-(self._watch.count - self._partition) // self._partitions)
        at = (self._taken - self._partition) // self._partitions
        return at, max(mine, at)

    def _rows(self) -> Iterator[Positioned | float]:
        number, skip = self._first
        if number >= self._partitions or skip:
            # What an earlier life has read is in the ledger.
            self._watch.known(number if skip else number - self._partitions)
        while True:
            found = self._watch.file(number)
            if found is None:
                yield self._watch.folder.poll_s
                continue
            path, last, at = self._watch.where(found), None, skip
            for batch in self._watch.folder.format.read(self._watch.fs, path, skip):
                if last is not None:
                    yield Positioned(last, [number, at])
                last, at = batch, at + batch.num_rows
            self._watch.check_again(found, path)
            number, skip = number + self._partitions, 0
            yield self._end(last, number)

    def _end(self, last: pa.RecordBatch | None, next_number: int) -> Positioned | float:
        """Behind the last rows the next file begins: nobody has to open this one again."""
        return 0.0 if last is None else Positioned(last, [next_number, 0])
