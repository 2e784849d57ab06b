"""Rows that bring their numbers, as records of a log bring their offsets: whichever rows the log has lost since, no row
passes for another one, and none is read that every replica has applied (design: row-numbers, needed-no-more)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from one_worker import SCHEMA, planned, rows
from test_numbered_rows import HOSTED, PARTITIONS, TABLE, inbound, planned_with, values
from test_reading import table as table_of_readers

import flux
from controller.report.progress import SourceCounts
from flux.dataflow.source import RowStart
from flux.errors import DataLost, NonDeterministicInputError
from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound, RowSlice
from flux.exchange.producer import Producer
from flux.exchange.slices import ROTATION_ROWS
from flux.exchange.source_streams import SourceStreams, packed
from flux.operators.operator import Timers
from flux.replica.step_queue import StepQueue
from flux.settings import Settings
from flux.state import standby as image
from flux.state.standby import Checkpoint, Standby
from flux.state.state_copy import StreamPosition
from flux.wire.messages import (
    Ack,
    Data,
    Hello,
    Mark,
    OrderEntry,
    Passed,
    Press,
    ReadsElsewhere,
    Resume,
    Settled,
    end_mark,
)
from flux.wire.statistics import NotCompared
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection
from flux.worker.report import stats
from flux.worker.source_scheduler import END_PATIENCE
from partitioning.ids import STANDBY, PartitionKey, StreamId
from partitioning.table import ReplicaAt, Table

KEPT = Mark(9, 1, 9, packed(10), 1)


class Life:
    """One life of a log's only partition, and the consumer of all partitions that it meets. The value of a row is its offset."""

    def __init__(
        self, at: Inbound, number: int = 0, key: str | None = "x", front: int = 0, table: Table = TABLE
    ) -> None:
        self.at = at
        self.producer = Producer(StreamId(0, 0), number, PARTITIONS, 1 << 30, 1.0, run_max_rows=4096, reads_again=True)
        self.producer.on_table(table, 0, 0.0)
        edges = planned_with(key).edges
        self.streams = SourceStreams(edges, [self.producer], "log", number > 0, True, 100, own_numbers=True)
        list(self.producer.poll(0.0))
        at.greet(number, "here", number)
        self.got: dict[int, list[RowSlice]] = {partition: [] for partition in HOSTED}
        self.settled: list[Settled] = []
        self.told: set[int] = set()  # workers that have got such a message
        self.passed: list[Passed] = []
        self.producer.on_answer(10, self.at.resume(0, HOSTED, front=front), 0.0)
        assert self.streams.find_start()

    def give(self, *offsets: int) -> None:
        numbers, batch = np.array(offsets, np.int64), rows(*offsets)
        while len(numbers):
            few = self.streams.until_cut(len(numbers), numbers)
            self.streams.append(batch.slice(0, few), 0.0, packed(int(numbers[few - 1]) + 1), numbers[:few])
            numbers, batch = numbers[few:], batch.slice(few)
        self.send()

    def send(self) -> None:
        for effect in self.producer.poll(0.0):
            if isinstance(effect.message, Data):
                found = self.at.take(effect.message, effect.batches, HOSTED, (), Counters())
                assert isinstance(found, list)
                for partition, slice_ in found:
                    assert isinstance(slice_, RowSlice)
                    self.got[partition].append(slice_)
            elif isinstance(effect.message, Settled):
                self.settled.append(effect.message)
                self.told.add(effect.worker)
            elif isinstance(effect.message, Passed):
                self.passed.append(effect.message)

    def end(self) -> list[int]:
        """End the log; return the number of its end for each partition that hears of it."""
        self.streams.finish(0.0)
        ends = []
        for effect in self.producer.poll(0.0):
            if isinstance(effect.message, Data):
                found = self.at.take(effect.message, effect.batches, HOSTED, (), Counters())
                assert isinstance(found, list)
                ends += [slice_.sequence for _, slice_ in found if slice_.ends_stream]
        return ends

    def apply(self, through: int = 1 << 60) -> None:
        for partition, slices in self.got.items():
            while slices and slices[0].sequence <= through:
                self.at.applied(partition, slices.pop(0))
        self.producer.on_answer(10, self.at.ack(0, HOSTED), 0.0)

    @property
    def all_got(self) -> list[int]:
        return sorted(value for slices in self.got.values() for value in values(slices))


# ---- which rows are known


