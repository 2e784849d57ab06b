"""Exact tables from keys to dense slots 0, 1, 2, ... in order of first appearance, one per shape of key.

Law: two rows get the same slot if and only if their keys are equal; equal hashes only decide where to look.

    Words    keys of one 64-bit word: the table holds the words themselves
    Rows     keys of several words: the table holds hashes, and the words of each slot are compared
    Strings  keys of bytes: the table holds hashes, and the bytes in the arena are compared

A table is an array of places, a power of two, and holds at most half as many keys; it doubles when full.
Kernels stop at the row for which there is no room and are called again after the table has grown.

What a lookup costs is the memory that it waits for, because a large table is in no cache. So kernels ask for what a few keys
need before they look at any of it, and a place of a table of strings has all that tells where the bytes of its key are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from partitioning import kernels
from partitioning.columns import raw, raw_bytes

#: Keys that a new table has room for: 64 words are 512 bytes, little for a partition with few keys.
KEYS_MIN = 64
#: Slots are int32, and a table has twice as many places.
KEYS_MAX = 1 << 30
ARENA_BYTES_MIN = 1024


def grown(array: np.ndarray, rows: int) -> np.ndarray:
    """A copy with room for ``rows`` rows; the new ones are zero."""
    larger = np.zeros((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


class _Table:
    """What the tables share: places, counts, and doubling."""

    def __init__(self, keys: int = 0) -> None:
        """``keys``: as many have room before it doubles."""
        self.capacity = max(KEYS_MIN, 1 << max(keys - 1, 0).bit_length())
        self.meta = np.array([0, -1, 0, 0], np.int64)  # keys, slot of null, bytes used, bytes wanted
        self._make_places()

    def __len__(self) -> int:
        return int(self.meta[0])

    def _double(self) -> None:
        """New empty places."""
        if self.capacity >= KEYS_MAX:
            raise MemoryError(f"a partition cannot hold more than {KEYS_MAX} keys; use more partitions")
        self.capacity *= 2
        self._make_places()

    def _make_places(self) -> None:
        self.table = np.full(2 * self.capacity, -1, np.int32)
        self.table_words = np.zeros(2 * self.capacity, np.uint64)

    def nulls(self, slots: np.ndarray) -> np.ndarray:
        null: np.ndarray = slots == self.meta[1]
        return null


class Words(_Table):
    """Keys of one word; null has a slot of its own outside of the table."""

    def __init__(self, keys: int = 0) -> None:
        super().__init__(keys)
        self.words = np.zeros(self.capacity, np.uint64)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.table_words.nbytes + self.words.nbytes

    def slots(self, column: pa.Array, out: np.ndarray) -> None:
        source = raw(column)
        done = 0
        while True:
            done = kernels.find_words(*source, done, out, self.table, self.table_words, self.words, self.meta)
            if done == len(out):
                return
            self._more()

    def reserve(self, keys: int) -> None:
        """Make room for so many keys more."""
        while len(self) + keys > self.capacity:
            self._more()

    def places(self) -> tuple[int, int, int, int, int]:
        """Where it is, for ``kernels.find_words_each``, as long as ``capacity`` stays."""
        arrays = self.table, self.table_words, self.words, self.meta
        table, table_words, words, meta = (array.ctypes.data for array in arrays)
        return table, table_words, words, meta, self.capacity

    def _more(self) -> None:
        self._double()
        self.words = grown(self.words, self.capacity)
        kernels.rebuild_words(self.words, self.meta, self.table, self.table_words)


class Rows(_Table):
    """Keys of ``width`` words."""

    def __init__(self, width: int, keys: int = 0) -> None:
        super().__init__(keys)
        self.words = np.zeros((self.capacity, width), np.uint64)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.table_words.nbytes + self.words.nbytes

    def slots(self, rows: np.ndarray, out: np.ndarray) -> None:
        done = 0
        while True:
            done = kernels.find_rows(rows, done, out, self.table, self.table_words, self.words, self.meta)
            if done == len(out):
                return
            old = self.table, self.table_words
            self._double()
            self.words = grown(self.words, self.capacity)
            kernels.rebuild_hashed(*old, self.table, self.table_words)


class Strings(_Table):
    """Keys of bytes, kept one after the other in an arena; null has a slot with no bytes.

    table  uint64[places, 2]: the low half of the hash above the slot + 1, 0 where there is no key; where its bytes begin above
           how many there are in 16 bits, the most of which stands for that many and more"""

    def __init__(self, keys: int = 0) -> None:
        super().__init__(keys)
        self.starts = np.zeros(self.capacity + 1, np.int64)
        self.arena = np.zeros(ARENA_BYTES_MIN, np.uint8)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.starts.nbytes + self.arena.nbytes

    def _make_places(self) -> None:
        self.table = np.zeros((2 * self.capacity, 2), np.uint64)

    def slots(self, column: pa.Array, out: np.ndarray) -> None:
        source = raw_bytes(column)
        done = 0
        while True:
            done = kernels.find_strings(*source, done, out, self.table, self.starts, self.arena, self.meta)
            if done == len(out):
                return
            if len(self) == self.capacity:
                old = self.table
                self._double()
                self.starts = grown(self.starts, self.capacity + 1)
                kernels.rebuild_strings(old, self.table)
            else:
                wanted = int(self.meta[2] + self.meta[3])
                self.arena = grown(self.arena, max(2 * len(self.arena), wanted))

    def strings(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int64 offsets, bytes) of the strings of the slots, one after the other."""
        offsets = np.empty(len(slots) + 1, np.int64)
        kernels.string_ends(self.starts, slots, offsets)
        data = np.empty(int(offsets[-1]), np.uint8)
        kernels.copy_strings(self.starts, self.arena, slots, data)
        return offsets, data
