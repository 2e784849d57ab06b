"""A Kafka cluster as a reader needs it: partitions and their leaders, offsets, records as bytes, offsets of a group.

Law: each call ends within its limit, with an answer or with an error that names the request, the brokers, the time and a
remedy. A passing failure (a leader that moves, a broker that starts again) is tried again until then; a wrong password is
not.

The client blocks and belongs to one thread; only ``abort`` may be called from another.
"""

from __future__ import annotations

import math
import random
import re
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from flux.connectors.kafka.client.connection import Connection
from flux.connectors.kafka.client.kafka_python import error_of, library
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import UNKNOWN, differ, text_of, uuid_of
from flux.connectors.kafka.errors import BrokerUnreachable, DataLost, NotPermitted
from flux.connectors.kafka.records.decoder import Aborted, Transactions
from flux.errors import UsageError

T = TypeVar("T")
Address = tuple[str, int]

#: Timestamps that mean the ends of a log.
EARLIEST, LATEST = -2, -1
_PORT = 9092
#: Limit of one attempt to connect or to ask, in seconds. A broker that is there answers in milliseconds.
ATTEMPT_S = 10.0
#: Limit of connecting to one broker, in seconds. It is shorter, because another broker may be there.
CONNECT_S = 5.0
_PAUSE_S, _PAUSE_MAX_S = 0.05, 2.0
#: Time for which a topic that was just made may be unknown to the broker that is asked, in seconds.
_NEW_TOPIC_S = 1.0


class Passing(Exception):
    """Failure that may be over at the next attempt."""


class OutOfRange(Exception):
    """Answer of a broker that it has no record at the requested offset, and will not get one."""


class Fetched(NamedTuple):
    """Record batches of one partition, from one answer."""

    #: Record batches; the last one may be cut off.
    records: pa.Buffer
    #: Offset behind the last record that all in-sync replicas have (the high watermark).
    end: int
    #: Aborted transactions that the answer lists.
    transactions: Transactions


class Wanted(NamedTuple):
    """Partition and offset of records to be fetched."""

    topic: str
    partition: int
    #: Offset of the first record.
    offset: int
    #: Id of the topic that the records are in.
    topic_id: str = UNKNOWN


class Located(NamedTuple):
    """A topic as a broker has described it."""

    topic_id: str
    #: Address of each leader that there is, by number of the partition.
    leaders: dict[int, Address]


#: Reason to try again: a broker has to answer for each partition of a request.
LEFT_OUT = "the broker left the partition out of its answer"
#: First version of these requests in which topics go by id: of brokers since Kafka 3.1, and since 4.1.
FETCH_BY_ID = PRODUCE_BY_ID = 13


def fetch_message(wanted: Iterable[Wanted], wait: float, bytes_max: int, read_committed: bool) -> Any:
    """Make a request for records. A broker that knows such requests looks topics up by id, and refuses the id of a topic that
    was deleted; one of Kafka before 3.1 looks them up by name."""
    kind = library().Fetch
    topics: dict[tuple[str, str], list[Any]] = {}
    for topic, partition, offset, topic_id in wanted:
        topics.setdefault((topic, topic_id), []).append(
            kind.FetchTopic.FetchPartition(
                partition=partition, current_leader_epoch=-1, fetch_offset=offset, last_fetched_epoch=-1, log_start_offset=-1,
                partition_max_bytes=bytes_max,
            )
        )  # fmt: skip
    return kind(
        replica_id=-1, max_wait_ms=int(1000 * wait), min_bytes=1, max_bytes=bytes_max, isolation_level=int(read_committed),
        topics=[
            kind.FetchTopic(topic=topic, topic_id=uuid_of(topic_id), partitions=parts)
            for (topic, topic_id), parts in topics.items()
        ],
        session_id=0, session_epoch=-1, forgotten_topics_data=[], rack_id="",
        max_version=FETCH_BY_ID - 1 if any(topic_id == UNKNOWN for _, topic_id in topics) else None,
    )  # fmt: skip


