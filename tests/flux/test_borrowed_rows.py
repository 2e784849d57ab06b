"""A primary gets rows that its producer cannot bring from a secondary that has them (design: borrowed-rows)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from one_worker import Kept, kept, planned, rows
from several_workers import SeveralWorkers

import flux
from flux.wire.messages import Borrow, Data, ElementKind, Unordered
from flux.worker.report import stats
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import ReplicaAt, Table

STREAM, KEY = StreamId(0, 0), PartitionKey(0, 0)


class Pair(SeveralWorkers):
    """The primary of partition 0 on worker 0, its secondary on worker 1, and the producer of their stream."""

    def __init__(self) -> None:
        plan = planned(flux.stage(partitions=1, replicas=2)(Kept))
        super().__init__(plan, Table(0, (((ReplicaAt(0, 0), ReplicaAt(1, 0)),),), (), {0: "", 1: ""}))


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_rows_without_an_order_reach_the_primary_within_half_a_second(pair: Pair) -> None:
    pair.feeders[1].send(0, 1, 2, now=1.0)
    pair.feeders[1].send(1, 3, now=1.0)
    pair.go_on(1.0, 1.25)
    assert kept(pair.cores[0]) == []
    pair.go_on(1.25, 1.5)
    assert kept(pair.cores[0]) == kept(pair.cores[1]) == [[1, 2, 3]]


def test_a_loan_is_reported_while_slices_come(pair: Pair) -> None:
    pair.feeders[1].send(0, 1, 2, now=1.0)
    pair.feeders[1].send(1, 3, now=1.0)
    pair.go_on(1.0, 1.5)
    (lent,) = stats(pair.cores[0])["lent"]
    assert (lent.lender, lent.streams, lent.slices) == (1, 1, 2)
    assert 1.0 < lent.since < 1.5
    assert stats(pair.cores[1])["lent"] == []
    pair.go_on(1.5, 5.0)
    assert stats(pair.cores[0])["lent"] == []


def test_what_the_producer_brings_later_is_dropped_and_the_stream_goes_on(pair: Pair) -> None:
    pair.feeders[1].send(0, 1, 2, now=1.0)
    pair.go_on(1.0, 1.5)
    for feeder in pair.feeders[:1]:
        feeder.send(0, 1, 2, now=1.5)
    for feeder in pair.feeders:
        feeder.send(1, 3, now=1.6)
    pair.go_on(1.6, 1.8)
    assert [row for batch in kept(pair.cores[0]) for row in batch] == [1, 2, 3]
    assert [row for batch in kept(pair.cores[1]) for row in batch] == [1, 2, 3]
    assert pair.cores[0].counters.duplicate == 1
    for core in pair.cores:
        core.validate()


def test_the_end_of_a_stream_is_lent_as_well(pair: Pair) -> None:
    pair.feeders[1].send(0, 1, now=1.0)
    pair.feeders[1].send(1, last=True, now=1.0)
    pair.go_on(1.0, 1.6)
    assert [(m.element, m.rows) for m in pair.of(Data)] == [(ElementKind.ROWS, [1]), (ElementKind.END, [])]
    assert pair.cores[0].replicas[KEY].waits.ended[0] == {0}


def test_a_primary_that_has_the_rows_asks_for_none(pair: Pair) -> None:
    pair.cores[0].replicas[KEY].gathers = True  # it orders nothing
    for feeder in pair.feeders:
        feeder.send(0, 1, now=1.0)
    pair.go_on(1.0, 1.6)
    assert pair.of(Unordered)
    assert not pair.of(Borrow)


def test_a_primary_asks_for_no_more_than_it_has_room_for(pair: Pair) -> None:
    inbound = pair.cores[0].subscriptions.of_stream(STREAM)
    inbound.credit = 1
    for sequence in range(3):
        pair.feeders[1].send(sequence, sequence, now=1.0)
    pair.go_on(1.0, 1.45)
    assert [borrow.room for borrow in pair.of(Borrow)] == [1]
    assert len(pair.of(Data)) == 1


def test_the_loan_ends_where_a_message_of_it_is_lost(pair: Pair) -> None:
    pair.loses = lambda message: isinstance(message, Data) and message.number == 0
    for sequence in range(2):
        pair.feeders[1].send(sequence, sequence, now=1.0)
    pair.go_on(1.0, 1.5)
    assert kept(pair.cores[0]) == []
    pair.loses = lambda message: False
    pair.go_on(1.5, 2.1)
    assert [row for batch in kept(pair.cores[0]) for row in batch] == [0, 1]


def test_nothing_is_taken_from_another_connection_or_for_another_partition(pair: Pair) -> None:
    pair.loses = lambda message: isinstance(message, Data)
    pair.feeders[1].send(0, 1, now=1.0)
    pair.go_on(1.0, 1.5)
    (lent, *_), core = pair.of(Data), pair.cores[0]
    core.on_data_plane("stranger", lent, [rows(1)], 1.5)
    core.on_data_plane("worker 1", replace(lent, partitions=[7]), [rows(1)], 1.5)
    assert not core.work(1.5)
    core.validate()


def test_lent_bytes_return_to_the_credit(pair: Pair) -> None:
    pair.feeders[1].send(0, 1, 2, now=1.0)
    pair.go_on(1.0, 1.6)
    inbound = pair.cores[0].subscriptions.streams[STREAM]
    assert inbound.held_bytes == 0
    assert inbound.received[0] == 1


def test_a_secondary_whose_rows_are_ordered_says_nothing(pair: Pair) -> None:
    for sequence in range(20):
        for feeder in pair.feeders:
            feeder.send(sequence, sequence, now=1.0 + sequence / 10)
        pair.go_on(1.0 + sequence / 10, 1.1 + sequence / 10)
    assert not pair.of(Unordered)
