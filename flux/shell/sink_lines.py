"""What is to be done for the partitions of a sink, and which of it a thread takes next (design: sink-threads).

Where a sink can begin a write without waiting for the outside, one thread writes for all partitions that have something to write:
several threads would take turns with the interpreter at every step, and that costs more than the writes. Law: nothing waits for
such a round longer than ``LATE_S`` while there are threads; the outside may be slow for one of its partitions only.
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

#: How long a round may take before others go on without it.
LATE_S = 0.02

#: A batch of output and where it stands.
Given = tuple[Position, pa.RecordBatch]


class Job(NamedTuple):
    """``life``: of the primary it is for. ``given``: what it writes; ``alone``: not in a round. ``do``: what it does else."""

    life: int
    given: tuple[Given, ...] = ()
    alone: bool = False
    do: Callable[[], None] = lambda: None


class Line:
    """What is to be done for one partition. ``life``: counts the primaries here; ``broken``: the life in which a call has failed:
    nothing more is done for it, because what follows would lie behind a hole; ``has``: what the outside has, as far as this
    life knows; ``kept``: batches that the sink has taken and not brought outside yet, and their bytes; ``in_round``: what fails
    is not tried again at once."""

    def __init__(self, stage: StagePlan, partition: int) -> None:
        self.stage = stage
        self.partition = partition
        self.life = 0
        self.broken = -1
        self.has = 0
        self.jobs: deque[Job] = deque()
        self.served = False
        self.sink: Sink | None = None
        self.first = 0  # the outside had what lies below when this life began
        self.base = 0  # the position that the sink counts as 0 (design: forgotten-output)
        self.kept: deque[tuple[int, int]] = deque()
        self.in_round = False

    @property
    def where(self) -> str:
        return f"sink {text_of(self.stage.sink, repr)} of stage {self.stage.name}, partition {self.partition}"

    def outside(self, position: Position) -> Position:
        """The position as the sink counts."""
        return position if not self.base else position._replace(sequence=position.sequence - self.base)

    def lives(self, life: int) -> bool:
        return self.life == life != self.broken

    @property
    def may_join(self) -> bool:
        """Whether what it does next may be done in a round."""
        if self.sink is None or not self.sink.sends_ahead or not self.jobs:
            return False
        return bool(self.jobs[0].given) and not self.jobs[0].alone


class ReadyLines:
    """Those that have something to do, and that no thread works for. ``lock``: held by who calls ``put`` and ``take``."""

    def __init__(self, lock: threading.Lock) -> None:
        self._news = threading.Condition(lock)
        self._waiting: deque[tuple[float, Line]] = deque()
        self._rounds = 0
        self._called = False  # a thread was woken for a line that may join, and none has looked since
        self._ended = False

    def put(self, line: Line) -> None:
        self._waiting.append((time.monotonic(), line))
        joins = line.may_join
        if not (joins and (self._rounds or self._called)):  # else who is in the round, or woken for one, takes it next
            self._news.notify()
        self._called |= joins

    def take(self) -> tuple[list[Line], bool]:
        """What a thread does next, and whether that is a round, whose end it tells. Waits until there is something; no line:
        there will be nothing any more."""
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
        """To be called often, without the lock: whoever waits for a round that takes its time gets a thread of its own."""
        if self._waiting and self._rounds:
            with self._news:
                if self._waiting and time.monotonic() >= self._waiting[0][0] + LATE_S:
                    self._news.notify()

    def end(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()


def arrived(files: Mapping[int, Collection[int]], limit_s: float) -> Iterator[int]:
    """Those all of whose files have something to read, as it comes, within so many seconds. By number of who waits for them."""
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
