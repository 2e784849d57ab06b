"""Laws of the files of a soak run, at every moment and at its end.

A visible file stays, with the same rows. A file partition has no hole. No row is there twice, and the detector has counted, for
each row, the right number of rows before it. At the end, the rows are those of the source, read without a query.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_NAME = re.compile(r"part-(\d+)-([\w-]+)-(\d+)-(\d+)-(\d+)\.parquet")


class Deviation(AssertionError):
    """Something that must not be."""


class File:
    """One file of the query. ``state``: its state in the file system, which shows whether it was written again."""

    def __init__(self, path: Path) -> None:
        found = _NAME.fullmatch(path.name)
        if found is None:
            raise Deviation(f"{path.name} is no name of a file of the query")
        self.path = path
        self.partition, self.query, self.first, self.next = int(found[1]), found[2], int(found[4]), int(found[5])
        self.state = self.state_now()
        self.checksum, _ = self.read()

    def state_now(self) -> tuple[int, ...]:
        try:
            about = self.path.stat()
        except FileNotFoundError:
            raise Deviation(f"{self.path.name} was there and has gone") from None
        return about.st_ino, about.st_size, about.st_mtime_ns

    def read(self) -> tuple[int, pa.Table]:
        try:
            table = pq.ParquetFile(self.path).read()
        except (OSError, pa.ArrowException) as error:
            raise Deviation(f"{self.path.name} cannot be read: {error}") from error
        checksum = 0
        for column in ("key", "sequence", "seen"):
            checksum = zlib.crc32(np.ascontiguousarray(table[column].to_numpy()), checksum)
        return checksum, table

    def check_same(self) -> None:
        checksum, _ = self.read()
        if checksum != self.checksum:
            raise Deviation(f"{self.path.name} has other rows than before")


class Files:
    """The files of a folder, looked at again and again. ``keys``: the number of keys, which begin at zero. ``known``: files by
    name. ``history``: times, and the number of rows that had been seen by then."""

    def __init__(self, folder: Path, keys: int) -> None:
        self._folder = folder
        self.known: dict[str, File] = {}
        self._next: dict[int, int] = {}  # position behind the files of each file partition
        self._last: dict[int, np.ndarray] = {}  # newest sequence number of each key, by file partition
        self._seen = np.zeros((keys, 1024), bool)
        self._queries: set[str] = set()
        self.rows = 0
        self.history: list[tuple[float, int]] = []

    @property
    def newest_of_all(self) -> int:
        """The least of the keys' newest sequence numbers; -1 as long as a key has no row."""
        return int(np.max(list(self._last.values()), axis=0).min()) if self._last else -1

    def look(self) -> None:
        for file in self.known.values():
            if (state := file.state_now()) != file.state:
                file.check_same()
                file.state = state
        new = [path for path in self._folder.glob("part-*") if path.name not in self.known]
        for file in sorted(map(File, new), key=lambda file: (file.partition, file.first)):
            self._take(file)
        self.history.append((time.time(), self.rows))

    def check_through(self, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        """Check that the files have all rows of these batches, and no others."""
        self.look()
        for file in self.known.values():
            file.check_same()
        there = np.argwhere(self._seen)  # by key, then by sequence number
        source = pa.Table.from_batches(batches())
        expected = np.stack([source["key"].to_numpy(), source["sequence"].to_numpy()], axis=1)
        expected = expected[np.lexsort(expected.T[::-1])]
        if not np.array_equal(there, expected):
            missing = set(map(tuple, expected.tolist())) - set(map(tuple, there.tolist()))
            other = set(map(tuple, there.tolist())) - set(map(tuple, expected.tolist()))
            raise Deviation(
                f"{len(missing):,} rows are missing {sorted(missing)[:5]}, {len(other):,} are others {sorted(other)[:5]}"
            )

    def check_read(self, began: float, rows: int, distinct: int, wrong: int | None) -> None:
        """Check the rows that another reader, which began at this time, has read of the folder."""
        before = max((seen for at, seen in self.history if at < began), default=0)
        if rows < before or rows != distinct or wrong:
            raise Deviation(
                f"Spark reads {rows:,} rows, {distinct:,} of them distinct, {wrong} wrong; {before:,} were there before"
            )

    def _take(self, file: File) -> None:
        self._queries.add(file.query)
        if len(self._queries) > 1:
            raise Deviation(f"files of several queries: {', '.join(sorted(self._queries))}")
        if file.first != (expected := self._next.get(file.partition, 0)):
            raise Deviation(f"{file.path.name} begins with position {file.first}, expected {expected}")
        _, table = file.read()
        keys, sequences, seen = (table[name].to_numpy() for name in ("key", "sequence", "seen"))
        if np.any(wrong := seen != sequences):
            at = int(np.argmax(wrong))
            raise Deviation(
                f"{file.path.name}: {int(wrong.sum()):,} rows with another count than expected, the first: key {keys[at]}, "
                f"sequence {sequences[at]}, {seen[at]} before it"
            )
        self._check_order(file, keys, sequences)
        while sequences.max(initial=0) >= self._seen.shape[1]:
            self._seen = np.pad(self._seen, ((0, 0), (0, self._seen.shape[1])))
        if np.any(twice := self._seen[keys, sequences]):
            at = int(np.argmax(twice))
            raise Deviation(
                f"{file.path.name}: {int(twice.sum()):,} rows again, the first: key {keys[at]}, sequence {sequences[at]}"
            )
        self._seen[keys, sequences] = True
        self.known[file.path.name] = file
        self._next[file.partition] = file.next
        self.rows += len(keys)

    def _check_order(self, file: File, keys: np.ndarray, sequences: np.ndarray) -> None:
        """Within the file, and behind the files of its partition before it."""
        last = self._last.setdefault(file.partition, np.full(len(self._seen), -1))
        order = np.argsort(keys, kind="stable")
        keys, sequences = keys[order], sequences[order]
        same = np.concatenate([[False], keys[1:] == keys[:-1]])
        before = np.where(same, np.concatenate([[0], sequences[:-1]]), last[keys])
        if np.any(wrong := sequences <= before):
            at = int(np.argmax(wrong))
            raise Deviation(f"{file.path.name}: key {keys[at]} has sequence {sequences[at]} after {before[at]}")
        np.maximum.at(last, keys, sequences)
