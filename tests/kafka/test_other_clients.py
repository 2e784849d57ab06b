"""Records of librdkafka are read in the same way by both clients, and so are ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

from flux.connectors.kafka.records import kernels
from tests.kafka.batches import TIME, made
from tests.kafka.batches import ProducerIdentity as Numbered
from tests.kafka.broker import Broker
from tests.kafka.topics import put, read_all, reader, received, send

CODECS = (None, "gzip", "snappy", "lz4", "zstd")
RECORDS: list[Any] = [
    (b"key", b"value", [("a", b"1"), ("a", None), ("\u00fc", b"")], TIME),
    (None, b"", None, TIME + 5),
    (b"", None, [("only", b"x" * 300)], TIME - 70),
    (b"k" * 100, bytes(range(256)) * 9, None, TIME + 1),
] * 100


def as_rows(messages: list[Any]) -> list[dict[str, Any]]:
    """Convert messages of librdkafka to rows, as Spark would have them."""
    return [
        {
            "key": message.key(), "value": message.value(), "offset": message.offset(), "time": message.timestamp()[1],
            "headers": [{"key": name, "value": value} for name, value in message.headers() or ()] or None,
        }
        for message in messages
    ]  # fmt: skip


def ours(read: Any, count: int) -> list[dict[str, Any]]:
    columns = read_all(read, count).to_pydict()
    return [
        {"key": key, "value": value, "offset": offset, "time": round(stamp.timestamp() * 1000), "headers": headers}
        for key, value, offset, stamp, headers in zip(
            *(columns[name] for name in ("key", "value", "offset", "timestamp", "headers")), strict=True
        )
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_what_librdkafka_writes_is_read(broker: Broker, topic: str, codec: str | None) -> None:
    send(broker.address, topic, RECORDS, **{"compression.type": codec or "none", "linger.ms": 100})
    expected = as_rows(received(broker.address, topic, len(RECORDS)))
    assert [row["value"] for row in expected] == [record[1] for record in RECORDS]
    assert ours(reader(topic, broker.address, headers=True), len(RECORDS)) == expected


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_encoded_here_is_read_by_librdkafka(broker: Broker, topic: str, codec: str | None) -> None:
    keys, values, headers, times = (list(each) for each in zip(*RECORDS, strict=True))
    named = [each and [{"key": name, "value": value} for name, value in each] for each in headers]
    data = made(values, None, keys, named, codec, times, batch_bytes=20_000)
    assert put(broker.address, topic, data) == (0, 0)
    got = as_rows(received(broker.address, topic, len(RECORDS)))
    assert [(row["key"], row["value"], row["time"]) for row in got] == [(r[0], r[1], r[3]) for r in RECORDS]
    assert [row["headers"] for row in got] == [each or None for each in named]
    assert ours(reader(topic, broker.address, headers=True), len(RECORDS)) == got


def test_a_topic_with_the_broker_s_time_is_read(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(message_timestamp_type="LogAppendTime")
    before = int(time.time() * 1000)
    send(broker.address, topic, [(None, b"x", None, TIME)] * 10)
    table = read_all(reader(topic, broker.address), 10)
    assert set(table.column("timestampType").to_pylist()) == {1}
    assert all(stamp.timestamp() * 1000 >= before - 1000 for stamp in table.column("timestamp").to_pylist())


def test_transactions_are_read_as_librdkafka_reads_them(broker: Broker, topic: str) -> None:
    producers = []
    for number in range(2):
        producers.append(Producer({"bootstrap.servers": broker.address, "transactional.id": f"{topic}-{number}"}))
        producers[-1].init_transactions(30)
    for turn in range(12):
        aborted = turn % 3 == 1
        for number, producer in enumerate(producers):
            producer.begin_transaction()
            for record in range(20):
                producer.produce(
                    topic, b"%s %d %d %d" % (b"bad" if aborted else b"good", number, turn, record), partition=0
                )
                if record % 7 == number:
                    producer.flush(30)  # so that the batches of both lie between each other
        for producer in producers:
            producer.flush(30)  # messages that are not sent yet would be forgotten with the transaction
            if aborted:
                producer.abort_transaction(30)
            else:
                producer.commit_transaction(30)
    expected = as_rows(received(broker.address, topic, 320))
    assert len(expected) == 320
    assert {row["value"].split()[0] for row in expected} == {b"good"}
    assert ours(reader(topic, broker.address, headers=True), 320) == expected
    everything = read_all(reader(topic, broker.address, isolation="read_uncommitted"), 480)
    assert sum(value.startswith(b"bad") for value in everything.column("value").to_pylist()) == 160
    small = reader(topic, broker.address, headers=True, fetch_bytes=1024)  # answers begin within transactions
    assert ours(small, 320) == expected


def test_the_broker_takes_a_numbered_batch_once(broker: Broker, topic: str) -> None:
    """Producer id, epoch and sequence are where the broker looks for them: the sink relies on this."""
    from kafka.protocol.producer import InitProducerIdRequest

    from flux.connectors.kafka.client.connection import Connection
    from flux.connectors.kafka.client.security import Security

    host, port = broker.address.split(":")
    connection = Connection((host, int(port)), Security({}), 10)
    nobody = {"transactional_id": None, "transaction_timeout_ms": 60_000, "producer_id": -1, "producer_epoch": -1}
    answer = connection.ask(InitProducerIdRequest(**nobody, max_version=4), 10)
    connection.close()
    first = made([b"a", b"b"], 0, producer=Numbered(answer.producer_id, answer.producer_epoch, 0))
    second = made([b"c"], 0, producer=Numbered(answer.producer_id, answer.producer_epoch, 2))
    assert put(broker.address, topic, first) == (0, 0)
    assert put(broker.address, topic, second) == (0, 2)
    assert put(broker.address, topic, first) == (0, 0), "known already"
    gap = made([b"d"], 0, producer=Numbered(answer.producer_id, answer.producer_epoch, 9))
    assert put(broker.address, topic, gap)[0] == 45, "out of order"
    assert read_all(reader(topic, broker.address), 3).column("value").to_pylist() == [b"a", b"b", b"c"]


def test_a_compacted_topic_is_read(broker: Broker, new_topic: Callable[..., str]) -> None:
    """Compaction leaves gaps within batches, and batches without records."""
    topic = new_topic(
        cleanup_policy="compact",
        segment_ms=100,
        min_cleanable_dirty_ratio="0.001",
        delete_retention_ms=100,
        segment_bytes=1 << 20,
    )
    for turn in range(4):
        send(
            broker.address,
            topic,
            [(b"%d" % (i % 10), b"%d %d" % (turn, i), None, 0) for i in range(300)],
            **{"enable.idempotence": True},
        )
        time.sleep(0.15)
    read = reader(topic, broker.address)

    kept = 11  # ten keys, and "last" at least once

    def offsets() -> list[int]:
        return read_all(read, kept).column("offset").to_pylist()[:kept]

    end = time.monotonic() + 25
    before, theirs = [0], [-1]
    while time.monotonic() < end and before != theirs:
        send(broker.address, topic, [(b"last", b"%f" % time.monotonic(), None, 0)])
        before = offsets()
        if before[0] > 200:
            # The broker goes on compacting: rows of the other client count if nothing has changed meanwhile.
            theirs = [row["offset"] for row in as_rows(received(broker.address, topic, kept))]
            before = offsets()
        else:
            time.sleep(0.5)
    assert before[0] > 200, "nothing was compacted"
    assert before == sorted(set(before))
    assert theirs == before


def test_both_see_the_same_head(broker: Broker, topic: str) -> None:
    """Compare the table that ``scan`` makes with the known facts of the batch."""
    import numpy as np

    from flux.connectors.kafka.client.cluster import Client, addresses
    from flux.connectors.kafka.client.security import Security

    assert put(broker.address, topic, made([b"a", b"b", b"c"], 0, codec="zstd")) == (0, 0)
    client = Client(addresses(broker.address), Security({}))
    records = client.fetch(topic, 0, 0, 1.0, 1 << 20).records
    client.close()
    batches = np.zeros((2, kernels.FIELDS), np.int64)
    code, found, used = kernels.scan(records.address, records.size, 1 << 30, batches)
    assert (code, found, used) == (kernels.OK, 1, records.size)
    assert batches[0, [kernels.BASE, kernels.LAST_DELTA, kernels.RECORDS, kernels.ATTRIBUTES]].tolist() == [0, 2, 3, 4]
