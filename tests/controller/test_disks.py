"""Replicas in a directory as the controller sees them: the table that goes out, a query that goes on, and partitions of which
nothing else is left (design: vault)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from controller.course.query_phases import QueryPhase
from controller.decide.controller import Controller
from controller.replicas.placement import placement_of
from controller.replicas.spread import WorkerPlace
from controller.replicas.table_changes import retain, without_worker
from controller.replicas.vault_replicas import VaultReplicas, revived
from flux.errors import QueryFailed, QueryTimeout
from flux.wire.control import (
    Checkpointed,
    Goodbye,
    Heartbeat,
    LastCheckpoints,
    NewTable,
    Rejected,
    ReplicaCaughtUp,
    Stop,
    TableChanged,
    Welcome,
)
from partitioning.ids import ACTIVE, DISK, STANDBY, PartitionKey
from partitioning.table import ReplicaAt, Table, changed_by
from tests.controller.cluster import Cluster, epoch_of, register

VAULT = ReplicaAt(9, 40, True, DISK)


def table(epoch: int = 0) -> Table:
    rows = (
        ((ReplicaAt(0, 0), ReplicaAt(1, 0)), (ReplicaAt(1, 0), ReplicaAt(2, 0)), (ReplicaAt(2, 0), ReplicaAt(0, 0))),
        ((ReplicaAt(1, 0), ReplicaAt(0, 0, kind=STANDBY)),),
    )
    return Table(epoch, rows, ((0, 1),), {worker: f"at {worker}" for worker in range(3)})


def disks(first_epoch: int = 40) -> VaultReplicas:
    made = VaultReplicas()
    made.open(VAULT.worker, "at the vault", first_epoch)
    return made


def safe(stage: int, partition: int, replica: ReplicaAt) -> bool:
    return True


# ---- messages


def test_without_a_vault_the_table_goes_out_as_it_is() -> None:
    given = table()
    assert VaultReplicas().shown(given) is given
    assert VaultReplicas().first(given) is given


def test_the_vault_is_the_last_of_each_row() -> None:
    given, shown = table(41), disks().shown(table(41))
    assert shown.stages == tuple(tuple((*row, VAULT) for row in rows) for rows in given.stages)
    assert shown.endpoints == {**given.endpoints, VAULT.worker: "at the vault"}
    assert (shown.epoch, shown.sources) == (given.epoch, given.sources)


def test_what_has_not_changed_stays_the_same_object() -> None:
    made, before = disks(), table(41)
    first = made.shown(before)
    assert made.shown(before) is first
    after = retain(before, 0, 1, 0)
    shown = made.shown(after)
    assert shown.stages[1] is first.stages[1]
    assert [row is old for row, old in zip(shown.stages[0], first.stages[0], strict=True)] == [True, False, True]
    assert shown.stages[0][1] == (*after.stages[0][1], VAULT)


def test_a_partition_that_nobody_has_stays_so_and_comes_back_with_the_vault() -> None:
    made, before = disks(), table(41)
    made.shown(before)
    empty = Table(42, ((*before.stages[0][:2], ()), before.stages[1]), before.sources, before.endpoints)
    assert made.shown(empty).stages[0][2] == ()
    again = Table(43, before.stages, before.sources, before.endpoints)
    assert made.shown(again).stages[0][2] == (*before.stages[0][2], VAULT)
    assert made.shown(again).stages[0][0] == (*before.stages[0][0], VAULT)


# ---- the first table


def test_a_new_directory_changes_nothing_at_the_first_table() -> None:
    given = table()
    assert disks(0).first(given) is given


def test_the_first_table_of_a_query_that_goes_on_has_primaries_of_its_first_epoch_only() -> None:
    first = disks().first(table())
    assert first.epoch == 40
    assert first.stages == tuple(tuple((ReplicaAt(row[0].worker, 40),) for row in rows) for rows in table().stages)
    assert (first.sources, first.endpoints) == (table().sources, table().endpoints)


# ---- partitions of which nothing else is left


def placement(*workers: int, leaving: tuple[int, ...] = (), executor: str = "e{}") -> Any:
    return placement_of({w: WorkerPlace.of("", "h", executor.format(w)) for w in workers}, leaving, False)


def test_orphans_get_new_primaries_of_the_same_epoch_at_the_workers_with_the_fewest() -> None:
    rows = tuple((ReplicaAt(partition % 3, 0),) for partition in range(9))
    given = Table(5, (rows, ((ReplicaAt(0, 0),),)), (), {0: "a", 1: "b", 2: "c"})
    after, orphans = without_worker(given, 0, safe, [1, 2])
    assert len(orphans) == 4
    made = revived(after, orphans, placement(1, 2))
    assert made is not None
    assert made.epoch == after.epoch == 6
    assert Counter(row[0].worker for rows in made.stages for row in rows) == {1: 5, 2: 5}
    new = [made.replicas(*key) for key in orphans]
    assert all(row == (ReplicaAt(row[0].worker, 6, True, ACTIVE),) for row in new)
    others = {PartitionKey(0, partition) for partition in range(9)} - set(orphans)
    assert all(made.replicas(*key) is given.replicas(*key) for key in others)
    assert (made.sources, made.endpoints) == (after.sources, after.endpoints)


def test_where_no_worker_is_left_there_is_no_table() -> None:
    given = Table(5, (((ReplicaAt(0, 0),),),), (), {0: "a"})
    after, orphans = without_worker(given, 0, safe, [])
    assert revived(after, orphans, placement()) is None


def test_where_nothing_is_lost_the_table_is_the_same() -> None:
    assert revived(table(5), [], placement(0, 1, 2)) == table(5)


def test_several_stages_are_revived_at_once() -> None:
    rows = ((ReplicaAt(0, 0),), (ReplicaAt(0, 0),))
    after, orphans = without_worker(Table(5, (rows, rows), (), {0: "a", 1: "b"}), 0, safe, [1])
    made = revived(after, orphans, placement(1))
    assert made is not None
    assert made.stages == (((ReplicaAt(1, 6),),) * 2,) * 2


# ---- the whole controller


class Durable(Cluster):
    """A cluster whose query has a checkpoint location. ``came``: the vault comes when all workers are there."""

    def __init__(
        self, first_epoch: int = 0, came: bool = True, began_with: int = 0, slots: int = 3, **more: Any
    ) -> None:
        super().__init__(slots=0, **more)
        plan = replace(self.core.plan, durable=True, began_with=began_with)
        self.core = Controller(plan, slots, now=0.0)
        for slot in range(slots):
            self.join(slot)
        if came:
            self.vault_comes(first_epoch)

    def vault_comes(self, first_epoch: int = 0, connection: str = "v", **more: Any) -> None:
        about = register(0, "vault", first_epoch=first_epoch, **{"edges": [], "endpoint": "at the vault", **more})
        self.take(self.core.on_report(connection, about, self.now))

    def ingress_comes(self, attempt: int = 0) -> Welcome:
        connection = f"i{attempt}"
        self.take(self.core.on_report(connection, register(0, "ingress", attempt), self.now))
        (welcome,) = [order for order in self.told(connection) if isinstance(order, Welcome)]
        return welcome

    @property
    def vault(self) -> int:
        member = self.core.members.vault
        assert member is not None
        return member.node

    def beat(self, node: int) -> None:
        member = next(member for member in self.core.members.processes if member.node == node)
        self.take(self.core.on_report(member.connection, Heartbeat(node=node, progress=1, stats={}), self.now))

    def beats(self, seconds: float, *silent: int) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for member in self.core.members.processes:
                if member.node not in silent:
                    self.beat(member.node)
            self.tick(0.0)

    def seen_by(self, connection: Any) -> Table:
        """Return the current table of a process, made of all the tables and changes that it was sent."""
        found: Table | None = None
        orders = [order for order in self.told(connection) if isinstance(order, NewTable | TableChanged)]
        for order in sorted(orders, key=epoch_of):
            if isinstance(order, NewTable):
                found = order.table
            else:
                assert found is not None
                found = changed_by(found, order.change)
        assert found is not None
        return found


def test_the_first_table_waits_for_the_vault() -> None:
    c = Durable(came=False)
    assert c.core.table is None
    c.vault_comes()
    assert c.table.epoch == 0
    assert c.core.phase == QueryPhase.RUNNING


def test_the_vault_alone_is_not_enough() -> None:
    c = Durable(came=False, slots=2)
    c.core = Controller(c.core.plan, 2, now=0.0)
    c.vault_comes()
    c.join(0)
    assert c.core.table is None
    c.join(1)
    assert c.core.table is not None


def test_a_query_without_a_location_waits_for_no_vault() -> None:
    c = Cluster()
    assert c.core.table is not None
    assert c.told("w0.0")[-1].table.stages == c.table.stages


@pytest.mark.parametrize("first_epoch", [0, 40])
def test_every_process_sees_the_vault_in_each_row_after_all_that_happens(first_epoch: int) -> None:
    c = Durable(first_epoch, slots=4, partitions=5, replicas=2)
    c.settle()
    c.lose(c.holders(2)[0])
    c.settle()
    c.join(c.core.slots - 1, attempt=1)
    for connection in ("v", *(member.connection for member in c.core.members.workers.values())):
        seen = c.seen_by(connection)
        assert seen.epoch == c.table.epoch
        assert [row[-1] for rows in seen.stages for row in rows] == [ReplicaAt(c.vault, first_epoch, True, DISK)] * 5
        assert [row[:-1] for rows in seen.stages for row in rows] == [row for rows in c.table.stages for row in rows]
        assert seen.endpoints == {**c.table.endpoints, c.vault: "at the vault"}


def test_a_query_that_goes_on_begins_with_primaries_and_gets_the_other_replicas_by_repairs() -> None:
    c = Durable(40, partitions=3)
    assert all(len(row) <= 2 for row in c.table.stages[0])
    first = next(order.table for order in c.told("w0.0") if isinstance(order, NewTable))
    assert first.epoch == 40
    assert [len(row) for row in first.stages[0]] == [2, 2, 2], "a primary and the vault"
    assert {replica.incarnation for row in first.stages[0] for replica in row} == {40}
    c.settle()
    assert [len(row) for row in c.table.stages[0]] == [2, 2, 2]
    assert all(replica.incarnation >= 40 for row in c.table.stages[0] for replica in row)


def test_a_table_is_confirmed_when_the_vault_has_confirmed_it_too() -> None:
    c = Durable()
    c.mute.add("v")
    c.lose(c.holders()[1])
    assert not c.core.board.is_confirmed(c.table.epoch)
    assert "the vault" in c.core.board.who_is_behind(c.table.epoch)
    c.mute.clear()
    member = c.core.members.vault
    assert member is not None
    member.epoch = c.table.epoch
    assert c.core.board.is_confirmed(c.table.epoch)


def test_partitions_that_are_lost_get_new_primaries_from_the_directory() -> None:
    c = Durable(partitions=6, replicas=1)
    lost = c.holders(0)[0]
    of_lost = [partition for partition in range(6) if c.holders(partition) == [lost]]
    epoch = c.table.epoch
    c.lose(lost)
    assert c.core.error is None
    assert c.table.epoch == epoch + 1
    assert all(c.replicas(p) == (ReplicaAt(c.holders(p)[0], epoch + 1),) for p in of_lost)
    assert Counter(c.holders(partition)[0] for partition in range(6)) == {1: 3, 2: 3}
    assert c.seen_by("v").stages[0][of_lost[0]][-1].kind == DISK


def test_primary_and_secondary_may_be_lost_at_once() -> None:
    c = Durable(slots=4)
    primary, secondary = c.holders()
    c.lose(secondary)
    c.lose(primary)
    assert c.core.error is None
    assert not {primary, secondary} & set(c.holders())
    c.settle()
    assert len(c.holders()) == 2


def test_a_partition_may_be_lost_again_and_again_until_nobody_is_left() -> None:
    c = Durable(slots=3, replicas=1)
    epochs = []
    for _ in range(2):
        c.lose(c.holders()[0])
        epochs.append(c.replicas()[0].incarnation)
    assert epochs == sorted(set(epochs))
    c.lose(c.holders()[0])
    assert (c.core.error, c.core.phase) == (None, QueryPhase.STARTING)


def test_a_query_that_has_lost_all_workers_begins_again_from_the_directory_when_others_have_come() -> None:
    c = Durable(slots=3, replicas=2, partitions=3, readers=2, journal_timeout=1e9)
    c.settle()
    first_epoch = c.core.board.disks.first_epoch
    c.move(c.holders()[0], next(node for node in range(3) if node not in c.holders()))
    epoch = c.table.epoch
    for node in list(c.core.members.workers):
        c.lose(node)
    assert (c.core.error, c.core.phase, c.core.table) == (None, QueryPhase.STARTING, None)
    assert not c.core.repairs.under_way
    assert "no worker is left; the query waits for others" in c.events("warning")[-1].why
    c.orders.clear()
    assert c.ingress_comes().incarnation == first_epoch, "attempts of tasks count on"
    assert not c.sent(NewTable), "there is no table"
    for slot in range(3):
        assert c.core.phase == QueryPhase.STARTING
        c.join(slot, attempt=1)
    assert c.core.phase == QueryPhase.RUNNING
    (begun,) = [order.table for order in c.told("v") if isinstance(order, NewTable)]
    assert begun.epoch > epoch
    for row in begun.stages[0]:
        (primary, vault) = row
        assert (primary.incarnation, primary.live) == (begun.epoch, True)
        assert vault == ReplicaAt(c.vault, first_epoch, True, DISK)
    workers = begun.endpoints.keys() - {c.vault}
    assert {row[0].worker for row in begun.stages[0]} == workers >= set(begun.sources[0])
    c.settle()
    assert all(len(row) == 2 for row in c.table.stages[0])
    for node in list(c.core.members.workers):
        c.lose(node)
    assert c.core.phase == QueryPhase.STARTING, "again and again"


def test_a_query_that_has_lost_all_workers_does_not_wait_for_ever() -> None:
    c = Durable(slots=1, replicas=1, workers_timeout=40.0, journal_timeout=1e9)
    c.lose(c.holders()[0])
    c.tick(20.0)
    c.join(0, attempt=1)
    c.lose(c.holders()[0])
    c.tick(39.0)
    assert c.core.phase == QueryPhase.STARTING
    c.tick(2.0)
    assert isinstance(c.core.error, QueryFailed)
    said = "no worker is left, and none has come within 40 s (spark.flux.workers.timeout). Start the query again with the same"
    assert said in str(c.core.error)
    c.join(0, attempt=2)
    assert c.stops("w0.2")


def test_it_goes_on_without_those_that_do_not_come() -> None:
    c = Durable(slots=3, replicas=2, partitions=3, journal_timeout=1e9)
    for node in list(c.core.members.workers):
        c.lose(node)
    node = c.join(1, attempt=1)
    c.tick(4.0)
    assert c.core.phase == QueryPhase.STARTING, "all partitions would go to one worker"
    c.lose(node)
    c.tick(4.0)
    c.join(1, attempt=2)
    c.tick(0.1)
    assert c.core.phase == QueryPhase.STARTING
    c.tick(5.0)
    assert c.core.phase == QueryPhase.RUNNING
    c.join(2, attempt=1)
    c.settle()
    assert all(len(row) == 2 for row in c.table.stages[0])


def test_a_silent_worker_that_was_the_last_one_is_told_to_stop_and_gets_a_successor() -> None:
    c = Durable(slots=1, replicas=1, heartbeat_timeout=0.5, heartbeat_last_timeout=2.0, journal_timeout=1e9)
    (silent,) = c.holders()
    c.beats(3.0, silent)
    assert (c.core.error, c.core.phase) == (None, QueryPhase.STARTING)
    assert c.stops("w0.0")
    assert c.core.places.open == [1], "its task may still be there"
    c.orders.clear()
    c.take(c.core.on_report("back", register(0, node=silent), c.now))
    assert c.stops("back")
    assert c.core.driver.missing_slots() == [], "there is no room beside the old task"
    c.take(c.core.on_report("back", Goodbye(node=silent), c.now))
    assert c.core.driver.missing_slots() == [1], "Spark does not start a task again that has ended well"
    c.core.driver.tasks_started([1])
    c.join(1)
    assert c.core.phase == QueryPhase.RUNNING


def test_the_end_of_the_task_of_the_last_worker_that_was_given_up_is_awaited_and_ends_nothing() -> None:
    c = Durable(slots=1, replicas=1, heartbeat_timeout=0.5, heartbeat_last_timeout=2.0, journal_timeout=1e9)
    c.beats(3.0, *c.holders())
    c.take(c.core.driver.on_tasks_ended([0], "the Spark job 'workers'", "its tasks ended before the query"))
    assert (c.core.error, c.core.phase) == (None, QueryPhase.STARTING)
    assert c.core.driver.missing_slots() == [1]
    c.core.driver.tasks_started([1])
    assert c.core.driver.missing_slots() == []


def test_a_query_whose_workers_have_still_to_come_wants_no_further_tasks() -> None:
    c = Durable(came=False)
    assert c.core.phase == QueryPhase.STARTING
    assert c.core.driver.missing_slots() == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_query_without_workers_ends_when_it_is_stopped_or_its_vault_is_lost(waits: bool) -> None:
    c = Durable(slots=1, replicas=1, journal_timeout=3.0)
    c.lose(c.holders()[0])
    if waits:
        c.take(c.core.driver.on_pause(c.now))
        assert (c.core.error, c.core.phase) == (None, QueryPhase.ENDED)
    else:
        c.tick(3.5)
        assert "has not answered" in str(c.core.error)


def test_a_query_that_is_stopped_waits_for_the_successors_of_a_worker_that_is_lost_meanwhile() -> None:
    """Without this wait, the other workers had given their last checkpoints when the loss was noticed, and the query ended with
    these: the next start had to repeat the lost worker's steps since its last checkpoint, and the log had their rows no more."""
    c = Durable(slots=3, replicas=2, partitions=3)
    lost = c.table.stages[0][0][0].worker
    others = [worker for worker in c.core.members.workers if worker != lost]
    c.take(c.core.driver.on_pause(c.now))
    first = c.table.epoch
    for worker in others:
        c.report(worker, Checkpointed(node=worker, epoch=first))
    c.lose(lost)
    c.tick(0.1)
    assert c.core.phase == QueryPhase.RUNNING, "another replica leads since"
    asked = max(order.epoch for _, order in c.orders if isinstance(order, LastCheckpoints))
    assert asked > first
    c.report(others[0], Checkpointed(node=others[0], epoch=asked))
    c.report(others[1], Checkpointed(node=others[1], epoch=first))
    c.tick(0.1)
    assert c.core.phase == QueryPhase.RUNNING, "the second answer is that of before the loss"
    c.report(others[1], Checkpointed(node=others[1], epoch=asked))
    c.tick(0.1)
    assert (c.core.phase, c.core.error) == (QueryPhase.ENDED, None)


