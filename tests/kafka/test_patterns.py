"""Topics by pattern: those that are there, and those that come later."""

from __future__ import annotations

import re
from collections.abc import Callable

import cloudpickle
import pytest

import flux
from flux.errors import UsageError
from tests.kafka.broker import Broker, create_topic
from tests.kafka.test_reading import gone
from tests.kafka.topics import grow, reader


def test_topics_whose_whole_name_matches_are_read(broker: Broker, topic: str) -> None:
    for name in ("2", "1", "1-more"):
        create_topic(broker.address, f"{topic}.clicks-{name}", 2 if name == "1" else 1)
    expected = [(f"{topic}.clicks-1", 0), (f"{topic}.clicks-1", 1), (f"{topic}.clicks-2", 0)]
    pattern = rf"{topic}\.clicks-\d"
    for given in ({"pattern": pattern}, {"pattern": re.compile(pattern)}, {"topics": re.compile(pattern)}):
        made = flux.kafka(bootstrap=broker.address, **given)
        assert made.name == f"kafka {pattern}"
        assert made.reader.topic_partitions == expected
        assert cloudpickle.loads(cloudpickle.dumps(made.reader)).topic_partitions == expected


def test_a_pattern_leaves_out_topics_of_kafka_and_that_of_bad_records(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    bad = f"{topic}-bad"
    create_topic(broker.address, bad)
    options = {"format": "json", "schema": "a INT", "bad_records": f"dead_letter:{bad}"}
    read = reader(bootstrap=broker.address, pattern=f"{topic}.*|__.*", **options)
    assert read.topic_partitions == [(topic, 0)]
    assert read.unread() == []
    assert reader(bootstrap=broker.address, pattern=f"{topic}.*").topic_partitions == [(topic, 0), (bad, 0)]


def test_a_pattern_that_nothing_matches_is_refused(broker: Broker) -> None:
    with pytest.raises(UsageError, match=rf"{broker.address} has no topic whose whole name matches 'no-such-\.\*'"):
        flux.kafka(bootstrap=broker.address, pattern="no-such-.*")


def test_what_comes_later_is_told_and_read_by_the_next_start(broker: Broker, topic: str) -> None:
    pattern = f"{topic}.*"
    read = reader(bootstrap=broker.address, pattern=pattern)
    kept = read.prepare(None)
    assert read.unread() == []
    create_topic(broker.address, f"{topic}.a", 2)
    grow(broker.address, topic, 2)
    gone(lambda: read.unread() != [f"{topic}-1", f"{topic}.a-0", f"{topic}.a-1"])
    again = reader(bootstrap=broker.address, pattern=pattern)
    kept = again.prepare(kept)
    assert kept["partitions"] == [[topic, 0, 0], [topic, 1, 0], [f"{topic}.a", 0, 0], [f"{topic}.a", 1, 0]]
    assert again.unread() == []
    create_topic(broker.address, f"{topic}-before", 1)  # would come first by name
    gone(lambda: again.unread() != [f"{topic}-before-0"])
    last = reader(bootstrap=broker.address, pattern=pattern)
    assert last.prepare(kept)["partitions"] == [*kept["partitions"], [f"{topic}-before", 0, 0]]


def test_partitions_of_a_list_of_topics_that_come_later_are_told(broker: Broker, new_topic: Callable[..., str]) -> None:
    one, other = new_topic(), new_topic()
    read = reader([one, other], broker.address)
    grow(broker.address, other, 3)
    gone(lambda: read.unread() != [f"{other}-1", f"{other}-2"])