def fetched_parts(answer: Any, wanted: Iterable[Wanted]) -> dict[tuple[str, int], Any]:
    """Return the answer for each topic and partition, without those that are in it twice."""
    names = {each.topic_id: each.topic for each in wanted}
    found: dict[tuple[str, int], Any] = {}
    twice = set()
    for response in answer.responses:
        topic = response.topic or names.get(text_of(response.topic_id), "")
        for part in response.partitions:
            key = topic, part.partition_index
            twice |= {key} & found.keys()
            found[key] = part
    return {key: part for key, part in found.items() if key not in twice} if twice else found


def fetched(part: Any) -> Fetched:
    aborted = [Aborted(each.producer_id, each.first_offset) for each in part.aborted_transactions or ()]
    return Fetched(pa.py_buffer(part.records or b""), part.high_watermark, Transactions(aborted))


def throttled(answer: Any) -> float:
    """Return the seconds for which the broker holds back the next answer."""
    return float(min(max(answer.throttle_time_ms, 0) / 1000, ATTEMPT_S))


def addresses(bootstrap: str | Sequence[str]) -> list[Address]:
    """Parse "host:port,host:port" or a list of such texts. UsageError shows the text that is no address."""
    given = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    made = [_address(each) for each in given if not isinstance(each, str) or each.strip()]
    if not made:
        raise UsageError("bootstrap must name a broker at least, as in bootstrap='host:9092'")
    return made


def _address(text: str) -> Address:
    if isinstance(text, str):
        host, _, port = text.strip().rpartition(":")
        if text.strip().endswith("]") or not host:
            host, port = text.strip(), str(_PORT)
        if port.isdigit() and 0 < int(port) < 1 << 16 and (":" not in host or host.startswith("[")):
            return host.strip("[]"), int(port)
    raise UsageError(f"bootstrap must be 'host:port', or several separated by commas; got {text!r}")


