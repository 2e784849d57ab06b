"""Compiled look-ups of keys in hash tables, which enter nothing. No policy here.

They are in a file of their own because the on-disk cache of a kernel is renewed when its own file changes. The functions of
``kernels`` that they call, hashes and comparisons of words and bytes, are part of the format of tables and do not change.
"""

from __future__ import annotations

import numpy as np

from partitioning.kernels import (
    _U1,
    LONG,
    _bit,
    _hash_bytes,
    _hash_row,
    _mix,
    _same_bytes,
    _same_row,
    _start,
    _word,
    kernel,
)

Array = np.ndarray
_U0, _U16, _U32, _LOW32 = np.uint64(0), np.uint64(16), np.uint64(32), np.uint64(0xFFFFFFFF)


@kernel
def find_known_words(
    values: int, validity: int, offset: int, kind: int, out: Array, table: Array, table_words: Array, null: int
) -> None:  # fmt: skip
    """Write the slot of each key of one word; -1: it has none. ``null``: the slot of null."""
    mask = np.uint64(table.size - 1)
    for i in range(out.size):
        j = offset + i
        if validity != 0 and _bit(validity, j) == 0:
            out[i] = null
            continue
        w = _word(values, kind, j)
        place = _mix(w) & mask
        while table[place] >= 0 and table_words[place] != w:
            place = (place + _U1) & mask
        out[i] = table[place]


@kernel
def find_known_rows(rows: Array, out: Array, table: Array, table_hashes: Array, words: Array) -> None:
    """Write the slot of each key of several words, given as a matrix; -1: it has none."""
    mask = np.uint64(table.size - 1)
    for i in range(out.size):
        h = _hash_row(rows, i)
        place = h & mask
        while True:
            slot = np.int64(table[place])
            if slot < 0 or (table_hashes[place] == h and _same_row(rows, i, words, slot)):
                break
            place = (place + _U1) & mask
        out[i] = slot


@kernel
def find_known_strings(
    offsets: int, data: int, validity: int, offset: int, kind: int, out: Array,
    table: Array, starts: Array, arena: Array, null: int,
) -> None:  # fmt: skip
    """Write the slot of each string; -1: it has none. ``null``: the slot of null."""
    mask = np.uint64(table.shape[0] - 1)
    home = arena.ctypes.data
    for i in range(out.size):
        j = offset + i
        if validity != 0 and _bit(validity, j) == 0:
            out[i] = null
            continue
        start = _start(offsets, kind, j)
        size = _start(offsets, kind, j + 1) - start
        h = _hash_bytes(data + start, size)
        kept_size, tag, place = np.uint64(min(size, LONG)), h << _U32, h & mask
        out[i] = -1
        while table[place, 0] != _U0:
            if table[place, 0] & ~_LOW32 == tag and table[place, 1] & np.uint64(LONG) == kept_size:
                found, there = np.int64(table[place, 0] & _LOW32) - 1, np.int64(table[place, 1] >> _U16)
                as_long = size < LONG or starts[found + 1] - there == size
                if as_long and _same_bytes(home + there, data + start, size):
                    out[i] = found
                    break
            place = (place + _U1) & mask
