"""The journal's records, and the frames in which they are written (design: journal).

A frame holds the records that became durable at once. Only the last frame may be torn: its records have never been acked. The
first frame of a segment is durable before the segment has its name. A damaged frame with a whole one anywhere behind it is
damage to acked records.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa

from flux.errors import SnapshotError
from flux.wire.messages import Mark, OrderEntry, PartitionOrder

#: The mark by which frames are found again behind damage.
_MAGIC = b"FlxJ"
#: Magic, CRC-32 of all that follows, bytes of the body, and bytes of the unpacked body; 0: the body is not packed.
_FRAME = struct.Struct("<4sIII")
_CHECKED_FROM = 8
#: Smaller frames are not worth packing.
_PACKED_LEAST = 200
_codec = pa.Codec("zstd", compression_level=1)


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Record that the vault goes by the table of this epoch."""

    epoch: int


class Ordered(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Record of orders of a primary that were news."""

    item: PartitionOrder


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Record that primaries of earlier terms are not heeded any more."""

    stage: int
    partition: int
    term: int


class KeptState(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint, in ``data`` or in a ``file``."""

    #: The number of steps in the state. ``step``, ``term``, ``number``, ``at`` and ``base`` are those of ``Checkpoint``.
    step: int
    term: int
    number: int
    at: float
    #: The highest incarnation of any stream in it.
    highest: int
    #: Size and CRC-32 of the state.
    nbytes: int
    crc: int
    #: Name of its file; empty: the state is in ``data``.
    file: str = ""
    data: bytes = b""
    base: int = -1


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Record that a standby has taken a checkpoint."""

    stage: int
    partition: int
    kept: KeptState


class Through(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Record that the checkpoint of a partition has all rows of a stream through a mark (design: needed-no-more)."""

    stage: int
    partition: int
    edge: int
    producer: int
    mark: Mark


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Record of all that is held of a partition, at the beginning of a segment."""

    stage: int
    partition: int
    #: The pieces of the committed checkpoint: the whole copy, if there is one, and those of the changes after it.
    checkpoint: list[KeptState]
    #: The pieces of the checkpoint that waits for its commits.
    beside: list[KeptState]
    #: The step at which ``entries`` begin.
    step: int
    term: int
    #: Ends of the verified and of the committed part of the order.
    verified: int
    committed: int
    #: The position in the output below which all output is outside.
    left: int
    entries: list[OrderEntry]
    claim: tuple[int, int] = (0, 0)
    #: Edge, producer and mark: the checkpoint has all rows of that stream through the mark.
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
    """Yield the frames of a segment, but for the torn one at its end. SnapshotError: a frame before the end is damaged, or a
    frame is whole and this release does not know its records."""
    start = 0
    while (found := _found(data, start)) is not None:
        body, unpacked, end = found
        raw = _codec.decompress(body, unpacked, asbytes=True) if unpacked else body
        try:
            decoded = _decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise SnapshotError(
                f"{where} was written by another release of Flux: {error}. Start that release"
            ) from error
        yield decoded
        start = end
    if start == 0 or _is_followed(data, start):
        raise SnapshotError(
            f"{where} is damaged at byte {start:,} of {len(data):,}, and that was whole once: what was shown outside since then "
            "cannot be repeated from it. Restore the directory from a copy, or begin anew in an empty one"
        )


def _found(data: memoryview, start: int) -> tuple[memoryview, int, int] | None:
    """Return the body of the whole frame at ``start``, its unpacked size, and its end."""
    if start + _FRAME.size > len(data):
        return None
    magic, crc, length, unpacked = _FRAME.unpack_from(data, start)
    end = start + _FRAME.size + length
    checked = data[start + _CHECKED_FROM : end]
    if magic != _MAGIC or end > len(data) or zlib.crc32(checked) != crc:
        return None
    return data[start + _FRAME.size : end], unpacked, end


def _is_followed(data: memoryview, start: int) -> bool:
    """Return whether a whole frame begins anywhere behind ``start``."""
    rest = bytes(data[start + 1 :])
    at = rest.find(_MAGIC)
    while at >= 0:
        if _found(data, start + 1 + at) is not None:
            return True
        at = rest.find(_MAGIC, at + 1)
    return False
