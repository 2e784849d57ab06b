"""Streams that begin in the middle of a running source: with the same row for every reader, and unknown before it is stored
(design: edge-of-a-source)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from one_worker import rows
from test_numbered_rows import HOSTED, PARTITIONS, TABLE, planned_with, values

from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound, RowSlice
from flux.exchange.producer import Producer
from flux.exchange.replay_check import Birth
from flux.exchange.source_streams import SourceStreams, packed
from flux.wire.messages import Data
from partitioning.ids import StreamId

OLD, NEW = 0, 7
KINDS = ["counted", "numbered", "log"]
KEYED = planned_with("x").edges[OLD]
EDGES = {OLD: KEYED, NEW: replace(KEYED, id=NEW, since=1)}


class Consumer:
    """The consumer of all partitions of a stream, which outlives its readers."""

    def __init__(self, edge: int, kind: str) -> None:
        self.at = Inbound(StreamId(edge, 0), 0, 1 << 30, numbered=kind != "counted")
        for partition in HOSTED:
            self.at.received.join(partition, 0, HOSTED[:partition])
        self.waiting: list[tuple[int, RowSlice]] = []
        self.got: list[int] = []
        self.ended = 0

    def read(self, producer: Producer) -> None:
        for effect in producer.poll(0.0):
            if isinstance(effect.message, Data):
                found = self.at.take(effect.message, effect.batches, HOSTED, (), Counters())
                assert isinstance(found, list)
                for partition, slice_ in found:
                    self.waiting.append((partition, slice_))
                    if isinstance(slice_, RowSlice):
                        self.got += values([slice_])
                    self.ended += slice_.ends_stream

    def apply(self, producer: Producer) -> None:
        for partition, slice_ in self.waiting:
            self.at.applied(partition, slice_)
        self.waiting = []
        producer.on_answer(10, self.at.ack(0, HOSTED), 0.0)


class Life:
    """One life of the only partition of a source, whose n-th row has the value n."""

    def __init__(self, kind: str, consumers: dict[int, Consumer], number: int, births: dict[int, Birth | None]) -> None:
        self.kind, self.consumers, self.number = kind, consumers, number
        edges = [OLD, *births]
        producers = [self.producer(edge) for edge in edges]
        self.streams = SourceStreams(
            [EDGES[edge] for edge in edges], producers, "rows", number > 0, kind != "counted", 100,
            own_numbers=kind == "log", read_by=[KEYED], births=births,
        )  # fmt: skip
        for edge in edges:
            if edge not in self.streams.unborn:
                self.greet(edge)
        self.streams.find_start()

    def producer(self, edge: int) -> Producer:
        return Producer(
            StreamId(edge, 0), self.number, PARTITIONS, 1 << 30, 1.0, run_max_rows=4096, reads_again=self.number >= 0
        )

    def greet(self, edge: int) -> None:
        """Let the consumer of a stream hear of it."""
        producer, at = self.streams.of_edge(edge), self.consumers[edge].at
        producer.on_table(TABLE, 0, 0.0)
        list(producer.poll(0.0))
        at.greet(self.number, "here", self.number)
        producer.on_answer(10, at.resume(0, HOSTED), 0.0)

    def open(self, birth: Birth | None = None) -> bool:
        return self.streams.open(EDGES[NEW], self.producer(NEW), birth)

    def store(self, birth: Birth) -> bool:
        if not self.streams.store(NEW, birth):
            return False
        self.greet(NEW)
        self.streams.find_start()
        return True

    def give(self, *sizes: int) -> None:
        """Give the next rows, in batches of these sizes, unless they have to be cut."""
        for size in sizes:
            first = self.row
            batch, numbers = rows(*range(first, first + size)), None
            if self.kind == "log":
                numbers = 2 * np.arange(first, first + size)
            while batch.num_rows:
                few = self.streams.until_cut(batch.num_rows, numbers)
                mine = None if numbers is None else numbers[:few]
                position = packed(first + size) if few == batch.num_rows and self.kind != "counted" else b""
                self.streams.append(batch.slice(0, few), 0.0, position, mine)
                batch, numbers = batch.slice(few), None if numbers is None else numbers[few:]
            self.row = first + size
        self.send()

    @property
    def row(self) -> int:
        return self._row if hasattr(self, "_row") else self.first_row

    @row.setter
    def row(self, at: int) -> None:
        self._row = at

    @property
    def first_row(self) -> int:
        """The first row that is read; batches that are counted have two rows."""
        assert self.streams.first is not None
        return {"counted": 2 * self.streams.first, "log": -(-self.streams.first // 2)}.get(
            self.kind, self.streams.first
        )

    def send(self) -> None:
        for edge, consumer in self.consumers.items():
            if any(each.id == edge for each in self.streams.edges) and edge not in self.streams.unborn:
                consumer.read(self.streams.of_edge(edge))

    def apply(self, edge: int) -> None:
        self.consumers[edge].apply(self.streams.of_edge(edge))


def begun(kind: str) -> tuple[dict[int, Consumer], Life, Birth]:
    """Make a source that has read six rows when an edge comes to it."""
    consumers = {edge: Consumer(edge, kind) for edge in (OLD, NEW)}
    life = Life(kind, consumers, 0, {})
    life.give(2, 2, 2)
    assert life.open()
    birth = life.streams.unborn[NEW]
    assert birth is not None
    return consumers, life, birth


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_begins_with_the_next_row_and_waits_until_that_is_stored(kind: str) -> None:
    consumers, life, birth = begun(kind)
    life.give(2, 2)
    assert sorted(consumers[OLD].got) == list(range(10)), "the others go on"
    assert not consumers[NEW].got
    assert life.store(birth)
    life.give(2)
    life.streams.finish(0.0)
    life.send()
    assert sorted(consumers[NEW].got) == list(range(6, 12))
    assert consumers[NEW].ended == PARTITIONS
    life.apply(NEW)
    assert life.streams.of_edge(NEW).drained


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 6)])
@pytest.mark.parametrize("applied", [True, False])
def test_a_later_reader_begins_it_with_the_same_row(kind: str, sizes: tuple[int, ...], applied: bool) -> None:
    if kind == "counted":
        sizes = (2,) * (sum(sizes) // 2)
    consumers, life, birth = begun(kind)
    if applied:
        life.apply(OLD)  # the other stream is not read before row 6, and not from there on either
        life.give(2)
        life.apply(OLD)
    later = Life(kind, consumers, 1, {NEW: birth})
    assert later.streams.start_known
    first = later.first_row
    assert first == (6 if applied else 0)
    later.give(*(2,) * ((6 - first) // 2 + 1) if kind == "counted" else (6 - first,) * (first < 6), *sizes)
    assert sorted(consumers[NEW].got) == list(range(6, later.row))
    assert sorted(consumers[OLD].got) == list(range(later.row))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_cut_where_a_stream_begins(kind: str) -> None:
    consumers, _, birth = begun(kind)
    later = Life(kind, consumers, 1, {NEW: birth})
    later.give(*(2,) * 6 if kind == "counted" else (12,))
    assert sorted(consumers[NEW].got) == list(range(6, 12))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_does_not_begin_before_the_beginnings_of_its_edges_are_stored(kind: str) -> None:
    consumers, life, birth = begun(kind)
    life.apply(OLD)
    life.give(2)
    life.give(2)
    life.apply(OLD)
    later = Life(kind, consumers, 1, {NEW: None})
    assert not later.streams.start_known
    proposed = later.streams.unborn[NEW]
    assert proposed is not None
    assert proposed.number > birth.number, "it knows the other consumers alone"
    assert later.store(birth), "the reader before has reported it"
    assert later.streams.start_known
    later.give(*(2,) * 3)
    assert sorted(consumers[NEW].got) == list(range(6, later.row))
    assert sorted(consumers[OLD].got) == list(range(later.row))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_has_begun_an_edge_elsewhere_reads_anew(kind: str) -> None:
    _, life, birth = begun(kind)
    assert not life.streams.store(NEW, birth._replace(number=birth.number - 1))
    consumers = {edge: Consumer(edge, kind) for edge in (OLD, NEW)}
    passed = Life(kind, consumers, 0, {})
    passed.give(2, 2)
    assert not passed.open(Birth(1)), "rows behind it have passed"
    assert passed.open(birth), "it comes later"
    passed.greet(NEW)
    passed.give(*(2,) * 3)
    assert sorted(consumers[NEW].got) == list(range(6, passed.row))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_goes_on_behind_what_all_streams_have(kind: str) -> None:
    consumers, life, birth = begun(kind)
    assert life.store(birth)
    for _ in range(3):
        life.give(2)
    for edge in (OLD, NEW):
        life.apply(edge)
    later = Life(kind, consumers, 1, {NEW: birth})
    assert later.streams.start_known
    assert later.first_row >= 8, "the last batch may be the end of the source, where batches are counted"
    later.give(2, 2, 2)
    assert sorted(consumers[NEW].got) == list(range(6, later.row))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_a_source_that_has_ended_ends_where_it_begins(kind: str) -> None:
    consumers = {edge: Consumer(edge, kind) for edge in (OLD, NEW)}
    life = Life(kind, consumers, 0, {})
    life.give(2, 2)
    life.streams.finish(0.0)
    assert life.open()
    birth = life.streams.unborn[NEW]
    assert birth is not None
    assert life.store(birth)
    life.send()
    assert (consumers[NEW].got, consumers[NEW].ended) == ([], PARTITIONS)
    later = Life(kind, consumers, 1, {NEW: birth})
    later.give(*(2,) * ((4 - later.first_row) // 2))
    later.streams.finish(0.0)
    later.send()
    assert (consumers[NEW].got, consumers[NEW].ended) == ([], PARTITIONS)


def test_a_reader_that_cannot_begin_in_the_middle_leaves_out_the_rows_before() -> None:
    consumers, _, birth = begun("counted")
    streams = SourceStreams(
        [EDGES[OLD], EDGES[NEW]],
        [Producer(StreamId(edge, 0), 1, PARTITIONS, 1 << 30, 1.0) for edge in (OLD, NEW)],
        "rows",
        births={NEW: birth},
    )
    for edge in (OLD, NEW):
        producer, at = streams.of_edge(edge), consumers[edge].at
        producer.on_table(TABLE, 0, 0.0)
        list(producer.poll(0.0))
        at.greet(1, "here", 1)
        producer.on_answer(10, at.resume(0, HOSTED), 0.0)
    assert streams.find_start()
    assert streams.first == 0
    assert streams.append_each([(rows(2 * at, 2 * at + 1), 0.0) for at in range(5)]) == 5
    for edge in (OLD, NEW):
        consumers[edge].read(streams.of_edge(edge))
    assert sorted(consumers[NEW].got) == list(range(6, 10))
    assert sorted(consumers[OLD].got) == list(range(10))
