"""The side channel of an output log: the tentative rows of one partition, for gateways (design: output-tentative).

Law: a reader that drops all rows that a void names has, behind the newest call of the newest owner, the rows which that owner
shows, and no others.

A channel is a log of segments without a flush, and its newest segment alone counts. Each segment begins with all rows that stand,
so a reader needs no earlier one, a new owner begins with none, and a crash of the machine costs nothing but tentative rows. Each
record tells the position of the next stable row: a reader that follows both logs gives the record when it has come there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import msgspec

from flux.eventlog.log_store import LogStore, SegmentId
from flux.vault.directory_store import TakenOver
from flux.vault.framing import frame_at, framed, frames_from

#: Bytes of the tentative rows of one output: 100,000 small rows. A reader that comes gets all of them.
SHOWN_BYTES = 4 << 20
#: Bytes of a segment beyond four times the rows that stand, after which the next one begins.
SEGMENT_BYTES = 256 << 10
_RECORD_BYTES = 64


class ChannelHead(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The first frame of a segment: everything that earlier segments have shown is void."""

    #: The start of the checksums of all other frames: random, so that no row looks like a frame.
    salt: int


class ChannelRows(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Results that may still change: those of event time before ``through``, beyond earlier ones."""

    #: The position of the next stable row.
    at: int
    #: Microseconds since the epoch.
    through: int
    #: The rows, as a record batch of Arrow IPC without its schema.
    batch: bytes

    @property
    def nbytes(self) -> int:
        return len(self.batch) + _RECORD_BYTES


class ChannelVoid(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """End of all shown rows with ``start < through <= end``; None: without that bound."""

    at: int
    start: int | None = None
    end: int | None = None

    def reaches(self, through: int) -> bool:
        return (self.start is None or self.start < through) and (self.end is None or through <= self.end)


class ChannelEnd(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """End of a failure: all results before ``through`` are stable."""

    at: int
    through: int


ChannelRecord = ChannelRows | ChannelVoid | ChannelEnd
_encoder = msgspec.msgpack.Encoder()
_heads = msgspec.msgpack.Decoder(ChannelHead)
_records = msgspec.msgpack.Decoder(ChannelRecord)


def _encoded(record: ChannelHead | ChannelRecord, salt: int = 0) -> bytes:
    return framed(_encoder.encode(record), salt)


class ShownState:
    """The rows that stand, in the order in which they were shown."""

    def __init__(self) -> None:
        self.rows: list[ChannelRows] = []
        self.nbytes = 0

    def take(self, record: ChannelRecord) -> None:
        """Follow a record."""
        if isinstance(record, ChannelRows):
            self.rows.append(record)
            self.nbytes += record.nbytes
        elif isinstance(record, ChannelVoid):
            self.rows = [each for each in self.rows if not record.reaches(each.through)]
            self.nbytes = sum(each.nbytes for each in self.rows)


class ChannelOwner:
    """The owner of a channel. Another one may take it over at any time, and this one takes it back at its next call: of two
    primaries, one of which was given up and does not know it, the one that goes on longer has the channel in the end.

    ``opened`` opens the place as its owner; ``flushes``: readers see nothing before a flush, as in an object store. OSError: the
    call may be repeated."""

    def __init__(self, opened: Callable[[], LogStore], flushes: bool = False, bytes_max: int = SHOWN_BYTES) -> None:
        self._opened, self._flushes, self._bytes_max = opened, flushes, bytes_max
        self._store: LogStore | None = None
        self._state = ShownState()
        self._salt = self._size = 0
        #: Rows that were not shown, or taken back, for want of memory: counted by calls.
        self.left_out = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows that stand."""
        return self._state.nbytes

    def open(self) -> None:
        """Take the channel over: rows that earlier owners have shown are void."""
        self.close()
        self._state = ShownState()
        self._begin()

    def show(self, batch: bytes, through: int, at: int) -> None:
        """Show rows. Beyond the bound of bytes those of the oldest times are taken back, for new ones say more."""
        shown = ChannelRows(at, through, batch)
        if shown.nbytes > self._bytes_max:
            self.left_out += 1
            return
        while self._state.nbytes + shown.nbytes > self._bytes_max:
            self.left_out += 1
            self._write(ChannelVoid(at, None, min(each.through for each in self._state.rows)))
        self._write(shown)

    def void(self, start: int | None, end: int | None, at: int) -> None:
        """Take back the rows with ``start < through <= end``."""
        self._write(ChannelVoid(at, start, end))

    def corrected(self, through: int, at: int) -> None:
        """Tell readers that a failure is over."""
        self._write(ChannelEnd(at, through))

    def keep(self) -> None:
        """Take the channel back if another owner has it. Called with stable rows, which go on when nothing is missing any more:
        else the rows of a primary that was given up would stand for ever."""
        with contextlib.suppress(OSError, TakenOver):  # the next call tries again; no stable row waits for the channel
            try:
                if self._store is not None:
                    self._store.check()
                    return
            except TakenOver:
                self.close()
            self._begin()

    def close(self) -> None:
        """Release files. The rows stay, and so does the claim."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _write(self, record: ChannelRecord) -> None:
        try:
            self._append(record)
        except TakenOver:
            self.close()
            self._append(record)
        except OSError:
            self.close()
            raise
        self._state.take(record)

    def _append(self, record: ChannelRecord) -> None:
        if self._store is None or self._size > 4 * self._state.nbytes + SEGMENT_BYTES or self._store.crowded:
            self._begin()
        assert self._store is not None
        data = _encoded(record, self._salt)
        self._store.append(data)
        self._size += len(data)
        if self._flushes:
            self._store.sync()
        self._store.check()

    def _begin(self) -> None:
        """Begin a segment with the rows that stand, and remove earlier ones."""
        store = self._store = self._store or self._opened()
        self._salt = int.from_bytes(os.urandom(4))
        data = _encoded(ChannelHead(self._salt))
        data += b"".join(_encoded(each, self._salt) for each in self._state.rows)
        before = store.segments()
        store.begin(data)
        self._size = len(data)
        store.drop(before)


class ChannelReader:
    """A reader of a channel, in any process."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        #: The segment that is read, the byte that is read next, and the salt of its checksums.
        self._segment: SegmentId | None = None
        self._offset = self._salt = 0

    def read(self) -> list[ChannelRecord]:
        """Return the next records; none if there are none now."""
        try:
            return self._read()
        except FileNotFoundError:  # its owner has begun another one
            return []

    def _read(self) -> list[ChannelRecord]:
        newest = max(self._store.segments(), default=None)
        if newest is None:
            return []
        found: list[ChannelRecord] = []
        if newest != self._segment:
            data = memoryview(self._store.read(newest))
            frame = frame_at(data, 0)
            if frame is None:
                return []
            head = _heads.decode(frame.content)
            # Due at once: a void that was in an earlier segment, and not read there, may be due in front of the next stable row.
            found.append(ChannelVoid(0))
            self._segment, self._offset, self._salt = newest, frame.end, head.salt
            data = data[frame.end :]
        else:
            data = memoryview(self._store.read(newest, self._offset))
        end = 0
        for frame in frames_from(data, 0, self._salt):
            found.append(_records.decode(frame.content))
            end = frame.end
        self._offset += end
        return found

    def close(self) -> None:
        """Release files."""
        self._store.close()
