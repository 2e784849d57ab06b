"""The records of a compressed batch, as bytes.

Law: what comes out has at most as many bytes as the caller allows, however little went in, and no more memory than about
twice that is used on the way. What cannot be read is a ValueError.
"""

from __future__ import annotations

import pyarrow as pa

#: By the number in the attributes of a record batch.
CODECS = {0: None, 1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
NUMBERS = {name: number for number, name in CODECS.items()}

#: Streams are read in pieces of at least so many bytes: large enough that calls cost nothing.
_PIECE = 1 << 16
#: How Java's clients frame snappy: this, two versions, and blocks with their length in front.
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEAD = 16
#: Of a block in that framing; what clients write. A block may hold more, up to the limit.
_XERIAL_BLOCK = 1 << 15


def decompress(codec: str, data: pa.Buffer, most: int) -> pa.Buffer:
    """``data`` without its compression. ValueError says what is wrong, also if it has more than ``most`` bytes."""
    try:
        if codec == "snappy":
            return _snappy(data, most)
        return _stream(codec, data, most)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{codec} cannot read it: {error}") from None


def compress(codec: str, data: pa.Buffer) -> pa.Buffer:
    """As brokers and other clients read it."""
    if codec == "snappy":
        return _xerial(data)
    return pa.Codec(codec).compress(data)


def _stream(codec: str, data: pa.Buffer, most: int) -> pa.Buffer:
    """gzip, lz4 and zstd say where they end, and not always how much that makes."""
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
    """One block of snappy, which begins with its size when decompressed. ``left``: of the bytes that are allowed in all."""
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
    # Each element of a block copies 64 bytes at most and takes two or more: a size that cannot be met asks for no memory.
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
