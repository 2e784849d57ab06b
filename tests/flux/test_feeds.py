"""A stream that is read over several feeds takes each batch from the one that brings it first (design: feeds, hedged)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery
from one_worker import SINK, Kept, planned, rows

import flux
from flux.arguments import ALL, HEDGED, ONE
from flux.errors import UsageError
from flux.exchange.feed import BROKEN
from flux.reach.hedging import BUDGET, LEAST_S, RACE_S, FurtherFeeds
from flux.wire.messages import Ack, Data, Hello, Resume
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection
from flux.worker.report import stats
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table

STREAM = StreamId(1, 0)
#: Workers 1 and 2 have replicas of the producer, worker 0 the consumer, and worker 3 nothing.
PRIMARY, OTHER, NOBODY = 1, 2, 3


class Reader:
    """Worker 0, which reads a stage of one partition in a way. Each replica of the producer is a connection of its name."""

    def __init__(self, feeds: str, copies: tuple[int, ...] = (PRIMARY, OTHER)) -> None:
        @flux.stage(partitions=1, replicas=2, feeds=feeds)
        def before(batch: Any) -> Any:
            return batch

        self.core = WorkerCore(planned(before, SINK), 0)
        self.follow(0, copies)
        self.number, self.first, self.nonce = (
            dict.fromkeys(copies, 0),
            dict.fromkeys(copies, 0),
            dict.fromkeys(copies, -1),
        )
        self.now = 0.0
        self.said = {worker: self.hello(worker) for worker in copies}

    def follow(self, epoch: int, copies: tuple[int, ...]) -> None:
        producers = tuple(ReplicaAt(worker, 0) for worker in copies)
        stages = ((producers,), ((ReplicaAt(0, 0),),))
        self.core.on_table(Table(epoch, stages, (), dict.fromkeys((0, 1, 2, 3), "")), 0.0)

    def hello(self, worker: int, epoch: int = 0) -> list[Any]:
        self.core.on_data_plane(worker, Hello(*STREAM, 0, epoch, worker), [], self.now)
        return self.answers().get(worker, [])

    def send(self, worker: int, sequence: int, decoded: bool = True) -> dict[int, list[Any]]:
        about = self.nonce[worker], self.number[worker], self.first[worker], sequence
        message = Data(*STREAM, *about, [0], [1], [1], 100)
        self.number[worker], self.first[worker] = self.number[worker] + 1, sequence + 1
        known = self.core.rows_of(worker, message) is not None
        assert known == decoded
        self.core.on_data_plane(worker, message, [rows(sequence)] if known else [], self.now)
        return self.answers()

    def answers(self) -> dict[int, list[Any]]:
        """Return the messages that go out on each connection now."""
        found: dict[int, list[Any]] = {}
        for effect in self.core.poll(self.now):
            if isinstance(effect, ToConnection):
                assert isinstance(effect.connection, int)
                found.setdefault(effect.connection, []).append(effect.message)
                if isinstance(effect.message, Resume):
                    worker = effect.connection
                    self.nonce[worker], self.number[worker] = effect.message.nonce, 0
                    self.first[worker] = effect.message.next[0].sequence
        return found

    def later(self, seconds: float) -> dict[int, list[Any]]:
        self.now += seconds
        return self.answers()

    def lively(self, worker: int = PRIMARY, batches: int = 40) -> int:
        """Send batches at intervals of 10 ms, and return the number of the next one."""
        for sequence in range(batches):
            self.later(0.01)
            self.send(worker, sequence)
        return batches

    @property
    def inbound(self) -> Any:
        return self.core.subscriptions.streams[STREAM]

    @property
    def feeds(self) -> FurtherFeeds:
        return self.core.subscriptions.feeds

    def kept(self) -> list[int]:
        while self.core.work(self.now):
            pass
        operator = self.core.replicas[1, 0].operator
        assert isinstance(operator, Kept)
        return [value for batch in operator.batches for value in batch]


def kinds(answers: list[Any]) -> list[str]:
    return [type(answer).__name__ for answer in answers if not isinstance(answer, Ack)]


def test_one_feed_is_the_default_and_the_other_replica_stands_by() -> None:
    reader = Reader(ONE)
    assert (kinds(reader.said[PRIMARY]), kinds(reader.said[OTHER])) == (["Resume"], ["ReadsElsewhere"])
    reader.lively()
    assert reader.later(5.0).get(OTHER) is None
    assert not reader.inbound.others


def test_all_replicas_are_read_and_each_batch_counts_once() -> None:
    reader = Reader(ALL)
    assert (kinds(reader.said[PRIMARY]), kinds(reader.said[OTHER])) == (["Resume"], ["Resume"])
    reader.send(OTHER, 0)
    reader.send(PRIMARY, 0, decoded=False)
    reader.send(PRIMARY, 1)
    reader.send(PRIMARY, 2)
    reader.send(OTHER, 1, decoded=False)
    reader.send(OTHER, 2, decoded=False)
    reader.send(OTHER, 3)
    assert reader.kept() == [0, 1, 2, 3]
    assert reader.inbound.held_bytes == 0


def test_each_feed_gets_its_own_credit_and_repetitions_give_theirs_back() -> None:
    reader = Reader(ALL)
    credit = reader.inbound.credit
    reader.send(OTHER, 0)
    reader.send(OTHER, 1)
    reader.send(PRIMARY, 0, decoded=False)
    acks = {worker: said[-1] for worker, said in reader.later(1.0).items()}
    assert {worker: ack.nonce for worker, ack in acks.items()} == reader.nonce
    assert acks[OTHER].granted == 200 + credit - 200  # both batches came over it, and wait
    assert acks[PRIMARY].granted == 100 + credit - 200


def test_of_a_message_that_is_known_in_part_the_new_part_is_held() -> None:
    reader = Reader(ALL)
    reader.send(OTHER, 0)
    about = reader.nonce[PRIMARY], 0, 0, 1
    run = Data(*STREAM, *about, [0], [4], [1], 1000, batches=[0, 1], counts=[1, 3])
    reader.core.on_data_plane(PRIMARY, run, [rows(0, 10, 11, 12)], 0.0)
    assert reader.inbound.held_bytes == 100 + 750
    assert reader.kept() == [0, 10, 11, 12]
    assert reader.inbound.held_bytes == 0


def test_a_gap_resets_one_feed_and_holds_up_nothing() -> None:
    reader = Reader(ALL)
    reader.number[PRIMARY] = 1  # message 0 was lost
    assert kinds(reader.send(PRIMARY, 1)[PRIMARY]) == ["Reset"]
    assert reader.inbound.feed.phase is BROKEN
    for sequence in range(3):
        reader.send(OTHER, sequence)
    assert reader.kept() == [0, 1, 2]
    assert kinds(reader.hello(PRIMARY)) == ["Resume"]
    assert reader.first[PRIMARY] == 3


def test_the_stream_goes_on_over_an_open_feed_when_its_first_one_is_dropped() -> None:
    reader = Reader(ALL)
    reader.send(PRIMARY, 0)
    reader.follow(1, (OTHER,))
    assert "Resume" not in kinds(reader.answers().get(OTHER, []))
    assert (reader.inbound.feed.worker, reader.inbound.others) == (OTHER, {})
    reader.send(OTHER, 0)
    reader.send(OTHER, 1)
    assert reader.kept() == [0, 1]


def test_the_table_closes_the_feed_of_a_replica_that_it_drops() -> None:
    reader = Reader(ALL)
    reader.follow(1, (PRIMARY,))
    assert (reader.inbound.feed.worker, reader.inbound.others) == (PRIMARY, {})


def test_a_feed_that_is_greeted_again_is_opened_again() -> None:
    reader = Reader(ALL)
    reader.send(PRIMARY, 0)
    assert kinds(reader.hello(OTHER)) == ["Resume"]
    assert reader.first[OTHER] == 1


# ---- hedged


def test_a_hedged_stream_opens_a_second_feed_when_the_first_stands_still() -> None:
    reader = Reader(HEDGED)
    assert kinds(reader.said[OTHER]) == ["ReadsElsewhere"]
    sequence = reader.lively()
    assert kinds(reader.later(0.029).get(OTHER, [])) == []
    assert kinds(reader.later(0.002)[OTHER]) == ["Resume"]
    assert reader.first[OTHER] == sequence


def test_the_second_feed_that_brings_news_stays_and_the_first_is_closed() -> None:
    reader = Reader(HEDGED)
    sequence = reader.lively()
    reader.later(0.031)
    assert kinds(reader.send(OTHER, sequence)[PRIMARY]) == ["ReadsElsewhere"]
    assert (reader.inbound.feed.worker, reader.inbound.others) == (OTHER, {})
    reader.send(PRIMARY, sequence, decoded=False)
    reader.send(OTHER, sequence + 1)
    assert reader.kept() == list(range(sequence + 2))
    assert (reader.feeds.of(OTHER).won, reader.feeds.of(PRIMARY).repeated_bytes) == (1, 100)


def test_the_second_feed_is_closed_when_the_first_goes_on() -> None:
    reader = Reader(HEDGED)
    sequence = reader.lively()
    reader.later(0.031)
    assert kinds(reader.send(PRIMARY, sequence)[OTHER]) == ["ReadsElsewhere"]
    assert (reader.inbound.feed.worker, reader.inbound.others) == (PRIMARY, {})
    assert kinds(reader.later(0.031).get(OTHER, [])) == [], "its patience has doubled"
    assert kinds(reader.later(0.031)[OTHER]) == ["Resume"]


def test_a_repetition_over_the_second_feed_decides_nothing() -> None:
    reader = Reader(HEDGED)
    sequence = reader.lively()
    reader.later(0.031)
    reader.first[OTHER] = 0
    reader.send(OTHER, sequence - 1, decoded=False)
    assert set(reader.inbound.others) == {OTHER}


def test_an_idle_stream_opens_no_feed() -> None:
    reader = Reader(HEDGED)
    reader.lively()
    reader.now += 1.1  # the worker was busy all the while
    assert kinds(reader.answers().get(OTHER, [])) == []
    assert reader.feeds.due_at == float("inf")


def test_a_race_without_news_is_over_after_a_while() -> None:
    reader = Reader(HEDGED)
    reader.lively()
    reader.later(0.031)
    assert kinds(reader.later(RACE_S + 0.001)[OTHER]) == ["ReadsElsewhere"]
    assert not reader.inbound.others


def test_a_stream_without_a_history_is_not_hedged() -> None:
    reader = Reader(HEDGED)
    reader.send(PRIMARY, 0)
    for _ in range(20):
        assert kinds(reader.later(LEAST_S).get(OTHER, [])) == []


def test_repetitions_cost_at_most_a_tenth_of_what_came_first() -> None:
    reader = Reader(HEDGED)
    sequence = reader.lively()
    assert reader.feeds.budget == pytest.approx(BUDGET * 100 * sequence)
    reader.feeds.budget = 0.0  # as if repetitions had used it up
    assert kinds(reader.later(0.031).get(OTHER, [])) == []
    assert kinds(reader.later(0.5).get(OTHER, [])) == []
    reader.send(PRIMARY, sequence)
    assert kinds(reader.later(0.031).get(OTHER, [])) == ["Resume"]


def test_repetitions_of_a_stream_that_reads_all_feeds_are_no_debt_of_hedged_ones() -> None:
    reader = Reader(ALL)
    reader.send(PRIMARY, 0)
    reader.send(OTHER, 0, decoded=False)
    assert reader.feeds.of(OTHER).repeated_bytes > 0
    assert reader.feeds.budget == 0.0


def test_a_stream_whose_credit_is_used_up_here_is_not_hedged() -> None:
    reader = Reader(HEDGED)
    reader.lively()
    reader.inbound.held_bytes = reader.inbound.credit  # as if rows waited here
    assert kinds(reader.later(0.031).get(OTHER, [])) == []


# ---- refusals


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: flux.stage(feeds="some")(Kept), "feeds must be one of one, hedged, all; got 'some'"),
        (lambda: flux.stage(feeds="all", replicas=1)(Kept), "with replicas=1 there is one"),
        (lambda: flux.stage(feeds="all", replicas=2, recovery="standby")(Kept), "only its primary has rows to read"),
        (lambda: planned(flux.stage(partitions=1, feeds="hedged")(Kept)), "stage Kept: feeds='hedged' reads several"),
        (lambda: flux.source(lambda partition: [], schema="x BIGINT", feeds="all"), "a source is read in one place"),
    ],
)
def test_feeds_are_refused_where_there_is_one_copy(ask: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask()


def test_the_setting_is_for_stages_that_do_not_say_it() -> None:
    @flux.stage(partitions=1, replicas=2)
    def before(batch: Any) -> Any:
        return batch

    plan = planned(before, flux.stage(partitions=1, replicas=2, feeds="all")(Kept), feeds=HEDGED)
    assert [stage.feeds for stage in plan.stages] == [HEDGED, ALL]


def test_the_reports_of_a_worker_name_its_feeds() -> None:
    reader = Reader(HEDGED)
    assert "feeds" not in stats(reader.core)
    sequence = reader.lively()
    reader.later(0.031)
    reader.send(OTHER, sequence)
    reader.send(PRIMARY, sequence, decoded=False)
    assert stats(reader.core)["feeds"] == [(PRIMARY, sequence, 100, 0, 0), (OTHER, 1, 0, 1, 1)]


# ---- with real sockets


@pytest.mark.parametrize("way", [HEDGED, ALL])
def test_rows_over_real_sockets_come_once_in_each_way(way: str) -> None:
    def read(partition: int) -> Iterator[pa.RecordBatch]:
        for number in range(60):
            yield pa.record_batch({"x": pa.array(np.arange(20) + 20 * number + 10_000 * partition, pa.int64())})

    @flux.stage(key="x", partitions=4, replicas=2, feeds=way)
    def before(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    seen = Rows(partitions=3)
    flow = seen.stage(before(flux.source(read, schema=rows(1).schema, partitions=2)))
    with ThreadQuery(flow, workers=3, replicas_allow_same_executor=True) as query:
        query.wait()
    expected = sorted(value + 10_000 * partition for partition in range(2) for value in range(1200))
    assert sorted(row["x"] for row in seen) == expected
    if way == ALL:
        feeds = query.server.progress[-1]["feeds"]
        assert sum(entry["repeatedBytes"] for entry in feeds) > 0, "no batch came twice"
