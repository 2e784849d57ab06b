"""The newest table from whole tables and changes, however these come."""

from __future__ import annotations

import random
import time

import pyarrow as pa
import pytest
from harness import LIMIT_S, Rows, ThreadQuery, dataframe

import flux
from flux.wire.control import NewTable, TableChanged
from flux.worker.table_follower import TableFollower
from partitioning.table import ReplicaAt, RowChange, Table, TableChange, change_between, changed_by


def table(epoch: int, *workers: int, readers: tuple[int, ...] = (0,)) -> Table:
    return Table(
        epoch, (tuple((ReplicaAt(worker, 0),) for worker in workers),), (readers,), {w: f"at {w}" for w in workers}
    )


TABLES = [table(0, 0, 1), table(1, 0, 2), table(2, 2, 2, readers=(2,)), table(3, 1, 2), table(4, 1, 0)]


def whole(epoch: int) -> NewTable:
    return NewTable(table=TABLES[epoch], complete={})


def change(base: int, epoch: int) -> TableChanged:
    return TableChanged(change=change_between(TABLES[base], TABLES[epoch]))


def test_changes_follow_one_another() -> None:
    newest = TableFollower(1.0)
    assert newest.take(whole(0)) == TABLES[0]
    for epoch in range(1, 5):
        assert newest.take(change(epoch - 1, epoch)) == TABLES[epoch]
    assert not newest.missed


def test_a_change_of_another_table_is_not_applied_and_the_whole_is_asked_for() -> None:
    newest = TableFollower(1.0)
    newest.take(whole(0))
    assert newest.take(change(1, 2)) is None
    assert newest.epoch == 0
    assert newest.ask(10.0)
    assert not newest.ask(10.5), "the answer may be on its way"
    assert newest.ask(11.0), "it was lost"
    assert newest.take(change(0, 1)) == TABLES[1], "it came late, and fits"
    assert newest.take(whole(2)) == TABLES[2]
    assert not newest.ask(20.0)


def test_the_last_change_is_missed_when_the_controller_says_how_far_it_is() -> None:
    newest = TableFollower(1.0)
    newest.take(whole(1))
    newest.heard_of(1)
    assert not newest.ask(5.0)
    newest.heard_of(2)
    assert newest.ask(5.0)
    newest.take(change(1, 2))
    assert not newest.ask(9.0), "it was only late"


def test_a_change_before_any_table_is_missed_too() -> None:
    newest = TableFollower(1.0)
    assert newest.take(change(0, 1)) is None
    assert newest.ask(0.0)


def test_what_is_old_changes_nothing() -> None:
    newest = TableFollower(1.0)
    newest.take(whole(3))
    for old in (change(0, 1), change(2, 3), whole(2), whole(3)):
        assert newest.take(old) is None
    assert newest.epoch == 3
    assert not newest.missed


@pytest.mark.parametrize("row", [RowChange(7, 0, ()), RowChange(0, 9, ())])
def test_a_change_of_what_the_table_does_not_have_is_refused(row: RowChange) -> None:
    wrong = TableChange(0, 1, [row], [], {}, [])
    with pytest.raises(ValueError, match="does not have"):
        changed_by(TABLES[0], wrong)
    newest = TableFollower(1.0)
    newest.take(whole(0))
    assert newest.take(TableChanged(change=wrong)) is None
    assert newest.missed


def test_changes_lost_doubled_and_in_any_order_never_give_a_table_that_was_not_made() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        newest = TableFollower(1.0)
        newest.take(whole(0))
        for _ in range(20):
            if newest.missed and rng.random() < 0.3:
                newest.take(whole(rng.randrange(newest.epoch, 5)))
            base = rng.randrange(4)
            newest.take(change(base, rng.randrange(base + 1, 5)))
            assert newest.table == TABLES[newest.epoch]


SCHEMA = pa.schema([("k", pa.int64())])


@flux.stage(key="k", partitions=4, replicas=2)
class Count(flux.Aggregate):
    n = flux.count()


def test_processes_that_lose_a_change_get_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all processes lose the change that tells of a lost worker: its partitions are taken over all the same."""
    take, lost = TableFollower.take, list[int]()

    def broken(self: TableFollower, command: NewTable | TableChanged) -> Table | None:
        if isinstance(command, TableChanged) and command.change.gone:
            lost.append(command.change.epoch)
            return None
        return take(self, command)

    rows = Rows()
    options = {"replicas_allow_same_executor": True, "heartbeat_interval": "20ms"}
    with ThreadQuery(rows.stage(Count(dataframe(SCHEMA))), workers=3, **options) as query:
        query.started()
        monkeypatch.setattr(TableFollower, "take", broken)
        core = query.server.core
        held = [{r.worker for r in row} for stage in core.table.stages for row in stage]
        worker = next(node for node in core.members.workers if {node} not in held)
        query.server.command(lambda now: core.fail(worker, now))
        end = time.monotonic() + LIMIT_S
        while any(member.epoch < core.table.epoch for member in list(core.members.workers.values())):
            assert time.monotonic() < end, "somebody still goes by an old table"
            time.sleep(0.01)
        query.feed([[pa.record_batch({"k": pa.array(range(100))})]])
        query.wait()
    assert lost, "a change was lost"
    assert sum(row["n"] for row in rows) == 100
