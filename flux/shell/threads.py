"""A worker's thread for jobs that would hold up its partitions, and the bell by which other threads end a wait."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

from flux.state.jobs import attempt


class Bell:
    """A signal between threads, as something to poll beside sockets. Any thread rings it, and the waiting thread hears it again
    and again until it is cleared."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)
        self.raw = self._hears.fileno()

    def ring(self) -> None:
        try:
            self._rings.send(b"!")
        except OSError:
            pass  # full: it is ringing already; or closed: no thread listens

    def clear(self) -> None:
        try:
            while self._hears.recv(4096):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._hears.close()
        self._rings.close()


class BackgroundJobs:
    """A thread for jobs that would hold up partitions: making bytes of a large state, a state of bytes, or an import.

    It does jobs in the order in which they were given; ``bell`` rings when one is done. A job that never ends does not keep the
    process: the thread is a daemon."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._jobs: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="flux-background", daemon=True)

    def give(self, token: int, job: Callable[[], Any]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put((token, job))

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None and not self._closed:
            token, job = given
            self._done.put((token, attempt(job)))
            self._bell.ring()

    def done(self) -> Iterator[tuple[int, Any]]:
        """Yield tokens and results of the jobs that are done since the last call."""
        self._bell.clear()
        while True:
            try:
                yield self._done.get_nowait()
            except Empty:
                return

    def close(self, limit_s: float | None = None) -> bool:
        """Wait for the job under way, for ``limit_s`` seconds at the most; None: until it is done. Jobs that have not begun are
        given up. Return whether the job has ended."""
        self._closed = True
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(limit_s)
        return not self._thread.is_alive()
