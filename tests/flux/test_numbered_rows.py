"""Rows that carry their number: read again they are cut elsewhere, and each consumer gets the same rows (design:
numbered-rows)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_worker import SCHEMA, planned, rows
from test_reading import table as table_of_readers

import flux
from controller.report.progress import InputRows
from flux.dataflow.plan import Plan
from flux.errors import NonDeterministicInputError, UsageError, UserCodeError
from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound, RowSlice
from flux.exchange.producer import Producer
from flux.exchange.slices import ROTATION_ROWS, RowNumbers
from flux.exchange.source_streams import POSITION_BYTES, WAITING_MAX, SourceStreams, packed, unpacked
from flux.wire.messages import Ack, Data, Mark, end_mark
from flux.worker.core import WorkerCore
from flux.worker.report import stats
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table

PARTITIONS = 3
HOSTED = list(range(PARTITIONS))
TABLE = Table(0, (tuple((ReplicaAt(10, 0),) for _ in HOSTED),), (), {10: ""})


def planned_with(key: str | None, read: Any = None) -> Plan:
    source = flux.source(read or (lambda p, start: iter(())), SCHEMA, 1, "rows", positions=True)
    return planned(flux.stage(key=key, partitions=PARTITIONS, name="kept")(lambda batch: batch), source=source)


class Life:
    """One life of a source's only partition, and the consumer of all partitions that it meets."""

    def __init__(self, at: Inbound, number: int = 0, key: str | None = "x", log_bytes: int = 1 << 30) -> None:
        plan = planned_with(key)
        self.at = at
        self.producer = Producer(
            StreamId(0, 0), number, PARTITIONS, log_bytes, 1.0, run_max_rows=4096, reads_again=True
        )
        self.producer.on_table(TABLE, 0, 0.0)
        self.streams = SourceStreams(plan.edges, [self.producer], "rows", number > 0, True, 100)
        list(self.producer.poll(0.0))
        at.greet(number, "here", number)
        self.got: dict[int, list[RowSlice]] = {partition: [] for partition in HOSTED}

    def answer(self, front: int = 0) -> None:
        self.producer.on_answer(10, self.at.resume(0, HOSTED, front=front), 0.0)
        assert self.streams.find_start()

    def give(self, *values: int, position: int | None = None) -> None:
        """Give these rows in one batch, or in as many as it takes."""
        batch, end = rows(*values), b"" if position is None else packed(position)
        while batch.num_rows:
            few = self.streams.until_cut(batch.num_rows)
            self.streams.append(batch.slice(0, few), 0.0, end if few == batch.num_rows else b"")
            batch = batch.slice(few)
        self._send()

    def end(self) -> None:
        self.streams.finish(0.0)
        self._send()

    def _send(self) -> None:
        for effect in self.producer.poll(0.0):
            if isinstance(effect.message, Data):
                found = self.at.take(effect.message, effect.batches, HOSTED, (), Counters())
                assert isinstance(found, list)
                for partition, slice_ in found:
                    if isinstance(slice_, RowSlice):
                        self.got[partition].append(slice_)


def inbound() -> Inbound:
    made = Inbound(StreamId(0, 0), 0, 1 << 30, numbered=True)
    for partition in HOSTED:
        made.received.join(partition, 0, HOSTED[:partition])
    return made


def values(slices: list[RowSlice]) -> list[int]:
    return [x for slice_ in slices for x in slice_.batch.column("x").to_pylist()]


CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=12)


@settings(deadline=None)
@given(CUTS, CUTS, st.sampled_from(["x", None]))
def test_rows_read_again_are_cut_elsewhere_and_come_once(first: list[int], second: list[int], key: str | None) -> None:
    at, given_rows = inbound(), 0
    life = Life(at, key=key)
    life.answer()
    for size in first:
        life.give(*range(given_rows, given_rows + size))
        given_rows += size
    before = {partition: values(slices) for partition, slices in life.got.items()}
    again = Life(at, 1, key)
    again.answer()
    start = 0
    for size in second:
        again.give(*range(start, start + size))
        start += size
    at.validate()
    whole = Life(inbound(), key=key)
    whole.answer()
    whole.give(*range(max(given_rows, start)))
    for partition in HOSTED:
        assert before[partition] + values(again.got[partition]) == values(whole.got[partition])


def test_a_slice_is_cut_behind_each_of_its_rows() -> None:
    life = Life(inbound())
    life.answer()
    life.give(*range(20))
    (slice_,) = life.got[1]
    assert isinstance(slice_.run, RowNumbers)
    numbers = slice_.run.numbers.tolist()
    assert len(numbers) > 2
    for place, number in enumerate(numbers[:-1]):
        some, others = slice_.cut(number, 1) or (None, None)
        assert some is not None
        assert others is not None
        assert (some.first, some.sequence, others.first, others.sequence) == (
            numbers[0], number, numbers[place + 1], numbers[-1],
        )  # fmt: skip
        assert values([some, others]) == values([slice_])
    assert slice_.cut(numbers[0] - 1, 1) is None, "there is no such row"


