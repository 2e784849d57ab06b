"""A Kafka cluster as a writer needs it: producer ids, record batches to leaders, and the last sequence of a producer id.

Law: the record batches that ``begin`` has sent are answered or lost. Sending the same batches again does no harm, because a
broker takes each sequence of a producer id once. ``reached`` counts only records that all in-sync replicas have.

Each call is one attempt; the caller tries again. The client blocks, and belongs to one thread.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flux.connectors.kafka.client.cluster import (
    ATTEMPT_S,
    EARLIEST,
    LATEST,
    PRODUCE_BY_ID,
    Address,
    Client,
    OutOfRange,
    Passing,
)
from flux.connectors.kafka.client.connection import Connection
from flux.connectors.kafka.client.kafka_python import error_of, library
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import UNKNOWN, text_of, uuid_of
from flux.connectors.kafka.errors import CorruptRecords, NotPermitted
from flux.connectors.kafka.records import kernels

#: Time for which a leader may wait for its followers before it answers.
ACKED_S = 10.0
#: Sequences count modulo this number.
SEQUENCES = 1 << 31
#: Setting of a topic that limits record batches, by the error of a broker.
TOO_LARGE = {"MessageSizeTooLargeError": "max.message.bytes", "RecordListTooLargeError": "segment.bytes"}
#: Records that are read back from the end of a log at first, and the factor by which that number grows each time.
_BACK, _MORE = 1000, 16
_FETCH_BYTES = 8 << 20
_BATCHES = 4096
#: Time for which followers may lag behind the leader before the question is asked anew, and the time between two looks.
_FOLLOW_S, _LOOK_S = 0.5, 0.005
#: Newest version in which a request to write does not itself add the partition to the transaction: that has a request of
#: its own.
_PRODUCE_IN_TRANSACTION = 9
#: Largest age of the answer that a topic is still the expected one, for brokers that do not compare its id themselves. A
#: topic is away for longer than this while it is made anew, and a write that comes meanwhile shows it, too.
CONFIRMED_S = 1.0
#: Replica ids of requests for offsets: brokers tell a consumer the end of the records that all in-sync replicas have, and a
#: debugger the end of all records.
_CONSUMER, _DEBUGGER = -1, -2


class Answer(NamedTuple):
    """Answer of a broker for one partition."""

    #: Error class of kafka-python, None if the records are there.
    error: Any
    #: Explanation by the broker.
    why: str


class Identity(NamedTuple):
    """The ids of a cluster and of one of its topics."""

    cluster: str
    topic_id: str


class ProduceRequests(NamedTuple):
    """Requests that are under way."""

    #: For each leader its connection, the request, and the partitions in it.
    asked: list[tuple[Connection, Any, list[int]]]

    @property
    def files(self) -> list[int]:
        """File numbers on which the answers come."""
        return [connection.fileno() for connection, *_ in self.asked]


class ProducerClient(Client):
    """Client of a cluster that writes, also with an idempotent producer."""

    #: Transactional id, for a writer of transactions.
    transactional_id: str | None = None

    def __init__(self, bootstrap: Sequence[Address], security: Security) -> None:
        super().__init__(bootstrap, security)
        #: Requests that are used again, by leader, topic and id of the topic.
        self._requests: dict[tuple[Address, str, str], Any] = {}
        #: Their parts, by partition.
        self._parts: dict[int, Any] = {}

    def producer_ids(self, count: int, timeout: float) -> list[int]:
        """Get new producer ids, which no other writer has."""
        kind = library().InitProducerId

        def asked() -> int:
            message = kind(transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1)
            answer = self._ask(None, message, ATTEMPT_S)
            self._check(answer.error_code, "a producer id")
            return int(answer.producer_id)

        return [self.keep_trying(asked, "getting a producer id", timeout) for _ in range(count)]

    def identity(self, topic: str, timeout: float) -> Identity:
        """Ask for the ids of the cluster and of the topic."""
        kind = library().Metadata

        def asked() -> Identity:
            named = [kind.MetadataRequestTopic(name=topic)]
            answer = self._ask(None, kind(topics=named, allow_auto_topic_creation=False), ATTEMPT_S)
            (about,) = answer.topics
            self._check(about.error_code, topic)
            return Identity(answer.cluster_id or "", text_of(about.topic_id))

        return self.keep_trying(asked, f"asking for the ids of the cluster and of topic {topic!r}", timeout)

    def may_write(self, topic: str) -> bool:
        """Tell whether the topic is certainly enough the expected one. A broker of Kafka 4.1 or later compares the id with
        each request to write. Others, and all in transactions, which go by name, have to be asked now and then."""
        by_id = self.transactional_id is None and self._by_id(topic)
        return by_id or self.topic_ids.get(topic) == UNKNOWN or self._is_confirmed(topic, CONFIRMED_S)

    def confirm_before_writing(self, topic: str) -> None:
        """Ask for the id of the topic if ``may_write`` is false. DataLost: it is another topic than the expected one."""
        if not self.may_write(topic):
            self.confirm(topic, 0.0)

    def _by_id(self, topic: str) -> bool:
        """Tell whether all connected brokers find the topic by its id in requests to write."""
        produce = library().Produce
        connected = [connection for connection in self._connections.values() if connection.usable]
        return bool(self.topic_ids.get(topic)) and all(each.knows(produce, PRODUCE_BY_ID) for each in connected)

    def lacks(self, topic: str) -> bool:
        """Tell whether brokers answer, and know no such topic."""
        try:
            return bool(self._learn([topic]))
        except (OSError, Passing):
            return False

    def is_connected(self, topic: str, partitions: Iterable[int]) -> bool:
        """Tell whether there are connections to the leaders of all these partitions, as far as leaders are known."""
        leaders = self._leaders.get(topic, {})
        connected = {address for address, connection in self._connections.items() if connection.usable}
        return all(self._brokers.get(leaders.get(partition, -1)) in connected for partition in partitions)

    def begin(self, topic: str, batches: Mapping[int, np.ndarray]) -> ProduceRequests:
        """Send one record batch for each partition, to the leaders. On an error everything that was sent counts as lost."""
        by_leader: dict[Address, list[int]] = defaultdict(list)
        for partition in batches:
            by_leader[self._leader(topic, partition)].append(partition)
        sent = ProduceRequests([])
        try:
            for leader, partitions in by_leader.items():
                message = self._to_write(leader, topic, {each: batches[each] for each in partitions})
                connection = self._asking = self._connection(leader, ATTEMPT_S)
                if self._ended.is_set():
                    raise Passing("it was ended")
                sent.asked.append((connection, message, partitions))
                connection.send(message, ATTEMPT_S)
                self._let_go(partitions)
        except BaseException:
            self._let_go(self._parts)
            self.give_up(sent)
            raise
        return sent

    def _to_write(self, leader: Address, topic: str, batches: Mapping[int, np.ndarray]) -> Any:
        """Make the request. Its objects are used again: for a few rows, making them costs more than all the rest."""
        kind = library().Produce
        data = kind.TopicProduceData
        topic_id = self.topic_ids.get(topic, UNKNOWN) if self.transactional_id is None else UNKNOWN
        newest = (
            _PRODUCE_IN_TRANSACTION if self.transactional_id is not None else None if topic_id else PRODUCE_BY_ID - 1
        )
        message = self._requests.get((leader, topic, topic_id))
        if message is None:
            message = self._requests[leader, topic, topic_id] = kind(
                transactional_id=self.transactional_id,
                acks=-1,
                timeout_ms=int(1000 * ACKED_S),
                topic_data=[data(name=topic, topic_id=uuid_of(topic_id))],
                max_version=newest,
            )
        parts = []
        for partition, batch in batches.items():
            part = self._parts.get(partition)
            if part is None:
                part = self._parts[partition] = data.PartitionProduceData(index=partition)
            part.records = batch.data
            parts.append(part)
        message.topic_data[0].partition_data = parts
        return message

    def _let_go(self, partitions: Iterable[int]) -> None:
        """Release record batches after sending: the request objects are kept, and should not keep the data alive."""
        for partition in partitions:
            self._parts[partition].records = None

    def finish(self, sent: ProduceRequests) -> dict[int, Answer]:
        """Wait for the answers, and return that of each partition."""
        answers = {}
        try:
            for connection, message, partitions in sent.asked:
                self._asking = connection
                answer = connection.receive(message, ACKED_S + ATTEMPT_S)
                got = {
                    each.index: Answer(error_of(each.error_code), str(getattr(each, "error_message", None) or ""))
                    if each.error_code
                    else Answer(None, "")
                    for response in answer.responses
                    for each in response.partition_responses
                }
                if set(got) != set(partitions):
                    raise Passing("the broker left partitions out of its answer")
                answers.update(got)
        except BaseException:
            self.give_up(sent)
            raise
        if any(each.error is not None and each.error.invalid_metadata for each in answers.values()):
            self.forget()
        return answers

    def reached(
        self, topic: str, partitions: Iterable[int], producer: int, since: Mapping[int, int], look: bool
    ) -> dict[int, int | None]:
        """Return for each partition the sequence behind this producer's last record there, modulo 2^31. None: the broker knows
        no record of it, or has forgotten it.

        ``since`` has offsets before which there is no record of this producer. With ``look`` the log is searched where the
        broker knows no record, in case it has forgotten them."""
        by_leader = defaultdict(list)
        for partition in partitions:
            by_leader[self._leader(topic, partition)].append(partition)
        found: dict[int, int | None] = {}
        for leader, some in by_leader.items():
            told = self._described(leader, topic, some, producer)
            if told is None:
                unknown = some
            else:
                self._followed(leader, topic, [each for each in some if told[each] is not None])
                found.update(told)
                unknown = [each for each in some if told[each] is None] if look else []
            for partition in unknown:
                found[partition] = self._in_log(topic, partition, producer, since.get(partition, 0))
        return found

    def limit(self, topic: str, error: str) -> str:
        """Name the setting of a topic that a record batch has exceeded by this error, with its value, for messages."""
        setting = TOO_LARGE[error]
        kind = library().DescribeConfigs
        try:
            resource = kind.DescribeConfigsResource(resource_type=2, resource_name=topic, configuration_keys=[setting])
            message = kind(resources=[resource], include_synonyms=False, include_documentation=False)
            (result,) = self._ask(None, message, ATTEMPT_S).results
            value = f"{int(result.configs[0].value):,} bytes"
        except Exception:  # it only makes a message clearer
            value = "unknown to us"
        return f"the limit of the topic ({setting}) is {value}"

    def _described(self, leader: Address, topic: str, partitions: Sequence[int], producer: int) -> Any:
        """Answer as ``reached``, with the records that the leader itself has. None: the broker does not know the question."""
        kind = library().DescribeProducers
        message = kind(topics=[kind.TopicRequest(name=topic, partition_indexes=list(partitions))])
        if not self._connection(leader, ATTEMPT_S).knows(message):
            return None
        answer = self._ask(leader, message, ATTEMPT_S)
        found: dict[int, int | None] = {}
        for each in answer.topics[0].partitions:
            self._check(each.error_code, topic)
            mine = [state.last_sequence for state in each.active_producers if state.producer_id == producer]
            found[each.partition_index] = (mine[0] + 1) % SEQUENCES if mine and mine[0] >= 0 else None
        if set(found) != set(partitions):
            raise Passing("the broker left partitions out of its answer")
        return found

    def _followed(self, leader: Address, topic: str, partitions: Sequence[int]) -> None:
        """Wait until all in-sync replicas have the records that the leader has now. Records that only the leader has are lost
        with it."""
        if not partitions:
            return
        ends = self._ends(leader, topic, partitions, _DEBUGGER)
        limit = time.monotonic() + _FOLLOW_S
        while True:
            safe = self._ends(leader, topic, partitions, _CONSUMER)
            if all(safe[each] >= ends[each] for each in partitions):
                return
            if time.monotonic() > limit:
                raise Passing(f"replicas of topic {topic!r} lag behind their leader")
            self._ended.wait(_LOOK_S)

    def _ends(self, leader: Address, topic: str, partitions: Sequence[int], who: int) -> dict[int, int]:
        kind = library().ListOffsets
        parts = [
            kind.ListOffsetsTopic.ListOffsetsPartition(
                partition_index=each, current_leader_epoch=-1, timestamp=LATEST, max_num_offsets=1
            )
            for each in partitions
        ]
        message = kind(replica_id=who, isolation_level=0, topics=[kind.ListOffsetsTopic(name=topic, partitions=parts)])
        found = {}
        for each in self._ask(leader, message, ATTEMPT_S).topics[0].partitions:
            self._check(each.error_code, topic)
            found[each.partition_index] = int(each.offset)
        if set(found) != set(partitions):
            raise Passing("the broker left partitions out of its answer")
        return found

    def _in_log(self, topic: str, partition: int, producer: int, since: int) -> int | None:
        """Answer as ``reached``, from the heads of the record batches, the end of the log first."""
        end = self._ends(self._leader(topic, partition), topic, [partition], _CONSUMER)[partition]
        back, until = _BACK, end
        while True:
            start = max(since, end - back)
            found = self._between(topic, partition, producer, start, until)
            if found is not None or start <= since:
                return found
            back, until = _MORE * back, start

    def _between(self, topic: str, partition: int, producer: int, start: int, until: int) -> int | None:
        heads = np.empty((_BATCHES, kernels.FIELDS), np.int64)
        found, at = None, start
        while at < until:
            try:
                got = self.fetch(topic, partition, at, 0.1, _FETCH_BYTES, read_committed=False).records
            except OutOfRange:  # older records are gone
                earliest = self.offsets({(topic, partition): EARLIEST}, ATTEMPT_S)[topic, partition]
                if earliest <= at:
                    return found
                at = earliest
                continue
            code, count, _ = kernels.scan(got.address, got.size, _FETCH_BYTES << 4, heads)
            if code != kernels.OK:
                raise CorruptRecords(
                    f"partition {partition} of topic {topic!r} from offset {at}: {kernels.REASONS[code]}"
                )
            if not count:
                raise Passing("the broker sent no whole record batch")
            mine = heads[:count][heads[:count, kernels.PRODUCER] == producer]
            if len(mine):
                found = int(mine[-1, kernels.SEQUENCE] + mine[-1, kernels.LAST_DELTA] + 1) % SEQUENCES
            at = int(heads[count - 1, kernels.BASE] + heads[count - 1, kernels.LAST_DELTA]) + 1
        return found

    def give_up(self, sent: ProduceRequests) -> None:
        """Close the connections of requests: answers that came later would be taken for those to other requests."""
        for connection, _, _ in sent.asked:
            connection.close()
        self.forget()

    def _check(self, code: int, topic: str) -> None:
        if code and "Authorization" in error_of(code).__name__:
            raise self.refused(topic, error_of(code).__name__)
        super()._check(code, topic)

    def refused(self, topic: str, why: str) -> NotPermitted:
        return NotPermitted(
            f"Kafka at {self._shown()} does not permit writing {topic!r} by a client that connects {self._security.who()}: "
            f"{why}. Give it the permissions to write, to describe and, for exactly once, to read the topic: where to go on is "
            "read there"
        )
