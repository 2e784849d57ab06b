"""``flux.kafka``: topics as a source of a flow, read inside the workers.

The beginning of a query is settled once, in the program that starts it: partitions, and the first offset of each. A worker
that reads a partition again later, in another process, begins with the same offset, even if more has been written
meanwhile; so does a query that is started again on its checkpoint location.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from flux.arguments import checked
from flux.connectors.kafka.client.cluster import EARLIEST, LATEST, Client, addresses
from flux.connectors.kafka.client.kafka_python import library
from flux.connectors.kafka.client.security import OPTIONS, Security
from flux.connectors.kafka.client.topic_ids import UNKNOWN, LogPosition, differ
from flux.connectors.kafka.errors import DataLost
from flux.connectors.kafka.formats.base import format_of
from flux.connectors.kafka.read.fetch_thread import Fetcher
from flux.connectors.kafka.read.group_commit import GroupCommit
from flux.connectors.kafka.read.partition_reader import ReadOptions, TopicPartitionReader, kafka_schema
from flux.connectors.kafka.records.decoder import COLUMNS
from flux.connectors.kafka.warm_up import warm_up
from flux.dataflow.source import RowStart, Source, source
from flux.dataflow.source_reader import SourceReader, SourceSettings
from flux.errors import UsageError
from flux.settings import parse_bytes, parse_seconds

#: Values of ``starting``, for one partition or for all.
Start = str | int | datetime.datetime
#: Names in order, or the pattern that names must match.
Topics = list[str] | re.Pattern[str]
BAD_RECORDS = ("fail", "drop")
DEAD_LETTER = "dead_letter:"
ISOLATION = ("read_committed", "read_uncommitted")
#: Time that brokers may take when they are asked, now and then, for new partitions.
UNREAD_S = 5.0
_ENDS = {"earliest": EARLIEST, "latest": LATEST}
#: Kind of the row numbers in the streams of a query, as checkpoint locations note it.
_NUMBERS = "offsets"
#: Least and largest ``fetch_bytes``. A broker's answer holds one record batch at least, however small this is.
_FETCH_MIN, _FETCH_MAX = 1 << 10, 1 << 28


class KafkaReader(SourceReader):
    """The reader of topics. It can be pickled; connections are made where ``read`` is called.

    Number i stands for the i-th of ``topic_partitions``, topic and partition, in order. ``starts`` has the first offset of each,
    by ``starting``. ``timeout`` is the limit of brokers in ``prepare``, in seconds."""

    may_grow = True
    endless = True
    row_numbers = True  # the offset of each record

    def __init__(self, how: ReadOptions, topics: Topics, starting: Any, group: str | None, timeout: float) -> None:
        self.how, self.topics, self.starting, self.group, self.timeout = how, topics, starting, group, timeout
        self.topic_partitions = partitions = _partitions(how, topics, timeout)
        self.schema, self.partitions = how.schema, len(partitions)
        self.goes_on_after_loss = not how.fail_on_data_loss
        if isinstance(topics, re.Pattern) and not partitions:
            shown = ", ".join(f"{host}:{port}" for host, port in how.bootstrap)
            raise UsageError(
                f"Kafka at {shown} has no topic whose whole name matches {topics.pattern!r}, or hides it from a client that "
                f"connects {how.security.who()}. One must be there when the query is made"
            )
        # Shared by the partitions that are read in a process.
        self._committer: GroupCommit | None = None
        #: By topic, how often a start has found that it was made anew. A life that knows no position begins in this generation,
        #: and one that comes from the topic before goes on in no earlier one: orders may have rows of earlier generations,
        #: whose numbers the new records must not get.
        self.generations: dict[str, int] = {}
        self._fetcher: Fetcher | None = None
        # Wrong values of ``starting`` are refused at once.
        self.starts, self.topic_ids = self._first_offsets(partitions, starting)

    def configure(self, settings: SourceSettings) -> None:
        self.how = dataclasses.replace(self.how, may_be_silent=settings.may_be_silent)

    def prepare(self, kept: Any) -> Any:
        """Settle the beginning for all lives of a query: at its first start, and not when the flow was written. A query that
        goes on from a checkpoint keeps the numbers of its partitions and the ids of its topics; partitions that have been
        added since are read from their beginning.

        A topic that was made anew is noticed where its partitions are read: only their positions tell the topic that they
        were in last."""
        if kept is None:
            self.starts, self.topic_ids = self._first_offsets(self.topic_partitions, self.starting)
        else:
            if kept.get("numbers") != _NUMBERS:
                raise UsageError(
                    "the checkpoint location is of a release of Flux that counted the records of topics; this one tells them by "
                    "their offsets, and cannot know which of them that query has read. Go on with that release, or start with "
                    "another checkpointLocation, and with starting=... where that query has stopped"
                )
            began = {(topic, partition): offset for topic, partition, offset in kept["partitions"]}
            known_ids = kept.get("topics", {})  # none in locations of releases before 0.4
            self.generations = dict(kept.get("generations", {}))
            self._check_kept(began, known_ids)
            new = [each for each in self.topic_partitions if each not in began]
            if not self.how.fail_on_data_loss:  # positions in the old topic carry its id
                anew = {
                    topic for topic, known in known_ids.items() if differ(known, self.topic_ids.get(topic, UNKNOWN))
                }
                new = [each for each in self.topic_partitions if each not in began or each[0] in anew]
                self.generations |= {topic: self.generations.get(topic, 0) + 1 for topic in anew}
                known_ids = {topic: known for topic, known in known_ids.items() if topic not in anew}
            offsets, ids = self._first_offsets(new, "earliest")
            began |= dict(zip(new, offsets, strict=True))
            self.topic_ids = {**self.topic_ids, **ids, **known_ids}
            self.topic_partitions, self.starts = [*began], [*began.values()]
            self.partitions = len(began)
        return {
            "partitions": [[*each, offset] for each, offset in zip(self.topic_partitions, self.starts, strict=True)],
            "topics": {topic: topic_id for topic, topic_id in self.topic_ids.items() if topic_id != UNKNOWN},
            "numbers": _NUMBERS,
            **({"generations": self.generations} if self.generations else {}),
        }

    def _check_kept(self, began: Iterable[tuple[str, int]], known_ids: Mapping[str, str]) -> None:
        for topic, partition in began:
            if (topic, partition) in self.topic_partitions:
                continue
            now = self.topic_ids.get(topic, UNKNOWN)
            if differ(known_ids.get(topic, UNKNOWN), now):
                raise DataLost(
                    f"topic {topic!r} was deleted and made anew: its id was {known_ids[topic]}, and is {now} now. The new topic "
                    f"has no partition {partition}, which the checkpoint location knows. Start with another checkpointLocation"
                )
            raise UsageError(
                f"the checkpoint location knows partition {partition} of topic {topic!r}, which is not read any more. Name "
                "the same topics, or start with another checkpointLocation"
            )

    def unread(self) -> list[str]:
        """Return partitions that have come since the query was started, those of new topics included. The next start reads
        them."""
        known = set(self.topic_partitions)
        found = _partitions(self.how, self.topics, UNREAD_S)
        return [f"{topic}-{partition}" for topic, partition in found if (topic, partition) not in known]

    def _first_offsets(self, partitions: Sequence[tuple[str, int]], starting: Any) -> tuple[list[int], dict[str, str]]:
        """Return the offset to begin with in each partition, and the id of each topic. The ids are older than the offsets: a
        topic that is made anew meanwhile is noticed when it is read."""
        found: dict[str, list[int]] = {}
        for topic, partition in partitions:
            found.setdefault(topic, []).append(partition)
        wanted = {each: start_of(starting, each, sorted(found), found) for each in partitions}
        asked = {each: when for each, (when, told) in wanted.items() if not told}
        client = Client(self.how.bootstrap, self.how.security)
        try:
            if found:
                client.partitions(sorted(found), self.timeout)
            ids = {topic: client.topic_ids[topic] for topic in found}
            looked_up = client.offsets(asked, self.timeout, self.how.read_committed)
        finally:
            client.close()
        return [looked_up.get(each, wanted[each][0]) for each in partitions], ids

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_committer": None, "_fetcher": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the kernels. A worker unpickles the reader before it joins: there is time to load them, or to compile them
        where they are not yet."""
        self.__dict__.update(state)
        warm_up()

    def read(self, partition: int, start: Any) -> TopicPartitionReader:
        """Read a partition, without end. ``start`` is the beginning of the rows that some replica needs; None: the start of
        the query."""
        topic, number = self.topic_partitions[partition]
        generation = self.generations.get(topic, 0)
        first = LogPosition(self.starts[partition], self.topic_ids.get(topic, UNKNOWN), generation)
        # The newest known place may lie behind the rows to come. It tells whether the log was made anew or cut off since.
        newest = LogPosition.of(start.newest) if isinstance(start, RowStart) and start.newest is not None else None
        if isinstance(start, RowStart):
            first = first.at(start.number, start.position, newest)
        elif start is not None:
            first = LogPosition.of(start)
        if self.group is not None and self._committer is None:
            self._committer = GroupCommit(self.how.bootstrap, self.how.security, self.group)
        if self._fetcher is None:
            self._fetcher = self.how.fetcher()
        return TopicPartitionReader(
            self.how, topic, number, first, self._committer, self._fetcher, newest, generation, start is not None
        )

    def partition_name(self, partition: int) -> str:
        topic, number = self.topic_partitions[partition]
        return f"{topic}-{number}"


