"""A topic that is deleted and made anew under its name: nothing of the old one is believed of the new one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from flux.connectors.kafka.client import connection
from flux.connectors.kafka.client.cluster import FETCH_BY_ID, PRODUCE_BY_ID
from flux.connectors.kafka.client.topic_ids import GENERATION, UNKNOWN, LogPosition, differ, text_of, uuid_of
from flux.connectors.kafka.errors import DataLost
from flux.connectors.kafka.sink_options import GUARANTEES
from flux.connectors.kafka.write.sink import KafkaSink
from flux.dataflow.source import RowStart
from flux.errors import UsageError
from tests.flux.harness import ThreadQuery
from tests.kafka.broker import Broker
from tests.kafka.test_committing import soon
from tests.kafka.topics import WAIT_S, read_all, reader, reading, remake, rows, send, until
from tests.kafka.written import ended, found, numbered, opened, operator_of, values, write

NewTopic = Callable[..., str]


@pytest.fixture(params=["by id", "by name"])
def requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose the way in which brokers find topics: Kafka 2.8 to 3.0 finds them by name for reading, and up to 4.0 for writing."""
    if request.param == "by name":
        newest = {**connection._NEWEST, "Fetch": FETCH_BY_ID - 1, "Produce": PRODUCE_BY_ID - 1}
        monkeypatch.setattr(connection, "_NEWEST", newest)
    return str(request.param)


