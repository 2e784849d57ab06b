"""Sinks that can begin a write without waiting: one thread writes for several partitions, and none of them holds up another."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S
from outside_store import SCHEMA, until

import flux
from flux.errors import UserCodeError
from flux.settings import Settings
from flux.shell.sink_threads import ReadyQueues, SinkThreads

ONE = pa.record_batch([pa.array([1])], schema=SCHEMA)
PARTITIONS = 3


class Outside:
    """An outside with a pipe for each partition, into which it answers."""

    def __init__(self) -> None:
        self.pipes = [os.pipe() for _ in range(PARTITIONS)]
        #: Calls of the sinks in order: name, partition and sequence.
        self.said: list[tuple[str, int, int]] = []
        self.threads: dict[tuple[str, int, int], str] = {}
        self.silent: set[int] = set()
        self.held: dict[int, threading.Event] = {}
        self.fails: dict[int, list[Exception]] = defaultdict(list)
        self.during: Callable[[flux.Position], None] = lambda position: None
        self.send: Callable[[int], Any] = lambda partition: [self.pipes[partition][0]]

    def note(self, what: str, position: flux.Position) -> None:
        self.said.append((what, *position))
        self.threads[(what, *position)] = threading.current_thread().name

    def written(self, partition: int) -> list[int]:
        return [sequence for what, of, sequence in list(self.said) if (what, of) == ("written", partition)]

    def close(self) -> None:
        for pipe in self.pipes:
            for end in pipe:
                os.close(end)


class Piped(flux.Sink):
    """A sink whose answers are there as soon as something is sent, unless the outside is silent."""

    traits = flux.SinkTraits(sends_ahead=True, joins_bytes=1 << 20)

    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def __deepcopy__(self, memo: Any) -> Piped:
        return Piped(self.outside)

    def send(self, batch: pa.RecordBatch, position: flux.Position) -> Any:
        self.outside.note("sent", position)
        if position.partition not in self.outside.silent:
            os.write(self.outside.pipes[position.partition][1], b"!")
        return self.outside.send(position.partition)

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        self.outside.note("write", position)
        held = self.outside.held.get(position.partition)
        assert held is None or held.wait(LIMIT_S)
        self.outside.during(position)
        if self.outside.fails[position.partition]:
            raise self.outside.fails[position.partition].pop(0)
        for sequence in range(position.sequence, position.sequence + batch.num_rows):
            self.outside.note("written", flux.Position(position.partition, sequence))


@pytest.fixture
def outside() -> Iterator[Outside]:
    made = Outside()
    yield made
    made.close()


@pytest.fixture
def sinks(outside: Outside) -> Iterator[SinkThreads]:
    """Yield sinks of which partition 0 writes, and is held until its event is set: batches that come meanwhile go
    together."""
    outside.held[0] = threading.Event()
    stage = SimpleNamespace(id=0, name="last", partitions=PARTITIONS, sink=Piped(outside))
    plan = SimpleNamespace(query="q", stages=[stage], settings=Settings.of(), forgotten={})
    made = SinkThreads(plan, lambda: None)  # type: ignore[arg-type]
    for partition in range(PARTITIONS):
        made.begins(0, partition, 0, True)
    until(lambda: all(queue.sink is not None and not queue.served for queue in made._queues.values()), "all are open")
    made.write(0, 0, 0, ONE)
    until(lambda: ("write", 0, 0) in outside.said, "the first write is under way")
    yield made
    for held in outside.held.values():
        held.set()
    made.close()


def turned(sinks: SinkThreads, partition: int, has: int) -> bool:
    """Take a turn of the worker's loop, and tell whether the outside has ``has`` batches of the partition."""
    sinks.check()
    return sinks.has(0, partition) == has


def three_of_each(sinks: SinkThreads, outside: Outside) -> None:
    """Write three batches of partitions 1 and 2, and check that the outside gets each once and in order."""
    for partition in (1, 2):
        for sequence in range(3):
            sinks.write(0, partition, sequence, ONE)
    outside.held[0].set()
    until(lambda: sinks.has(0, 1) == sinks.has(0, 2) == 3, "all are outside")
    assert outside.written(1) == outside.written(2) == [0, 1, 2]


def test_what_waits_is_sent_before_any_answer_is_waited_for(sinks: SinkThreads, outside: Outside) -> None:
    for partition in (1, 2):
        sinks.write(0, partition, 0, ONE)
    outside.held[0].set()
    until(lambda: sinks.has(0, 1) == sinks.has(0, 2) == 1, "both are outside")
    assert [what for what, partition, _ in outside.said if partition and what != "written"] == ["sent"] * 2 + [
        "write"
    ] * 2
    assert len({outside.threads["write", partition, 0] for partition in (1, 2)}) == 1


