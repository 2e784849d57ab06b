"""The journal's records, and the frames in which they are written (design: journal).

A frame holds what became durable at once. Only the last one may be torn: what it says has never been acked. The first one of a
segment is durable before the segment has its name. A frame that is damaged with a whole one anywhere behind it is damage to what
was acked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa

from flux.errors import SnapshotError
from flux.wire.messages import Mark, OrderEntry, PartitionOrder

#: By which frames are found again behind damage.
_MAGIC = b"FlxJ"
#: Magic, CRC-32 of all that follows, bytes of the body, and what they are when unpacked; 0: they are not packed.
_FRAME = struct.Struct("<4sIII")
_CHECKED_FROM = 8
#: Smaller frames are not worth packing.
_PACKED_LEAST = 200
_codec = pa.Codec("zstd", compression_level=1)


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """The vault goes by the table of this epoch."""

    epoch: int


class Ordered(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Orders of a primary that were news."""

    item: PartitionOrder


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """No primary of an earlier term is heeded."""

    stage: int
    partition: int
    term: int


class KeptState(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint, in ``data`` or in a ``file``. ``highest``: incarnation of any stream in it; ``at``, ``base``: as in
    ``Checkpoint``."""

    step: int
    term: int
    number: int
    at: float
    highest: int
    nbytes: int
    crc: int
    file: str = ""
    data: bytes = b""
    base: int = -1


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A checkpoint of a partition has come."""

    stage: int
    partition: int
    kept: KeptState


class Through(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The checkpoint of a partition has all rows of a stream through a mark (design: needed-no-more)."""

    stage: int
    partition: int
    edge: int
    producer: int
    mark: Mark


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """All that is held of a partition, at the beginning of a segment. ``checkpoint``, ``beside``: the whole copy, if there is
    one, and those of what has changed since."""

    stage: int
    partition: int
    checkpoint: list[KeptState]
    beside: list[KeptState]
    step: int
    term: int
    verified: int
    committed: int
    left: int
    entries: list[OrderEntry]
    claim: tuple[int, int] = (0, 0)
    settled: list[tuple[int, int, Mark]] = []


Record = Seen | Ordered | Fenced | Taken | Through | Whole
_decoder = msgspec.msgpack.Decoder(list[Record])


def frame(records: Sequence[Record]) -> bytes:
    raw = body = msgspec.msgpack.encode(records)
    unpacked = 0
    if len(raw) >= _PACKED_LEAST:
        body, unpacked = _codec.compress(raw, asbytes=True), len(raw)
    head = _FRAME.pack(_MAGIC, 0, len(body), unpacked)
    crc = zlib.crc32(body, zlib.crc32(head[_CHECKED_FROM:]))
    return _FRAME.pack(_MAGIC, crc, len(body), unpacked) + body


def frames(data: memoryview, where: str) -> Iterator[list[Record]]:
    """Those of a segment, but for the torn one at its end. SnapshotError: something before the end is damaged."""
    start = 0
    while (found := _found(data, start)) is not None:
        body, unpacked, end = found
        yield _decoder.decode(_codec.decompress(body, unpacked, asbytes=True) if unpacked else body)
        start = end
    if start == 0 or _is_followed(data, start):
        raise SnapshotError(
            f"{where} is damaged at byte {start:,} of {len(data):,}, and that was whole once: what was shown outside since then "
            "cannot be repeated from it. Restore the directory from a copy, or begin anew in an empty one"
        )


def _found(data: memoryview, start: int) -> tuple[memoryview, int, int] | None:
    """The body of the whole frame at ``start``, its size when unpacked, and where it ends."""
    if start + _FRAME.size > len(data):
        return None
    magic, crc, length, unpacked = _FRAME.unpack_from(data, start)
    end = start + _FRAME.size + length
    checked = data[start + _CHECKED_FROM : end]
    if magic != _MAGIC or end > len(data) or zlib.crc32(checked) != crc:
        return None
    return data[start + _FRAME.size : end], unpacked, end


def _is_followed(data: memoryview, start: int) -> bool:
    """Whether a whole frame begins anywhere behind."""
    rest = bytes(data[start + 1 :])
    at = rest.find(_MAGIC)
    while at >= 0:
        if _found(data, start + 1 + at) is not None:
            return True
        at = rest.find(_MAGIC, at + 1)
    return False
