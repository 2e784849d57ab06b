"""A thread that reads ahead of a worker from a reader that may block.

Law: no method blocks. Batches that were read and not taken have at most ``AHEAD_BYTES``, and one batch more. After ``close``
the thread ends as soon as the reader gives something or says that it has nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from flux.dataflow.source import Positioned
from flux.dataflow.source_reader import SILENCE_S, SILENT, PartitionReader, Silence

#: Some hundredths of a second of work for a worker.
AHEAD_BYTES = 16 << 20
#: The most rows and bytes of small batches that are joined: the cost of a small batch hardly depends on the number of its rows.
JOINED_ROWS, JOINED_BYTES = 65_536, 4 << 20


def first_joined(ready: deque[tuple[Positioned, int]], rows_max: int, bytes_max: int) -> tuple[Positioned, int]:
    """Take the first batch, joined with the small batches of the same schema behind it as far as they fit. ``ready`` holds each
    batch with its bytes; the bytes of the result are returned, too."""
    first, nbytes = ready.popleft()
    rows, parts = first.batch.num_rows, [(first, nbytes)]
    while ready:
        following, more = ready[0]
        fits = rows + following.batch.num_rows <= rows_max and nbytes + more <= bytes_max
        if not fits or not following.batch.schema.equals(first.batch.schema):
            break
        rows, nbytes = rows + following.batch.num_rows, nbytes + more
        parts.append(ready.popleft())
    if len(parts) == 1:
        return parts[0]
    try:
        joined = pa.concat_batches([part.batch for part, _ in parts])
    except pa.ArrowException:  # dictionaries that have too many values together
        ready.extendleft(reversed(parts[1:]))
        return parts[0]
    numbers = [part.numbers for part, _ in parts if part.numbers is not None]
    return Positioned(joined, parts[-1][0].position, np.concatenate(numbers) if numbers else None), nbytes


class ThreadedReader(PartitionReader):
    """A thread that reads ahead. ``items`` gives rows with their positions or, if it has nothing now, the number of seconds
    until it is to be asked again. A reader that has nothing for long gives 0 seconds now and then, because it can be closed only
    between two items. The thread begins, asks and closes the reader. ``gather_s`` is the time that batches may wait for more
    batches, while there is less than half of the amount that may be joined.

    A reader that has been asked for ``SILENCE_S`` and has not answered is silent."""

    _tells_silence = True

    def __init__(self, items: Callable[[], Iterator[Positioned | float]], name: str, gather_s: float = 0.0) -> None:
        self._items = items
        self._gather_s = gather_s
        self._ready: deque[tuple[Positioned, int]] = deque()
        self._rows_ready = self._bytes = 0
        self._since = 0.0  # the time since when the first ready batch waits
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self._pauses = 0
        #: The time since which the reader is asked for the next item; infinite: it is not asked now.
        self._asked_since = time.monotonic()
        self._error: BaseException | None = None
        self._ring: Callable[[], None] | None = None
        self._asked_in_vain = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def next(self) -> Positioned | Silence | None:
        """Return the next rows; None if there are none yet. Raises the reader's error once everything before it is taken."""
        with self._changed:
            if self._ready and not self._gathers():
                taken, nbytes = first_joined(self._ready, JOINED_ROWS, JOINED_BYTES)
                self._rows_ready, self._bytes = self._rows_ready - taken.batch.num_rows, self._bytes - nbytes
                self._changed.notify()
                return taken
            if self._error is not None and not self._ready:
                raise self._error
            if self._ended and not self._ready:
                raise StopIteration
            self._asked_in_vain = True
        silent = not self._ready and time.monotonic() >= self._asked_since + SILENCE_S
        return SILENT if silent else None

    def _gathers(self) -> bool:
        few = 2 * self._rows_ready < JOINED_ROWS and 2 * self._bytes < JOINED_BYTES
        over = self._ended or self._error is not None
        return few and not over and time.monotonic() < self._since + self._gather_s

    def when_ready(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called when rows have come after ``next`` had none."""
        self._ring = ring

    def pauses(self) -> int:
        """Return how often the reader had nothing. Such a pause may lie before rows that have not been taken yet."""
        return self._pauses

    def _asked_in_vain_since(self) -> float | None:
        since = self._asked_since  # read once, because the thread writes it
        return None if self._ready or since == math.inf else since

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
                self._asked_since = math.inf
                if not self._put(item):
                    return
                self._asked_since = time.monotonic()
            with self._changed:
                self._ended = True
            self._tell_ready()
        except BaseException as error:  # raised again in the worker's thread, by ``next``
            with self._changed:
                self._error = error
            self._tell_ready()
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _put(self, item: Positioned | float) -> bool:
        """Keep an item, after waiting for room, or wait as long as the reader asks. Return whether more items are wanted."""
        with self._changed:
            if not isinstance(item, Positioned):
                self._pauses += item > 0
                self._changed.wait_for(lambda: self._closed, item)
                return not self._closed
            size = item.batch.nbytes
            self._changed.wait_for(lambda: self._closed or not self._ready or self._bytes + size <= AHEAD_BYTES)
            if self._closed:
                return False
            if not self._ready:
                self._since = time.monotonic()
            self._ready.append((item, size))
            self._rows_ready, self._bytes = self._rows_ready + item.batch.num_rows, self._bytes + size
        self._tell_ready()
        return True

    def _tell_ready(self) -> None:
        with self._changed:
            tells = self._asked_in_vain and not self._gathers()
            self._asked_in_vain &= not tells
        if tells and self._ring is not None:
            self._ring()
