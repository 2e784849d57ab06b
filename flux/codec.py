"""Messages to frames and back, with version and length checks (DESIGN 8).

The first frame is four bytes of magic and version and a msgpack body; the other frames are Arrow record batches in IPC
format without schema (both ends know the edge's schema from the plan). Nothing from the wire is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from flux.control import FromController, ToController
from flux.errors import ProtocolError
from flux.messages import Data, DataPlane

VERSION = 2
MAGIC = b"FLX"
PREFIX = MAGIC + bytes([VERSION])
HEADER_BYTES_MAX = 4 << 20  # a table of 100,000 partitions fits; nothing legitimate comes near

_encoder = msgspec.msgpack.Encoder()
_data_plane = msgspec.msgpack.Decoder(DataPlane)
_to_controller = msgspec.msgpack.Decoder(ToController)
_from_controller = msgspec.msgpack.Decoder(FromController)
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


def decode_data(frame: Any) -> DataPlane:
    return decode(_data_plane, frame)


def decode_report(frame: Any) -> ToController:
    return decode(_to_controller, frame)


def decode_order(frame: Any) -> FromController:
    return decode(_from_controller, frame)


def encode_batches(batches: Sequence[pa.RecordBatch]) -> list[pa.Buffer]:
    return [batch.serialize() for batch in batches]


def decode_batches(message: Data, frames: Sequence[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
    """Zero copy: the batches stay views into the frames. ProtocolError where header and payload do not agree."""
    if len(frames) != len(message.runs):
        raise ProtocolError(f"{len(frames)} payload frames, the header announces {len(message.runs)}")
    try:
        batches = [pa.ipc.read_record_batch(pa.py_buffer(frame), schema) for frame in frames]
        for batch in batches:
            batch.validate()
    except Exception as error:
        raise ProtocolError(f"payload is not a record batch of the edge's schema: {error}") from None
    check_shape(message, batches)
    return batches


def check_shape(message: Data, batches: Sequence[pa.RecordBatch]) -> None:
    if len(message.partitions) != len(message.rows) or sum(message.runs) != len(message.partitions):
        raise ProtocolError("partitions, rows and runs of the header do not agree")
    start = 0
    for run, batch in zip(message.runs, batches, strict=True):
        if run < 1 or min(message.rows[start : start + run]) < 1:
            raise ProtocolError("a slice without rows")
        if sum(message.rows[start : start + run]) != batch.num_rows:
            raise ProtocolError(f"payload has {batch.num_rows} rows, the header announces others")
        start += run
