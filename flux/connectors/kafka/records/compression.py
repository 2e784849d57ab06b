"""Compression and decompression of the records of a batch, as bytes.

Law: decompressed data has at most as many bytes as the caller allows, however small the input, and decompression uses no
more memory than about twice that. Input that cannot be read is a ValueError.
"""

from __future__ import annotations

import pyarrow as pa

#: Codecs by their numbers in the attributes of a record batch.
CODECS = {0: None, 1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
NUMBERS = {name: number for number, name in CODECS.items()}

#: Least size of the pieces in which streams are read: large enough for the cost of calls to be negligible.
_PIECE = 1 << 16
#: First bytes of snappy as Java's clients frame it; two versions follow, and then blocks with their length in front.
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEAD = 16
#: Size of a block in that framing, as clients write it. A block that is read may be larger, up to the limit.
_XERIAL_BLOCK = 1 << 15


def decompress(codec: str, data: pa.Buffer, most: int) -> pa.Buffer:
    """Decompress ``data``. ValueError gives the reason, which may be that there are more than ``most`` bytes."""
    try:
        if codec == "snappy":
            return _snappy(data, most)
        return _stream(codec, data, most)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{codec} cannot read it: {error}") from None


def compress(codec: str, data: pa.Buffer) -> pa.Buffer:
    """Compress ``data`` as brokers and other clients read it."""
    if codec == "snappy":
        return _xerial(data)
    return pa.Codec(codec).compress(data)


def _stream(codec: str, data: pa.Buffer, most: int) -> pa.Buffer:
    """Decompress gzip, lz4 or zstd, which mark their end and do not always give the size."""
    pieces, got = [], 0
    with pa.CompressedInputStream(pa.BufferReader(data), codec) as stream:
        size = min(max(4 * data.size, _PIECE), most + 1)
        while piece := stream.read_buffer(size):
            if not piece.size:
                break
            pieces.append(piece)
            got += piece.size
            if got > most:
                raise ValueError(_too_much(codec, most))
            size = min(max(got, _PIECE), most + 1 - got)
    return pieces[0] if len(pieces) == 1 else pa.py_buffer(b"".join(pieces))


def _snappy(data: pa.Buffer, most: int) -> pa.Buffer:
    view = memoryview(data)
    if bytes(view[: len(_XERIAL)]) != _XERIAL:
        return _block(data, most, most)
    at, pieces, got = _XERIAL_HEAD, [], 0
    while at < data.size:
        size = int.from_bytes(view[at : at + 4], "big")
        at += 4
        if at > data.size or not 0 < size <= data.size - at:
            raise ValueError("a block of snappy is cut off")
        piece = _block(data.slice(at, size), most - got, most)
        pieces.append(piece)
        got += piece.size
        at += size
    return pa.py_buffer(b"".join(pieces))


def _block(data: pa.Buffer, left: int, most: int) -> pa.Buffer:
    """Decompress one block of snappy, which begins with its decompressed size. ``left`` is the part of ``most`` bytes that is
    still allowed."""
    size = shift = 0
    for byte in bytes(data.slice(0, min(5, data.size))):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise ValueError("snappy does not say how many bytes there are")
    if size > left:
        raise ValueError(_too_much("snappy", most))
    # Each element of a block takes two bytes or more and copies at most 64. The check keeps an impossible size from asking
    # for memory.
    if size > 64 * data.size:
        raise ValueError("snappy says more bytes than it can have")
    return pa.Codec("snappy").decompress(data, decompressed_size=size)


def _xerial(data: pa.Buffer) -> pa.Buffer:
    codec = pa.Codec("snappy")
    pieces = [_XERIAL, (1).to_bytes(4, "big"), (1).to_bytes(4, "big")]
    for at in range(0, data.size, _XERIAL_BLOCK):
        block = codec.compress(data.slice(at, min(_XERIAL_BLOCK, data.size - at)))
        pieces += [block.size.to_bytes(4, "big"), block]
    return pa.py_buffer(b"".join(pieces))


def _too_much(codec: str, most: int) -> str:
    return f"it has more than {most >> 20} MiB when {codec} is taken off, the most that is allowed"
