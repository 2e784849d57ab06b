"""Servers that claim to be brokers may answer anything. They cause a typed error in time, no hang, and no memory is taken for
records that they only claim."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from flux.connectors.kafka.client.cluster import Client
from flux.connectors.kafka.client.connection import Connection
from flux.connectors.kafka.client.kafka_python import library
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import LogPosition
from flux.connectors.kafka.errors import BrokerBroken, BrokerUnreachable, CorruptRecords, KafkaError
from flux.connectors.kafka.read.partition_reader import ReadOptions, TopicPartitionReader, kafka_schema
from flux.dataflow.source import Positioned
from tests.kafka.batches import made

#: Answers a request, given its API, version and number; None closes the connection.
Answer = Callable[[int, int, int], bytes | None]
VERSIONS, METADATA, FETCH = 18, 3, 1


@contextmanager
def listening(answer: Answer) -> Iterator[tuple[str, int]]:
    """Run a broker that answers by ``answer``, on a port of its own."""
    server = socket.create_server(("127.0.0.1", 0))
    opened = [server]

    def serve() -> None:
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            opened.append(connection)
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        try:
            while head := connection.recv(4, socket.MSG_WAITALL):
                request = connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
                said = answer(*struct.unpack(">hhi", request[:8]))
                if said is None:
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                connection.sendall(said)
        except OSError:
            pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()
    finally:
        for each in opened:
            each.close()


def framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def versions(number: int) -> bytes:
    """Answer the question for versions: metadata in version 5, and fetch in version 11."""
    keys = struct.pack(">hhhhhhhhh", VERSIONS, 0, 3, METADATA, 0, 5, FETCH, 0, 11)
    return framed(struct.pack(">ihi", number, 35, 3) + keys)  # "unsupported version" is answered in version 0


def known_versions(version: int, number: int) -> bytes:
    if version:
        return versions(number)
    return framed(
        struct.pack(">ihi", number, 0, 3) + struct.pack(">hhhhhhhhh", VERSIONS, 0, 3, METADATA, 0, 5, FETCH, 0, 11)
    )


def metadata(number: int, port: int) -> bytes:
    host, topic = b"127.0.0.1", b"clicks"
    broker = struct.pack(">ih", 1, len(host)) + host + struct.pack(">ih", port, -1)
    partition = struct.pack(">hiiiiiii", 0, 0, 1, 1, 1, 1, 1, 0)
    body = struct.pack(">ii", 0, 1) + broker + struct.pack(">hii", -1, 1, 1)
    return framed(
        struct.pack(">i", number)
        + body
        + struct.pack(">hh", 0, len(topic))
        + topic
        + struct.pack(">bi", 0, 1)
        + partition
    )


def fetched(number: int, records: bytes, partition: int = 0) -> bytes:
    topic = b"clicks"
    body = struct.pack(">iihii", number, 0, 0, 0, 1) + struct.pack(">h", len(topic)) + topic
    body += struct.pack(">iihqqqiii", 1, partition, 0, 99, 99, 0, 0, -1, len(records)) + records
    return framed(body)


@contextmanager
def serving(records: Callable[[], bytes | None]) -> Iterator[tuple[str, int]]:
    """Run a broker that is correct except for its answers to fetches: the given bytes as records, or as the whole answer if they
    begin with a length."""
    port = []

    def answer(api: int, version: int, number: int) -> bytes | None:
        if api == VERSIONS:
            return known_versions(version, number)
        if api == METADATA:
            return metadata(number, port[0])
        given = records()
        return None if given is None else fetched(number, given)

    with listening(answer) as address:
        port.append(address[1])
        yield address


def first_of(address: tuple[str, int], seconds: float = 10.0, retry_s: float = 1.0, start: int = 0) -> list[bytes]:
    """Return the values of the first batch that a reader gives."""
    how = ReadOptions([address], Security({}), kafka_schema(False), retry_s=retry_s)
    reader = TopicPartitionReader(how, "clicks", 0, LogPosition(start))
    end = time.monotonic() + seconds
    try:
        while not isinstance(got := reader.next(), Positioned):
            assert time.monotonic() < end, "neither rows nor an error"
            time.sleep(0.01)
        return list(got.batch.column("value").to_pylist())
    finally:
        reader.close()


def test_the_broker_of_these_tests_is_whole_if_it_is_let() -> None:
    with serving(lambda: made([b"a", b"b"], 0)) as address:
        assert first_of(address) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (b"\0" * 61, "format 2"),
        (made([b"a"], 0)[:-1], "no record batch that has this offset"),
        (made([b"a"], 0)[:20], "no record batch that has this offset"),
        (b"x", "no record batch that has this offset"),
        (made([b"a"], 0).replace(b"a", b"b"), "checksum"),
    ],
)
def test_records_that_make_no_sense_end_the_reading(records: bytes, why: str) -> None:
    with serving(lambda: records) as address, pytest.raises(CorruptRecords, match=why):
        first_of(address)


def test_the_same_old_records_again_and_again_are_no_progress() -> None:
    why = "offset 5, and no record batch that has this offset or a later one"
    with serving(lambda: made([b"a"], 0)) as address, pytest.raises(CorruptRecords, match=why):
        first_of(address, start=5)


@pytest.mark.parametrize("size", [-1, 3, (1 << 31) - 1, 0x15030300])
def test_an_answer_of_a_size_that_cannot_be_is_an_error(size: int) -> None:
    with (
        listening(lambda *_: struct.pack(">i", size)) as address,
        pytest.raises(BrokerBroken, match=f"answer of {size} bytes"),
    ):
        Connection(address, Security({}), 5)


@pytest.mark.parametrize(
    "body", [b"", b"\0" * 3, b"\xff" * 40, b"\0\0\0\1" + b"\x7f" * 60, b"\0\0\0\1\0\0" + b"\xff" * 9]
)
def test_an_answer_that_cannot_be_read_is_an_error(body: bytes) -> None:
    with listening(lambda *_: framed(body)) as address, pytest.raises(BrokerBroken):
        Connection(address, Security({}), 5)


def test_an_answer_to_another_request_is_an_error() -> None:
    with listening(lambda api, version, number: known_versions(0, number + 1)) as address, pytest.raises(BrokerBroken):
        Connection(address, Security({}), 5)


def test_a_request_that_the_broker_does_not_know_is_an_error() -> None:
    with listening(lambda api, version, number: known_versions(version, number)) as address:
        connection = Connection(address, Security({}), 5)
        with pytest.raises(KafkaError, match="OffsetCommit"):
            connection.ask(library().OffsetCommit(), 5)
        connection.close()


def test_a_broker_that_says_nothing_is_an_error_in_time() -> None:
    with listening(lambda *_: b"") as address:
        client = Client([address], Security({}))
        began = time.monotonic()
        with pytest.raises(BrokerUnreachable, match="timed out"):
            client.partitions(["clicks"], 1.0)
        assert time.monotonic() - began < 2.5


def test_a_broker_that_drips_is_an_error_in_time() -> None:
    """Single bytes come in time, and all of them would not."""

    def drip(api: int, version: int, number: int) -> bytes:
        time.sleep(0.2)
        return b"\0\0\1\0"[:1]

    with listening(drip) as address:
        client = Client([address], Security({}))
        began = time.monotonic()
        with pytest.raises(BrokerUnreachable):
            client.partitions(["clicks"], 1.0)
        assert time.monotonic() - began < 2.5


def test_a_broker_that_hangs_up_is_tried_again_until_it_is_too_long() -> None:
    times = iter([None, None])
    with serving(lambda: next(times, made([b"a"], 0))) as address:
        assert first_of(address, retry_s=20) == [b"a"]
    with serving(lambda: None) as address, pytest.raises(BrokerUnreachable, match="closed the connection"):
        first_of(address)


def test_an_answer_for_another_partition_is_no_answer() -> None:
    port = []

    def answer(api: int, version: int, number: int) -> bytes:
        if api == VERSIONS:
            return known_versions(version, number)
        return metadata(number, port[0]) if api == METADATA else fetched(number, made([b"a"], 0), partition=4)

    with listening(answer) as address:
        port.append(address[1])
        with pytest.raises(BrokerUnreachable, match="left the partition out"):
            first_of(address)
