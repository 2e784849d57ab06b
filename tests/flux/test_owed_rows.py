"""Rows that do not come from one replica of a producer are read from another one that has them (design: owed-rows)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from clustered import clustered
from one_worker import SINK, Kept, planned, rows

import flux
from flux.exchange.inbound import Inbound
from flux.exchange.producer import Producer, unread_due
from flux.reach.starvation import OwedRows
from flux.wire.messages import Ack, Data, Hello, ReadsElsewhere, Resume, Unread
from flux.wire.statistics import Detour
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection
from flux.worker.report import stats
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table

STREAM = StreamId(1, 0)
LINK_S = 0.3


# ---- the replica that is not read from


def offered() -> Producer:
    """Make a stage's producer on worker 11. Its only consumer is partition 0 on worker 10, which reads elsewhere."""
    made = Producer(STREAM, 0, 2, 1 << 20, resend_s=1.0, worker=11, link_s=LINK_S)
    made.on_table(Table(0, (((ReplicaAt(10, 0),), (ReplicaAt(11, 0),)),), (), {10: "", 11: ""}), 0, 0.0)
    list(made.poll(0.0))
    made.on_answer(10, ReadsElsewhere(*STREAM, 0, -1, []), 0.0)
    made.on_answer(11, Resume(*STREAM, 1, 0, [(1, 0)], -1, [], 1 << 20), 0.0)
    return made


def give(producer: Producer, *counts: int) -> None:
    batch = pa.record_batch({"x": pa.array(np.arange(sum(counts)), pa.int64())})
    producer.append(clustered(batch, range(2), counts), 0.0)


def told(producer: Producer, now: float) -> list[int]:
    """Return the ends of which worker 10 is told now."""
    return [e.message.end for e in producer.poll(now) if e.worker == 10 and isinstance(e.message, Unread)]


def ack(through: int) -> Ack:
    return Ack(*STREAM, 7, 0, through, [], 1 << 20)


def test_a_worker_that_acks_nothing_for_the_timeout_is_told_what_it_could_read() -> None:
    producer = offered()
    give(producer, 2, 1)
    give(producer, 0, 1)  # nothing for its partition
    assert [told(producer, now) for now in (1.0, 1.29, 1.31, 1.35)] == [[], [], [1], []]


def test_each_telling_waits_twice_as_long_until_an_ack_brings_something_new() -> None:
    producer = offered()
    give(producer, 1, 0)
    give(producer, 1, 0)
    times = np.arange(1.0, 12.0, 0.05)
    first = [float(now) for now in times if told(producer, float(now))]
    assert np.diff(first) == pytest.approx([0.6, 1.2, 2.4, 2.4, 2.4], abs=0.06)
    producer.on_answer(10, ack(0), 12.0)
    assert unread_due(producer) == pytest.approx(12.3)
    assert told(producer, 12.31) == [2]


def test_newer_rows_do_not_wait_for_the_patience_of_those_that_were_told() -> None:
    producer = offered()
    give(producer, 1, 0)
    times = [float(now) for now in np.arange(1.0, 4.0, 0.05) if told(producer, float(now))]
    assert len(times) == 3  # the next one is due in more than a second
    give(producer, 1, 0)
    assert [told(producer, now) for now in (4.0, 4.29, 4.31)] == [[], [], [2]]


def test_nothing_is_due_once_all_is_acked() -> None:
    producer = offered()
    give(producer, 1, 0)
    assert not told(producer, 1.0)
    assert unread_due(producer) == pytest.approx(1.3)
    producer.on_answer(10, ack(0), 1.1)
    assert unread_due(producer) == np.inf
    give(producer, 1, 0)
    assert not told(producer, 2.0)
    assert unread_due(producer) == pytest.approx(2.3)


def test_what_is_not_committed_is_not_owed() -> None:
    producer = offered()
    give(producer, 1, 0)
    producer.release_from = 1
    give(producer, 1, 0)
    assert not told(producer, 1.0)
    assert told(producer, 1.31) == [1]


def test_a_worker_that_reads_here_is_told_nothing() -> None:
    producer = offered()
    give(producer, 1, 0)
    assert not told(producer, 1.0)
    producer.on_answer(10, Resume(*STREAM, 3, 0, [(0, 0)], -1, [], 1 << 20), 1.1)
    assert unread_due(producer) == np.inf
    assert not told(producer, 1.5)


# ---- the worker that reads


class Given(Kept):
    """A stage that gives its rows on."""

    schema = pa.schema([("x", pa.int64())])

    def process(self, batch: pa.RecordBatch) -> Any:
        super().process(batch)
        yield batch


