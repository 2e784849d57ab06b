"""Tentative records are written beside the stable ones, and when they are void no key has one as its newest record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import flux
from flux.connectors.kafka.errors import KafkaError
from flux.connectors.kafka.write.sink import KafkaSink
from flux.errors import UsageError
from tests.kafka.broker import Broker, create_topic
from tests.kafka.topics import WAIT_S
from tests.kafka.written import everything, numbered, opened, operator_of, sink_of, write

NewTopic = Callable[..., str]
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


def rows(*given: tuple[str | None, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": k, "n": n} for k, n in given], schema=SCHEMA)


@flux.stage(partitions=1)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def ended(topic: str, broker: Broker, **options: Any) -> Any:
    source = flux.source(lambda partition, start: iter(()), "k string, n bigint", partitions=1)
    return flux.to_kafka(passed(source), topic, broker.address, key="k", value="n", **options)


def two_topics(broker: Broker, new_topic: NewTopic, partitions: int = 2) -> str:
    topic = new_topic(partitions)
    create_topic(broker.address, f"{topic}.tentative", partitions)
    return topic


def newest(broker: Broker, topic: str) -> dict[Any, Any]:
    """Read, for each key, the value of the newest record and the header that marks it."""
    found = {}
    for message in everything(broker.address, topic, 2):
        mark = dict(message.headers() or []).get("flux-tentative")
        value = message.value()
        found[message.key()] = (None if value is None else json.loads(value)["n"], mark)
    return found


def patiently(sink: Any, call: Callable[[], None]) -> None:
    """Repeat a call, as a worker does it: brokers need a moment for a new topic."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return call()
        except Exception as error:
            if not sink.is_transient(error) or time.monotonic() > end:
                raise
            time.sleep(0.02)


def show(sink: Any, batch: pa.RecordBatch, through: int) -> None:
    patiently(sink, lambda: sink.tentative(batch, through))


def given_rows(flow: Any, operator: Any, *given: tuple[str | None, int]) -> pa.RecordBatch:
    """Rows as they come to the sink: a shadow numbers them with a copy of the operator."""
    return numbered(flow, rows(*given), operator)


def test_a_topic_of_its_own_has_tentative_rows_and_then_tombstones(broker: Broker, new_topic: NewTopic) -> None:
    topic = two_topics(broker, new_topic)
    flow = ended(topic, broker, tentative="topic")
    assert repr(flow.sink).endswith(f"(tentative rows in topic {topic}.tentative)")
    sink, operator = opened(sink_of(flow)), operator_of(flow)
    write(sink, given_rows(flow, operator, ("a", 1), ("b", 2)))
    show(sink, given_rows(flow, operator_of(flow), ("a", 10), ("c", 30), (None, 5)), 100)
    show(sink, given_rows(flow, operator_of(flow), ("d", 40)), 200)
    assert newest(broker, f"{topic}.tentative") == {b"a": (10, b"row"), b"c": (30, b"row"), b"d": (40, b"row")}
    sink.undo(0, 100)
    write(sink, given_rows(flow, operator, ("a", 11)))
    shown = {b"a": (None, b"undo"), b"c": (None, b"undo"), b"d": (40, b"row")}
    assert newest(broker, f"{topic}.tentative") == shown
    sink.corrected(200)
    assert newest(broker, f"{topic}.tentative") == shown | {b"d": (None, b"undo")}
    assert newest(broker, topic) == {b"a": (11, None), b"b": (2, None)}
    sink.close()


def test_the_next_primary_takes_back_the_records_of_a_lost_one_and_no_others(
    broker: Broker, new_topic: NewTopic
) -> None:
    topic = two_topics(broker, new_topic)
    flow = ended(topic, broker, tentative="topic", guarantee="at_least_once")
    pattern = sink_of(flow)
    lost, other = opened(pattern), opened(pattern, 1, 2)
    show(lost, given_rows(flow, operator_of(flow), *((f"a{n}", n) for n in range(50))), 100)
    lost.undo(None, None)
    show(lost, given_rows(flow, operator_of(flow), ("a1", 7), ("a2", 8)), 100)
    show(other, given_rows(flow, operator_of(flow), ("b", 9)), 100)
    heir = opened(pattern)
    patiently(heir, lambda: heir.undo(None, None))
    found = newest(broker, f"{topic}.tentative")
    assert {key for key, (value, _) in found.items() if value is not None} == {b"b"}
    count = len(everything(broker.address, f"{topic}.tentative", 2))
    heir.undo(None, None)
    assert len(everything(broker.address, f"{topic}.tentative", 2)) == count, "an undo that comes twice writes nothing"
    for sink in (lost, other, heir):
        sink.close()


@pytest.mark.parametrize("guarantee", ["exactly_once", "transactional"])
def test_headers_mark_tentative_rows_in_the_topic_and_the_stable_one_comes_again(
    guarantee: str, broker: Broker, new_topic: NewTopic
) -> None:
    topic = new_topic(2)
    flow = ended(topic, broker, tentative="headers", guarantee=guarantee)
    sink, operator = opened(sink_of(flow)), operator_of(flow)
    write(sink, given_rows(flow, operator, ("a", 1)))
    show(sink, given_rows(flow, operator_of(flow), ("a", 10), ("c", 30)), 100)
    assert newest(broker, topic) == {b"a": (10, b"row"), b"c": (30, b"row")}
    sink.undo(0, 100)
    assert newest(broker, topic) == {b"a": (1, b"undo"), b"c": (None, b"undo")}
    write(sink, given_rows(flow, operator, ("c", 31)))
    assert newest(broker, topic) == {b"a": (1, b"undo"), b"c": (31, None)}
    sink.close()


def test_a_retraction_that_could_not_be_written_is_owed(
    broker: Broker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = two_topics(broker, new_topic)
    flow = ended(topic, broker, tentative="topic")
    sink = opened(sink_of(flow))
    show(sink, given_rows(flow, operator_of(flow), ("a", 10)), 100)
    with monkeypatch.context() as patched:
        patched.setattr(sink._showing._client, "begin", lambda *_: (_ for _ in ()).throw(ConnectionError("away")))
        with pytest.raises(ConnectionError):
            sink.undo(0, 100)
    assert newest(broker, f"{topic}.tentative") == {b"a": (10, b"row")}
    sink.undo(0, 100)
    assert newest(broker, f"{topic}.tentative") == {b"a": (None, b"undo")}
    sink.close()


def test_tentative_records_that_could_not_be_taken_back_are_refused(broker: Broker, new_topic: NewTopic) -> None:
    topic = two_topics(broker, new_topic)
    source = flux.source(lambda partition, start: iter(()), "k string, n bigint", partitions=1)
    for options, problem in (
        ({"key": "k", "tentative": "both"}, "tentative must be one of topic, headers; got 'both'"),
        ({"tentative": "topic"}, "needs key=: a record takes the place of an earlier one"),
        (
            {"key": "k", "tentative": "topic", "partitioner": "round_robin"},
            "needs the records of a key in one partition",
        ),
    ):
        with pytest.raises(UsageError, match=problem):
            flux.to_kafka(passed(source), topic, broker.address, **options)
    with pytest.raises((KafkaError, UsageError), match="tentative"):
        flux.to_kafka(passed(source), new_topic(1), broker.address, key="k", tentative="topic", timeout=1)
    assert not isinstance(ended(topic, broker).sink.tentative, type(None))
    assert type(ended(topic, broker).sink) is KafkaSink
