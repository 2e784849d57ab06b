"""A log that was cut off at its end, or made anew: the next records have offsets that other records had, so they are another
generation, and all lives of a reader number them alike."""

from __future__ import annotations

import uuid
from typing import Any, cast

import pytest

from flux.kafka.errors import DataLost
from flux.kafka.fetcher import Fetcher
from flux.kafka.reading import Reading, TopicPartitionReader, kafka_schema
from flux.kafka.security import Security
from flux.kafka.topic_ids import UNKNOWN, Place, text_of

OLD, NEW, NEWER = (text_of(uuid.UUID(int=number)) for number in (1, 2, 3))


class Fetches:
    def add(self, reader: TopicPartitionReader) -> None: ...

    def remove(self, reader: TopicPartitionReader) -> None: ...


def reader_of(start: Place, newest: Place | None, first: int, end: int, strict: bool = False) -> TopicPartitionReader:
    """The reader of a log that has these ends."""
    how = Reading([("nowhere", 1)], Security({}), kafka_schema(False), fail_on_data_loss=strict)
    made: Any = TopicPartitionReader(how, "clicks", 0, start, None, cast(Fetcher, Fetches()), newest)
    made._first_offset, made._end_offset = lambda *of: first, lambda: end
    made._client.forget, made._client.partitions = lambda: None, lambda topics, limit: {"clicks": [0]}
    return cast(TopicPartitionReader, made)


def place_of(reader: TopicPartitionReader) -> Place:
    return Place(reader.next_offset, reader.topic_id, reader.generation, reader.began)


def test_a_log_that_was_cut_off_is_another_generation_that_begins_there() -> None:
    reader = reader_of(Place(100, OLD), None, 0, 50)
    reader.go_on_in_range()
    assert place_of(reader) == Place(50, OLD, 1, 50)
    assert Place.of(place_of(reader).position) == place_of(reader)


def test_a_life_that_begins_before_the_cut_goes_on_behind_it_though_the_log_has_grown() -> None:
    """Another replica has rows of the second generation: it would drop offsets 81 to 200 of the first."""
    newest = Place(60, OLD, 1, 50)
    for start in (Place(0, OLD).at(81, [81, OLD], newest), Place(0, OLD).at(81, None, newest)):
        reader = reader_of(start, newest, 0, 200)
        reader.go_on_in_range()
        assert place_of(reader) == Place(50, OLD, 1, 50)
    with pytest.raises(DataLost, match=r"offset 81 was to be read next.*fail_on_data_loss=False goes on"):
        reader_of(Place(81, OLD), newest, 0, 200, strict=True)


@pytest.mark.parametrize(
    ("start", "newest"),
    [
        (Place(30, OLD), Place(60, OLD, 1, 50)),  # 30 to 49 are of the first generation, and the others are not
        (Place(81, OLD), Place(60, OLD, 2, 50)),  # where the second generation begins is not known
        (Place(81), Place(60, OLD, 1, 50)),
    ],
)
def test_records_whose_generation_is_not_known_end_the_reading(start: Place, newest: Place) -> None:
    with pytest.raises(DataLost, match=r"'clicks', partition 0: the log was cut off at offset 50.*checkpointLocation"):
        reader_of(start, newest, 0, 200)


def test_a_new_topic_that_was_cut_off_cannot_be_numbered_as_before() -> None:
    reader = reader_of(Place(81, OLD), Place(60, NEW, 2, 50), 0, 200)
    with pytest.raises(DataLost, match="cut off at offset 50"):
        reader.go_on_in(NEW)
    reader = reader_of(Place(81, OLD), Place(60, NEW, 2, 50), 55, 200)
    reader.go_on_in(NEW)
    assert place_of(reader) == Place(55, NEW, 2, 50), "only the last generation is left"


def test_no_generation_is_begun_twice() -> None:
    reader = reader_of(Place(81, OLD), Place(60, NEW, 1), 0, 10)
    reader.go_on_in_range()
    assert place_of(reader) == Place(10, OLD, 2, 10)
    reader.go_on_in(NEWER)
    assert place_of(reader) == Place(0, NEWER, 3)


@pytest.mark.parametrize("begin", [Place(30, NEW), Place(30, NEWER)])
def test_a_query_that_begins_again_under_another_topic_knows_its_generation(begin: Place) -> None:
    """The start that a checkpoint location keeps has the id of the topic that is there when the query starts again."""
    newest = Place(60, NEW, 1)
    start = begin.at(0, None, newest)
    assert place_of(reader_of(start, newest, 0, 200)) == Place(0, NEW, 1)
    assert begin.at(60, [60, OLD], newest) == Place(60, OLD)
    assert Place(30, OLD).at(0, None, None) == Place(30, OLD)
    assert begin.at(0, None, Place(9, UNKNOWN, 1)).topic_id == UNKNOWN
