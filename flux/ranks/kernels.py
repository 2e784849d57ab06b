"""Compiled loops of ranks and duplicates. No policy here: callers choose columns and sizes.

All are in this one file because the on-disk cache of a kernel is renewed when its own file changes, not when the file of a
function that it calls does. Every kernel releases the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from partitioning.columns import FLOAT32, FLOAT64, INT8, INT16, INT32, INT64
from partitioning.kernels import _bit, _start, _u8, _u64, _word

Array = np.ndarray
Word = Any  # an unsigned 64-bit number inside kernels

_U0, _U8, _U31, _U63 = np.uint64(0), np.uint64(8), np.uint64(31), np.uint64(63)
_LOW8, _LOW32, _TOP, _TOP32 = np.uint64(0xFF), np.uint64(0xFFFFFFFF), np.uint64(1 << 63), np.uint64(1 << 31)
#: The byte in front of a value, between those of nulls that come first and nulls that come last.
VALUE = np.uint8(1)

kernel = njit(cache=True, nogil=True, error_model="numpy")


# ---- duplicates ----------------------------------------------------------------------------------


@kernel
def first_rows(slots: Array, times: Array, ttl: int, ends: Array, out: Array) -> int:
    """Write the rows that are no duplicates to ``out``, and return their number. ends[slot] is the last time at which the key of
    a slot is a duplicate; it moves to ``ttl`` behind each row that is given."""
    count = 0
    for i in range(slots.size):
        s, t = slots[i], times[i]
        if t > ends[s]:
            ends[s] = t + ttl
            out[count] = i
            count += 1
    return count


# ---- keys of order -------------------------------------------------------------------------------
# The key of a row is bytes whose order is that of the rows (module ``order_keys``). Each part begins with a byte for null or a
# value. ``flip`` inverts the bytes of a value for a descending order: 0 or 255. ``cursors`` has the places of next bytes, by row.


@kernel
def _put_word(w: Word, flip: int, data: Array, at: int) -> None:
    for p in range(8):
        data[at + p] = np.uint8((w >> np.uint64(56 - 8 * p)) & _LOW8) ^ flip


@kernel
def put_fixed(
    values: int, validity: int, first: int, kind: int, flip: int, null: int, data: Array, cursors: Array
) -> None:  # fmt: skip
    """Write values of up to eight bytes, each as nine."""
    for i in range(cursors.size):
        at, j = cursors[i], first + i
        cursors[i] = at + 9
        if validity != 0 and _bit(validity, j) == 0:
            data[at] = null
            data[at + 1 : at + 9] = 0
            continue
        data[at] = VALUE
        w = _word(values, kind, j)
        if kind == FLOAT64:
            w = ~w if w >> _U63 else w ^ _TOP
        elif kind == FLOAT32:
            w = ~w & _LOW32 if w >> _U31 else w | _TOP32
        elif kind in (INT8, INT16, INT32, INT64):
            w ^= _TOP
        _put_word(w, flip, data, at + 1)


@kernel
def put_decimals(values: int, validity: int, first: int, flip: int, null: int, data: Array, cursors: Array) -> None:
    """Write decimals of 128 bits, each as 17 bytes."""
    for i in range(cursors.size):
        at, j = cursors[i], first + i
        cursors[i] = at + 17
        if validity != 0 and _bit(validity, j) == 0:
            data[at] = null
            data[at + 1 : at + 17] = 0
            continue
        data[at] = VALUE
        _put_word(_u64(values + 16 * j + 8) ^ _TOP, flip, data, at + 1)
        _put_word(_u64(values + 16 * j), flip, data, at + 9)


@kernel
def string_sizes(offsets: int, bytes_: int, validity: int, first: int, kind: int, sizes: Array) -> None:
    """Add the bytes that ``put_strings`` will write."""
    for i in range(sizes.size):
        j = first + i
        sizes[i] += 1
        if validity == 0 or _bit(validity, j):
            begin, end = _start(offsets, kind, j), _start(offsets, kind, j + 1)
            sizes[i] += end - begin + 2
            for p in range(begin, end):
                sizes[i] += _u8(bytes_ + p) == 0


@kernel
def put_strings(
    offsets: int, bytes_: int, validity: int, first: int, kind: int, flip: int, null: int, data: Array, cursors: Array
) -> None:  # fmt: skip
    """Write strings or binary values: a zero byte as 0 1, and 0 0 at the end, so that none is the beginning of another."""
    for i in range(cursors.size):
        at, j = cursors[i], first + i
        if validity != 0 and _bit(validity, j) == 0:
            data[at] = null
            cursors[i] = at + 1
            continue
        data[at] = VALUE
        at += 1
        for p in range(_start(offsets, kind, j), _start(offsets, kind, j + 1)):
            b = _u8(bytes_ + p)
            data[at] = b ^ flip
            at += 1
            if b == 0:
                data[at] = 1 ^ flip
                at += 1
        data[at] = 0 ^ flip
        data[at + 1] = 0 ^ flip
        cursors[i] = at + 2


@kernel
def put_pieces(
    ends: Array, pieces: Array, valid: Array, flip: int, null: int, data: Array, cursors: Array
) -> None:  # fmt: skip
    """Write pieces of bytes, as they are: piece i ends at ends[i + 1]. Nulls have none."""
    for i in range(cursors.size):
        at = cursors[i]
        if not valid[i]:
            data[at] = null
            cursors[i] = at + 1
            continue
        data[at] = VALUE
        at += 1
        for p in range(ends[i], ends[i + 1]):
            data[at] = pieces[p] ^ flip
            at += 1
        cursors[i] = at


@kernel
def list_ends(begins: Array, lengths: Array, ends: Array, out: Array) -> None:
    """Set out[i + 1] to the end of the bytes of list i: each element with a byte before it, and a byte at the end."""
    out[0] = 0
    for i in range(lengths.size):
        begin, end = begins[i], begins[i] + lengths[i]
        out[i + 1] = out[i] + ends[end] - ends[begin] + lengths[i] + 1


@kernel
def join_lists(begins: Array, lengths: Array, ends: Array, pieces: Array, out: Array) -> None:
    """Write the bytes of lists, as ``list_ends`` counts them."""
    at = 0
    for i in range(lengths.size):
        for e in range(begins[i], begins[i] + lengths[i]):
            out[at] = VALUE
            at += 1
            for p in range(ends[e], ends[e + 1]):
                out[at] = pieces[p]
                at += 1
        out[at] = 0
        at += 1


@kernel
def heads(ends: Array, data: Array, out: Array) -> None:
    """Write the first 16 bytes of each key, filled with zeros, as two numbers with the same order."""
    for i in range(out.shape[0]):
        for half in range(2):
            w = _U0
            for p in range(ends[i] + 8 * half, ends[i] + 8 * half + 8):
                w = w << _U8
                if p < ends[i + 1]:
                    w |= np.uint64(data[p])
            out[i, half] = w


# ---- the best rows -------------------------------------------------------------------------------
# The rows of a slot are ``filled[slot]`` places of a pool from ``begins[slot]`` on, the best first, with room for
# ``rooms[slot]``: their numbers and the heads of their keys. The key of a row lies in ``arena`` at ``at[row, START]``, SIZE
# bytes, of which the first BY are the order that the user gave; the rest decides between rows that are equal in it.

START, SIZE, BY = 0, 1, 2
#: Numbers of ``meta``: places of the pool, changed slots and kept rows that are in use, and the array without room.
POOL, CHANGED, KEPT, WANTS = 0, 1, 2, 3
WANTS_POOL, WANTS_KEPT = 1, 2


@kernel
def _compared(a: int, a_size: int, b: int, b_size: int, from_: int, at: Array, arena: Array) -> int:
    """Compare the first bytes of two keys, those before ``from_`` being equal. No key is the beginning of another."""
    x, y = at[a, START], at[b, START]
    for p in range(from_, min(a_size, b_size)):
        if arena[x + p] != arena[y + p]:
            return -1 if arena[x + p] < arena[y + p] else 1
    return 0


@kernel
def _after(i: int, row: int, place: int, new: Array, rows: Array, kept: Array, at: Array, arena: Array) -> bool:
    """Tell whether new row i comes behind the row at a place of the pool, or is equal to it."""
    for half in range(2):
        if new[i, half] != kept[place, half]:
            return new[i, half] > kept[place, half]
    return _compared(row, at[row, SIZE], rows[place], at[rows[place], SIZE], 16, at, arena) >= 0


@kernel
def may_enter(slots: Array, new: Array, limit: int, begins: Array, filled: Array, kept: Array, out: Array) -> int:
    """Write the rows that may be among the best to ``out``, judged by the heads of their orders, and return their number."""
    count = 0
    for i in range(slots.size):
        s = slots[i]
        if filled[s] >= limit:
            last = begins[s] + limit - 1
            if new[i, 0] > kept[last, 0] or (new[i, 0] == kept[last, 0] and new[i, 1] > kept[last, 1]):
                continue
        out[count] = i
        count += 1
    return count


@kernel
def enter(
    slots: Array, new: Array, base: int, done: int, limit: int, ties: bool, times: Array, ttl: int, ends: Array,
    begins: Array, rooms: Array, filled: Array, rows: Array, kept: Array, at: Array, arena: Array,
    marks: Array, mark: int, changed: Array, alive: Array, tells: bool, old_ends: Array, old: Array, old_kept: Array,
    meta: Array,
) -> int:  # fmt: skip
    """Put rows from ``done`` on among the best of their slots, and return the row that has no room. Row i has number base + i.

    ``changed`` gets the slots that change, in this order; with ``tells``, ``old`` gets their rows before, and ``old_kept`` the
    heads of these. ``alive`` is 1 for new rows that are among the best by now. With ``times``, a row that is later than
    the end of its slot is the first one again."""
    meta[WANTS] = 0
    for i in range(done, slots.size):
        s, row = slots[i], base + i
        over = False
        if times.size:
            over = times[i] > ends[s]
        count = 0 if over else filled[s]
        begin = begins[s]
        enters = True
        if count >= limit:
            last = begin + limit - 1
            if ties:
                enters = _compared(row, at[row, BY], rows[last], at[rows[last], BY], 0, at, arena) <= 0
            else:
                enters = not _after(i, row, last, new, rows, kept, at, arena)
        if enters:
            if tells and marks[s] != mark and meta[KEPT] + filled[s] > old.size:
                meta[WANTS] = WANTS_KEPT
                return i
            if count == rooms[s] and (ties or count < limit):
                room = max(2 * rooms[s], min(limit, 16))
                if meta[POOL] + room > rows.size:
                    meta[WANTS] = WANTS_POOL
                    return i
                for p in range(filled[s]):
                    rows[meta[POOL] + p] = rows[begin + p]
                    kept[meta[POOL] + p, 0] = kept[begin + p, 0]
                    kept[meta[POOL] + p, 1] = kept[begin + p, 1]
                begin = begins[s] = meta[POOL]
                rooms[s] = room
                meta[POOL] += room
            if marks[s] != mark:
                marks[s] = mark
                if tells:
                    for p in range(filled[s]):
                        old[meta[KEPT] + p] = rows[begin + p]
                        old_kept[meta[KEPT] + p, 0] = kept[begin + p, 0]
                        old_kept[meta[KEPT] + p, 1] = kept[begin + p, 1]
                meta[KEPT] += filled[s]
                changed[meta[CHANGED]] = s
                meta[CHANGED] += 1
                old_ends[meta[CHANGED]] = meta[KEPT]
            if over:
                for p in range(begin, begin + filled[s]):
                    if rows[p] >= base:
                        alive[rows[p] - base] = 0
            low, high = 0, count
            while low < high:
                middle = (low + high) >> 1
                if _after(i, row, begin + middle, new, rows, kept, at, arena):
                    low = middle + 1
                else:
                    high = middle
            if count == limit and not ties:
                count -= 1
                if rows[begin + count] >= base:
                    alive[rows[begin + count] - base] = 0
            alive[i] = 1
            for p in range(begin + count, begin + low, -1):
                rows[p] = rows[p - 1]
                kept[p, 0] = kept[p - 1, 0]
                kept[p, 1] = kept[p - 1, 1]
            rows[begin + low] = row
            kept[begin + low, 0] = new[i, 0]
            kept[begin + low, 1] = new[i, 1]
            count += 1
            if ties and count > limit:
                edge = rows[begin + limit - 1]
                while count > limit:
                    worst = rows[begin + count - 1]
                    if _compared(edge, at[edge, BY], worst, at[worst, BY], 0, at, arena) == 0:
                        break
                    count -= 1
                    if worst >= base:
                        alive[worst - base] = 0
            filled[s] = count
        if times.size:
            ends[s] = max(ends[s], times[i] + ttl)
    return slots.size


@kernel
def settle(
    changed: Array, base: int, begins: Array, filled: Array, rows: Array, at: Array, arena: Array, used: int,
    alive: Array, numbers: Array, out: Array,
) -> Any:  # fmt: skip
    """Leave out the new rows that are in no slot any more: rows from ``base`` on get the lowest numbers, in their order. ``out``
    gets the rows that stay. Return their number, and the end of the last key.

    ``numbers`` has a place for each new row; ``used`` is the end of the keys before."""
    count = 0
    for i in range(numbers.size):
        if alive[i]:
            numbers[i] = base + count
            out[count] = i
            start, size = at[base + i, START], at[base + i, SIZE]
            for p in range(size):
                arena[used + p] = arena[start + p]
            at[base + count, START], at[base + count, SIZE], at[base + count, BY] = used, size, at[base + i, BY]
            used += size
            count += 1
    for c in range(changed.size):
        s = changed[c]
        for p in range(begins[s], begins[s] + filled[s]):
            if rows[p] >= base:
                rows[p] = numbers[rows[p] - base]
    return count, used


@kernel
def new_ranks(
    changed: Array, begins: Array, filled: Array, rows: Array, kept: Array, old_ends: Array, old: Array, old_kept: Array,
    at: Array, arena: Array, out: Array, ranks: Array,
) -> int:  # fmt: skip
    """Write the rows whose place is another row's than before, or was empty, and their ranks. Return their number."""
    count = 0
    for c in range(changed.size):
        s = changed[c]
        before = old_ends[c + 1] - old_ends[c]
        for p in range(filled[s]):
            row = rows[begins[s] + p]
            if p < before:
                place, before_it = begins[s] + p, old_ends[c] + p
                was = old[before_it]
                if was == row:
                    continue
                same = kept[place, 0] == old_kept[before_it, 0] and kept[place, 1] == old_kept[before_it, 1]
                if same and _compared(row, at[row, SIZE], was, at[was, SIZE], 16, at, arena) == 0:
                    continue
            out[count] = row
            ranks[count] = p + 1
            count += 1
    return count


@kernel
def all_ranks(
    slots: Array, begins: Array, filled: Array, rows: Array, ties: bool, at: Array, arena: Array, out: Array, ranks: Array
) -> None:  # fmt: skip
    """Write the rows of slots and their ranks, which rows that are equal in the order share with ``ties``."""
    count = 0
    for c in range(slots.size):
        begin = begins[slots[c]]
        rank = 1
        for p in range(filled[slots[c]]):
            row = rows[begin + p]
            same = False
            if ties and p > 0:
                above = rows[begin + p - 1]
                same = _compared(row, at[row, BY], above, at[above, BY], 0, at, arena) == 0
            if not same:
                rank = p + 1
            out[count] = row
            ranks[count] = rank
            count += 1
