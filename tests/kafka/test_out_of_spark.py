"""A keyed stage in Spark executors into a topic, while those that write it are killed, or everything is."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from striking import KEYS, PARTITIONS, ROUNDS, ROWS, SEEN, WAIT_S, Seen, paced, rows_in, strike, until

import flux
from tests.kafka.broker import Broker
from tests.kafka.written import found, values

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOTAL = KEYS * PARTITIONS * ROUNDS


def seen_into(topic: str, broker: Broker, gate: Path, replicas: int, guarantee: str = "exactly_once") -> Any:
    """Written by the four partitions of the stage where it has two replicas, by two of a stage behind it where it has one."""
    apart = 2 if replicas == 1 else None
    seen = flux.stage(key="key", partitions=4, replicas=replicas, schema=SEEN)(Seen)
    rows = flux.source(paced(gate), ROWS, partitions=PARTITIONS)
    return seen(rows).to_kafka(topic, broker.address, key="key", partitions=apart, guarantee=guarantee)


def check_topic(topic: str, broker: Broker) -> None:
    """Check that each row is there once, and that the rows of a key are in order."""
    expected = dict.fromkeys(range(KEYS * PARTITIONS), 0)
    for messages in found(broker.address, topic, TOTAL, 3):
        for message, value in zip(messages, values(messages), strict=True):
            row = json.loads(value)
            assert message.key() == b"%d" % row["key"]
            assert row == {"key": row["key"], "sequence": expected[row["key"]], "seen": row["sequence"]}
            expected[row["key"]] += 1
    assert set(expected.values()) == {ROUNDS}


def test_a_topic_has_each_row_once_and_in_order_though_two_writers_are_killed(
    slots: Any, broker: Broker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, gate = new_topic(3), tmp_path / "gate"
    query = seen_into(topic, broker, gate, 2).start(spark=slots, workers=3, progress_interval="100ms")
    try:
        assert query.status["sinks"] == [f"Seen to topic {topic} of Kafka at {broker.address}, exactly once"]
        for part in (5, 2):
            until(lambda part=part: rows_in(query) > TOTAL // part, f"one of {part} parts of the rows")
            lost = strike(query, signal.SIGKILL, stage=0)
            until(lambda lost=lost: lost not in query.members(), "the loss is noticed")
            until(query.is_whole, "full replication")
        assert rows_in(query) < TOTAL, "the faults must come in mid-stream"
        gate.touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert "take-over" in {event.kind for event in query.events()}
    check_topic(topic, broker)


@pytest.mark.parametrize("guarantee", [pytest.param("exactly_once", marks=pytest.mark.long), "transactional"])
def test_a_query_that_has_lost_everything_goes_on_in_the_topic_where_it_was(
    slots: Any, broker: Broker, new_topic: Callable[..., str], tmp_path: Path, guarantee: str
) -> None:
    topic, gate = new_topic(3), tmp_path / "gate"
    for first in (True, False):
        query = seen_into(topic, broker, gate, 1, guarantee).start(
            spark=slots, workers=2, checkpointLocation=tmp_path / "location", progress_interval="100ms",
            checkpoint_interval="200ms",
        )  # fmt: skip
        try:
            if first:
                until(lambda query=query: rows_in(query) > TOTAL // 3, "a third of the rows")
                (vault,) = [
                    each for each in psutil.Process().children() if "flux.shell.vault_process" in each.cmdline()
                ]
                vault.kill()
                with pytest.raises(flux.QueryFailed, match="Start the query again with the same location"):
                    query.awaitTermination(WAIT_S)
            else:
                gate.touch()
                assert query.awaitTermination(WAIT_S)
        finally:
            query.stop()
    check_topic(topic, broker)
