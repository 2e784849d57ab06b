"""Producers ask for checkpoints where rows are kept for nothing else (design: press)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from clustered import clustered

from flux.errors import RefusedError
from flux.exchange.producer import Producer, ToWorker
from flux.wire.messages import Ack, Hello, Press, Resume
from partitioning.ids import STANDBY, StreamId
from partitioning.table import ReplicaAt, Table

PRIMARY, KEEPS, BOTH = 1, 2, 3
AGAIN_S = 1.0


def table(epoch: int, *rows: tuple[ReplicaAt, ...]) -> Table:
    return Table(epoch, (rows,), (), {})


def made(*rows: tuple[ReplicaAt, ...], log_bytes: int = 1000, **more: Any) -> Producer:
    rows = rows or ((ReplicaAt(PRIMARY, 0), ReplicaAt(KEEPS, 0, kind=STANDBY)),)
    producer = Producer(StreamId(0, 0), 0, len(rows), log_bytes, AGAIN_S, **more)
    producer.on_table(table(0, *rows), 0, 0.0)
    return producer


def batch(producer: Producer, rows: int = 10, partition: int = 0) -> None:
    given = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
    producer.append(clustered(given, [partition], [given.num_rows]), 0.0)


def resume(producer: Producer, worker: int, reads: bool, through: int = -1, behind: Any = ()) -> None:
    needs = [(0, 0)] if reads else []
    producer.on_resume(worker, Resume(0, 0, worker, 0, needs, through, list(behind), 1 << 20), 0.0)


def ack(producer: Producer, worker: int, through: int, behind: Any = ()) -> None:
    producer.on_ack(worker, Ack(0, 0, worker, 0, through, list(behind), 1 << 20), 0.0)


def sent(producer: Producer, kind: type, now: float = 0.0) -> list[ToWorker]:
    return [each for each in producer.poll(now) if isinstance(each.message, kind)]


def test_no_rows_travel_to_a_standby_and_its_producer_keeps_them_until_a_checkpoint_has_them() -> None:
    producer = made()
    resume(producer, PRIMARY, reads=True)
    resume(producer, KEEPS, reads=False)
    batch(producer)
    assert {each.worker for each in producer.poll(0.0)} == {PRIMARY}
    ack(producer, PRIMARY, 0)
    assert len(producer.log) == 1
    ack(producer, KEEPS, 0)
    assert len(producer.log) == 1, "what its worker has applied is nothing that the standby has"
    ack(producer, KEEPS, -1, behind=[(0, 0)])
    assert not producer.log


def test_a_standby_owes_no_acks_and_is_greeted_now_and_then_in_case_one_was_lost() -> None:
    producer = made()
    resume(producer, PRIMARY, reads=True)
    resume(producer, KEEPS, reads=False)
    assert not sent(producer, Hello, 3.9)
    assert [each.worker for each in sent(producer, Hello, 4.1)] == [KEEPS]


def test_a_log_that_is_half_full_asks_the_primary_for_a_checkpoint_and_the_standby_for_its_ack() -> None:
    producer = made(log_bytes=400)
    resume(producer, PRIMARY, reads=True)
    resume(producer, KEEPS, reads=False)
    batch(producer)
    ack(producer, PRIMARY, 0)
    assert not sent(producer, Press)
    for _ in range(2):
        batch(producer)
    ack(producer, PRIMARY, 2)
    assert [(each.worker, each.message.partitions) for each in sent(producer, Press)] == [(PRIMARY, [0]), (KEEPS, [0])]
    assert not sent(producer, Press, 0.9), "once in a while"
    assert len(sent(producer, Press, 1.1)) == 2, "the question may be lost"
    ack(producer, KEEPS, -1, behind=[(0, 2)])
    assert not sent(producer, Press, 2.2)


def test_what_the_primary_has_still_to_apply_is_no_reason_to_ask() -> None:
    producer = made(log_bytes=100)
    resume(producer, PRIMARY, reads=True)
    resume(producer, KEEPS, reads=False)
    batch(producer)
    assert not sent(producer, Press)


def test_a_stream_that_has_ended_asks_at_once() -> None:
    producer = made(log_bytes=1 << 20)
    resume(producer, PRIMARY, reads=True)
    resume(producer, KEEPS, reads=False)
    batch(producer)
    producer.finish(0.0)
    ack(producer, PRIMARY, 1)
    assert len(sent(producer, Press)) == 2


def test_a_standby_that_leads_from_now_on_is_greeted_anew_and_gets_what_its_checkpoint_lacks() -> None:
    producer = made()
    resume(producer, PRIMARY, reads=True)
    resume(producer, KEEPS, reads=False)
    for _ in range(3):
        batch(producer)
    ack(producer, KEEPS, -1, behind=[(0, 0)])
    list(producer.poll(0.0))
    producer.on_table(table(1, (ReplicaAt(KEEPS, 0),)), 0, 0.0)
    assert [each.worker for each in producer.poll(0.0)] == [KEEPS], "a greeting, and no rows before the answer"
    producer.on_resume(KEEPS, Resume(0, 0, 9, 1, [(0, 1)], -1, [(0, 0)], 1 << 20), 0.0)
    assert [each.message.sequence for each in producer.poll(0.0)] == [1, 2]


def test_of_a_source_that_is_read_again_nothing_is_kept_for_standbys() -> None:
    producer = made(reads_again=True)
    resume(producer, PRIMARY, reads=True)
    resume(producer, KEEPS, reads=False)
    batch(producer)
    ack(producer, PRIMARY, 0)
    assert not producer.log
    producer.on_table(table(1, (ReplicaAt(KEEPS, 0),)), 0, 0.0)
    with pytest.raises(RefusedError, match=r"needs batches of stream 0\.0 that this process has forgotten"):
        producer.on_resume(KEEPS, Resume(0, 0, 9, 1, [(0, 0)], -1, [], 1 << 20), 0.0)


def test_a_worker_that_reads_one_partition_and_keeps_another_acks_each_for_itself() -> None:
    rows = (ReplicaAt(BOTH, 0),), (ReplicaAt(PRIMARY, 0), ReplicaAt(BOTH, 0, kind=STANDBY))
    producer = made(*rows)
    resume(producer, BOTH, reads=True, behind=[(1, -1)])
    producer.on_resume(PRIMARY, Resume(0, 0, 1, 0, [(1, 0)], -1, [], 1 << 20), 0.0)
    batch(producer, partition=0)
    batch(producer, partition=1)
    assert {(each.worker, *each.message.partitions) for each in sent(producer, object)} == {(BOTH, 0), (PRIMARY, 1)}
    ack(producer, BOTH, 1)
    ack(producer, PRIMARY, 1)
    assert producer.log.base == 1, "the standby has said nothing"
    ack(producer, BOTH, 1, behind=[(1, 1)])
    assert not producer.log
    producer.validate()
