"""Topics of a real broker as a source: positions, starts, formats, limits."""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec
import pyarrow as pa
import pytest
from confluent_kafka import Producer

from flux.connectors.kafka.client.topic_ids import LogPosition
from flux.connectors.kafka.errors import BadRecord
from flux.connectors.kafka.read.partition_reader import ROWS_MAX
from flux.errors import UsageError
from tests.kafka.batches import TIME, made
from tests.kafka.broker import Broker
from tests.kafka.topics import grow, offsets_behind, put, read_all, reader, reading, rows, send, until

UTC = datetime.UTC


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def values(table: pa.Table) -> list[Any]:
    return list(table.column("value").to_pylist())


def gone(what: Callable[[], object]) -> None:
    """Soon: the thread of a reader ends by itself."""
    end = time.monotonic() + 5
    while what():
        assert time.monotonic() < end, what()
        time.sleep(0.005)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flux-kafka")]


def test_a_reader_goes_on_behind_any_position_that_was_given(broker: Broker, topic: str) -> None:
    assert put(broker.address, topic, made(numbered(20_000), None, batch_bytes=3000)) == (0, 0)
    read = reader(topic, broker.address, max_rows_per_second=1e9, fetch_bytes=10_000)
    with reading(read) as batches:
        got = until(batches, 20_000)
    assert values(rows(got)) == numbered(20_000)
    assert len(got) >= 5
    positions = offsets_behind(got)
    assert positions == sorted(set(positions))
    assert positions[-1] == 20_000
    for each in positions[:: len(positions) // 4]:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each)) == each
        left = 20_000 - each
        assert not left or values(read_all(read, left, start=each)) == numbered(left, each)


def test_a_batch_stays_within_the_limits_and_can_be_cut_anywhere(broker: Broker, topic: str) -> None:
    many = 2 * ROWS_MAX + 17
    assert put(broker.address, topic, made([b""] * many, None, codec="zstd", batch_bytes=1 << 30)) == (0, 0)
    with reading(reader(topic, broker.address)) as batches:
        got = until(batches, many)
    assert [each.batch.num_rows for each in got] == [ROWS_MAX, ROWS_MAX, 17]
    assert offsets_behind(got) == [ROWS_MAX, 2 * ROWS_MAX, many]
    assert read_all(reader(topic, broker.address), 18, start=many - 18).column("offset").to_pylist() == list(
        range(many - 18, many)
    )


def test_nothing_just_now_is_none_and_takes_no_time(broker: Broker, topic: str) -> None:
    with reading(reader(topic, broker.address)) as batches:
        next(batches)
        began = time.perf_counter()
        assert [next(batches) for _ in range(1000)] == [None] * 1000
        assert time.perf_counter() - began < 0.25
        send(broker.address, topic, [b"now"])
        assert values(rows(until(batches, 1))) == [b"now"]


def test_the_thread_ends_with_the_generator(broker: Broker, topic: str) -> None:
    assert put(broker.address, topic, made([b"x" * 1000] * 60_000, None)) == (0, 0)
    for full in (False, True):
        with reading(reader(topic, broker.address)) as batches:
            until(batches, 1)
            assert set(threads()) <= {"flux-kafka-fetch", "flux-kafka-beside"}
            assert threads().count("flux-kafka-fetch") == 1
            time.sleep(0.3 if full else 0)  # until it waits for room
            began = time.perf_counter()
        assert time.perf_counter() - began < 0.25, "close does not wait for a broker"
        gone(threads)


def test_what_is_not_taken_is_bounded(broker: Broker, topic: str) -> None:
    from flux.connectors.kafka.read.partition_reader import AHEAD_BYTES, TopicPartitionReader

    assert put(broker.address, topic, made([b"x" * 1000] * 60_000, None)) == (0, 0)
    read = reader(topic, broker.address)
    ahead = TopicPartitionReader(read.how, topic, 0, LogPosition(0))
    try:
        before = -1
        end = time.monotonic() + 30
        while ahead._bytes != before or (not before and time.monotonic() < end):
            before = ahead._bytes
            time.sleep(0.3)
        assert AHEAD_BYTES / 2 < ahead._bytes <= AHEAD_BYTES
    finally:
        ahead.close()


def test_several_topics_are_one_source(broker: Broker, new_topic: Callable[..., str]) -> None:
    first, second = new_topic(2), new_topic(3)
    for topic, partitions in ((first, 2), (second, 3)):
        for partition in range(partitions):
            send(broker.address, topic, [f"{topic}/{partition}"], partition)
    read = reader([second, first], broker.address)
    assert read.topic_partitions == [(first, 0), (first, 1), (second, 0), (second, 1), (second, 2)]
    for number, (topic, partition) in enumerate(read.topic_partitions):
        (row,) = read_all(read, 1, number).to_pylist()
        assert (row["topic"], row["partition"], row["value"]) == (topic, partition, f"{topic}/{partition}".encode())


def test_a_query_begins_where_it_was_made(broker: Broker, topic: str) -> None:
    """Also in its second life, elsewhere, after more has been written."""
    send(broker.address, topic, numbered(10))
    shipped = cloudpickle.dumps(reader(topic, broker.address, starting="latest"))
    send(broker.address, topic, numbered(5, 10))
    for _ in range(2):
        assert values(read_all(cloudpickle.loads(shipped), 5)) == numbered(5, 10)


def test_a_query_begins_where_it_was_first_started(broker: Broker, topic: str) -> None:
    """Offsets at the time when the flow was written do not count, nor those when it is started again on its checkpoint
    location."""
    read = reader(topic, broker.address, starting="latest")
    send(broker.address, topic, numbered(5))
    kept = json.loads(json.dumps(read.prepare(None)))
    assert (read.starts, kept["partitions"], [*kept["topics"]]) == ([5], [[topic, 0, 5]], [topic])
    send(broker.address, topic, numbered(3, 5))
    again = reader(topic, broker.address, starting="latest")
    assert again.starts == [8]
    assert again.prepare(kept) == kept
    assert values(read_all(again, 3)) == numbered(3, 5)


def test_what_a_topic_has_got_since_is_read_from_its_beginning(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic, other = new_topic(2), new_topic(name="zz")
    send(broker.address, topic, [b"before"], 1)
    kept = reader(topic, broker.address, starting="latest").prepare(None)
    both = reader([topic, other], broker.address).prepare(None)
    grow(broker.address, topic, 3)
    gone(lambda: len(reader(topic, broker.address).topic_partitions) < 3)
    send(broker.address, topic, [b"new"], 2)
    again = reader(topic, broker.address, starting="latest")
    assert again.prepare(kept) == {**kept, "partitions": [[topic, 0, 0], [topic, 1, 1], [topic, 2, 0]]}
    assert values(read_all(again, 1, 2)) == [b"new"]
    known = reader([topic, other], broker.address).prepare(both)
    assert known["partitions"] == [[topic, 0, 0], [topic, 1, 0], [other, 0, 0], [topic, 2, 0]], "numbers stay"
    assert known["topics"] == both["topics"]
    grow(broker.address, topic, 4)
    gone(lambda: len(reader(topic, broker.address).topic_partitions) < 4)
    assert reader([topic, other], broker.address).prepare(known)["partitions"][3:] == [[topic, 2, 0], [topic, 3, 0]]
    with pytest.raises(UsageError, match=f"knows partition 0 of topic '{topic}', which is not read any more"):
        reader(other, broker.address).prepare(kept)


def test_starts_are_offsets_times_and_ends(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(3)
    for partition in range(3):
        send(broker.address, topic, [(None, b"%d" % i, None, TIME + 1000 * i) for i in range(10)], partition)

    def starts(starting: Any) -> tuple[int, ...]:
        return tuple(reader(topic, broker.address, starting=starting).starts)

    assert starts("earliest") == (0, 0, 0)
    assert starts("latest") == (10, 10, 10)
    assert starts(datetime.datetime.fromtimestamp(TIME / 1000 + 3, UTC)) == (3, 3, 3)
    assert starts(datetime.datetime.fromtimestamp(TIME / 1000 + 3.5, UTC)) == (4, 4, 4)
    assert starts(datetime.datetime.fromtimestamp(TIME / 1000 + 100, UTC)) == (10, 10, 10), "nothing is that late"
    assert starts({0: 7, "1": "latest", 2: datetime.datetime.fromtimestamp(TIME / 1000 + 2, UTC)}) == (7, 10, 2)
    assert starts({topic: {"0": -1, "1": -2, "2": 5}}) == (10, 0, 5)
    assert starts({topic: "latest"}) == (10, 10, 10)
    for wrong, why in (
        ("newest", "must be 'earliest', 'latest'"),
        (17, "must be 'earliest', 'latest'"),
        (datetime.datetime(2026, 5, 1), "no time zone"),
        ({0: 1, 1: 1}, "nothing of partition 2"),
        ({0: 1, 1: 1, 2: 1, 3: 1}, "partition 3, which topic"),
        ({0: -3, 1: 1, 2: 1}, "got -3"),
        ({"another": "latest"}, "partition 'another'"),
    ):
        with pytest.raises(UsageError, match=why):
            starts(wrong)


def test_json_becomes_columns_beside_those_of_kafka(broker: Broker, topic: str) -> None:
    texts = [b'{"user": 1, "name": "a", "more": [1]}', None, b'{"name": "b"}']
    send(broker.address, topic, [(b"k", text, None, TIME) for text in texts])
    read = reader(
        topic, broker.address, format="json", schema="user BIGINT, name STRING", include=["offset", "key"], headers=True
    )
    table = read_all(read, 3)
    assert table.schema.names == ["user", "name", "key", "offset", "headers"]
    assert table.to_pylist() == [
        {"user": 1, "name": "a", "key": b"k", "offset": 0, "headers": None},
        {"user": None, "name": None, "key": b"k", "offset": 1, "headers": None},
        {"user": None, "name": "b", "key": b"k", "offset": 2, "headers": None},
    ]


def test_a_bad_record_is_named(broker: Broker, topic: str) -> None:
    send(
        broker.address,
        topic,
        [b'{"user": 1}'] * 500 + [b'{"user": "much too long to be shown as a whole, and no number either"}'],
    )
    with (
        reading(reader(topic, broker.address, format="json", schema="user BIGINT")) as batches,
        pytest.raises(BadRecord) as error,
    ):
        until(batches, 501)
    assert (error.value.topic, error.value.partition, error.value.offset) == (topic, 0, 500)
    for part in (
        f"topic '{topic}', partition 0, offset 500",
        "from number to string",
        'begins with b\'{"user": "much',
        "...",
    ):
        assert part in str(error.value)
    again = cloudpickle.loads(cloudpickle.dumps(error.value))
    assert (str(again), again.offset) == (str(error.value), 500)


def test_bad_records_can_be_dropped(broker: Broker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    texts = [b'{"user": %d}' % i if i % 10 else b"{" for i in range(1000)]
    send(broker.address, topic, texts)
    with reading(
        reader(topic, broker.address, format="json", schema="user BIGINT", include=["offset"], bad_records="drop")
    ) as batches:
        got = until(batches, 900)
    kept = [i for i in range(1000) if i % 10]
    assert rows(got).to_pydict() == {"user": kept, "offset": kept}
    assert offsets_behind(got)[-1] == 1000
    assert "begins with b'{'" in caplog.text
    assert len(caplog.records) < 50


def test_csv_becomes_columns(broker: Broker, topic: str) -> None:
    send(broker.address, topic, [b'1,"a,b",2.5', b"", b"2,,"])
    read = reader(topic, broker.address, format="csv", schema="id INT, name STRING, amount DOUBLE")
    assert read_all(read, 3).to_pylist() == [
        {"id": 1, "name": "a,b", "amount": 2.5},
        {"id": None, "name": None, "amount": None},
        {"id": 2, "name": None, "amount": None},
    ]


def test_rows_come_no_faster_than_asked(broker: Broker, topic: str) -> None:
    send(broker.address, topic, numbered(1000))
    began = time.monotonic()
    assert values(read_all(reader(topic, broker.address, max_rows_per_second=1000), 1000)) == numbered(1000)
    assert 0.8 < time.monotonic() - began < 5


def test_lag_is_known_while_a_partition_is_read(broker: Broker, topic: str) -> None:
    send(broker.address, topic, numbered(100))
    with reading(reader(topic, broker.address, starting={0: 40})) as batches:
        assert batches.lag() is None or batches.lag() == (40, 100)
        until(batches, 60)
        assert batches.lag() == (100, 100)
        send(broker.address, topic, numbered(50))
        gone(lambda: batches.lag() != (100, 150))
        until(batches, 50)
        assert batches.lag() == (150, 150)
    gone(threads)


def test_a_partition_that_ends_with_an_aborted_transaction_has_no_lag(broker: Broker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": topic})
    producer.init_transactions()
    for number, end in enumerate((producer.commit_transaction, producer.abort_transaction)):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number)
        producer.flush()
        end()
    with reading(reader(topic, broker.address)) as batches:
        until(batches, 1)
        gone(lambda: batches.lag() != (4, 4))


def test_offsets_of_a_group_can_be_committed(broker: Broker, new_topic: Callable[..., str]) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions
    from confluent_kafka.admin import AdminClient

    from flux.connectors.kafka.client.cluster import Client

    topic = new_topic(2)
    send(broker.address, topic, numbered(10))
    read = reader(topic, broker.address, group=f"group-{topic}")
    assert read.group == f"group-{topic}"
    client = Client(read.how.bootstrap, read.how.security)
    client.commit(read.group, {(topic, 0): 7, (topic, 1): 0}, 30)
    client.close()
    admin = AdminClient({"bootstrap.servers": broker.address})
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(read.group)])
    told = asked[read.group].result(30).topic_partitions
    assert {(each.topic, each.partition): each.offset for each in told} == {(topic, 0): 7, (topic, 1): 0}


def test_a_record_of_30_mb_is_read_between_small_ones(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(max_message_bytes=40_000_000)
    large = bytes(range(256)) * (30_000_000 // 256)
    assert put(broker.address, topic, made([b"before"], None) + made([large], None) + made([b"behind"], None)) == (0, 0)
    assert values(read_all(reader(topic, broker.address), 3)) == [b"before", large, b"behind"]
