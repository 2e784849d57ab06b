"""Several small messages to the same receiver as one (design: bundle).

Each message that is handed to ZeroMQ wakes its thread, and the other end's, which costs more than to make and to read a small
one. So what a turn of the loop has to say to one receiver travels together: one frame with a directory and all the frames of all
messages. Nothing of this is known to those who make and read messages. Large ones travel alone, in their turn.

Law: what ``unbundled`` gives are the messages that were given to ``bundled``, frame by frame and in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from struct import error, unpack_from
from typing import Any

import msgspec

from flux.errors import ProtocolError

Frames = Sequence[Any]

#: How a bundle begins; other messages begin with ``frames.MAGIC``. The last byte is the version.
PREFIX = b"FLB\x01"
#: A message with more bytes is not copied.
SMALL_BYTES = 16 << 10
#: Of a bundle: what comes in one piece is read in one piece.
BUNDLE_BYTES = 256 << 10
#: Messages in a bundle.
MESSAGES_MAX = 1024
#: Where frames begin, as Arrow wants it.
WORD = 8

_directory = msgspec.msgpack.Decoder(list[list[int]])
_encode = msgspec.msgpack.Encoder().encode


def bundled(messages: Sequence[Frames]) -> Iterator[Frames]:
    """What is to be sent for these messages: several small ones as one, the others as they are."""
    if len(messages) == 1:
        yield messages[0]
        return
    small: list[Frames] = []
    sizes: list[list[int]] = []
    nbytes = 0
    for frames in messages:
        mine = list(map(len, frames))
        size = sum(mine)
        if small and (size > SMALL_BYTES or nbytes + size > BUNDLE_BYTES or len(small) == MESSAGES_MAX):
            yield _bundle(small, sizes)
            small, sizes, nbytes = [], [], 0
        if size > SMALL_BYTES:
            yield frames
        else:
            small.append(frames)
            sizes.append(mine)
            nbytes += size
    if small:
        yield _bundle(small, sizes)


def _bundle(messages: list[Frames], sizes: list[list[int]]) -> Frames:
    if len(messages) == 1:
        return messages[0]
    directory = _encode(sizes)
    parts: list[Any] = [PREFIX, len(directory).to_bytes(4, "little"), directory, _padding(len(directory))]
    for frames in messages:
        for frame in frames:
            parts += frame, _padding(len(frame))
    return [b"".join(parts)]


def unbundled(frames: Frames) -> Iterator[Frames]:
    """The messages in what has come. ProtocolError where it is a bundle that does not keep to its form."""
    if len(frames) != 1 or frames[0][: len(PREFIX)] != PREFIX:
        yield frames
        return
    whole = memoryview(bytes(frames[0]))  # the frames are to lie at words, wherever this came to lie
    try:
        (length,) = unpack_from("<I", whole, len(PREFIX))
        begin = len(PREFIX) + 4
        sizes = _directory.decode(whole[begin : begin + length])
    except (error, msgspec.MsgspecError, RecursionError, MemoryError) as problem:
        raise ProtocolError(f"a bundle without a directory: {problem}") from None
    flat = [size for mine in sizes for size in mine]
    first = begin + _rounded(length)
    ends = list(accumulate(map(_rounded, flat), initial=first))
    if not all(sizes) or min(flat, default=-1) < 0 or len(sizes) > MESSAGES_MAX or ends[-1] != len(whole):
        raise ProtocolError(f"a bundle of {len(whole)} bytes whose directory says {ends[-1]}")
    at = 0
    for mine in sizes:
        last = at + len(mine)
        yield [whole[start : start + size] for start, size in zip(ends[at:last], mine, strict=True)]
        at = last


def _rounded(size: int) -> int:
    return -size % WORD + size


def _padding(size: int) -> bytes:
    return bytes(-size % WORD)