def test_without_a_key_a_row_goes_to_the_same_partition_however_batches_are_cut() -> None:
    whole, cut = Life(inbound(), key=None), Life(inbound(), key=None)
    for life in (whole, cut):
        life.answer()
    whole.give(*range(3 * ROTATION_ROWS))
    for start in range(0, 3 * ROTATION_ROWS, 1000):
        cut.give(*range(start, min(start + 1000, 3 * ROTATION_ROWS)))
    assert [values(whole.got[p]) for p in HOSTED] == [values(cut.got[p]) for p in HOSTED]
    assert [len(values(whole.got[p])) for p in HOSTED] == [ROTATION_ROWS] * 3


def test_another_life_begins_at_the_latest_position_that_everybody_has_applied() -> None:
    at = inbound()
    life = Life(at)
    life.answer()
    for batch in range(4):
        life.give(*range(10 * batch, 10 * batch + 10), position=batch)
    for slices in life.got.values():
        for slice_ in slices[:3]:  # three of four batches
            at.applied(next(p for p in HOSTED if life.got[p] is slices), slice_)
    again = Life(at, 1)
    again.answer()
    assert (again.streams.first, again.streams.position) == (30, 2), "nothing that is applied is read again"
    again.give(*range(30, 40), position=3)
    assert all(values(again.got[p]) == [] for p in HOSTED), "all have come before"


def test_rows_that_are_others_when_they_are_read_again_are_noticed_however_they_are_cut() -> None:
    at = inbound()
    life = Life(at)
    life.answer()
    life.give(*range(10), position=10)
    life.give(*range(10, 20), position=20)
    again = Life(at, 1)
    again.answer()
    with pytest.raises(NonDeterministicInputError):
        again.give(*range(13), 99, *range(14, 30))


def test_rows_that_were_there_before_have_room_beyond_the_bound_of_the_log() -> None:
    at = inbound()
    again = Life(at, 1, log_bytes=1)
    again.answer(front=30)
    again.give(*range(10))
    assert not again.producer.has_room
    assert again.streams.has_room, "an ordered step may want rows 9 to 12 at once"
    again.give(*range(10, 30))
    assert not again.streams.has_room


def test_a_stream_with_a_full_log_takes_rows_that_another_one_of_its_reader_makes_again() -> None:
    """Take such rows, because a replica that holds up the full stream may wait for them in the other one."""
    plan = planned_with("x")
    full, again = (Producer(StreamId(0, 0), 1, PARTITIONS, 1, 1.0, reads_again=True) for _ in range(2))
    streams = SourceStreams([*plan.edges] * 2, [full, again], "rows", False, True, 100)
    streams.append(rows(*range(10)), 0.0)
    assert not streams.has_room
    again.earlier.front = 20
    assert streams.has_room
    streams.append(rows(*range(10, 20)), 0.0)
    assert not streams.has_room
    again.earlier.front = 30
    full.finish(0.0)
    assert not streams.has_room, "nothing comes behind an end"


def test_a_source_whose_batches_are_counted_has_room_for_one_that_an_ordered_step_names() -> None:
    plan = planned_with("x")
    producer = Producer(StreamId(0, 0), 1, PARTITIONS, 1, 1.0, reads_again=True)
    streams = SourceStreams(plan.edges, [producer], "rows", batch_bytes=100)
    streams.append(rows(*range(10)), 0.0)
    assert not streams.has_room
    producer.earlier.front = 2
    assert streams.has_room
    streams.append(rows(*range(10, 20)), 0.0)
    assert not streams.has_room, "nobody needs the third one to go on"


@pytest.mark.parametrize("position", [7, "a", b"b", [1, {"t": 2}], -1.5])
def test_a_position_comes_back_as_it_was(position: Any) -> None:
    assert unpacked(packed(position)) == position


@pytest.mark.parametrize(
    "position", [uuid.UUID(int=1), [Decimal(1)], object(), 1 << 70, "x" * POSITION_BYTES, {1, 2, lambda: None}]
)
def test_a_position_that_cannot_travel_is_refused(position: Any) -> None:
    with pytest.raises(UsageError, match="position"):
        packed(position)


def test_workers_without_the_rows_of_a_mark_know_it_all_the_same() -> None:
    """Tell all workers the mark: without a key the position of a large batch is behind rows of one partition, and
    others lag."""
    at = inbound()
    life = Life(at, key=None)
    life.answer()
    for batch in range(3):
        life.give(*range(2 * ROTATION_ROWS * batch, 2 * ROTATION_ROWS * (batch + 1)), position=batch)
    sent = [entry.mark for entry in life.producer.log.entries()]
    assert [mark and mark.position for mark in sent] == [None, *map(packed, (0, 0, 1, 1, 2))]


def test_rows_where_the_end_was_are_noticed() -> None:
    at = inbound()
    life = Life(at)
    life.answer()
    life.give(*range(20), position=20)
    life.end()
    again = Life(at, 1)
    again.answer(front=21)
    with pytest.raises(NonDeterministicInputError):
        again.give(*range(30))


