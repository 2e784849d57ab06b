"""The thread that fetches for all partitions of a source that a process reads: sockets and clock around ``fetch_schedule``."""

from __future__ import annotations

import functools
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flux.connectors.kafka.client import cluster as limits
from flux.connectors.kafka.client.cluster import (
    CONNECT_S,
    FETCH_BY_ID,
    LEFT_OUT,
    Address,
    Client,
    Fetched,
    Located,
    OutOfRange,
    Passing,
    fetch_message,
    fetched,
    fetched_parts,
    no_tls,
    throttled,
)
from flux.connectors.kafka.client.connection import Connection
from flux.connectors.kafka.client.kafka_python import library
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import UNKNOWN, differ
from flux.connectors.kafka.errors import BrokerBroken, BrokerUnreachable, CorruptRecords, DataLost, KafkaError
from flux.connectors.kafka.read.fetch_schedule import (
    WORKED_OFF,
    BrokerSlot,
    FetchedPartition,
    FetchRequest,
    FetchSchedule,
)

#: Nanoseconds in which the calling thread ran, and in which it waited for a processor.
SCHEDULED = Path("/proc/thread-self/schedstat")
#: Time between two looks, in seconds.
LOOK_S = 0.25
#: Least time of running and waiting, in seconds, of which the share says something.
_LEAST_S = 0.005


class ThreadCrowding:
    """Meter of the competition for processors: the part of its time that the thread which calls ``share`` waits for a
    processor, as Linux counts it."""

    def __init__(self, scheduled: Path = SCHEDULED) -> None:
        self._scheduled = scheduled
        self._look_at = 0.0
        self._ran = self._waited = 0

    def share(self, now: float) -> float | None:
        """Return the part of the time since the last answer in which this thread could have run, and others had the
        processors: from 0 to 1. None: it is not known, or not yet."""
        if now < self._look_at:
            return None
        first, self._look_at = not self._look_at, now + LOOK_S
        try:
            ran, waited = map(int, self._scheduled.read_text().split()[:2])
        except (OSError, ValueError):
            self._look_at = float("inf")  # another system, without this file
            return None
        since = ran - self._ran, waited - self._waited
        self._ran, self._waited = ran, waited
        return None if first or sum(since) < 1e9 * _LEAST_S else since[1] / sum(since)


class Paused(Exception):
    """Signal of a reader that goes on with the rows it has after a pause. ``until`` is the end of the pause; None: the reader
    announces when it has room."""

    def __init__(self, until: float | None) -> None:
        super().__init__()
        self.until = until


class TakesTime(Exception):
    """Signal of a reader that this work belongs into another thread, because it may wait for another process."""


class NothingWhole(CorruptRecords):
    """Answer without any whole record batch that has the wanted offset or a later one."""


class PartitionOwner(Protocol):
    """Reader of a partition of a topic, as the thread that fetches for it sees it (see ``Fetcher``)."""

    #: Name of the topic.
    topic: str
    #: Number of the partition in its topic.
    partition: int
    #: Offset to ask for next.
    next_offset: int
    #: Id of the topic that ``next_offset`` belongs to; UNKNOWN until a broker has given the first one.
    topic_id: str
    #: The reader has no room for more rows.
    full: bool
    #: Whether brokers may take any time once one has answered: results go on without the partition.
    may_be_silent: bool
    #: Whether a broker has answered an earlier life of the reader.
    answered_before: bool

    @property
    def takes_time(self) -> bool: ...

    def came(self, answer: Fetched) -> None:
        """Take over rows that have come. ``work_off`` is called next."""

    def work_off(self, may_wait: bool) -> bool:
        """Decode the rows that have come and put them out. Returns whether the log has more.

        Paused: it is called again; TakesTime, only if not ``may_wait``: it is called in another thread, with ``may_wait``;
        Passing and OSError: the rest is asked for again; NothingWhole."""

    def nothing(self, end: int, lags: bool = False) -> None:
        """Note that nothing has come, and that the log ends at ``end``. ``lags``: there are records for which the answer, which
        has those of other partitions, had no room."""

    def not_answered(self) -> None:
        """Note that the broker of the partition cannot be reached, or has not answered in time."""

    def go_on_in_range(self) -> None:
        """Find a new place: the records that come next are not in the log. Called in another thread."""

    def go_on_in(self, topic_id: str) -> None:
        """Go on in another topic of the same name, which brokers have now and whose id this is. Called in another thread."""

    def fail(self, error: BaseException) -> None:
        """End the reading with an error, which the worker gets."""

    def over(self) -> None:
        """Release everything: the reader was removed, and is not called any more."""


