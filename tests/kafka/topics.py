"""Writing to topics of a broker with other clients, or with our own record batches, and reading them to an end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

import flux
from flux.connectors.kafka.client.connection import Connection
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import LogPosition
from flux.connectors.kafka.read.partition_reader import TopicPartitionReader
from flux.connectors.kafka.source import KafkaReader
from flux.dataflow.source import Positioned
from tests.kafka.broker import create_topic

#: Longest time that a test waits for an effect that a broker on the same machine should have at once.
WAIT_S = 30.0
#: Error codes for a topic that was just made: unknown, no leader, another leader.
_NOT_YET = (3, 5, 6)


def reader(*args: Any, **options: Any) -> KafkaReader:
    """Make a source and return its reader."""
    source = flux.kafka(*args, **options)
    assert source.reader.positions
    assert source.partitions == len(source.reader.topic_partitions)
    read: KafkaReader = source.reader
    return read


def send(address: str, topic: str, values: Iterable[Any], partition: int = 0, **config: Any) -> None:
    """Send values with librdkafka. A value may be (key, value, headers, milliseconds)."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 5, **config})
    for given in values:
        key, value, headers, stamp = given if isinstance(given, tuple) else (None, given, None, 0)
        producer.produce(topic, value, key, partition, headers=headers, timestamp=stamp)
        producer.poll(0)
    assert producer.flush(WAIT_S) == 0


def grow(address: str, topic: str, partitions: int) -> None:
    """Raise the number of a topic's partitions. The new ones are known everywhere a little later."""
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(WAIT_S)


def remake(address: str, topic: str, partitions: int = 1, **settings: object) -> None:
    """Delete a topic, and make another one of the same name."""
    admin = AdminClient({"bootstrap.servers": address})
    admin.delete_topics([topic])[topic].result(WAIT_S)
    end = time.monotonic() + WAIT_S
    while True:
        try:
            create_topic(address, topic, partitions, **settings)
            return
        except KafkaException:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def put(address: str, topic: str, data: bytes, partition: int = 0) -> tuple[int, int]:
    """Record batches as they are, one after the other. The first error code that is not 0, and the first offset."""
    from kafka.protocol.producer import ProduceRequest

    host, port = address.split(":")
    offset, end = None, time.monotonic() + WAIT_S
    with closing(Connection((host, int(port)), Security({}), WAIT_S)) as connection:
        while data:
            size = int.from_bytes(data[8:12], "big") + 12
            part = ProduceRequest.TopicProduceData.PartitionProduceData(index=partition, records=data[:size])
            topics = [ProduceRequest.TopicProduceData(name=topic, partition_data=[part])]
            message = ProduceRequest(
                transactional_id=None, acks=-1, timeout_ms=int(1000 * WAIT_S), topic_data=topics, max_version=9
            )
            (answer,) = connection.ask(message, WAIT_S).responses
            (got,) = answer.partition_responses
            if got.error_code in _NOT_YET and time.monotonic() < end:
                time.sleep(0.05)
                continue
            offset = got.base_offset if offset is None else offset
            if got.error_code:
                return got.error_code, offset
            data = data[size:]
    return 0, -1 if offset is None else offset


def received(
    address: str, topic: str, count: int, isolation: str = "read_committed", limit_s: float = WAIT_S
) -> list[Any]:
    """Messages, with librdkafka, as many as there are within the limit."""
    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "tests", "enable.auto.commit": False, "isolation.level": isolation}
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    got: list[Any] = []
    end = time.monotonic() + limit_s
    while len(got) < count and time.monotonic() < end:
        got += consumer.consume(min(count - len(got), 1000), min(limit_s, 1.0))
    consumer.close()
    assert all(message.error() is None for message in got)
    return got


def all_of(address: str, topic: str) -> list[Any]:
    """Read all messages of partition 0, up to the end that the log has at the time of the question."""
    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "tests", "enable.auto.commit": False, "enable.partition.eof": True}
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    got: list[Any] = []
    end = time.monotonic() + WAIT_S
    while not got or got[-1].error() is None:
        assert time.monotonic() < end, f"{len(got)} messages, and no end"
        got += consumer.consume(1000, 1.0)
    consumer.close()
    (eof,) = [message.error() for message in got if message.error() is not None]
    assert eof.code() == KafkaError._PARTITION_EOF, eof
    return [message for message in got if message.error() is None]


@contextmanager
def reading(read: KafkaReader, partition: int = 0, start: Any = None) -> Iterator[TopicPartitionReader]:
    with closing(read.read(partition, start)) as batches:
        yield batches


def until(batches: Iterator[Any], rows: int) -> list[Positioned]:
    """Take batches until there are this many rows."""
    got: list[Positioned] = []
    end = time.monotonic() + WAIT_S
    while sum(each.batch.num_rows for each in got) < rows:
        each = next(batches)
        if not isinstance(each, Positioned):
            assert time.monotonic() < end, f"{sum(each.batch.num_rows for each in got)} rows of {rows}"
            time.sleep(0.005)
        else:
            each.batch.validate(full=True)
            got.append(each)
    return got


def offsets_behind(got: Sequence[Positioned]) -> list[int]:
    """List the offset behind each batch."""
    return [LogPosition.of(each.position).offset for each in got]


def rows(got: Sequence[Positioned]) -> pa.Table:
    return pa.Table.from_batches([each.batch for each in got])


def read_all(read: KafkaReader, count: int, partition: int = 0, start: Any = None) -> pa.Table:
    with reading(read, partition, start) as batches:
        return rows(until(batches, count))
