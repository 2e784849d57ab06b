"""Transactions: a reader of committed records sees each record once and together with the others of its batch, with other writers
at the same time and after any fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.connectors.kafka.client import transactions as transacting
from flux.connectors.kafka.client.cluster import Passing
from flux.connectors.kafka.client.transactions import TransactionClient
from flux.connectors.kafka.errors import KafkaError
from flux.connectors.kafka.write.transactional_sink import KafkaSinkTransactional
from flux.dataflow.sink import Position
from flux.errors import UsageError
from tests.kafka.broker import Broker
from tests.kafka.test_sink import counted, numbers
from tests.kafka.topics import WAIT_S, received
from tests.kafka.written import ended, found, numbered, opened, operator_of, write

NewTopic = Callable[..., str]


def flow_to(topic: str, broker: Broker, **options: Any) -> Any:
    return ended(topic, broker.address, format="raw", guarantee="transactional", **options)


def sink_of(flow: Any) -> KafkaSinkTransactional:
    assert isinstance(flow.sink, KafkaSinkTransactional)
    assert flow.sink.traits.exactly_once
    flow.sink.prepare(1, None)
    return flow.sink


def of(sink: Any, query: str) -> Any:
    """Open a primary under the name of a query of its own: transactional ids outlive a topic."""
    from copy import deepcopy

    from flux.dataflow.sink import SinkContext

    made, end = deepcopy(sink), time.monotonic() + WAIT_S
    while True:
        try:
            made.open(SinkContext(query, 0, "stage", 0, 1))
            return made
        except (OSError, Passing):
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_batch_appears_at_once_in_all_partitions_and_headers_and_keys_with_it(
    broker: Broker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(3)
    flow = flow_to(topic, broker, compression="zstd")
    writer, operator = of(sink_of(flow), topic), operator_of(flow)
    before_the_end: list[Any] = []
    really = TransactionClient.end

    def looked(self: TransactionClient, *args: Any, **options: Any) -> None:
        before_the_end.append(found(broker.address, topic, 0, 3))
        really(self, *args, **options)

    monkeypatch.setattr(TransactionClient, "end", looked)
    write(writer, numbered(flow, counted(0, 300), operator))
    monkeypatch.undo()
    write(writer, numbered(flow, counted(300, 600), operator))
    writer.close()
    assert before_the_end == [[[], [], []]], "nothing is seen of what is not committed"
    got = found(broker.address, topic, 900, 3)
    assert [numbers(each) for each in got] == [list(range(partition, 900, 3)) for partition in range(3)]


@pytest.mark.parametrize("where", ["add", "put_positions", "end", "behind the end"])
def test_who_takes_over_goes_on_behind_what_was_committed(
    broker: Broker, topic: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the first writer is lost in the middle of its second transaction, or after the commit, before it knows of it."""
    flow = flow_to(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    first, second, third = (numbered(flow, counted(at, 100), operator) for at in (0, 100, 200))
    lost = of(shared, topic)
    write(lost, first)
    name = "end" if where == "behind the end" else where
    really = getattr(TransactionClient, name)

    def dies(self: TransactionClient, *args: Any, **options: Any) -> None:
        if where != "end":
            really(self, *args, **options)
        raise Passing("the worker is lost here")

    with monkeypatch.context() as patched:
        patched.setattr(TransactionClient, name, dies)
        with pytest.raises(Passing, match="lost here"):
            lost.write(second, Position(0, 1))
    heir = of(shared, topic)
    for rows in (first, second, third):  # it does not know which rows have left
        write(heir, rows)
    with pytest.raises(Passing, match=r"InvalidProducerEpoch|ProducerFenced|InvalidTxnState"):
        lost._transactions.end(lost._writer, commit=True)
    heir.close()
    assert numbers(received(broker.address, topic, 300)) == list(range(300))
    assert len(found(broker.address, topic, 300)[0]) == 300


def test_the_writer_itself_goes_on_after_a_commit_that_was_not_answered(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = flow_to(topic, broker)
    writer, operator = of(sink_of(flow), topic), operator_of(flow)
    really, calls = TransactionClient.end, [0]

    def unanswered(self: TransactionClient, *args: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] % 3 != 2:
            really(self, *args, **options)
        if calls[0] % 3:
            raise ConnectionResetError("no answer")

    monkeypatch.setattr(TransactionClient, "end", unanswered)
    for at in range(0, 500, 50):
        write(writer, numbered(flow, counted(at, 50), operator))
    writer.close()
    assert calls[0] == 15, "of two batches one was committed without an answer, and one was not committed"
    assert numbers(found(broker.address, topic, 500)[0]) == list(range(500))


def test_two_writers_at_once_write_each_record_once_and_in_order(broker: Broker, new_topic: NewTopic) -> None:
    """Writers fence each other in turn, begin again at random positions, and cut otherwise."""
    topic, total, partitions = new_topic(2), 6_000, 2
    flow = flow_to(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    rows = pa.concat_batches([numbered(flow, counted(first, 1000), operator) for first in range(0, total, 1000)])
    fenced, errors, both = [0], [], threading.Barrier(2, timeout=WAIT_S)

    def copy(which: int) -> None:
        random, at = np.random.default_rng(which), 0
        mine = of(shared, topic)
        both.wait()
        while at < total:
            count = min(int(random.integers(1, 400)), total - at)
            try:
                mine.write(rows.slice(at, count), Position(0, 0))
                at += count
            except Exception as error:
                if not mine.is_transient(error):
                    errors.append(error)
                    raise
                fenced[0] += 1
                time.sleep(float(random.uniform(0, 0.1)))
                at = int(random.integers(max(0, at - 1000), at + 1))
        mine.close()

    threads = [threading.Thread(target=copy, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert fenced[0], "who has begun first is fenced by the other"
    got = found(broker.address, topic, total, partitions)
    for partition, messages in enumerate(got):
        assert numbers(messages) == list(range(partition, total, partitions))


def test_what_a_writer_leaves_open_at_its_end_does_not_hold_up_readers(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = flow_to(topic, broker)
    writer, operator = of(sink_of(flow), topic), operator_of(flow)
    with monkeypatch.context() as patched:
        patched.setattr(TransactionClient, "put_positions", _refuse)
        with pytest.raises(Passing):
            writer.write(numbered(flow, counted(0, 10), operator), Position(0, 0))
    writer.close()
    other = flow_to(topic, broker)
    write(of(sink_of(other), f"{topic}-other"), numbered(other, counted(10, 10)))
    assert numbers(received(broker.address, topic, 10)) == list(range(10, 20)), "not after a minute"


def _refuse(*_: Any, **__: Any) -> None:
    raise Passing("refused")


def test_offsets_that_the_broker_has_forgotten_are_what_all_replicas_know(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = flow_to(topic, broker)
    shared, operator = sink_of(flow), operator_of(flow)
    write(of(shared, topic), numbered(flow, counted(0, 100), operator))
    monkeypatch.setattr(TransactionClient, "positions", lambda self, topic, partitions: dict.fromkeys(partitions))
    write(of(shared, topic), numbered(flow, counted(100, 100), operator))
    assert numbers(received(broker.address, topic, 200)) == list(range(200))


def test_a_record_that_is_too_large_is_named_and_others_are_cut_until_they_fit(
    broker: Broker, new_topic: NewTopic
) -> None:
    topic = new_topic(max_message_bytes=3000)
    flow = flow_to(topic, broker)
    writer, operator = of(sink_of(flow), topic), operator_of(flow)
    write(writer, numbered(flow, counted(0, 500), operator))
    assert numbers(received(broker.address, topic, 500)) == list(range(500))
    with pytest.raises(KafkaError, match=r"a record takes .* 3,000 bytes"):
        writer.write(numbered(flow, counted(500, 1, size=4000), operator), Position(0, 1))


def test_a_query_that_goes_on_keeps_its_guarantee(broker: Broker, topic: str) -> None:
    kept = flow_to(topic, broker).sink.prepare(1, None)
    assert flow_to(topic, broker).sink.prepare(1, kept) == kept
    plain = ended(topic, broker.address, format="raw")
    with pytest.raises(UsageError, match=r"writes topic .* transactional: .* Give guarantee='transactional' to go on"):
        plain.sink.prepare(1, kept)
    with pytest.raises(UsageError, match="Give guarantee='exactly_once' to go on"):
        flow_to(topic, broker).sink.prepare(1, plain.sink.prepare(1, None))


@pytest.mark.parametrize("code", [-1, 47, 48, 49, 90, 120])
def test_an_end_of_which_nobody_knows_anything_is_followed_by_a_new_life(
    broker: Broker, topic: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one with the error of the broker that has no name, which two writers at once were seen to get."""
    flow = flow_to(topic, broker)
    writer = of(sink_of(flow), topic)
    really, codes = TransactionClient._check_step, [code]

    def told(self: TransactionClient, given: int, kind: int) -> None:
        told_by_end = writer._open and given == 0 and calls and codes
        really(self, codes.pop() if told_by_end else given, kind)

    calls: list[Any] = []
    end = TransactionClient.end
    monkeypatch.setattr(TransactionClient, "end", lambda *args, **options: (calls.append(1), end(*args, **options)))
    monkeypatch.setattr(TransactionClient, "_check_step", told)
    write(writer, numbered(flow, counted(0, 100)))
    assert codes == []
    assert numbers(found(broker.address, topic, 100)[0]) == list(range(100))


def test_brokers_that_do_not_wait_for_offsets_that_are_not_through_are_refused(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transacting, "_STABLE", 1000)
    with pytest.raises(KafkaError, match=r"needs brokers of Kafka 2\.5"):
        opened(sink_of(flow_to(topic, broker)))


def test_it_is_opened_as_others_are(broker: Broker, topic: str) -> None:
    assert opened(sink_of(flow_to(topic, broker)))._transactions.transactional_id == "flux-query-0-0"