@pytest.mark.parametrize("there", [range(5, 20), [5, 6, 9, 15, *range(17, 20)], [19], range(15, 25)])
def test_rows_are_known_by_their_offset_whatever_is_gone(there: list[int]) -> None:
    at = inbound()
    first = Life(at)
    first.give(*range(5, 15))  # received, and not applied by some
    again = Life(at, 1)
    assert again.streams.position == RowStart(5, None, 15), "offset 5 is the first one that there was"
    again.give(*there)
    assert again.all_got == [offset for offset in there if offset >= 15], "only the new ones"


def test_a_life_begins_behind_what_is_applied_without_a_mark_there() -> None:
    at = inbound()
    first = Life(at)
    first.give(*range(5))
    first.give(*range(10, 15))
    first.apply()
    again = Life(at, 1)
    assert again.streams.position == RowStart(15, 15, 15)
    again.give(100, 101)
    assert again.all_got == [100, 101]
    assert again.streams.elements == 102 - 15, "what readers have passed, gaps included"


def test_what_some_replica_lacks_is_given_again_and_the_newest_position_is_told() -> None:
    at = inbound()
    first = Life(at)
    first.give(*range(10))
    first.apply()
    first.give(*range(10, 20))
    again = Life(at, 1)
    assert again.streams.position == RowStart(10, 10, 20)


def test_a_life_that_begins_at_the_start_is_told_the_newest_position() -> None:
    """Tell the newest position. One partition has rows, the others have acked none: the log may have begun again under them."""
    at = Inbound(StreamId(0, 0), 0, 1 << 30, numbered=True)
    for partition in HOSTED:
        at.received.join(partition, 100 if not partition else 0, HOSTED[:partition])
    at.adopt(0, [Mark(99, 1, 0, packed(100), 100)])
    again = Life(at, 1, key=None)
    assert again.streams.position == RowStart(0, None, 100)


def test_a_life_without_any_known_position_begins_at_the_start_of_the_query() -> None:
    assert Life(inbound(), 1).streams.position is None


def joined_by(*shown: tuple[int, list[Mark]]) -> SourceStreams:
    """Make the streams of a life for several edges. Each edge has applied all rows below a number and shows these marks."""
    producers = []
    for edge, (following, marks) in enumerate(shown):
        at = Inbound(StreamId(edge, 0), 0, 1 << 30, numbered=True)
        for partition in HOSTED:
            at.received.join(partition, following, HOSTED[:partition])
        at.adopt(0, marks)
        producer = Producer(StreamId(edge, 0), 1, PARTITIONS, 1 << 30, 1.0, reads_again=True)
        producer.on_table(TABLE, 0, 0.0)
        list(producer.poll(0.0))
        at.greet(1, "here", 1)
        producer.on_answer(10, at.resume(0, HOSTED), 0.0)
        producers.append(producer)
    edges = [*planned_with("x").edges] * len(shown)
    streams = SourceStreams(edges, producers, "log", True, True, 100, own_numbers=True)
    assert streams.find_start()
    return streams


def test_the_newest_position_is_that_of_all_edges() -> None:
    slow = Mark(80, 1, 80, packed(81), 1)
    fast = Mark((1 << 48) + 60, 1, 0, packed([61, "", 1]), 1)
    for shown in ([(81, [slow]), ((1 << 48) + 61, [fast])], [((1 << 48) + 61, [fast]), (81, [slow])]):
        assert joined_by(*shown).position == RowStart(81, 81, [61, "", 1])


def test_edges_that_have_applied_as_much_give_the_position_that_one_of_them_knows() -> None:
    slow = Mark(80, 1, 80, packed(81), 1)
    for shown in ([(81, [slow]), (81, [])], [(81, []), (81, [slow])]):
        assert joined_by(*shown).position == RowStart(81, 81, 81)


def test_without_a_key_partitions_take_turns_by_the_offset() -> None:
    life = Life(inbound(), key=None)
    life.give(0, 7, ROTATION_ROWS - 1, ROTATION_ROWS, 3 * ROTATION_ROWS + 5)
    got = [values(life.got[p]) for p in HOSTED]
    assert got == [[0, 7, ROTATION_ROWS - 1, 3 * ROTATION_ROWS + 5], [ROTATION_ROWS], []]


# ---- comparison of a second reading


