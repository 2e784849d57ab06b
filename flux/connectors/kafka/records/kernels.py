"""The loops over records of Kafka, compiled: batches in format 2 to columns and back, checksums, partitions by key.

Law: no byte outside the given ranges is read or written, even if lengths in the bytes are wrong. Every length is checked
against the end of the surrounding part before it is used; a length that does not fit is a code (``REASONS``), never an
exception and never a crash.

Bytes come as addresses, because they lie in answers, in decompressed memory and in Arrow buffers alike; kernels fill numpy
arrays. No policy here: callers choose the batches to read, and sizes. Every kernel releases the interpreter lock. They are
all in this one file for the same reason as those of ``partitioning.kernels``: the cache on disk is renewed when this file
changes.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

Array = np.ndarray
Word = Any  # an unsigned number inside kernels

kernel = njit(cache=True, nogil=True, error_model="numpy")

#: Bytes of a record batch before its records, and before the part that its length counts.
HEAD, PREFIX = 61, 12
#: Least size of a record: its size, attributes, time, offset, two lengths and the number of headers.
RECORD_MIN = 7

# Columns of the table that ``scan`` fills, with one row per record batch.
AT, LENGTH, BASE, LAST_DELTA, ATTRIBUTES, BASE_TIME, MAX_TIME, PRODUCER, EPOCH, SEQUENCE, RECORDS = range(11)
FIELDS = 11

# Bits of the attributes of a record batch.
CODEC, APPEND_TIME, TRANSACTIONAL, CONTROL = 0x07, 0x08, 0x10, 0x20

# Parts of records that ``decode`` copies.
KEYS, VALUES, HEADERS = 1, 2, 4

# Codes with which scan and decode end.
OK, OLD_FORMAT, BAD_LENGTH, BAD_CHECKSUM, BAD_COUNT, BAD_OFFSETS = range(6)
BAD_VARINT, BAD_SIZE, BAD_TIME, BAD_REST, HAS_HEADERS = range(6, 11)
REASONS = {
    OLD_FORMAT: "it is not in record format 2 (of Kafka 0.11 and later)",
    BAD_LENGTH: "the length of the record batch cannot be right",
    BAD_CHECKSUM: "the checksum of the record batch does not match its bytes",
    BAD_COUNT: "the number of records does not fit the bytes of the record batch",
    BAD_OFFSETS: "the offsets in the record batch are out of range or not in order",
    BAD_VARINT: "a number in a record is cut off or too long",
    BAD_SIZE: "a length in a record goes beyond what surrounds it",
    BAD_TIME: "a timestamp is out of range",
    BAD_REST: "there are bytes behind the last record of the batch",
}

#: Largest time in milliseconds whose microseconds fit 64 bits.
_TIME_MAX = np.int64(9_223_372_036_854_775)
_OFFSET_MAX = np.int64(0x7FFF_FFFF_0000_0000)  # room for the delta behind it


# ---- memory --------------------------------------------------------------------------------------


def _loader(result: Any, swapped: bool = False) -> Any:
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = context.get_value_type(result).as_pointer()
            loaded = builder.load(builder.inttoptr(args[0], pointer), align=1)
            return builder.bswap(loaded) if swapped else loaded

        return result(types.int64), generate

    return intrinsic(load)


def _storer(kind: Any, swapped: bool = False) -> Any:
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = context.get_value_type(kind).as_pointer()
            value = builder.bswap(args[1]) if swapped else args[1]
            builder.store(value, builder.inttoptr(args[0], pointer), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return intrinsic(store)


_u8 = _loader(types.uint8)
_u64 = _loader(types.uint64)
_i32 = _loader(types.int32)
_i64 = _loader(types.int64)
# Numbers as Kafka writes them: the highest byte first.
_big_i16 = _loader(types.int16, swapped=True)
_big_i32 = _loader(types.int32, swapped=True)
_big_u32 = _loader(types.uint32, swapped=True)
_big_i64 = _loader(types.int64, swapped=True)
_put8 = _storer(types.uint8)
_put64 = _storer(types.uint64)
_put_big16 = _storer(types.int16, swapped=True)
_put_big32 = _storer(types.int32, swapped=True)
_put_big64 = _storer(types.int64, swapped=True)


@intrinsic
def _move(typing_context: Any, to: Any, at: Any, size: Any) -> Any:
    """Call memcpy."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@kernel
def _copy(to: int, at: int, size: int) -> None:
    """Copy exactly ``size`` bytes. Short pieces, as most keys and values are, take no call."""
    if size > 64:
        _move(to, at, size)
    elif size >= 8:
        last = size - 8
        done = np.int64(0)
        while done < last:
            _put64(to + done, _u64(at + done))
            done += 8
        _put64(to + last, _u64(at + last))
    else:
        for i in range(size):
            _put8(to + i, _u8(at + i))


# ---- checksum ------------------------------------------------------------------------------------

_POLYNOMIAL = 0x82F63B78  # of CRC32C, lowest bit first


def _tables() -> Array:
    """Make the tables for the checksum of eight bytes at once. Row r is for a byte with r more bytes behind it."""
    tables = np.zeros((8, 256), np.uint32)
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
        tables[0, byte] = state
    for row in range(1, 8):
        before = tables[row - 1]
        tables[row] = (before >> np.uint32(8)) ^ tables[0][before & np.uint32(0xFF)]
    return tables


_TABLES = _tables()
_BYTE = np.uint64(0xFF)


