"""A worker's thread for jobs that would hold up its partitions, and the bell by which other threads end a wait."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    """A thread for jobs that would hold up partitions: making bytes of a large state, and a state of bytes.

    It does jobs in the order in which they were given; ``bell`` rings when one is done."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._pool = ThreadPoolExecutor(1, "flux-background")
        self._done: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def give(self, token: int, job: Callable[[], Any]) -> None:
        self._pool.submit(self._run, token, job)

    def _run(self, token: int, job: Callable[[], Any]) -> None:
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

    def close(self) -> None:
        """Wait for the job under way; jobs that have not begun are given up."""
        self._pool.shutdown(wait=True, cancel_futures=True)