def test_other_rows_at_the_same_offsets_are_noticed() -> None:
    at = inbound()
    Life(at).give(*range(10))
    again = Life(at, 1)
    with pytest.raises(NonDeterministicInputError):
        again.streams.append(rows(*range(100, 110)), 0.0, b"", np.arange(10))


@pytest.mark.parametrize("there", [[0, 9, 12], [0, 3, 12], [5, 9, 12], [12]])
def test_where_the_log_has_lost_rows_nothing_is_compared(there: list[int]) -> None:
    at = inbound()
    Life(at).give(*range(10))
    again = Life(at, 1)
    again.give(*there)
    assert again.producer.earlier.left_out == 1
    assert not len(again.producer.earlier)


def test_more_rows_between_the_same_offsets_are_other_rows() -> None:
    at = inbound()
    Life(at).give(0, 9)
    again = Life(at, 1)
    with pytest.raises(NonDeterministicInputError):
        again.give(*range(10))


def test_comparisons_that_are_left_out_are_reported() -> None:
    core = reading([flux.Positioned(rows(1), 1, np.array([7]))])
    (streams,) = core.sources.values()
    assert core.reading.not_compared() == []
    streams.producers[0].earlier.left_out = 3
    assert core.reading.not_compared() == [NotCompared(0, 0, 3)]
    counts = SourceCounts(range(1), "not_compared")
    counts.note({0: stats(core)})
    assert counts.of(0) == 3


@pytest.mark.parametrize("there", [[5, 6], [7]])
def test_a_step_whose_rows_are_gone_cannot_be_repeated_and_the_query_says_why(there: list[int]) -> None:
    at = inbound()
    life = Life(at)
    life.give(*there)
    (partition,) = [p for p in HOSTED if 7 in values(life.got[p])] if 7 in there else [0]
    waits = StepQueue(PartitionKey(0, partition), [0], Timers(), Settings.of(), "stage kept")
    waits.from_sources = waits.from_logs = {0}
    waits.forget_turns()
    for slices in life.got.values():
        for slice_ in slices:
            waits.add(slice_)
    with pytest.raises(DataLost, match=r"stage kept.*gone from the log of partition 0.*query\.stop"):
        waits.take(OrderEntry(0.0, 0.0, [(0, 0, 6)], rows=4))


# ---- a log with an end that has lost the rows before it


@pytest.mark.parametrize("there", [[], [0, 3], range(9)])
def test_the_end_of_a_log_that_has_lost_its_last_rows_stands_behind_those_that_were_given(there: list[int]) -> None:
    at = inbound()
    Life(at).give(*range(10))
    again = Life(at, 1, front=12)  # rows 10 and 11 were ordered, and are nowhere else
    again.give(*there)
    assert again.end() == [12] * len(HOSTED), "a smaller number would pass for a row that a consumer has"
    assert again.producer.earlier.left_out >= 1, "the last row can be compared with nothing"
    assert not again.producer.earlier
    assert again.passed == []
    assert not again.streams.makes_again


def test_the_end_has_the_same_number_in_all_lives_though_rows_before_it_are_gone() -> None:
    at = inbound()
    first = Life(at)
    first.give(*range(10))
    assert set(first.end()) == {10}
    again = Life(at, 1, front=11)  # those that have the end expect the number behind it
    again.give(0, 1)
    again.streams.finish(0.0)
    assert again.producer.log.end == 11


def test_a_consumer_that_shows_a_row_behind_the_end_hears_that_the_log_has_lost_it() -> None:
    life = Life(inbound(), 1)
    life.give(0, 1)
    life.end()
    with pytest.raises(
        DataLost, match=r"partition 0 of the input of edge 0 ended with number 2, and worker 11 has.*to 9"
    ):
        life.producer.on_answer(11, Resume(0, 0, 1, 0, 0, [], [], 0, [KEPT], 10), 0.0)


# ---- rows that do not come any more


def test_a_consumer_hears_that_rows_of_an_earlier_life_do_not_come_once_the_log_has_others_behind_them() -> None:
    at = inbound()
    Life(at)
    again = Life(at, 1, front=10)
    again.give(0, 1)
    assert not again.passed, "rows 2 to 9 may be to come"
    again.give(12)
    assert again.passed == [Passed(0, 0, 1, at.feed.number, 10)]
    again.give(13)
    assert len(again.passed) == 1, "once for each handshake"
    again.producer.on_answer(10, at.resume(0, HOSTED, front=11), 0.0)
    again.send()
    assert [message.below for message in again.passed] == [10, 11]