@kernel
def crc32c_by_table(address: int, size: int) -> Any:
    state = np.uint64(0xFFFFFFFF)
    at, end = address, address + size
    while end - at >= 8:
        word = _u64(at) ^ state
        state = np.uint64(
            _TABLES[7, word & _BYTE]
            ^ _TABLES[6, (word >> np.uint64(8)) & _BYTE]
            ^ _TABLES[5, (word >> np.uint64(16)) & _BYTE]
            ^ _TABLES[4, (word >> np.uint64(24)) & _BYTE]
            ^ _TABLES[3, (word >> np.uint64(32)) & _BYTE]
            ^ _TABLES[2, (word >> np.uint64(40)) & _BYTE]
            ^ _TABLES[1, (word >> np.uint64(48)) & _BYTE]
            ^ _TABLES[0, word >> np.uint64(56)]
        )
        at += 8
    while at < end:
        state = (state >> np.uint64(8)) ^ np.uint64(_TABLES[0, (state ^ np.uint64(_u8(at))) & _BYTE])
        at += 1
    return np.uint32(state ^ np.uint64(0xFFFFFFFF))


def _has_instruction() -> bool:
    """Tell whether the code that numba makes may use the processor's own instruction for CRC32C."""
    if config.CPU_NAME or config.CPU_FEATURES:  # code for another processor is asked for
        return "+sse4.2" in (config.CPU_FEATURES or "")
    return bool(llvmlite.binding.get_host_cpu_features().get("sse4.2", False))


@intrinsic
def _crc_word(typing_context: Any, state: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        long = ir.IntType(64)
        called = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(long, [long, long]), "llvm.x86.sse42.crc32.64.64"
        )
        return builder.call(called, args)

    return types.uint64(types.uint64, types.uint64), generate


@kernel
def crc32c_by_instruction(address: int, size: int) -> Any:
    state = np.uint64(0xFFFFFFFF)
    at, end = address, address + size
    while end - at >= 8:
        state = _crc_word(state, _u64(at))
        at += 8
    while at < end:
        state = (state >> np.uint64(8)) ^ np.uint64(_TABLES[0, (state ^ np.uint64(_u8(at))) & _BYTE])
        at += 1
    return np.uint32(state ^ np.uint64(0xFFFFFFFF))


crc32c = crc32c_by_instruction if _has_instruction() else crc32c_by_table


# ---- numbers -------------------------------------------------------------------------------------


@kernel
def _varint(at: int, end: int) -> Any:
    """Read the number at an address. Returns it with the address behind it, which is 0 if no number ends before ``end``."""
    if at >= end:
        return np.int64(0), np.int64(0)
    byte = _u8(at)
    value = np.uint64(byte & 0x7F)
    here = at + 1
    shift = np.uint64(7)
    while byte >= 0x80:
        if here >= end or shift > np.uint64(63):
            return np.int64(0), np.int64(0)
        byte = _u8(here)
        value |= np.uint64(byte & 0x7F) << shift
        shift += np.uint64(7)
        here += 1
    return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), here


@kernel
def _zigzag(value: int) -> Word:
    return np.uint64((value << 1) ^ (value >> 63))


@kernel
def _varint_size(value: int) -> Any:
    word = _zigzag(value)
    size = np.int64(1)
    while word > np.uint64(0x7F):
        word >>= np.uint64(7)
        size += 1
    return size


@kernel
def _put_varint(at: int, value: int) -> Any:
    word = _zigzag(value)
    here = at
    while word > np.uint64(0x7F):
        _put8(here, np.uint8((word & np.uint64(0x7F)) | np.uint64(0x80)))
        word >>= np.uint64(7)
        here += 1
    _put8(here, np.uint8(word))
    return here + 1


# ---- from the wire -------------------------------------------------------------------------------


@kernel
def scan(data: int, size: int, chunk_bytes: int, batches: Array) -> Any:
    """Read the heads of whole record batches, and check them and their checksums. Fills a row of ``batches`` for each, until
    it is full, or the batches have ``chunk_bytes``; a compressed batch counts four times, as it will have about that size.

    Returns a code, the number of batches, and the bytes up to the end of the last whole one; the last batch of an answer
    may be cut off. After an error the row behind the last batch has the base offset of the bad one."""
    at = np.int64(0)
    found = 0
    counted = np.int64(0)
    while found < len(batches) and counted < chunk_bytes and size - at > 16:
        head = data + at
        length = np.int64(_big_i32(head + 8))
        row = batches[found]
        row[BASE] = _big_i64(head)
        if _u8(head + 16) != 2:
            return OLD_FORMAT, found, at
        if length < HEAD - PREFIX:
            return BAD_LENGTH, found, at
        if length > size - at - PREFIX:
            break
        row[AT] = at
        row[LENGTH] = length + PREFIX
        row[ATTRIBUTES] = _big_i16(head + 21)
        row[LAST_DELTA] = _big_i32(head + 23)
        row[BASE_TIME] = _big_i64(head + 27)
        row[MAX_TIME] = _big_i64(head + 35)
        row[PRODUCER] = _big_i64(head + 43)
        row[EPOCH] = _big_i16(head + 51)
        row[SEQUENCE] = _big_i32(head + 53)
        row[RECORDS] = _big_i32(head + 57)
        if crc32c(head + 21, length + PREFIX - 21) != _big_u32(head + 17):
            return BAD_CHECKSUM, found, at
        if row[BASE] < 0 or row[BASE] > _OFFSET_MAX or row[LAST_DELTA] < 0:
            return BAD_OFFSETS, found, at
        if found and row[BASE] <= batches[found - 1][BASE] + batches[found - 1][LAST_DELTA]:
            return BAD_OFFSETS, found, at
        # Compaction takes records out and leaves the offsets of the batch.
        if row[RECORDS] < 0 or row[RECORDS] > row[LAST_DELTA] + 1:
            return BAD_COUNT, found, at
        found += 1
        at += PREFIX + length
        counted += (4 if row[ATTRIBUTES] & CODEC else 1) * length
    return OK, found, at


