"""Segments that belong to a log: each names the one before it, and the byte at which that ends (design: event-log-chain).

A segment that no later one names is no part of the log: an owner has begun it when it was taken over already. Bytes behind the
end that the next segment names are none either: an owner that was taken over may have written them, and
has not answered since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flux.eventlog.log_store import LogStore, SegmentId
from flux.eventlog.records import DamagedLog, SegmentHead, head_of
from flux.vault.framing import frame_at

#: A first read of this many bytes has most heads whole.
_HEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class Segment:
    """A segment of a log."""

    head: SegmentHead
    #: The byte behind its head.
    start: int
    #: The byte at which it ends; None: it is the newest one, and may grow.
    end: int | None
    #: The position behind its last row; None: as above.
    next: int | None

    @property
    def id(self) -> SegmentId:
        return self.head.segment


def read_head(store: LogStore, segment: SegmentId, where: str) -> tuple[SegmentHead, int]:
    """Return the head of a segment and the byte behind it."""
    named = f"{where}: segment {name_of(segment)}"
    data = store.read(segment, 0, _HEAD_BYTES)
    frame = frame_at(memoryview(data), 0)
    if frame is None and len(data) == _HEAD_BYTES:
        frame = frame_at(memoryview(store.read(segment)), 0)
    head = head_of(frame, named)
    if head.segment != segment:
        raise DamagedLog(
            f"{named} has the content of {name_of(head.segment)}: a file was renamed. Restore the log from a copy"
        )
    assert frame is not None
    return head, frame.end


def read_chain(store: LogStore, where: str, known: Mapping[SegmentId, Segment] | None = None) -> list[Segment]:
    """Return the segments of a log, oldest first. ``known``: segments that were read before, whose heads are not read again.

    DamagedLog: a head is broken; FileNotFoundError: a segment was removed meanwhile; read again."""
    there = set(store.segments())
    found: list[Segment] = []
    at, end, following = max(there, default=None), None, None
    while at is not None and at in there:
        of = (known or {}).get(at)
        head, start = (of.head, of.start) if of is not None else read_head(store, at, where)
        if head.previous is not None and head.previous >= at:
            raise DamagedLog(
                f"{where}: segment {name_of(at)} names {name_of(head.previous)} as the one before it, which is none. Restore the "
                "log from a copy"
            )
        found.append(Segment(head, start, end, following))
        at, end, following = head.previous, head.previous_end, head.first
    return found[::-1]


def name_of(segment: SegmentId) -> str:
    """Return the name of a segment for people, as in the name of its file."""
    return f"{segment[0]:08}-{segment[1]:08}"