@checked("flux.kafka", lambda: OPTIONS)
def kafka(
    topics: str | Sequence[str] | re.Pattern[str] | None = None,
    bootstrap: str | Sequence[str] = "",
    *,
    pattern: str | re.Pattern[str] | None = None,
    starting: Start | Mapping[Any, Any] = "earliest",
    group: str | None = None,
    format: str | None = None,
    schema: str | pa.Schema | Mapping[str, Any] | None = None,
    schemas: str | Callable[[int], Any] | None = None,
    include: Sequence[str] = (),
    headers: bool = False,
    fail_on_data_loss: bool = True,
    bad_records: str = "fail",
    isolation: str = "read_committed",
    max_rows_per_second: float | None = None,
    fetch_bytes: int | str = "8m",
    timeout: float | str = "15s",
    retry_timeout: float | str = "5min",
    name: str | None = None,
    **security: Any,
) -> Source:
    """Read topics of Kafka as a source: one source partition for each of their partitions, read in the workers.

    pattern         instead of topics: a regular expression that the whole name of a topic must match. Topics of Kafka itself, and
                    the topic of bad records, are left out
    starting        the beginning of a new query: "earliest", "latest", a datetime with a time zone (the first record at that time
                    or later), or for each partition one of these or an offset: {0: 17, 1: "latest"}; with several topics
                    {"clicks": {0: 17, ...}, ...}. A query that goes on from a checkpoint begins where it was
    group           offsets up to which everything is applied are committed to this consumer group once a second, for tools that
                    show lag. It must have no members
    format          format of values: "json" or "csv", with ``schema`` the columns (DDL or a pyarrow schema), or "avro", with
                    ``schema`` a record in Avro's JSON. Without, or "raw": Spark's columns key, value, topic, partition, offset,
                    timestamp, timestampType
    schemas         for Avro: values have the id of their schema in front, as with a schema registry. The URL of the registry, or
                    a function from an id to a schema. Values are read by their schema, and resolved to ``schema``
    include         columns of Kafka that come beside those of ``schema``
    headers         True adds a column headers, array<struct<key string, value binary>>
    bad_records     treatment of a record that does not fit its format: "fail" ends the query and names it, "drop" leaves it out,
                    "dead_letter:TOPIC" writes it unchanged to that topic, at least once, with headers that name its origin and
                    the reason
    fail_on_data_loss  True ends the query when records are gone that were still to be read, or that a step has to repeat after a
                    kill, or when the topic was made anew; False goes on without them, or with all records of the new topic
    isolation       "read_committed", or "read_uncommitted" for records of transactions that are open or aborted, too
    max_rows_per_second  limit of each partition; without, as fast as it goes
    fetch_bytes     approximate size of one answer of a broker
    timeout         longest time that brokers may take to answer when the query is made; ``retry_timeout``: longest time without
                    an answer of any broker while it runs
    security        options of kafka-python: security_protocol, sasl_mechanism, sasl_plain_username, sasl_plain_password,
                    ssl_cafile, ssl_certfile, ssl_keyfile and so on; files must be there on the workers as well

    A partition that is added to a topic later, and a topic that comes to match later, is read when the query is started again on
    its checkpoint location, from its beginning; until then ``lastProgress`` and the log name it. UsageError or
    ``flux.KafkaError`` is raised here for a topic that is not there, a refused login and a broker that does not
    answer."""
    library()  # UsageError if kafka-python is missing: here, and not first in a worker
    warm_up()
    names = _topics(topics, pattern)
    reading = ReadOptions(
        bootstrap=addresses(bootstrap),
        security=Security(security),
        schema=pa.schema([]),
        format=format_of(format, schema, schemas),
        drop_bad=bad_records == "drop",
        read_committed=_one_of("isolation", isolation, ISOLATION) == "read_committed",
        fail_on_data_loss=bool(fail_on_data_loss),
        rows_per_second=_rate(max_rows_per_second),
        fetch_bytes=_between("fetch_bytes", parse_bytes("fetch_bytes", fetch_bytes), _FETCH_MIN, _FETCH_MAX),
        retry_s=_above_zero("retry_timeout", parse_seconds("retry_timeout", retry_timeout)),
    )
    reading = _with_columns(reading, include, headers)
    if group is not None and (not isinstance(group, str) or not group):
        raise UsageError(f"group must be the name of a consumer group, got {group!r}")
    limit = _above_zero("timeout", parse_seconds("timeout", timeout))
    reading = _with_dead_letters(reading, bad_records, names, limit)
    read = KafkaReader(reading, names, starting, group, limit)
    called = name or f"kafka {names.pattern if isinstance(names, re.Pattern) else ', '.join(names)}"
    return source(read, name=called)