@kernel
def decode(
    batches: Array,
    bodies: Array,
    sizes: Array,
    start: int,
    columns: int,
    offsets: Array,
    times: Array,
    keys: Any,
    values: Any,
    headers: Any,
    rows: Array,
) -> Any:
    """Decode the records of some batches, from offset ``start`` on, to columns.

    ``bodies`` and ``sizes`` are address and bytes of the records of each batch, decompressed. ``columns`` names the parts
    to copy: KEYS, VALUES, HEADERS. ``keys`` and ``values`` are ends (int32, one more than rows), valid (bool) and bytes;
    they have room for the number of records in the heads and the bytes of the bodies. ``headers`` are ends of the rows,
    ends and bytes of the names, and ends, valid and bytes of the values. ``rows`` is filled with the number of rows after
    each batch.

    Returns a code, the number of rows, the batch and the record at which it ended, and the numbers of null keys, null
    values and headers. HAS_HEADERS: rows have headers, and there are no arrays for them."""
    key_ends, key_valid, key_bytes = keys
    value_ends, value_valid, value_bytes = values
    header_ends, name_ends, name_bytes, item_ends, item_valid, item_bytes = headers
    key_room, value_room = key_bytes.ctypes.data, value_bytes.ctypes.data
    name_room, item_room = name_bytes.ctypes.data, item_bytes.ctypes.data
    row = key_to = value_to = null_keys = null_values = header = name_to = item_to = np.int64(0)
    for b in range(len(batches)):
        base, last = batches[b, BASE], batches[b, LAST_DELTA]
        append_time = batches[b, ATTRIBUTES] & APPEND_TIME
        batch_time = batches[b, MAX_TIME] if append_time else batches[b, BASE_TIME]
        here, end = bodies[b], bodies[b] + sizes[b]
        count = batches[b, RECORDS]
        if count > sizes[b] // RECORD_MIN:
            return BAD_COUNT, row, b, 0, null_keys, null_values, header
        if batch_time > _TIME_MAX or batch_time < -_TIME_MAX:
            return BAD_TIME, row, b, 0, null_keys, null_values, header
        before = np.int64(-1)  # the delta of the record before
        for r in range(count):
            size, here = _varint(here, end)
            if here == 0:
                return BAD_VARINT, row, b, r, null_keys, null_values, header
            if size < RECORD_MIN - 1 or size > end - here:
                return BAD_SIZE, row, b, r, null_keys, null_values, header
            stop = here + size
            time, here = _varint(here + 1, stop)
            if here == 0:
                return BAD_VARINT, row, b, r, null_keys, null_values, header
            delta, here = _varint(here, stop)
            if here == 0:
                return BAD_VARINT, row, b, r, null_keys, null_values, header
            if delta <= before or delta > last:
                return BAD_OFFSETS, row, b, r, null_keys, null_values, header
            before = delta
            if base + delta < start:
                here = stop
                continue

            size, here = _varint(here, stop)
            if here == 0:
                return BAD_VARINT, row, b, r, null_keys, null_values, header
            if size < -1 or size > stop - here:
                return BAD_SIZE, row, b, r, null_keys, null_values, header
            key_valid[row] = size >= 0
            if size < 0:
                null_keys += 1
            else:
                if columns & KEYS:
                    _copy(key_room + key_to, here, size)
                    key_to += size
                here += size

            size, here = _varint(here, stop)
            if here == 0:
                return BAD_VARINT, row, b, r, null_keys, null_values, header
            if size < -1 or size > stop - here:
                return BAD_SIZE, row, b, r, null_keys, null_values, header
            value_valid[row] = size >= 0
            if size < 0:
                null_values += 1
            else:
                if columns & VALUES:
                    _copy(value_room + value_to, here, size)
                    value_to += size
                here += size

            many, here = _varint(here, stop)
            if here == 0:
                return BAD_VARINT, row, b, r, null_keys, null_values, header
            if many < 0 or many > (stop - here) // 2:
                return BAD_SIZE, row, b, r, null_keys, null_values, header
            if many and columns & HEADERS and len(header_ends) == 0:
                return HAS_HEADERS, row, b, r, null_keys, null_values, header
            for _ in range(many):
                size, here = _varint(here, stop)
                if here == 0:
                    return BAD_VARINT, row, b, r, null_keys, null_values, header
                if size < 0 or size > stop - here:
                    return BAD_SIZE, row, b, r, null_keys, null_values, header
                if columns & HEADERS:
                    _copy(name_room + name_to, here, size)
                    name_to += size
                here += size
                size, here = _varint(here, stop)
                if here == 0:
                    return BAD_VARINT, row, b, r, null_keys, null_values, header
                if size < -1 or size > stop - here:
                    return BAD_SIZE, row, b, r, null_keys, null_values, header
                if columns & HEADERS:
                    item_valid[header] = size >= 0
                    if size > 0:
                        _copy(item_room + item_to, here, size)
                        item_to += size
                    header += 1
                    name_ends[header] = name_to
                    item_ends[header] = item_to
                if size > 0:
                    here += size
            if here != stop:
                return BAD_SIZE, row, b, r, null_keys, null_values, header

            if time > 2 * _TIME_MAX or time < -2 * _TIME_MAX:  # the sum would wrap
                return BAD_TIME, row, b, r, null_keys, null_values, header
            time = batch_time if append_time else batch_time + time
            if time > _TIME_MAX or time < -_TIME_MAX:
                return BAD_TIME, row, b, r, null_keys, null_values, header
            times[row] = time * 1000
            offsets[row] = base + delta
            row += 1
            key_ends[row] = key_to
            value_ends[row] = value_to
            if len(header_ends):
                header_ends[row] = header
        if here != end:
            return BAD_REST, row, b, count, null_keys, null_values, header
        rows[b] = row
    return OK, row, 0, 0, null_keys, null_values, header


@kernel
def control_kind(body: int, size: int) -> Any:
    """Return the kind of the first record in a control batch: 0 abort, 1 commit, other numbers for other kinds; -1 if it is
    malformed."""
    end = body + size
    length, here = _varint(body, end)
    if here == 0 or length < RECORD_MIN - 1 or length > end - here:
        return -1
    end = here + length
    here += 1  # attributes
    for _ in range(2):  # time, offset
        _number, here = _varint(here, end)
        if here == 0:
            return -1
    length, here = _varint(here, end)
    if here == 0 or length < 4 or length > end - here:
        return -1
    return np.int64(_big_i16(here + 2))


