"""Changes of the table: a new one each, nothing else touched."""

from __future__ import annotations

from controller.replicas.table_changes import drop, make_live, retain, with_worker, without_worker
from partitioning.table import ReplicaAt, Table


def table(*stages: tuple[tuple[int, ...], ...], sources: tuple[tuple[int, ...], ...] = ()) -> Table:
    """Make a table. ``stages[s][p]``: workers of the replicas, the primary first."""
    placed = tuple(tuple(tuple(ReplicaAt(worker, 0) for worker in p) for p in stage) for stage in stages)
    workers = sorted({worker for stage in stages for p in stage for worker in p})
    return Table(4, placed, sources, {worker: f"at {worker}" for worker in workers})


def all_safe(stage: int, partition: int, replica: ReplicaAt) -> bool:
    return replica.live


def test_an_addition_lists_the_new_replica_with_the_epoch_as_its_incarnation_and_not_live() -> None:
    after = retain(table(((1, 2), (2, 1))), 0, 1, 3)
    assert after.epoch == 5
    assert after.replicas(0, 1) == (ReplicaAt(2, 0), ReplicaAt(1, 0), ReplicaAt(3, 5, False))
    assert after.replicas(0, 0) == (ReplicaAt(1, 0), ReplicaAt(2, 0))


def test_it_becomes_live_and_keeps_its_incarnation() -> None:
    after = make_live(retain(table(((1, 2),)), 0, 0, 3), 0, 0, 3)
    assert after.epoch == 6
    assert after.replicas(0, 0)[2] == ReplicaAt(3, 5, True)


def test_where_the_primary_is_dropped_the_next_in_the_list_takes_over() -> None:
    after = drop(table(((1, 2),)), 0, 0, 1)
    assert after.replicas(0, 0) == (ReplicaAt(2, 0),)


def test_a_lost_worker_leaves_every_partition_in_one_epoch_and_survivors_take_over() -> None:
    after, lost = without_worker(table(((1, 2), (2, 1)), ((1, 3),)), 1, all_safe, [2, 3])
    assert (after.epoch, lost) == (5, [])
    assert [[r.worker for r in replicas] for stage in after.stages for replicas in stage] == [[2], [2], [3]]
    assert list(after.endpoints) == [2, 3]


def test_a_replica_that_is_not_safe_does_not_take_over_and_is_dropped_with_the_primary() -> None:
    before = retain(table(((1, 2),)), 0, 0, 3)
    after, lost = without_worker(before, 1, all_safe, [])
    assert (after.replicas(0, 0), lost) == ((ReplicaAt(2, 0),), [])
    only, lost = without_worker(retain(table(((1,),)), 0, 0, 3), 1, all_safe, [])
    assert (only.replicas(0, 0), lost) == ((), [(0, 0)])


def test_a_replica_that_is_not_safe_stays_while_its_primary_lives() -> None:
    before = retain(table(((1, 2),)), 0, 0, 3)
    after, lost = without_worker(before, 2, all_safe, [])
    assert (after.replicas(0, 0), lost) == ((ReplicaAt(1, 0), ReplicaAt(3, 5, False)), [])


def test_its_partitions_of_sources_go_to_the_others_in_turn() -> None:
    before = table(((1, 2),), sources=((1, 2, 1, 1), ()))
    after, _ = without_worker(before, 1, all_safe, [2, 3])
    assert after.sources == ((2, 2, 2, 3), ())


def test_a_worker_joins_with_nothing() -> None:
    before = table(((1, 2),))
    after = with_worker(before, 9, "there")
    assert (after.epoch, after.stages, after.endpoints[9]) == (5, before.stages, "there")
