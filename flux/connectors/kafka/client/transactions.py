"""A Kafka cluster as a writer of transactions needs it.

Law: ``begin_life`` fences earlier writers under the same transactional id, and ends their open transactions. ``positions``
then returns the committed positions, and only the writer with the newest life can change them.

The progress of a writer is in its transactions, as offsets of a consumer group named like the transactional id: for each
partition of the topic, the number of records that it has written there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flux.connectors.kafka.client.cluster import ATTEMPT_S, Address, Passing
from flux.connectors.kafka.client.kafka_python import error_of, library
from flux.connectors.kafka.client.producer import ProducerClient
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.errors import KafkaError
from flux.connectors.kafka.records.encoder import ProducerIdentity

T = TypeVar("T")

#: Age at which a broker aborts an open transaction by itself, so that its readers go on.
TIMEOUT_MS = 60_000
#: Time that a coordinator may need to finish earlier work, and the pauses between questions.
_SETTLE_S, _PAUSE_S, _PAUSE_MAX_S = 20.0, 0.002, 0.1
_GROUP, _TRANSACTION = 0, 1
#: First version of OffsetFetch that waits for offsets of transactions that are not through.
_STABLE = 7
#: Errors that pass by themselves, while the transaction stays as it is.
_SOON = (
    "ConcurrentTransactionsError", "CoordinatorLoadInProgressError", "CoordinatorNotAvailableError", "NotCoordinatorError",
    "UnstableOffsetCommitError",
)  # fmt: skip
#: Errors after which the transaction is lost, or its state is not known; a new life of the writer goes on. A broker with
#: two writers that fence each other was seen to give an error without a name.
ANEW = (
    "UnknownError",
    "InvalidProducerEpochError", "ProducerFencedError", "InvalidTxnStateError", "InvalidProducerIdMappingError",
    "OutOfOrderSequenceNumberError", "UnknownProducerIdError", "TransactionAbortableError", "TransactionCoordinatorFencedError",
    "DuplicateSequenceNumberError",
)  # fmt: skip


class _Soon(Exception):
    """Failure after which the same request is sent again."""


class TransactionClient(ProducerClient):
    """Client of one writer. ``transactional_id`` belongs to the writer, and is the name of its group."""

    def __init__(self, bootstrap: Sequence[Address], security: Security, transactional_id: str) -> None:
        super().__init__(bootstrap, security)
        self.transactional_id: str = transactional_id
        self._coordinators: dict[int, Address] = {}

    def begin_life(self) -> ProducerIdentity:
        """Begin a new life: get a producer id and epoch that no other writer has. Its sequences begin at 0."""
        kind = library().InitProducerId

        def asked() -> ProducerIdentity:
            message = kind(
                transactional_id=self.transactional_id, transaction_timeout_ms=TIMEOUT_MS, producer_id=-1, producer_epoch=-1
            )  # fmt: skip
            answer = self._told(_TRANSACTION, message)
            self._check_step(answer.error_code, _TRANSACTION)
            return ProducerIdentity(int(answer.producer_id), int(answer.producer_epoch), 0)

        return self._settled(asked)

    def positions(self, topic: str, partitions: Iterable[int]) -> dict[int, int | None]:
        """Return the number of committed records in each partition. None: it is not known, because there are none or they are
        long ago."""
        kind = library().OffsetFetch
        wanted = list(partitions)

        def asked() -> dict[int, int | None]:
            named = [kind.OffsetFetchRequestTopic(name=topic, partition_indexes=wanted)]
            message = kind(group_id=self.transactional_id, topics=named, require_stable=True)
            answer = self._told(_GROUP, message, least=_STABLE)
            self._check_step(answer.error_code, _GROUP)
            found: dict[int, int | None] = {}
            for each in answer.topics:
                for part in each.partitions:
                    self._check_step(part.error_code, _GROUP)
                    offset = int(part.committed_offset)
                    found[part.partition_index] = offset if offset >= 0 else None
            if set(found) != set(wanted):
                raise Passing("the broker left partitions out of its answer")
            return found

        return self._settled(asked)

    def add(self, who: ProducerIdentity, topic: str, partitions: Sequence[int]) -> None:
        """Add partitions to the transaction. The first call begins it."""
        kind = library().AddPartitionsToTxn

        def asked() -> None:
            named = [kind.AddPartitionsToTxnTopic(name=topic, partitions=list(partitions))]
            message = kind(
                v3_and_below_transactional_id=self.transactional_id, v3_and_below_producer_id=who.id,
                v3_and_below_producer_epoch=who.epoch, v3_and_below_topics=named,
            )  # fmt: skip
            for each in self._told(_TRANSACTION, message).results_by_topic_v3_and_below:
                for part in each.results_by_partition:
                    self._check_step(part.partition_error_code, _TRANSACTION)

        self._settled(asked)

    def put_positions(self, who: ProducerIdentity, topic: str, positions: Mapping[int, int]) -> None:
        """Put positions into the transaction."""
        added = library().AddOffsetsToTxn(
            transactional_id=self.transactional_id, producer_id=who.id, producer_epoch=who.epoch, group_id=self.transactional_id
        )  # fmt: skip
        kind = library().TxnOffsetCommit
        parts = kind.TxnOffsetCommitRequestTopic

        def asked() -> None:
            named = [
                parts.TxnOffsetCommitRequestPartition(
                    partition_index=partition, committed_offset=offset, committed_leader_epoch=-1, committed_metadata=""
                )
                for partition, offset in positions.items()
            ]
            message = kind(
                transactional_id=self.transactional_id, group_id=self.transactional_id, producer_id=who.id,
                producer_epoch=who.epoch, generation_id=-1, member_id="",
                group_instance_id=None, topics=[parts(name=topic, partitions=named)],
            )  # fmt: skip
            for each in self._told(_GROUP, message).topics:
                for part in each.partitions:
                    self._check_step(part.error_code, _GROUP)

        self._settled(lambda: self._check_step(self._told(_TRANSACTION, added).error_code, _TRANSACTION))
        self._settled(asked)

    def end(self, who: ProducerIdentity, commit: bool, limit_s: float = ATTEMPT_S) -> None:
        """Commit or abort the transaction. If this raises, it may be committed or not: only ``begin_life`` and ``positions``
        tell."""
        message = library().EndTxn(
            transactional_id=self.transactional_id, producer_id=who.id, producer_epoch=who.epoch, committed=commit
        )
        self._settled(lambda: self._check_step(self._told(_TRANSACTION, message, limit_s).error_code, _TRANSACTION))

    def _told(self, kind: int, message: Any, limit_s: float = ATTEMPT_S, least: int = 0) -> Any:
        """Ask the coordinator, and return its answer. It must know version ``least`` of the message."""
        if kind not in self._coordinators:
            find = library().FindCoordinator
            answer = self._ask(
                None, find(key=self.transactional_id, key_type=kind, coordinator_keys=[self.transactional_id]), limit_s
            )
            found = answer.coordinators[0] if getattr(answer, "coordinators", None) else answer
            self._check_step(found.error_code, kind)
            self._coordinators[kind] = found.host, found.port
        try:
            if not self._connection(self._coordinators[kind], limit_s).knows(message, least):
                raise KafkaError("guarantee='transactional' needs brokers of Kafka 2.5 or later; give 'exactly_once'")
            return self._ask(self._coordinators[kind], message, limit_s)
        except OSError:
            self._coordinators.clear()
            raise

    def _check_step(self, code: int, kind: int) -> None:
        if not code:
            return
        error = error_of(code)
        name = error.__name__
        if name in _SOON:
            if "Coordinator" in name:
                self._coordinators.pop(kind, None)
            raise _Soon(name)
        if "Authorization" in name:
            raise self.refused(f"in transactions, transactional id and group {self.transactional_id}", name)
        if name in ANEW or error.retriable or error.invalid_metadata:
            self.forget()
            raise Passing(f"transaction of {self.transactional_id}: {name} (code {code})")
        raise KafkaError(f"the broker refuses a transaction of {self.transactional_id}: {name} (code {code})")

    def _settled(self, attempt: Callable[[], T]) -> T:
        limit, pause = time.monotonic() + _SETTLE_S, _PAUSE_S
        while True:
            try:
                return attempt()
            except _Soon as error:
                if time.monotonic() > limit or self._ended.wait(pause):
                    raise Passing(f"transaction of {self.transactional_id}: {error}") from None
                pause = min(2 * pause, _PAUSE_MAX_S)