def test_a_consumer_hears_that_rows_of_an_earlier_life_do_not_come_at_the_end_of_the_log() -> None:
    at = inbound()
    Life(at)
    again = Life(at, 1, front=10)
    again.give(0, 1)
    again.streams.come_to_end()
    again.send()
    assert again.passed == [Passed(0, 0, 1, at.feed.number, 10)]


def test_rows_that_come_after_an_end_of_the_log_are_waited_for() -> None:
    at = inbound()
    Life(at)
    again = Life(at, 1, front=10)
    again.streams.come_to_end()
    again.give(0, 1)
    assert not again.passed


def test_nothing_has_passed_that_waits_for_credit() -> None:
    at = inbound()
    Life(at)
    again = Life(at, 1)
    again.producer.on_answer(10, msgspec.structs.replace(at.resume(0, HOSTED, front=10), granted=0), 0.0)
    again.give(0, 12)
    assert not again.passed
    again.producer.on_answer(10, at.ack(0, HOSTED), 0.0)
    again.send()
    assert again.passed


def waiting_consumer(*orders: OrderEntry) -> tuple[WorkerCore, Inbound]:
    """Make a worker that has read row 3 of the log, and whose only replica has these steps ordered."""
    core = consumer()
    (replica,) = core.replicas.values()
    replica.lead(3, [])
    for entry in orders:
        replica.order.append(entry)
    inbound_ = core.subscriptions.of_stream(StreamId(0, 0))
    inbound_.greet(7, "there", 1, 3, 5)
    return core, inbound_


GONE = OrderEntry(0.0, 0.0, [(0, 0, 6)], rows=1)


def resumed(core: WorkerCore) -> Resume:
    """Greet a worker for another life of its stream, and return the answer."""
    for replica in core.replicas.values():
        replica.reads_since = 0
    core.hosted.note()
    core.on_data_plane("there", Hello(0, 0, 8, 0, 5), [], 0.0)
    answers = [effect.message for effect in core.poll(0.0) if isinstance(effect, ToConnection)]
    (resume,) = [answer for answer in answers if isinstance(answer, Resume)]
    return resume


@pytest.mark.parametrize("there", [range(6), [0, 1], []], ids=["all", "none of the last", "none"])
def test_the_end_keeps_its_number_if_only_orders_know_it(there: list[int]) -> None:
    """Lose a primary that has applied rows 0 to 5 and the end, 6. A standby has its orders, and a new replica has to
    repeat its steps. The end got number 7: the step that wants 6 met this end and found its rows gone, though none was."""
    core, _ = waiting_consumer(OrderEntry(0.0, 0.0, [(0, 0, 5)], rows=6), OrderEntry(0.0, 0.0, [(0, 0, 6)], rows=0))
    resume = resumed(core)
    assert resume.front == 7
    again = Life(inbound(), 8)
    again.producer.on_answer(10, resume, 0.0)
    again.give(*there)
    again.streams.finish(0.0)
    assert again.producer.log.end == 7
    again.producer.on_answer(10, resume, 0.0)  # as after a table


def standby_alone(position: StreamPosition, *orders: OrderEntry) -> WorkerCore:
    """Make a worker whose only replica is a standby with a checkpoint up to this position, and these steps in its order log."""
    core = WorkerCore(planned(flux.stage(partitions=1)(lambda batch: batch), source=log_of([])), 0)
    listed = ReplicaAt(4, 0), ReplicaAt(0, 0, kind=STANDBY)
    core.on_table(Table(0, ((listed,),), ((5,),), {0: "", 4: "", 5: ""}), 0.0)
    (standby,) = core.hosted.standbys_of(0)
    standby.checkpoint = Checkpoint(positions=(position,), next={position.stream: position.next})
    for entry in orders:
        standby.order.append(entry)
    return core


