"""A model of gateways that own a log one after the other, on a disk that they share.

The owner and the reader are those of the product. The disk is this file's: it keeps written and flushed bytes
apart, so that a loss of power takes the rest, or tears it. Each call to the disk is a turn of its own, and anything may happen
between two: an owner is killed, or rests while another one takes over, and is awake again. Everything follows from the seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Generator
from dataclasses import dataclass, field

from flux.eventlog.log_owner import LogLimits, LogOwner, PushTicket
from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import SegmentId
from flux.eventlog.records import PushName
from flux.vault.directory_store import TakenOver


class LawBroken(AssertionError):
    """A law of the log that does not hold in a run."""


@dataclass
class VirtualFile:
    data: bytearray
    durable: int


@dataclass
class VirtualDisk:
    """Segments of one log, as several processes see them."""

    rng: random.Random
    files: dict[SegmentId, VirtualFile] = field(default_factory=dict)
    generation: int = 0
    marks: dict[int, tuple[SegmentId, int]] = field(default_factory=dict)
    began: bool = False

    def lose_power(self) -> None:
        """Lose all that was not flushed, or a part of it; the last part may be torn."""
        for file in self.files.values():
            del file.data[self.rng.randint(file.durable, len(file.data)) :]
            if len(file.data) > file.durable and self.rng.random() < 0.5:
                at = self.rng.randrange(file.durable, len(file.data))
                file.data[at:] = bytes(len(file.data) - at)
            file.durable = len(file.data)
        for generation in list(self.marks):
            if self.rng.random() < 0.5:
                del self.marks[generation]


class VirtualStore:
    """The disk, as one process uses it (``flux.eventlog.log_store.LogStore``)."""

    crowded = False

    def __init__(self, disk: VirtualDisk, writes: bool = True) -> None:
        self.disk, self._number = disk, 0
        if writes:
            disk.generation += 1
        self.generation = disk.generation if writes else 0

    def had_segments(self) -> bool:
        return self.disk.began

    def segments(self) -> list[SegmentId]:
        return sorted(self.disk.files)

    def read(self, segment: SegmentId, start: int = 0, end: int | None = None) -> bytes:
        if segment not in self.disk.files:
            raise FileNotFoundError(segment)
        return bytes(self.disk.files[segment].data[start:end])

    def published(self, segment: SegmentId) -> int:
        of, size = self.disk.marks.get(segment[0], ((0, 0), 0))
        return size if of == segment else 0

    def secure(self, segment: SegmentId) -> None:
        if segment not in self.disk.files:
            raise FileNotFoundError(segment)
        file = self.disk.files[segment]
        file.durable = len(file.data)

    def begin(self, data: bytes) -> None:
        self._number += 1
        #: Open, so that it can be written though it was removed.
        self._file = VirtualFile(bytearray(data), len(data))
        self.disk.files[self.generation, self._number] = self._file
        self.disk.began = True
        self.check()

    def append(self, data: bytes) -> None:
        self._file.data += data

    def sync(self) -> None:
        self._file.durable = len(self._file.data)

    def check(self) -> None:
        if self.disk.generation > self.generation:
            raise TakenOver("the disk")

    def publish(self, segment: SegmentId, size: int) -> None:
        self.disk.marks[self.generation] = segment, size

    def drop(self, segments: Collection[SegmentId]) -> None:
        for segment in segments:
            self.disk.files.pop(segment, None)

    def close(self) -> None: ...


@dataclass(eq=False)
class Request:
    """A push of a client, with content that no other has."""

    content: bytes
    rows: int
    name: PushName
    #: The position that was answered.
    answered: int | None = None


@dataclass(eq=False)
class Gateway:
    """A process that owns the log, or believes so."""

    log: LogOwner
    #: Microseconds by which its clock is behind.
    behind_us: int
    under_way: Generator[None, None, None] | None
    opened: bool = False
    waits: list[tuple[Request, PushTicket]] = field(default_factory=list)


#: Small limits, so that segments end and are removed all the time.
LIMITS = LogLimits(segment_bytes=600, segment_us=400, retain_us=300, retain_bytes=1500)


class Run:
    """One run of the model."""

    def __init__(self, seed: int, store: type[VirtualStore] = VirtualStore, log: type[LogOwner] = LogOwner) -> None:
        self.rng = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._store, self._log = store, log
        self.disk = VirtualDisk(self.rng)
        self.now_us = 10_000
        self.gateways: list[Gateway] = []
        self.requests: list[Request] = []
        self._numbers = {"ann": 0, "bob": 0}
        self._open: dict[str, Request] = {}
        #: Rows by position, as the first reader that came there saw them; the arrival time too.
        self.seen: dict[int, tuple[bytes, int, int]] = {}
        self.readers = [LogReader(store(self.disk, writes=False), "the log") for _ in range(2)]
        #: The position from which each reader may begin again: all before it is in its checkpoint.
        self.kept = [0, 0]

    def go(self, turns: int = 400) -> None:
        for _ in range(turns):
            self.now_us += self.rng.randint(0, 5)
            self._turn()
        self._end()

    def _turn(self) -> None:
        dice = self.rng.random()
        if not self.gateways or dice < 0.015:
            self._start()
        elif dice < 0.03:
            self._kill(self.rng.choice(self.gateways))
        elif dice < 0.035:
            self._lose_power()
        elif dice < 0.25:
            self._push(self.rng.choice(self.gateways))
        elif dice < 0.35:
            self._read(self.rng.randrange(len(self.readers)))
        else:
            # The newest gateway has more turns; the others rest between any two, and are awake again.
            self._step(self.gateways[-1] if self.rng.random() < 0.7 else self.rng.choice(self.gateways))

    def needed_from(self) -> int:
        """Return the position below which no reader needs a row."""
        return min(self.kept)

    def _start(self) -> None:
        if len(self.gateways) < 3:
            log = self._log(self._store(self.disk), "the log", LIMITS)
            self.gateways.append(Gateway(log, self.rng.choice((0, 0, 500, 5000)), log.open()))
            self.happened["take-over"] += len(self.gateways) > 1

    def _kill(self, gateway: Gateway) -> None:
        self.gateways.remove(gateway)
        self.happened["kill"] += 1
        self.happened["kill in a commit"] += gateway.opened and gateway.under_way is not None

    def _lose_power(self) -> None:
        self.gateways.clear()
        self.disk.lose_power()
        self.happened["power lost"] += 1
        for at, start in enumerate(self.kept):  # readers lose their memory, not their checkpoints
            self.readers[at] = LogReader(self._store(self.disk, writes=False), "the log", start)

    def _request(self) -> Request:
        who = self.rng.choice(("ann", "bob", "key", ""))
        waits = [each for each in self.requests if each.answered is None and each.name.key]
        if who in self._open:
            return self._open[who]
        if who == "key" and waits and self.rng.random() < 0.7:
            return self.rng.choice(waits)
        content = f"{len(self.requests)}.".encode() * self.rng.randint(1, 30)
        name = PushName()
        if who == "key":
            name = PushName(key=f"k{len(self.requests)}")
        elif who:
            self._numbers[who] += 1
            name = PushName(client=who, number=self._numbers[who])
        made = Request(content, self.rng.randint(1, 3), name)
        self.requests.append(made)
        if name.client:
            self._open[who] = made
        return made

    def _push(self, gateway: Gateway) -> None:
        if not gateway.opened:
            return
        request = self._request()
        ticket = gateway.log.offer(
            memoryview(request.content), request.rows, request.name, self.now_us - gateway.behind_us
        )
        self.happened["repeat"] += ticket.repeated
        gateway.waits.append((request, ticket))

    def _step(self, gateway: Gateway) -> None:
        try:
            if gateway.under_way is None:
                gateway.under_way = self._work(gateway)
            next(gateway.under_way)
        except StopIteration:
            gateway.opened, gateway.under_way = True, None
        except TakenOver:
            self.gateways.remove(gateway)
            self.happened["fenced"] += 1
            return
        self._answer(gateway)

    def _work(self, gateway: Gateway) -> Generator[None, None, None]:
        log, now_us = gateway.log, self.now_us - gateway.behind_us
        yield from log.commit(log.take())
        if log.durable == log.next:
            before = log.first
            yield from log.tidy(now_us, self.needed_from())
            self.happened["segment removed"] += log.first > before

    def _answer(self, gateway: Gateway) -> None:
        for request, ticket in gateway.waits:
            if ticket.durable:
                first = ticket.stored.first
                if request.answered is not None and first != request.answered and ticket.stored.rows:
                    raise LawBroken(f"a request was answered with position {request.answered}, and with {first}")
                if ticket.stored.rows:
                    request.answered = first
                if self._open.get(request.name.client) is request:
                    del self._open[request.name.client]
        gateway.waits = [each for each in gateway.waits if not each[1].durable]

    def _read(self, at: int) -> None:
        reader = self.readers[at]
        for record in reader.read():
            stored = record.stored
            for row in range(stored.rows):
                found = (bytes(record.batch), row, stored.arrival)
                if self.seen.setdefault(stored.first + row, found) != found:
                    raise LawBroken(f"readers saw two rows at position {stored.first + row}")
        if self.rng.random() < 0.3:
            self.kept[at] = reader.next

    def _end(self) -> None:
        """Have a last owner open the log, and the readers come to the end of it."""
        log = self._log(self._store(self.disk), "the log", LIMITS)
        for _ in log.open():
            pass
        for _ in log.commit(log.take()):
            pass
        for at, reader in enumerate(self.readers):
            before = -1
            while before < reader.next:
                before = reader.next
                self._read(at)
            if reader.next != log.next:
                raise LawBroken(f"a reader ends at {reader.next}, the log at {log.next}")
        self._check(log.next)

    def _check(self, end: int) -> None:
        if sorted(self.seen) != list(range(end)):
            raise LawBroken("a position was given to no reader")
        arrivals = [self.seen[position][2] for position in range(end)]
        if arrivals != sorted(arrivals):
            raise LawBroken("an arrival time falls")
        found: dict[bytes, list[int]] = {}
        for position in range(end):
            content, row, _ = self.seen[position]
            if row == 0:
                found.setdefault(content, []).append(position)
        for request in self.requests:
            places = found.get(request.content, [])
            if request.answered is not None and places != [request.answered]:
                raise LawBroken(f"a request that was answered with position {request.answered} is at {places}")
            if len(places) > 1 and (request.name != PushName()):
                raise LawBroken(f"a request that was not answered is at {places}")
        self.happened["answered"] += sum(request.answered is not None for request in self.requests)