# ---- to the wire ---------------------------------------------------------------------------------


@kernel
def _valid(validity: int, i: int) -> bool:
    return validity == 0 or (_u8(validity + (i >> 3)) >> (i & 7)) & 1 != 0


@kernel
def _span(column: Any, i: int) -> Any:
    """Return address and bytes of value i; -1 bytes for null."""
    offsets, data, validity, first = column
    at = first + i
    if not _valid(validity, at):
        return data, np.int64(-1)
    begin = np.int64(_i32(offsets + 4 * at))
    return data + begin, np.int64(_i32(offsets + 4 * at + 4)) - begin


@kernel
def _span_size(size: int) -> Any:
    return _varint_size(size) + max(size, np.int64(0))


@kernel
def _record_size(keys: Any, values: Any, headers: Any, time: int, i: int, delta: int) -> Any:
    """Return the size of record i without the size's own bytes, and the first and the end of its headers."""
    size = 1 + _varint_size(time) + _varint_size(delta)
    size += _span_size(_span(keys, i)[1]) + _span_size(_span(values, i)[1])
    ends, validity, first, names, items = headers
    begin = end = np.int64(0)
    if ends and _valid(validity, first + i):
        begin, end = np.int64(_i32(ends + 4 * (first + i))), np.int64(_i32(ends + 4 * (first + i) + 4))
        for h in range(begin, end):
            size += _span_size(_span(names, h)[1]) + _span_size(_span(items, h)[1])
    return size + _varint_size(end - begin), begin, end


@kernel
def fitting(keys: Any, values: Any, headers: Any, times: Array, first: int, stop: int, room: int) -> Any:
    """Return the number of records from ``first`` on, and not beyond ``stop``, that take at most ``room`` bytes (one is always
    taken), and their bytes."""
    taken = np.int64(0)
    for i in range(first, stop):
        size = _record_size(keys, values, headers, times[i] - times[first], i, i - first)[0]
        size += _varint_size(size)
        if i > first and taken + size > room:
            return i - first, taken
        taken += size
    return stop - first, taken


@kernel
def encode(keys: Any, values: Any, headers: Any, times: Array, first: int, stop: int, out: int) -> int:
    """Write the records from ``first`` to below ``stop`` to an address, with as much room as ``fitting`` has returned. Returns
    the end."""
    here = out
    for i in range(first, stop):
        here = _put_record(here, keys, values, headers, times[i] - times[first], i, i - first)
    return here


@kernel
def grouped(partitions: Array, sequences: Array, count: int) -> Any:
    """Group rows by partition, keeping their order. Returns their numbers, the partitions that have rows, begin and end of
    each one's rows, the sequence of its first row, and whether all partitions are below ``count`` and all sequences go on
    from there without a gap."""
    rows = len(partitions)
    ends = np.zeros(count + 1, np.int64)
    for i in range(rows):
        if partitions[i] < 0 or partitions[i] >= count:
            none = np.empty(0, np.int64)
            return none, none, none, none, False
        ends[partitions[i] + 1] += 1
    found = 0
    for each in range(count):
        found += ends[each + 1] > 0
        ends[each + 1] += ends[each]
    present, starts, first = np.empty(found, np.int64), np.empty(found + 1, np.int64), np.empty(found, np.int64)
    at = 0
    for each in range(count):
        if ends[each + 1] > ends[each]:
            present[at], starts[at] = each, ends[each]
            at += 1
    starts[found] = rows
    order = np.empty(rows, np.int64)
    whole = True
    for i in range(rows):
        place = ends[partitions[i]]
        order[place] = i
        ends[partitions[i]] = place + 1
    for line in range(found):
        first[line] = sequences[order[starts[line]]]
        for place in range(starts[line], starts[line + 1]):
            whole &= sequences[order[place]] == first[line] + place - starts[line]
    return order, present, starts, first, whole


@kernel
def encode_each(
    keys: Any, values: Any, headers: Any, times: Array, order: Array, starts: Array, stops: Array, attributes: int, producer: int,
    epoch: int, sequences: Array, room: int, ends: Array,
) -> Array:  # fmt: skip
    """Encode one record batch for each line, whose rows are ``order[starts[line]:stops[line]]``, one after the other. Fills
    the end of each. Returns nothing if one of them takes more than ``room`` bytes."""
    total = np.int64(0)
    for line in range(len(ends)):
        begin, size = starts[line], np.int64(HEAD)
        base = times[order[begin]]
        for place in range(begin, stops[line]):
            row = order[place]
            taken = _record_size(keys, values, headers, times[row] - base, row, place - begin)[0]
            size += taken + _varint_size(taken)
        if size > room:
            return np.empty(0, np.uint8)
        total += size
        ends[line] = total
    out = np.empty(total, np.uint8)
    head = out.ctypes.data
    for line in range(len(ends)):
        begin, stop = starts[line], stops[line]
        base = latest = times[order[begin]]
        here = head + HEAD
        for place in range(begin, stop):
            row = order[place]
            latest = max(latest, times[row])
            here = _put_record(here, keys, values, headers, times[row] - base, row, place - begin)
        _put_head(head, here - head, 0, attributes, base, latest, stop - begin, producer, epoch, sequences[line])
        head = here
    return out


@kernel
def _put_record(here: Any, keys: Any, values: Any, headers: Any, time: int, i: int, delta: int) -> Any:
    size, begin, end = _record_size(keys, values, headers, time, i, delta)
    here = _put_varint(here, size)
    _put8(here, np.uint8(0))
    here = _put_varint(here + 1, time)
    here = _put_varint(here, delta)
    here = _put_bytes(here, _span(keys, i))
    here = _put_bytes(here, _span(values, i))
    here = _put_varint(here, end - begin)
    for h in range(begin, end):
        here = _put_bytes(here, _span(headers[3], h))
        here = _put_bytes(here, _span(headers[4], h))
    return here


