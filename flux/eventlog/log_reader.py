"""A reader of a log by position, beside its owner and in any other process (design: event-log-readers).

Law: every reader gets the same rows at the same positions, and none that a later owner would not find. So a reader goes through
the newest segment as far as its owner has published it, and through the others to the end that the next one names.
"""

from __future__ import annotations

from flux.eventlog.chain import Segment, name_of, read_chain
from flux.eventlog.log_store import LogStore, SegmentId
from flux.eventlog.records import DamagedLog, EventRecord, event_of
from flux.vault.framing import frame_at

#: Bytes that are read at once. A larger record is read whole.
READ_BYTES = 4 << 20


class LogReader:
    """One reader. ``next`` is the position of the row that it gives next."""

    def __init__(self, store: LogStore, where: str, start: int = 0) -> None:
        self.next = start
        self._store = store
        self._where = where
        self._known: dict[SegmentId, Segment] = {}
        #: The segment that is read, and the byte in it that is read next; None: not found yet.
        self._at: SegmentId | None = None
        self._offset = 0

    def read(self) -> list[EventRecord]:
        """Return the next records; none if there are none now. The first one may begin before ``next``, if that lies within it.

        DamagedLog: something is missing that was durable once."""
        try:
            return self._read()
        except FileNotFoundError:  # the owner has removed a segment: look again in the next turn
            self._at = None
            self._known.clear()
            return []

    def first(self) -> int:
        """Return the lowest position that is in the log; 0 if nothing was pushed yet."""
        chain = read_chain(self._store, self._where)
        return chain[0].head.first if chain else 0

    def newest(self) -> int:
        """Return the first position of the newest segment: near the end of the log, and found without reading it."""
        chain = read_chain(self._store, self._where)
        return chain[-1].head.first if chain else 0

    def skip(self) -> int:
        """Go on behind the newest row that is durable now, and return its position: that of the next row. One segment is read."""
        self.next = self.newest()
        while self.read():
            pass
        return self.next

    def _read(self) -> list[EventRecord]:
        chain = read_chain(self._store, self._where, self._known)
        self._known = {segment.id: segment for segment in chain}
        if not chain:
            return []
        segment = self._found(chain)
        while True:
            end = self._store.published(segment.id) if segment.end is None else segment.end
            records = self._records(segment, end)
            if records or segment.end is None:
                return records
            assert segment.next is not None
            if self.next < segment.next:
                raise self._damaged(segment, f"ends before position {segment.next:,}")
            segment = chain[chain.index(segment) + 1]
            self._at, self._offset = segment.id, segment.start

    def _found(self, chain: list[Segment]) -> Segment:
        """Return the segment with the next position; the oldest one, if that was removed."""
        for segment in chain:
            if segment.id == self._at:
                return segment
        self.next = max(self.next, chain[0].head.first)
        segment = max((each for each in chain if each.head.first <= self.next), key=lambda each: each.id)
        self._at, self._offset = segment.id, segment.start
        return segment

    def _records(self, segment: Segment, end: int) -> list[EventRecord]:
        """Return records of a segment whose bytes before ``end`` are whole."""
        if self._offset >= end:
            return []
        data = memoryview(self._store.read(segment.id, self._offset, min(end, self._offset + READ_BYTES)))
        if frame_at(data, 0, segment.head.salt) is None:
            data = memoryview(self._store.read(segment.id, self._offset, end))
        records: list[EventRecord] = []
        at, where = 0, f"{self._where}: segment {name_of(segment.id)}"
        while (frame := frame_at(data, at, segment.head.salt)) is not None:
            record = event_of(frame, where)
            at = frame.end
            first, behind = record.stored.first, record.stored.first + record.stored.rows
            if first > self.next:
                raise self._damaged(segment, f"has position {first:,} at the next byte")
            if behind > self.next:
                records.append(record)
                self.next = behind
        if at == 0:
            raise self._damaged(segment, f"is damaged at byte {self._offset:,}")
        self._offset += at
        # Records of this piece may all lie before the start.
        return records if records or self._offset >= end else self._records(segment, end)

    def _damaged(self, segment: Segment, what: str) -> DamagedLog:
        return DamagedLog(
            f"{self._where}: segment {name_of(segment.id)} {what}, at position {self.next:,}. Restore the log from a copy"
        )

    def close(self) -> None:
        self._store.close()
