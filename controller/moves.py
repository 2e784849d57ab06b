"""AddReplica and DropReplica as changes of the table (DESIGN 5): pure functions, a new table each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from partitioning.table import ReplicaAt, Table

Replicas = tuple[ReplicaAt, ...]


def _changed(table: Table, stage: int, partition: int, change: Callable[[Replicas], Replicas]) -> Table:
    rows = list(table.stages[stage])
    rows[partition] = change(rows[partition])
    stages = list(table.stages)
    stages[stage] = tuple(rows)
    return Table(table.epoch + 1, tuple(stages), table.sources, table.endpoints)


def retain(table: Table, stage: int, partition: int, worker: int) -> Table:
    """Step 1: list the new replica, not live; producers keep log entries for it from here on."""
    return _changed(table, stage, partition, lambda replicas: (*replicas, ReplicaAt(worker, table.epoch + 1, False)))


def make_live(table: Table, stage: int, partition: int, worker: int) -> Table:
    """Step 3: from now on the primary needs its acks to commit."""

    def change(replicas: Replicas) -> Replicas:
        return tuple(ReplicaAt(r.worker, r.incarnation, True) if r.worker == worker else r for r in replicas)

    return _changed(table, stage, partition, change)


def drop(table: Table, stage: int, partition: int, worker: int) -> Table:
    """Without this replica; if it was the primary, the next in the list is. The caller has seen to it that that one
    is safe."""
    return _changed(table, stage, partition, lambda replicas: tuple(r for r in replicas if r.worker != worker))


def _holds(replicas: Replicas, worker: int) -> bool:
    for replica in replicas:  # noqa: SIM110 - any() takes several times as long, and this is asked of every partition
        if replica.worker == worker:
            return True
    return False


def without_worker(
    table: Table, worker: int, safe: Callable[[int, int, ReplicaAt], bool], readers: list[int]
) -> tuple[Table, list[tuple[int, int]]]:
    """The table after the loss of a worker, in one epoch, and the partitions of which nothing safe is left.

    Where the primary is gone, a safe replica takes over, and replicas that are not safe are dropped: what they were
    given may not be what the survivors agree on. ``readers``: workers that take over its partitions of sources."""
    lost: list[tuple[int, int]] = []
    stages = list(table.stages)
    for stage, partitions in enumerate(table.stages):
        held = [number for number, replicas in enumerate(partitions) if _holds(replicas, worker)]
        rows = list(partitions)
        for partition in held:
            left = tuple(replica for replica in partitions[partition] if replica.worker != worker)
            if partitions[partition][0].worker == worker:
                left = tuple(replica for replica in left if safe(stage, partition, replica))
            if not left:
                lost.append((stage, partition))
            rows[partition] = left
        if held:  # stages that it has no part in stay the same object: nobody need look at them again
            stages[stage] = tuple(rows)
    sources = tuple(
        tuple(
            readers[number % len(readers)] if owner == worker and readers else owner
            for number, owner in enumerate(owners)
        )
        for owners in table.sources
    )
    endpoints = {node: endpoint for node, endpoint in table.endpoints.items() if node != worker}
    return Table(table.epoch + 1, tuple(stages), sources, endpoints), lost


def with_worker(table: Table, worker: int, endpoint: str) -> Table:
    """A worker has joined; nothing is placed there yet."""
    return Table(table.epoch + 1, table.stages, table.sources, {**table.endpoints, worker: endpoint})


def take_place(table: Table, stage: int, partition: int, source: int, target: int) -> Table:
    """The second half of a move: without the source, and the target in its place. Where that is the first, the target
    becomes primary; otherwise the primary stays what it is, because a primary is never demoted."""

    def change(replicas: Replicas) -> Replicas:
        moved = next(replica for replica in replicas if replica.worker == target)
        return tuple(moved if replica.worker == source else replica for replica in replicas if replica.worker != target)

    return _changed(table, stage, partition, change)


def read_elsewhere(table: Table, workers: Iterable[int], readers: list[int]) -> Table:
    """The partitions of sources that ``workers`` read go to ``readers`` in turn."""
    given = set(workers)
    turns = itertools.cycle(readers)
    sources = tuple(tuple(next(turns) if owner in given else owner for owner in owners) for owners in table.sources)
    return Table(table.epoch + 1, table.stages, sources, table.endpoints)
