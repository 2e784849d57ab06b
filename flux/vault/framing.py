"""Frames of a segment: pieces of data that are found whole or not at all after a crash (design: journal, event-log-records).

A segment is written at its end only, so a crash can tear its last frame and no other. A frame that is damaged in front of a
whole one was durable once: that is loss, and not the end of the data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

#: The mark by which frames are found again behind damage.
_MAGIC = b"FlxJ"
#: Magic, CRC-32 of all that follows, bytes of the body, and bytes of the unpacked body; 0: the body is not packed.
_FRAME = struct.Struct("<4sIII")
_CHECKED_FROM = 8
#: Smaller frames are not worth packing.
_PACKED_LEAST = 200
_codec = pa.Codec("zstd", compression_level=1)


class Frame(NamedTuple):
    """A whole frame that was found in a segment."""

    content: bytes | memoryview
    #: The byte of the segment behind the frame.
    end: int


def framed(content: bytes, salt: int = 0) -> bytes:
    """Make a frame. ``salt`` begins its checksum: content of strangers that looks like a frame is none without the salt."""
    body: bytes = content
    unpacked = 0
    if len(content) >= _PACKED_LEAST:
        body, unpacked = _codec.compress(content, asbytes=True), len(content)
    head = _FRAME.pack(_MAGIC, 0, len(body), unpacked)
    crc = zlib.crc32(body, zlib.crc32(head[_CHECKED_FROM:], salt))
    return _FRAME.pack(_MAGIC, crc, len(body), unpacked) + body


def frame_at(data: memoryview, start: int, salt: int = 0) -> Frame | None:
    """Return the whole frame that begins at ``start``; None: there is none."""
    if start + _FRAME.size > len(data):
        return None
    magic, crc, length, unpacked = _FRAME.unpack_from(data, start)
    end = start + _FRAME.size + length
    if magic != _MAGIC or end > len(data) or zlib.crc32(data[start + _CHECKED_FROM : end], salt) != crc:
        return None
    body = data[start + _FRAME.size : end]
    return Frame(_codec.decompress(body, unpacked, asbytes=True) if unpacked else body, end)


def frames_from(data: memoryview, start: int, salt: int = 0) -> Iterator[Frame]:
    """Yield whole frames one behind the other, up to the first place where there is none."""
    while (found := frame_at(data, start, salt)) is not None:
        yield found
        start = found.end


def is_followed(data: memoryview, start: int, salt: int = 0) -> bool:
    """Return whether a whole frame begins anywhere behind ``start``."""
    rest = bytes(data[start + 1 :])
    at = rest.find(_MAGIC)
    while at >= 0:
        if frame_at(data, start + 1 + at, salt) is not None:
            return True
        at = rest.find(_MAGIC, at + 1)
    return False