def test_an_end_before_rows_that_have_come_is_noticed() -> None:
    at = inbound()
    life = Life(at)
    life.answer()
    life.give(*range(20))
    again = Life(at, 1)
    again.answer(front=20)
    again.give(*range(15))
    with pytest.raises(NonDeterministicInputError):
        again.end()


def test_a_batch_without_a_position_may_say_so_with_none() -> None:
    (streams,) = reading(lambda p, start: iter([flux.Positioned(rows(1), None)])).sources.values()
    assert streams.producers[0].log[0].mark is None


def reading(read: Any, **settings: Any) -> WorkerCore:
    source = flux.source(read, SCHEMA, 1, "rows", positions=True)
    core = WorkerCore(planned(flux.stage(partitions=1)(lambda batch: batch), source=source, **settings), 0)
    core.on_table(table_of_readers(0), 0.0)
    list(core.poll(0.0))
    while core.read(True, 1.0):
        pass
    return core


def test_a_large_batch_is_cut_and_the_position_is_behind_its_last_part() -> None:
    def read(partition: int, start: Any) -> Iterator[Any]:
        assert start is None
        yield flux.Positioned(rows(*range(5)), ["a", 1])

    (streams,) = reading(read, batch_max_rows=2).sources.values()
    log = streams.producers[0].log
    end = Mark(4, streams.producers[0].log[4].checksum, 4, packed(["a", 1]), 1)
    assert [(entry.begin, entry.sequence, entry.mark) for entry in log.entries()] == [
        (0, 1, None), (2, 3, None), (4, 4, end), (-1, 5, end_mark(5)),
    ]  # fmt: skip


def test_a_position_that_cannot_travel_ends_the_query_and_names_the_source() -> None:
    with pytest.raises(UserCodeError, match=r"source rows, partition 0.*position of a source"):
        reading(lambda p, start: iter([flux.Positioned(rows(1), object())]))


def test_a_source_with_positions_takes_two_arguments() -> None:
    with pytest.raises(UsageError, match="positions=True needs"):
        flux.source(lambda p: iter(()), SCHEMA, 1, positions=True)


class Heard:
    """A reader that notes the positions of which it hears that they are applied."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self.done_with = iter(batches), []  # type: list[Any], list[Any]

    def __iter__(self) -> Heard:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def done(self, position: Any) -> None:
        self.done_with.append(position)


def turn(core: WorkerCore, now: float) -> None:
    while core.read(True, now):
        pass


def apply_all(core: WorkerCore, now: float) -> None:
    list(core.poll(now))  # rows travel to itself
    while core.work(now):
        pass
    list(core.poll(now + 1))  # and acks


def test_a_reader_is_told_once_a_second_what_everybody_has_applied() -> None:
    heard = Heard([flux.Positioned(rows(1, 2), ["a", 2]), flux.Positioned(rows(3), ["a", 3]), *[None] * 99])
    core = reading(lambda p, start: heard)
    core.reading.idle_done_s = 1.0  # as if it had more
    turn(core, 2.5)
    assert heard.done_with == [], "it is on its way"
    apply_all(core, 2.6)
    turn(core, 3.0)
    assert heard.done_with == [], "a second is not over"
    turn(core, 3.6)
    assert heard.done_with == [["a", 3]]
    turn(core, 9.0)
    assert heard.done_with == [["a", 3]], "no news"


def test_positions_that_wait_to_be_applied_are_few_and_the_newest_is_among_them() -> None:
    life = Life(inbound(), key=None)
    life.answer()
    for number in range(3 * WAITING_MAX):
        life.give(number, position=number + 1)
        assert life.streams.applied() == b""
        assert len(life.streams._waiting) < WAITING_MAX
    ack = Ack(0, 0, life.producer._cursors[10].nonce, 0, 3 * WAITING_MAX - 1, [], 1 << 30)
    life.producer.on_answer(10, ack, 0.0)
    assert unpacked(life.streams.applied()) == 3 * WAITING_MAX


def test_what_done_raises_names_the_source() -> None:
    heard = Heard([flux.Positioned(rows(1), 1), *[None] * 99])
    heard.done = lambda position: 1 / 0  # type: ignore[assignment, method-assign]
    core = reading(lambda p, start: heard)
    apply_all(core, 2.0)
    with pytest.raises(UserCodeError, match=r"source rows, partition 0: ZeroDivisionError"):
        turn(core, 5.0)


def test_rows_that_are_read_again_after_a_loss_count_once() -> None:
    """Count rows, not batches: the next reader begins at a row, and a report that spoke of batches counted rows
    twice."""
    core = reading(
        lambda p, start: iter([flux.Positioned(rows(*range(50)), 50), flux.Positioned(rows(*range(50)), 100)])
    )
    counted = InputRows()
    counted.from_worker(0, stats(core)["sources"])
    assert counted.total == 100
    counted.from_worker(1, [(0, 0, 40, 60, 60)])  # the next life, from row 40 to the same end
    assert counted.total == 100