def test_a_worker_that_leaves_takes_over_where_nobody_else_is_left() -> None:
    c = Durable(slots=2, replicas=1, partitions=2)
    c.mute |= {"w0.0", "w1.0", "v"}
    c.drain(1)
    c.lose(0)
    assert c.core.error is None
    assert c.holders(0) == [1]


def test_a_silent_worker_is_given_up_after_the_short_limit_where_the_directory_has_its_partitions() -> None:
    """Such partitions stood still for a minute, though the directory has all that was committed."""
    c = Durable(replicas=1, heartbeat_timeout=0.5, heartbeat_last_timeout=60.0)
    silent = c.holders()[0]
    c.beats(1.0, silent)
    assert c.core.error is None
    assert c.holders() != [silent]


def test_a_silent_worker_keeps_what_the_directory_cannot_give_to_another_one_now() -> None:
    """Giving it up would gain nothing: the vault is silent, too, or no other worker is heard."""
    for others in ("the vault", "other workers"):
        c = Durable(replicas=1, partitions=3, heartbeat_timeout=0.5, heartbeat_last_timeout=5.0)
        silent = c.holders()[0]
        c.beats(2.0, silent, *([c.vault] if others == "the vault" else c.core.members.workers))
        assert c.holders() == [silent], others
        c.beats(0.75, silent)
        assert c.holders() != [silent], "they are back"
        assert c.core.error is None


