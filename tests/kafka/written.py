"""Flows that end in a topic, their numbered output, and the messages that librdkafka finds of it."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, TopicPartition

import flux
from flux.connectors.kafka.write.sink import KafkaSink
from flux.dataflow.sink import FlowTo, Position, SinkContext
from flux.operators.operator import Context, Operator
from tests.kafka.topics import WAIT_S


@flux.stage(partitions=1)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def ended(topic: str, address: str, **options: Any) -> FlowTo:
    """Make a flow into a topic; the test supplies its rows."""
    return flux.to_kafka(
        passed(flux.source(lambda partition, start: iter(()), "value binary", partitions=1)), topic, address, **options
    )


def sink_of(flow: FlowTo) -> KafkaSink:
    """Prepare the sink of a flow for one writer, as the start of a query does it."""
    assert isinstance(flow.sink, KafkaSink)
    flow.sink.prepare(1, None)
    return flow.sink


def opened(sink: KafkaSink, partition: int = 0, partitions: int = 1) -> KafkaSink:
    """Copy and open a sink, as another primary does."""
    made = copy.deepcopy(sink)
    made.open(SinkContext("query", 0, "stage", partition, partitions))
    return made


def operator_of(flow: FlowTo, partition: int = 0) -> Operator:
    made = flow.flow.stage.make()
    made.open(Context("stage", partition))
    return made


def numbered(flow: FlowTo, rows: pa.RecordBatch, operator: Operator | None = None) -> pa.RecordBatch:
    """Return the rows as the stage before the sink hands them on."""
    made = (operator or operator_of(flow)).process(rows)
    assert isinstance(made, pa.RecordBatch)
    return made


def write(sink: KafkaSink, batch: pa.RecordBatch, limit_s: float = WAIT_S) -> None:
    """Write a batch with repetitions, as a worker does it."""
    end = time.monotonic() + limit_s
    while True:
        try:
            sink.write(batch, Position(0, 0))
            return
        except Exception as error:
            if not sink.is_transient(error) or time.monotonic() > end:
                raise
            time.sleep(0.02)


def found(address: str, topic: str, count: int, partitions: int = 1) -> list[list[Any]]:
    """Read the messages of each partition with librdkafka: ``count`` in all, and those that come within half a second more."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "tests",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(topic, each, 0) for each in range(partitions)])
    got: list[list[Any]] = [[] for _ in range(partitions)]
    end = time.monotonic() + WAIT_S
    seen = 0
    while time.monotonic() < end:
        messages = consumer.consume(10_000, 0.5)
        for message in messages:
            assert message.error() is None, message.error()
            got[message.partition()].append(message)
        seen += len(messages)
        if not messages and seen >= count:
            break
    consumer.close()
    return got


def everything(address: str, topic: str, partitions: int) -> list[Any]:
    """Read the messages that are there now, without those of transactions that are open or were aborted."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "tests",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(topic, each, 0) for each in range(partitions)])
    got: list[Any] = []
    ended: set[int] = set()
    end = time.monotonic() + WAIT_S
    while len(ended) < partitions:
        assert time.monotonic() < end
        message = consumer.poll(0.5)
        if message is None:
            continue
        if message.error() is None:
            got.append(message)
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
            ended.add(message.partition())
    consumer.close()
    return got


def values(messages: Sequence[Any]) -> list[Any]:
    return [message.value() for message in messages]