@pytest.mark.parametrize("there", [range(6), [0, 1], []], ids=["all", "none of the last", "none"])
@pytest.mark.parametrize(
    "orders", [[], [OrderEntry(0.0, 0.0, [(0, 1, 3)], rows=2)]], ids=["trimmed", "of another stream"]
)
def test_the_end_keeps_its_number_if_only_the_checkpoint_of_a_standby_knows_it(
    there: list[int], orders: list[OrderEntry]
) -> None:
    """Lose a primary that has applied rows 0 to 5 and the end, 6. The checkpoint of the standby has them all, so its
    order log has none of these steps any more. The end got the number behind the last row that is left: the replica
    that was made of the checkpoint took this end for a row that it had, and waited for the end for ever."""
    marks = ((5, 7, 5, packed(6), 1), (*end_mark(6),))
    resume = resumed(standby_alone(StreamPosition(StreamId(0, 0), 7, 7, marks), *orders))
    assert resume.front == 7
    again = Life(inbound(), 8)
    again.producer.on_answer(10, resume, 0.0)
    again.give(*there)
    again.streams.finish(0.0)
    assert again.producer.log.end == 7


def test_an_end_stands_behind_the_rows_of_a_standbys_checkpoint() -> None:
    resume = resumed(standby_alone(StreamPosition(StreamId(0, 0), 6, 7, ((5, 7, 5, packed(6), 1),))))
    again = Life(inbound(), 8)
    again.producer.on_answer(10, resume, 0.0)
    again.give(0, 1)
    again.streams.finish(0.0)
    assert again.producer.log.end == 7, "row 5 is in the checkpoint, and gone from the log"


def test_rows_at_the_place_of_an_ordered_end_are_other_rows() -> None:
    core, _ = waiting_consumer(OrderEntry(0.0, 0.0, [(0, 0, 6)], rows=0))
    resume = resumed(core)
    again = Life(inbound(), 8)
    again.producer.on_answer(10, resume, 0.0)
    with pytest.raises(NonDeterministicInputError):
        again.give(0, 6)


def test_orders_of_rows_know_no_end() -> None:
    core, _ = waiting_consumer(OrderEntry(0.0, 0.0, [(0, 1, 6)], rows=0), GONE)
    resume = resumed(core)
    assert (resume.shown, resume.front) == ([], 7)


def test_an_ordered_step_whose_rows_do_not_come_ends_the_query_though_no_newer_rows_come() -> None:
    core, _ = waiting_consumer(GONE)
    with pytest.raises(DataLost, match=r"gone from the log of partition 0.*query\.stop"):
        core.on_data_plane("there", Passed(0, 0, 1, 0, 7), [], 0.0)


@pytest.mark.parametrize(
    ("message", "since"),
    [
        (Passed(0, 0, 1, 0, 6), 3),
        (Passed(0, 0, 1, 1, 7), 3),
        (Passed(0, 0, 2, 0, 7), 3),
        (Passed(0, 0, 1, 0, 7), 4),
    ],
    ids=["row 6 may come", "a message is under way", "of another handshake", "a new replica has not asked yet"],
)
def test_rows_that_may_come_are_waited_for(message: Passed, since: int) -> None:
    core, _ = waiting_consumer(GONE)
    (replica,) = core.replicas.values()
    replica.reads_since = since
    core.hosted.note()
    core.on_data_plane("there", message, [], 0.0)


def test_a_replica_that_has_its_rows_does_not_mind_what_has_passed() -> None:
    core, _ = waiting_consumer()
    core.on_data_plane("there", Passed(0, 0, 1, 0, 7), [], 0.0)


class Ahead:
    """A reader that works ahead, and says that it has nothing at hand."""

    def __init__(self) -> None:
        self.ends = 0  # number of times that its log had nothing more
        self.rows: list[Any] = []

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        return self.rows.pop() if self.rows else None

    def pauses(self) -> int:
        return self.ends


def test_the_end_of_a_log_is_believed_after_a_long_time_and_counts_what_was_given_before_it() -> None:
    reader = Ahead()
    core = reading_of(reader)

    def at_end(now: float) -> bool:
        core.read(True, now)
        return next(iter(core.sources.values())).producers[0]._at_end

    assert not at_end(2.0)
    assert not at_end(2.0 + END_PATIENCE), "it has not come to the end, as when its broker does not answer"
    back = 3.0 + END_PATIENCE
    for after in range(0, END_PATIENCE, 3):
        reader.ends += 1
        assert not at_end(back + after), "the time begins again with the first answer"
    assert at_end(back + END_PATIENCE)
    reader.rows = [flux.Positioned(rows(1), 1, np.array([7]))]
    core.read(True, back + END_PATIENCE + 1)
    assert not at_end(back + END_PATIENCE + 2), "there was more"


# ---- settled rows


