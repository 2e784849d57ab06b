"""Bundles: several small messages to the same receiver in one (design: bundle).

Each message that is handed to ZeroMQ wakes its thread, and the thread at the other end, which costs more than to make and to read
a small message. So all small messages of one turn of the loop to one receiver travel together: one frame with a directory and all
the frames of all messages. Makers and readers of messages know nothing of bundles. Large messages travel alone, in their turn.

Law: ``unbundled`` gives the messages that were given to ``bundled``, frame by frame and in their order. No bundle is longer than
the receiver accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from struct import error, unpack_from
from typing import Any

import msgspec

from flux.errors import ProtocolError

Frames = Sequence[Any]

#: First bytes of a bundle; other messages begin with ``frames.MAGIC``. The last byte is the version.
PREFIX = b"FLB\x01"
#: A larger message travels alone, because a bundle is a copy.
SMALL_BYTES = 16 << 10
#: Bytes of one bundle at most. A bundle arrives in one piece, and is read in one piece.
BUNDLE_BYTES = 256 << 10
#: Messages in a bundle, as many as are taken from a socket at a time; and frames of all these messages.
MESSAGES_MAX, FRAMES_MAX = 64, 1024
#: Bytes of a directory at most: five for each number, and five for each list.
DIRECTORY_BYTES = 5 * (FRAMES_MAX + MESSAGES_MAX + 1)
#: Frames begin at multiples of this many bytes, as Arrow requires.
WORD = 8

_directory = msgspec.msgpack.Decoder(list[list[int]])
_encode = msgspec.msgpack.Encoder().encode


class _Gathered:
    """Small messages that may become one bundle of at most ``bytes_max`` bytes."""

    def __init__(self, bytes_max: int) -> None:
        self.messages: list[Frames] = []
        self._sizes: list[list[int]] = []
        self._frames = 0
        self._bytes_max = bytes_max
        self._nbytes = 0

    def takes(self, sizes: list[int]) -> bool:
        more = _room(sizes)
        fits = self._nbytes + more <= self._bytes_max and self._frames + len(sizes) <= FRAMES_MAX
        return fits and len(self.messages) < MESSAGES_MAX

    def add(self, frames: Frames, sizes: list[int]) -> None:
        self.messages.append(frames)
        self._sizes.append(sizes)
        self._frames += len(sizes)
        self._nbytes += _room(sizes)

    def frames(self) -> Frames:
        if len(self.messages) == 1:
            return self.messages[0]
        directory = _encode(self._sizes)
        parts: list[Any] = [PREFIX, len(directory).to_bytes(4, "little"), directory, _padding(len(directory))]
        for frames, sizes in zip(self.messages, self._sizes, strict=True):
            for frame, size in zip(frames, sizes, strict=True):
                parts += frame, _padding(size)
        return [b"".join(parts)]


def bundled(messages: Sequence[Frames], bytes_max: int = BUNDLE_BYTES) -> Iterator[Frames]:
    """Yield the messages to send: several small ones as a bundle of at most ``bytes_max`` bytes, large ones as they are."""
    if len(messages) == 1:
        yield messages[0]
        return
    # Without the part that does not depend on the messages.
    bytes_max = min(bytes_max, BUNDLE_BYTES) - len(PREFIX) - 4 - 5 - WORD
    gathered = _Gathered(bytes_max)
    for frames in messages:
        sizes = list(map(len, frames))
        small = sum(sizes) <= SMALL_BYTES
        if gathered.messages and not (small and gathered.takes(sizes)):
            yield gathered.frames()
            gathered = _Gathered(bytes_max)
        if small and gathered.takes(sizes):
            gathered.add(frames, sizes)
        else:
            yield frames
    if gathered.messages:
        yield gathered.frames()


def _room(sizes: list[int]) -> int:
    """Return an upper bound of the bytes that a message takes in a bundle."""
    return 5 + sum(sizes) + (5 + WORD) * len(sizes)


def unbundled(frames: Frames) -> Iterator[Frames]:
    """Yield the messages of a bundle, or the message itself if it is none. A caller that stops early loses the other messages.

    ProtocolError: a bundle does not keep to its form."""
    if len(frames) != 1 or frames[0][: len(PREFIX)] != PREFIX:
        yield frames
        return
    whole = memoryview(frames[0])
    if len(whole) > BUNDLE_BYTES:
        raise ProtocolError(f"a bundle of {len(whole)} bytes, at most {BUNDLE_BYTES} are accepted")
    try:
        (length,) = unpack_from("<I", whole, len(PREFIX))
        if length > DIRECTORY_BYTES:
            raise ProtocolError(f"a bundle with a directory of {length} bytes, at most {DIRECTORY_BYTES} are accepted")
        begin = len(PREFIX) + 4
        sizes = _directory.decode(whole[begin : begin + length])
    except (error, msgspec.MsgspecError, RecursionError, MemoryError) as problem:
        raise ProtocolError(f"a bundle without a directory: {problem}") from None
    flat = [size for mine in sizes for size in mine]
    first = begin + _rounded(length)
    ends = list(accumulate(map(_rounded, flat), initial=first))
    few = len(sizes) <= MESSAGES_MAX and len(flat) <= FRAMES_MAX
    if not few or not all(sizes) or min(flat, default=-1) < 0 or ends[-1] != len(whole):
        raise ProtocolError(f"a bundle of {len(whole)} bytes whose directory says {ends[-1]}")
    at = 0
    for mine in sizes:
        last = at + len(mine)
        # Copies, for two reasons: a slice that waits for long must not keep the whole bundle in memory, and Arrow needs frames
        # that begin at words.
        yield [bytes(whole[start : start + size]) for start, size in zip(ends[at:last], mine, strict=True)]
        at = last


def _rounded(size: int) -> int:
    return -size % WORD + size


def _padding(size: int) -> bytes:
    return bytes(-size % WORD)