def test_a_query_whose_vault_has_ended_ends() -> None:
    c = Durable()
    c.lose(c.vault)
    assert isinstance(c.core.error, QueryFailed)
    assert "the process that writes to the checkpoint location of this query (pid 1) has ended" in str(c.core.error)
    assert all(c.stops(f"w{slot}.0") for slot in range(3))


def test_a_query_whose_vault_ends_before_the_first_table_ends_too() -> None:
    c = Durable(slots=2, came=False)
    c.core = Controller(c.core.plan, 2, now=0.0)
    c.vault_comes()
    c.lose(c.vault)
    assert isinstance(c.core.error, QueryFailed)


def test_a_vault_that_ends_after_the_query_is_no_loss() -> None:
    c = Durable()
    c.take(c.core.driver.on_stop())
    assert c.stops("v")
    c.take(c.core.on_report("v", Goodbye(node=c.vault), c.now))
    c.lose(c.vault)
    assert c.core.error is None


def test_a_query_whose_directory_does_not_answer_ends() -> None:
    c = Durable(journal_timeout=3.0)
    c.core.board.location = "/data/visits"
    c.beats(2.75, c.vault)
    assert c.core.error is None
    c.beats(0.75, c.vault)
    said = "the checkpoint location /data/visits has not answered for 3 s (spark.flux.journal.timeout is 3 s)"
    assert said in str(c.core.error)
    assert all(c.stops(f"w{slot}.0") for slot in range(3))


