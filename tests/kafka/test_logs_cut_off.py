"""A log that was cut off at its end, or made anew: the next records have offsets that other records had, so they are another
generation, and all lives of a reader number them alike."""

from __future__ import annotations

import uuid
from typing import Any, cast

import pytest

from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import UNKNOWN, LogPosition, text_of
from flux.connectors.kafka.errors import DataLost
from flux.connectors.kafka.read.fetch_thread import Fetcher
from flux.connectors.kafka.read.partition_reader import ReadOptions, TopicPartitionReader, kafka_schema

OLD, NEW, NEWER = (text_of(uuid.UUID(int=number)) for number in (1, 2, 3))


class Fetches:
    def add(self, reader: TopicPartitionReader) -> None: ...

    def remove(self, reader: TopicPartitionReader) -> None: ...


def reader_of(
    start: LogPosition,
    newest: LogPosition | None,
    first: int,
    end: int,
    strict: bool = False,
    least_generation: int = 0,
) -> TopicPartitionReader:
    """Make the reader of a log that has these ends."""
    how = ReadOptions([("nowhere", 1)], Security({}), kafka_schema(False), fail_on_data_loss=strict)
    made: Any = TopicPartitionReader(how, "clicks", 0, start, None, cast(Fetcher, Fetches()), newest, least_generation)
    made._first_offset, made._end_offset = lambda *of: first, lambda: end
    made._client.forget, made._client.partitions = lambda: None, lambda topics, limit: {"clicks": [0]}
    return cast(TopicPartitionReader, made)


def place_of(reader: TopicPartitionReader) -> LogPosition:
    return LogPosition(reader.next_offset, reader.topic_id, reader.generation, reader.began)


def test_a_log_that_was_cut_off_is_another_generation_that_begins_there() -> None:
    reader = reader_of(LogPosition(100, OLD), None, 0, 50)
    reader.go_on_in_range()
    assert place_of(reader) == LogPosition(50, OLD, 1, 50)
    assert LogPosition.of(place_of(reader).position) == place_of(reader)


def test_a_life_that_begins_before_the_cut_goes_on_behind_it_though_the_log_has_grown() -> None:
    """Another replica has rows of the second generation: it would drop offsets 81 to 200 of the first."""
    newest = LogPosition(60, OLD, 1, 50)
    for start in (LogPosition(0, OLD).at(81, [81, OLD], newest), LogPosition(0, OLD).at(81, None, newest)):
        reader = reader_of(start, newest, 0, 200)
        reader.go_on_in_range()
        assert place_of(reader) == LogPosition(50, OLD, 1, 50)
    with pytest.raises(DataLost, match=r"offset 81 was to be read next.*fail_on_data_loss=False goes on"):
        reader_of(LogPosition(81, OLD), newest, 0, 200, strict=True)


@pytest.mark.parametrize(
    ("start", "newest"),
    [
        (
            LogPosition(30, OLD),
            LogPosition(60, OLD, 1, 50),
        ),  # 30 to 49 are of the first generation, and the others are not
        (LogPosition(81, OLD), LogPosition(60, OLD, 2, 50)),  # where the second generation begins is not known
        (LogPosition(81), LogPosition(60, OLD, 1, 50)),
    ],
)
def test_records_whose_generation_is_not_known_end_the_reading(start: LogPosition, newest: LogPosition) -> None:
    with pytest.raises(DataLost, match=r"'clicks', partition 0: the log was cut off at offset 50.*checkpointLocation"):
        reader_of(start, newest, 0, 200)


def test_a_new_topic_that_was_cut_off_cannot_be_numbered_as_before() -> None:
    reader = reader_of(LogPosition(81, OLD), LogPosition(60, NEW, 2, 50), 0, 200)
    with pytest.raises(DataLost, match="cut off at offset 50"):
        reader.go_on_in(NEW)
    reader = reader_of(LogPosition(81, OLD), LogPosition(60, NEW, 2, 50), 55, 200)
    reader.go_on_in(NEW)
    assert place_of(reader) == LogPosition(55, NEW, 2, 50), "only the last generation is left"


def test_no_generation_is_begun_twice() -> None:
    reader = reader_of(LogPosition(81, OLD), LogPosition(60, NEW, 1), 0, 10)
    reader.go_on_in_range()
    assert place_of(reader) == LogPosition(10, OLD, 2, 10)
    reader.go_on_in(NEWER)
    assert place_of(reader) == LogPosition(0, NEWER, 3)


def test_a_topic_that_a_second_start_finds_anew_is_behind_the_orders_of_the_first() -> None:
    """Checkpoints have positions of the first topic only, and the orders have rows of the second one."""
    reader = reader_of(LogPosition(81, OLD), LogPosition(81, OLD), 0, 10, least_generation=2)
    reader.go_on_in(NEWER)
    assert place_of(reader) == LogPosition(0, NEWER, 2)
    reader = reader_of(LogPosition(81, OLD), LogPosition(7, NEWER, 2), 0, 10, least_generation=2)
    reader.go_on_in(NEWER)
    assert place_of(reader) == LogPosition(0, NEWER, 2), "another life has come to it"


@pytest.mark.parametrize("begin", [LogPosition(30, NEW), LogPosition(30, NEWER)])
def test_a_query_that_begins_again_under_another_topic_knows_its_generation(begin: LogPosition) -> None:
    """Kept in a checkpoint location, the start has the id of the topic that is there when the query starts again."""
    newest = LogPosition(60, NEW, 1)
    start = begin.at(0, None, newest)
    assert place_of(reader_of(start, newest, 0, 200)) == LogPosition(0, NEW, 1)
    assert begin.at(60, [60, OLD], newest) == LogPosition(60, OLD)
    assert LogPosition(30, OLD).at(0, None, None) == LogPosition(30, OLD)
    assert begin.at(0, None, LogPosition(9, UNKNOWN, 1)).topic_id == UNKNOWN