@kernel
def _put_bytes(here: int, span: Any) -> int:
    at, size = span
    here = _put_varint(here, size)
    if size > 0:
        _copy(here, at, size)
        here += size
    return here


@kernel
def put_head(
    out: int,
    size: int,
    base: int,
    attributes: int,
    times: Array,
    first: int,
    stop: int,
    producer: int,
    epoch: int,
    sequence: int,
) -> None:
    """Write the head of a record batch of ``size`` bytes, head included, whose records are behind it already."""
    latest = times[first]
    for i in range(first, stop):
        latest = max(latest, times[i])
    _put_head(out, size, base, attributes, times[first], latest, stop - first, producer, epoch, sequence)


@kernel
def _put_head(
    out: int, size: int, base: int, attributes: int, time: int, latest: int, records: int, producer: int, epoch: int,
    sequence: int,
) -> None:  # fmt: skip
    _put_big64(out, np.int64(base))
    _put_big32(out + 8, np.int32(size - PREFIX))
    _put_big32(out + 12, np.int32(-1))
    _put8(out + 16, np.uint8(2))
    _put_big16(out + 21, np.int16(attributes))
    _put_big32(out + 23, np.int32(records - 1))
    _put_big64(out + 27, np.int64(time))
    _put_big64(out + 35, np.int64(latest))
    _put_big64(out + 43, np.int64(producer))
    _put_big16(out + 51, np.int16(epoch))
    _put_big32(out + 53, np.int32(sequence))
    _put_big32(out + 57, np.int32(records))
    _put_big32(out + 17, np.int32(crc32c(out + 21, size - 21)))


# ---- partitions ----------------------------------------------------------------------------------

_MURMUR = np.uint32(0x5BD1E995)
_MURMUR_SEED = np.uint32(0x9747B28C)
_POSITIVE = np.uint32(0x7FFFFFFF)


@kernel
def murmur2(at: int, size: int) -> Any:
    """Hash bytes as Kafka's Java client does (Appleby's MurmurHash2, public domain)."""
    state = _MURMUR_SEED ^ np.uint32(size)
    whole = size & ~3
    for i in range(0, whole, 4):
        word = np.uint32(np.uint32(_i32(at + i)) * _MURMUR)
        word ^= word >> np.uint32(24)
        state = np.uint32(state * _MURMUR) ^ np.uint32(word * _MURMUR)
    rest = size - whole
    if rest == 3:
        state ^= np.uint32(_u8(at + whole + 2)) << np.uint32(16)
    if rest >= 2:
        state ^= np.uint32(_u8(at + whole + 1)) << np.uint32(8)
    if rest >= 1:
        state = np.uint32((state ^ np.uint32(_u8(at + whole))) * _MURMUR)
    state ^= state >> np.uint32(13)
    state = np.uint32(state * _MURMUR)
    return state ^ (state >> np.uint32(15))


@kernel
def partitions_of(keys: Any, partitions: int, out: Array) -> None:
    """Find the partition of each key; -1 for a null, which has none of its own."""
    for i in range(len(out)):
        at, size = _span(keys, i)
        out[i] = -1 if size < 0 else np.int64(murmur2(at, size) & _POSITIVE) % partitions


@kernel
def number(partitions: Array, turn: int, counts: Array, sequences: Array) -> int:
    """Give each row its number in its partition, from ``counts`` on, which then count these rows, too. Rows without a
    partition (-1) get one in turn. Returns the next turn."""
    for i in range(len(partitions)):
        if partitions[i] < 0:
            partitions[i] = turn % len(counts)
            turn += 1
        sequences[i] = counts[partitions[i]]
        counts[partitions[i]] += 1
    return turn


# ---- values as text ------------------------------------------------------------------------------

# Kinds of a value, from ``objects`` and ``lines``: empty, one object or row, and broken.
BLANK, OBJECT, BROKEN = 0, 1, 2
_QUOTE, _BACKSLASH, _NEWLINE, _RETURN, _MINUS, _ZERO = 34, 92, 10, 13, 45, 48
_OBJECT_BEGINS, _OBJECT_ENDS, _ARRAY_BEGINS, _ARRAY_ENDS = 123, 125, 91, 93
#: Most brackets inside each other: parsers call themselves for each.
DEPTH_MAX = 256


@kernel
def objects(values: Any, out: Array) -> None:
    """Tell for each value whether it is one JSON object, from its first bracket to its last, and nothing else. A parser of
    many lines would take the end of one value and the beginning of the next for one object. The inside is not checked."""
    for i in range(len(out)):
        at, size = _span(values, i)
        out[i] = _object(at, size)


@kernel
def _object(at: int, size: int) -> int:
    depth, quoted, escaped, said = 0, False, False, BLANK
    for j in range(size):
        byte = _u8(at + j)
        if quoted:
            if escaped:
                escaped = False
            elif byte == _BACKSLASH:
                escaped = True
            elif byte == _QUOTE:
                quoted = False
            elif byte == _NEWLINE:
                return BROKEN
        elif byte == _QUOTE:
            quoted = True
            if depth == 0:
                return BROKEN
        elif byte in (_OBJECT_BEGINS, _ARRAY_BEGINS):
            if depth == 0 and (byte == _ARRAY_BEGINS or said == OBJECT):
                return BROKEN
            said = OBJECT
            depth += 1
            if depth > DEPTH_MAX:
                return BROKEN
        elif byte in (_OBJECT_ENDS, _ARRAY_ENDS):
            depth -= 1
            if depth < 0:
                return BROKEN
        elif depth == 0 and byte != 32 and byte != 9 and byte != 10 and byte != 13:
            return BROKEN
    return BROKEN if depth != 0 or quoted else said


