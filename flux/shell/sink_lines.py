"""Jobs for the partitions of a sink, and the choice of the job that a thread takes next (design: sink-threads).

If a sink can begin a write without waiting for the outside, one thread writes for all partitions that have something to write:
several threads would take turns with the interpreter at every step, and that costs more than the writes. Law: no partition waits
for such a round longer than ``LATE_S`` while there are threads; the outside may be slow for one of its partitions only.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa

from flux.dataflow.plan import StagePlan
from flux.dataflow.sink import Position, Sink
from flux.dataflow.user_code import text_of

#: Seconds after which other partitions go on without a round that is not over.
LATE_S = 0.02

#: A batch of output with its position.
Given = tuple[Position, pa.RecordBatch]


class Job(NamedTuple):
    """One thing to do for a partition: a write, or a call of ``do``."""

    #: The life of the primary for which the job is.
    life: int
    #: The batches to write; empty: the job is ``do``.
    given: tuple[Given, ...] = ()
    #: Whether it is not done in a round.
    alone: bool = False
    do: Callable[[], None] = lambda: None


class Line:
    """The jobs for one partition, in order."""

    def __init__(self, stage: StagePlan, partition: int) -> None:
        self.stage = stage
        self.partition = partition
        #: Counts the primaries of the partition here.
        self.life = 0
        #: The life in which a call has failed. No more jobs are done for it, because later output would lie behind a hole.
        self.broken = -1
        #: The outside has the output below this position, as far as this life knows.
        self.has = 0
        #: The newest life for which the outside was found to have no more than the checkpoint location knows of.
        self.compared = -1
        self.jobs: deque[Job] = deque()
        #: Whether a thread works for the line or is to work for it.
        self.served = False
        self.sink: Sink | None = None
        #: The outside had the output below this position when this life began.
        self.first = 0
        #: The position that the sink counts as 0 (design: forgotten-output).
        self.base = 0
        #: Batches that the sink has taken and not brought outside yet: sequence number and bytes.
        self.kept: deque[tuple[int, int]] = deque()
        #: Whether a round does the present job. A call that fails in a round is not tried again at once.
        self.in_round = False

    @property
    def where(self) -> str:
        return f"sink {text_of(self.stage.sink, repr)} of stage {self.stage.name}, partition {self.partition}"

    def outside(self, position: Position) -> Position:
        """Return the position as the sink counts."""
        return position if not self.base else position._replace(sequence=position.sequence - self.base)

    def lives(self, life: int) -> bool:
        return self.life == life != self.broken

    @property
    def may_join(self) -> bool:
        """Return whether the next job may be done in a round."""
        if self.sink is None or not self.sink.traits.sends_ahead or not self.jobs:
            return False
        return bool(self.jobs[0].given) and not self.jobs[0].alone


class ReadyLines:
    """The lines with jobs that no thread works for. Callers of ``put`` and ``take`` hold ``lock``."""

    def __init__(self, lock: threading.Lock) -> None:
        self._news = threading.Condition(lock)
        self._waiting: deque[tuple[float, Line]] = deque()
        self._rounds = 0
        self._called = False  # a thread was woken for a line that may join, and has not looked yet
        self._ended = False

    def put(self, line: Line) -> None:
        self._waiting.append((time.monotonic(), line))
        joins = line.may_join
        if not (joins and (self._rounds or self._called)):  # else the round's thread, or the woken one, takes it
            self._news.notify()
        self._called |= joins

    def take(self) -> tuple[list[Line], bool]:
        """Return the lines that a thread takes next, and whether they are a round, whose end the thread must tell. Waits until
        there are some; no line: there will be none any more."""
        while not self._ended:
            self._called = False
            lines, in_round = self._next()
            if lines:
                if self._waiting and not self._rounds:
                    self._news.notify()
                return lines, in_round
            self._news.wait()
        return [], False

    def _next(self) -> tuple[list[Line], bool]:
        now = time.monotonic()
        for at, (since, line) in enumerate(self._waiting):
            if not line.may_join:
                del self._waiting[at]
                return [line], False
            if not self._rounds or now >= since + LATE_S:
                joining = [each for _, each in self._waiting if each.may_join]
                self._waiting = deque(waits for waits in self._waiting if not waits[1].may_join)
                self._rounds += 1
                return joining, True
        return [], False

    def round_is_over(self) -> None:
        self._rounds -= 1

    def look(self) -> None:
        """Give a thread of its own to a line that waits for a slow round. To be called often, without the lock."""
        if self._waiting and self._rounds:
            with self._news:
                if self._waiting and time.monotonic() >= self._waiting[0][0] + LATE_S:
                    self._news.notify()

    def end(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()


def arrived(files: Mapping[int, Collection[int]], limit_s: float) -> Iterator[int]:
    """Yield each key of ``files`` once all of its files have something to read, within ``limit_s`` in all."""
    lacks = {who: {*numbers} for who, numbers in files.items()}
    waiting: dict[int, list[int]] = {}
    poll = select.poll()
    for who, numbers in lacks.items():
        for number in numbers:
            waiting.setdefault(number, []).append(who)
            poll.register(number, select.POLLIN)
    yield from [who for who, numbers in lacks.items() if not numbers]
    end = time.monotonic() + limit_s
    while waiting and (left_s := end - time.monotonic()) > 0:
        for number, _ in poll.poll(1000 * left_s):
            poll.unregister(number)
            for who in waiting.pop(number):
                lacks[who].discard(number)
                if not lacks[who]:
                    yield who
