"""Readers and answers of brokers: small batches that are given out together, and a reader without room. No thread, no broker."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from flux.connectors.kafka.client.cluster import Fetched
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import LogPosition
from flux.connectors.kafka.read import partition_reader as reading
from flux.connectors.kafka.read.fetch_thread import Fetcher, NothingWhole, Paused
from flux.connectors.kafka.read.partition_reader import SMALL_BYTES, ReadOptions, TopicPartitionReader, kafka_schema
from flux.connectors.kafka.records.decoder import Transactions
from flux.dataflow.source import Positioned
from tests.kafka.batches import made


class Fetches(Fetcher):
    """A fetcher that fetches nothing. It notes the readers that have got room."""

    def __init__(self) -> None:
        self.room: list[object] = []

    def add(self, reader: object) -> None: ...

    def remove(self, reader: object) -> None: ...

    def has_room(self, reader: object) -> None:
        self.room.append(reader)


@pytest.fixture
def fetches() -> Fetches:
    return Fetches()


@pytest.fixture
def reader(fetches: Fetches) -> Iterator[TopicPartitionReader]:
    opened = TopicPartitionReader(
        ReadOptions([("nowhere", 1)], Security({}), kafka_schema(False)), "clicks", 0, LogPosition(0), None, fetches
    )
    yield opened
    opened.close()


def came(reader: TopicPartitionReader, records: bytes, end: int) -> bool:
    """Give records to a reader; tell whether the log has more."""
    reader.came(Fetched(pa.py_buffer(records), end, Transactions([])))
    return reader.work_off(may_wait=False)


def one_by_one(reader: TopicPartitionReader, records: int) -> None:
    for number in range(records):
        assert came(reader, made([b"%d" % number], number), records + 1)


def taken(reader: TopicPartitionReader) -> Positioned:
    found = reader.next()
    assert found is not None
    return found


def test_small_batches_that_wait_are_given_out_together_with_the_position_behind_the_last(
    reader: TopicPartitionReader,
) -> None:
    one_by_one(reader, 10)
    got = taken(reader)
    assert got.batch.column("value").to_pylist() == [b"%d" % number for number in range(10)]
    assert got.position == 10
    assert reader.lag() == (10, 11)
    assert reader.next() is None


def test_no_more_rows_are_joined_than_the_limit(reader: TopicPartitionReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "JOINED_ROWS", 4)
    one_by_one(reader, 10)
    got = [taken(reader) for _ in range(3)]
    assert [(each.batch.num_rows, each.position) for each in got] == [(4, 4), (4, 8), (2, 10)]


def test_a_reader_has_paused_where_the_log_has_no_more_and_not_while_rows_are_on_their_way(
    reader: TopicPartitionReader,
) -> None:
    assert reader.next() is None
    assert came(reader, made([b"a"], 0), 2)
    taken(reader)
    assert reader.next() is None
    assert reader.pauses() == 0
    assert not came(reader, made([b"b"], 1), 2)
    assert reader.pauses() == 1
    reader.nothing(2)
    assert reader.pauses() == 2


def test_who_has_no_room_goes_on_when_enough_is_taken(
    reader: TopicPartitionReader, fetches: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "AHEAD_BYTES", 1)
    came(reader, made([b"a"], 0), 1)
    with pytest.raises(Paused) as pause:
        came(reader, made([b"b"], 1), 9)
    assert (pause.value.until, reader.full, reader.next_offset, fetches.room) == (None, True, 1, [])
    with pytest.raises(Paused):
        reader.work_off(may_wait=False)
    assert taken(reader).batch.column("value").to_pylist() == [b"a"]
    assert (fetches.room, reader.full) == ([reader], False)
    assert reader.work_off(may_wait=False), "the log has more"
    assert (taken(reader).batch.column("value").to_pylist(), reader.next_offset) == ([b"b"], 2)
    assert fetches.room == [reader]


def test_a_pace_is_a_pause_behind_each_batch(fetches: Fetches) -> None:
    how = ReadOptions([("nowhere", 1)], Security({}), kafka_schema(False), rows_per_second=20)
    reader = TopicPartitionReader(how, "clicks", 0, LogPosition(0), None, fetches)
    pauses = []
    while True:
        try:
            came(reader, made([b"a"] * 5, 0), 5) if not pauses else reader.work_off(may_wait=False)
            break
        except Paused as pause:
            pauses.append(pause.until or 0.0)
    assert [later - earlier for earlier, later in zip(pauses, pauses[1:], strict=False)] == pytest.approx(
        [0.1, 0.05], abs=1e-6
    )
    assert reader.next_offset == 5
    reader.close()


def test_bytes_without_a_whole_batch_are_told_apart(reader: TopicPartitionReader) -> None:
    """Such bytes may have been cut off behind the records of other partitions."""
    with pytest.raises(NothingWhole, match="no record batch that has this offset"):
        came(reader, made([b"a"], 0)[:-1], 1)
    assert reader.next_offset == 0
    came(reader, made([b"a"], 0), 1)
    assert taken(reader).position == 1


def test_large_answers_are_for_another_thread(reader: TopicPartitionReader) -> None:
    came(reader, made([b"a"], 0), 1)
    assert not reader.takes_time
    reader.came(Fetched(pa.py_buffer(made([b"a" * SMALL_BYTES], 1)), 2, Transactions([])))
    assert reader.takes_time


def test_a_reader_rings_once_when_something_has_come_that_was_asked_for_in_vain(reader: TopicPartitionReader) -> None:
    rung: list[str] = []
    reader.when_ready(lambda: rung.append("ding"))
    came(reader, made([b"a"], 0), 1)
    assert rung == [], "nobody has asked"
    assert (taken(reader).position, reader.next()) == (1, None)
    came(reader, made([b"b"], 1), 2)
    came(reader, made([b"c"], 2), 3)
    assert rung == ["ding"]
    assert (taken(reader).position, reader.next()) == (3, None)
    reader.fail(OSError("gone"))
    assert rung == ["ding", "ding"]
    with pytest.raises(OSError, match="gone"):
        reader.next()
