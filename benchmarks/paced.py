"""Rows that are due at a steady rate, made from their number alone, so that they can be made again and counted.

A source in three parts, each optional: keys that are loaded first, as fast as possible; rows that are due, a batch every
``tick_s``; rows as fast as possible. The driver says by small files where one part ends and the next begins (all processes are
on one machine). A reader that seeks to a batch makes the same rows as the reader before it.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

SCHEMA = pa.schema([("key", pa.int64()), ("due_ns", pa.int64()), ("value", pa.int64())])
VALUES = 1024
#: The rows of this time are due together and make one batch, unless a script says otherwise.
TICK_S = 0.01
#: Rows of one batch while keys are loaded, and of one at full speed.
LOAD_ROWS, FLAT_ROWS = 65_536, 8_192
#: Small batches are made together, about this number of rows at a time, because the work of a source should not be part of the
#: measurement.
MADE_ROWS = 4096
#: Rows that are expected at a time, when they are counted.
COUNTED_ROWS = 1 << 20
START, FLAT, HOLD, END = "start", "flat", "hold", "end"


@dataclass
class Script:
    """Description of the rows of a source.

    ``keys``: from 0 to this, exclusive; ``load``: each of them comes once before everything else; ``zipf``: key k is drawn with
    a probability like 1 / (k + 1) ** zipf, 0: all alike; ``look_s``: time between two looks of a reader for the driver's files,
    0: a look with every batch."""

    rate: float
    partitions: int
    keys: int
    load: bool = False
    zipf: float = 0.0
    tick_s: float = TICK_S
    look_s: float = 0.0
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="flux-bench-"))

    @property
    def per_batch(self) -> int:
        return max(round(self.rate / self.partitions * self.tick_s), 1)

    @property
    def loads(self) -> int:
        """The batches of each partition that load keys."""
        return math.ceil(self.keys / self.partitions / LOAD_ROWS) if self.load else 0

    # ---- the driver's side

    def say(self, what: str, value: float) -> None:
        """Write a file for the readers.

        ``START`` has the time at which rows begin to be due; ``FLAT`` the number of the batch with which full speed begins;
        ``HOLD`` the time until which rows are kept back, due or not; ``END`` the number of the first batch that is not to
        come."""
        new = Path(self.folder, f"{what}.new")
        new.write_text(str(value))
        os.rename(new, Path(self.folder, what))

    def said(self, what: str) -> float | None:
        try:
            return float(Path(self.folder, what).read_text())
        except FileNotFoundError:
            return None

    def batch_due_at(self, at: float) -> int:
        """Return the number of the batch that is due at a time."""
        start = self.said(START)
        assert start is not None
        return self.loads + math.ceil((at - start) / self.tick_s)

    def expected(self) -> np.ndarray:
        """Count the expected rows of each key, once the end has been said."""
        end = self.said(END)
        assert end is not None
        counts = np.full(self.keys, int(self.load), np.int64)
        for partition in range(self.partitions):
            total = self._first_row(int(end), self.said(FLAT))
            for first in range(0, total, COUNTED_ROWS):
                keys = self._draw(partition, first, min(COUNTED_ROWS, total - first))
                counts += np.bincount(keys, minlength=self.keys)
        return counts

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- the workers' side

    def read(self, partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        begins: float | None = None
        flat: float | None = None
        end: float | None = None
        held, looked = 0.0, -math.inf
        made_from, made = 0, _batch(np.empty(0, np.int64), np.empty(0, np.int64))
        for number in itertools.count(start):
            if number < self.loads:
                yield self._load(partition, number)
                continue
            while begins is None:
                begins = self.said(START)
                if begins is None:
                    yield None
            while True:
                now = time.time()
                due = begins + (number - self.loads + 1) * self.tick_s
                paced = flat is None or number < flat
                if now - looked >= self.look_s and (now >= due or not paced):
                    looked = now
                    flat = self.said(FLAT) if flat is None else flat
                    held, end = self.said(HOLD) or 0.0, self.said(END)
                    paced = flat is None or number < flat
                if not paced or now >= max(due, held):
                    break
                yield None
            if end is not None and number >= end:
                return
            if not paced:
                yield _batch(*self._rows(partition, self._first_row(number, flat), FLAT_ROWS))
                continue
            at = (number - made_from) * self.per_batch
            if not 0 <= at < made.num_rows:
                made_from, at = number, 0
                made = self._made(partition, number, max(MADE_ROWS // self.per_batch, 1), begins)
            yield made.slice(at, self.per_batch)

    def _made(self, partition: int, first: int, batches: int, begins: float) -> pa.RecordBatch:
        """Make the rows of ``batches`` batches that are due one after the other."""
        numbers = np.arange(first - self.loads + 1, first - self.loads + 1 + batches)
        due_ns = np.round((begins + numbers * self.tick_s) * 1e9).astype(np.int64)
        keys = self._draw(partition, self._first_row(first, None), batches * self.per_batch)
        return _batch(keys, np.repeat(due_ns, self.per_batch))

    def _rows(self, partition: int, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Make keys, with due times that mean none."""
        return self._draw(partition, first, rows), np.zeros(rows, np.int64)

    def _load(self, partition: int, number: int) -> pa.RecordBatch:
        keys = np.arange(number * LOAD_ROWS, (number + 1) * LOAD_ROWS, dtype=np.int64) * self.partitions + partition
        keys = keys[keys < self.keys]
        return _batch(keys, np.zeros(len(keys), np.int64))

    def _first_row(self, number: int, flat: float | None) -> int:
        """Count the rows drawn before this batch."""
        if flat is None or number <= flat:
            return (number - self.loads) * self.per_batch
        return (int(flat) - self.loads) * self.per_batch + (number - int(flat)) * FLAT_ROWS

    def _draw(self, partition: int, first: int, rows: int) -> np.ndarray:
        number = np.arange(first, first + rows, dtype=np.uint64) * np.uint64(self.partitions) + np.uint64(partition)
        mixed = _mixed(number)
        if not self.zipf:
            return ((mixed >> np.uint64(33)) % np.uint64(self.keys)).astype(np.int64)
        return np.searchsorted(self._cumulated, (mixed >> np.uint64(11)).astype(np.float64) / (1 << 53), "right")

    @property
    def _cumulated(self) -> np.ndarray:
        found: np.ndarray | None = self.__dict__.get("_zipf_cumulated")
        if found is None:
            weights = 1 / np.arange(1, self.keys + 1) ** self.zipf
            found = np.cumsum(weights) / weights.sum()
            found[-1] = 1.0
            self.__dict__["_zipf_cumulated"] = found
        return found


def _mixed(number: np.ndarray) -> np.ndarray:
    """Make 64 bits that look random from a number (the finaliser of splitmix64)."""
    mixed = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _batch(keys: np.ndarray, due_ns: np.ndarray) -> pa.RecordBatch:
    columns = [keys, due_ns, keys % VALUES]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=SCHEMA)
