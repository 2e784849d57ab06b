"""Variants of the code in which what is read again goes wrong, numbered rows above all."""

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
    """A retried task that reads other rows is not found out."""
    patch.setattr(PriorAttempts, "on_made", lambda *given: None)
    patch.setattr(Producer, "_check", lambda *given: None)


def numbers_rows_anew(patch: Patch) -> None:
    """A reader that goes on in the middle counts its rows from 0."""
    begin = SourceStreams._begin

    def broken(self: SourceStreams, beginning: Beginning) -> None:
        begin(self, beginning)
        for producer in self.producers if self._positions else ():
            producer.log.begin_at(0)

    patch.setattr(SourceStreams, "_begin", broken)


def reads_from_the_start_each_time(patch: Patch) -> None:
    """The numbers go on where the rows should, and the reader does not."""
    begin = SourceStreams._begin

    def broken(self: SourceStreams, beginning: Beginning) -> None:
        begin(self, beginning._replace(position=b""))

    patch.setattr(SourceStreams, "_begin", broken)


def counts_rows_of_a_log(patch: Patch) -> None:
    """Rows are numbered by counting from where the reading begins, whatever a log has lost since."""
    patch.setattr(WorkerSourcePlan, "own_numbers", False)


def settles_what_checkpoints_lack(patch: Patch) -> None:
    """A row counts as needed no more when the replicas that read have it."""

    def broken(self: Producer, sequence: int) -> bool:
        applied = self.applied_by_all()
        return applied is not None and applied >= sequence

    patch.setattr(Producer, "applied_through", broken)


def cuts_no_numbered_rows(patch: Patch) -> None:
    """An ordered step gets no part of a slice."""
    patch.setattr(RowNumbers, "cut", lambda self, through: None)


def takes_rows_that_it_has(patch: Patch) -> None:
    """Of a batch that is cut elsewhere, the rows before the first one that is needed are taken once more."""

    def before(self: RowNumbers, number: int) -> Any:
        found = int(self.numbers.searchsorted(number))
        return 0 if found < len(self.numbers) and number not in (self.numbers + 1) else found

    patch.setattr(RowNumbers, "before", before)


def has_no_room_for_what_was_there(patch: Patch) -> None:
    """What is read again stays within the bound of the log, whatever an ordered step needs."""
    patch.setattr(SourceStreams, "makes_again", False)


def has_room_only_where_rows_were_there(patch: Patch) -> None:
    """A stream that makes rows again has room beyond the bound of its log; the others of the same reader have not."""

    def broken(self: SourceStreams, producer: Producer) -> bool:
        return more_room(self, producer) and producer.next_sequence < producer.earlier.front

    more_room = SourceStreams._has_more_room
    patch.setattr(SourceStreams, "_has_more_room", broken)


def passes_over_rows_whatever_a_source_says(patch: Patch) -> None:
    """A step goes on without rows that are gone, also of a source that ends the query then."""
    patch.setattr(WorkerSourcePlan, "goes_on_after_loss", property(lambda self: self.own_numbers))


def gives_nothing_for_a_step_without_rows(patch: Patch) -> None:
    """Output behind a step whose rows are gone has the numbers of that step."""
    patch.setattr(ReplicaOutput, "fill", lambda self, step: None)


def numbers_a_new_topic_like_the_old_one(patch: Patch) -> None:
    """Rows of a topic that was made anew have the numbers of rows of the old one."""
    patch.setattr(LogPosition, "first_number", 0)


def believes_every_topic_of_the_name(patch: Patch) -> None:
    """A reader goes on at the offset of the old topic."""
    patch.setattr(losing_logs, "differ", lambda one, other: False)
