"""A reader that may block, in a thread of its own, ahead of the worker that takes what it gives.

Law: no method blocks. What was read and not taken has at most ``bytes_max``, and one batch. The thread ends soon after
``close``, as soon as the reader gives something or says that it has nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from flux.dataflow.sources import Positioned

#: Some hundredths of a second of work.
AHEAD_BYTES = 16 << 20


class Ahead:
    """``items``: rows with their positions; a number of seconds to wait before it is asked again, where there is nothing just
    now. It is begun, asked and closed by the thread."""

    def __init__(
        self, items: Callable[[], Iterator[Positioned | float]], name: str, bytes_max: int = AHEAD_BYTES
    ) -> None:
        self._items = items
        self._bytes_max = bytes_max
        self._ready: deque[Positioned] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Positioned | None]:
        return self

    def __next__(self) -> Positioned | None:
        """The next rows; None if there are none yet. Raises what ended the reading once everything before is taken."""
        with self._changed:
            if self._ready:
                taken = self._ready.popleft()
                self._bytes -= taken.batch.nbytes
                self._changed.notify()
                return taken
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopIteration
        return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify()

    def _run(self) -> None:
        items: Iterator[Positioned | float] | None = None
        try:
            items = self._items()
            for item in items:
                if not self._put(item):
                    return
            self._ended = True
        except BaseException as error:  # for whoever takes
            self._error = error
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _put(self, item: Positioned | float) -> bool:
        """Whether more is wanted; waits for room, or as long as the reader wants to."""
        with self._changed:
            if not isinstance(item, Positioned):
                self._changed.wait_for(lambda: self._closed, item)
                return not self._closed
            size = item.batch.nbytes
            self._changed.wait_for(lambda: self._closed or not self._ready or self._bytes + size <= self._bytes_max)
            if not self._closed:
                self._ready.append(item)
                self._bytes += size
            return not self._closed
