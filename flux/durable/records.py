"""The journal's records, and the frames in which they are written (design: journal).

A frame holds what became durable at once. Only the last one may be torn: what it says has never been acked. A frame that is
damaged with another one behind it is damage to what was acked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa

from flux.errors import SnapshotError
from flux.wire.messages import OrderEntry, PartitionOrder

#: Bytes that follow, their CRC-32, and what they are when unpacked; 0: they are not packed.
_FRAME = struct.Struct("<III")
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
    """A checkpoint, in ``data`` or in a ``file``. ``highest``: incarnation of any stream in it; ``at``: as in ``Checkpoint``."""

    step: int
    term: int
    number: int
    at: float
    highest: int
    nbytes: int
    crc: int
    file: str = ""
    data: bytes = b""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A checkpoint of a partition has come."""

    stage: int
    partition: int
    kept: KeptState


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """All that is held of a partition, at the beginning of a segment."""

    stage: int
    partition: int
    checkpoint: KeptState | None
    beside: KeptState | None
    step: int
    term: int
    verified: int
    committed: int
    left: int
    entries: list[OrderEntry]


Record = Seen | Ordered | Fenced | Taken | Whole
_decoder = msgspec.msgpack.Decoder(list[Record])


def frame(records: Sequence[Record]) -> bytes:
    raw = body = msgspec.msgpack.encode(records)
    unpacked = 0
    if len(raw) >= _PACKED_LEAST:
        body, unpacked = _codec.compress(raw, asbytes=True), len(raw)
    return _FRAME.pack(len(body), zlib.crc32(body), unpacked) + body


def frames(data: memoryview, where: str) -> Iterator[list[Record]]:
    """Whole frames, up to the torn one if there is one. SnapshotError: something before the end is damaged."""
    start = 0
    while (body := _body(data, start)) is not None:
        yield _decoder.decode(body)
        start += _FRAME.size + _FRAME.unpack_from(data, start)[0]
    rest = data[start:]
    if len(rest) >= _FRAME.size:
        behind = start + _FRAME.size + _FRAME.unpack_from(data, start)[0]
        if _body(data, behind) is not None:
            raise SnapshotError(
                f"{where} is damaged at byte {start:,}, and more follows that is whole: what was shown outside since then "
                "cannot be repeated from it. Restore the directory from a copy, or begin anew in an empty one"
            )


def _body(data: memoryview, start: int) -> bytes | memoryview | None:
    """What the frame at ``start`` holds; None: there is no whole one."""
    if start + _FRAME.size > len(data):
        return None
    length, crc, unpacked = _FRAME.unpack_from(data, start)
    body = data[start + _FRAME.size : start + _FRAME.size + length]
    if length == 0 or len(body) < length or zlib.crc32(body) != crc:
        return None
    return _codec.decompress(body, unpacked, asbytes=True) if unpacked else body
