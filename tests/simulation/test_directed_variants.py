"""Broken variants that random schedules show too rarely, each told as the one story that needs the rule."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from test_numbered_rows import HOSTED, Life, inbound, values

from flux.exchange.producer import Producer
from flux.wire.messages import Ack, Data, Resume
from partitioning.clustering import Clustered
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table
from tests.simulation import broken_numbers as numbers


def batch() -> Clustered:
    rows = pa.record_batch({"x": pa.array([1], pa.int64())})
    return Clustered(rows, np.zeros(1, np.int32), np.array([0, 1], np.int64), rows.nbytes)


def served_to_a_new_life() -> list[int]:
    """Return the batches for a replica that is built anew on its earlier worker. An ack of its earlier life has been on
    its way for long; the copy of its state was taken when its primary had applied one batch of three."""
    producer = Producer(StreamId(0, 0), 0, 1, 1 << 20, resend_s=1.0)
    endpoints = {10: "", 11: ""}
    producer.on_table(Table(0, (((ReplicaAt(10, 0), ReplicaAt(11, 0)),),), (), endpoints), 0, 0.0)
    for worker in endpoints:
        producer.on_answer(worker, Resume(0, 0, 1, 0, [(0, 0)], -1, [], 1 << 20), 0.0)
    for _ in range(3):
        producer.append(batch(), 0.0)
    list(producer.poll(0.0))
    producer.on_answer(11, Ack(0, 0, 1, 0, 2, [], 1 << 20), 0.0)
    producer.on_table(Table(5, (((ReplicaAt(11, 0), ReplicaAt(10, 5, False)),),), (), endpoints), 0, 0.0)
    producer.on_answer(10, Ack(0, 0, 1, 0, 2, [], 1 << 20), 0.0)
    producer.on_answer(10, Resume(0, 0, 2, 5, [], -1, [(0, -1)], 1 << 20), 0.0)
    producer.on_answer(10, Resume(0, 0, 3, 5, [(0, 1)], 0, [], 1 << 20), 0.0)
    return [
        send.message.sequence for send in producer.poll(0.0) if send.worker == 10 and isinstance(send.message, Data)
    ]


def test_acks_of_an_earlier_life_do_not_count_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served_to_a_new_life() == [1, 2]
    take_ack = Producer._take_ack
    monkeypatch.setattr(Producer, "_take_ack", lambda self, cursor, _, *given: take_ack(self, cursor, 1 << 60, *given))
    assert served_to_a_new_life() == [], "the broken variant forgets what the new life needs"


def rows_of_two_lives() -> list[int]:
    """Return the rows that a worker gets from a source whose reader is built anew. The reader cuts its rows elsewhere the second
    time: the first row that is new to the worker comes in one batch with the ten that the worker has."""
    worker = inbound()
    first = Life(worker)
    first.answer()
    for batch in (range(4), range(4, 7), range(7, 10)):
        first.give(*batch)
    second = Life(worker, number=1)
    second.answer()
    second.give(*range(15))
    return sorted(row for life in (first, second) for partition in HOSTED for row in values(life.got[partition]))


def test_rows_that_were_taken_are_not_taken_again_with_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_of_two_lives() == list(range(15))
    numbers.takes_rows_that_it_has(monkeypatch)
    assert rows_of_two_lives() != list(range(15)), "the broken variant takes rows once more"
