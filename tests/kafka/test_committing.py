"""Commits to a consumer group: offsets up to which everything is applied, and groups that cannot be reached."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

import flux
from flux.connectors.kafka.client.cluster import Client, addresses
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.errors import BrokerUnreachable
from flux.connectors.kafka.read import group_commit as committing
from flux.connectors.kafka.read.group_commit import GroupCommit
from tests.flux.harness import ThreadQuery
from tests.kafka.broker import Broker
from tests.kafka.topics import WAIT_S, reader, reading, send, until

PARTITIONS = 2


def committed(broker: Broker, topic: str) -> dict[int, int]:
    """Read the committed offsets, by partition, of the group that has the name of the topic. Partitions without one are left
    out."""
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": topic})
    end = time.monotonic() + WAIT_S
    while True:
        try:
            told = consumer.committed([TopicPartition(topic, partition) for partition in range(PARTITIONS)], WAIT_S)
            break
        except KafkaException as error:  # a broker that has just begun to coordinate groups
            if error.args[0].code() not in (14, 15, 16) or time.monotonic() > end:
                raise
            time.sleep(0.05)
    consumer.close()
    return {each.partition: each.offset for each in told if each.offset >= 0}


def soon(holds: Callable[[], bool], what: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def committers(group: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == f"flux-kafka-group-{group}"]


def records(first: int, stop: int) -> list[bytes]:
    return [json.dumps({"x": number}).encode() for number in range(first, stop)]


def test_the_group_is_told_what_was_said_to_be_applied_and_no_more(broker: Broker, topic: str) -> None:
    send(broker.address, topic, records(0, 100))
    read = reader(topic, broker.address, group=topic)
    with reading(read) as batches:
        until(batches, 100)
        time.sleep(1.5 * committing.EVERY_S)
        assert committed(broker, topic) == {}, "rows were taken, and none is applied"
        batches.applied(40)
        soon(lambda: committed(broker, topic) == {0: 40}, lambda: committed(broker, topic))
        assert cloudpickle.loads(cloudpickle.dumps(read)).group == topic, "a reader in use can travel"
        batches.applied(70)
    soon(lambda: committed(broker, topic) == {0: 70}, lambda: committed(broker, topic))
    soon(lambda: not committers(topic), lambda: committers(topic))


def test_the_group_is_told_of_the_end_though_no_row_is_there(broker: Broker, topic: str) -> None:
    """Ends of transactions take an offset each."""
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": topic})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, b"0")
    producer.commit_transaction()
    with reading(reader(topic, broker.address, group=topic)) as batches:
        (got,) = until(batches, 1)
        batches.applied(got.position)
        soon(lambda: committed(broker, topic) == {0: 2}, lambda: committed(broker, topic))


def test_the_group_is_told_of_a_partition_that_has_no_records_but_aborted_ones(broker: Broker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": topic})
    producer.init_transactions()
    read = reader(topic, broker.address, group=topic)
    with reading(read) as batches:
        assert (next(batches), batches._applied_offset()) == (None, None)
        producer.begin_transaction()
        producer.produce(topic, b"0")
        producer.flush(WAIT_S)
        producer.abort_transaction()
        soon(lambda: committed(broker, topic) == {0: 2}, lambda: committed(broker, topic))
        send(broker.address, topic, records(0, 1))
        until(batches, 1)
        assert batches._applied_offset() is None, "a row that was taken and is not applied"


class AwayAtFirst(Client):
    """A client of a cluster that cannot be reached three times."""

    times = 3

    def commit(self, group: str, offsets: Any, timeout: float) -> None:
        if AwayAtFirst.times:
            AwayAtFirst.times -= 1
            raise BrokerUnreachable("nobody answers")
        super().commit(group, offsets, timeout)


def test_a_broker_that_does_not_answer_is_told_later_and_the_log_says_so_once(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(committing, "Client", AwayAtFirst)
    monkeypatch.setattr(committing, "_PAUSE_MAX_S", 0.1)
    committer = GroupCommit(addresses(broker.address), Security({}), topic)
    committer.add((topic, 0), lambda: 7)
    soon(lambda: committed(broker, topic) == {0: 7}, lambda: committed(broker, topic))
    assert AwayAtFirst.times == 0
    said = [record.getMessage() for record in caplog.records if record.name == "flux.kafka"]
    assert said == [f"offsets of group {topic!r} are not committed, it is tried again: nobody answers"]
    committer.remove((topic, 0))
    soon(lambda: not committers(topic), lambda: committers(topic))


def slow(gate: threading.Event, limit: int) -> Any:
    """Make a stage that counts its applied rows, and stands still at a row until the gate opens."""
    applied: list[int] = []

    class Slow(flux.Operator):
        def process(self, batch: Any) -> None:
            for x in batch.column("x").to_pylist():
                if x >= limit:
                    gate.wait(WAIT_S)
                applied.append(x)

    return flux.stage(partitions=1)(Slow), applied


def test_a_query_commits_the_end_of_the_topic_and_nothing_that_a_slow_consumer_has_still_to_apply(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    topic, gate = new_topic(PARTITIONS), threading.Event()
    for partition in range(PARTITIONS):
        send(broker.address, topic, records(0, 50), partition)
    clicks = flux.kafka(topic, broker.address, group=topic, format="json", schema="x BIGINT")
    stage, applied = slow(gate, 50)
    with ThreadQuery(stage(clicks), step_timeout=WAIT_S) as query:
        try:
            soon(lambda: committed(broker, topic) == {0: 50, 1: 50}, lambda: committed(broker, topic))
            for partition in range(PARTITIONS):
                send(broker.address, topic, records(50, 80), partition)
            # One of them is read by the worker that does not stand still.
            soon(lambda: query.server.core.inputs.total >= 130, lambda: query.server.core.inputs.total)
            time.sleep(2.5 * committing.EVERY_S)
            assert committed(broker, topic) == {0: 50, 1: 50}
            assert len(applied) == 100
            gate.set()
            soon(lambda: committed(broker, topic) == {0: 80, 1: 80}, lambda: committed(broker, topic))
            assert len(applied) == 160
        finally:
            gate.set()
    soon(lambda: not committers(topic), lambda: committers(topic))
