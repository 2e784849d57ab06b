"""Output that is kept for readers, at its worker: the rows that each reader is shown, their end, and readers that
wait."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from scripted import feed, made, work

import flux
from flux.dataflow.sink import QueryReaders
from flux.replica.output import ReaderBuffer
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.shell.output_loops import decoded
from flux.wire.control import PartitionFinished
from flux.wire.messages import Fetch, Pull, Pulled
from flux.worker.effects import ToConnection, ToController
from flux.worker.output_delivery import WAIT_S, OutputDelivery
from partitioning.table import ReplicaAt

OTHER, SCHEMA, LOTS = 1, pa.schema([("x", pa.int64())]), 1 << 20


class Echo(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Any:
        yield batch


class Offered:
    """A partition whose output is kept for readers."""

    def __init__(self, replicas: int = 1, room: int = LOTS, leads: bool = True) -> None:
        self.replica = made(Echo, replicas, step_max_rows=1)
        self.replica.outlets.clear()
        self.replica.stage = replace(self.replica.stage, sink=QueryReaders(room))
        #: Messages that go out.
        self.told: list[Any] = []
        #: The partition, once for each time that it has got room.
        self.woken: list[Any] = []
        plan = SimpleNamespace(stages=[self.replica.stage], settings=Settings.of())
        self.leaving = OutputDelivery(0, plan, {self.replica.key: self.replica}, self.told.append, self.woken.append)  # type: ignore[arg-type]
        self.leaving.open(self.replica)
        if leads:
            self.replica.lead(0, [ReplicaAt(OTHER, 0)] if replicas > 1 else [])

    @property
    def offer(self) -> ReaderBuffer:
        assert isinstance(self.replica.output.exit, ReaderBuffer)
        return self.replica.output.exit

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            feed(self.replica, number, number)
        work(self.replica, 1.0)

    def ends(self, number: int) -> None:
        feed(self.replica, number)
        work(self.replica, 1.0)

    def seen(self) -> None:
        """Let the other replica have the order."""
        self.replica.order.on_seen(OTHER, 0, self.replica.order.end, self.replica.applied)
        self.replica.release()

    def pull(self, position: int, below: int = 0, nbytes: int = LOTS, waits: bool = False, now: float = 0.0) -> bool:
        return self.leaving.on_asked("reader", Pull(0, 0, position, below, nbytes, waits), now)

    def answers(self) -> list[tuple[Pulled, list[int]]]:
        """Return header and rows of all answers since the last call."""
        found = [
            (effect.message, [row for batch in _batches(effect) for row in batch.column("x").to_pylist()])
            for effect in self.told
            if isinstance(effect, ToConnection)
        ]
        self.told.clear()
        return found  # type: ignore[return-value]


def _batches(effect: ToConnection) -> list[pa.RecordBatch]:
    return decoded([] if effect.payload is None else [effect.payload], SCHEMA)


def test_a_reader_gets_what_is_there_from_its_position_on_as_often_as_it_asks() -> None:
    offered = Offered()
    offered.steps(0, 1, 2)
    for _ in range(2):
        assert offered.pull(1)
        assert offered.answers() == [(Pulled(0, 0, 1, count=2, end=3), [1, 2])]


def test_an_answer_has_so_many_bytes_as_were_asked_for_and_one_batch_at_least() -> None:
    offered = Offered()
    offered.steps(0, 1, 2)
    offered.pull(0, nbytes=1)
    offered.pull(0, nbytes=0)
    assert offered.answers() == [(Pulled(0, 0, 0, count=1, end=3), [0]), (Pulled(0, 0, 0, end=3), [])]


def test_what_is_not_committed_is_not_shown() -> None:
    offered = Offered(replicas=2)
    offered.steps(0, 1)
    offered.pull(0)
    offered.seen()
    offered.pull(0)
    assert offered.answers() == [(Pulled(0, 0, 0), []), (Pulled(0, 0, 0, count=2, end=2), [0, 1])]


def test_what_a_reader_has_for_good_is_forgotten_and_the_rest_is_kept() -> None:
    offered = Offered()
    offered.steps(0, 1, 2)
    offered.pull(2, below=2)
    assert (offered.offer.left, offered.offer.state()[2][0][1]) == (2, 2)
    offered.pull(0)
    assert offered.answers()[1] == (Pulled(0, 0, 0, left=2, end=3), []), (
        "gone, and it says from where on there is something"
    )


def test_a_reader_cannot_acknowledge_what_it_was_not_shown() -> None:
    """Ignore the acknowledgement of a stranger, and of a reader at a primary that has still to make again the output
    that a lost one has shown."""
    offered = Offered(replicas=2)
    offered.steps(0, 1)
    offered.pull(2, below=1 << 62)
    assert offered.offer.left == 0
    offered.offer.validate()
    offered.seen()
    offered.pull(2, below=2)
    assert offered.offer.left == 2


def test_a_reader_waits_for_the_next_batch_for_a_moment() -> None:
    offered = Offered()
    offered.pull(0, waits=True, now=1.0)
    offered.leaving.flush(1.0)
    assert offered.answers() == []
    assert offered.leaving.due() == 1.0 + WAIT_S
    offered.steps(0)
    offered.leaving.flush(1.1)
    assert offered.answers() == [(Pulled(0, 0, 0, count=1, end=1), [0])]
    offered.pull(1, waits=True, now=2.0)
    offered.leaving.flush(2.0 + WAIT_S)
    assert offered.answers() == [(Pulled(0, 0, 1, end=1), [])]
    assert offered.leaving.due() == float("inf")


def test_of_two_that_wait_the_earlier_one_gives_way() -> None:
    offered = Offered()
    offered.pull(0, waits=True)
    offered.pull(0, waits=True)
    assert offered.answers() == [(Pulled(0, 0, 0), [])]
    offered.steps(0)
    offered.leaving.flush(0.0)
    assert offered.answers() == [(Pulled(0, 0, 0, count=1, end=1), [0])]


def test_output_that_nobody_reads_holds_back_its_stage_at_the_bound_and_a_reader_lets_it_go_on() -> None:
    offered = Offered(room=1)
    offered.steps(*range(5))
    assert offered.replica.applied == 2, "two batches are kept however small the bound is"
    offered.pull(0)
    ((answer, rows),) = offered.answers()
    assert (answer.full, rows) == (True, [0, 1])
    offered.pull(1, below=1)
    assert offered.woken == [offered.replica.key]
    assert offered.replica.ready(1.0)


def test_who_does_not_lead_says_so() -> None:
    offered = Offered(leads=False)
    offered.replica.follow()
    assert not offered.pull(0)
    assert not offered.leaving.on_asked("reader", Pull(0, 7, 0, 0, LOTS, False), 0.0)
    assert offered.answers() == [(Pulled(0, 0, 0, leads=False), []), (Pulled(0, 7, 0, leads=False), [])]
    assert not offered.leaving.on_asked("task", Fetch(0, 0, 0), 0.0), "nor is it collected"


def test_the_partition_is_through_when_all_of_it_was_acknowledged() -> None:
    offered = Offered()
    offered.steps(0)
    offered.ends(1)
    offered.leaving.flush(0.0)
    offered.pull(0)
    assert offered.answers() == [(Pulled(0, 0, 0, count=1, end=1, finished=True), [0])]
    offered.pull(1, below=1)
    offered.told.clear()
    offered.leaving.flush(0.0)
    assert offered.told == [ToController(PartitionFinished(node=0, stage=0, partition=0))]


def test_rows_are_through_for_who_waits_for_all_that_was_available_when_they_can_be_read() -> None:
    offered = Offered(replicas=2)
    offered.steps(0, 1)
    (kept,) = offered.leaving.exits()
    assert (kept.base, kept.end, len(kept)) == (0, 2, 2)
    offered.seen()
    offered.leaving.flush(0.0)
    assert (kept.base, kept.end, len(kept)) == (2, 2, 0)


def test_a_copy_carries_what_was_not_acknowledged() -> None:
    offered = Offered()
    offered.steps(0, 1, 2)
    offered.pull(1, below=1)
    copied = Offered(leads=False)
    copied.replica.follow()
    copied.replica.adopt(offered.replica.state())
    copied.replica.lead(1, [])
    copied.pull(1)
    assert copied.answers() == [(Pulled(0, 0, 1, count=2, left=1, end=3), [1, 2])]


def test_a_replica_that_is_given_up_takes_its_readers_with_it() -> None:
    replica: Replica | None
    offered = Offered()
    offered.pull(0, waits=True)
    replica = offered.replica
    offered.leaving.close(replica)
    offered.leaving._replicas.pop(replica.key)  # type: ignore[attr-defined]
    offered.leaving.flush(0.0)
    assert offered.answers() == []
    assert offered.leaving.due() == float("inf")
