"""Compiled loops over rows. No policy here: callers choose columns and sizes, and handle overflows.

Columns come as addresses of Arrow buffers (``columns.raw``), so that one compiled version serves every type,
slice and alignment. Numpy arrays are owned or filled by the kernels. Every kernel releases the interpreter
lock. All kernels are in this one file because the on-disk cache of a kernel is renewed when its own file
changes, not when the file of a function that it calls does.

Hashing is a chain of murmur3's 64-bit finaliser (Appleby, public domain). It is bijective in every word, so that a key
of one word never collides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from partitioning.columns import (
    BOOL,
    DECIMAL,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT16,
    UINT32,
    UINT64,
    WIDE_BYTES,
)

Array = np.ndarray
Word = Any  # an unsigned 64-bit number inside kernels

SEED = np.uint64(0x9E3779B97F4A7C15)
NULL_WORD = np.uint64(0xD6E8FEB86659FD93)
_M1 = np.uint64(0xFF51AFD7ED558CCD)
_M2 = np.uint64(0xC4CEB9FE1A85EC53)
_U0, _U1, _U16, _U32, _U33 = np.uint64(0), np.uint64(1), np.uint64(16), np.uint64(32), np.uint64(33)
_LOW32 = np.uint64(0xFFFFFFFF)
_NAN32, _NAN64 = np.uint64(0x7FC00000), np.uint64(0x7FF8000000000000)
_INF32, _INF64 = np.uint64(0x7F800000), np.uint64(0x7FF0000000000000)
_ABS32, _ABS64 = np.uint64(0x7FFFFFFF), np.uint64(0x7FFFFFFFFFFFFFFF)
_INT64_MAX = np.int64(0x7FFFFFFFFFFFFFFF)
_INT64_MIN = np.int64(-0x8000000000000000)
# 10**p in two words, p from 0 to 38
_TEN_LOW = np.array([10**p & 0xFFFFFFFFFFFFFFFF for p in range(39)], np.uint64)
_TEN_HIGH = np.array([10**p >> 64 for p in range(39)], np.uint64)

#: Keys that are looked up together: the memory of all of them is prefetched before any of it is read.
AHEAD = 32
#: A table of words with fewer places is in the cache anyway, so that prefetching costs more than it saves.
LARGE = 1 << 15
#: A table of strings stores the length of shorter strings only. It stores this number for strings of this length or more.
LONG = 0xFFFF

kernel = njit(cache=True, nogil=True, error_model="numpy")


# ---- reading memory ------------------------------------------------------------------------------


def _loader(result: Any) -> Any:
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = context.get_value_type(result).as_pointer()
            # align=1: buffers that came over a wire may start anywhere
            return builder.load(builder.inttoptr(args[0], pointer), align=1)

        return result(types.int64), generate

    return intrinsic(load)


_u8 = _loader(types.uint8)
_u16 = _loader(types.uint16)
_u32 = _loader(types.uint32)
_u64 = _loader(types.uint64)
_i8 = _loader(types.int8)
_i16 = _loader(types.int16)
_i32 = _loader(types.int32)
_i64 = _loader(types.int64)
_f32 = _loader(types.float32)
_f64 = _loader(types.float64)


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the memory at an address, so that it is in the cache when it is read soon after. Any address is allowed."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        to_read, keep, data = number(0), number(3), number(1)
        builder.call(ask, [builder.inttoptr(args[0], pointer), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@kernel
def _bit(bitmap: int, i: int) -> Any:
    return (_u8(bitmap + (i >> 3)) >> (i & 7)) & 1


@kernel
def _word(values: int, kind: int, i: int) -> Word:
    """Read value i as one word: integers sign-extended, floats as bits with one zero and one NaN."""
    if kind in (INT64, UINT64):
        return _u64(values + 8 * i)
    if kind == INT32:
        return np.uint64(np.int64(_i32(values + 4 * i)))
    if kind == FLOAT64:
        w = _u64(values + 8 * i)
        magnitude = w & _ABS64
        if magnitude > _INF64:
            return _NAN64
        return _U0 if magnitude == _U0 else w
    if kind == FLOAT32:
        w = np.uint64(_u32(values + 4 * i))
        magnitude = w & _ABS32
        if magnitude > _INF32:
            return _NAN32
        return _U0 if magnitude == _U0 else w
    if kind == BOOL:
        return np.uint64(_bit(values, i))
    if kind == INT16:
        return np.uint64(np.int64(_i16(values + 2 * i)))
    if kind == INT8:
        return np.uint64(np.int64(_i8(values + i)))
    if kind == UINT32:
        return np.uint64(_u32(values + 4 * i))
    if kind == UINT16:
        return np.uint64(_u16(values + 2 * i))
    return np.uint64(_u8(values + i))


@kernel
def _double(values: int, kind: int, i: int) -> float:
    if kind == FLOAT64:
        return _f64(values + 8 * i)
    if kind == FLOAT32:
        return np.float64(_f32(values + 4 * i))
    if kind == UINT64:
        return np.float64(_u64(values + 8 * i))
    return np.float64(np.int64(_word(values, kind, i)))


@kernel
def _start(offsets: int, kind: int, i: int) -> Any:
    if kind == WIDE_BYTES:
        return _i64(offsets + 8 * i)
    return np.int64(_i32(offsets + 4 * i))


# ---- hashing -------------------------------------------------------------------------------------


@kernel
def _mix(w: Word) -> Word:
    w ^= w >> _U33
    w *= _M1
    w ^= w >> _U33
    w *= _M2
    return w ^ (w >> _U33)


@kernel
def _tail(data: int, size: int, rest: int) -> Word:
    """Read the last ``rest`` (1 to 7) of ``size`` bytes as a word filled with zeros. No other bytes are read."""
    if size >= 8:
        return _u64(data + size - 8) >> np.uint64(8 * (8 - rest))
    if size >= 4:
        low = np.uint64(_u32(data))
        high = np.uint64(_u32(data + size - 4)) >> np.uint64(8 * (8 - size))
        return low | (high << _U32)
    w = np.uint64(_u8(data))
    if size >= 2:
        w |= np.uint64(_u8(data + 1)) << np.uint64(8)
    if size == 3:
        w |= np.uint64(_u8(data + 2)) << np.uint64(16)
    return w


@kernel
def _hash_bytes(data: int, size: int) -> Word:
    h = np.uint64(size) * SEED
    whole = size & ~7
    for p in range(0, whole, 8):
        h = (h ^ _u64(data + p)) * _M1
        h ^= h >> _U32
    if size > whole:
        h = (h ^ _tail(data, size, size - whole)) * _M1
        h ^= h >> _U32
    return _mix(h)


@kernel
def hash_fixed(out: Array, values: int, validity: int, offset: int, kind: int) -> None:
    """Fold a fixed-width column into the running hashes ``out``."""
    n = out.size
    if validity == 0 and kind == INT64:
        for i in range(n):
            out[i] = _mix(out[i] ^ _u64(values + 8 * (offset + i)))
        return
    for i in range(n):
        j = offset + i
        if validity != 0 and _bit(validity, j) == 0:
            out[i] = _mix(out[i] ^ NULL_WORD)
        elif kind == DECIMAL:
            out[i] = _mix(_mix(out[i] ^ _u64(values + 16 * j)) ^ _u64(values + 16 * j + 8))
        else:
            out[i] = _mix(out[i] ^ _word(values, kind, j))


@kernel
def hash_strings(out: Array, offsets: int, data: int, validity: int, offset: int, kind: int) -> None:
    """Fold a string or binary column into the running hashes ``out``."""
    for i in range(out.size):
        j = offset + i
        if validity != 0 and _bit(validity, j) == 0:
            out[i] = _mix(out[i] ^ NULL_WORD)
        else:
            start = _start(offsets, kind, j)
            out[i] = _mix(out[i] ^ _hash_bytes(data + start, _start(offsets, kind, j + 1) - start))


# ---- clustering ----------------------------------------------------------------------------------


@kernel
def reduce_hashes(hashes: Array, partitions: int, ids: Array) -> None:
    """Set ids[i] to the high half of hashes[i], scaled to 0 <= id < partitions."""
    p = np.uint64(partitions)
    for i in range(hashes.size):
        ids[i] = ((hashes[i] >> _U32) * p) >> _U32


@kernel
def partition_words(ids: Array, partitions: int, values: int, validity: int, offset: int, kind: int) -> None:
    """Set ids[i] as ``reduce_hashes`` would for a single fixed-width key column, without an array of hashes in between."""
    p = np.uint64(partitions)
    n = ids.size
    if validity == 0 and kind == INT64:
        for i in range(n):
            ids[i] = ((_mix(SEED ^ _u64(values + 8 * (offset + i))) >> _U32) * p) >> _U32
        return
    for i in range(n):
        j = offset + i
        if validity != 0 and _bit(validity, j) == 0:
            h = _mix(SEED ^ NULL_WORD)
        elif kind == DECIMAL:
            h = _mix(_mix(SEED ^ _u64(values + 16 * j)) ^ _u64(values + 16 * j + 8))
        else:
            h = _mix(SEED ^ _word(values, kind, j))
        ids[i] = ((h >> _U32) * p) >> _U32


@kernel
def counting_sort(ids: Array, order: Array, next_row: Array, rows: Array, present: Array, offsets: Array) -> int:
    """Sort rows by partition, in stable order, and return the number of partitions that have rows.

    ``present`` becomes these partitions, in the given ``order``; rows[offsets[r]:offsets[r+1]] become the rows with
    ids == present[r]. ``next_row`` is scratch."""
    next_row[:] = 0
    for i in range(ids.size):
        next_row[ids[i]] += 1
    total = 0
    found = 0
    for r in range(order.size):
        p = order[r]
        size = next_row[p]
        if size:
            present[found] = p
            offsets[found] = total
            next_row[p] = total
            total += size
            found += 1
    offsets[found] = total
    for i in range(ids.size):
        p = ids[i]
        rows[next_row[p]] = i
        next_row[p] += 1
    return found


@kernel
def counting_sorts(
    ids: Array, ends: Array, order: Array, next_row: Array, rows: Array, present: Array, offsets: Array, found: Array
) -> None:
    """Sort several batches that lie one behind the other, each for itself, as ``counting_sort`` does.

    Batch e ends at row ends[e]. ``present`` and ``offsets`` of the batches lie one behind the other, too; found[e] becomes the
    number of partitions that batch e has rows of."""
    start = at = 0
    for e in range(len(ends)):
        end = ends[e]
        found[e] = counting_sort(ids[start:end], order, next_row, rows[start:end], present[at:], offsets[at + e :])
        for i in range(start, end):
            rows[i] += start
        start = end
        at += found[e]


@kernel
def choose_slices(by_rank: Array, offsets: Array, hosts: Array, wanted: Array, out: Array) -> Any:
    """Choose the slices of a clustered batch (``clustering.Clustered``) for one worker; return the numbers of slices and pieces.

    The worker gets the partitions that it ``hosts``, or those of the ``wanted`` ranks among them, if ranks are given. Slices that
    lie next to each other are one piece. ``out`` is int64[5, p]: partition and rows of each slice; then, for each piece, its
    number of slices, its first row and its end."""
    found = pieces = 0
    before = -2
    for r in range(by_rank.size):
        if not hosts[by_rank[r]] or (wanted.size and not wanted[r]):
            continue
        begin, end = offsets[r], offsets[r + 1]
        out[0, found], out[1, found] = by_rank[r], end - begin
        found += 1
        if r != before + 1:
            out[2, pieces], out[3, pieces] = 0, begin
            pieces += 1
        out[2, pieces - 1] += 1
        out[4, pieces - 1] = end
        before = r
    return found, pieces


@kernel
def choose_run(
    partitions: Array, offsets: Array, slices: Array, nbytes: Array, sequences: Array, hosts: Array, wanted_from: Array,
    rank_of: Array,
) -> Any:  # fmt: skip
    """Choose the rows of several clustered batches for one worker, see ``flux.exchange.slices.Span``.

    ``wanted_from`` is the first batch that each partition wants, or empty. Return the numbers of the rows, sorted by rank and
    then by batch; the ranks that have rows; the rows of each of these ranks; the rows of each rank in each batch that has any;
    these batches; and the bytes of the rows, by their share of each batch."""
    mine = np.zeros(len(partitions), np.bool_)
    low, high = len(rank_of), -1
    first = 0
    for e in range(len(slices)):
        for s in range(first, first + slices[e]):
            p = partitions[s]
            if hosts[p] and (len(wanted_from) == 0 or wanted_from[p] <= sequences[e]):
                mine[s] = True
                low, high = min(low, rank_of[p]), max(high, rank_of[p])
        first += slices[e]
    between = max(high - low + 1, 0)
    place, next_row = np.full(between, -1, np.int64), np.zeros(between, np.int64)
    rows_of = np.zeros(len(slices), np.int64)
    first = 0
    for e in range(len(slices)):
        for s in range(first, first + slices[e]):
            if mine[s]:
                count = offsets[s + e + 1] - offsets[s + e]
                next_row[rank_of[partitions[s]] - low] += count
                rows_of[e] += count
        first += slices[e]
    width = np.count_nonzero(next_row)
    ranks, rows = np.empty(width, np.int32), np.empty(width, np.int64)
    at = row = 0
    for between_at in range(between):
        if next_row[between_at]:
            ranks[at], rows[at], place[between_at] = low + between_at, next_row[between_at], at
            next_row[between_at] = row
            row += rows[at]
            at += 1
    which = np.flatnonzero(rows_of)
    counts, numbers = np.zeros(len(which) * width, np.int64), np.empty(row, np.int32)
    first = start = at = in_all = 0
    for e in range(len(slices)):
        last = first + slices[e]
        for s in range(first, last):
            if mine[s]:
                r = rank_of[partitions[s]] - low
                begin, end = offsets[s + e], offsets[s + e + 1]
                counts[at * width + place[r]] += end - begin
                for i in range(start + begin, start + end):
                    numbers[next_row[r]] = i
                    next_row[r] += 1
        size = offsets[last + e]
        if rows_of[e]:
            at += 1
            in_all += nbytes[e] * rows_of[e] // size
        start += size
        first = last
    return numbers, ranks, rows, counts, which, in_all


# ---- exact key tables ----------------------------------------------------------------------------
# A table holds slots (-1: empty) at hashed places, by linear probing, at most half full. ``meta`` is [keys,
# slot of null or -1, bytes used, bytes wanted]. A kernel stops at the first row for which there is no room and
# returns its number. The caller grows the table and goes on from there.


@kernel
def _ask_for_words(
    values: int, validity: int, kind: int, first: int, count: int, table: Array, table_words: Array
) -> None:  # fmt: skip
    """Prefetch the memory for looking up the next words."""
    mask = np.uint64(table.size - 1)
    table_at, words_at = table.ctypes.data, table_words.ctypes.data
    for i in range(first, first + count):
        if validity == 0 or _bit(validity, i):
            place = np.int64(_mix(_word(values, kind, i)) & mask)
            _prefetch(table_at + 4 * place)
            _prefetch(words_at + 8 * place)


@kernel
def find_words(
    values: int, validity: int, offset: int, kind: int, first: int, out: Array,
    table: Array, table_words: Array, words: Array, meta: Array,
) -> int:  # fmt: skip
    """Find or add the slots of keys of one word."""
    mask = np.uint64(table.size - 1)
    count, limit = meta[0], words.size
    n = out.size
    done = n
    large = table.size >= LARGE
    for i in range(first, n):
        j = offset + i
        if large and (i - first) % AHEAD == 0:
            _ask_for_words(values, validity, kind, j, min(AHEAD, n - i), table, table_words)
        if validity != 0 and _bit(validity, j) == 0:
            slot = meta[1]
            if slot < 0:
                if count == limit:
                    done = i
                    break
                slot = count
                meta[1] = slot
                words[slot] = _U0
                count += 1
            out[i] = slot
            continue
        w = _word(values, kind, j)
        place = _mix(w) & mask
        while True:
            slot = np.int64(table[place])
            if slot < 0 or table_words[place] == w:
                break
            place = (place + _U1) & mask
        if slot < 0:
            if count == limit:
                done = i
                break
            slot = count
            table[place] = slot
            table_words[place] = w
            words[slot] = w
            count += 1
        out[i] = slot
    meta[0] = count
    return done


@kernel
def rebuild_words(words: Array, meta: Array, table: Array, table_words: Array) -> None:
    mask = np.uint64(table.size - 1)
    for slot in range(meta[0]):
        if slot != meta[1]:
            place = _mix(words[slot]) & mask
            while table[place] >= 0:
                place = (place + _U1) & mask
            table[place] = slot
            table_words[place] = words[slot]


@kernel
def put_words(
    rows: Array, column: int, null_column: int, null_bit: int,
    values: int, validity: int, offset: int, kind: int,
) -> None:  # fmt: skip
    """Write a fixed-width column into the word matrix, and its nulls into a bit of ``null_column``."""
    for i in range(rows.shape[0]):
        j = offset + i
        if validity != 0 and _bit(validity, j) == 0:
            rows[i, null_column] |= _U1 << np.uint64(null_bit)
            rows[i, column] = _U0
            if kind == DECIMAL:
                rows[i, column + 1] = _U0
        elif kind == DECIMAL:
            rows[i, column] = _u64(values + 16 * j)
            rows[i, column + 1] = _u64(values + 16 * j + 8)
        else:
            rows[i, column] = _word(values, kind, j)


@kernel
def put_codes(rows: Array, column: int, codes: Array) -> None:
    for i in range(rows.shape[0]):
        rows[i, column] = np.uint64(codes[i])


@kernel
def _hash_row(rows: Array, i: int) -> Word:
    h = SEED
    for c in range(rows.shape[1]):
        h = (h ^ rows[i, c]) * _M1
        h ^= h >> _U32
    return _mix(h)


@kernel
def _same_row(a: Array, i: int, b: Array, j: int) -> bool:
    for c in range(a.shape[1]):  # noqa: SIM110 - generators do not compile
        if a[i, c] != b[j, c]:
            return False
    return True


@kernel
def find_rows(rows: Array, first: int, out: Array, table: Array, table_hashes: Array, words: Array, meta: Array) -> int:
    """Find or add the slots of keys of several words, given as a matrix."""
    mask = np.uint64(table.size - 1)
    count, limit = meta[0], words.shape[0]
    n = rows.shape[0]
    done = n
    for i in range(first, n):
        h = _hash_row(rows, i)
        place = h & mask
        while True:
            slot = np.int64(table[place])
            if slot < 0 or (table_hashes[place] == h and _same_row(rows, i, words, slot)):
                break
            place = (place + _U1) & mask
        if slot < 0:
            if count == limit:
                done = i
                break
            slot = count
            table[place] = slot
            table_hashes[place] = h
            words[slot] = rows[i]
            count += 1
        out[i] = slot
    meta[0] = count
    return done


@kernel
def _same_bytes(a: int, b: int, size: int) -> bool:
    if size >= 8:
        for p in range(0, size - 8, 8):
            if _u64(a + p) != _u64(b + p):
                return False
        return _u64(a + size - 8) == _u64(b + size - 8)
    if size == 0:
        return True
    return _tail(a, size, size) == _tail(b, size, size)


@kernel
def _ask_for_strings(
    offsets: int, data: int, validity: int, kind: int, first: int, hashes: Array, count: int, table: Array, arena: int
) -> None:  # fmt: skip
    """Hash the next strings, and prefetch the memory for looking them up."""
    mask = np.uint64(table.shape[0] - 1)
    table_at = table.ctypes.data
    end = _start(offsets, kind, first)
    for i in range(count):
        start, end = end, _start(offsets, kind, first + i + 1)
        if validity == 0 or _bit(validity, first + i):
            hashes[i] = _hash_bytes(data + start, end - start)
            _prefetch(table_at + 16 * np.int64(hashes[i] & mask))
    for i in range(count):
        _prefetch(arena + np.int64(table[hashes[i] & mask, 1] >> _U16))


@kernel
def find_strings(
    offsets: int, data: int, validity: int, offset: int, kind: int, first: int, out: Array,
    table: Array, starts: Array, arena: Array, meta: Array,
) -> int:  # fmt: skip
    """Find or add the slots of strings. New strings are copied to the arena. Null is a key of its own with no bytes."""
    mask = np.uint64(table.shape[0] - 1)
    count, limit = meta[0], starts.size - 1
    n = out.size
    done = n
    home = arena.ctypes.data
    hashes = np.zeros(AHEAD, np.uint64)
    end = _start(offsets, kind, offset + first) if first < n else 0
    for i in range(first, n):
        at = (i - first) % AHEAD
        if at == 0:
            _ask_for_strings(offsets, data, validity, kind, offset + i, hashes, min(AHEAD, n - i), table, home)
        j = offset + i
        start, end = end, _start(offsets, kind, j + 1)
        if validity != 0 and _bit(validity, j) == 0:
            slot = meta[1]
            if slot < 0:
                if count == limit:
                    done = i
                    break
                slot = count
                meta[1] = slot
                starts[slot + 1] = starts[slot]
                count += 1
            out[i] = slot
            continue
        size = end - start
        kept_size = np.uint64(min(size, LONG))
        tag = hashes[at] << _U32
        place = hashes[at] & mask
        slot = np.int64(-1)
        while table[place, 0] != _U0:
            if table[place, 0] & ~_LOW32 == tag and table[place, 1] & np.uint64(LONG) == kept_size:
                found, there = np.int64(table[place, 0] & _LOW32) - 1, np.int64(table[place, 1] >> _U16)
                as_long = size < LONG or starts[found + 1] - there == size
                if as_long and _same_bytes(home + there, data + start, size):
                    slot = found
                    break
            place = (place + _U1) & mask
        if slot < 0:
            used = starts[count]
            if count == limit or used + size > arena.size:
                meta[3] = size
                done = i
                break
            slot = count
            table[place, 0] = tag | np.uint64(slot + 1)
            table[place, 1] = np.uint64(used) << _U16 | kept_size
            for p in range(size):
                arena[used + p] = _u8(data + start + p)
            starts[slot + 1] = used + size
            count += 1
        out[i] = slot
    meta[0] = count
    meta[2] = starts[count]
    return done


@kernel
def rebuild_hashed(old: Array, old_hashes: Array, table: Array, table_hashes: Array) -> None:
    """Move every slot of a table to a larger one, by the hashes kept beside the slots."""
    mask = np.uint64(table.size - 1)
    for i in range(old.size):
        if old[i] >= 0:
            place = old_hashes[i] & mask
            while table[place] >= 0:
                place = (place + _U1) & mask
            table[place] = old[i]
            table_hashes[place] = old_hashes[i]


@kernel
def rebuild_strings(old: Array, table: Array) -> None:
    """Move every slot of a table of strings to a larger one, by the low half of each hash."""
    mask = np.uint64(table.shape[0] - 1)
    for i in range(old.shape[0]):
        if old[i, 0] != _U0:
            place = (old[i, 0] >> _U32) & mask
            while table[place, 0] != _U0:
                place = (place + _U1) & mask
            table[place, 0] = old[i, 0]
            table[place, 1] = old[i, 1]


@kernel
def string_ends(starts: Array, slots: Array, ends: Array) -> None:
    """Set ends[i + 1] to the end of string i, with the strings of the slots one after the other."""
    total = 0
    ends[0] = 0
    for i in range(slots.size):
        total += starts[slots[i] + 1] - starts[slots[i]]
        ends[i + 1] = total


@kernel
def copy_strings(starts: Array, arena: Array, slots: Array, out: Array) -> None:
    at = 0
    for i in range(slots.size):
        for p in range(starts[slots[i]], starts[slots[i] + 1]):
            out[at] = arena[p]
            at += 1


@kernel
def touched(slots: Array, marks: Array, mark: int, out: Array) -> int:
    """Write each slot once to ``out``, in order of first touch, and return their number. marks[slot] == mark means seen."""
    count = 0
    for i in range(slots.size):
        s = slots[i]
        if marks[s] != mark:
            marks[s] = mark
            out[count] = s
            count += 1
    return count


@kernel
def in_range(slots: Array, size: int) -> bool:
    """Tell whether all slots are from 0 to below ``size``."""
    good = True
    for i in range(slots.size):
        good &= 0 <= slots[i] < size
    return good


@kernel
def gather_counted(values: Array, counts: Array, slots: Array, out: Array, valid: Array) -> int:
    """Set out[i] to values[s] of slot s, and valid[i] to counts[s] != 0. Return the number of valid ones."""
    return _gather(values, counts, slots, 0, out, valid)


@kernel
def gather_seen(values: Array, seen: Array, slots: Array, flip: int, out: Array, valid: Array) -> int:
    """Set out[i] to values[s] ^ flip of slot s, and valid[i] to seen[s]. Return the number of valid ones."""
    return _gather(values, seen, slots, flip, out, valid)


@kernel
def _gather(values: Array, present: Array, slots: Array, flip: int, out: Array, valid: Array) -> int:
    count = 0
    for i in range(slots.size):
        s = slots[i]
        out[i] = values[s] ^ flip
        valid[i] = present[s] != 0
        count += valid[i]
    return count


@kernel
def note_changed(slots: Array, marks: Array, changed: Array, count: int) -> int:
    """Append each slot without a mark to ``changed``, of which ``count`` are used, and mark it. Return the number in use."""
    for i in range(slots.size):
        s = slots[i]
        if marks[s] == 0:
            marks[s] = 1
            changed[count] = s
            count += 1
    return count


# ---- sessions -----------------------------------------------------------------------------------

#: Columns of ``at`` (int64[slots, 4]), the sessions by slot: times of the first and the last row, slot of the next session
#: of the same key or -1, and the key. One session is half of a line of the cache.
START, LAST, NEXT, OWNER = 0, 1, 2, 3


@kernel
def join_sessions(
    owners: Array, times: int, gap: int, heads: Array, at: Array, parents: Array, size: int,
    out: Array, gone: Array, into: Array,
) -> Any:  # fmt: skip
    """Find or open the session of each row: ``owners`` has its key, the int64 at ``times`` its time.

    ``heads`` has the first session of each key, or -1; ``parents`` (int32[slots]) each slot itself. ``size`` slots are used, and
    there is room for one more for each row. ``out`` gets the slot of each row after all rows; ``gone`` the slots of the sessions
    that have joined others, which keep the lower slot, and ``into`` those of the others. Return the slots in use, and the number
    of sessions that are gone."""
    n, count = owners.size, 0
    heads_at, sessions_at = heads.ctypes.data, at.ctypes.data
    for i in range(n):
        if i % AHEAD == 0:
            end = min(n, i + AHEAD)
            for j in range(i, end):
                _prefetch(heads_at + 4 * np.int64(owners[j]))
            for j in range(i, end):
                _prefetch(sessions_at + 32 * np.int64(heads[owners[j]]))
        owner, time = owners[i], _i64(times + 8 * i)
        before, slot = -1, int(heads[owner])
        while slot >= 0 and at[slot, LAST] + gap < time:
            before, slot = slot, at[slot, NEXT]
        if slot < 0 or time + gap < at[slot, START]:
            at[size, START], at[size, LAST], at[size, NEXT], at[size, OWNER] = time, time, slot, owner
            slot = size
            size += 1
            if before < 0:
                heads[owner] = slot
            else:
                at[before, NEXT] = slot
        elif time < at[slot, START]:
            at[slot, START] = time
        elif time > at[slot, LAST]:
            at[slot, LAST] = time
            after = at[slot, NEXT]  # the row is in front of it, so no other session is in reach
            if after >= 0 and at[after, START] <= time + gap:
                at[after, START], at[slot, LAST], at[slot, NEXT] = at[slot, START], at[after, LAST], at[after, NEXT]
                kept, left = min(slot, after), max(slot, after)
                if kept == after:
                    if before < 0:
                        heads[owner] = kept
                    else:
                        at[before, NEXT] = kept
                parents[left] = kept
                gone[count] = left
                count += 1
                slot = kept
        out[i] = slot
    if count:
        for i in range(n):
            out[i] = _root(parents, out[i])
        for k in range(count):
            into[k] = _root(parents, gone[k])
        for k in range(count):
            parents[gone[k]] = gone[k]
    return size, count


@kernel
def _root(parents: Array, slot: int) -> int:
    while parents[slot] != slot:
        slot = parents[slot]
    return slot


@kernel
def ended_sessions(at: Array, is_open: Array, size: int, limit: int, out: Array) -> Any:
    """Collect the open sessions whose last row is before ``limit``, ascending. Return their number, and the time of the earliest
    last row of the others."""
    count, least = 0, _INT64_MAX
    for slot in range(size):
        if is_open[slot]:
            last = at[slot, LAST]
            if last < limit:
                out[count] = slot
                count += 1
            elif last < least:
                least = last
    return count, least


@kernel
def unlink_sessions(slots: Array, heads: Array, at: Array, is_open: Array) -> None:
    """Take ended sessions, which are the earliest of their keys, out of the chains."""
    for i in range(slots.size):
        is_open[slots[i]] = False
    for i in range(slots.size):
        owner = at[slots[i], OWNER]
        head = int(heads[owner])
        while head >= 0 and not is_open[head]:
            head = at[head, NEXT]
        heads[owner] = head


@kernel
def chain_rows(slots: Array, first: int, heads: Array, tails: Array, counts: Array, after: Array) -> None:
    """Append rows, numbered from ``first``, to the chains of their sessions. ``after`` has the next row of each row, or -1."""
    for i in range(slots.size):
        s, row = slots[i], first + i
        if counts[s] == 0:
            heads[s] = row
        else:
            after[tails[s]] = row
        tails[s] = row
        counts[s] += 1


@kernel
def gather_chains(slots: Array, heads: Array, after: Array, ends: Array, out: Array) -> bool:
    """Write the rows of the chains of ``slots`` one behind the other; those of slot k end before ``ends[k]``. Return whether each
    chain is ascending, which one of joined sessions may not be."""
    at, ascending = 0, True
    for k in range(slots.size):
        row, least = np.int64(heads[slots[k]]), np.int64(-1)
        while at < ends[k]:
            out[at] = row
            if row < least:
                ascending = False
            least, row = row, np.int64(after[row])
            at += 1
    return ascending


# ---- joins --------------------------------------------------------------------------------------

#: Columns of ``at`` (int64[rows, 8]), the rows of one side of a join: the row before it of its key or -1; its event time; the
#: least and the greatest event time of rows of the other side that match it; the greatest ``HIGH`` of it and all before it of
#: its key; the time until which it waits; an earlier row of its key, see ``_leap``; the least ``TIME`` of it and the rows before
#: it, down to that row and without it. One row is a line of the cache. ``gone`` (bool[rows]) says which rows wait no more.
OLDER, TIME, LOW, HIGH, PEAK, UNTIL, LEAP, LEAST = 0, 1, 2, 3, 4, 5, 6, 7
#: Rows of which the least ``HIGH`` and ``UNTIL`` are kept, so that the search for rows to forget passes over others.
BLOCK = 1024


@kernel
def _leap(at: Array, r: int) -> int:
    """Return the row to which one may leap from a row, or -1. ``LEAP`` has its number plus one, below the length of the chain.

    Leaps are those of Myers, *An applicative random-access stack* (1983): each row has one, and yet any earlier row is reached
    by about twice the logarithm of the distance."""
    return (at[r, LEAP] & 0xFFFFFFFF) - 1


@kernel
def _depth(at: Array, r: int) -> int:
    """Return how many rows of a chain there are from this one on."""
    return 0 if r < 0 else at[r, LEAP] >> 32


@kernel
def put_rows(times: Array, lows: Array, highs: Array, untils: Array, at: Array, first: int) -> None:
    """Write rows from ``first`` on, which are in no chain yet."""
    for i in range(times.size):
        r = first + i
        at[r, TIME], at[r, LOW], at[r, HIGH], at[r, UNTIL] = times[i], lows[i], highs[i], untils[i]


@kernel
def link_rows(owners: Array, heads: Array, at: Array, first: int, size: int) -> None:
    """Append the rows from ``first`` to ``size`` to the chains of their keys; ``heads`` has the newest row of each key, or -1."""
    heads_at, rows_at = heads.ctypes.data, at.ctypes.data
    for r in range(first, size):
        if (r - first) % AHEAD == 0:
            end = min(size, r + AHEAD)
            for j in range(r, end):
                _prefetch(heads_at + 4 * np.int64(owners[j]))
            for j in range(r, end):
                _prefetch(rows_at + 64 * np.int64(heads[owners[j]]))
        older = np.int64(heads[owners[r]])
        peak, least, to = at[r, HIGH], at[r, TIME], older
        if older >= 0:
            peak = max(peak, at[older, PEAK])
            one = _leap(at, older)
            if one >= 0:
                two = _leap(at, one)
                if _depth(at, older) - _depth(at, one) == _depth(at, one) - _depth(at, two):
                    to = two
                    least = min(least, at[older, LEAST], at[one, LEAST])
        at[r, OLDER], at[r, PEAK], at[r, LEAST] = older, peak, least
        at[r, LEAP] = (_depth(at, older) + 1) << 32 | (to + 1)
        heads[owners[r]] = r


@kernel
def pair_rows(
    owners: Array, times: Array, lows: Array, highs: Array, heads: Array, at: Array, limit: int,
    first: int, row: int, once: bool, mine: Array, found: Array,
) -> Any:  # fmt: skip
    """Find the rows of the other side, in ``heads`` and ``at``, that match rows of a batch from ``first`` on: in the order of the
    batch, and the newest of the other side first.

    A row of the batch has the key ``owners`` (-1: none matches it), a time, and the least and greatest time of rows that match
    it. Rows that wait until a time below ``limit`` match no more. ``row`` is where to go on in the chain of the first row; -2: at
    its begin. With ``once``, the newest match of each row will do. The pairs are put into ``mine`` and ``found`` until these are
    full. Return their number, and where to go on."""
    n, size, count = owners.size, mine.size, 0
    heads_at, rows_at = heads.ctypes.data, at.ctypes.data
    for i in range(first, n):
        if (i - first) % AHEAD == 0:
            end = min(n, i + AHEAD)
            for j in range(i, end):
                _prefetch(heads_at + 4 * np.int64(owners[j]))
            for j in range(i, end):
                if owners[j] >= 0:
                    _prefetch(rows_at + 64 * np.int64(heads[owners[j]]))
        owner = owners[i]
        if owner < 0:
            continue
        r = np.int64(heads[owner]) if row == -2 else np.int64(row)
        row = -2
        time, low, high = times[i], lows[i], highs[i]
        while r >= 0 and at[r, PEAK] >= time:
            if at[r, LEAST] > high:
                r = _leap(at, r)
                continue
            if at[r, LOW] <= time <= at[r, HIGH] and low <= at[r, TIME] <= high and at[r, UNTIL] >= limit:
                if count == size:
                    return count, i, r
                mine[count], found[count] = i, r
                count += 1
                if once:
                    break
            r = at[r, OLDER]
    return count, n, -2


@kernel
def skip_gone(owners: Array, gone: Array, heads: Array, at: Array) -> None:
    """Let the chains of keys begin at a row that is not gone."""
    for i in range(owners.size):
        r = np.int64(heads[owners[i]])
        while r >= 0 and gone[r]:
            r = at[r, OLDER]
        heads[owners[i]] = r


@kernel
def first_of_each(rows: Array, seen: Array, keep: Array) -> None:
    """Set ``keep`` for each of the rows that comes for the first time and is not ``seen``, and let it be seen."""
    for i in range(rows.size):
        r = rows[i]
        keep[i] = not seen[r]
        seen[r] = True


@kernel
def note_least(at: Array, first: int, size: int, least: Array) -> None:
    """Lower the least ``HIGH`` and ``UNTIL`` of the blocks (int64[blocks, 2]) by the rows from ``first`` to ``size``."""
    for r in range(first, size):
        b = r // BLOCK
        least[b, 0] = min(least[b, 0], at[r, HIGH])
        least[b, 1] = min(least[b, 1], at[r, UNTIL])


@kernel
def forget_rows(at: Array, gone: Array, size: int, high_limit: int, until_limit: int, least: Array, out: Array) -> int:
    """Let rows be gone that match no row with a time of ``high_limit`` or more, or wait until a time below ``until_limit``.
    Return their number; ``out`` gets the rows, ascending."""
    count = 0
    for b in range(-(-size // BLOCK)):
        if least[b, 0] >= high_limit and least[b, 1] >= until_limit:
            continue
        high = until = _INT64_MAX
        for r in range(b * BLOCK, min(size, (b + 1) * BLOCK)):
            if gone[r]:
                continue
            if at[r, HIGH] < high_limit or at[r, UNTIL] < until_limit:
                gone[r] = True
                out[count] = r
                count += 1
            else:
                high, until = min(high, at[r, HIGH]), min(until, at[r, UNTIL])
        least[b, 0], least[b, 1] = high, until
    return count


# ---- lateness -----------------------------------------------------------------------------------


@kernel
def judge_times(
    times: int, count: int, delay: int, max_ahead: int, believed_after: int, state: Array, late: Array
) -> int:
    """Judge rows one by one, by the int64 of each at ``times``, and return the number of late ones, which ``late`` marks.

    ``state``: the newest time that is believed, the rows in succession whose times are not, and the least of these times. The
    least number of 64 bits stands for none."""
    found = 0
    newest, doubted, least = state[0], state[1], state[2]
    for i in range(count):
        time = _i64(times + 8 * i)
        if newest >= _INT64_MIN + delay and time < newest - delay:
            late[i] = True
            found += 1
        if newest > _INT64_MIN and time > newest + max_ahead:
            least = time if doubted == 0 or time < least else least
            doubted += 1
            if doubted < believed_after:
                continue
            newest = least
        elif time > newest:
            newest = time
        doubted, least = 0, _INT64_MIN
    state[0], state[1], state[2] = newest, doubted, least
    return found


# ---- progress of the readers of a stream ----------------------------------------------------------


@kernel
def raise_marks(
    marks: Array, to: int, counts: Array, at: Array, instead: Array, since: Array, epoch: int,
    cells: Array, rows: Array, columns: Array, leaves_out: Array, no_reader: int, least: Array,
) -> bool:  # fmt: skip
    """Raise the marks of readers, and return True if any was raised.

    Reader i is raised to ``to`` if counts[i]. Reader at[k] is raised to instead[k]. A reader since a later epoch (since[i] >
    epoch) is not raised. The mark of reader i is also written to cells[rows[i], columns[i]]. Then, for each of these rows,
    least[r] becomes its least cell, without the cells in ``leaves_out`` (if that is not empty); -1 if none of these is below
    ``no_reader``."""
    wanted = np.empty(marks.size, np.int64)
    for i in range(marks.size):
        wanted[i] = to if counts[i] else -1
    for k in range(at.size):
        wanted[at[k]] = instead[k]
    raised = False
    for i in range(marks.size):
        if since[i] <= epoch and wanted[i] > marks[i]:
            marks[i] = cells[rows[i], columns[i]] = wanted[i]
            raised = True
    if raised:
        for i in range(rows.size):
            r, lowest = rows[i], no_reader
            for c in range(cells.shape[1]):
                if leaves_out.size == 0 or not leaves_out[r, c]:
                    lowest = min(lowest, cells[r, c])
            least[r] = -1 if lowest == no_reader else lowest
    return raised


@kernel
def any_owed(marks: Array, last: Array, rows: Array, limit: int, counts: Array) -> bool:
    """Tell whether any reader i with counts[i] is below last[rows[i]], or below the limit if that is less."""
    for i in range(marks.size):  # noqa: SIM110 - compiled
        if counts[i] and marks[i] < min(last[rows[i]], limit):
            return True
    return False


@kernel
def first_below(values: Array, places: Array, limit: int) -> int:
    """Return the first k for which values[places[k]] is below the limit, or -1."""
    for k in range(places.size):
        if values[places[k]] < limit:
            return k
    return -1


# ---- accumulators --------------------------------------------------------------------------------


@kernel
def count_rows(slots: Array, counts: Array) -> None:
    for i in range(slots.size):
        counts[slots[i]] += 1


@kernel
def count_valid(slots: Array, validity: int, offset: int, counts: Array) -> None:
    for i in range(slots.size):
        counts[slots[i]] += np.int64(_bit(validity, offset + i))


@kernel
def add_doubles(slots: Array, values: int, validity: int, offset: int, kind: int, sums: Array, counts: Array) -> None:
    if validity == 0 and kind == FLOAT64:
        for i in range(slots.size):
            s = slots[i]
            sums[s] += _f64(values + 8 * (offset + i))
            counts[s] += 1
        return
    for i in range(slots.size):
        if validity == 0 or _bit(validity, offset + i):
            s = slots[i]
            sums[s] += _double(values, kind, offset + i)
            counts[s] += 1


@kernel
def _put_exactly(value: float, s: int, terms: Array, used: Array, beyond: Array) -> int:
    """Add a value to the terms of slot s, whose sum is exact: the terms are the smaller first, and no two of them have a bit in
    common (Shewchuk 1997). Return 0, or 1 if there is no room for one more term, or 2 if the sum leaves the doubles."""
    if not abs(value) < np.inf:  # NaN, too; their sum is a double in any order
        beyond[s] += value
        return 0
    count, kept = used[s], 0
    if count == terms.shape[1]:
        return 1
    for k in range(count):
        term = terms[s, k]
        if abs(value) < abs(term):
            value, term = term, value
        high = value + term
        low = term - (high - value)
        if low != 0.0:
            terms[s, kept] = low
            kept += 1
        value = high
    if not abs(value) < np.inf:
        return 2
    if value != 0.0:
        terms[s, kept] = value
        kept += 1
    used[s] = kept
    return 0


@kernel
def add_exactly(
    slots: Array, values: int, validity: int, offset: int, kind: int, first: int, terms: Array, used: Array, beyond: Array,
    counts: Array,
) -> Any:  # fmt: skip
    """Add numbers, from row ``first`` on, to sums that are kept as several doubles. Return the first row that was not added,
    and the reason: 0: all were, 1: there is no room for its terms, 2: the sum leaves the doubles."""
    for i in range(first, slots.size):
        if validity == 0 or _bit(validity, offset + i):
            s = slots[i]
            problem = _put_exactly(_double(values, kind, offset + i), s, terms, used, beyond)
            if problem:
                return i, problem
            counts[s] += 1
    return slots.size, 0


@kernel
def merge_exactly(
    slots: Array,
    first: int,
    from_terms: Array,
    from_used: Array,
    from_beyond: Array,
    terms: Array,
    used: Array,
    beyond: Array,
) -> Any:
    """Add the sums of other slots, from ``first`` on: that of slot k to the one of slots[k]. The terms that were added are taken
    out there. Return as ``add_exactly``."""
    for k in range(first, slots.size):
        s = slots[k]
        while from_used[k]:
            problem = _put_exactly(from_terms[k, from_used[k] - 1], s, terms, used, beyond)
            if problem:
                return k, problem
            from_used[k] -= 1
        beyond[s] += from_beyond[k]
    return slots.size, 0


@kernel
def round_sums(slots: Array, terms: Array, used: Array, beyond: Array, out: Array) -> None:
    """Round the sum of each slot once, to the nearest double, halves to even: the same for any order of the rows."""
    for i in range(slots.size):
        s = slots[i]
        if beyond[s] != 0.0:  # infinite, or NaN
            out[i] = beyond[s]
            continue
        k, high, low = used[s], 0.0, 0.0
        if k:
            k -= 1
            high = terms[s, k]
        while k and low == 0.0:
            k -= 1
            before, term = high, terms[s, k]
            high = before + term
            low = term - (high - before)
        # A half was rounded to even, and the terms below say on which side of the half the sum is.
        if k and low != 0.0 and (low < 0.0) == (terms[s, k - 1] < 0.0):
            twice = low * 2.0
            other = high + twice
            if other - high == twice:
                high = other
        out[i] = high


@kernel
def add_integers(slots: Array, values: int, validity: int, offset: int, kind: int, sums: Array, counts: Array) -> bool:
    """Add integers to sums. Return False at the first row whose sum does not fit 64 bits; earlier rows stay added."""
    for i in range(slots.size):
        if validity == 0 or _bit(validity, offset + i):
            s = slots[i]
            v = np.int64(_word(values, kind, offset + i))
            before = sums[s]
            after = before + v
            # Overflow: the two operands have the same sign, and the result has the other one.
            if ((before ^ after) & (v ^ after)) < 0 or (kind == UINT64 and v < 0):
                return False
            sums[s] = after
            counts[s] += 1
    return True


@kernel
def _fits(low: Word, high: Word, precision: int) -> bool:
    """Tell whether a magnitude is below 10 ** precision."""
    top = _TEN_HIGH[precision]
    return high < top or (high == top and low < _TEN_LOW[precision])


@kernel
def _negated(low: Word, high: Word) -> Any:
    low = ~low + _U1
    return low, ~high + (_U1 if low == _U0 else _U0)


@kernel
def add_decimals(
    slots: Array, values: int, validity: int, offset: int,
    low: Array, high: Array, over: Array, counts: Array,
) -> None:  # fmt: skip
    """Add decimals to sums of 192 bits in two's complement, of which ``over`` is the signed top.

    No sum of less than 2**63 values leaves that range, so a sum may pass the digits of its type and come back."""
    sign = np.uint64(63)
    for i in range(slots.size):
        j = offset + i
        if validity == 0 or _bit(validity, j):
            s = slots[i]
            a, b = _u64(values + 16 * j), _u64(values + 16 * j + 8)
            new_low = low[s] + a
            partial = high[s] + b
            new_high = partial + (_U1 if new_low < a else _U0)
            carries = np.int64(partial < b) + np.int64(new_high < partial)
            low[s] = new_low
            high[s] = new_high
            over[s] += carries - np.int64(b >> sign)
            counts[s] += 1


@kernel
def decimals_fit(low: Array, high: Array, over: Array, precision: int) -> bool:
    """Tell whether all sums of ``add_decimals`` have at most ``precision`` digits: then ``low`` and ``high`` are the decimals."""
    sign = np.uint64(63)
    for i in range(low.size):
        negative = (high[i] >> sign) != _U0
        if over[i] != (-1 if negative else 0):
            return False
        magnitude_low, magnitude_high = low[i], high[i]
        if negative:
            magnitude_low, magnitude_high = _negated(magnitude_low, magnitude_high)
        if not _fits(magnitude_low, magnitude_high, precision):
            return False
    return True


@kernel
def divide_decimals(low: Array, high: Array, over: Array, counts: Array, digits: int, precision: int) -> bool:
    """Divide the sums of ``add_decimals`` by counts, with ``digits`` (at most 4) more decimals, half up. ``low`` and ``high``
    become the quotients. Return False if one does not fit.

    A quotient is at most as large as the largest value, so it has at most 127 bits."""
    sign = np.uint64(63)
    for i in range(counts.size):
        count = np.uint64(counts[i])
        if count == _U0:
            continue
        negative = over[i] < 0
        rest_low, rest_high, rest_over = low[i], high[i], np.uint64(over[i])
        if negative:
            rest_low, rest_high = _negated(rest_low, rest_high)
            rest_over = ~rest_over + (_U1 if rest_low == _U0 and rest_high == _U0 else _U0)
        bits = 192
        if rest_over == _U0:  # as nearly always: nothing to divide in the first 64
            rest_low, rest_high, rest_over, bits = _U0, rest_low, rest_high, 128
        quotient_low, quotient_high, remainder = _U0, _U0, _U0
        for _ in range(bits):  # long division, one bit at a time: once per group, not per row
            remainder = (remainder << _U1) | (rest_over >> sign)
            rest_over = (rest_over << _U1) | (rest_high >> sign)
            rest_high = (rest_high << _U1) | (rest_low >> sign)
            rest_low <<= _U1
            quotient_high = (quotient_high << _U1) | (quotient_low >> sign)
            quotient_low <<= _U1
            if remainder >= count:
                remainder -= count
                quotient_low |= _U1
        ten = np.uint64(10)
        for _ in range(digits):
            if not _fits(quotient_low, quotient_high, precision - 1):
                return False
            remainder *= ten
            digit = remainder // count
            remainder -= digit * count
            bottom = (quotient_low & _LOW32) * ten + digit
            middle = (quotient_low >> _U32) * ten + (bottom >> _U32)
            quotient_low = (middle << _U32) | (bottom & _LOW32)
            quotient_high = quotient_high * ten + (middle >> _U32)
        if remainder >= count - remainder:
            quotient_low += _U1
            if quotient_low == _U0:
                quotient_high += _U1
        if not _fits(quotient_low, quotient_high, precision):
            return False
        if negative:
            quotient_low, quotient_high = _negated(quotient_low, quotient_high)
        low[i] = quotient_low
        high[i] = quotient_high
    return True


@kernel
def _ordered_bits(v: float) -> Any:
    """Return an integer with the same order as the double, NaN greatest. The result of a measure inverts it."""
    if v != v:
        return _INT64_MAX
    bits = np.int64(np.float64(v).view(np.int64))
    return bits ^ ((bits >> 63) & _INT64_MAX)


@kernel
def keep_least(
    slots: Array, values: int, validity: int, offset: int, kind: int, flip: int, best: Array, seen: Array
) -> None:
    """Keep the least (sortable value ^ flip) of each slot. A flip of -1 reverses the order and keeps the greatest."""
    for i in range(slots.size):
        if validity == 0 or _bit(validity, offset + i):
            s = slots[i]
            if kind in (FLOAT64, FLOAT32):
                v = _ordered_bits(_double(values, kind, offset + i))
            else:
                v = np.int64(_word(values, kind, offset + i))
            v ^= flip
            if v < best[s]:
                best[s] = v
            seen[s] = True


@kernel
def keep_least_decimals(
    slots: Array, values: int, validity: int, offset: int, flip: int, low: Array, high: Array, seen: Array
) -> None:
    turn = np.uint64(flip)
    for i in range(slots.size):
        j = offset + i
        if validity == 0 or _bit(validity, j):
            s = slots[i]
            b = _i64(values + 16 * j + 8) ^ flip
            a = _u64(values + 16 * j) ^ turn
            if not seen[s] or b < high[s] or (b == high[s] and a < low[s]):
                low[s] = a
                high[s] = b
                seen[s] = True


# ---- several partitions in one call ----------------------------------------------------------------
# Rows of several partitions lie one behind the other; the rows of partition k end at row ``ends[k]``. places[k, which], int64[5],
# has the addresses of the arrays of partition k, and their lengths (see ``keyed_state.JointUpdate``).


@kernel
def find_words_each(
    values: int, validity: int, offset: int, kind: int, ends: Array, out: Array, places: Array, which: int
) -> bool:  # fmt: skip
    """Find or add the slots of keys of one word. Return False if a table had too little room.

    Places: the addresses of a table, of its words, of the words of the slots and of ``meta``; and the keys for which there is
    room."""
    start = 0
    whole = True
    for k in range(ends.size):
        room = places[k, which, 4]
        table, table_words = (
            carray(_pointer(places[k, which, 0]), 2 * room, np.int32),
            carray(_pointer(places[k, which, 1]), 2 * room, np.uint64),
        )
        words, meta = (
            carray(_pointer(places[k, which, 2]), room, np.uint64),
            carray(_pointer(places[k, which, 3]), 4, np.int64),
        )
        mine = out[start : ends[k]]
        done = find_words(values, validity, offset + start, kind, np.int64(0), mine, table, table_words, words, meta)
        whole &= done == mine.size
        start = ends[k]
    return whole


@kernel
def take_words_each(slots: Array, ends: Array, places: Array, which: int, out: Array, valid: Array) -> int:
    """Write the words of slots to ``out``, and to ``valid`` whether each is a value. Return the number of values."""
    start = count = 0
    for k in range(ends.size):
        words, meta = (
            carray(_pointer(places[k, which, 2]), places[k, which, 4], np.uint64),
            carray(_pointer(places[k, which, 3]), 4, np.int64),
        )
        for i in range(start, ends[k]):
            out[i] = words[slots[i]]
            valid[i] = slots[i] != meta[1]
            count += valid[i]
        start = ends[k]
    return count


@kernel
def touched_each(slots: Array, ends: Array, places: Array, which: int, out: Array, found: Array) -> None:
    """Write the touched slots of each partition to ``out``, one behind the other, as ``touched`` does. They end at found[k].

    Places: the address of the marks, the mark, and the number of marks."""
    start = at = 0
    for k in range(ends.size):
        mine = carray(_pointer(places[k, which, 0]), places[k, which, 2], np.int64)
        at += touched(slots[start : ends[k]], mine, places[k, which, 1], out[at:])
        found[k] = at
        start = ends[k]


#: Operations of ``update_each`` and ``gather_each``.
COUNT_ROWS, COUNT_VALID, ADD_DOUBLES, ADD_INTEGERS, KEEP_LEAST, MEAN_DOUBLES = 0, 1, 2, 3, 4, 5


@kernel
def update_each(
    what: int, slots: Array, values: int, validity: int, offset: int, kind: int, flip: int, ends: Array, places: Array,
    which: int,
) -> int:  # fmt: skip
    """Update an accumulator of each partition. Return the partition of the first sum that does not fit, or -1.

    Places: the address of the values of the slots; the address of their counts, or of their ``seen``; and the number of slots."""
    start = 0
    for k in range(ends.size):
        mine, first = slots[start : ends[k]], offset + start
        start = ends[k]
        room = places[k, which, 2]
        counts = carray(_pointer(places[k, which, 1]), room, np.int64)
        if what == COUNT_ROWS:
            count_rows(mine, counts)
        elif what == COUNT_VALID:
            count_valid(mine, validity, first, counts)
        elif what == KEEP_LEAST:
            best, seen = (
                carray(_pointer(places[k, which, 0]), room, np.int64),
                carray(_pointer(places[k, which, 1]), room, np.bool_),
            )
            keep_least(mine, values, validity, first, kind, flip, best, seen)
        elif what == ADD_INTEGERS:
            sums = carray(_pointer(places[k, which, 0]), room, np.int64)
            if not add_integers(mine, values, validity, first, kind, sums, counts):
                return k
        else:
            doubles = carray(_pointer(places[k, which, 0]), room, np.float64)
            add_doubles(mine, values, validity, first, kind, doubles, counts)
    return -1


@kernel
def gather_each(
    what: int, slots: Array, ends: Array, places: Array, which: int, flip: int, out: Array, valid: Array
) -> int:
    """Set out[i] to the value of the accumulator for slots[i], as 64 bits, and valid[i] to whether there is one.

    Return the number of valid ones. Places: see ``update_each``."""
    count = start = 0
    doubles = out.view(np.float64)
    for k in range(ends.size):
        end, room = ends[k], places[k, which, 2]
        mine, part, there = slots[start:end], out[start:end], valid[start:end]
        counts = carray(_pointer(places[k, which, 1]), room, np.int64)
        if what == KEEP_LEAST:
            best, seen = (
                carray(_pointer(places[k, which, 0]), room, np.int64),
                carray(_pointer(places[k, which, 1]), room, np.bool_),
            )
            count += _gather(best, seen, mine, flip, part, there)
        elif what == MEAN_DOUBLES:
            sums = carray(_pointer(places[k, which, 0]), room, np.float64)
            for i in range(start, end):
                s = slots[i]
                doubles[i] = sums[s] / max(counts[s], 1)
                valid[i] = counts[s] > 0
                count += valid[i]
        elif what in (COUNT_ROWS, COUNT_VALID):
            for i in range(start, end):
                out[i] = counts[slots[i]]
                valid[i] = True
            count += end - start
        else:
            kept = carray(_pointer(places[k, which, 0]), room, np.int64)
            count += _gather(kept, counts, mine, 0, part, there)
        start = end
    return count


# Least strings: each slot has a piece of the arena (``starts`` and ``rooms``), with a value of ``sizes`` bytes in it (-1: none
# yet). ``heads`` has the first eight bytes of the value as a number with the same order, so that most comparisons read no more.


@kernel
def _head(data: int, size: int) -> Word:
    """Read the first eight bytes, filled with zeros, as a number with the same order."""
    w = _U0
    for p in range(8):
        w = w << np.uint64(8)
        if p < size:
            w |= np.uint64(_u8(data + p))
    return w


@kernel
def _sooner(a: int, a_size: int, b: int, b_size: int) -> bool:
    """Tell whether the bytes at ``a`` come before the bytes at ``b``, as unsigned numbers, and the shorter first."""
    for p in range(8, min(a_size, b_size)):  # the heads are equal
        x, y = _u8(a + p), _u8(b + p)
        if x != y:
            return x < y
    return a_size < b_size


@kernel
def keep_least_strings(
    slots: Array, offsets: int, data: int, validity: int, offset: int, kind: int, greatest: bool, first: int,
    heads: Array, starts: Array, rooms: Array, sizes: Array, arena: Array, meta: Array,
) -> int:  # fmt: skip
    """Keep the least value of each slot, or the greatest. Stop at the row for which the arena has no room, and return its number.

    ``meta`` is [bytes of the arena in use, bytes wanted]."""
    n = slots.size
    home = arena.ctypes.data
    used = meta[0]
    done = n
    for i in range(first, n):
        j = offset + i
        if validity != 0 and _bit(validity, j) == 0:
            continue
        s = slots[i]
        start = _start(offsets, kind, j)
        size = _start(offsets, kind, j + 1) - start
        head = _head(data + start, size)
        if sizes[s] >= 0:
            if head == heads[s]:
                there = home + starts[s]
                if greatest:
                    better = _sooner(there, sizes[s], data + start, size)
                else:
                    better = _sooner(data + start, size, there, sizes[s])
            else:
                better = (head > heads[s]) == greatest
            if not better:
                continue
        if size > rooms[s]:
            if used + size > arena.size:
                meta[1] = size
                done = i
                break
            starts[s] = used
            rooms[s] = size
            used += size
        for p in range(size):
            arena[starts[s] + p] = _u8(data + start + p)
        heads[s] = head
        sizes[s] = size
    meta[0] = used
    return done


@kernel
def piece_ends(sizes: Array, slots: Array, ends: Array) -> None:
    """Set ends[i + 1] to the end of piece i, with the pieces of the slots one after the other. No value has no bytes."""
    total = 0
    ends[0] = 0
    for i in range(slots.size):
        total += max(sizes[slots[i]], 0)
        ends[i + 1] = total


@kernel
def copy_pieces(starts: Array, sizes: Array, arena: Array, slots: Array, out: Array) -> None:
    at = 0
    for i in range(slots.size):
        s = slots[i]
        for p in range(starts[s], starts[s] + max(sizes[s], 0)):
            out[at] = arena[p]
            at += 1
