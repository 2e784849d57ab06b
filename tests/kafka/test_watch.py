"""The reader of a topic that measures when rows are visible."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.kafka.watch import Visible, watching
from tests.kafka.broker import Broker


def test_a_record_of_a_transaction_is_visible_when_the_transaction_is_committed(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    from confluent_kafka import Producer

    topic = new_topic()
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": topic})
    producer.init_transactions(30)
    start = time.time()
    with watching(broker.address, topic, 1) as seen:
        producer.begin_transaction()
        due = time.time()
        producer.produce(topic, f"{round(due * 1e6)},1".encode(), b"k000007")
        producer.flush(30)
        time.sleep(0.3)
        committed = time.time()
        producer.commit_transaction(30)
        time.sleep(0.5)
    assert len(seen.due_us) == 1, "the reader met another number of rows"
    assert seen.due_us[0] == round(due * 1e6)
    assert seen.seen_us[0] >= committed * 1e6
    age = seen.statistics(start, time.time())["visible_p50_ms"]
    assert age is not None
    assert age >= 300


def test_rows_that_were_due_at_other_times_do_not_count() -> None:
    due = np.array([900_000, 1_000_000, 1_500_000, 2_000_000])
    seen = Visible(due, due + np.array([70_000, 5_000, 7_000, 70_000]))
    assert seen.statistics(1, 2) == {"visible_p50_ms": pytest.approx(6), "visible_p99_ms": pytest.approx(6.98)}
    assert seen.statistics(3, 4) == {}