def _partitions(how: ReadOptions, topics: Topics, timeout: float) -> list[tuple[str, int]]:
    client = Client(how.bootstrap, how.security)
    try:
        if isinstance(topics, re.Pattern):
            found = client.matching(topics, timeout)
            # Records that were put aside must not come back.
            found.pop("" if how.dead_letters is None else how.dead_letters[0], None)
        else:
            found = client.partitions(topics, timeout)
    finally:
        client.close()
    return [(topic, partition) for topic in found for partition in found[topic]]


def _with_dead_letters(how: ReadOptions, bad_records: Any, topics: Topics, timeout: float) -> ReadOptions:
    if not isinstance(bad_records, str) or not bad_records.startswith(DEAD_LETTER):
        _one_of("bad_records", bad_records, (*BAD_RECORDS, f"{DEAD_LETTER}TOPIC"))
        return how
    to = bad_records.removeprefix(DEAD_LETTER)
    if not isinstance(topics, re.Pattern) and to in topics:
        raise UsageError(f"bad_records: topic {to!r} is read itself, so its bad records would come again for ever")
    if how.format is None:
        raise UsageError(f"bad_records={bad_records!r} has no effect without a format: any bytes are good")
    if not to:
        raise UsageError("bad_records='dead_letter:TOPIC' must name a topic")
    return dataclasses.replace(how, dead_letters=(to, len(_partitions(how, [to], timeout))))


