"""Encoding of one message, with checks of version and length (design: bounded-decoding).

The data plane, the control plane and people's requests share this form: four bytes of magic and version, then a msgpack body. It
needs no Arrow.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from flux.errors import ProtocolError

VERSION = 2
MAGIC = b"FLX"
PREFIX = MAGIC + bytes([VERSION])
HEADER_BYTES_MAX = 4 << 20  # a table of 100,000 partitions fits; no legitimate message comes near

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
    """Decode a frame. ProtocolError: the frame is too long, of another version, or nothing that the decoder knows."""
    try:
        return decoder.decode(_body(frame, bytes_max))
    except ProtocolError:
        raise
    except Exception as error:
        # RecursionError (nested too deep) and MemoryError (a false length), too: no message may end this process.
        raise ProtocolError(f"malformed message: {type(error).__name__}: {error}") from None
