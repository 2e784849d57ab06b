"""Variants in which a standby acks rows that it lacks, or keeps steps that it must not, or no producer asks for checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from controller.decide.losses import Losses
from controller.replicas.replica_safety import ReplicaSafety
from controller.replicas.table_changes import Judge, without_worker
from flux.exchange.consumer_map import ConsumersAt
from flux.exchange.inbound import Inbound
from flux.exchange.retention import CheckpointRequests
from flux.replica import kinds
from flux.replica.deltas import DeltaTracker
from flux.replica.kinds import kind_of
from flux.state.standby import Checkpoint, Standby
from flux.state.state_copy import OutputNow
from flux.worker.replica_lifecycle import ReplicaLifecycle
from flux.worker.subscriptions import Subscriptions
from partitioning.ids import DISK, STANDBY, UPSTREAM, PartitionKey, StreamId

Patch = pytest.MonkeyPatch


def acks_what_is_ordered(patch: Patch) -> None:
    """Ack ordered rows: producers may drop rows that no checkpoint has."""

    def position(self: Standby, stream: StreamId) -> int:
        ordered = [
            entry[2] for each in self.order.since(self.order.base) for entry in each.slices if entry[:2] == stream
        ]
        return max([self.checkpoint.next.get(stream, 0), *(sequence + 1 for sequence in ordered)])

    patch.setattr(Standby, "position", position)


def takes_checkpoints_before_they_are_committed(patch: Patch) -> None:
    """Take a checkpoint whose steps are not committed: a later primary may have other steps in their place."""

    def settle(self: Standby) -> None:
        if self.beside is not None and self.beside.step <= self.order.end:
            self.checkpoint, self.beside = self.beside, None
            self.order.committed = max(self.order.committed, self.checkpoint.step)
            self.order.trim(self.checkpoint.step)
            self._taken(self)

    patch.setattr(Standby, "settle", settle)


def keeps_checkpoints_of_earlier_terms(patch: Patch) -> None:
    """Keep a checkpoint of an earlier term: the number of its steps alone does not say which steps these are."""

    def settle(self: Standby) -> None:
        if self.beside is not None and self.order.committed >= self.beside.step:
            self.checkpoint, self.beside = self.beside, None
            self.order.trim(self.checkpoint.step)
            self._taken(self)

    patch.setattr(Standby, "settle", settle)


def checkpoints_have_no_output(patch: Patch) -> None:
    """Leave the output out of checkpoints: batches that consumers have not got by then are in no log any more."""
    patch.setattr(OutputNow, "of", OutputNow.after)


def sends_the_changes_of_the_newest_cut_alone(patch: Patch) -> None:
    """Send only the newest changes, which build on the checkpoint of another standby: this standby lacks the changes before."""
    patch.setattr(DeltaTracker, "since", lambda self, held: [])


def applies_changes_to_the_checkpoint_before(patch: Patch) -> None:
    """Apply changes to the last committed checkpoint, and ack them, though they build on a later one, which is thrown away."""
    holds = Standby.holds

    def before(self: Standby, term: int, number: int) -> Checkpoint | None:
        found = holds(self, term, number)
        return found if found is None or self.checkpoint.data is None else self.checkpoint

    patch.setattr(Standby, "holds", before)


def keeps_the_newest_changes_alone(patch: Patch) -> None:
    """Throw away the changes before the newest ones, and ack all."""

    def after(self: Checkpoint, base: Checkpoint) -> Checkpoint:
        assert self.data is not None
        return replace(self, data=base.data, changes=(self.data,), base=-1)

    patch.setattr(Checkpoint, "after", after)


def commits_without_standbys(patch: Patch) -> None:
    """Commit without the acks of standbys: a standby may lack steps whose output the outside has seen."""
    known = {
        kind.name: replace(kind, commits=False) if kind.name in (STANDBY, UPSTREAM, DISK) else kind
        for kind in kinds.registered()
    }
    patch.setattr(kinds, "_known", known)


def nobody_presses(patch: Patch) -> None:
    """Let producers that are out of room wait for the next checkpoint, without asking for it."""
    patch.setattr(CheckpointRequests, "look", lambda self, *about: iter(()))


def standbys_ack_once(patch: Patch) -> None:
    """Never repeat an ack that was lost."""
    patch.setattr(Subscriptions, "on_press", lambda self, connection, stream: None)


def a_standby_reads_on_without_a_greeting(patch: Patch) -> None:
    """Let producers send the next rows to a standby that begins to read, and not the earlier rows that it lacks."""

    def same_lives(self: ConsumersAt, other: ConsumersAt) -> bool:
        return np.array_equal(self.partitions, other.partitions) and np.array_equal(self.since, other.since)

    patch.setattr(ConsumersAt, "same_lives", same_lives)


def reads_from_who_does_not_know_all_readers(patch: Patch) -> None:
    """Read from a producer that has not heard of the take-over: it leaves out rows for the replica that reads now."""

    def readable(self: Subscriptions, inbound: Inbound) -> list[int]:
        listed = self._producers_of(inbound.stream)
        return [worker for worker in inbound.offers if listed.get(worker, (-1, False))[1]]

    patch.setattr(Subscriptions, "_readable", readable)


def takes_the_first_table_that_comes_for_the_first(patch: Patch) -> None:
    """Take the first table that comes for the first with a replica: a producer that goes by an earlier table may take the replica
    for a standby, and send it no rows."""

    create = ReplicaLifecycle.create

    def first(self: ReplicaLifecycle, key: PartitionKey, incarnation: int) -> None:
        create(self, key, incarnation)
        self.replicas[key].reads_since = incarnation

    patch.setattr(ReplicaLifecycle, "create", first)


def a_standby_is_no_heir_of_a_silent_worker(patch: Patch) -> None:
    """Let a stopped worker keep its partitions as if it had the last safe replica of each."""
    is_heir = ReplicaSafety.is_heir_of_silent

    def broken(self: ReplicaSafety, since: float) -> Judge:
        found = is_heir(self, since)
        return lambda stage, partition, replica: kind_of(replica).at_once and found(stage, partition, replica)

    patch.setattr(ReplicaSafety, "is_heir_of_silent", broken)


def the_directory_is_no_heir_of_a_silent_worker(patch: Patch) -> None:
    patch.setattr(
        Losses,
        "_others_go_on",
        lambda self, member, known: (
            not without_worker(
                self._board.table, member.node, self._repairs.safety.is_heir_of_silent(member.heard), []
            ).orphans
        ),
    )