def start_of(
    starting: Any, which: tuple[str, int], topics: Sequence[str], found: Mapping[str, Sequence[int]]
) -> tuple[int, bool]:
    """Return an offset and True, or the question for the broker (milliseconds, or an end of the log) and False."""
    topic, partition = which
    given = starting
    if isinstance(given, Mapping) and len(topics) == 1 and topic not in given:
        given = {topic: given}
    if isinstance(given, Mapping):
        of_topic = given.get(topic)
        if isinstance(of_topic, Mapping):
            unknown = [key for key in of_topic if _number(key) not in found[topic]]
            if unknown:
                raise UsageError(f"starting names partition {unknown[0]!r}, which topic {topic!r} does not have")
            of_topic = {_number(key): value for key, value in of_topic.items()}.get(partition)
        if of_topic is None:
            raise UsageError(
                f"starting says nothing of partition {partition} of topic {topic!r}; it must name all of them"
            )
        given = of_topic
    if isinstance(given, str) and given in _ENDS:
        return _ENDS[given], False
    if isinstance(given, datetime.datetime):
        if given.tzinfo is None:
            raise UsageError(
                f"starting={given!r} has no time zone; as in datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC)"
            )
        return math.ceil(given.timestamp() * 1000), False
    if isinstance(given, int) and not isinstance(given, bool) and isinstance(starting, Mapping) and given >= EARLIEST:
        return given, given >= 0  # below zero as in Spark: the ends
    raise UsageError(
        f"starting must be 'earliest', 'latest', a datetime, or a dict from partition to one of these or an offset; got {given!r}"
    )


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdigit() else key


