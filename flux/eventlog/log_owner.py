"""The owner of one log: pushes in, answers out when they are on disk (design: event-log).

Law: a request that was answered is in the log exactly once, and every later owner and reader finds it at the same position. A
request that was not answered is there at most once.

Requests that come while others are flushed are flushed together, in one go. The order of a commit is the law: append, flush,
look whether another owner has claimed the log, publish to readers, answer. ``open``, ``commit`` and ``tidy`` are iterators that
make one call to the place in each turn, so that a test may do anything in between; a program goes through them at once.

``offer`` and ``take`` may be called while a ``commit`` is under way in another thread, if they exclude each other; nothing may
be called while ``tidy`` is under way.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from flux.errors import FluxError
from flux.eventlog.chain import Segment, name_of, read_chain
from flux.eventlog.log_store import LogStore, SegmentId
from flux.eventlog.records import (
    KEY_KNOWN_US,
    DamagedLog,
    EventRecord,
    PushName,
    SegmentHead,
    Stored,
    crc_of,
    event_of,
    framed_event,
    framed_head,
)
from flux.vault.framing import frames_from, is_followed


class LogLimits(NamedTuple):
    """Limits of one log."""

    #: A segment is followed by another one when it has as many bytes: a take-over reads one, and retention removes whole ones.
    segment_bytes: int = 16 << 20
    #: Or when its first row is as old as this, in microseconds.
    segment_us: int = 3_600_000_000
    #: Microseconds and bytes for which rows are kept at least, though all readers have them.
    retain_us: int = 24 * 3_600_000_000
    retain_bytes: int = 1 << 30
    #: Bytes of the log beyond which pushes are refused, because readers are behind.
    disk_bytes: int = 8 << 30
    #: Bytes of requests that may wait for a flush: a disk that has stopped must not fill the memory.
    pending_bytes: int = 64 << 20
    #: Names of clients, which are known for ever: each head of a segment has all of them.
    clients: int = 1_000_000


class LogBusy(FluxError):
    """Refusal of a push for now: nothing of it is kept."""


class LogFull(FluxError):
    """Refusal of a push because the log has all the bytes that it may have."""


class NameReused(FluxError):
    """Refusal of a push whose key or number was used for other rows."""


@dataclass(eq=False)
class PushTicket:
    """A push that waits for its answer."""

    stored: Stored
    #: The rows were there already, under the same name.
    repeated: bool
    #: They are on disk, and this owner was the only one then. Only now may the push be answered.
    durable: bool = False


@dataclass
class PushGroup:
    """Pushes that become durable together."""

    #: The position behind the last of them.
    through: int = 0
    records: list[EventRecord] = field(default_factory=list)
    tickets: list[PushTicket] = field(default_factory=list)
    #: Bytes of their rows.
    nbytes: int = 0


class LogOwner:
    """One owner of a log, from the opening of its place until another one takes over. After an error of ``open`` or ``commit`` it
    is of no use: open the place again, and all that is on disk counts."""

    def __init__(self, store: LogStore, where: str, limits: LogLimits | None = None) -> None:
        self.limits = limits or LogLimits()
        self._store = store
        self._where = where
        #: Position of the next row, and the position below which all rows are durable.
        self.next = self.durable = 0
        #: The newest arrival time, in microseconds since the epoch.
        self.arrival = 0
        self._clients: dict[str, Stored] = {}
        self._keys: dict[str, Stored] = {}
        self._chain: list[Segment] = []
        self._number = 0
        self._salt = 0
        #: Bytes of the newest segment, and of all.
        self._size = self._bytes = 0
        #: Bytes of their heads, which grow with the names that are known, and count for no limit of rows.
        self._heads = 0
        #: The arrival time of the first row in the newest segment; None: it has none.
        self._began_us: int | None = None
        self._pending = PushGroup()

    # ---- taking over

    def open(self) -> Generator[None, None, None]:
        """Read what earlier owners have left, and begin a segment of this one. DamagedLog: rows that were answered are missing.
        TakenOver: another owner has come meanwhile."""
        while True:
            try:
                yield from self._read()
                break
            except FileNotFoundError:  # an earlier owner has removed a segment just now, or a later one has
                self._store.check()
            except DamagedLog:
                self._store.check()  # a later owner writes while this one reads
                raise
        self.durable = self.next
        yield from self._begin()

    def _read(self) -> Generator[None, None, None]:
        had_segments = self._store.had_segments()  # before the list: another owner may begin the first one meanwhile
        yield
        chain = read_chain(self._store, self._where)
        yield
        if not chain and had_segments:
            raise DamagedLog(f"{self._where} had segments, and has none any more. Restore the log from a copy")
        if chain:
            newest = chain[-1]
            data = self._store.read(newest.id)
            yield
            # An earlier owner may have died, or have been taken over, between writing and flushing.
            self._store.secure(newest.id)
            yield
            self._size = self._replay(newest, memoryview(data))
            self._bytes = self._size + sum(segment.end or 0 for segment in chain)
            self._heads = sum(segment.start for segment in chain)
            # Others are older than parts of the log, or were begun by owners that were taken over already.
            belong = {segment.id for segment in chain}
            self._store.drop([each for each in self._store.segments() if each not in belong and each < newest.id])
            yield
        self._chain = chain

    def _replay(self, newest: Segment, data: memoryview) -> int:
        """Take over the content of the newest segment; return the byte at which it ends."""
        head, end = newest.head, newest.start
        self.next, self.arrival = head.first, head.arrival
        self._clients, self._keys = dict(head.clients), dict(head.keys)
        where = f"{self._where}: segment {name_of(newest.id)}"
        for frame in frames_from(data, newest.start, head.salt):
            record = event_of(frame, where)
            if record.stored.first != self.next:
                raise DamagedLog(
                    f"{where}, byte {end:,}: expected position {self.next:,}, got {record.stored.first:,}. Restore the log "
                    "from a copy"
                )
            self._note(record)
            end = frame.end
        if end < self._store.published(newest.id) or is_followed(data, end, head.salt):
            raise DamagedLog(
                f"{where} is damaged at byte {end:,} of {len(data):,}, at position {self.next:,}, and was whole once: events "
                "that were answered are lost. Restore the log from a copy"
            )
        return end

    def _note(self, record: EventRecord) -> None:
        stored = record.stored
        self.next, self.arrival = stored.first + stored.rows, stored.arrival
        if record.client:
            self._clients[record.client] = stored
        if record.key:
            self._keys[record.key] = stored

    def _begin(self) -> Generator[None, None, None]:
        """Begin the next segment. Everything before it is durable."""
        self._number += 1
        previous, id_ = (self._chain[-1] if self._chain else None), (self._store.generation, self._number)
        self._salt = secrets.randbits(32)
        self._forget_keys()
        head = SegmentHead(
            id_, None if previous is None else previous.id, self._size if previous else 0, self.next, self.arrival,
            self._salt, self._clients, self._keys,
        )  # fmt: skip
        data = framed_head(head)
        self._store.begin(data)
        yield
        if previous is not None:
            self._chain[-1] = Segment(previous.head, previous.start, self._size, self.next)
        self._chain.append(Segment(head, len(data), None, None))
        self._size, self._bytes, self._began_us = len(data), self._bytes + len(data), None
        self._heads += len(data)

    def _forget_keys(self) -> None:
        """Forget keys whose time is over. They stand in the order of their arrival."""
        while self._keys:
            key, stored = next(iter(self._keys.items()))
            if stored.arrival >= self.arrival - KEY_KNOWN_US:
                return
            del self._keys[key]

    # ---- pushes

    def offer(self, rows: memoryview, count: int, name: PushName, now_us: int) -> PushTicket:
        """Accept a push of ``count`` rows. It is answered when its ticket is durable; at once, if it is a repeat of one that is.

        LogBusy, LogFull, NameReused: nothing of it is kept."""
        crc = crc_of(rows)
        self.arrival = max(self.arrival, now_us)  # the clock of this owner may be behind that of the one before it
        self._forget_keys()  # first: after its time a key is new, also if nothing has come meanwhile
        if (known := self._known(name, crc)) is not None:
            ticket = PushTicket(known, repeated=True, durable=known.first + known.rows <= self.durable)
            if not ticket.durable:
                self._pending.tickets.append(ticket)
            return ticket
        if self._pending.nbytes >= self.limits.pending_bytes:
            raise LogBusy(f"{self._pending.nbytes:,} bytes wait for the disk already. Push again after a moment")
        if self._bytes - self._heads + self._pending.nbytes >= self.limits.disk_bytes:
            raise LogFull(
                f"the log has {self._bytes:,} bytes, all that it may have: queries that read it have not come so far, or "
                "retain is too long. Let them go on, forget readers that do not come back, or register the stream with more"
            )
        if name.client and name.client not in self._clients and len(self._clients) >= self.limits.clients:
            raise LogFull(
                f"the log knows {len(self._clients):,} names of clients, all that it may have. Use one of these, or "
                "Idempotency-Key; or register the stream again with more partitions"
            )
        stored = Stored(self.next, count, self.arrival, crc, name.number)
        record = EventRecord(stored, name.key, name.client, rows)
        self._note(record)
        ticket = PushTicket(stored, repeated=False)
        pending = self._pending
        pending.records.append(record)
        pending.tickets.append(ticket)
        pending.nbytes, pending.through = pending.nbytes + len(rows), self.next
        return ticket

    def _known(self, name: PushName, crc: int) -> Stored | None:
        """Return the request that came under this name before; None: none that is known."""
        found = None
        if name.client:
            found = self._clients.get(name.client)
            if found is not None and name.number < found.number:
                return Stored(found.first, 0, found.arrival, crc, name.number)  # its own position is not kept
            if found is not None and name.number > found.number:
                found = None
        elif name.key:
            found = self._keys.get(name.key)
        if found is not None and found.crc != crc:
            called = f"number {name.number} of client {name.client!r}" if name.client else f"key {name.key!r}"
            raise NameReused(
                f"{called} was used for other rows, at position {found.first:,}. Use another one for these"
            )
        return found

    def newest_of(self, client: str) -> Stored | None:
        """Return the newest request of a client; None: none has come."""
        return self._clients.get(client)

    def take(self) -> PushGroup:
        """Return everything that was offered since the last call, for ``commit``."""
        group, self._pending = self._pending, PushGroup()
        group.through = max(group.through, self.durable)
        return group

    def commit(self, group: PushGroup) -> Generator[None, None, None]:
        """Make a group durable. Its tickets may be answered then. Groups are committed in the order in which they were taken.

        TakenOver: another owner has the log; OSError: the disk. Nothing of the group may be answered then, nor be offered again
        here: some of it may be on disk."""
        if group.records:
            data = b"".join(framed_event(record, self._salt) for record in group.records)
            self._store.append(data)
            yield
            self._size, self._bytes = self._size + len(data), self._bytes + len(data)
            if self._began_us is None:
                self._began_us = group.records[0].stored.arrival
            self._store.sync()
            yield
        self._store.check()
        yield
        self.durable = group.through
        self._store.publish(self._chain[-1].id, self._size)
        yield
        for ticket in group.tickets:
            ticket.durable = True

    # ---- segments

    def is_due(self, now_us: int) -> bool:
        """Return whether it is time for another segment."""
        if self._began_us is None:
            return False
        # At least as many bytes of rows as of the head: with many names, each commit would begin a segment otherwise.
        grown = self._size >= max(self.limits.segment_bytes, 2 * self._chain[-1].start) or self._store.crowded
        return grown or now_us - self._began_us >= self.limits.segment_us

    def tidy(self, now_us: int, needed_from: int | None) -> Generator[None, None, None]:
        """Begin another segment if it is time, and remove those that are needed no more (J6): all readers have their rows in
        durable checkpoints, and they are not to be kept. ``needed_from``: the lowest position that a reader may want again; None:
        there is no reader. Everything that was offered must be durable."""
        assert self.durable == self.next, "a segment begins behind durable rows alone"
        if self.is_due(now_us):
            yield from self._begin()
        gone: list[SegmentId] = []
        rest = self._bytes - self._heads
        heads = nbytes = 0
        for segment, following in pairwise(self._chain):
            assert segment.end is not None
            kept = now_us - following.head.arrival < self.limits.retain_us and rest <= self.limits.retain_bytes
            if kept or (needed_from is not None and following.head.first > needed_from):
                break
            gone.append(segment.id)
            rest -= segment.end - segment.start
            heads, nbytes = heads + segment.start, nbytes + segment.end
        if gone:
            self._store.drop(gone)
            self._chain = self._chain[len(gone) :]
            self._bytes, self._heads = self._bytes - nbytes, self._heads - heads
            yield

    @property
    def first(self) -> int:
        """Return the lowest position that is still in the log."""
        return self._chain[0].head.first

    @property
    def bytes(self) -> int:
        """Return the bytes of all segments."""
        return self._bytes
