"""Threads for work that would hold up the fetching thread: looking up leaders, connecting, decoding large answers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("flux.kafka")

#: Time for which a thread waits for another job before it ends.
IDLE_S = 1.0


class SideJobs:
    """Pool of threads. Each job begins at once, in an idle thread or in a new one. Closing the pool waits for no job. A job
    catches its own errors."""

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