@pytest.fixture
def without_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit requests to the versions of brokers before Kafka 2.8."""
    newest = {**connection._NEWEST, "Metadata": 9, "Fetch": 11, "Produce": 8}
    monkeypatch.setattr(connection, "_NEWEST", newest)


def records(count: int, name: str) -> list[bytes]:
    return [b"%s %d" % (name.encode(), number) for number in range(count)]


def taken(table: pa.Table) -> list[Any]:
    return list(table.column("value").to_pylist())


# ---- ids and positions


def test_an_id_is_text_as_kafkas_tools_print_it() -> None:
    given = uuid.UUID("0f8fad5b-d9cb-469f-a165-70867728950e")
    assert text_of(given) == "D4-tW9nLRp-hZXCGdyiVDg"
    assert uuid_of(text_of(given)) == given
    assert text_of(None) == text_of(uuid.UUID(int=0)) == UNKNOWN
    assert uuid_of(UNKNOWN) is None
    with pytest.raises(UsageError, match="'clicks' is no id"):
        uuid_of("clicks")


def test_ids_differ_only_if_both_are_known() -> None:
    assert differ("a", "b")
    assert not differ("a", "a")
    assert not differ("a", UNKNOWN)
    assert not differ(UNKNOWN, "b")


def test_positions_of_earlier_releases_are_plain_offsets() -> None:
    topic_id = text_of(uuid.uuid4())
    for place in (LogPosition(7), LogPosition(7, topic_id)):
        assert LogPosition.of(place.position) == place
    assert LogPosition.of(7) == LogPosition(7)
    for wrong in (None, True, -1, "7", [7], [7, 8], [-1, topic_id], [True, topic_id], [7, "clicks"]):
        with pytest.raises(UsageError, match=r"no position|no id"):
            LogPosition.of(wrong)


def test_a_row_number_leads_to_the_place_in_the_topic_that_had_the_row() -> None:
    old, new = (text_of(uuid.uuid4()) for _ in range(2))
    begin = LogPosition(30, new)  # the query goes on with the topic that was made anew
    assert begin.at(0, None, LogPosition(100, old)) == LogPosition(0, old), (
        "numbers of the first generation are of the old topic"
    )
    assert LogPosition(30, old).at(0, None, LogPosition(100, old)) == LogPosition(30, old), (
        "not before the start of the query"
    )
    assert LogPosition(30, old).at(40, [45, old], LogPosition(100, old)) == LogPosition(45, old)


def test_a_row_of_a_topic_that_a_start_knows_to_be_gone_leads_to_the_new_topic() -> None:
    """Orders have rows of the first generation, and no consumer knows a position."""
    begin = LogPosition(0, text_of(uuid.uuid4()), 1)
    assert begin.at(7, None, None) == begin
    # Two starts have found another topic, and the checkpoints have positions of the first one only.
    begin, newest = begin._replace(generation=2), LogPosition(5, text_of(uuid.uuid4()))
    assert begin.at(GENERATION + 7, None, newest) == begin.at(GENERATION + 7, newest.position, newest) == begin


# ---- read


def test_a_longer_topic_that_is_made_anew_while_it_is_read_ends_the_reading(
    broker: Broker, topic: str, requests: str
) -> None:
    send(broker.address, topic, records(100, "old"))
    read = reader(topic, broker.address)
    with reading(read) as batches:
        before = LogPosition.of(until(batches, 100)[-1].position)
        remake(broker.address, topic)
        send(broker.address, topic, records(150, "new"))
        with pytest.raises(
            DataLost, match=f"'{topic}' was deleted and made anew: its id was {before.topic_id}, and is .* now"
        ):
            until(batches, 1)


def test_all_of_a_longer_topic_is_read_if_it_is_asked_for(broker: Broker, topic: str, requests: str) -> None:
    send(broker.address, topic, records(100, "old"))
    with reading(reader(topic, broker.address, fail_on_data_loss=False, group=f"of {topic}")) as batches:
        (*_, last) = until(batches, 100)
        batches.applied(last.position)
        assert batches._applied_offset() == 100
        remake(broker.address, topic)
        send(broker.address, topic, records(150, "new"))
        got = until(batches, 150)
        assert taken(rows(got)) == records(150, "new")
        assert batches._applied_offset() is None, "the offset of the old topic means nothing in the new one"
        batches.applied(got[-1].position)
        assert batches._applied_offset() == 150
    again, was = LogPosition.of(got[-1].position), LogPosition.of(last.position)
    assert (again.offset, differ(again.topic_id, was.topic_id)) == (150, True)


def test_all_lives_of_a_reader_number_the_rows_of_a_new_topic_alike(broker: Broker, topic: str) -> None:
    """Replicas may lack rows from 60 on, while others have rows of the new topic already."""
    send(broker.address, topic, records(100, "old"))
    read = reader(topic, broker.address, fail_on_data_loss=False)
    with reading(read) as batches:
        old = until(batches, 100)
        remake(broker.address, topic)
        send(broker.address, topic, records(50, "new"))
        new = until(batches, 50)
    numbers = np.concatenate([each.numbers for each in new])
    assert numbers.min() > max(each.numbers.max() for each in old)
    before, newest = LogPosition.of(old[-1].position)._replace(offset=60).position, new[-1].position
    for known in (newest, old[-1].position, before):
        with reading(read, start=RowStart(60, before, known)) as batches:
            again = until(batches, 50)
        assert taken(rows(again)) == records(50, "new")
        assert np.concatenate([each.numbers for each in again]).tolist() == numbers.tolist()
    with reading(read, start=RowStart(int(numbers[30]), before, newest)) as batches:
        assert taken(rows(until(batches, 20))) == records(50, "new")[30:]
    strict = reader(topic, broker.address)
    with reading(strict, start=RowStart(60, before, newest)) as batches, pytest.raises(DataLost, match="made anew"):
        until(batches, 1)


@pytest.mark.parametrize("count", [40, 150])
def test_a_topic_that_was_made_anew_while_nobody_read_it_ends_the_reading_or_is_read_whole(
    broker: Broker, topic: str, count: int, requests: str
) -> None:
    send(broker.address, topic, records(100, "old"))
    with reading(reader(topic, broker.address)) as batches:
        position = until(batches, 100)[-1].position
    remake(broker.address, topic)
    send(broker.address, topic, records(count, "new"))
    with reading(reader(topic, broker.address), start=position) as batches, pytest.raises(DataLost, match="made anew"):
        until(batches, 1)
    goes_on = reader(topic, broker.address, fail_on_data_loss=False)
    assert taken(read_all(goes_on, count, start=position)) == records(count, "new")


def test_a_partition_without_a_position_is_of_the_topic_that_the_checkpoint_knows(broker: Broker, topic: str) -> None:
    send(broker.address, topic, records(3, "old"))
    kept = reader(topic, broker.address, starting="latest").prepare(None)
    assert [*kept["topics"]] == [topic]
    remake(broker.address, topic)
    send(broker.address, topic, records(5, "new"))
    again = reader(topic, broker.address)
    assert again.prepare(kept) == kept
    with reading(again) as batches, pytest.raises(DataLost, match="made anew"):
        until(batches, 1)
    goes_on = reader(topic, broker.address, fail_on_data_loss=False)
    news = goes_on.prepare(kept)
    assert (news["partitions"], news["topics"] == kept["topics"]) == ([[topic, 0, 0]], False)
    assert (kept.get("generations"), news["generations"]) == (None, {topic: 1}), "orders may have rows of the old topic"
    assert goes_on.prepare(news) == news
    with reading(goes_on) as batches:
        found = until(batches, 5)
    assert taken(rows(found)) == records(5, "new")
    assert min(batch.numbers[0] for batch in found) == GENERATION


def test_a_query_begins_with_the_topic_that_is_there_when_it_starts(broker: Broker, topic: str) -> None:
    read = reader(topic, broker.address)
    remake(broker.address, topic)
    send(broker.address, topic, records(5, "new"))
    read.prepare(None)
    assert taken(read_all(read, 5)) == records(5, "new")


def test_a_new_topic_with_fewer_partitions_is_named_as_such(broker: Broker, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    read = reader(topic, broker.address, fail_on_data_loss=False)
    kept = read.prepare(None)
    remake(broker.address, topic)
    with reading(read, 1) as batches, pytest.raises(DataLost, match=r"made anew.*has 1 partitions only"):
        until(batches, 1)
    with pytest.raises(DataLost, match=r"made anew.*has no partition 1"):
        reader(topic, broker.address).prepare(kept)


def test_a_location_of_an_earlier_release_is_refused(broker: Broker, topic: str) -> None:
    """Locations of that release count records, and their numbers say nothing of offsets."""
    with pytest.raises(UsageError, match=r"counted the records of topics.*another checkpointLocation"):
        reader(topic, broker.address).prepare({"partitions": [[topic, 0, 0]]})


def test_a_position_without_an_id_is_one_of_the_topic_that_is_there(broker: Broker, topic: str) -> None:
    send(broker.address, topic, records(10, "old"))
    read = reader(topic, broker.address)
    with reading(read, start=4) as batches:
        (got,) = until(batches, 6)
    assert LogPosition.of(got.position) == LogPosition(10, read.topic_ids[topic])


@pytest.mark.usefixtures("without_ids")
def test_brokers_without_ids_are_read_and_written_as_before(broker: Broker, topic: str) -> None:
    read = reader(topic, broker.address)
    assert read.prepare(None)["topics"] == {}
    flow = ended(topic, broker.address, format="raw")
    assert isinstance(flow.sink, KafkaSink)
    kept = flow.sink.prepare(1, None)
    assert kept["topic_id"] == UNKNOWN
    write(opened(flow.sink), numbered(flow, written(0, 10)))
    with reading(read) as batches:
        (got,) = until(batches, 10)
    assert got.position == 10


class Values(list[bytes]):
    """The values that a stage has applied, in one process; ``stage`` is to be put at the end of a flow."""

    def __init__(self) -> None:
        super().__init__()
        seen = self

        class Applied(flux.Operator):
            def process(self, batch: pa.RecordBatch) -> None:
                seen.extend(batch.column("value").to_pylist())

            def snapshot(self) -> None:
                """Return None: there is no state."""

            def restore(self, snapshot: object) -> None: ...

        self.stage = flux.stage(partitions=2)(Applied)


def test_a_query_applies_each_row_of_both_topics_once(broker: Broker, topic: str) -> None:
    send(broker.address, topic, records(100, "old"))
    seen, wanted = Values(), sorted([*records(100, "old"), *records(150, "new")])
    with ThreadQuery(seen.stage(flux.kafka(topic, broker.address, fail_on_data_loss=False))) as query:
        soon(lambda: len(seen) == 100, lambda: (len(seen), query.raised))
        remake(broker.address, topic)
        send(broker.address, topic, records(150, "new"))
        soon(lambda: len(seen) >= len(wanted), lambda: (len(seen), query.raised))
        time.sleep(0.3)
    assert sorted(seen) == wanted


def test_a_query_over_a_topic_that_is_made_anew_ends_and_says_so(broker: Broker, topic: str) -> None:
    send(broker.address, topic, records(10, "old"))
    seen = Values()
    with ThreadQuery(seen.stage(flux.kafka(topic, broker.address))) as query:
        soon(lambda: len(seen) == 10, lambda: (len(seen), query.raised))
        remake(broker.address, topic)
        send(broker.address, topic, records(20, "new"))
        assert "was deleted and made anew" in str(query.error(WAIT_S))
    assert len(seen) == 10


# ---- written


def written(first: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array([b"%d" % i for i in range(first, first + count)], pa.binary())})


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_topic_that_is_made_anew_while_it_is_written_ends_the_query(
    broker: Broker, topic: str, guarantee: str, requests: str
) -> None:
    flow = ended(topic, broker.address, format="raw", guarantee=guarantee)
    assert isinstance(flow.sink, KafkaSink)
    kept = flow.sink.prepare(1, None)
    writer, operator = opened(flow.sink), operator_of(flow)
    write(writer, numbered(flow, written(0, 10), operator))
    remake(broker.address, topic)
    if guarantee == "transactional" or requests == "by name":
        time.sleep(1.1)  # a broker is asked for the id once a second
    more = numbered(flow, written(10, 10), operator)
    for _ in range(2):
        with pytest.raises(DataLost, match=f"'{topic}' was deleted and made anew.*its id was {kept['topic_id']}"):
            write(writer, more)
    writer.close()
    assert found(broker.address, topic, 0) == [[]], "nothing is written behind a hole"
    with pytest.raises(DataLost, match="made anew"):
        write(opened(flow.sink), more)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_topic_that_was_made_anew_between_two_starts_is_refused(broker: Broker, topic: str, guarantee: str) -> None:
    flow = ended(topic, broker.address, format="raw", guarantee=guarantee)
    assert isinstance(flow.sink, KafkaSink)
    kept = flow.sink.prepare(1, None)
    operator = operator_of(flow)
    write(opened(flow.sink), numbered(flow, written(0, 10), operator))
    more = numbered(flow, written(10, 10), operator)
    remake(broker.address, topic)
    again = ended(topic, broker.address, format="raw", guarantee=guarantee).sink
    assert isinstance(again, KafkaSink)
    with pytest.raises(DataLost, match=f"'{topic}' was deleted and made anew.*another checkpointLocation") as error:
        again.prepare(1, kept)
    assert kept["topic_id"] in str(error.value)
    again.prepare(1, None)  # as after --forget-output, while the numbering goes on
    write(opened(again), more)
    assert values(found(broker.address, topic, 10)[0]) == [b"%d" % number for number in range(10, 20)]


def test_a_location_that_knows_no_id_of_its_topic_is_written_on(broker: Broker, topic: str) -> None:
    flow = ended(topic, broker.address, format="raw")
    assert isinstance(flow.sink, KafkaSink)
    kept = flow.sink.prepare(1, None)
    del kept["topic_id"]
    flow.sink.prepare(1, kept)
    write(opened(flow.sink), numbered(flow, written(0, 3)))
    assert values(found(broker.address, topic, 3)[0]) == [b"0", b"1", b"2"]
