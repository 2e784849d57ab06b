"""Messages to bytes and back, with version and length checks (design: bounded-decoding).

What both planes and people's requests share: four bytes of magic and version, then a msgpack body. It needs no Arrow.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from flux.errors import ProtocolError

VERSION = 2
MAGIC = b"FLX"
PREFIX = MAGIC + bytes([VERSION])
HEADER_BYTES_MAX = 4 << 20  # a table of 100,000 partitions fits; nothing legitimate comes near

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    return PREFIX + _encoder.encode(message)


def _body(frame: Any, bytes_max: int) -> memoryview:
    view = memoryview(frame)
    if len(view) > bytes_max:
        raise ProtocolError(f"header of {len(view)} bytes, at most {bytes_max} are accepted")
    if len(view) < len(PREFIX) or view[: len(MAGIC)] != MAGIC:
        raise ProtocolError("not a Flux message")
    if view[len(MAGIC)] != VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {view[len(MAGIC)]}, this side version {VERSION}: "
            "run the same release of Flux on the driver and on all executors"
        )
    return view[len(PREFIX) :]


def decode(decoder: msgspec.msgpack.Decoder[T], frame: Any, bytes_max: int = HEADER_BYTES_MAX) -> T:
    """ProtocolError where the frame is too long, of another version, or not what the decoder knows."""
    try:
        return decoder.decode(_body(frame, bytes_max))
    except ProtocolError:
        raise
    except Exception as error:
        # Also RecursionError (nested too deep) and MemoryError (a length that is a lie): what is sent ends nobody.
        raise ProtocolError(f"malformed message: {type(error).__name__}: {error}") from None