class Client:
    """Client of one cluster. It keeps a connection to each broker that it has asked, and the leaders of the topics that
    it has asked for."""

    def __init__(self, bootstrap: Sequence[Address], security: Security) -> None:
        self._bootstrap, self._security = list(bootstrap), security
        #: Address of each broker, by its id.
        self._brokers: dict[int, Address] = {}
        #: Id of each partition's leader, by topic and number of the partition.
        self._leaders: dict[str, dict[int, int]] = {}
        #: Id of each topic, by the newest answer of a broker.
        self.topic_ids: dict[str, str] = {}
        #: Id that a topic must have, and the text of the error if it has another one.
        self._expected: dict[str, tuple[str, str]] = {}
        #: Time of the newest id of each topic (``time.monotonic``).
        self._learned_at: dict[str, float] = {}
        self._connections: dict[Address, Connection] = {}
        #: Connection of the request that is under way; ``abort`` ends it from another thread.
        self._asking: Connection | None = None
        self._ended = threading.Event()
        self._until = math.inf  # end of the call under way; no attempt takes longer

    def partitions(self, topics: Sequence[str], timeout: float) -> dict[str, list[int]]:
        """List the numbers of the partitions of each topic, in order. UsageError: a topic is not there."""
        newest = time.monotonic() + min(timeout, _NEW_TOPIC_S)

        def asked() -> dict[str, list[int]]:
            unknown = self._learn(topics)
            if unknown and time.monotonic() < newest:
                raise Passing(f"topic {unknown[0]!r} is unknown")
            if unknown:
                raise UsageError(
                    f"Kafka at {self._shown()} has no topic {unknown[0]!r}, or hides it from a client that connects "
                    f"{self._security.who()}. Create it, or correct the name"
                )
            return {topic: sorted(self._leaders[topic]) for topic in topics}

        return self.keep_trying(asked, f"listing the partitions of {_listed(topics)}", timeout)

    def matching(self, pattern: re.Pattern[str], timeout: float) -> dict[str, list[int]]:
        """List the topics whose whole name matches the pattern, with their partitions. Topics of Kafka itself are left out;
        brokers do not name topics that the user may not see."""

        def asked() -> dict[str, list[int]]:
            kind = library().Metadata
            found = {}
            for topic in self._ask(None, kind(topics=None, allow_auto_topic_creation=False), ATTEMPT_S).topics:
                if not topic.name or topic.is_internal or not pattern.fullmatch(topic.name):
                    continue
                error = error_of(topic.error_code).__name__
                if topic.error_code and "Authorization" not in error:
                    raise Passing(f"topic {topic.name!r}: {error}")  # or the topic would seem not to be there
                if not topic.error_code:
                    self._note_id(topic)
                    found[topic.name] = sorted(each.partition_index for each in topic.partitions)
            return dict(sorted(found.items()))

        return self.keep_trying(asked, f"listing the topics that match {pattern.pattern!r}", timeout)

    def offsets(
        self, wanted: Mapping[tuple[str, int], int], timeout: float, read_committed: bool = True
    ) -> dict[tuple[str, int], int]:
        """Look up the first offset of each topic and partition at or after a time in milliseconds, or EARLIEST or LATEST. If
        no record is that late, it is the end."""
        if not wanted:
            return {}

        def asked() -> dict[tuple[str, int], int]:
            found = {}
            by_leader = defaultdict(list)
            for topic, partition in wanted:
                by_leader[self._leader(topic, partition)].append((topic, partition))
            for leader, partitions in by_leader.items():
                found.update(self._offsets(leader, {each: wanted[each] for each in partitions}, read_committed))
            late = {each: LATEST for each, offset in found.items() if offset < 0}
            for topic, partition in late:
                leader = self._leader(topic, partition)
                found.update(self._offsets(leader, {(topic, partition): LATEST}, read_committed))
            return found

        return self.keep_trying(asked, f"looking up offsets of {_listed({topic for topic, _ in wanted})}", timeout)

    def fetch(
        self, topic: str, partition: int, offset: int, wait: float, bytes_max: int, read_committed: bool = True
    ) -> Fetched:
        """Fetch records, in one attempt. An empty answer comes after ``wait`` seconds. Raises OutOfRange, besides the errors
        of ``ask``."""
        leader = self._leader(topic, partition)
        wanted = [Wanted(topic, partition, offset, self.topic_ids[topic])]
        answer = self._ask(leader, fetch_message(wanted, wait, bytes_max, read_committed), wait + ATTEMPT_S)
        self._check(getattr(answer, "error_code", 0), topic)
        self._ended.wait(throttled(answer))
        got = fetched_parts(answer, wanted).get((topic, partition))
        if got is None:
            raise Passing(LEFT_OUT)
        self._check(got.error_code, topic)
        return fetched(got)

    def located(self, topic: str) -> Located:
        """Ask a broker for the id and the leaders of a topic. One attempt; Passing for a topic that is not known."""
        self._learn_known(topic)
        found = self._leaders[topic]
        leaders = {number: self._brokers[leader] for number, leader in found.items() if leader in self._brokers}
        return Located(self.topic_ids[topic], leaders)

    def expect(self, topic: str, topic_id: str, otherwise: str) -> None:
        """Raise DataLost with this text from now on wherever a broker gives another id for the topic."""
        if topic_id != UNKNOWN:
            self._expected[topic] = topic_id, otherwise

    def confirm(self, topic: str, seconds: float) -> None:
        """Ask a broker for the id of a topic if the newest answer is as old as this. One attempt."""
        if not self._is_confirmed(topic, seconds):
            self._learn_known(topic)

    def _is_confirmed(self, topic: str, seconds: float) -> bool:
        return time.monotonic() - self._learned_at.get(topic, -math.inf) < seconds

    def check(self, code: int, topic: str) -> None:
        """Raise the error that a broker's error code stands for."""
        self._check(code, topic)

    def commit(self, group: str, offsets: Mapping[tuple[str, int], int], timeout: float) -> None:
        """Tell the coordinator of a consumer group the offsets where reading goes on, for tools that show lag. The group must
        have no members."""
        kind = library().OffsetCommit

        def asked() -> None:
            found = self._ask(
                None, library().FindCoordinator(key=group, key_type=0, coordinator_keys=[group]), ATTEMPT_S
            )
            which = found.coordinators[0] if getattr(found, "coordinators", None) else found
            self._check(which.error_code, f"group {group}")
            topics = defaultdict(list)
            for (topic, partition), offset in offsets.items():
                topics[topic].append(
                    kind.OffsetCommitRequestTopic.OffsetCommitRequestPartition(
                        partition_index=partition,
                        committed_offset=offset,
                        committed_leader_epoch=-1,
                        committed_metadata="",
                    )
                )
            message = kind(
                group_id=group, generation_id_or_member_epoch=-1, member_id="", group_instance_id=None, retention_time_ms=-1,
                topics=[kind.OffsetCommitRequestTopic(name=name, partitions=parts) for name, parts in topics.items()],
            )  # fmt: skip
            answer = self._ask((which.host, which.port), message, ATTEMPT_S)
            for topic in answer.topics:
                for part in topic.partitions:
                    self._check(part.error_code, topic.name)

        self.keep_trying(asked, f"committing offsets of group {group!r}", timeout)

    def keep_trying(self, attempt: Callable[[], T], doing: str, timeout: float) -> T:
        """Repeat an attempt until it succeeds, and return its result. BrokerUnreachable after ``timeout`` seconds."""
        self._until = time.monotonic() + timeout
        try:
            return self._keep_trying(attempt, doing, timeout)
        finally:
            self._until = math.inf

    def _keep_trying(self, attempt: Callable[[], T], doing: str, timeout: float) -> T:
        pause = _PAUSE_S
        while True:
            try:
                return attempt()
            except (OSError, Passing) as error:
                left = self._until - time.monotonic()
                if left <= _PAUSE_S:  # too short for another attempt, whose error would tell less
                    raise self.unreachable(doing, timeout, error) from error
                if self._ended.wait(min(pause * random.uniform(0.8, 1.2), left)):
                    raise
                pause = min(2 * pause, _PAUSE_MAX_S)

    def unreachable(self, doing: str, seconds: float, error: Exception) -> BrokerUnreachable:
        told = {f"{host}:{port}" for host, port in self._brokers.values()} - set(self._shown().split(", "))
        also = f" (and {', '.join(sorted(told))}, as these call themselves)" if told else ""
        return BrokerUnreachable(
            f"{doing} failed for {seconds:.0f} s at {self._shown()}{also}, {self._security.protocol}: {error}. Check the "
            "addresses, that brokers run and can be reached from here, and security_protocol"
        )

    def forget(self) -> None:
        """Forget the leaders: partitions may have others now."""
        self._leaders = {}

    def abort(self) -> None:
        """End the call under way with an error, soon. May be called from another thread."""
        self._ended.set()
        asking = self._asking
        if asking is not None:
            asking.abort()

    def close(self) -> None:
        self._ended.set()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _learn(self, topics: Sequence[str]) -> list[str]:
        """Ask any broker for the leaders of topics. Returns the topics that it does not know."""
        kind = library().Metadata
        named = [kind.MetadataRequestTopic(name=topic) for topic in topics]
        answer = self._ask(None, kind(topics=named, allow_auto_topic_creation=False), ATTEMPT_S)
        self._brokers = {each.node_id: (each.host, each.port) for each in answer.brokers}
        unknown = []
        for topic in answer.topics:
            name = error_of(topic.error_code).__name__
            if name in ("UnknownTopicOrPartitionError", "InvalidTopicError"):
                unknown.append(topic.name)
                continue
            self._check(topic.error_code, topic.name)
            self._note_id(topic)
            self._leaders[topic.name] = {each.partition_index: each.leader_id for each in topic.partitions}
        return unknown

    def _learn_known(self, topic: str) -> None:
        if self._learn([topic]):
            raise Passing(f"topic {topic!r} is unknown")

    def _note_id(self, topic: Any) -> None:
        """Keep the id of a topic in an answer. DataLost if another one was expected."""
        found = text_of(topic.topic_id)
        expected, otherwise = self._expected.get(topic.name, (UNKNOWN, ""))
        if differ(found, expected):
            raise DataLost(otherwise)
        self.topic_ids[topic.name], self._learned_at[topic.name] = found, time.monotonic()

    def _leader(self, topic: str, partition: int) -> Address:
        if topic not in self._leaders:
            self._learn_known(topic)
        leader = self._leaders[topic].get(partition)
        if leader is None or leader not in self._brokers:
            self.forget()
            raise Passing(f"partition {partition} of topic {topic!r} has no leader")
        return self._brokers[leader]

    def _offsets(self, leader: Address, wanted: Mapping[tuple[str, int], int], read_committed: bool) -> Any:
        kind = library().ListOffsets
        topics = defaultdict(list)
        for (topic, partition), when in wanted.items():
            topics[topic].append(
                kind.ListOffsetsTopic.ListOffsetsPartition(
                    partition_index=partition, current_leader_epoch=-1, timestamp=when, max_num_offsets=1
                )
            )
        named = [kind.ListOffsetsTopic(name=topic, partitions=parts) for topic, parts in topics.items()]
        answer = self._ask(leader, kind(replica_id=-1, isolation_level=int(read_committed), topics=named), ATTEMPT_S)
        found = {}
        for topic in answer.topics:
            for part in topic.partitions:
                self._check(part.error_code, topic.name)
                found[topic.name, part.partition_index] = int(part.offset)
        if set(found) != set(wanted):
            raise Passing("the broker left partitions out of its answer")
        return found

    def _check(self, code: int, topic: str) -> None:
        if not code:
            return
        error = error_of(code)
        if "Authorization" in error.__name__:
            raise NotPermitted(
                f"Kafka at {self._shown()} does not permit reading {topic!r} by a client that connects {self._security.who()}: "
                f"{error.__name__}. Give it the permission to read and describe the topic"
            )
        if error.__name__ == "OffsetOutOfRangeError":
            raise OutOfRange("offset out of range")
        if error.retriable or error.invalid_metadata:
            self.forget()
        raise Passing(f"{topic}: {error.__name__}")

    def _ask(self, address: Address | None, message: Any, timeout: float) -> Any:
        """Ask a broker, or any broker if ``address`` is None."""
        if address is None:
            known = [*self._connections, *random.sample(self._bootstrap, len(self._bootstrap)), *self._brokers.values()]
            return self._ask_any(list(dict.fromkeys(known)), message, timeout)
        timeout = min(timeout, max(self._until - time.monotonic(), _PAUSE_S))
        connection = self._asking = self._connection(address, timeout)
        if self._ended.is_set():
            raise Passing("it was ended")
        try:
            return connection.ask(message, timeout)
        except OSError:
            self.forget()
            raise
        finally:
            self._asking = None

    def _connection(self, address: Address, timeout: float) -> Connection:
        connection = self._connections.get(address)
        if connection is None or not connection.usable:
            if connection is not None:
                connection.close()
            try:
                connection = self._connections[address] = Connection(address, self._security, min(timeout, CONNECT_S))
            except ssl.SSLError as error:
                raise no_tls(address, error) from error
        return connection

    def _ask_any(self, known: list[Address], message: Any, timeout: float) -> Any:
        for last, address in enumerate(known, 1 - len(known)):
            try:
                return self._ask(address, message, timeout)
            except OSError:
                if last == 0:
                    raise
        raise AssertionError("there is a bootstrap address")

    def _shown(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._bootstrap)


def no_tls(address: Address, error: ssl.SSLError) -> Exception:
    """Make the error to raise for a failure of TLS: NotPermitted, or the same error if the broker only hung up, which may
    pass."""
    if isinstance(error, ssl.SSLEOFError):
        return error
    made = NotPermitted(  # the certificate will be the same at the next attempt
        f"no TLS with broker {address[0]}:{address[1]}: {error}. Check security_protocol and port; ssl_cafile names the "
        "file with the certificate that signs that of the broker"
    )
    made.__cause__ = error
    return made


def _listed(topics: Any) -> str:
    names = sorted(topics)
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
