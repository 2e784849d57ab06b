"""One partition of a source of files: every n-th file, one after the other.

A position is the number of a file, and the number of its rows that come before. Files have the numbers of the ledger, so a
position means the same in each life. Rows bring numbers of their own, made of file and row (design: row-numbers). Without them,
the rows behind a file that is gone would be taken for the rows of that file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from flux.connectors.files.errors import BadFile, FileError, FileGone, no_answer
from flux.connectors.files.listing import FoundFile
from flux.connectors.files.watch import CORRUPT, MISSING, EarlyEnd, Watch
from flux.connectors.ledger import LedgerBroken
from flux.dataflow.source import Positioned, RowStart
from flux.dataflow.source_reader import SILENT, Silence
from flux.dataflow.threaded_reader import ThreadedReader

#: Numbers of rows reserved for each file: 17 billion. That leaves room for 268 million files of a partition. Without a key, each
#: 4,096 numbers are for another partition of a stage (design: numbered-rows). The factor is a prime beyond the highest number of
#: partitions, so that small files go to all of them in turn.
FILE_ROWS = 4096 * 4_194_301


class FileRows(ThreadedReader):
    """Reader of the rows of a partition, without end. ``start`` is the first row that is wanted, or None."""

    def __init__(self, watch: Watch, partition: int, partitions: int, start: RowStart | None) -> None:
        self._watch, self._partition, self._partitions = watch, partition, partitions
        self._first = (partition, 0) if start is None else self._place(start)
        #: The newest place that an earlier life has come to; None: there is none.
        newest = None if start is None else start.newest
        self._newest = None if newest is None else (int(newest[0]), int(newest[1]))
        self._reader = ""
        #: Looks at the folder that had no file for this reader, and the number of looks by the last of these.
        self._in_vain = self._looks = 0
        self._taken = self._reached = self._first[0]
        #: The newest place behind rows that were put out.
        self._given = self._first
        #: The file that is read.
        self._found: FoundFile | None = None
        #: File and row at which an error came last while the folder could be read.
        self._doubted = (-1, -1)
        #: Time since which the folder cannot be read; None: it can.
        self._unanswered_at: float | None = None
        super().__init__(self._rows, f"flux-files-{partition}")

    def _place(self, start: RowStart) -> tuple[int, int]:
        """Return file and row of the first row that is wanted. The position behind the rows before it may be further on: behind
        the last row of a file the next file begins, and the file before need not exist any more."""
        turn, row = divmod(start.number, FILE_ROWS)
        place = self._partition + turn * self._partitions, row
        return place if start.position is None else max(place, (int(start.position[0]), int(start.position[1])))

    def _positioned(self, batch: pa.RecordBatch, number: int, end: int, position: tuple[int, int]) -> Positioned:
        """Return rows of a file before its row ``end``, with the position behind them."""
        if end > FILE_ROWS:
            raise FileError(f"{self._watch.known(number).name} has more than {FILE_ROWS:,} rows: split it")
        self._given = position
        first = (number - self._partition) // self._partitions * FILE_ROWS
        return Positioned(batch, [*position], np.arange(first + end - batch.num_rows, first + end, dtype=np.int64))

    def next(self) -> Positioned | Silence | None:
        taken = super().next()
        if isinstance(taken, Positioned):
            self._taken = taken.position[0]
        return SILENT if taken is None and self._unanswered_at is not None else taken

    def _asked_in_vain_since(self) -> float | None:
        return super()._asked_in_vain_since() if self._unanswered_at is None else self._unanswered_at

    def pauses(self) -> int:
        """Return how often a look at the folder has found no file for this partition. All partitions share a look, and looks at a
        slow store are rare: to ask again before the next one is no news."""
        return self._in_vain

    def lag(self) -> tuple[int, int]:
        """Return two numbers of files: the file that is read, and the one behind the last existing file of this partition."""
        mine = -(-(self._watch.count - self._partition) // self._partitions)
        # Files without rows, and those that are left out, give nothing to take. ``_reached`` is read first: all rows before it
        # are ready by then, or taken.
        reached = self._reached
        file = self._taken if self._ready else max(self._taken, reached)
        at = (file - self._partition) // self._partitions
        return at, max(mine, at)

    def _rows(self) -> Iterator[Positioned | float]:
        """Yield the rows. A folder that cannot be read is asked again, if results go on without it. Reading goes on behind the
        rows that were put out."""
        while True:
            try:
                yield from self._rows_from(*self._given)
            except (FileError, LedgerBroken) as error:
                about = self._folder_error(error)
                if about is None:
                    raise
                self._unanswered_at = self._unanswered_at or time.monotonic()
                self._silence = about.summary
            yield self._watch.folder.poll_s

    def _folder_error(self, error: BaseException) -> FileError | None:
        """Return the error about a folder that is to be waited for; None: the error is of another kind, and ends the query."""
        return self._watch.unanswered(error, self._found) if self._watch.folder.may_be_silent else None

    def _doubt(self, error: FileError, number: int, row: int) -> FileError | None:
        """Return an error about the folder in place of the first one about a row of a file, where results go on without the
        folder: it may have been gone for a moment. None: the file was read again and fails at the same row, so that the error
        is about the file."""
        if not self._watch.folder.may_be_silent or not isinstance(error, BadFile) or self._doubted == (number, row):
            return None
        self._doubted = number, row
        return no_answer(
            f"{self._watch.root}/{self._watch.known(number).name} could not be read at row {row} a moment ago"
        )

    def _rows_from(self, number: int, skip: int) -> Iterator[Positioned | float]:
        if number >= self._partitions or skip:
            # The ledger has the files that an earlier life has read.
            self._watch.known(number if skip else number - self._partitions)
        while True:
            self._reached = number
            found, looks = self._watch.file(number)
            self._unanswered_at = None
            if found is None:
                self._in_vain, self._looks = self._in_vain + (looks > self._looks), looks
                yield self._watch.folder.poll_s
                continue
            # Not before there is a file: the entry would bring back a folder that is gone.
            self._reader = self._reader or self._watch.enter(self._partition)
            self._found = found
            yield from self._file(found, number, skip)
            number, skip = number + self._partitions, 0

    def _file(self, found: FoundFile, number: int, skip: int) -> Iterator[Positioned | float]:
        """Yield the rows of a file behind the first ``skip``, as far as they count in all lives of the query."""
        ended, last, at = self._watch.ended(number), None, skip
        try:
            for batch in () if ended is not None and ended.row <= skip else self._batches(found, skip):
                rows = batch.num_rows if ended is None else min(batch.num_rows, ended.row - at)
                if last is not None:
                    yield self._positioned(last, number, at, (number, at))
                last, at = batch.slice(0, rows), at + rows
                if ended is not None and at == ended.row:
                    break
        except (BadFile, FileGone) as error:
            if (about := self._folder_error(error) or self._doubt(error, number, at)) is not None:
                raise about from error  # rows of a folder that cannot be read are not gone
            if ended is not None or not self._ignores(error):
                raise
            if self._newest is not None and self._newest > (number, at):
                raise self._needed(error, number, at) from error
            ended = EarlyEnd(at, CORRUPT if isinstance(error, BadFile) else MISSING, error.defect or error.summary)
            self._watch.end(number, ended, self._partition, self._reader)
        # Behind the last rows the next file begins: this file need not be opened again.
        yield 0.0 if last is None else self._positioned(last, number, at, (number + self._partitions, 0))

    def _needed(self, error: FileError, number: int, row: int) -> FileError:
        """Return the error about a file whose rest cannot be left out. An earlier life has given rows behind it, so some replicas
        may have applied rows that others would never get."""
        option = "ignoreCorruptFiles" if isinstance(error, BadFile) else "ignoreMissingFiles"
        return type(error)(
            f"{self._watch.root}/{self._watch.known(number).name} is needed from row {row} on, in spite of {option}: "
            f"{error.defect or error.summary}. The query has read on before, and only a part of it has these rows. Put the file "
            "back as it was, or start with another checkpointLocation"
        )

    def _batches(self, found: FoundFile, skip: int) -> Iterator[pa.RecordBatch]:
        path = self._watch.where(found)
        yield from self._watch.folder.format.read(self._watch.fs, path, skip)
        self._watch.check_again(found, path)

    def _ignores(self, error: FileError) -> bool:
        folder = self._watch.folder
        return folder.ignore_corrupt if isinstance(error, BadFile) else folder.ignore_missing
