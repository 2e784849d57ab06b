"""``to_kafka``: a topic as the end of a flow, each record there once (design: kafka-sink).

The stage before the sink numbers the rows of each partition of the topic. These numbers are the sequences of an idempotent
producer, whose id all replicas share. So the broker itself refuses records that it has already, from any sender: no writer
is fenced, nothing waits for checkpoints or transactions, and a primary that was given up can only write the same records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.client.cluster import LATEST, Address, Passing
from flux.connectors.kafka.client.producer import SEQUENCES, TOO_LARGE, Answer, ProducerClient, ProduceRequests
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import UNKNOWN, differ
from flux.connectors.kafka.errors import BrokerUnreachable, DataLost, KafkaError
from flux.connectors.kafka.formats.text_encode import Columns
from flux.connectors.kafka.records.encoder import BATCH_BYTES, NOBODY, ProducerIdentity, with_headers
from flux.connectors.kafka.warm_up import warm_up
from flux.connectors.kafka.write.partition_batches import PartitionBatches, by_partition, make_together
from flux.connectors.kafka.write.sequence_operator import PARTITION, SEQUENCE
from flux.dataflow.sink import Position, Sink, SinkAhead, SinkContext, SinkTraits
from flux.errors import UsageError
from flux.operators.batches import logical_bytes

log = logging.getLogger("flux.kafka")

#: Approximate size of one request: brokers take 100 MiB unless told otherwise, and work on one request of a connection at a
#: time.
REQUEST_BYTES = 8 << 20
#: Largest batch that ``send`` sends ahead of ``write``: sockets take that much at once.
SMALL_BYTES = 64 << 10
#: Time for which a topic that was there may be unknown before the query ends: restarted brokers do not know all topics at
#: once.
GONE_S = 10.0
#: Time for which the start of a query waits for brokers.
START_S = 15.0
#: Headers of records that may be there twice: number of the writer, and of the record for its writer and partition.
FLUX_PARTITION, FLUX_SEQUENCE = "flux-partition", "flux-sequence"


class Round(NamedTuple):
    """Requests with at most one record batch for each partition."""

    #: By partition of the topic: its batches, the record batch that was sent, and its number of rows.
    sending: dict[int, tuple[PartitionBatches, np.ndarray, int]]
    sent: ProduceRequests


class UnderWay(NamedTuple):
    """Batch that was sent ahead; ``write`` has not been called for it yet."""

    #: Number of rows of the batch.
    rows: int
    position: Position
    #: Lines with rows that the broker lacks.
    lines: list[PartitionBatches]
    round: Round


class KafkaSink(Sink):
    """Sink that writes exactly once, on brokers with idempotence: Kafka 2.8 and later. ``prepare`` must have been called."""

    traits = SinkTraits(exactly_once=True, joins_bytes=REQUEST_BYTES, sends_ahead=True)
    guarantee = "exactly_once"
    #: Its record batches belong to transactions.
    transactional = False

    def __init__(
        self,
        topic: str,
        bootstrap: Sequence[Address],
        security: Security,
        columns: Columns,
        topic_partitions: int,
        codec: str | None = None,
        timeout: float = START_S,
    ) -> None:
        self.topic, self._bootstrap, self._security = topic, list(bootstrap), security
        self._columns, self._topic_partitions = columns, topic_partitions
        self._codec, self._batch_bytes = codec, BATCH_BYTES
        self._timeout = timeout  # limit for brokers in seconds, when a query starts
        #: Producer ids, one a partition of the sink.
        self._ids: list[int] = []
        #: Offsets of the topic's partitions at the first start of the query: records of this query are behind them.
        self._since: dict[int, int] = {}
        #: Id of the topic when the query first started; UNKNOWN on brokers that give none.
        self._topic_id = UNKNOWN
        #: The query goes on from a checkpoint: brokers may have forgotten sequences of records that are in the log.
        self._again = False
        self._schema: pa.Schema | None = None  # schema of the output, when it is known
        self._connected: ProducerClient | None = None
        #: Batch that was sent ahead.
        self._under_way: UnderWay | None = None

    @property
    def _client(self) -> ProducerClient:
        assert self._connected is not None, "open comes first"
        return self._connected

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        warm_up()

    def __repr__(self) -> str:
        return f"topic {self.topic} of Kafka at {', '.join(f'{host}:{port}' for host, port in self._bootstrap)}"

    # ---- in the program that starts the query

    def destination(self) -> str:
        """Name the topic alone: brokers may be named otherwise, and another cluster is noticed by its id."""
        return f"topic {self.topic} of Kafka"

    def check(self, schema: pa.Schema) -> None:
        self._columns.check(schema)
        self._schema = schema

    def prepare(self, partitions: int, kept: Any) -> Any:
        """Settle ids and offsets before a query starts. ``kept`` is the result of the first start, if the query goes on from a
        checkpoint: its lives must share producer ids, and choose partitions of the topic alike."""
        client = ProducerClient(self._bootstrap, self._security)
        try:
            cluster, topic_id = client.identity(self.topic, self._timeout)
            if kept is None:
                places = {(self.topic, each): LATEST for each in range(self._topic_partitions)}
                ends = client.offsets(places, self._timeout, read_committed=False)
                kept = {
                    "cluster": cluster, "topic": self.topic, "topic_partitions": self._topic_partitions,
                    "since": [ends[place] for place in places], "ids": self._new_ids(client, partitions),
                    "guarantee": self.guarantee, "topic_id": topic_id,
                }  # fmt: skip
            else:
                self._again = True
        finally:
            client.close()
        self._check_kept(kept, cluster, topic_id, partitions)
        if self._schema is not None:
            self._columns = self._columns.settled(self._schema, self._timeout)
        self._ids, self._since = list(kept["ids"]), dict(enumerate(kept["since"]))
        self._topic_id = kept.get("topic_id", topic_id)  # locations of releases before 0.4 have none
        return kept

    def _new_ids(self, client: ProducerClient, partitions: int) -> list[int]:
        """Get the producer ids for this query's writers, one for each partition. They are kept with the query, and later lives
        write with the same ones."""
        return client.producer_ids(partitions, self._timeout)

    def _check_kept(self, kept: Any, cluster: str, topic_id: str, partitions: int) -> None:
        if kept["topic"] != self.topic or kept["cluster"] != cluster:
            raise UsageError(
                f"the query of this checkpoint writes topic {kept['topic']!r} of Kafka cluster {kept['cluster']}, not "
                f"{self.topic!r} of {cluster}. Give that one, or another checkpointLocation"
            )
        if differ(kept.get("topic_id", UNKNOWN), topic_id):
            raise DataLost(f"{self._made_anew(kept['topic_id'])} Its id is {topic_id} now.")
        if kept["topic_partitions"] != self._topic_partitions:
            raise UsageError(
                f"the query of this checkpoint writes {kept['topic_partitions']} partitions of topic {self.topic!r}, which has "
                f"{self._topic_partitions} now: keys would go elsewhere. Give to_kafka(..., topic_partitions="
                f"{kept['topic_partitions']}) to go on as before, or another checkpointLocation"
            )
        was = kept.get("guarantee", "exactly_once" if kept["ids"] else "at_least_once")
        if self.guarantee not in (was, "at_least_once"):
            raise UsageError(
                f"the query of this checkpoint writes topic {self.topic!r} {was.replace('_', ' ')}: where it was is not known to "
                f"guarantee={self.guarantee!r}. Give guarantee={was!r} to go on, or another checkpointLocation"
            )
        if self.guarantee == "exactly_once" and len(kept["ids"]) != partitions:
            raise UsageError(
                f"the query of this checkpoint has {len(kept['ids'])} writers of topic {self.topic!r}, not {partitions}: give "
                f"to_kafka(..., partitions={len(kept['ids'])}), or another checkpointLocation"
            )

    def _made_anew(self, topic_id: str) -> str:
        """Say that the topic with this id is no more."""
        return (
            f"topic {self.topic!r} was deleted and made anew since this query first wrote it: its id was {topic_id}. Records "
            "that were written before are gone with the old topic, and the numbers of this query mean nothing in the new one. "
            "Start with another checkpointLocation to write all rows anew, or run 'flux checkpoints LOCATION --forget-output' to "
            "write those that come next."
        )

    # ---- in the worker

    def open(self, context: SinkContext) -> None:
        """Connect, and read back how far earlier writers have come. That must be before the first write: a broker that has
        forgotten a producer takes any sequence."""
        if self.traits.exactly_once and len(self._ids) != context.partitions:
            raise UsageError(f"{self!r} was not prepared for {context.partitions} partitions")
        self._partition = context.partition
        self._producer = self._ids[context.partition] if self.traits.exactly_once else None
        # By partition of the topic: the next sequence, and the sequence modulo 2^31 that was read back and is not used yet;
        # then the sequence behind the last record that was acknowledged.
        self._next: dict[int, int] = {}
        self._told: dict[int, int | None] = {}
        self._acked: dict[int, int] = {}
        self._gone_since: float | None = None
        self._under_way = None
        self.close()
        self._connected = ProducerClient(self._bootstrap, self._security)
        self._connected.expect(self.topic, self._topic_id, self._made_anew(self._topic_id))
        self._read_back(range(self._topic_partitions))

    def recovered(self, sequence: int, note: Any = None) -> None:
        """Compare the number of this writer's records in each partition with ``note``, the number of rows that there can be by
        the checkpoint location (design: ahead)."""
        for partition, made in enumerate(note or ()):
            has = self._next.get(partition)
            has = self._resolved(partition, made) if has is None else has
            if has > made:
                raise SinkAhead(
                    f"partition {partition} of topic {self.topic!r} has {has} records of this writer, and the location knows of "
                    f"{made}"
                )

    def send(self, batch: pa.RecordBatch, position: Position) -> Collection[int] | None:
        """Send a small batch before ``write`` is called, if that is soon done. A large batch would wait for the broker to take
        it."""
        if batch.get_total_buffer_size() > SMALL_BYTES and logical_bytes(batch) > SMALL_BYTES:
            return None
        lines = self._lines(batch)
        partitions = [line.partition for line in lines]
        if not self._client.is_connected(self.topic, partitions) or not self._client.may_write(self.topic):
            return None
        for line in lines:
            self._go_on(line)
        lines = [line for line in lines if line.sent < line.rows]
        if not lines:
            return ()
        if self._codec is None:
            make_together(lines, self._batch_bytes, self.transactional)
        self._under_way = UnderWay(batch.num_rows, position, lines, self._begin_round(lines))
        return self._under_way.round.sent.files

    def write(self, batch: pa.RecordBatch, position: Position) -> None:
        under_way, self._under_way = self._under_way, None
        try:
            if under_way is None:
                self._write(batch)
            elif (under_way.rows, under_way.position) == (batch.num_rows, position):
                self._end_round(under_way.round)
                self._send_rest(under_way.lines)
            else:
                self._client.give_up(under_way.round.sent)
                self._write(batch)
            self._gone_since = None
        except Passing as error:
            self._check_there(error)
            raise

    def _write(self, batch: pa.RecordBatch) -> None:
        lines = self._lines(batch)
        self._client.confirm_before_writing(self.topic)
        for line in lines:
            self._go_on(line)
        self._send_rest(lines)

    def _send_rest(self, lines: list[PartitionBatches]) -> None:
        while lines := [line for line in lines if line.sent < line.rows]:
            self._end_round(self._begin_round(lines))

    def is_transient(self, error: Exception) -> bool:
        return isinstance(error, OSError | Passing | BrokerUnreachable)

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()

    def _lines(self, batch: pa.RecordBatch) -> list[PartitionBatches]:
        """Split a batch by partition of the topic. Rows of a partition keep their order."""
        columns = self._columns
        return by_partition(
            np.asarray(batch.column(PARTITION)), np.asarray(batch.column(SEQUENCE)), self._topic_partitions,
            columns.keys(batch), columns.values(batch), self._headers(batch),
            columns.timestamps(batch, time.time_ns() // 1_000_000),
        )  # fmt: skip

    def _headers(self, batch: pa.RecordBatch) -> pa.Array | None:
        return self._columns.header_entries(batch)

    def _begin_round(self, lines: list[PartitionBatches]) -> Round:
        """Send one record batch of each partition, as far as they fit a request. The next ones are made while the brokers
        work."""
        sending: dict[int, tuple[PartitionBatches, np.ndarray, int]] = {}
        size = 0
        for line in lines:
            line.make()
            if size and line.ahead is not None and size + line.ahead[0].size > REQUEST_BYTES:
                break
            data, rows = line.take()
            sending[line.partition] = (line, data, rows)
            size += data.size
        sent = self._client.begin(self.topic, {partition: data for partition, (_, data, _) in sending.items()})
        for line, _, _ in sending.values():
            line.make()
        return Round(sending, sent)

    def _end_round(self, round_: Round) -> None:
        problems: list[Exception] = []
        for partition, answer in self._client.finish(round_.sent).items():
            line, data, rows = round_.sending[partition]
            try:
                self._answered(line, data, rows, answer)
            except (KafkaError, DataLost, Passing, OSError) as error:
                problems.append(error)
        problems.sort(key=self.is_transient)  # errors that will not pass go first
        if problems:
            raise problems[0]

    def _answered(self, line: PartitionBatches, data: np.ndarray, rows: int, answer: Answer) -> None:
        name = "" if answer.error is None else answer.error.__name__
        where = f"partition {line.partition} of topic {self.topic!r}"
        if name in ("", "DuplicateSequenceNumberError"):
            line.sent += rows
            self._next[line.partition] = self._acked[line.partition] = line.first + line.sent
        elif name in ("OutOfOrderSequenceNumberError", "UnknownProducerIdError") and self.traits.exactly_once:
            before = line.sent
            self._read_back([line.partition])
            self._go_on(line)
            if line.sent == before:
                raise Passing(f"{where} does not take record {line.first + line.sent} of this writer: {name}")
        elif name in TOO_LARGE:
            self._make_smaller(line, data, rows, self._has(line) - line.first, name)
        else:
            self._refused(line, rows, answer)

    def _make_smaller(self, line: PartitionBatches, data: np.ndarray, rows: int, sent: int, error: str) -> None:
        """Make record batches smaller, for this partition and others. KafkaError if there is only one record in it."""
        if rows == 1:
            raise KafkaError(
                f"partition {line.partition} of topic {self.topic!r}: a record takes {data.size:,} bytes with its key and head; "
                f"{self._client.limit(self.topic, error)}. Raise that limit, or write smaller rows"
            )
        self._batch_bytes = max(1, min(self._batch_bytes, data.size) // 2)
        self._begin(line, sent)

    def _refused(self, line: PartitionBatches, rows: int, answer: Answer) -> None:
        where, name = f"partition {line.partition} of topic {self.topic!r}", answer.error.__name__
        if "Authorization" in name:
            raise self._client.refused(self.topic, name)
        if answer.error.retriable:
            raise Passing(f"{where}: {name}")
        raise KafkaError(f"{where}: the broker refuses a record batch of {rows} records: {name}. {answer.why}".rstrip())

    # ---- where to go on

    def _read_back(self, partitions: Sequence[int] | range) -> None:
        assert self._producer is not None
        told = self._client.reached(self.topic, partitions, self._producer, self._since, look=self._again)
        for partition, sequence in told.items():
            self._told[partition] = sequence
            self._next.pop(partition, None)

    def _go_on(self, line: PartitionBatches) -> None:
        """Leave out the rows that the broker has."""
        sent = self._has(line) - line.first
        if sent < 0:  # a broker that is no longer the leader may have answered
            self._client.forget()
            self._read_back([line.partition])
            sent = self._has(line) - line.first
        if sent < 0:
            raise DataLost(
                f"partition {line.partition} of topic {self.topic!r} has lost the last {-sent} records that it had acknowledged "
                "to this writer: was a leader elected that had not got them all (unclean.leader.election.enable)?"
            )
        self._begin(line, min(sent, line.rows))

    def _begin(self, line: PartitionBatches, sent: int) -> None:
        line.begin(sent, self._who(line, sent), self._codec, self._batch_bytes, self.transactional)

    def _who(self, line: PartitionBatches, sent: int) -> ProducerIdentity:
        return (
            NOBODY if self._producer is None else ProducerIdentity(self._producer, 0, (line.first + sent) % SEQUENCES)
        )

    def _has(self, line: PartitionBatches) -> int:
        if line.partition not in self._next:
            self._next[line.partition] = self._resolved(line.partition, line.first)
        return self._next[line.partition]

    def _resolved(self, partition: int, first: int) -> int:
        """Return the next sequence. Brokers tell it modulo 2^31: it is the number nearest to ``first``, because all rows
        before ``first`` are there."""
        told = self._told.get(partition)
        acked = self._acked.get(partition, 0)
        if told is None:
            if first > 0:
                log.info("partition %d of topic %s has no record of this writer any more", partition, self.topic)
            return max(first, acked)
        return first + (told - first + SEQUENCES // 2) % SEQUENCES - SEQUENCES // 2

    def _check_there(self, error: Passing) -> None:
        """End the query if the topic stays away."""
        if not self._client.lacks(self.topic):
            self._gone_since = None
            return
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        if now - self._gone_since > GONE_S:
            raise KafkaError(
                f"Kafka has had no topic {self.topic!r} for {GONE_S:g} s, which this query writes: it was deleted, or is hidden "
                "from the query's login"
            ) from error


class KafkaSinkAtLeastOnce(KafkaSink):
    """Sink without producer ids, at least once: for brokers that have none, and writers that may not read. Headers show
    readers the duplicates."""

    traits = replace(KafkaSink.traits, exactly_once=False)
    guarantee = "at_least_once"

    def _new_ids(self, client: ProducerClient, partitions: int) -> list[int]:
        """Get none: writers have no ids."""
        return []

    def _read_back(self, partitions: Sequence[int] | range) -> None:
        """Do nothing: brokers know nothing of writers without an id."""

    def _headers(self, batch: pa.RecordBatch) -> pa.Array:
        numbers = batch.column(SEQUENCE).cast(pa.string()).cast(pa.binary())
        ours = {FLUX_PARTITION: str(self._partition).encode(), FLUX_SEQUENCE: numbers}
        return with_headers(super()._headers(batch), ours, batch.num_rows)