@kernel
def lines(values: Any, delimiter: int, out: Array) -> None:
    """Tell for each value whether it is one row of CSV: BLANK, OBJECT (it is) or BROKEN. Newlines may be in quotes only, and
    quotes must end, because the next value would be taken for the rest of this one."""
    for i in range(len(out)):
        at, size = _span(values, i)
        out[i] = _line(at, size, delimiter)


@kernel
def _line(at: int, size: int, delimiter: int) -> int:
    quoted, fresh = False, True  # fresh: at the beginning of a field, where a quote opens
    j = np.int64(0)
    while j < size:
        byte = _u8(at + j)
        if quoted:
            if byte == _QUOTE:
                if j + 1 < size and _u8(at + j + 1) == _QUOTE:
                    j += 1
                else:
                    quoted = False
        elif byte in (_NEWLINE, _RETURN):
            return BROKEN
        elif byte == _QUOTE and fresh:
            quoted, fresh = True, False
        else:
            fresh = byte == delimiter
        j += 1
    if quoted:
        return BROKEN
    return OBJECT if size > 0 else BLANK


@kernel
def join(values: Any, rows: Array, instead: Array, blank: Array, out: Array) -> Any:
    """Write the values of some rows one after the other, each followed by a newline, with ``instead`` for rows that are
    ``blank``. Returns the number of bytes."""
    room = out.ctypes.data
    to = np.int64(0)
    for i in rows:
        at, size = _span(values, i)
        if blank[i] or size <= 0:
            for j in range(len(instead)):
                out[to + j] = instead[j]
            to += len(instead)
        else:
            _copy(room + to, at, size)
            to += size
        out[to] = _NEWLINE
        to += 1
    return to


@kernel
def ascii_alone(text: int, size: int) -> bool:
    """Tell whether no byte is above 127."""
    found = np.int64(0)
    at = np.int64(0)
    while at + 8 <= size:
        found |= _i64(text + at)
        at += 8
    high = (found & np.int64(-0x7F7F7F7F7F7F7F80)) != 0
    while at < size:
        high |= _u8(text + at) > 127
        at += 1
    return not high


@kernel
def csv_fields(
    text: int, size: int, delimiter: int, begins: Array, ends: Array, valid: Array, nulls: Array, out: Array
) -> bool:
    """Write the fields of rows that each have a newline behind them, column after column, into ``out``, without their quotes.
    ``ends`` has the end of each field in ``out``, behind the beginning of its column. Empty fields without quotes are not
    valid, and ``nulls`` counts them. ``begins`` is for this loop alone. False: the text has other numbers of rows or
    columns, or text behind a quote."""
    columns, rows = valid.shape
    here = np.int64(0)
    for row in range(rows):
        for column in range(columns):
            begin, length, quoted = here, np.int64(0), False
            if here < size and _u8(text + here) == _QUOTE:
                here += 1
                begin, quoted = here, True
                while True:
                    if here >= size:
                        return False
                    if _u8(text + here) == _QUOTE:
                        here += 1
                        if here >= size or _u8(text + here) != _QUOTE:
                            break
                    here += 1
                    length += 1
            else:
                while here < size:
                    byte = _u8(text + here)
                    if byte in (delimiter, _NEWLINE):
                        break
                    if byte == _RETURN:
                        return False
                    here += 1
                length = here - begin
            if here >= size or _u8(text + here) != (delimiter if column + 1 < columns else _NEWLINE):
                return False
            here += 1
            begins[column, row], ends[column, row + 1] = begin, length
            valid[column, row] = quoted or length > 0
            nulls[column] += not valid[column, row]
    if here != size:
        return False
    room = out.ctypes.data
    to = np.int64(0)
    for column in range(columns):
        ends[column, 0] = to
        for row in range(rows):
            at, length = text + begins[column, row], np.int64(ends[column, row + 1])
            if begins[column, row] > 0 and _u8(at - 1) == _QUOTE:
                for j in range(length):
                    byte = _u8(at)
                    out[to + j] = byte
                    at += 2 if byte == _QUOTE else 1
            else:
                _copy(room + to, at, length)
            to += length
            ends[column, row + 1] = to
    return True


@kernel
def integers(data: Array, ends: Array, valid: Array, digits: int, out: Array) -> bool:
    """Parse numbers of at most ``digits`` digits, perhaps with a minus in front. False: one of them is no such number."""
    for i in range(len(out)):
        at, end, value = ends[i], ends[i + 1], np.int64(0)
        if not valid[i]:
            out[i] = 0
            continue
        minus = at < end and data[at] == _MINUS
        at += minus
        if at == end or end - at > digits:
            return False
        while at < end:
            digit = np.int64(data[at]) - _ZERO
            if digit < 0 or digit > 9:
                return False
            value = 10 * value + digit
            at += 1
        out[i] = -value if minus else value
    return True


# ---- records of Avro that have no types inside each other ----------------------------------------

#: Kinds of a field.
AVRO_NULL, AVRO_BOOLEAN, AVRO_INT, AVRO_LONG, AVRO_FLOAT, AVRO_DOUBLE, AVRO_BYTES, AVRO_FIXED, AVRO_ENUM = range(9)
_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1


#: Kinds of a column for ``texts``: integers, text, and text that is made already.
TEXT_INT32, TEXT_INT64, TEXT_STRING, TEXT_MADE = range(4)
#: Columns of the table of fields for ``texts``: the kind; addresses of an Arrow column, and its first row.
TEXT_KIND, TEXT_DATA, TEXT_OFFSETS, TEXT_VALIDITY, TEXT_FIRST = range(5)
TEXT_FIELDS = 5
_DIGITS_MAX = 20
_SPACE, _COMMA = 32, 44


