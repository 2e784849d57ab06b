"""Records of a log, one for each request, and the head of each of its segments (design: event-log-records).

A head has all that the next owner must know of the segments before it: the next position, the newest arrival time, and the
names under which requests came. So a take-over reads one segment, and removed segments are not missed.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from flux.errors import QueryFailed
from flux.eventlog.log_store import SegmentId
from flux.vault.framing import Frame, framed

T = TypeVar("T")
#: Microseconds for which a key of a request is known.
KEY_KNOWN_US = 600 * 1_000_000


class DamagedLog(QueryFailed):
    """A log of which something is missing that was answered. The message names segment, byte and position."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """The place of a request in its log."""

    #: Position of its first row.
    first: int
    rows: int
    #: Its arrival time, in microseconds since the epoch.
    arrival: int
    #: CRC-32 of its rows as they are kept: another request under the same name is told from a repeat.
    crc: int
    #: The number that its client gave it; -1: none.
    number: int = -1


class SegmentHead(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The first frame of a segment."""

    #: Generation and number of this segment.
    segment: SegmentId
    #: The segment before it, and the byte at which that ends; None: there is none.
    previous: SegmentId | None
    previous_end: int
    #: Position of the first row in it, and the newest arrival time before that.
    first: int
    arrival: int
    #: The start of the checksums of all other frames of the segment: random, so that no content of a request looks like a frame.
    salt: int
    #: By client, the newest request.
    clients: dict[str, Stored]
    #: By key, the requests of the last ten minutes.
    keys: dict[str, Stored]


class EventRecord(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """One request."""

    stored: Stored
    #: The key of the request; empty: none. ``client`` names the client that numbers its requests; empty: none.
    key: str
    client: str
    #: The rows, as a record batch of Arrow IPC without its schema.
    batch: memoryview


class PushName(NamedTuple):
    """The name under which a request may come again: a key, or a client and its growing number. All empty: it has none."""

    key: str = ""
    client: str = ""
    number: int = -1

    def of_token(self, token: str) -> PushName:
        """Return the name as the log knows it: bound to the id of a token, so that another one cannot use it up."""
        return PushName(self.key and f"{token}/{self.key}", self.client and f"{token}/{self.client}", self.number)


_heads = msgspec.msgpack.Decoder(SegmentHead)
_events = msgspec.msgpack.Decoder(EventRecord)
_encoder = msgspec.msgpack.Encoder()


def framed_head(head: SegmentHead) -> bytes:
    return framed(_encoder.encode(head))


def framed_event(record: EventRecord, salt: int) -> bytes:
    return framed(_encoder.encode(record), salt)


def head_of(frame: Frame | None, where: str) -> SegmentHead:
    """Decode the head of a segment. DamagedLog: it is not whole, although it was durable before the segment had its name."""
    if frame is None:
        raise DamagedLog(f"{where} is damaged at byte 0, and was whole once. Restore the log from a copy")
    return _decoded(_heads, frame, where)


def event_of(frame: Frame, where: str) -> EventRecord:
    return _decoded(_events, frame, where)


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: Frame, where: str) -> T:
    try:
        return decoder.decode(frame.content)
    except msgspec.MsgspecError as error:
        raise DamagedLog(
            f"{where} was written by another release of Flux: {error}. Start that release, or a newer one"
        ) from error


def packed_rows(batch: pa.RecordBatch) -> memoryview:
    """Return rows as a record keeps them."""
    return memoryview(batch.serialize())


def crc_of(rows: memoryview) -> int:
    return zlib.crc32(rows)


def rows_of(record: EventRecord, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of a record, in its memory."""
    return pa.ipc.read_record_batch(pa.py_buffer(record.batch), schema)
