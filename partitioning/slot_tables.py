"""Hash tables from keys to dense slots 0, 1, 2, ... in order of first appearance, one per shape of key.

Law: two rows get the same slot if and only if their keys are equal. Hashes only decide where to look.

    WordTable     keys of one 64-bit word: the table holds the words themselves
    WideKeyTable  keys of several words: the table holds hashes, and the words of each slot are compared
    StringTable   keys of bytes: the table holds hashes, and the bytes in the arena are compared

``slots`` enters the keys that are new, and ``find`` leaves the table as it is: the slot of such a key is -1.

A table is an array of places, a power of two, and holds at most half as many keys; it doubles when full. A kernel stops at the
first row for which there is no room, and is called again after the table has grown.

The cost of a lookup is its wait for memory, because a large table is in no cache. So kernels prefetch the memory for a few keys
before they read any of it, and a place in a table of strings tells where the bytes of its key are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from partitioning import find_kernels, kernels
from partitioning.columns import raw, raw_bytes

#: Keys for which a new table has room. 64 words are 512 bytes, little even for a partition with few keys.
KEYS_MIN = 64
#: Slots are int32, and a table has two places for each key.
KEYS_MAX = 1 << 30
ARENA_BYTES_MIN = 1024


def grown(array: np.ndarray, rows: int) -> np.ndarray:
    """Copy an array to one with ``rows`` rows; the new ones are zero."""
    larger = np.zeros((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


class _Table:
    """Base of the tables: places, counts, and doubling."""

    def __init__(self, keys: int = 0) -> None:
        """Make an empty table with room for ``keys`` keys before it doubles."""
        self.capacity = max(KEYS_MIN, 1 << max(keys - 1, 0).bit_length())
        self.meta = np.array([0, -1, 0, 0], np.int64)  # keys, slot of null, bytes used, bytes wanted
        self._make_places()

    def __len__(self) -> int:
        return int(self.meta[0])

    def _double(self) -> None:
        """Replace the places by twice as many empty ones."""
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


class WordTable(_Table):
    """Keys of one word. Null has a slot of its own outside of the table."""

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

    def find(self, column: pa.Array, out: np.ndarray) -> None:
        find_kernels.find_known_words(*raw(column), out, self.table, self.table_words, int(self.meta[1]))

    def reserve(self, keys: int) -> None:
        """Make room for this number of further keys."""
        while len(self) + keys > self.capacity:
            self._more()

    def places(self) -> tuple[int, int, int, int, int]:
        """Return the addresses for ``kernels.find_words_each``. They are valid as long as ``capacity`` stays."""
        arrays = self.table, self.table_words, self.words, self.meta
        table, table_words, words, meta = (array.ctypes.data for array in arrays)
        return table, table_words, words, meta, self.capacity

    def _more(self) -> None:
        self._double()
        self.words = grown(self.words, self.capacity)
        kernels.rebuild_words(self.words, self.meta, self.table, self.table_words)


class WideKeyTable(_Table):
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

    def find(self, rows: np.ndarray, out: np.ndarray) -> None:
        find_kernels.find_known_rows(rows, out, self.table, self.table_words, self.words)


class StringTable(_Table):
    """Keys of bytes, kept one after the other in an arena. Null has a slot with no bytes.

    ``table`` is uint64[places, 2]. The first word is the low half of the hash above the slot + 1, or 0 for an empty place. The
    second word is the start of the key's bytes above their number in 16 bits; the highest number stands for itself and any
    more."""

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

    def find(self, column: pa.Array, out: np.ndarray) -> None:
        find_kernels.find_known_strings(*raw_bytes(column), out, self.table, self.starts, self.arena, int(self.meta[1]))

    def strings(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the strings of the slots, one after the other, as int64 offsets and bytes."""
        offsets = np.empty(len(slots) + 1, np.int64)
        kernels.string_ends(self.starts, slots, offsets)
        data = np.empty(int(offsets[-1]), np.uint8)
        kernels.copy_strings(self.starts, self.arena, slots, data)
        return offsets, data