def _with_columns(how: ReadOptions, include: Sequence[str], headers: bool) -> ReadOptions:
    if isinstance(include, str) or not set(include) <= set(COLUMNS):
        raise UsageError(f"include must be a list of some of {', '.join(COLUMNS)}; got {include!r}")
    if how.format is None:
        if include:
            raise UsageError("include adds Kafka's columns to those of a format; without a format they are all there")
        return dataclasses.replace(how, schema=kafka_schema(headers))
    wanted = [field for field in kafka_schema(True) if field.name in include or (headers and field.name == "headers")]
    twice = sorted({field.name for field in wanted} & set(how.format.schema.names))
    if twice:
        raise UsageError(
            f"schema and include both have a column {twice[0]!r}; the schema may name it otherwise in a stage"
        )
    return dataclasses.replace(how, schema=pa.schema([*how.format.schema, *wanted]))


def _topics(topics: Any, pattern: Any) -> Topics:
    if pattern is None and isinstance(topics, re.Pattern):
        topics, pattern = None, topics
    if pattern is not None:
        return _pattern(topics, pattern)
    names = [topics] if isinstance(topics, str) else list(topics) if isinstance(topics, list | tuple | set) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"flux.kafka wants the name of a topic, a list of names, or a pattern; got {topics!r}")
    return sorted(set(names))


def _pattern(topics: Any, pattern: Any) -> re.Pattern[str]:
    if topics is not None:
        raise UsageError(f"flux.kafka wants topics or a pattern, not both; got {topics!r} and {pattern!r}")
    try:
        made = re.compile(pattern)
    except (TypeError, re.error) as error:
        raise UsageError(f"pattern must be a regular expression, got {pattern!r}: {error}") from None
    if not isinstance(made.pattern, str) or not made.pattern:
        raise UsageError(f"pattern must be a regular expression of text, got {pattern!r}")
    return made


def _one_of(what: str, given: Any, known: Sequence[str]) -> str:
    if given not in known:
        raise UsageError(f"{what} must be one of {', '.join(known)}; got {given!r}")
    return str(given)


def _rate(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise UsageError(f"max_rows_per_second must be a number above zero, got {given!r}")
    return float(given)


def _between(what: str, given: int, least: int, most: int) -> int:
    if not least <= given <= most:
        raise UsageError(f"{what} must be {least} to {most} bytes, got {given}")
    return given


def _above_zero(what: str, given: float) -> float:
    if not given > 0:
        raise UsageError(f"{what} must be above zero, got {given!r}")
    return given
