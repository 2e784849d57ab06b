"""Encoding of one message, with checks of version, length and numbers (design: bounded-decoding).

The data plane, the control plane and people's requests share this form: four bytes of magic and version, then a msgpack body. It
needs no Arrow.

Messages declare their numbers by the types below, each with its bounds. A decoder refuses a number beyond its bounds as
malformed, so that it never reaches 64-bit arithmetic, an array or a packed field. Whether a number makes sense is left to the
receiver of the message.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from flux.errors import ProtocolError

#: A count from 0: of batches, messages, steps. The sum of two of them fits into 64 bits, too.
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
#: A count from 0, or -1: none yet.
Sequence = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]
#: An edge, stage, partition or worker; -1: none.
Id = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
#: Bytes of one message. Bounded so that sums of many fit into 64 bits.
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
#: 64 bits. It has no upper bound here because msgpack has no larger integers.
Checksum = Annotated[int, msgspec.Meta(ge=0)]
#: A time in microseconds since the epoch; the least and the greatest number of 64 bits stand before and behind all times.
Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
#: A reason, for people.
Reason = Annotated[str, msgspec.Meta(max_length=300)]
#: A reader position. Only the reader of the source can interpret it.
Position = Annotated[bytes, msgspec.Meta(max_length=1024)]


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