@kernel
def texts(rows: int, fields: Array, pieces: Array, piece_ends: Array, null: Array, json: bool) -> Any:
    """Make one text for each row: the pieces with the fields between them. Returns the ends of the texts, behind a zero, and
    their bytes; no ends at all if there are too many bytes.

    ``pieces`` (uint8) has the text before each field, and the text behind the last one; ``piece_ends`` has the end of each.
    ``null`` (uint8) stands for a null. With ``json``, text is in quotes; otherwise, as in CSV, only an empty one is."""
    none = np.empty(0, np.int32), np.empty(0, np.uint8)
    room: Any = rows * (len(pieces) + len(fields) * max(len(null), 2))
    for field in range(len(fields)):
        kind, offsets, first = fields[field, TEXT_KIND], fields[field, TEXT_OFFSETS], fields[field, TEXT_FIRST]
        if kind <= TEXT_INT64:
            room += rows * _DIGITS_MAX
        elif rows:
            begin, end = np.int64(_i32(offsets + 4 * first)), np.int64(_i32(offsets + 4 * (first + rows)))
            room += end - begin
    if room > _TEXT_MAX:
        return none
    ends, out = np.zeros(rows + 1, np.int32), np.empty(room, np.uint8)
    base = out.ctypes.data
    here = base
    for i in range(rows):
        for field in range(len(fields)):
            here = _put_piece(here, pieces, piece_ends, field)
            here = _put_text(here, fields, field, i, null, json)
        here = _put_piece(here, pieces, piece_ends, len(fields))
        ends[i + 1] = here - base
    return ends, out[: here - base]


_TEXT_MAX = (1 << 31) - 1


@kernel
def are_plain(rows: int, fields: Array, json: bool) -> bool:
    """Tell whether all fields of text need no more than quotes around them."""
    for field in range(len(fields)):
        if rows and fields[field, TEXT_KIND] == TEXT_STRING:
            offsets, first = fields[field, TEXT_OFFSETS], fields[field, TEXT_FIRST]
            begin, end = np.int64(_i32(offsets + 4 * first)), np.int64(_i32(offsets + 4 * (first + rows)))
            if not _is_plain(fields[field, TEXT_DATA] + begin, end - begin, json):
                return False
    return True


@kernel
def _is_plain(at: int, size: int, json: bool) -> bool:
    for j in range(size):
        byte = _u8(at + j)
        if byte == _QUOTE or (json and (byte < _SPACE or byte == _BACKSLASH)):
            return False
        if not json and byte in (_COMMA, _NEWLINE, _RETURN):
            return False
    return True


@kernel
def _put_piece(here: Any, pieces: Array, ends: Array, which: int) -> Any:
    for j in range(ends[which - 1] if which else 0, ends[which]):
        _put8(here, pieces[j])
        here += 1
    return here


@kernel
def _put_text(here: Any, fields: Array, field: int, i: int, null: Array, json: bool) -> Any:
    kind, data, row = fields[field, TEXT_KIND], fields[field, TEXT_DATA], fields[field, TEXT_FIRST] + i
    if not _valid(fields[field, TEXT_VALIDITY], row):
        for j in range(len(null)):
            _put8(here + j, null[j])
        return here + len(null)
    if kind == TEXT_INT32:
        return _put_digits(here, np.int64(_i32(data + 4 * row)))
    if kind == TEXT_INT64:
        return _put_digits(here, _i64(data + 8 * row))
    offsets = fields[field, TEXT_OFFSETS]
    begin = np.int64(_i32(offsets + 4 * row))
    size = np.int64(_i32(offsets + 4 * row + 4)) - begin
    # JSON has all text in quotes. CSV has only the empty string in quotes, because a null is an empty field. Texts that were
    # made for the kernel (TEXT_MADE) have their quotes already.
    quoted = kind == TEXT_STRING and (json or size == 0)
    if quoted:
        _put8(here, np.uint8(_QUOTE))
        here += 1
    _copy(here, data + begin, size)
    here += size
    if quoted:
        _put8(here, np.uint8(_QUOTE))
        here += 1
    return here


@kernel
def _put_digits(here: Any, value: int) -> Any:
    left: Word = np.uint64(value)
    if value < 0:
        _put8(here, np.uint8(_MINUS))
        here += 1
        left = np.uint64(0) - left
    size = np.int64(1)
    bound: Word = np.uint64(10)
    while size < _DIGITS_MAX - 1 and left >= bound:
        bound *= np.uint64(10)
        size += 1
    for j in range(size):
        _put8(here + size - 1 - j, np.uint8(np.uint64(_ZERO) + left % np.uint64(10)))
        left //= np.uint64(10)
    return here + size


@kernel
def schema_ids(values: Any, out: Array) -> None:
    """Find the id of each value's schema, behind a zero byte; -1 for null or empty values, -2 for values without one."""
    for i in range(len(out)):
        at, size = _span(values, i)
        if size <= 0:
            out[i] = -1
        elif size < 5 or _u8(at) != 0:
            out[i] = -2
        else:
            out[i] = np.int64(_big_u32(at + 1))