def test_a_directory_that_is_slow_and_answers_ends_nothing() -> None:
    c = Durable(journal_timeout=3.0)
    for _ in range(4):
        c.beats(2.5, c.vault)
        c.beat(c.vault)
    assert c.core.error is None


def test_a_controller_that_stood_still_blames_no_vault() -> None:
    c = Durable(journal_timeout=3.0, heartbeat_timeout=0.5, heartbeat_last_timeout=5.0)
    c.beats(1.0)
    c.tick(60.0)
    assert c.core.error is None


def test_a_second_vault_is_turned_away() -> None:
    c = Durable(7)
    c.vault_comes(8, "other", attempt=1)
    (answer,) = c.told("other")
    assert isinstance(answer, Rejected)
    assert "the query has a vault" in answer.reason
    assert c.core.members.vault is not None
    assert c.core.members.vault.connection == "v"
    assert c.core.board.disks.first_epoch == 7
    assert c.core.error is None


def test_a_second_vault_is_turned_away_though_it_calls_itself_by_the_same_number() -> None:
    c = Durable(7)
    c.vault_comes(8, "other", pid=2, endpoint="elsewhere")
    (answer,) = c.told("other")
    assert isinstance(answer, Rejected)
    assert c.core.members.vault is not None
    assert c.core.members.vault.connection == "v"


