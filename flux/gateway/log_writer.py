"""A thread that owns a log: one flush for all requests that wait (design: event-log, log-owner).

A log in a directory has a lock besides, which the system releases when its owner dies. So a gateway takes over what no living
one owns, and leaves the rest alone; if the lock should fail, as on some network file systems, the generation still decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from flux.errors import FluxError, QueryFailed
from flux.eventlog.log_owner import LogLimits, LogOwner, PushTicket
from flux.eventlog.log_store import open_log
from flux.eventlog.records import PushName
from flux.gateway.problems import described
from flux.vault.location import Folder, Place

logger = logging.getLogger("flux.gateway")
_OWNER = "owner"
#: Seconds between two looks for segments that are needed no more, and at the generation while nothing comes; in an object store,
#: where each look is a request.
_TIDY_S, _TIDY_REMOTE_S = 1.0, 10.0
#: Seconds for which requests of an object store are gathered: each flush is an object.
REMOTE_FLUSH_S = 0.1


class OwnedElsewhere(FluxError):
    """Refusal of a push whose log another gateway owns. ``gateway`` is its address."""

    def __init__(self, where: str, gateway: str) -> None:
        super().__init__(f"{where} belongs to another gateway, {gateway}")
        self.gateway = gateway


class NotStored(FluxError):
    """Failure of a push of which nothing is promised: it may be on disk. Under the same name it can come again."""


class OwnerLock:
    """The lock of a log in a directory, with the address of its holder. Elsewhere there is none."""

    def __init__(self, place: Place, where: str, address: str) -> None:
        """Take the lock. OwnedElsewhere: a living gateway has it."""
        self._file: int | None = None
        if not isinstance(place, Folder):
            return
        file = os.open(place.path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 1000, 0).decode(errors="replace")
            os.close(file)
            raise OwnedElsewhere(where, owner) from None
        os.ftruncate(file, 0)
        os.pwrite(file, address.encode(), 0)
        self._file = file

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class LogWriter:
    """The owner of one log, in a thread. ``error`` is the reason of its end; a writer that has ended takes nothing more."""

    def __init__(
        self, place: Place, where: str, limits: LogLimits, address: str, needed_from: Callable[[], int | None],
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """Take the log over. OwnedElsewhere: another gateway owns it. DamagedLog: events are missing that were answered."""
        self.error: Exception | None = None
        self._where, self._clock, self._needed_from = where, clock, needed_from
        self._gather_s, self._tidy_s = (REMOTE_FLUSH_S, _TIDY_REMOTE_S) if place.flush_s else (0.0, _TIDY_S)
        self._changed = threading.Condition()
        self._waiting: dict[PushTicket, Future[PushTicket]] = {}
        self._closed = False
        self._tidied = 0.0
        self._lock = OwnerLock(place, where, address)
        try:
            self._store = open_log(place, writes=True)
            self._log = LogOwner(self._store, where, limits)
            for _ in self._log.open():
                pass
        except BaseException:
            self._lock.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"flux-log-{where}", daemon=True)
        self._thread.start()

    def offer(self, rows: memoryview, count: int, name: PushName) -> Future[PushTicket]:
        """Accept a push; the result is there when it is on disk. LogBusy, LogFull, NameReused: nothing of it is kept. NotStored:
        this writer has ended."""
        done: Future[PushTicket] = Future()
        with self._changed:
            if self.error is not None or self._closed:
                reason = "the gateway stops" if self.error is None else described(self.error)
                raise NotStored(f"{self._where} has lost its owner here: {reason}") from self.error
            ticket = self._log.offer(rows, count, name, self._now_us())
            if ticket.durable:
                done.set_result(ticket)
            else:
                self._waiting[ticket] = done
                self._changed.notify()
        return done

    def close(self) -> None:
        """Flush all that waits, and give the log up."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)

    def _run(self) -> None:
        failed: Exception | None = None
        try:
            while self._turn():
                pass
        except (
            Exception
        ) as error:  # any error ends the thread: the state of the log is unknown, so no push may be answered any more
            failed = error
        with contextlib.suppress(OSError):
            self._store.close()
        self._lock.close()  # before the error is told: then this gateway may take the log over again
        if failed is not None:
            self._end(failed)

    def _turn(self) -> bool:
        """Commit all that waits. Return whether there may be more."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closed, self._tidy_s)
            closed = self._closed
        if self._gather_s and not closed:
            time.sleep(self._gather_s)
        with self._changed:
            group = self._log.take()
        # Also without a push: a log that was taken over, moved or removed is noticed.
        for _ in self._log.commit(group):
            pass
        self._answer(group.tickets)
        if time.monotonic() - self._tidied > self._tidy_s or self._log.is_due(self._now_us()):
            self._tidy()
        return not closed

    def _answer(self, tickets: list[PushTicket]) -> None:
        with self._changed:
            done = [(self._waiting.pop(ticket), ticket) for ticket in tickets]
        for future, ticket in done:
            future.set_result(ticket)

    def _tidy(self) -> None:
        """Begin another segment and remove old ones, while pushes wait: the head of a segment has durable requests only."""
        self._tidied = time.monotonic()
        needed = self._needed_from()
        with self._changed:
            group = self._log.take()
            for _ in self._log.commit(group):
                pass
            for _ in self._log.tidy(self._now_us(), needed):
                pass
        self._answer(group.tickets)

    def _end(self, error: Exception) -> None:
        expected = isinstance(error, QueryFailed | OSError)
        logger.log(
            logging.WARNING if expected else logging.ERROR,
            "%s ends here: %s",
            self._where,
            error,
            exc_info=not expected,
        )
        with self._changed:
            self.error = error
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            failed = NotStored(f"{self._where}: {described(error)}. The push may be on disk or not")
            failed.__cause__ = error
            future.set_exception(failed)