@kernel
def avro_records(
    values: Any, rows: Array, skip: int, kinds: Array, nulls: Array, sizes: Array, to: Array, numbers: Array, lengths: Array,
    valid: Array, good: Array,
) -> None:  # fmt: skip
    """Read some rows, each one record of the fields ``kinds`` behind ``skip`` bytes, which each of them has. ``nulls`` has the
    branch of null in a union of two, -1 for no union; ``sizes`` the bytes of fixed fields, and numbers of symbols; ``to``
    the column, -1 for none.

    Fills for column and row the number (for bytes their address, and their length) and whether there is one, and ``good``
    for each row: whether its bytes are exactly one such record."""
    for i in rows:
        at, size = _span(values, i)
        here, end = at + skip, at + size
        fits = True
        for field in range(len(kinds)):
            kind, column, number, length = kinds[field], to[field], np.int64(0), np.int64(0)
            if nulls[field] >= 0:
                branch, here = _varint(here, end)
                if here == 0 or branch < 0 or branch > 1:
                    fits = False
                    break
                if branch == nulls[field]:
                    continue
            if kind == AVRO_NULL:
                continue
            if kind == AVRO_BOOLEAN:
                if here >= end or _u8(here) > 1:
                    fits = False
                    break
                number = np.int64(_u8(here))
                here += 1
            elif kind in (AVRO_FLOAT, AVRO_DOUBLE, AVRO_FIXED):
                length = np.int64(4) if kind == AVRO_FLOAT else np.int64(8) if kind == AVRO_DOUBLE else sizes[field]
                if length < 0 or length > end - here:
                    fits = False
                    break
                number = np.int64(_i32(here)) if kind == AVRO_FLOAT else _i64(here) if kind == AVRO_DOUBLE else here
                here += length
            else:
                number, here = _varint(here, end)
                if here == 0:
                    fits = False
                    break
                if kind == AVRO_BYTES:
                    if number < 0 or number > end - here:
                        fits = False
                        break
                    number, length = here, number
                    here += length
                elif kind == AVRO_INT:
                    fits = _INT_MIN <= number <= _INT_MAX
                elif kind == AVRO_ENUM:
                    fits = 0 <= number < sizes[field]
                if not fits:
                    break
            if column >= 0:
                numbers[column, i] = number
                lengths[column, i] = length
                valid[column, i] = True
        good[i] = fits and here == end


# ---- and back ------------------------------------------------------------------------------------

#: Further kinds of a field that is written: Avro that is made already, lists and maps of that, decimals as bytes and as
#: fixed.
AVRO_MADE, AVRO_LIST, AVRO_DECIMAL, AVRO_FIXED_DECIMAL = range(9, 13)
#: Columns of the table of fields for ``avro_values``: the kind; the branches of null and of values in a union, the latter
#: -1 for no union; bytes of a fixed decimal; addresses of an Arrow column, its first row, the number of items of each row.
OUT_KIND, OUT_NULL, OUT_BRANCH, OUT_SIZE, OUT_DATA, OUT_OFFSETS, OUT_VALIDITY, OUT_FIRST, OUT_COUNTS = range(9)
OUT_FIELDS = 9
_DECIMAL_BYTES = 16


@kernel
def avro_values(validity: int, first: int, frame: Array, fields: Array, ends: Array, out: Array) -> None:
    """Write rows as records of Avro, one after the other, each behind the bytes of ``frame``, and no bytes for rows that are
    null. ``ends`` is filled, behind its first entry. ``out`` must have room for the largest values of these fields. Nulls
    are in unions."""
    base = out.ctypes.data
    here = base
    for i in range(len(ends) - 1):
        if _valid(validity, first + i):
            for j in range(len(frame)):
                _put8(here + j, frame[j])
            here += len(frame)
            for field in range(len(fields)):
                here = _put_field(here, fields, field, i)
        ends[i + 1] = here - base


@kernel
def _put_field(here: Any, fields: Array, field: int, i: int) -> int:
    kind, data, row = fields[field, OUT_KIND], fields[field, OUT_DATA], fields[field, OUT_FIRST] + i
    there = kind != AVRO_NULL and _valid(fields[field, OUT_VALIDITY], row)
    if fields[field, OUT_BRANCH] >= 0:
        here = _put_varint(here, fields[field, OUT_BRANCH] if there else fields[field, OUT_NULL])
    if not there:
        return here
    if kind == AVRO_INT:
        return _put_varint(here, np.int64(_i32(data + 4 * row)))
    if kind == AVRO_LONG:
        return _put_varint(here, _i64(data + 8 * row))
    if kind == AVRO_BOOLEAN:
        _put8(here, np.uint8((_u8(data + (row >> 3)) >> (row & 7)) & 1))
        return here + 1
    if kind == AVRO_FLOAT:
        _copy(here, data + 4 * row, np.int64(4))
        return here + 4
    if kind == AVRO_DOUBLE:
        _copy(here, data + 8 * row, np.int64(8))
        return here + 8
    if kind in (AVRO_DECIMAL, AVRO_FIXED_DECIMAL):
        return _put_decimal(here, data + _DECIMAL_BYTES * row, fields[field, OUT_SIZE])
    offsets = fields[field, OUT_OFFSETS]
    begin = np.int64(_i32(offsets + 4 * row))
    size = np.int64(_i32(offsets + 4 * row + 4)) - begin
    if kind == AVRO_BYTES:
        here = _put_varint(here, size)
    elif kind == AVRO_LIST:
        count = np.int64(_i32(fields[field, OUT_COUNTS] + 4 * i))
        if count > 0:
            here = _put_varint(here, count)
    _copy(here, data + begin, size)
    here += size
    if kind == AVRO_LIST:
        _put8(here, np.uint8(0))
        here += 1
    return here


@kernel
def _put_decimal(here: int, at: int, size: Any) -> int:
    """Write a decimal, the highest byte first. ``size`` 0: with as few bytes as it takes, behind their number."""
    sign = np.uint8(255) if _u8(at + _DECIMAL_BYTES - 1) >= 128 else np.uint8(0)
    if size == 0:
        size = np.int64(_DECIMAL_BYTES)
        while size > 1 and _u8(at + size - 1) == sign and (_u8(at + size - 2) >= 128) == (sign > 0):
            size -= 1
        here = _put_varint(here, size)
    for k in range(size):
        place = size - 1 - k
        _put8(here + k, _u8(at + place) if place < _DECIMAL_BYTES else sign)
    return here + size


@kernel
def gather(addresses: Array, lengths: Array, ends: Array, out: Array) -> None:
    """Copy bytes from many places, one piece after the other. ``ends`` is filled, behind its first entry."""
    room = out.ctypes.data
    to = np.int64(0)
    for i in range(len(addresses)):
        _copy(room + to, addresses[i], lengths[i])
        to += lengths[i]
        ends[i + 1] = to
