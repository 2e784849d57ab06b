"""The readers of a stage's streams, followed from table to table, against the readers that each table has by itself."""

from __future__ import annotations

import random

import numpy as np

from flux.exchange.consumer_map import Consumers
from partitioning.table import ReplicaAt, Table, change_between, changed_by

PARTITIONS, WORKERS = 7, 5


def random_row(rng: random.Random, epoch: int) -> tuple[ReplicaAt, ...]:
    workers = rng.sample(range(WORKERS), rng.randrange(4))
    return tuple(ReplicaAt(worker, rng.randrange(epoch + 1), rng.random() < 0.7) for worker in workers)


def tables(seed: int, count: int) -> list[Table]:
    """Make tables, each of which differs from the one before in a few partitions."""
    rng = random.Random(seed)
    made = [
        Table(
            0,
            (tuple(random_row(rng, 0) for _ in range(PARTITIONS)),),
            ((0, 1),),
            {w: f"at {w}" for w in range(WORKERS)},
        )
    ]
    while len(made) < count:
        epoch = made[-1].epoch + 1
        rows = list(made[-1].stages[0])
        for partition in rng.sample(range(PARTITIONS), rng.randrange(4)):
            rows[partition] = random_row(rng, epoch)
        made.append(Table(epoch, (tuple(rows),), made[-1].sources, made[-1].endpoints))
    return made


def by_the_table(table: Table) -> dict[int, list[tuple[int, int, bool]]]:
    hosted: dict[int, list[tuple[int, int, bool]]] = {}
    for partition, replicas in enumerate(table.stages[0]):
        for replica in replicas:
            hosted.setdefault(replica.worker, []).append((partition, replica.incarnation, not replica.live))
    return hosted


def test_after_any_tables_it_says_what_the_newest_says() -> None:
    for seed in range(200):
        consumers = Consumers(0)
        for table in tables(seed, 8):
            consumers.follow(table)
            said = {
                worker: list(zip(at.partitions.tolist(), at.since.tolist(), at.coming.tolist(), strict=True))
                for worker, at in consumers.of_worker.items()
            }
            assert said == by_the_table(table)
            assert consumers.ranks.by_rank.tolist() == table.partitions_by_rank(0).tolist()
            for worker, at in consumers.of_worker.items():
                assert np.flatnonzero(at.hosts).tolist() == at.partitions.tolist(), worker


def test_no_two_replicas_of_a_partition_share_a_column_and_a_worker_keeps_its_own() -> None:
    for seed in range(200):
        consumers, before = Consumers(0), dict[tuple[int, int], int]()
        for table in tables(seed, 8):
            consumers.follow(table)
            columns = {
                (partition, worker): slot
                for worker, at in consumers.of_worker.items()
                for partition, slot in zip(at.partitions.tolist(), at.slots.tolist(), strict=True)
            }
            places = [(partition, slot) for (partition, _), slot in columns.items()]
            assert len(set(places)) == len(places)
            assert all(slot < consumers.width for slot in columns.values())
            assert all(columns[key] == before[key] for key in columns.keys() & before.keys())
            before = columns


def test_a_worker_that_a_table_does_not_concern_keeps_its_entry() -> None:
    consumers = Consumers(0)
    first = Table(0, (((ReplicaAt(0, 0),), (ReplicaAt(1, 0),)),), (), {})
    consumers.follow(first)
    kept, changes = consumers.of_worker[0], consumers.changes
    consumers.follow(Table(1, ((first.stages[0][0], (ReplicaAt(2, 1),)),), (), {}))
    assert consumers.of_worker[0] is kept
    assert set(consumers.of_worker) == {0, 2}
    assert consumers.changes == changes + 1
    consumers.follow(Table(2, ((first.stages[0][0], (ReplicaAt(2, 1),)),), (), {3: "came"}))
    assert consumers.changes == changes + 1, "nothing differs here"


def test_a_change_turns_one_table_into_the_other_and_shares_the_rest() -> None:
    for seed in range(50):
        one, *others = tables(seed, 5)
        for other in others:
            after = changed_by(one, change_between(one, other))
            assert after == other
            for before, now in zip(one.stages[0], after.stages[0], strict=True):
                assert now is before or now != before
            one = after