class Reader:
    """Worker 0 with a sink, which reads stream 1.0 of a stage whose replicas are on workers 1, 2 and 3."""

    def __init__(self, **settings: Any) -> None:
        plan = planned(flux.stage(partitions=1, replicas=3)(Given), SINK, **settings)
        stages = ((tuple(ReplicaAt(worker, 0) for worker in (1, 2, 3)),), ((ReplicaAt(0, 0),),))
        self.core = WorkerCore(plan, 0)
        self.core.on_table(Table(0, stages, (), dict.fromkeys(range(4), "")), 0.0)
        self.number = 0
        self.answers(0.0)

    def answers(self, now: float) -> list[tuple[Any, Any]]:
        while self.core.work(now):
            pass
        return [(e.connection, e.message) for e in self.core.poll(now) if isinstance(e, ToConnection)]

    def hello(self, worker: int, now: float) -> list[int]:
        """Return the workers that are asked for the stream then."""
        self.core.on_data_plane(worker, Hello(*STREAM, 0, 0, worker), [], now)
        return self.resumed(now)

    def unread(self, worker: int, now: float, end: int) -> list[int]:
        self.core.on_data_plane(worker, Unread(*STREAM, worker, end), [], now)
        return self.resumed(now)

    def resumed(self, now: float) -> list[int]:
        return [connection for connection, message in self.answers(now) if isinstance(message, Resume)]

    def data(self, worker: int, sequence: int, now: float, nbytes: int = 100) -> None:
        nonce = self.core.subscriptions.streams[STREAM].feed.nonce
        message = Data(*STREAM, nonce, self.number, sequence, sequence, [0], [1], [1], nbytes)
        self.number += 1
        self.core.on_data_plane(worker, message, [rows(sequence)], now)


@pytest.fixture
def reader() -> Reader:
    made = Reader()
    assert [made.hello(worker, 0.0) for worker in (1, 2, 3)] == [[1], [], []]
    return made


def test_it_goes_over_to_who_has_the_rows_once_those_under_way_had_their_time(reader: Reader) -> None:
    assert reader.unread(2, 1.0, end=5) == []
    assert reader.core.due() == pytest.approx(1.05)
    assert reader.resumed(1.04) == []
    assert reader.resumed(1.06) == [2]
    assert reader.core.counters.switched == 1


def test_a_detour_is_reported_until_the_worker_that_was_left_greets_again(reader: Reader) -> None:
    reader.unread(2, 1.0, end=5)
    reader.resumed(1.06)
    assert stats(reader.core)["detours"] == [Detour(1, 2, 1.06, 1)]
    reader.hello(1, 3.0)
    assert stats(reader.core)["detours"] == []


def test_rows_that_were_under_way_end_the_search(reader: Reader) -> None:
    reader.unread(2, 1.0, end=5)
    reader.data(1, 0, 1.02)
    assert reader.resumed(1.2) == []
    assert reader.resumed(3.0) == []


def test_a_repeated_handshake_is_no_progress(reader: Reader) -> None:
    """Repeat a greeting, as a worker without an answer does: the next replica has its turn as planned."""
    reader.unread(2, 1.0, end=5)
    assert reader.hello(1, 1.02) == [1]
    assert reader.resumed(1.06) == [2]


def test_what_it_has_is_not_owed(reader: Reader) -> None:
    reader.data(1, 0, 0.5)
    assert reader.unread(2, 1.0, end=1) == []
    assert reader.resumed(2.0) == []


def test_a_worker_without_room_holds_its_stream_up_itself() -> None:
    reader = Reader(credit_max_bytes=1)
    reader.hello(1, 0.0)
    reader.hello(2, 0.0)
    inbound = reader.core.subscriptions.streams[STREAM]
    inbound.held_bytes = inbound.credit  # as if rows waited here
    reader.unread(2, 1.0, end=5)
    assert reader.resumed(2.0) == []


def test_if_nothing_comes_from_there_either_the_next_one_that_has_them_follows(reader: Reader) -> None:
    reader.unread(2, 1.0, end=5)
    reader.unread(3, 1.01, end=5)
    assert reader.resumed(1.06) == [2]
    assert reader.resumed(1.3) == []
    assert reader.resumed(1.4) == [3]
    assert reader.resumed(9.0) == []


def test_a_stream_that_keeps_a_window_open_is_tried_elsewhere_ever_more_rarely() -> None:
    owed, inbound = OwedRows(LINK_S), Inbound(STREAM, 0, 100)
    tried = [now for now in np.arange(0, 14, 0.25) if owed.held([inbound], float(now))]
    assert tried == [0.25, 0.75, 1.75, 3.75, 6.25, 8.75, 11.25, 13.75]


def test_a_stream_of_which_something_comes_is_not_tried_elsewhere() -> None:
    owed, inbound = OwedRows(LINK_S), Inbound(STREAM, 0, 100)
    for now in np.arange(0, 5, 0.25):
        assert not owed.held([inbound], float(now))
        inbound.said = inbound.said._replace(watermark=int(now * 100))


def test_a_statement_that_does_not_come_from_who_has_offered_the_stream_changes_nothing(reader: Reader) -> None:
    stale = reader.core.counters.stale
    for connection, worker in (("stranger", 2), (2, 3), (2, 9)):
        reader.core.on_data_plane(connection, Unread(*STREAM, worker, 5), [], 1.0)
    assert reader.resumed(2.0) == []
    assert reader.core.counters.stale == stale + 3


def test_a_statement_of_the_replica_that_is_read_delays_no_other(reader: Reader) -> None:
    """Ignore the statement of a replica that has not heard yet that it is read."""
    present = reader.core.subscriptions.streams[STREAM].feed.worker
    reader.unread(present, 1.0, end=5)
    reader.unread(3, 1.01, end=5)
    assert reader.resumed(1.07) == [3]
