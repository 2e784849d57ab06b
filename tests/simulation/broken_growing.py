"""Variants of the code in which a plan that grows goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from controller.course.removals import dependants
from controller.decide import plan_changes
from flux.dataflow.plan import EdgePlan, FromStage, Plan
from flux.exchange.producer import Producer
from flux.exchange.replay_check import Birth
from flux.exchange.source_streams import SourceStreams
from flux.replica.output import EdgeOutput
from flux.replica.replica import Replica
from flux.state.state_copy import StateCopy
from flux.state.state_copy import fitted as fits
from flux.worker import replica_lifecycle
from flux.worker.core import WorkerCore
from flux.worker.replica_lifecycle import ReplicaLifecycle
from flux.worker.subscriptions import Credit
from partitioning import table
from tests.simulation import worker_process

Patch = pytest.MonkeyPatch


def begins_edges_with_the_table(patch: Patch) -> None:
    """Begin an edge of a replica when the table comes, at any place of the order."""

    def broken(self: ReplicaLifecycle, replica: Replica) -> None:
        stage = self._plan.stages[replica.stage.id]
        version = max([self._plan.edges[edge].since for edge in stage.edges_out], default=0)
        if version > replica.version and replica.between_steps and not replica.finished:
            for outlet in self._new_outlets(replica, version):
                replica.output.open(outlet, replica.applied, replica.order.committed)
            replica.version = version
            replica.output.release(replica.order.committed)

    patch.setattr(ReplicaLifecycle, "_note_change", broken)


def numbers_a_new_edge_by_the_log_beside(patch: Patch) -> None:
    """Begin the stream on a new edge with the number of the oldest batch in the log of another stream."""
    new_outlets = ReplicaLifecycle._new_outlets

    def broken(self: ReplicaLifecycle, replica: Replica, version: int) -> list[EdgeOutput]:
        made = new_outlets(self, replica, version)
        for outlet in made:
            if replica.outlets:
                outlet.producer.begin_at(replica.outlets[0].producer.log.base, 0, settled=True)
        return made

    patch.setattr(ReplicaLifecycle, "_new_outlets", broken)


def copies_feed_the_edges_of_the_beginning(patch: Patch) -> None:
    """Restore a copy of a state without the edges that have begun since the start of the query."""

    def broken(copy: StateCopy, at_birth: Sequence[int], known: Callable[[int], bool]) -> StateCopy:
        return fits(copy, at_birth, lambda edge: known(edge) and edge in at_birth)

    patch.setattr(replica_lifecycle, "fitted", broken)


def shares_the_log_by_the_plan_of_the_day(patch: Patch) -> None:
    """Compute the share of a stream in the log from all edges that exist when its producer is made."""

    def broken(self: Plan, edge: EdgePlan, workers: int) -> int:
        streams = sum(each.producers for each in self.edges if isinstance(each, FromStage) is edge.from_stage)
        return max(self.settings.log_max_bytes // max(streams, 1), 1)

    patch.setattr(Plan, "log_share", broken)


def is_heard_before_it_is_stored(patch: Patch) -> None:
    """Send the stream of a new edge of a source as soon as the reader has begun it."""
    open_ = SourceStreams.open

    def broken(self: SourceStreams, edge: EdgePlan, producer: Producer, birth: Birth | None) -> bool:
        begun = open_(self, edge, producer, birth)
        self.unborn.pop(edge.id, None)
        return begun

    patch.setattr(SourceStreams, "open", broken)


def each_reader_begins_an_edge_anew(patch: Patch) -> None:
    """Begin an edge where its reader begins, and ignore the stored beginning."""
    begin = SourceStreams._begin_one

    def broken(self: SourceStreams, producer: Producer, first: int) -> None:
        birth = producer.earlier.birth
        producer.earlier.birth = birth if birth is None else Birth(first, birth.mark)
        begin(self, producer, first)

    patch.setattr(SourceStreams, "_begin_one", broken)


def keeps_the_credit_of_removed_edges(patch: Patch) -> None:
    """Keep the part of a worker's credit that streams of removed edges had."""
    patch.setattr(Credit, "release", lambda self, stream: None)


def tells_no_source_without_readers(patch: Patch) -> None:
    """Leave a new source that no worker reads out of the change of a table."""

    def broken(before: Sequence[Sequence[Any]], after: Sequence[Sequence[Any]]) -> dict[int, int]:
        known = [*before, *[()] * (len(after) - len(before))]
        return {id_: len(row) for id_, row in enumerate(after) if len(row) != len(known[id_])}

    patch.setattr(table, "_widths", broken)


def asks_readers_as_if_nothing_failed(patch: Patch) -> None:
    """Let an error of a method that is asked for counts fail the worker, instead of the stages that read the source."""

    def broken(core: WorkerCore) -> Any:
        lags = [lag for key in core.reading.open for lag in core.reading.lag(key)]
        return {
            "lags": lags,
            "bad_records": [bad for key in core.reading.open for bad in core.reading.bad_records(key)],
        }

    patch.setattr(worker_process, "of_readers", broken)


def takes_all_later_stages_along(patch: Patch) -> None:
    """Remove all later stages together with a failing one."""

    def broken(plan: Plan, stages: Sequence[int] = (), sources: Sequence[int] = ()) -> list[int]:
        gone = dependants(plan, stages, sources)
        return [stage.id for stage in plan.stages if gone and stage.since and stage.id >= gone[0]]

    patch.setattr(plan_changes, "dependants", broken)


def takes_changes_for_known(patch: Patch) -> None:
    """Let a process go by a table without having the plan that the table names."""
    from flux.worker.table_follower import PlanFollower

    go_by = WorkerCore._go_by

    def broken(self: WorkerCore, version: int) -> Any:
        if self.plans.of(version) is not None:
            go_by(self, version)

    patch.setattr(PlanFollower, "may_follow", lambda self, table: True)
    patch.setattr(WorkerCore, "_go_by", broken)
