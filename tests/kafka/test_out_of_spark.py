"""A keyed stage in Spark executors into a topic, while those that write it are killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from striking import KEYS, PARTITIONS, ROUNDS, ROWS, SEEN, WAIT_S, Seen, paced, rows_in, strike, until

import flux
from tests.kafka.broker import Broker
from tests.kafka.written import found, values

TOTAL = KEYS * PARTITIONS * ROUNDS


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_topic_has_each_row_once_and_in_order_though_two_writers_are_killed(
    cluster: Any, broker: Broker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, gate = new_topic(3), tmp_path / "gate"
    seen = flux.stage(key="key", partitions=4, replicas=2, schema=SEEN)(Seen)
    rows = flux.source(paced(gate), ROWS, partitions=PARTITIONS)
    flow = seen(rows).to_kafka(topic, broker.address, key="key", partitions=2)
    flow.sink.prepare(2, None)
    query = flow.start(spark=cluster, workers=3, progress_interval="100ms")
    try:
        assert query.status["sinks"] == [f"Seen.records to topic {topic} of Kafka at {broker.address}, exactly once"]
        for part in (5, 2):
            until(lambda part=part: rows_in(query) > TOTAL // part, f"one of {part} parts of the rows")
            lost = strike(query, signal.SIGKILL, stage=1)
            until(lambda lost=lost: lost not in query.members(), "the loss is noticed")
            until(query.is_whole, "full replication")
        assert rows_in(query) < TOTAL, "the faults must come in mid-stream"
        gate.touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert "take-over" in {event.kind for event in query.events()}
    expected = dict.fromkeys(range(KEYS * PARTITIONS), 0)
    for messages in found(broker.address, topic, TOTAL, 3):
        for message, value in zip(messages, values(messages), strict=True):
            row = json.loads(value)
            assert message.key() == b"%d" % row["key"]
            assert row == {"key": row["key"], "sequence": expected[row["key"]], "seen": row["sequence"]}
            expected[row["key"]] += 1
    assert set(expected.values()) == {ROUNDS}
