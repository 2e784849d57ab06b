"""Several partitions that one thread fetches: no fault of one stops or slows the others."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from flux.connectors.kafka.client import cluster as client
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import LogPosition
from flux.connectors.kafka.errors import CorruptRecords, DataLost
from flux.connectors.kafka.read.partition_reader import ReadOptions, TopicPartitionReader, kafka_schema
from flux.connectors.kafka.source import KafkaReader
from flux.dataflow.source_reader import SILENT
from tests.kafka.batches import made
from tests.kafka.broker import Broker
from tests.kafka.test_hostile_brokers import FETCH, METADATA, Answer, framed, known_versions, listening
from tests.kafka.test_reading import gone, numbered, threads
from tests.kafka.test_what_goes_wrong import delete_before
from tests.kafka.topics import put, reader, send, until


@contextmanager
def opened(read: KafkaReader, partitions: int) -> Iterator[list[TopicPartitionReader]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(read.read(number, None))) for number in range(partitions)]


def values(batches: TopicPartitionReader, count: int) -> list[bytes]:
    return [value for each in until(batches, count) for value in each.batch.column("value").to_pylist()]


def test_one_thread_fetches_for_all_partitions_and_ends_with_the_last(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(3)
    read = reader(topic, broker.address)
    gone(threads)
    with opened(read, 3) as (first, second, third):
        for round_ in range(2):
            for partition, batches in enumerate((first, second, third)):
                send(broker.address, topic, [b"%d/%d" % (partition, round_)], partition)
                assert values(batches, 1) == [b"%d/%d" % (partition, round_)]
        first.close()
        send(broker.address, topic, [b"more"], 1)
        assert values(second, 1) == [b"more"]
        again = read.read(0, 1)
        assert values(again, 1) == [b"0/1"], "a partition that comes back"
        assert threads().count("flux-kafka-fetch") == 1
        again.close()
    gone(threads)
    with closing(read.read(1, 2)) as batches:
        assert values(batches, 1) == [b"more"], "after the thread has ended"


def test_a_partition_without_room_holds_up_no_other(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(2)
    assert put(broker.address, topic, made([b"x" * 1000] * 40_000, None)) == (0, 0)
    with opened(reader(topic, broker.address), 2) as (full, other):
        gone(lambda: not full.full)
        for number in range(5):
            send(broker.address, topic, numbered(1, number), 1)
            assert values(other, 1) == numbered(1, number)
        assert full.full
        assert len(values(full, 40_000)) == 40_000


def test_a_partition_that_has_lost_records_ends_alone(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(2)
    send(broker.address, topic, numbered(10), 0)
    read = reader(topic, broker.address)
    delete_before(broker, topic, 6)
    with opened(read, 2) as (lost, other):
        with pytest.raises(DataLost):
            until(lost, 1)
        send(broker.address, topic, numbered(3), 1)
        assert values(other, 3) == numbered(3)


def metadata(number: int, ports: tuple[int, int]) -> bytes:
    """Partition i is led by broker i."""
    host, topic = b"127.0.0.1", b"clicks"
    brokers = b"".join(
        struct.pack(">ih", i, len(host)) + host + struct.pack(">ih", port, -1) for i, port in enumerate(ports)
    )
    partitions = b"".join(struct.pack(">hiiiiiii", 0, i, i, 1, i, 1, i, 0) for i in range(2))
    body = struct.pack(">ii", 0, 2) + brokers + struct.pack(">hii", -1, 0, 1)
    topics = struct.pack(">hh", 0, len(topic)) + topic + struct.pack(">bi", 0, 2) + partitions
    return framed(struct.pack(">i", number) + body + topics)


def fetched(number: int, records: dict[int, bytes]) -> bytes:
    body = (
        struct.pack(">iihii", number, 0, 0, 0, 1) + struct.pack(">h", 6) + b"clicks" + struct.pack(">i", len(records))
    )
    for partition, data in records.items():
        body += struct.pack(">ihqqqiii", partition, 0, 9, 9, 0, 0, -1, len(data)) + data
    return framed(body)


def serves(ports: list[int], fetch: Callable[[int], bytes | None]) -> Answer:
    def answer(api: int, version: int, number: int) -> bytes | None:
        if api == METADATA:
            return metadata(number, (ports[0], ports[1]))
        return fetch(number) if api == FETCH else known_versions(version, number)

    return answer


def first_value(batches: TopicPartitionReader) -> bytes:
    found: list[bytes] = []

    def none() -> bool:
        taken = batches.next()
        found.extend([] if taken in (None, SILENT) else taken.batch.column("value").to_pylist())
        return not found

    gone(none)
    return found[0]


def both(address: tuple[str, int]) -> tuple[TopicPartitionReader, TopicPartitionReader]:
    how = ReadOptions([address], Security({}), kafka_schema(False), retry_s=30)
    fetcher = how.fetcher()
    return TopicPartitionReader(how, "clicks", 0, LogPosition(0), None, fetcher), TopicPartitionReader(
        how, "clicks", 1, LogPosition(0), None, fetcher
    )


def test_a_broker_that_says_nothing_holds_up_no_partition_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ATTEMPT_S", 30.0)
    ports: list[int] = []
    asked = threading.Event()

    def silent(number: int) -> bytes:
        asked.set()
        return b""

    with (
        listening(serves(ports, silent)) as slow,
        listening(serves(ports, lambda number: fetched(number, {1: made([b"a"], 0)}))) as quick,
    ):
        ports += [slow[1], quick[1]]
        waits, reads = both(quick)
        assert asked.wait(10)
        assert first_value(reads) == b"a"
        assert waits.next() in (None, SILENT)
        waits.close()
        reads.close()
        gone(threads)


def test_records_that_make_no_sense_end_their_partition_alone() -> None:
    """Such records may have been cut off behind those of another partition: the partition is asked for alone before it ends."""
    ports: list[int] = []
    alone: list[float] = []

    def fetch(number: int) -> bytes:
        alone.append(time.monotonic())
        return fetched(number, {0: made([b"b"], 0)[:-1], 1: made([b"a"], 0)})

    with listening(serves(ports, fetch)) as address:
        ports += [address[1], address[1]]
        cut, reads = both(address)
        assert first_value(reads) == b"a"
        with pytest.raises(CorruptRecords, match="partition 0, offset 0, and no record batch"):
            first_value(cut)
        assert len(alone) > 1
        cut.close()
        reads.close()
        gone(threads)
