"""Records that do not fit their format, in a topic of their own: as they were, and none is left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from flux.connectors.kafka.client.cluster import Passing
from flux.connectors.kafka.errors import KafkaError
from flux.connectors.kafka.read.dead_letters import DeadLetters
from flux.connectors.kafka.source import KafkaReader
from flux.errors import UsageError
from tests.kafka.batches import TIME
from tests.kafka.broker import Broker
from tests.kafka.topics import offsets_behind, read_all, reader, reading, received, remake, rows, send, until
from tests.kafka.written import found


def of(topic: str, to: str, broker: Broker, **options: Any) -> KafkaReader:
    given = {"format": "json", "schema": "user BIGINT", "include": ["offset"], "bad_records": f"dead_letter:{to}"}
    return reader(topic, broker.address, **{**given, **options})


def offsets(messages: list[Any]) -> list[int]:
    return [int(dict(message.headers())["flux-offset"]) for message in messages]


def test_bad_records_keep_their_bytes_and_say_where_they_came_from(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    topic, to = new_topic(), new_topic(2)
    given = [
        (b"k\xff", b'{"user": 0}', None, TIME),
        (b"k\xff", b"\x00 no json \xff", [("trace", b"\x01"), ("none", None)], TIME + 1),
        (None, b"{", None, TIME + 2),
        (None, b'{"user": 3}', [("trace", b"\x02")], TIME + 3),
        (None, None, None, TIME + 4),
    ]
    send(broker.address, topic, given)
    with reading(of(topic, to, broker)) as batches:
        got = until(batches, 3)
        assert rows(got).to_pydict() == {"user": [0, 3, None], "offset": [0, 3, 4]}
        assert batches.bad_records() == 2
    first, second = received(broker.address, to, 2)
    assert (first.key(), first.value(), second.key(), second.value()) == (b"k\xff", b"\x00 no json \xff", None, b"{")
    assert first.headers()[:2] == [("trace", b"\x01"), ("none", None)]
    for message, offset in ((first, 1), (second, 2)):
        said = dict(message.headers())
        assert said["flux-topic"] == topic.encode()
        assert (said["flux-partition"], said["flux-offset"]) == (b"0", b"%d" % offset)
        assert said["flux-timestamp"] == b"%d" % (TIME + offset)
        assert b"one JSON object" in said["flux-error"]
        assert message.timestamp()[1] > TIME + 10**9, "a topic with a limit of age would drop it at once"


def test_partitions_keep_apart_where_there_is_room(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic, to = new_topic(3), new_topic(2)
    for partition in range(3):
        send(broker.address, topic, [b"%d" % partition, b"{}"], partition)
        read_all(of(topic, to, broker), 1, partition)
    assert [sorted(m.value() for m in messages) for messages in found(broker.address, to, 3, 2)] == [
        [b"0", b"2"],
        [b"1"],
    ]


def test_no_position_behind_a_bad_record_is_given_before_the_brokers_have_it(
    broker: Broker, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, to = new_topic(), new_topic()
    send(broker.address, topic, [b"{", b'{"user": 1}'])
    tried, open_again, really = threading.Event(), threading.Event(), DeadLetters._send

    def refusing(self: DeadLetters, *args: Any) -> bool:
        tried.set()
        if not open_again.is_set():
            raise Passing("just now not")
        return really(self, *args)

    monkeypatch.setattr(DeadLetters, "_send", refusing)
    with reading(of(topic, to, broker)) as batches:
        assert tried.wait(30)
        assert [next(batches) for _ in range(10)] == [None] * 10
        assert batches._applied_offset() is None
    assert found(broker.address, to, 0) == [[]], "the reader was lost before it was written"
    tried.clear()
    with reading(of(topic, to, broker)) as batches:
        assert tried.wait(30)
        open_again.set()
        (only,) = until(batches, 1)
        assert offsets_behind([only]) == [2]
    assert offsets(received(broker.address, to, 1)) == [0]


def test_who_reads_again_writes_again(broker: Broker, new_topic: Callable[..., str]) -> None:
    """At least once: the headers tell that it is the same."""
    topic, to = new_topic(), new_topic()
    send(broker.address, topic, [b"{", b'{"user": 1}'])
    for _ in range(2):
        read_all(of(topic, to, broker), 1)
    assert offsets(received(broker.address, to, 2)) == [0, 0]


def test_many_bad_records_fit_a_topic_with_a_low_limit(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic, to = new_topic(), new_topic(max_message_bytes=3000)
    send(broker.address, topic, [b"bad %d" % i for i in range(500)] + [b'{"user": 1}'])
    with reading(of(topic, to, broker)) as batches:
        until(batches, 1)
        assert batches.bad_records() == 500
    assert offsets(received(broker.address, to, 500)) == list(range(500))


@pytest.mark.parametrize(
    ("size", "limits", "said"),
    [
        (4000, {"max_message_bytes": 3000}, r"\(max\.message\.bytes\) is 3,000 bytes"),
        (
            2_000_000,
            {"max_message_bytes": 4_000_000, "segment_bytes": 1 << 20},
            r"\(segment\.bytes\) is 1,048,576 bytes",
        ),
    ],
)
def test_a_bad_record_that_fits_nowhere_ends_the_reading_and_names_the_limit(
    broker: Broker, new_topic: Callable[..., str], size: int, limits: dict[str, int], said: str
) -> None:
    topic, to = new_topic(max_message_bytes=4_000_000), new_topic(**limits)
    send(broker.address, topic, [b"x" * size], **{"message.max.bytes": 4_000_000})
    why = f"of topic '{topic}', partition 0 does not fit into topic '{to}'.*{said}"
    with reading(of(topic, to, broker)) as batches, pytest.raises(KafkaError, match=why):
        until(batches, 1)


def test_a_topic_for_bad_records_that_is_made_anew_gets_those_that_come(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    """Only its name and its partitions are taken from the earlier topic."""
    topic, to = new_topic(), new_topic()
    send(broker.address, topic, [b"{", b'{"user": 1}'])
    with reading(of(topic, to, broker)) as batches:
        until(batches, 1)
        remake(broker.address, to)
        send(broker.address, topic, [b"[", b'{"user": 2}'])
        until(batches, 1)
    assert offsets(received(broker.address, to, 1)) == [2]


def test_closing_does_not_wait_for_a_topic_that_takes_nothing(
    broker: Broker, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, to = new_topic(), new_topic()
    send(broker.address, topic, [b"{"])
    tried = threading.Event()

    def refusing(*_: Any) -> bool:
        tried.set()
        raise Passing("never")

    monkeypatch.setattr(DeadLetters, "_send", refusing)
    with reading(of(topic, to, broker)):
        assert tried.wait(30)
    end = time.monotonic() + 5
    while any(thread.name == "flux-kafka-fetch" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_topic_that_is_not_there_is_refused_when_the_query_is_made(broker: Broker, topic: str) -> None:
    with pytest.raises(UsageError, match="has no topic 'no-such-topic'"):
        of(topic, "no-such-topic", broker)