def test_who_is_late_gets_a_thread_while_a_round_takes_its_time(sinks: SinkThreads, outside: Outside) -> None:
    sinks.write(0, 1, 0, ONE)
    sinks.write(0, 2, 0, ONE)

    for partition in (1, 2):
        until(partial(turned, sinks, partition, 1), "both are outside while the first is not")
    assert not outside.written(0)


def test_a_partition_of_which_no_answer_comes_holds_up_no_other(sinks: SinkThreads, outside: Outside) -> None:
    outside.silent.add(1)
    outside.held[1] = threading.Event()
    for partition in (1, 2):
        sinks.write(0, partition, 0, ONE)
    outside.held[0].set()
    until(lambda: sinks.has(0, 2) == 1, "the other is outside")
    until(lambda: ("write", 1, 0) in outside.said, "it is waited for in the end, alone")

    for sequence in range(1, 5):
        sinks.write(0, 2, sequence, ONE)
        until(partial(turned, sinks, 2, sequence + 1), "the other goes on")
    assert sinks.has(0, 1) == 0
    outside.held[1].set()
    until(lambda: sinks.has(0, 1) == 1, "the answer has come")


def cannot(partition: int) -> Any:
    raise OSError("no way")


@pytest.mark.parametrize(
    "send",
    [cannot, lambda partition: None, lambda partition: (), lambda partition: [-1], lambda partition: ["x"]],
    ids=["raises", "waits", "has it", "closed", "no file"],
)
def test_what_cannot_be_sent_ahead_is_written_all_the_same(sinks: SinkThreads, outside: Outside, send: Any) -> None:
    outside.send = send
    three_of_each(sinks, outside)


def test_what_fails_in_a_round_is_tried_again_alone_and_in_order(sinks: SinkThreads, outside: Outside) -> None:
    outside.fails[1] = [ConnectionError("not now"), TimeoutError("nor now")]
    three_of_each(sinks, outside)
    sinks.check()


def test_what_comes_while_a_write_fails_does_not_overtake_it(sinks: SinkThreads, outside: Outside) -> None:
    outside.fails[1] = [ConnectionError("not now")]

    def more(position: flux.Position) -> None:
        if position == (1, 0) and outside.fails[1]:
            sinks.write(0, 1, 1, ONE)

    outside.during = more
    for partition in (1, 2):
        sinks.write(0, partition, 0, ONE)
    outside.held[0].set()
    until(lambda: sinks.has(0, 1) == 2, "both are outside")
    assert outside.written(1) == [0, 1]


def test_what_fails_for_good_ends_the_query_also_in_a_round(sinks: SinkThreads, outside: Outside) -> None:
    outside.fails[1] = [ValueError("never")] * 2
    for partition in (1, 2):
        sinks.write(0, partition, 0, ONE)
    outside.held[0].set()
    until(lambda: sinks.has(0, 2) == 1, "the other is outside")

    with pytest.raises(UserCodeError, match="partition 1: ValueError: never"):
        until(sinks.check, "the query hears of it")


def test_a_partition_that_is_led_elsewhere_meanwhile_is_not_written(sinks: SinkThreads, outside: Outside) -> None:
    outside.silent.add(1)
    for partition in (1, 2):
        sinks.write(0, partition, 0, ONE)
    sinks.ends(0, 1)
    outside.held[0].set()
    until(lambda: sinks.has(0, 2) == 1, "the other is outside")
    sinks.begins(0, 1, 0, False)
    sinks.write(0, 1, 0, ONE)
    outside.silent.clear()
    until(partial(turned, sinks, 1, 1), "the next life writes")


def test_who_was_woken_for_a_partition_that_has_ended_since_leaves_the_others_a_thread() -> None:
    """Take each step as a woken thread would, without threads."""
    lines = ReadyQueues(threading.Lock())
    joining, ended, later = (SimpleNamespace(may_join=True) for _ in range(3))
    with lines._news:
        woken = []
        lines._news.notify = lambda n=1: woken.append(n)  # type: ignore[method-assign]
        lines.put(joining)  # type: ignore[arg-type]
        lines.put(ended)  # type: ignore[arg-type]
        assert len(woken) == 1, "one thread takes both"
        joining.may_join = ended.may_join = False
        assert lines.take() == ([joining], False)
        assert lines.take() == ([ended], False)
        woken.clear()
        lines.put(later)  # type: ignore[arg-type]
        assert woken, "or nobody would come for it"
        assert lines.take() == ([later], True)
