"""``to_kafka`` with transactions: all records of one write become visible together, in all partitions, to readers with
``read_committed`` (design: kafka-transactions).

Each call of ``write`` is one transaction. It has the records, and the number of records that are now in each partition. A
new primary fences the one before and reads that writer's positions. A writer does the same after any failure, because a
commit that was not answered may have been made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.client.cluster import Passing
from flux.connectors.kafka.client.producer import TOO_LARGE, Answer, ProducerClient
from flux.connectors.kafka.client.transactions import ANEW, TransactionClient
from flux.connectors.kafka.errors import KafkaError
from flux.connectors.kafka.records.encoder import ProducerIdentity
from flux.connectors.kafka.write.partition_batches import PartitionBatches
from flux.connectors.kafka.write.sink import KafkaSink
from flux.dataflow.sink import SinkContext

#: Time for which the end of a sink tries to abort an open transaction. A broker does it by itself later.
_ABORT_S = 2.0


class KafkaSinkTransactional(KafkaSink):
    """Sink that writes exactly once for readers with ``read_committed``."""

    guarantee = "transactional"
    transactional = True
    traits = replace(KafkaSink.traits, sends_ahead=False)

    def _new_ids(self, client: ProducerClient, partitions: int) -> list[int]:
        """Get none: each life of a writer gets its own (``begin_life``)."""
        return []

    def open(self, context: SinkContext) -> None:
        self._partition = context.partition
        self._next: dict[int, int] = {}
        self._told: dict[int, int | None] = {}
        self._acked: dict[int, int] = {}
        self._gone_since = None
        self.close()
        name = f"flux-{context.query}-{context.number}-{context.partition}"
        self._connected = self._transactions = TransactionClient(self._bootstrap, self._security, name)
        self._connected.expect(self.topic, self._topic_id, self._made_anew(self._topic_id))
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Fence earlier writers, read how far they have come, and make sure that it was in this topic."""
        self._writer = self._transactions.begin_life()
        self._sequences: dict[int, int] = {}  # in this life
        self._read_back(range(self._topic_partitions))
        self._transactions.confirm(self.topic, 0.0)
        self._open = False

    def _read_back(self, partitions: Sequence[int] | range) -> None:
        self._told.update(self._transactions.positions(self.topic, partitions))
        for partition in partitions:
            self._next.pop(partition, None)

    def _resolved(self, partition: int, first: int) -> int:
        """Return the next sequence. A group's offsets are forgotten after days without commits; by then all replicas know how
        many records are there."""
        told = self._told.get(partition)
        return max(first, self._acked.get(partition, 0)) if told is None else told

    def _who(self, line: PartitionBatches, sent: int) -> ProducerIdentity:
        return self._writer._replace(sequence=self._sequences.get(line.partition, 0))

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._open:
            self._begin_anew()
        lines = self._lines(batch)
        for line in lines:
            self._go_on(line)
        lines = [line for line in lines if line.sent < line.rows]
        if not lines:
            return
        self._open = True
        self._transactions.add(self._writer, self.topic, [line.partition for line in lines])
        self._send_rest(lines)
        reached = {line.partition: line.first + line.rows for line in lines}
        self._transactions.put_positions(self._writer, self.topic, reached)
        self._transactions.confirm_before_writing(self.topic)
        self._transactions.end(self._writer, commit=True)
        self._open = False
        self._next.update(reached)
        self._acked.update(reached)

    def _answered(self, line: PartitionBatches, data: np.ndarray, rows: int, answer: Answer) -> None:
        name = "" if answer.error is None else answer.error.__name__
        if not name:
            line.sent += rows
            self._sequences[line.partition] = self._sequences.get(line.partition, 0) + rows
        elif name in TOO_LARGE:
            self._make_smaller(line, data, rows, line.sent, name)
        elif name in ANEW:
            raise Passing(f"partition {line.partition} of topic {self.topic!r}: {name}")
        else:
            self._refused(line, rows, answer)

    def close(self) -> None:
        if self._connected is not None and getattr(self, "_open", False):
            self._open = False
            with contextlib.suppress(OSError, Passing, KafkaError):
                self._transactions.end(self._writer, commit=False, limit_s=_ABORT_S)
        super().close()
