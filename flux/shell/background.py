"""One thread of a worker for jobs that would hold up its partitions: making bytes of a large state, and a state of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from flux.replicas.aside import attempt
from flux.shell.bell import Bell


class Background:
    """A thread that does jobs in the order in which they were given; ``bell`` rings when one is done."""

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
