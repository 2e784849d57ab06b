"""An iterator that may block, read in a thread of its own, one item ahead.

So the loop that owns the sockets goes on acking, sending and greeting while the input is silent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import Generic, TypeVar

from flux.shell.bell import Bell

T = TypeVar("T")
_END = object()


class Prefetch(Generic[T]):
    """A thread that reads an iterator one item ahead. ``take`` never blocks; ``bell`` rings when there is something to take."""

    def __init__(self, items: Iterable[T], bell: Bell) -> None:
        self.ended = False
        self._items = items
        self._bell = bell
        self._ready: queue.Queue[object] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="flux-prefetch", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for item in self._items:
                self._ready.put(item)
                self._bell.ring()
        except BaseException as error:  # raised again by ``take``
            self._error = error
        self._ready.put(_END)
        self._bell.ring()

    def drain(self, timeout: float) -> None:
        """Throw away the items still to come, for at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while not self.ended and time.monotonic() < end:
            try:
                self.ended = self._ready.get(timeout=0.1) is _END
            except queue.Empty:
                pass

    def take(self) -> T | None:
        """Return the next item, or None if there is none yet or no more (``ended``). Raises the error of the iterator."""
        try:
            item = self._ready.get_nowait()
        except queue.Empty:
            return None
        if item is _END:
            self.ended = True
            self._thread.join()
            if self._error is not None:
                raise self._error
            return None
        return item  # type: ignore[return-value]
