"""Encoding of messages between workers and of control messages (design: bounded-decoding).

The first frame is a message as in ``frames``. The others are Arrow record batches in IPC format without schema: both ends know
the edge's schema from the plan. Nothing from the wire is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

import msgspec
import pyarrow as pa

from flux.errors import ProtocolError
from flux.wire.control import FromController, ToController
from flux.wire.frames import decode
from flux.wire.messages import RUN_BATCHES, Answered, Asked, Data, ElementKind, Tentative

#: Columns lie at multiples of this many bytes from the beginning of their frame.
WORD = 8

_asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_answered: msgspec.msgpack.Decoder[Answered] = msgspec.msgpack.Decoder(Answered)
_data_plane: msgspec.msgpack.Decoder[Asked | Answered] = msgspec.msgpack.Decoder(Asked | Answered)
_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)
_from_controller: msgspec.msgpack.Decoder[FromController] = msgspec.msgpack.Decoder(FromController)


def decode_asked(frame: Any) -> Asked:
    """Decode a message that has come to a data port."""
    return decode(_asked, frame)


def decode_answer(frame: Any) -> Answered:
    """Decode an answer that has come from a data port."""
    return decode(_answered, frame)


def decode_data(frame: Any) -> Asked | Answered:
    """Decode a message between data ports, in either direction."""
    return decode(_data_plane, frame)


def decode_report(frame: Any) -> ToController:
    return decode(_to_controller, frame)


def decode_command(frame: Any) -> FromController:
    return decode(_from_controller, frame)


def encode_batches(batches: Sequence[pa.RecordBatch]) -> list[pa.Buffer]:
    return [batch.serialize() for batch in batches]


def decode_batches(message: Data, frames: Sequence[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
    """Decode the payload of Data. The batches stay views into the frames, except for small frames.

    ProtocolError: header and payload do not agree."""
    if len(frames) != len(message.runs):
        raise ProtocolError(f"{len(frames)} payload frames, the header announces {len(message.runs)}")
    batches = _decoded(frames, schema)
    check_shape(message, batches)
    return batches


def _decoded(frames: Sequence[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
    try:
        batches = [pa.ipc.read_record_batch(_at_a_word(frame), schema) for frame in frames]
        for batch in batches:
            batch.validate()
    except Exception as error:
        raise ProtocolError(f"payload is not a record batch of the edge's schema: {error}") from None
    return batches


def decode_tentative(message: Tentative, frames: Sequence[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
    """Decode the payload of Tentative: one batch, or none without rows. ProtocolError: header and payload do not agree."""
    partitions, rows = message.partitions, message.rows
    if len(partitions) != len(rows) or len(set(partitions)) != len(partitions) or min(rows, default=1) < 1:
        raise ProtocolError("partitions and rows of tentative rows do not agree")
    if not message.after < message.through or not isfinite(message.created):
        raise ProtocolError(
            f"tentative rows of times {message.after} to {message.through}, created at {message.created}"
        )
    if len(frames) != bool(partitions):
        raise ProtocolError(f"{len(frames)} payload frames with tentative rows of {len(partitions)} partitions")
    batches = _decoded(frames, schema)
    if batches and batches[0].num_rows != sum(rows):
        raise ProtocolError(f"payload has {batches[0].num_rows} tentative rows, the header announces others")
    return batches


def _at_a_word(frame: Any) -> pa.Buffer:
    """Copy a frame that does not begin at a word.

    ZeroMQ leaves messages of up to 8 KiB in its receive buffer, at any address. Arrow's expressions warn, for each batch, that
    columns at such addresses could lead to crashes."""
    buffer = pa.py_buffer(frame)
    return buffer if buffer.address % WORD == 0 else pa.py_buffer(buffer.to_pybytes())


def check_shape(message: Data, batches: Sequence[pa.RecordBatch]) -> None:
    if len(message.partitions) != len(message.rows) or sum(message.runs) != len(message.partitions):
        raise ProtocolError("partitions, rows and runs of the header do not agree")
    if message.element != ElementKind.ROWS and message.runs:
        raise ProtocolError(f"an element of kind {message.element.name} has no rows")
    if len(set(message.partitions)) != len(message.partitions):
        raise ProtocolError("the header names a partition twice")
    if message.batches or message.counts:
        check_run(message)
    start = 0
    for run, batch in zip(message.runs, batches, strict=True):
        if run < 1 or min(message.rows[start : start + run]) < 1:
            raise ProtocolError("a slice without rows")
        if sum(message.rows[start : start + run]) != batch.num_rows:
            raise ProtocolError(f"payload has {batch.num_rows} rows, the header announces others")
        start += run


def check_run(message: Data) -> None:
    numbers, width = message.batches, len(message.partitions)
    if len(message.runs) != 1:
        raise ProtocolError(f"a run of batches has one payload frame, the header announces {len(message.runs)}")
    if len(numbers) > RUN_BATCHES or len(message.counts) != len(numbers) * width:
        raise ProtocolError(
            f"{len(numbers)} batches for {width} partitions have {len(message.counts)} counts; a run is at most "
            f"{RUN_BATCHES} batches"
        )
    if any(number >= later for number, later in pairwise(numbers)) or numbers[-1] != message.sequence:
        raise ProtocolError(f"a run of batches {numbers} does not ascend to {message.sequence}")
    if numbers[0] < message.first:
        raise ProtocolError(f"a run begins with batch {numbers[0]}, before batch {message.first}")
    if any(sum(message.counts[at::width]) != rows for at, rows in enumerate(message.rows)):
        raise ProtocolError("the rows of a run's batches are not those of its partitions")
