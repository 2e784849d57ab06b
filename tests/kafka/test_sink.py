"""A topic has each record once and in order, with any writers, any cuts into batches, and through any fault."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.connectors.kafka.client import producer as producing
from flux.connectors.kafka.client.cluster import Passing
from flux.connectors.kafka.client.producer import SEQUENCES
from flux.connectors.kafka.errors import DataLost, KafkaError, NotPermitted
from flux.connectors.kafka.write import sink as sink_module
from flux.connectors.kafka.write.sink import KafkaSink
from flux.dataflow.sink import Position, SinkAhead, guarantee
from flux.errors import UsageError
from flux.testing import check_sink
from tests.kafka.broker import GUEST, PASSWORD, Broker
from tests.kafka.topics import put, received, send
from tests.kafka.written import ended, everything, found, numbered, opened, operator_of, sink_of, values, write

NewTopic = Callable[..., str]


def counted(first: int, count: int, size: int = 8) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array([b"%0*d" % (size, i) for i in range(first, first + count)], pa.binary())})


def numbers(messages: list[Any]) -> list[int]:
    return [int(value) for value in values(messages)]


def raw(topic: str, broker: Broker, **options: Any) -> Any:
    return ended(topic, broker.address, format="raw", **options)


# ---- formats, keys, headers


def test_librdkafka_reads_what_was_written(broker: Broker, new_topic: NewTopic) -> None:
    topic = new_topic(1)
    flow = ended(topic, broker.address, key="user", headers="about", timestamp="at", compression="zstd")
    about = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows = pa.record_batch(
        {
            "user": pa.array(["ann", None, "bob"]),
            "amount": pa.array([1.5, None, 3]),
            "about": pa.array([[{"key": "h", "value": b"1"}, {"key": "g", "value": None}], None, []], about),
            "at": pa.array([1_700_000_000_123, 1_700_000_000_124, 1_700_000_000_125], pa.timestamp("ms", "UTC")),
        }
    )
    write(opened(sink_of(flow)), numbered(flow, rows))
    (messages,) = found(broker.address, topic, 3)
    assert [message.key() for message in messages] == [b"ann", None, b"bob"]
    assert [json.loads(value) for value in values(messages)] == [
        {"user": "ann", "amount": 1.5}, {"user": None, "amount": None}, {"user": "bob", "amount": 3},
    ]  # fmt: skip
    assert [message.headers() for message in messages] == [[("h", b"1"), ("g", None)], None, None]
    assert [message.timestamp()[1] for message in messages] == [1_700_000_000_123 + i for i in range(3)]


def test_null_values_are_tombstones(broker: Broker, topic: str) -> None:
    flow = raw(topic, broker, key="key")
    rows = pa.record_batch({"key": pa.array([1, 2]), "value": pa.array([None, b""], pa.binary())})
    write(opened(sink_of(flow)), numbered(flow, rows))
    messages = received(broker.address, topic, 2)
    assert [(message.key(), message.value()) for message in messages] == [(b"1", None), (b"2", b"")]


def test_keys_go_where_librdkafka_sends_them(broker: Broker, new_topic: NewTopic) -> None:
    from confluent_kafka import Producer

    ours, theirs = new_topic(5), new_topic(5)
    keys = [f"key {i * i}" for i in range(500)]
    producer = Producer({"bootstrap.servers": broker.address, "partitioner": "murmur2_random"})
    for key in keys:
        producer.produce(theirs, b"", key)
    assert producer.flush(30) == 0
    flow = ended(ours, broker.address, format="csv", key="key")
    write(opened(sink_of(flow)), numbered(flow, pa.record_batch({"key": keys})))
    wanted = [[message.key() for message in each] for each in found(broker.address, theirs, 500, 5)]
    got = [[message.key() for message in each] for each in found(broker.address, ours, 500, 5)]
    assert got == wanted
    assert all(got)


# ---- exactly once


def test_two_writers_at_once_write_each_record_once_and_in_order(broker: Broker, new_topic: NewTopic) -> None:
    """Writers with the producer id of one partition write the same output from different positions, with different cuts,
    while their connections are closed in the middle of requests."""
    topic, total, partitions = new_topic(3), 60_000, 3
    flow = raw(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    rows = pa.concat_batches([numbered(flow, counted(first, 1000), operator) for first in range(0, total, 1000)])
    stop = threading.Event()
    conflicts: list[Any] = []
    errors: list[Exception] = []
    writers: list[KafkaSink] = []
    sent: list[Any] = []

    def noted(read_back: Callable[[Any], None], partitions: Any) -> None:
        if isinstance(partitions, list):  # not where a primary begins
            conflicts.append(partitions)
        read_back(partitions)

    def copy(which: int) -> None:
        random, at, acked = np.random.default_rng(which), 0, 0
        mine = opened(shared)
        writers.append(mine)
        mine._read_back = partial(noted, mine._read_back)  # type: ignore[method-assign]
        while at < total:
            count = min(int(random.integers(1, 700)), total - at)
            if random.random() < 0.5:  # sent ahead, and now and then cut otherwise when it is written
                with suppress(Exception):
                    sent.append(mine.send(rows.slice(at, count), Position(0, at)))
                count = max(1, count // int(random.choice([1, 1, 1, 2])))
            try:
                mine.write(rows.slice(at, count), Position(0, at))
                at += count
                acked = at
                if random.random() < 0.02:  # another primary, who knows of less
                    while True:
                        try:
                            mine.open(_context())
                            break
                        except (OSError, Passing):
                            time.sleep(0.01)
                    at = int(random.integers(max(0, acked - 3000), acked + 1))
            except Exception as error:
                if not mine.is_transient(error):
                    errors.append(error)
                    raise
                time.sleep(0.005)
        mine.close()

    def cut() -> None:
        random = np.random.default_rng(9)
        while not stop.wait(float(random.exponential(0.03))):
            for each in writers:
                for connection in list(each._client._connections.values()):
                    connection.abort()

    threads = [threading.Thread(target=copy, args=(which,)) for which in (0, 1)]
    cutter = threading.Thread(target=cut)
    for thread in [*threads, cutter]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    cutter.join()
    assert not errors
    assert len(conflicts) > 5, "they must get into each other's way"
    assert sum(bool(files) for files in sent) > 20, "much must have been sent ahead"
    got = found(broker.address, topic, total, partitions)
    for partition, messages in enumerate(got):
        assert numbers(messages) == list(range(partition, total, partitions))


def _context() -> Any:
    from flux.dataflow.sink import SinkContext

    return SinkContext("query", 0, "stage", 0, 1)


def test_a_new_primary_goes_on_behind_what_the_broker_has(broker: Broker, topic: str) -> None:
    flow = raw(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    first, second = (numbered(flow, counted(at, 100), operator) for at in (0, 100))
    old = opened(shared)
    write(old, first)
    write(old, second.slice(0, 30))
    new = opened(shared)
    write(new, first.slice(50))
    write(new, second)
    write(old, second.slice(30))  # the old one is late, and cuts otherwise
    write(old, second)
    assert numbers(found(broker.address, topic, 200)[0]) == list(range(200))


def test_where_to_go_on_is_found_in_the_log_as_well(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers that do not answer DescribeProducers need this; here records of others lie between ours."""
    monkeypatch.setattr(producing.ProducerClient, "_described", lambda *_: None)
    monkeypatch.setattr(producing, "_BACK", 5)
    flow = raw(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    rows = numbered(flow, counted(0, 300), operator)
    write(opened(shared), rows.slice(0, 100))
    send(broker.address, topic, [b"99999"] * 2000)
    new = opened(shared)
    assert new._told == {0: 100}
    write(new, rows)
    ours = [number for number in numbers(found(broker.address, topic, 2300)[0]) if number < 1000]
    assert ours == list(range(300))


def test_nothing_is_counted_before_all_replicas_of_the_broker_have_it(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = raw(topic, broker)
    shared = sink_of(flow)
    write(opened(shared), numbered(flow, counted(0, 10)))
    ends = producing.ProducerClient._ends
    lag = [3]

    def behind(self: Any, leader: Any, topic: str, partitions: Any, who: int) -> Any:
        got = ends(self, leader, topic, partitions, who)
        if who == producing._CONSUMER and lag[0]:
            lag[0] -= 1
            return {each: offset - 1 for each, offset in got.items()}
        return got

    monkeypatch.setattr(producing.ProducerClient, "_ends", behind)
    opened(shared)
    assert lag == [0]
    monkeypatch.setattr(producing, "_FOLLOW_S", 0.05)
    lag[0] = 10**6
    with pytest.raises(Passing, match="lag behind"):
        opened(shared)


def test_sequences_go_on_behind_two_to_the_31(broker: Broker, topic: str) -> None:
    flow = raw(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    operator.restore({"counts": np.array([SEQUENCES - 50]), "turn": 0})
    rows = numbered(flow, counted(0, 100), operator)
    first = opened(shared)
    write(first, rows.slice(0, 70))
    second = opened(shared)
    assert second._told == {0: 20}
    write(second, rows.slice(10))
    assert numbers(found(broker.address, topic, 100)[0]) == list(range(100))


def test_a_query_that_starts_again_uses_the_same_ids(broker: Broker, topic: str) -> None:
    flow = raw(topic, broker)
    first = flow.sink
    kept = json.loads(json.dumps(first.prepare(2, None)))
    assert len(set(kept["ids"])) == 2
    rows = numbered(flow, counted(0, 50))
    write(opened(first, partitions=2), rows)
    later = raw(topic, broker)
    assert later.sink.prepare(2, kept) == kept
    write(opened(pickle.loads(pickle.dumps(later.sink)), partitions=2), rows)
    assert numbers(found(broker.address, topic, 50)[0]) == list(range(50))


def test_what_does_not_fit_a_checkpoint_is_refused(broker: Broker, new_topic: NewTopic) -> None:
    topic, other = new_topic(2), new_topic(2)
    kept = raw(topic, broker).sink.prepare(2, None)
    with pytest.raises(UsageError, match=f"'{topic}' .* not '{other}'"):
        raw(other, broker).sink.prepare(2, kept)
    with pytest.raises(UsageError, match=r"partitions=2\), or another"):
        raw(topic, broker).sink.prepare(3, kept)
    with pytest.raises(UsageError, match=r"topic_partitions=2\)"):
        raw(topic, broker, topic_partitions=1).sink.prepare(2, kept)
    with pytest.raises(UsageError, match="cluster"):
        raw(topic, broker).sink.prepare(2, {**kept, "cluster": "another"})
    careless = raw(topic, broker, guarantee="at_least_once").sink.prepare(2, None)
    with pytest.raises(UsageError, match="at least once: where it was is not known"):
        raw(topic, broker).sink.prepare(2, careless)
    assert raw(topic, broker, guarantee="at_least_once").sink.prepare(2, kept) == kept
    with pytest.raises(UsageError, match="not prepared"):
        opened(raw(topic, broker).sink)


def test_nothing_is_lost_or_doubled_while_the_broker_is_killed(broker: Broker, new_topic: NewTopic) -> None:
    """Writers with and without transactions write at the same time."""
    total, step = {"exactly_once": 16_000, "transactional": 1600}, {"exactly_once": 200, "transactional": 50}
    topics = {kind: new_topic(2) for kind in total}
    progress = dict.fromkeys(total, 0)

    def run(kind: str, writer: KafkaSink, rows: pa.RecordBatch) -> None:
        random = np.random.default_rng(3)
        while (at := progress[kind]) < total[kind]:
            count = min(int(random.integers(1, step[kind])), total[kind] - at)
            write(writer, rows.slice(at, count), limit_s=120)
            progress[kind] += count

    threads = []
    for kind, topic in topics.items():
        flow = raw(topic, broker, guarantee=kind)
        shared, operator = sink_of(flow), operator_of(flow)
        rows = numbered(flow, counted(0, total[kind]), operator)
        threads.append(threading.Thread(target=run, args=(kind, opened(shared), rows)))
    for thread in threads:
        thread.start()
    while any(progress[kind] < total[kind] // 3 for kind in total):
        assert all(thread.is_alive() or progress[each] for thread, each in zip(threads, total, strict=True))
        time.sleep(0.001)
    broker.kill()
    time.sleep(0.3)
    assert progress["transactional"] < total["transactional"]
    broker.start()
    for thread in threads:
        thread.join()
    for kind, topic in topics.items():
        got = found(broker.address, topic, total[kind], 2)
        assert [numbers(each) for each in got] == [list(range(first, total[kind], 2)) for first in range(2)]


def test_acknowledged_records_that_are_gone_end_the_query(broker: Broker, topic: str) -> None:
    flow = raw(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    rows = numbered(flow, counted(0, 100), operator)
    write(opened(shared), rows.slice(0, 40))
    with pytest.raises(DataLost, match=f"partition 0 of topic '{topic}' has lost the last 20 records"):
        write(opened(shared), rows.slice(60))


def test_a_producer_that_the_broker_has_forgotten_goes_on(broker: Broker, topic: str) -> None:
    """After producer.id.expiration.ms the broker knows nothing of the id, though by the state of the stage it has written."""
    flow = raw(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    operator.restore({"counts": np.array([1000]), "turn": 0})
    write(opened(shared), numbered(flow, counted(1000, 100), operator))
    assert numbers(found(broker.address, topic, 100)[0]) == list(range(1000, 1100))


def test_a_query_that_starts_again_finds_itself_in_the_log_where_the_broker_has_forgotten_it(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = raw(topic, broker)
    rows = numbered(flow, counted(0, 100))
    send(broker.address, topic, [b"1000"] * 10)
    kept = flow.sink.prepare(1, None)
    assert kept["since"] == [10]
    write(opened(flow.sink), rows.slice(0, 60))
    monkeypatch.setattr(
        producing.ProducerClient,
        "_described",
        lambda self, leader, topic, partitions, producer: dict.fromkeys(partitions),
    )
    assert opened(flow.sink)._told == {0: None}, (
        "within a query it does not look: there it is an expensive way to learn nothing"
    )
    again = raw(topic, broker)
    again.sink.prepare(1, kept)
    later = opened(again.sink)
    assert later._told == {0: 60}
    write(later, rows)
    assert numbers(found(broker.address, topic, 110)[0])[10:] == list(range(100))


# ---- at least once


def test_at_least_once_tells_readers_what_came_twice(broker: Broker, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    flow = raw(topic, broker, guarantee="at_least_once", headers="h")
    assert guarantee(flow.sink) == "at least once"
    given = pa.array([[("a", "x")], None, []], pa.map_(pa.string(), pa.string()))
    rows = pa.record_batch({"value": pa.array([b"0", b"1", b"2"]), "h": given})
    for _ in range(2):
        write(opened(sink_of(flow)), numbered(flow, rows))
    got = found(broker.address, topic, 6, 2)
    told = [[(message.value(), dict(message.headers())) for message in each] for each in got]
    ours = {"flux-partition": b"0"}
    once = [
        [(b"0", {"a": b"x", **ours, "flux-sequence": b"0"}), (b"2", {**ours, "flux-sequence": b"1"})],
        [(b"1", {**ours, "flux-sequence": b"0"})],
    ]
    assert told == [each * 2 for each in once]


@pytest.mark.parametrize("guarantee", ["exactly_once", "transactional"])
def test_a_topic_that_has_more_than_an_older_copy_of_a_location_knows_of_is_noticed(
    broker: Broker, new_topic: NewTopic, guarantee: str
) -> None:
    topic = new_topic(2)
    flow = raw(topic, broker, guarantee=guarantee)
    shared, operator = sink_of(flow), operator_of(flow)
    first = opened(shared)
    write(first, numbered(flow, counted(0, 20), operator))
    older, snapshot = operator.note_of_output(), operator.snapshot()  # type: ignore[attr-defined]
    write(first, numbered(flow, counted(20, 15), operator))
    newest = operator.note_of_output()  # type: ignore[attr-defined]
    assert (sum(older), sum(newest)) == (20, 35)
    first.close()
    opened(shared).recovered(2, newest)
    restored = opened(shared)
    with pytest.raises(SinkAhead, match=rf"partition 0 of topic '{topic}' has {newest[0]} .* knows of {older[0]}"):
        restored.recovered(1, older)
    again = operator_of(flow)
    again.restore(snapshot)
    assert again.note_of_output() == older, "it is part of the state"  # type: ignore[attr-defined]


@pytest.mark.parametrize("guarantee", ["exactly_once", pytest.param("transactional", marks=pytest.mark.long)])
def test_the_sink_keeps_the_contract_of_sinks(broker: Broker, new_topic: NewTopic, guarantee: str) -> None:
    topic = new_topic(2)
    flow = raw(topic, broker, guarantee=guarantee)

    def batches(partition: int) -> list[pa.RecordBatch]:
        operator = operator_of(flow, partition)
        return [numbered(flow, counted(100 * at + 10 * partition, 10), operator) for at in range(4)]

    check_sink(flow.sink, batches, lambda: [(value,) for value in values(everything(broker.address, topic, 2))])


# ---- refusals


def test_a_record_that_is_too_large_is_named_with_its_limit(broker: Broker, new_topic: NewTopic) -> None:
    topic = new_topic(1, max_message_bytes=20_000)
    flow = raw(topic, broker)
    writer, operator = opened(sink_of(flow)), operator_of(flow)
    write(writer, numbered(flow, counted(0, 3000, 32), operator))  # cut smaller, until it fits
    assert numbers(found(broker.address, topic, 3000)[0]) == list(range(3000))
    huge = pa.record_batch({"value": pa.array([b"x" * 30_000], pa.binary())})
    with pytest.raises(
        KafkaError, match=rf"partition 0 of topic '{topic}': a record takes 30,0\d\d bytes.* 20,000 bytes"
    ):
        write(writer, numbered(flow, huge, operator))


@pytest.mark.parametrize("guarantee", ["exactly_once", "transactional"])
def test_a_record_that_is_larger_than_a_segment_is_named_with_that_limit(
    broker: Broker, new_topic: NewTopic, guarantee: str
) -> None:
    topic = new_topic(1, max_message_bytes=4_000_000, segment_bytes=1 << 20)
    flow = raw(topic, broker, guarantee=guarantee)
    writer = opened(sink_of(flow))
    huge = pa.record_batch({"value": pa.array([b"x" * 2_000_000], pa.binary())})
    with pytest.raises(
        KafkaError, match=r"takes 2,000,\d\d\d bytes.*the limit of the topic \(segment\.bytes\) is 1,048,576"
    ):
        write(writer, numbered(flow, huge))
    writer.close()


def test_a_record_of_30_mb_is_written_where_the_topic_takes_it(broker: Broker, new_topic: NewTopic) -> None:
    topic = new_topic(1, max_message_bytes=40_000_000)
    flow = raw(topic, broker)
    rows = pa.record_batch({"value": pa.array([b"a", b"x" * 30_000_000, b"b"], pa.binary())})
    write(opened(sink_of(flow)), numbered(flow, rows))
    assert [len(value) for value in values(received(broker.address, topic, 3))] == [1, 30_000_000, 1]


def test_a_topic_that_is_deleted_ends_the_query(
    broker: Broker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka.admin import AdminClient

    monkeypatch.setattr(sink_module, "GONE_S", 0.5)
    topic = new_topic(1)
    flow = raw(topic, broker)
    writer, operator = opened(sink_of(flow)), operator_of(flow)
    write(writer, numbered(flow, counted(0, 10), operator))
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.delete_topics([topic])[topic].result(30)
    with pytest.raises(KafkaError, match=f"no topic '{topic}'"):
        write(writer, numbered(flow, counted(10, 10), operator))


def test_who_may_not_write_is_told_what_is_missing(broker: Broker, topic: str) -> None:
    secured = {
        "security_protocol": "SASL_SSL", "ssl_cafile": str(broker.certificate), "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "admin", "sasl_plain_password": PASSWORD,
    }  # fmt: skip
    flow = ended(topic, broker.secure, format="raw", **secured)
    shared = sink_of(flow)
    write(opened(shared), numbered(flow, counted(0, 10)))
    shared._security.options["sasl_plain_username"] = GUEST
    with pytest.raises((NotPermitted, Passing), match=topic) as error:
        opened(shared)
    assert PASSWORD not in str(error.value)
    assert len(received(broker.address, topic, 10)) == 10


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"guarantee": "maybe"}, "exactly_once, at_least_once, transactional"),
        ({"format": "parquet"}, "raw, json, csv, avro"),
        ({"compression": "brotli"}, "gzip, snappy, lz4, zstd"),
        ({"partitioner": "crc32"}, "murmur2, round_robin"),
        ({"key": 3}, "key must be the name of a column"),
        ({"format": "raw", "value": ["a", "b"]}, "takes the value from one column"),
        ({"topic_partitions": 2}, "must be 1 to 1"),
        ({"sasl_user": "x"}, "no option 'sasl_user'"),
    ],
)
def test_wrong_options_are_told_where_the_flow_is_made(
    broker: Broker, topic: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        ended(topic, broker.address, **options)


def test_a_topic_that_is_not_there_is_told_at_once(broker: Broker) -> None:
    with pytest.raises(UsageError, match="has no topic 'nowhere'"):
        ended("nowhere", broker.address)


def test_records_of_others_in_the_topic_are_left_alone(broker: Broker, topic: str) -> None:
    """Record batches without a producer id, in our partition, do not count as ours."""
    from flux.connectors.kafka.records.encoder import encode

    flow = raw(topic, broker)
    shared = sink_of(flow)
    alien = encode(None, pa.array([b"1000"]), np.zeros(1, np.int64)).data.to_pybytes()
    rows = numbered(flow, counted(0, 20))
    writer = opened(shared)
    write(writer, rows.slice(0, 10))
    assert put(broker.address, topic, alien)[0] == 0
    write(opened(shared), rows)
    assert numbers(found(broker.address, topic, 21)[0]) == [*range(10), 1000, *range(10, 20)]