def test_partitions_without_rows_hear_what_all_have_applied_and_ask_for_nothing_before_it() -> None:
    at = inbound()
    first = Life(at, key=None)
    first.give(*range(100))  # all of them for one partition
    assert first.streams.applied() == b""
    # Elsewhere a message would have said so. Here the other two live on a worker that gets none.
    for partition in HOSTED[1:]:
        at.received.join(partition, 0, [0])
    first.apply()
    assert first.producer.applied_by_all() == -1
    assert first.streams.applied() == packed(100)
    assert not first.streams.settled
    first.send()
    (said,) = first.settled
    assert (said.epoch, said.mark.sequence, said.mark.position) == (0, 99, packed(100))
    at.settle(said.mark)
    first.apply()
    assert first.streams.settled
    assert [at.next_to_apply(partition) for partition in HOSTED] == [100, 100, 100]
    again = Life(at, 1, key=None)
    assert again.streams.position == RowStart(100, 100, 100)


def test_what_is_settled_is_told_until_the_consumer_says_so() -> None:
    life = Life(inbound())
    life.give(1)
    (partition,) = [p for p in HOSTED if life.got[p]]
    behind = [(p, -1) for p in HOSTED if p != partition]
    life.producer.on_answer(10, Ack(0, 0, 0, 0, 1, behind, 1 << 30), 0.0)
    assert life.streams.applied()

    def told(now: float) -> int:
        return sum(isinstance(effect.message, Settled) for effect in life.producer.poll(now))

    assert [told(0.0), told(0.5), told(1.0), told(1.5)] == [1, 0, 1, 0]
    life.producer.on_answer(10, Ack(0, 0, 0, 0, 1, [], 1 << 30), 0.0)
    assert told(9.0) == 0


def with_checkpoints() -> Producer:
    """Make a producer in its second life, from row 6 on. The checkpoints of both partitions, on worker 11, have no rows."""
    p = Producer(StreamId(4, 1), 1, 2, 1 << 20, resend_s=1.0, reads_again=True)
    kept = ReplicaAt(11, 0, True, STANDBY)
    p.on_table(Table(1, (((ReplicaAt(10, 0), kept),) * 2,), (), {10: "", 11: ""}), 0, 0.0)
    p.earlier.numbered = p.earlier.own_numbers = True
    list(p.poll(0.0))
    p.on_answer(10, Resume(4, 1, 1, 1, [(0, 6), (1, 6)], 5, [], 1 << 20, []), 0.0)
    p.on_answer(11, ReadsElsewhere(4, 1, 1, -1, []), 0.0)
    floor = p.floor()
    assert floor is not None
    p.begin_at(floor.sequence, floor.checksum)
    return p


def test_a_partition_without_rows_gets_a_new_checkpoint_that_says_so() -> None:
    p = with_checkpoints()
    assert not p.applied_through(5)
    presses = [(effect.worker, effect.message) for effect in p.poll(0.0) if isinstance(effect.message, Press)]
    assert presses == [(worker, Press(4, 1, [0, 1], anew=True)) for worker in (10, 11)]
    p.on_answer(11, ReadsElsewhere(4, 1, 1, -1, [(0, 5), (1, 5)]), 0.0)
    assert p.applied_through(5)
    assert not [effect for effect in p.poll(9.0) if isinstance(effect.message, Press)]


def test_a_life_that_reads_nothing_is_not_settled_before_all_checkpoints_have_the_rows_of_the_lives_before() -> None:
    p = with_checkpoints()
    assert not p.all_settled
    p.on_answer(11, ReadsElsewhere(4, 1, 1, -1, [(0, 5)]), 0.0)
    assert not p.all_settled
    p.on_answer(11, ReadsElsewhere(4, 1, 1, -1, [(0, 5), (1, 5)]), 0.0)
    assert p.all_settled


def test_a_source_is_not_settled_before_it_is_known_where_it_begins() -> None:
    life = Life(inbound())
    assert life.streams.settled
    life.streams.first = None
    assert not life.streams.settled


