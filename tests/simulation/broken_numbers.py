"""Variants of the code in which rows that are read again go wrong, numbered rows above all."""

from __future__ import annotations

from typing import Any

import pytest

from flux.connectors.kafka.client.topic_ids import LogPosition
from flux.dataflow.plan import WorkerSourcePlan
from flux.exchange.producer import Producer
from flux.exchange.replay_check import Beginning, PriorAttempts
from flux.exchange.slices import RowNumbers
from flux.exchange.source_streams import SourceStreams
from flux.replica.output import ReplicaOutput
from tests.simulation import losing_logs

Patch = pytest.MonkeyPatch


def believes_every_retry(patch: Patch) -> None:
    """Believe a retried task that reads other rows."""
    patch.setattr(PriorAttempts, "on_made", lambda *given: None)
    patch.setattr(Producer, "_check", lambda *given: None)


def numbers_rows_anew(patch: Patch) -> None:
    """Count rows from 0 when a reader goes on in the middle."""
    begin = SourceStreams._begin

    def broken(self: SourceStreams, beginning: Beginning) -> None:
        begin(self, beginning)
        for producer in self.producers if self._positions else ():
            producer.log.begin_at(0)

    patch.setattr(SourceStreams, "_begin", broken)


def reads_from_the_start_each_time(patch: Patch) -> None:
    """Let the reader begin at the start, while the numbers of its rows go on in the middle."""
    begin = SourceStreams._begin

    def broken(self: SourceStreams, beginning: Beginning) -> None:
        begin(self, beginning._replace(position=b""))

    patch.setattr(SourceStreams, "_begin", broken)


def counts_rows_of_a_log(patch: Patch) -> None:
    """Number rows by counting from the beginning of the reading, although a log may have lost some since."""
    patch.setattr(WorkerSourcePlan, "own_numbers", False)


def settles_what_checkpoints_lack(patch: Patch) -> None:
    """Count a row as settled when the replicas that read have it, although checkpoints lack it."""

    def broken(self: Producer, sequence: int) -> bool:
        applied = self.applied_by_all()
        return applied is not None and applied >= sequence

    patch.setattr(Producer, "applied_through", broken)


def cuts_no_numbered_rows(patch: Patch) -> None:
    """Give an ordered step no part of a slice."""
    patch.setattr(RowNumbers, "cut", lambda self, through: None)


def takes_rows_that_it_has(patch: Patch) -> None:
    """Take rows once more that a replica has, from a batch that is cut elsewhere and holds rows before the first missing one."""

    def before(self: RowNumbers, number: int) -> Any:
        found = int(self.numbers.searchsorted(number))
        return 0 if found < len(self.numbers) and number not in (self.numbers + 1) else found

    patch.setattr(RowNumbers, "before", before)


def has_no_room_for_what_was_there(patch: Patch) -> None:
    """Keep rows that are read again within the bound of the log, even if an ordered step needs more."""
    patch.setattr(SourceStreams, "makes_again", False)


def has_room_only_where_rows_were_there(patch: Patch) -> None:
    """Give room beyond the bound of the log only to a stream that makes rows again, and not to the others of its reader."""

    def broken(self: SourceStreams, producer: Producer) -> bool:
        return more_room(self, producer) and producer.next_sequence < producer.earlier.front

    more_room = SourceStreams._has_more_room
    patch.setattr(SourceStreams, "_has_more_room", broken)


def passes_over_rows_whatever_a_source_says(patch: Patch) -> None:
    """Let a step go on without rows that are gone, also if their source says that the query ends then."""
    patch.setattr(WorkerSourcePlan, "goes_on_after_loss", property(lambda self: self.own_numbers))


def gives_nothing_for_a_step_without_rows(patch: Patch) -> None:
    """Give the numbers of a step whose rows are gone to the output behind it."""
    patch.setattr(ReplicaOutput, "fill", lambda self, step: None)


def numbers_a_new_topic_like_the_old_one(patch: Patch) -> None:
    """Number the rows of a topic that was made anew like the rows of the old topic."""
    patch.setattr(LogPosition, "first_number", 0)


def believes_every_topic_of_the_name(patch: Patch) -> None:
    """Let a reader go on in a new topic of the same name at the offset of the old one."""
    patch.setattr(losing_logs, "differ", lambda one, other: False)
