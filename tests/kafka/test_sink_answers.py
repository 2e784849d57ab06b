"""Reactions of the sink to each answer of a broker. The broker is a list: no socket, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.connectors.kafka.client.cluster import Passing
from flux.connectors.kafka.client.kafka_python import error_of
from flux.connectors.kafka.client.producer import SEQUENCES, TOO_LARGE, Answer, ProducerClient
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.errors import BrokerUnreachable, DataLost, KafkaError, NotPermitted
from flux.connectors.kafka.formats.text_encode import Columns
from flux.connectors.kafka.records.decoder import Decoder
from flux.connectors.kafka.write.sequence_operator import PARTITION, SEQUENCE
from flux.connectors.kafka.write.sink import KafkaSink
from flux.dataflow.sink import Position, SinkAhead

OK = 0


class Asked(list[int]):
    """The partitions of a round, without files to wait for."""

    files: tuple[int, ...] = ()


class Scripted(ProducerClient):
    """A client with a script. ``codes``: codes of the next answers, in order, then 0. ``known``: the next sequence that it
    tells of each partition. ``log``: the sent batches, as partition, first value and rows."""

    def __init__(self) -> None:
        super().__init__([("nowhere", 1)], Security({}))
        self.codes: list[int] = []
        self.known: dict[int, int | None] = {}
        self.log: list[tuple[int, int, int]] = []
        self.asked = 0

    def begin(self, topic: str, batches: Mapping[int, np.ndarray]) -> Any:
        for partition, data in batches.items():
            rows = Decoder(topic, partition).decode(pa.py_buffer(data), 0).rows
            assert rows is not None
            self.log.append((partition, int(rows["value"][0].as_py()), rows.num_rows))
        return Asked(batches)

    def is_connected(self, topic: str, partitions: Iterable[int]) -> bool:
        return True

    def finish(self, sent: Any) -> dict[int, Answer]:
        codes = {partition: self.codes.pop(0) if self.codes else OK for partition in sent}
        return {each: Answer(error_of(code) if code else None, "so it says") for each, code in codes.items()}

    def reached(self, topic: str, partitions: Iterable[int], *_: Any, **__: Any) -> dict[int, int | None]:
        self.asked += 1
        return {partition: self.known.get(partition) for partition in partitions}

    def lacks(self, topic: str) -> bool:
        return False

    def may_write(self, topic: str) -> bool:
        return True

    def limit(self, topic: str, error: str) -> str:
        return f"the limit ({TOO_LARGE[error]}) is 7 bytes"


def sink(partitions: int = 1) -> tuple[KafkaSink, Scripted]:
    made = KafkaSink(
        "clicks", [("nowhere", 1)], Security({}), Columns("raw", (), ("value",), None, None, frozenset()), partitions
    )
    broker = Scripted()
    made._connected, made._producer, made._partition = broker, 7, 0
    made._next, made._told, made._acked, made._gone_since = {}, {}, {}, None
    return made, broker


def rows(first: int, count: int, partitions: int = 1) -> pa.RecordBatch:
    numbers = np.arange(first, first + count)
    return pa.record_batch(
        {
            "value": pa.array([b"%d" % i for i in numbers], pa.binary()),
            PARTITION: pa.array((numbers % partitions).astype(np.int32)),
            SEQUENCE: pa.array(numbers // partitions),
        }
    )


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_a_partition_that_the_broker_has_whole_leaves_the_others_their_rows(whole: int) -> None:
    """New primaries send ahead rows that the primary before them has written in part."""
    made, broker = sink(3)
    made._told = {each: 2 if each == whole else 0 for each in range(3)}
    batch = rows(0, 6, 3)
    made.send(batch, Position(0, 0))
    made.write(batch, Position(0, 0))
    assert broker.log == [(each, each, 2) for each in range(3) if each != whole]
    assert made._next == {0: 2, 1: 2, 2: 2}


def test_what_the_broker_has_already_counts_as_written() -> None:
    made, broker = sink()
    broker.codes = [46]
    made.write(rows(0, 10), Position(0, 0))
    made.write(rows(0, 10), Position(0, 0))
    assert broker.log == [(0, 0, 10)]


@pytest.mark.parametrize("code", [45, 59], ids=["out of sequence", "unknown producer"])
def test_out_of_sequence_is_read_back_and_written_behind(code: int) -> None:
    made, broker = sink()
    broker.codes, broker.known = [code], {0: 6}
    made.write(rows(0, 10), Position(0, 0))
    assert broker.log == [(0, 0, 10), (0, 6, 4)]


def test_a_sequence_that_is_refused_for_no_reason_is_tried_again_later() -> None:
    made, broker = sink()
    broker.codes, broker.known = [45], {0: 0}
    with pytest.raises(Passing, match="partition 0 of topic 'clicks' does not take record 0") as error:
        made.write(rows(0, 10), Position(0, 0))
    assert made.is_transient(error.value)
    made.write(rows(0, 10), Position(0, 0))
    assert broker.log == [(0, 0, 10)] * 2


@pytest.mark.parametrize("code", [3, 6, 7, 19, 20, 56])
def test_what_passes_is_repeated_from_where_it_stopped(code: int) -> None:
    made, broker = sink(2)
    broker.codes = [OK, code]
    with pytest.raises(Passing, match="partition 1 of topic 'clicks'"):
        made.write(rows(0, 10, 2), Position(0, 0))
    made.write(rows(0, 10, 2), Position(0, 0))
    assert broker.log == [(0, 0, 5), (1, 1, 5), (1, 1, 5)], "partition 0 has it already"
    assert broker.asked == 0


def test_what_does_not_pass_comes_before_what_does() -> None:
    made, broker = sink(2)
    broker.codes = [6, 87]
    with pytest.raises(
        KafkaError, match=r"partition 1 of topic 'clicks'.*5 records: InvalidRecordError\. so it says"
    ) as error:
        made.write(rows(0, 10, 2), Position(0, 0))
    assert not made.is_transient(error.value)


def test_a_missing_permission_is_no_matter_of_time() -> None:
    made, broker = sink()
    broker.codes = [29]
    with pytest.raises(NotPermitted, match="writing 'clicks'"):
        made.write(rows(0, 1), Position(0, 0))


def test_batches_are_halved_until_they_fit() -> None:
    made, broker = sink()
    broker.codes = [10, 10]
    made.write(rows(10, 64), Position(0, 0))
    assert [first for _, first, _ in broker.log[:3]] == [10, 10, 10]
    sizes = [count for _, _, count in broker.log]
    assert sizes[0] == 64 > sizes[1] > sizes[2]
    assert sum(sizes[2:]) == 64
    broker.codes = [10]
    with pytest.raises(KafkaError, match=r"a record takes .* bytes .* 7 bytes"):
        made.write(rows(74, 1), Position(0, 0))


def test_a_broker_that_has_less_than_it_had_acknowledged_is_asked_twice() -> None:
    """Perhaps the first answer is from a broker that leads no more."""
    made, broker = sink()
    made._told = {0: 3}
    broker.known = {0: 5}
    made.write(rows(5, 5), Position(0, 0))
    assert (broker.log, broker.asked) == ([(0, 5, 5)], 1)
    made, broker = sink()
    made._told = broker.known = {0: 3}
    with pytest.raises(DataLost, match="lost the last 2 records"):
        made.write(rows(5, 5), Position(0, 0))
    assert not broker.log


@pytest.mark.parametrize("more", [0, 1, SEQUENCES // 2 - 1])
def test_a_topic_that_is_ahead_of_a_restored_location_is_noticed_before_anything_new(more: int) -> None:
    """Brokers tell sequences modulo 2^31."""
    known = SEQUENCES + 7
    made, broker = sink(3)
    made._told = {0: (known + more) % SEQUENCES, 1: None, 2: 0}
    made.write(rows(0, 1, 3).slice(0, 0), Position(0, 0))
    if more:
        with pytest.raises(SinkAhead, match=rf"partition 0 of topic 'clicks' has {known + more} .* knows of {known}"):
            made.recovered(1, [known, 5, 0])
    else:
        made.recovered(1, [known, 5, 0])
        made.recovered(1)
    assert not broker.log


def test_a_topic_that_has_less_than_a_location_knows_of_is_no_reason_to_refuse_it() -> None:
    """Rows that it lacks are written in this life, or their loss is found when the next row is written."""
    made, broker = sink()
    made._told = {0: 4}
    made.write(rows(4, 6), Position(0, 0))
    made.recovered(1, [10])
    assert broker.log == [(0, 4, 6)]


def test_a_broker_that_cannot_be_reached_is_waited_for() -> None:
    made, _ = sink()
    for error in (ConnectionRefusedError(), TimeoutError(), BrokerUnreachable("all"), Passing("moved")):
        assert made.is_transient(error)
    assert not made.is_transient(ValueError())