def test_checkpoints_hear_what_all_of_them_have_though_a_new_replica_has_nothing_yet() -> None:
    """Tell the checkpoints: a query that is stopped while it is repaired goes on from its checkpoints alone."""
    row = (ReplicaAt(10, 0), ReplicaAt(12, 0, False), ReplicaAt(11, 0, True, STANDBY))
    table = Table(0, ((row,) * PARTITIONS,), (), {10: "", 11: "", 12: ""})
    life = Life(inbound(), key=None, table=table)
    for worker in (11, 12):
        life.producer.on_answer(worker, ReadsElsewhere(0, 0, 0, -1, []), 0.0)
    life.give(*range(100))  # all of them for one partition
    (partition,) = [p for p in HOSTED if life.got[p]]
    life.apply()
    assert life.streams.applied() == b""
    life.send()
    assert not life.told
    life.producer.on_answer(11, ReadsElsewhere(0, 0, 0, -1, [(partition, 99)]), 0.0)
    assert life.streams.applied() == b"", "the new replica may want all of them"
    life.send()
    assert (life.told, [said.mark.sequence for said in life.settled]) == ({11}, [99])
    assert not life.streams.settled
    life.producer.on_answer(11, ReadsElsewhere(0, 0, 0, -1, [(p, 99) for p in HOSTED]), 0.0)
    assert life.streams.settled


def test_a_standby_keeps_what_is_settled_with_its_checkpoint() -> None:
    standby, stream, other = Standby(PartitionKey(0, 3), 0), StreamId(0, 0), StreamId(0, 1)
    standby.checkpoint = Checkpoint(
        positions=(StreamPosition(other, 40, 7, ((3, 1, 3, b"", 1), (39, 1, 39, b"", 1))),), next={other: 40}
    )
    assert standby.note_settled(stream, KEPT)
    assert not standby.note_settled(stream, KEPT)
    assert standby.note_settled(other, KEPT)
    assert (standby.position(stream), standby.position(other)) == (10, 40)
    again = image.decode(image.encode(standby), standby.key, 1)
    nothing_before = StreamPosition(stream, 10, -1, ((*KEPT,),))
    assert again.positions[0] == nothing_before, "the checkpoint itself travels apart"
    assert standby.positions == (StreamPosition(other, 40, 7, ((*KEPT,), (39, 1, 39, b"", 1))), nothing_before)


def consumer() -> WorkerCore:
    """Make a worker whose replicas have read since epoch 3."""
    core = WorkerCore(planned(flux.stage(partitions=1)(lambda batch: batch), source=log_of([])), 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0),),),), ((5,),), {0: "", 5: ""}), 0.0)
    for replica in core.replicas.values():
        replica.reads_since = 3
    core.hosted.note()
    return core


def test_a_stream_that_a_copy_of_a_state_does_not_know_is_held_back_for_it_as_well() -> None:
    """Hold the stream back, because the new replica will want it from the start."""
    core = consumer()
    (replica,) = core.replicas.values()
    core.subscriptions.copies.note(replica, 9, 8, [])
    inbound_ = core.subscriptions.of_stream(StreamId(0, 0))
    inbound_.settle(KEPT)
    assert inbound_.ack(3, [0]).behind == [(0, -1)]


@pytest.mark.parametrize(("epoch", "incarnation", "believed"), [(3, 7, True), (2, 7, False), (3, 6, False)])
def test_who_does_not_know_all_replicas_here_is_not_believed(epoch: int, incarnation: int, believed: bool) -> None:
    # A replica that a later table has brought may have begun with an older state, and an earlier life may still speak.
    core = consumer()
    inbound_ = core.subscriptions.of_stream(StreamId(0, 0))
    inbound_.greet(7, "there", 1, 3, 5)
    core.on_data_plane("there", Settled(0, 0, incarnation, epoch, KEPT), [], 0.0)
    assert (inbound_.received.least == 10) is believed


# ---- readers


def log_of(given: list[Any], starts: list[Any] | None = None) -> Any:
    class Log:
        row_numbers = True

        def __call__(self, partition: int, start: Any) -> Iterator[Any]:
            if starts is not None:
                starts.append(start)
            return iter(given)

    return flux.source(Log(), SCHEMA, 1, "log", positions=True)


def reading_of(reader: Any) -> WorkerCore:
    class Log:
        row_numbers = True

        def __call__(self, partition: int, start: Any) -> Any:
            return reader

    return started(flux.source(Log(), SCHEMA, 1, "log", positions=True))


def reading(given: list[Any], **settings: Any) -> WorkerCore:
    return started(log_of(given), **settings)


def started(source: Any, **settings: Any) -> WorkerCore:
    core = WorkerCore(planned(flux.stage(partitions=1)(lambda batch: batch), source=source, **settings), 0)
    core.on_table(table_of_readers(0), 0.0)
    list(core.poll(0.0))
    while core.read(True, 1.0):
        pass
    return core
