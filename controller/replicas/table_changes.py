"""AddReplica and DropReplica as changes of the table: pure functions that return a new table (design: add-replica,
drop-replica)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from controller.replicas.kinds import as_primary, may_lead
from flux.replica.kinds import kind_of
from partitioning.ids import ACTIVE, PartitionKey
from partitioning.table import ReplicaAt, Table

Replicas = tuple[ReplicaAt, ...]
#: A question about the replica of a stage's partition.
Judge = Callable[[int, int, ReplicaAt], bool]


#: A function from the replicas of a partition to the replicas after a change.
Change = Callable[[Replicas], Replicas]


class NextTable:
    """The next table while its changes are collected. Stages without a change stay the same objects."""

    def __init__(self, table: Table) -> None:
        self._before = table
        self._rows: dict[int, list[Replicas]] = {}
        self.epoch = table.epoch + 1
        #: Anything has changed.
        self.changed = False

    def change(self, key: PartitionKey, change: Change) -> None:
        """Change the replicas of a partition, which may change several times."""
        stage, partition = key
        rows = self._rows.get(stage)
        if rows is None:
            rows = self._rows[stage] = list(self._before.stages[stage])
        rows[partition] = change(rows[partition])
        self.changed = True

    def add(self, key: PartitionKey, worker: int, kind: str) -> None:
        """List a new replica, not live."""
        self.change(key, added(worker, self.epoch, kind))

    def table(self) -> Table:
        before, stages = self._before, list(self._before.stages)
        for stage, rows in self._rows.items():
            stages[stage] = tuple(rows)
        return replace(before, epoch=self.epoch, stages=tuple(stages))


def changed(table: Table, changes: Mapping[PartitionKey, Change]) -> Table:
    """Make the next table, in which these partitions have changed. Other stages stay the same objects."""
    following = NextTable(table)
    for key, change in changes.items():
        following.change(key, change)
    return following.table()


def added(worker: int, epoch: int, kind: str = ACTIVE) -> Change:
    """Phase 1: list the new replica, not live. From this table of ``epoch`` on, producers keep log entries for it."""
    return lambda replicas: (*replicas, ReplicaAt(worker, epoch, False, kind))


def made_live(worker: int) -> Change:
    """Phase 3: list the replica as live. From this table on, the primary needs its acks to commit."""
    return lambda replicas: tuple(replace(r, live=True) if r.worker == worker else r for r in replicas)


def dropped(worker: int) -> Change:
    """Leave this replica out. It is not the primary."""
    return lambda replicas: tuple(replica for replica in replicas if replica.worker != worker)


def in_place_of(source: int, target: int) -> Change:
    """Leave the source out, and put the target in its place: the second half of a move.

    If that is the first place, the target becomes primary; otherwise the primary keeps its role, because a primary is never
    demoted."""

    def change(replicas: Replicas) -> Replicas:
        moved = next(replica for replica in replicas if replica.worker == target)
        return tuple(moved if replica.worker == source else replica for replica in replicas if replica.worker != target)

    return change


def led_by(heir: int) -> Change:
    """Leave the primary out, and put the replica on worker ``heir`` first. All others are safe, so they stay."""

    def change(replicas: Replicas) -> Replicas:
        others = [replica for replica in replicas[1:] if replica.worker != heir]
        return (as_primary(next(replica for replica in replicas if replica.worker == heir)), *others)

    return change


def retain(table: Table, stage: int, partition: int, worker: int, kind: str = ACTIVE) -> Table:
    """Make the table with one replica more."""
    return changed(table, {PartitionKey(stage, partition): added(worker, table.epoch + 1, kind)})


def make_live(table: Table, stage: int, partition: int, worker: int) -> Table:
    """Make the table in which this replica is live."""
    return changed(table, {PartitionKey(stage, partition): made_live(worker)})


def drop(table: Table, stage: int, partition: int, worker: int) -> Table:
    """Make the table without this replica."""
    return changed(table, {PartitionKey(stage, partition): dropped(worker)})


def _holds(replicas: Replicas, worker: int) -> bool:
    for replica in replicas:  # noqa: SIM110 - any() takes several times as long, and this is asked of every partition
        if replica.worker == worker:
            return True
    return False


class AfterLoss(NamedTuple):
    """A table after a loss. ``orphans`` are partitions that have no safe replica left."""

    table: Table
    orphans: list[PartitionKey]


def without_worker(
    table: Table,
    worker: int,
    safe: Judge,
    readers: list[int],
    rather: Judge | None = None,
    stays: Judge | None = None,
) -> AfterLoss:
    """Make the table after the loss of a worker, in one epoch, and find the partitions that have no safe replica left.

    If the primary is lost, a safe replica takes over, and replicas that are not safe are dropped: their copy of state
    may hold steps that the survivors order differently. ``readers`` are workers that take over the lost worker's partitions of
    sources. ``rather`` tells which safe replicas are preferred as primary; ``stays``, which further replicas are kept although
    they cannot save the partition."""
    lost: list[PartitionKey] = []
    stages = list(table.stages)
    for stage, partitions in enumerate(table.stages):
        held = [number for number, replicas in enumerate(partitions) if _holds(replicas, worker)]
        rows = list(partitions)
        for partition in held:
            left = tuple(replica for replica in partitions[partition] if replica.worker != worker)
            if partitions[partition][0].worker == worker:
                left = _after_primary(stage, partition, left, safe, rather, stays)
            if not left:
                lost.append(PartitionKey(stage, partition))
            rows[partition] = left
        if held:  # other stages stay the same objects, so that readers of the table can skip them
            stages[stage] = tuple(rows)
    sources = tuple(
        tuple(
            readers[number % len(readers)] if owner == worker and readers else owner
            for number, owner in enumerate(owners)
        )
        for owners in table.sources
    )
    endpoints = {node: endpoint for node, endpoint in table.endpoints.items() if node != worker}
    after = replace(table, epoch=table.epoch + 1, stages=tuple(stages), sources=sources, endpoints=endpoints)
    return AfterLoss(after, lost)


class Preference(NamedTuple):
    """The preference among heirs. The best one sorts first: one that goes on at once before one that restores its state."""

    may_not_lead: bool
    restores: bool
    not_preferred: bool


def _after_primary(
    stage: int, partition: int, left: Replicas, safe: Judge, rather: Judge | None, stays: Judge | None
) -> Replicas:
    """Return the replicas that a partition keeps after the loss of its primary, the heir first; none if none of them is
    safe."""
    kept = tuple(r for r in left if safe(stage, partition, r) or (stays is not None and stays(stage, partition, r)))
    if not any(safe(stage, partition, replica) for replica in kept):
        return ()

    def preference(heir: ReplicaAt) -> Preference:
        behind = rather is not None and not rather(stage, partition, heir)
        return Preference(not may_lead(heir), not kind_of(heir).at_once, behind)

    heir, *others = sorted(kept, key=preference) if len(kept) > 1 else kept
    return (as_primary(heir), *others)


def with_worker(table: Table, worker: int, endpoint: str) -> Table:
    """Make the table with a worker that has joined and holds no replica yet."""
    return replace(table, epoch=table.epoch + 1, endpoints={**table.endpoints, worker: endpoint})


def read_elsewhere(table: Table, workers: Iterable[int], readers: list[int]) -> Table:
    """Give the partitions of sources that ``workers`` read to ``readers`` in turn."""
    given = set(workers)
    turns = itertools.cycle(readers)
    sources = tuple(tuple(next(turns) if owner in given else owner for owner in owners) for owners in table.sources)
    return replace(table, epoch=table.epoch + 1, sources=sources)