def test_a_vault_that_comes_on_another_connection_is_the_same() -> None:
    c = Durable(40)
    node = c.vault
    c.vault_comes(40, "again", node=node)
    assert c.core.members.vault is not None
    assert (c.vault, c.core.members.vault.connection) == (node, "again")
    assert c.seen_by("again") == c.core.board.shown


def test_no_worker_is_made_of_a_vault() -> None:
    c = Durable()
    assert c.vault not in c.core.members.workers
    assert c.vault not in c.table.endpoints
    assert c.vault not in c.all_holders()
    c.beat(c.vault)
    newest = ReplicaCaughtUp(node=c.holders()[0], stage=0, partition=0, worker=c.vault, incarnation=0, safe=True)
    c.report(c.holders()[0], newest)
    assert c.core.error is None


@pytest.mark.parametrize("first_epoch", [0, 40])
def test_streams_of_this_life_are_newer_than_those_of_earlier_ones(first_epoch: int) -> None:
    c = Durable(first_epoch)
    assert [c.ingress_comes(attempt).incarnation for attempt in range(3)] == [first_epoch + n for n in range(3)]


def test_who_waits_for_the_vault_in_vain_is_told_so() -> None:
    c = Durable(came=False, workers_timeout=10.0)
    c.tick(20.0)
    assert isinstance(c.core.error, QueryTimeout)
    assert "the process that writes to the checkpoint location has not come within 10 s" in str(c.core.error)


def test_workers_hear_with_how_many_the_query_began() -> None:
    c = Durable(40, began_with=8)
    assert {order.workers for order in c.sent(Welcome)} == {8}
    assert {order.workers for order in Durable().sent(Welcome)} == {3}


def test_all_are_told_to_stop_when_the_query_is_through() -> None:
    c = Durable()
    c.take(c.core.driver.on_stop())
    assert len(c.sent(Stop)) == 4