log = logging.getLogger("flux.kafka")

#: Time for which a thread waits for another job before it ends.
IDLE_S = 1.0


class SideJobs:
    """Pool of threads for work that would hold up the fetching thread: looking up leaders, connecting, decoding large answers.
    Each job begins at once, in an idle thread or in a new one. Closing the pool waits for no job. A job catches its own
    errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._closed = False

    def give(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
                return
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Let the threads end, once they are through with their jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._jobs or self._closed, IDLE_S)
                self._idle -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                log.exception("a job beside the reading of Kafka failed")


class Fetcher:
    """Fetcher of a cluster, shared by all readers of a source in a process. It starts a thread when there are readers and none
    runs.

    ``fetch_bytes`` is the approximate size of an answer. ``retry_s`` is the longest time, in seconds, without an answer of
    any broker for a partition.

    Law: no method blocks. The thread begins with the first reader and ends soon after the last is removed, even if no
    broker answers."""

    def __init__(
        self, bootstrap: Sequence[Address], security: Security, fetch_bytes: int, read_committed: bool, retry_s: float
    ) -> None:
        self._how = bootstrap, security, fetch_bytes, read_committed, retry_s
        self._lock = threading.Lock()
        #: Run that takes new readers, until it has ended.
        self._runs: _FetchRun | None = None
        #: Run of each reader.
        self._run_of: dict[PartitionOwner, _FetchRun] = {}
        self._process = os.getpid()

    def add(self, reader: PartitionOwner) -> None:
        with self._lock:
            if self._process != os.getpid():  # threads do not survive a fork
                self._runs, self._run_of, self._process = None, {}, os.getpid()
            if self._runs is None or not self._runs.add(reader):
                self._runs = _FetchRun(*self._how)
                self._runs.add(reader)
                self._runs.start()
            self._run_of[reader] = self._runs

    def remove(self, reader: PartitionOwner) -> None:
        with self._lock:
            run = self._run_of.pop(reader, None)
        if run is not None:
            run.let_go(reader)

    def has_room(self, reader: PartitionOwner) -> None:
        """Tell the thread that a reader that was Paused without a time has room again."""
        run = self._run_of.get(reader)
        if run is not None:
            run.tell(functools.partial(run.resume, reader))


class _FetchRun:
    """Life of the thread, from the first reader to the last. Only ``add``, ``let_go`` and ``tell`` may be called from other
    threads.

    Slow work is done in other threads: looking up leaders, connecting, decoding large answers. The thread itself decodes
    small answers, because passing them to another thread would take longer."""

    def __init__(
        self, bootstrap: Sequence[Address], security: Security, fetch_bytes: int, read_committed: bool, retry_s: float
    ) -> None:
        self._bootstrap, self._security = bootstrap, security
        self._fetch_bytes, self._read_committed, self._retry_s = fetch_bytes, read_committed, retry_s
        self._fetching = FetchSchedule()
        self._crowding = ThreadCrowding()
        #: Partitions that are read, by their readers.
        self._parts: dict[PartitionOwner, FetchedPartition] = {}
        self._in_job: set[PartitionOwner] = set()  # readers with a job in another thread
        self._connections: dict[BrokerSlot, Connection] = {}
        self._asked: dict[int, tuple[Connection, FetchRequest, float]] = {}  # by file number, with the end of the wait
        self._slots: dict[int, BrokerSlot] = {}  # by file number: connections that are polled
        self._leaders = Client(bootstrap, security)  # used by the job that looks leaders up
        #: A job is looking leaders up; there is one at a time.
        self._looks_up = False
        self._errors = Client(bootstrap, security)  # makes errors, and is never connected
        self._jobs = SideJobs("flux-kafka-beside")
        #: Calls that other threads ask the loop to make.
        self._news: deque[Callable[[], None]] = deque()
        #: Pair that wakes the loop from other threads.
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._hears.fileno(), select.POLLIN)
        #: The loop is waiting, so a new call has to wake it.
        self._waits = False
        self._counts = threading.Lock()
        self._readers = 0
        self._new: set[PartitionOwner] = set()  # readers that were added and have not begun
        #: The loop does no more calls; set under ``_counts``, so that no reader is added to a run at its end.
        self.ended = False

    def start(self) -> None:
        """Start the thread. The first reader must be there: without a reader the thread ends."""
        threading.Thread(target=self._run, name="flux-kafka-fetch", daemon=True).start()

    # ---- from other threads

    def add(self, reader: PartitionOwner) -> bool:
        """Add a reader. False: the run has ended already."""
        with self._counts:
            if self.ended:
                return False
            self._readers += 1
            self._new.add(reader)
        self.tell(functools.partial(self._begin, reader))
        return True

    def let_go(self, reader: PartitionOwner) -> None:
        """Remove a reader that was added."""
        with self._counts:
            there = not self.ended
        if there:
            self.tell(functools.partial(self._remove, reader))
        else:
            reader.over()  # the thread has ended with an error

    def tell(self, what: Callable[[], None]) -> None:
        self._news.append(what)
        if self._waits:
            try:
                self._rings.send(b"!")
            except OSError:
                pass  # full: the thread will wake; or closed: the run has ended

    # ---- the loop

    def _run(self) -> None:
        try:
            while self._hear_news():
                self._turn()
        except BaseException as error:
            with self._counts:
                self.ended = True
            for reader in [*self._parts, *self._new]:
                reader.fail(error)
        finally:
            self._close()

    def _hear_news(self) -> bool:
        """Do the calls that other threads have asked for. False: no reader is left, and the run ends."""
        while self._news:
            self._news.popleft()()
        with self._counts:
            self.ended = not self._readers and not self._news
        return not self.ended

    def _turn(self) -> None:
        now = time.monotonic()
        share = self._crowding.share(now)
        if share is not None:
            self._fetching.waited(share)
        for part in self._fetching.resumed(now):
            self._work_off(part)
        self._look_up(now)
        for ask in self._fetching.asks(now):
            self._send(ask)
        due = min(
            self._fetching.due(self._looks_up), min((until for *_, until in self._asked.values()), default=float("inf"))
        )
        self._waits = True
        try:
            # Calls told before ``_waits`` was set are in ``_news``; calls told from now on wake the poll.
            wait = 0.0 if self._news else max(due - time.monotonic(), 0.0)
            ready = self._poll.poll(None if wait == float("inf") else 1000 * wait)
        finally:
            self._waits = False
        for number, _ in ready:
            if number == self._hears.fileno():
                self._hear()
            elif number in self._asked:
                self._receive(number)
            elif number in self._slots:
                self._drop(self._slots[number])  # nothing was asked there: the broker has closed it
        self._give_up_late()

    def _hear(self) -> None:
        try:
            while self._hears.recv(4096):
                pass
        except OSError:
            pass

    def _close(self) -> None:
        self._leaders.abort()
        if not self._looks_up:  # otherwise its job closes it
            self._leaders.close()
        self._jobs.close()
        for connection in self._connections.values():
            connection.close()
        self._hears.close()
        self._rings.close()

    # ---- readers

    def _begin(self, reader: PartitionOwner) -> None:
        self._new.discard(reader)
        part = FetchedPartition(
            reader, reader.topic, reader.partition, reader.next_offset, time.monotonic(), reader.answered_before,
            reader.topic_id,
        )  # fmt: skip
        self._parts[reader] = part
        self._fetching.add(part)

    def _remove(self, reader: PartitionOwner) -> None:
        with self._counts:
            self._readers -= 1
        part = self._parts.pop(reader, None)
        if part is not None:
            self._fetching.remove(part)
        if reader not in self._in_job:
            reader.over()

    def resume(self, reader: PartitionOwner) -> None:
        part = self._parts.get(reader)
        if part is not None and part.phase is WORKED_OFF and reader not in self._in_job:
            part.good = time.monotonic()  # the pause was caused here, not by a broker
            self._work_off(part)

    def _work_off(self, part: FetchedPartition) -> None:
        reader = part.owner
        if reader.takes_time:
            self._do_in_job(part, lambda: reader.work_off(may_wait=True))
            return
        said: Any
        try:
            said = reader.work_off(may_wait=False)
        except TakesTime:
            self._do_in_job(part, lambda: reader.work_off(may_wait=True))
            return
        except Exception as error:
            said = error
        self._worked_off(part, said)

    def _do_in_job(self, part: FetchedPartition, job: Callable[[], Any]) -> None:
        self._in_job.add(part.owner)

        def done() -> None:
            said: Any
            try:
                said = job()
            except BaseException as error:  # also sys.exit() in a user's function
                said = error
            self.tell(functools.partial(self._back, part, said))
            if self.ended:
                part.owner.over()  # the loop has ended, and will not do it

        self._jobs.give(done)

    def _back(self, part: FetchedPartition, said: Any) -> None:
        """Take the result of a job from another thread."""
        self._in_job.discard(part.owner)
        if part.owner in self._parts:
            self._worked_off(part, said)
        else:
            part.owner.over()

    def _worked_off(self, part: FetchedPartition, said: Any) -> None:
        """Go on after ``work_off``; ``said`` is its result, or the error that it raised."""
        now, reader = time.monotonic(), part.owner
        if isinstance(said, Paused):
            if said.until is not None:
                self._fetching.pauses(part, said.until)
            elif not reader.full:  # there is room again, perhaps announced while the job was under way
                self._work_off(part)
        elif isinstance(said, NothingWhole) and part.among:
            self._fetching.goes_on(part, reader.next_offset, now, lags=True, alone=True)
        elif isinstance(said, BaseException):
            self._failed(part, said)
        elif self._fetching.stale(part, now):
            self._failed(part, Passing("it is looked up again"))
        else:
            self._fetching.goes_on(part, reader.next_offset, now, lags=said)

    def _end(self, part: FetchedPartition, error: BaseException) -> None:
        """End the reading of a partition with an error. Its reader is there until it is removed."""
        self._parts.pop(part.owner, None)
        self._fetching.remove(part)
        part.owner.fail(error)

    def _failed(self, part: FetchedPartition, error: BaseException) -> None:
        """Handle an error of a partition: try again if it may pass, otherwise end the reading."""
        reader = part.owner
        if isinstance(error, OutOfRange):
            self._do_in_job(part, lambda: self._in_range(reader))
            return
        patient = reader.may_be_silent and part.answered
        if not (isinstance(error, OSError | Passing) or (patient and isinstance(error, BrokerUnreachable))):
            self._end(part, error)
            return
        if isinstance(error, OSError | BrokerUnreachable):
            reader.not_answered()
        limit_s = float("inf") if patient else self._retry_s
        silent = self._fetching.failed(part, reader.next_offset, time.monotonic(), limit_s)
        if silent is not None:
            doing = f"reading partition {part.number} of topic {part.topic!r} from offset {reader.next_offset}"
            ends = self._leaders.unreachable(doing, silent, error)
            ends.__cause__ = error
            self._end(part, ends)

    @staticmethod
    def _in_range(reader: PartitionOwner) -> None:
        reader.go_on_in_range()
        raise Passing("the offset was out of range")  # for a pause, should the broker answer the same again

    @staticmethod
    def _go_on_in(topic_id: str, reader: PartitionOwner) -> None:
        reader.go_on_in(topic_id)
        raise Passing("the topic was made anew")  # so that the leaders of the new topic are looked up

    # ---- leaders

    def _look_up(self, now: float) -> None:
        if not self._looks_up and (parts := self._fetching.lookups(now)):
            self._looks_up = True
            self._jobs.give(functools.partial(self._looked_up, parts))

    def _looked_up(self, parts: list[FetchedPartition]) -> None:
        """Look up leaders. Runs in another thread."""
        found: dict[str, Located | Exception] = {}
        for topic in {part.topic for part in parts}:
            try:
                found[topic] = self._leaders.located(topic)
            except Exception as error:
                self._leaders.forget()
                found[topic] = error
        self.tell(functools.partial(self._found, parts, found))
        if self.ended:
            self._leaders.close()

    def _found(self, parts: list[FetchedPartition], found: Mapping[str, Located | Exception]) -> None:
        self._looks_up = False
        for part in parts:
            located, reader = found[part.topic], part.owner
            if part.owner not in self._parts:
                continue  # it was removed meanwhile
            if isinstance(located, Exception):
                self._failed(part, located)
            elif differ(located.topic_id, reader.topic_id):
                self._do_in_job(part, functools.partial(self._go_on_in, located.topic_id, reader))
            elif part.number in located.leaders:
                reader.topic_id = reader.topic_id or located.topic_id
                # With UNKNOWN from the broker, requests go by name: a request by an id that the broker does not know would
                # fail for ever.
                part.topic_id = located.topic_id
                self._fetching.found(part, located.leaders[part.number], time.monotonic())
            else:
                self._failed(part, Passing(f"partition {part.number} of topic {part.topic!r} has no leader"))

    # ---- requests

    def _send(self, ask: FetchRequest) -> None:
        connection = self._connections.get(ask.slot)
        if connection is not None and connection.usable:
            self._begin_asking(ask, connection)
        else:
            self._drop(ask.slot)
            self._jobs.give(functools.partial(self._connect, ask))

    def _connect(self, ask: FetchRequest) -> None:
        """Connect to a broker. Runs in another thread."""
        broker = ask.slot.broker
        try:
            connection = Connection(broker, self._security, min(CONNECT_S, limits.ATTEMPT_S))
        except Exception as error:
            said = no_tls(broker, error) if isinstance(error, ssl.SSLError) else error
            self.tell(functools.partial(self._no_answer, ask, said))
            return
        self.tell(functools.partial(self._connected, ask, connection))
        if self.ended:
            connection.close()

    def _connected(self, ask: FetchRequest, connection: Connection) -> None:
        number = connection.fileno()
        if number < 0:
            return  # the run is ending, and has closed it
        self._connections[ask.slot], self._slots[number] = connection, ask.slot
        self._poll.register(number, select.POLLIN)
        self._begin_asking(ask, connection)

    def _begin_asking(self, ask: FetchRequest, connection: Connection) -> None:
        number = connection.fileno()
        by_id = connection.knows(library().Fetch, FETCH_BY_ID)
        for part in ask.parts:
            part.by_id = by_id and part.topic_id != UNKNOWN
        try:
            message = fetch_message(ask.wanted, ask.wait, self._fetch_bytes, self._read_committed)
            connection.begin(message, limits.ATTEMPT_S)
        except Exception as error:
            self._drop(ask.slot, number)
            self._no_answer(ask, error)
        else:
            self._asked[number] = connection, ask, time.monotonic() + ask.wait + limits.ATTEMPT_S

    def _drop(self, slot: BrokerSlot, number: int | None = None) -> None:
        """Close the connection of a slot. ``number`` is its file number, for a connection that may be closed already."""
        connection = self._connections.pop(slot, None)
        if connection is not None:
            number = connection.fileno() if number is None else number
            self._asked.pop(number, None)
            if self._slots.pop(number, None) is not None:
                self._poll.unregister(number)
            connection.close()

    def _no_answer(self, ask: FetchRequest, error: Exception) -> None:
        for part in self._fetching.answered(ask, time.monotonic()):
            self._failed(part, error)

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for number, (_, ask, until) in list(self._asked.items()):
            if now >= until:
                self._drop(ask.slot, number)
                self._no_answer(ask, TimeoutError("timed out"))

    # ---- answers

    def _receive(self, number: int) -> None:
        connection, ask, _ = self._asked[number]
        try:
            answer = connection.arrived()
        except Exception as error:
            self._drop(ask.slot, number)
            self._no_answer(ask, error)
            return
        if answer is not None:
            del self._asked[number]
            self._answered(ask, answer)

    def _answered(self, ask: FetchRequest, answer: Any) -> None:
        """Take the answer to a request: an error of each partition by itself, and its records, or the news that it has none.
        Records are worked off last, when every partition of the answer has its state."""
        now = time.monotonic()
        try:
            throttle_s, found = throttled(answer), fetched_parts(answer, ask.wanted)
        except (TypeError, AttributeError, ValueError) as error:  # null in a field that must have a value
            self._no_answer(
                ask, BrokerBroken(f"the broker at {ask.slot.broker} sent a fetch answer without parts: {error}")
            )
            return
        parts = self._fetching.answered(ask, now, throttle_s)
        full = any(each.records for each in found.values())
        brings = []
        for part in parts:
            got = found.get((part.topic, part.number))
            try:
                self._errors.check(getattr(answer, "error_code", 0), part.topic)
                if got is None:
                    raise Passing(LEFT_OUT)
                self._errors.check(got.error_code, part.topic)
            except (OutOfRange, Passing, KafkaError, DataLost) as error:
                self._failed(part, error)
                continue
            if got.records:
                brings.append((part, fetched(got)))
                self._fetching.works_off(part, now)
            else:
                # The answer may have had no room for this partition, beside the records of others.
                lags = full and part.offset < got.high_watermark
                part.owner.nothing(got.high_watermark, lags)
                self._fetching.goes_on(part, part.offset, now, lags=lags)
        for part, rows in brings:
            part.owner.came(rows)
            self._work_off(part)
