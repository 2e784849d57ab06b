"""One reader of the disk for each output that is read now, however many readers it has (design: result-tails).

Threads ask the disk; loops of readers are woken when there is more.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flux.errors import FluxError
from flux.gateway.reads.ring import Positions, ResultRing, RingEntry
from flux.gateway.reads.tentative_tail import TentativeTail
from flux.outputs.catalogue import NoSuchOutput, OutputCatalogue, OutputDefinition
from flux.outputs.reader import ASK_MAX_S, ASK_REMOTE_S, ASK_S, OutputScan, near_end
from flux.vault.location import Place

logger = logging.getLogger("flux.gateway")
#: Bytes of the newest rows of one output that stay in memory; their JSON comes on top.
RING_BYTES = 4 << 20
#: Rows that are read from the disk at once.
_READ_ROWS, _READ_BYTES = 100_000, 4 << 20
#: Readers of the disk that one output keeps for clients that read its history page by page; each has some megabytes.
_SCANS_MAX = 4
#: Seconds for which a tail goes on without a reader: readers come back in turns.
LINGER_S = 10.0
#: Seconds between two looks whether an output is still registered.
LOOK_S = 1.0
#: Threads that ask the disk. A read takes a fraction of a millisecond on a local disk, and 50 in an object store.
THREADS = 4


class OutputTail:
    """The newest rows of one output. Calls come from any thread."""

    def __init__(self, place: Place, of: OutputDefinition) -> None:
        self.of = of
        self.place = place
        self.readers = 0
        #: Its tentative rows; None: its query has no availability. Readers of these, without which they are not asked for.
        self.tentative = TentativeTail(place, of) if of.tentative else None
        self.tentative_readers = 0
        #: The time when it has lost its last reader.
        self.idle_since = time.monotonic()
        #: The reason of its end.
        self.error: FluxError | OSError | None = None
        self._lock = threading.Lock()
        self._wakes: set[Callable[[], None]] = set()
        self._scan: OutputScan | None = None
        self._ring: ResultRing | None = None
        #: Readers of the disk that requests have left, by place.
        self._scans: OrderedDict[Positions, OutputScan] = OrderedDict()
        self._closed = False

    def poll(self) -> bool:
        """Read from the disk once. Return whether there was something. Called by one thread at a time."""
        if self._scan is None:
            self._scan = OutputScan(self.place, self.of, near_end(self.place, self.of))
        began = self._scan.cursor.positions
        found = self._scan.rows(_READ_ROWS, _READ_BYTES)
        with self._lock:  # not before the read, or a reader would take rows that are there for rows to come
            self._ring = self._ring or ResultRing(began, RING_BYTES)
        # Behind the look at stable rows, so that readers get these behind earlier changes of tentative ones.
        changed = self.tentative is not None and self.tentative_readers > 0 and self.tentative.poll()
        if not found.pieces and not found.missed:
            if changed:
                self.wake()
            return changed
        with self._lock:
            assert self._ring is not None
            self._ring.add(found)
        self.wake()
        return True

    def after(self, positions: Positions) -> list[RingEntry] | None:
        """Return the entries behind a reader's place; None: the disk has to be read."""
        with self._lock:
            return None if self._ring is None else self._ring.after(positions)

    def taken_scan(self, positions: Positions) -> OutputScan:
        """Return a reader of the disk at a place. One that was given back there goes on without a search for the place."""
        with self._lock:
            found = self._scans.pop(positions, None)
        return found or OutputScan(self.place, self.of, positions)

    def give_back(self, scan: OutputScan) -> None:
        """Keep a reader of the disk for the next request of its client."""
        with self._lock:
            gone = [self._scans.pop(scan.cursor.positions, None)]
            self._scans[scan.cursor.positions] = scan
            while len(self._scans) > (0 if self._closed else _SCANS_MAX):
                gone.append(self._scans.popitem(last=False)[1])
        for each in gone:
            if each is not None:
                each.close()

    def end(self, error: FluxError | OSError) -> None:
        """Tell all readers that nothing more comes."""
        self.error = error
        self.wake()

    def wake(self) -> None:
        with self._lock:
            wakes = list(self._wakes)
        for each in wakes:
            each()

    @contextmanager
    def waking(self, event: asyncio.Event) -> Iterator[None]:
        """Set an event of the running loop at each change."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop was closed, and its readers are gone
                return

        with self._lock:
            self._wakes.add(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakes.discard(wake)

    def close(self) -> None:
        """Release files."""
        with self._lock:
            self._closed = True
            scans, self._scans = list(self._scans.values()), OrderedDict()
        if self.tentative is not None:
            self.tentative.close()
        for scan in (self._scan, *scans):
            if scan is not None:
                scan.close()


class OutputTails:
    """The tails of a gateway."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._catalogue = OutputCatalogue(place)
        self._least_s = ASK_S if place.flush_s == 0 else ASK_REMOTE_S
        self._changed = threading.Condition()
        self._tails: dict[str, OutputTail] = {}
        #: Tails by the time when each is asked next, with the seconds that it waits then.
        self._due: list[tuple[float, int, float, OutputTail]] = []
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._looked_at = 0.0
        self._closed = False

    def output(self, name: str) -> OutputDefinition:
        """Return the definition of an output. NoSuchOutput: no query has it."""
        with self._changed:
            tail = self._tails.get(name)
            if tail is not None and tail.error is None:
                return tail.of
        return self._catalogue.get(name)

    @contextmanager
    def reading(self, of: OutputDefinition, tentative: bool = False) -> Iterator[OutputTail]:
        """Keep the tail of an output going. ``tentative``: with its tentative rows."""
        with self._changed:
            tail = self._tails.get(of.name)
            if tail is None or tail.error is not None or tail.of.id != of.id:
                tail = self._tails[of.name] = OutputTail(self.place, of)
                self._schedule(tail, 0.0)
                if len(self._threads) < min(THREADS, len(self._tails)):
                    self._start_thread()
            tail.readers += 1
            tail.tentative_readers += tentative
        try:
            yield tail
        finally:
            with self._changed:
                tail.readers -= 1
                tail.tentative_readers -= tentative
                tail.idle_since = time.monotonic()

    # ---- threads

    def _schedule(self, tail: OutputTail, wait_s: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + wait_s, next(self._numbers), wait_s, tail))
        self._changed.notify()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="flux-tails", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            wait_s, tail = taken
            wait_s = self._turn(tail, wait_s)
            with self._changed:
                if self._tails.get(tail.of.name) is tail and tail.error is None:
                    self._schedule(tail, wait_s)
                else:
                    tail.close()

    def _next(self) -> tuple[float, OutputTail] | None:
        """Wait for the tail that is asked next; None: there will be none."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._due and self._due[0][0] <= now:
                    _, _, wait_s, tail = heapq.heappop(self._due)
                    return wait_s, tail
                self._changed.wait(self._due[0][0] - now if self._due else None)
        return None

    def _turn(self, tail: OutputTail, wait_s: float) -> float:
        """Ask the disk for one tail; return the seconds until it is asked again."""
        try:
            self._look()
            if tail.error is None and tail.poll():
                return self._least_s
        except (FluxError, OSError) as error:
            logger.warning("readers of output %s end: %s", tail.of.name, error)
            tail.end(error)
        except Exception as error:
            logger.exception("readers of output %s end", tail.of.name)
            tail.end(FluxError(f"output {tail.of.name} cannot be read: {type(error).__name__}"))
        return max(self._least_s, min(2 * wait_s, ASK_MAX_S))

    def _look(self) -> None:
        """End tails whose output is not registered any more, and those without readers."""
        now = time.monotonic()
        with self._changed:
            if now - self._looked_at < LOOK_S:
                return
            self._looked_at = now
        registered = self._catalogue.all()
        with self._changed:
            for name, tail in list(self._tails.items()):
                there = registered.get(name)
                if there is None or there.id != tail.of.id:
                    tail.error = NoSuchOutput(f"query {name!r} was removed")
                if tail.error is not None or (not tail.readers and now - tail.idle_since > LINGER_S):
                    del self._tails[name]
                    tail.wake()

    def close(self) -> None:
        """End all threads. A read under way ends with its process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads, tails, self._tails = self._threads, list(self._tails.values()), {}
        for tail in tails:
            tail.end(FluxError("the gateway stops"))
        for thread in threads:
            thread.join(timeout=5.0)
        for tail in tails:
            tail.close()
