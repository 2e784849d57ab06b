"""Losses and repairs in the controller: heirs, additions, and the replicas that are safe."""

from __future__ import annotations

import pytest

from controller.replicas.addition_limits import ASK_EVERY_S
from controller.replicas.addition_tracker import DIVERGENCE_CALM_S, DIVERGENCES_MAX
from controller.replicas.additions import Phase
from flux.errors import QueryFailed
from flux.wire.control import (
    CopyState,
    Goodbye,
    GoodbyeSeen,
    Heartbeat,
    NewTable,
    PartitionFinished,
    RegisterAgain,
    Rejected,
    ReplicaDiverged,
    Stop,
    TableChanged,
    Welcome,
)
from partitioning.table import ReplicaAt
from tests.controller.cluster import Cluster, register

# ---- the four steps


def test_a_survivor_takes_over_and_a_new_replica_goes_through_retain_copy_live_and_safe() -> None:
    c = Cluster()
    c.mute = {"w1.0", "w2.0"}
    c.lose(0)
    assert [r.worker for r in c.replicas()] == [1, 2]
    assert not c.replicas()[1].live  # 1 retain
    epoch = c.replicas()[1].incarnation
    c.confirm(1, epoch)
    assert c.sent(CopyState) == [], "not before all keep what the new replica will need"
    c.confirm(2, epoch)
    assert c.sent(CopyState) == [CopyState(stage=0, partition=0, worker=2, incarnation=epoch)]  # 2 copy
    c.caught_up(safe=False)
    assert c.replicas()[1] == ReplicaAt(2, epoch, True)  # 3 live
    assert not c.core.repairs.safety.is_safe(0, 0, c.replicas()[1])
    c.caught_up(safe=True)
    assert c.core.repairs.safety.is_safe(0, 0, c.replicas()[1])  # 4 safe
    assert (c.core.repairs.done, c.core.repairs.take_overs) == (1, 1)
    assert [event.kind for event in c.core.repairs.news()] == ["loss", "take-over", "repair"]
    assert c.core.repairs.news() == []


def test_a_replica_between_live_and_safe_is_not_counted_on() -> None:
    c = Cluster()
    c.lose(0)
    c.caught_up(safe=False)
    c.lose(1)
    assert isinstance(c.core.error, QueryFailed)
    assert "the only safe replica of Sums/0" in str(c.core.error)
    assert "More losses at once than replicas=2 survives" in str(c.core.error)


def test_once_it_is_safe_it_takes_over() -> None:
    c = Cluster()
    c.lose(0)
    c.caught_up(safe=False)
    c.caught_up(safe=True)
    c.lose(1)
    assert [r.worker for r in c.replicas()] == [2]
    assert c.core.error is None


def test_what_the_primary_says_of_an_earlier_life_of_a_replica_does_not_count() -> None:
    c = Cluster()
    c.lose(0)
    c.caught_up(safe=False, incarnation=0)
    assert not c.replicas()[1].live
    c.caught_up(safe=True)
    assert not c.replicas()[1].live, "the steps come in order"


def test_the_copy_is_ordered_again_and_each_time_later_until_the_replica_follows() -> None:
    c = Cluster(heartbeat_timeout=1e9, heartbeat_last_timeout=1e9)
    c.lose(0)
    assert len(c.sent(CopyState)) == 1
    asked_after_s = []
    for tick in range(1, 75):
        before = len(c.sent(CopyState))
        c.tick(ASK_EVERY_S / 10)
        asked_after_s += [tick // 10] * (len(c.sent(CopyState)) - before)
    assert asked_after_s == [1, 3, 7]
    c.caught_up(safe=False)
    c.tick(20.0)
    assert len(c.sent(CopyState)) == 4


def test_a_primary_on_a_new_connection_is_told_at_once_again_what_to_copy() -> None:
    c = Cluster()
    c.lose(0)
    order = c.sent(CopyState)[0]
    for again in range(3):  # lost with the connection, as often as this breaks
        c.take(c.core.on_report(f"new {again}", register(1, node=1), c.now))
        assert [o for o in c.told(f"new {again}") if isinstance(o, CopyState)] == [order]
    c.take(c.core.on_report("of another", register(2, node=2), c.now))
    assert not [o for o in c.told("of another") if isinstance(o, CopyState)]
    c.tick(ASK_EVERY_S)
    assert len(c.sent(CopyState)) == 5, "that took nothing from the attempts"
    c.caught_up(safe=False)
    c.take(c.core.on_report("newest", register(1, node=1), c.now))
    assert not [o for o in c.told("newest") if isinstance(o, CopyState)], "it has come"


def test_an_addition_whose_primary_dies_begins_again_from_the_new_one() -> None:
    c = Cluster(slots=4, replicas=3)
    c.lose(0)
    first, second, third = c.replicas()
    assert [first.worker, second.worker] == [1, 2]
    c.lose(1)
    now = c.replicas()
    assert [r.worker for r in now] == [2, 3]
    assert now[1].incarnation > third.incarnation
    assert c.sent(CopyState)[-1].incarnation == now[1].incarnation


def test_an_addition_whose_worker_dies_goes_to_another() -> None:
    c = Cluster(slots=4)
    c.lose(0)
    target = c.replicas()[1].worker
    c.lose(target)
    assert c.replicas()[1].worker == ({2, 3} - {target}).pop()
    assert c.core.error is None


def test_replicas_are_kept_on_different_executors_unless_they_may_share() -> None:
    c = Cluster(slots=2)
    c.lose(0)
    assert len(c.replicas()) == 1
    assert c.core.repairs.report(c.core.table)["underReplicated"] == ["Sums/0"]
    c.join(0, attempt=1)
    assert len(c.replicas()) == 2


def test_a_worker_that_comes_back_is_a_new_one_and_gets_replicas() -> None:
    c = Cluster(slots=2)
    c.lose(0)
    back = c.join(0, attempt=1)
    assert back == 2
    assert c.replicas()[1] == ReplicaAt(back, c.replicas()[1].incarnation, False)


# ---- confirmations that a repair waits for


def test_an_ingress_task_has_to_confirm_too_unless_its_work_is_done() -> None:
    c = Cluster()
    c.mute = {"i"}
    c.take(c.core.on_report("i", register(0, "ingress", attempt=5), c.now))
    c.lose(0)
    assert c.sent(CopyState) == []
    c.take(c.core.on_report("i", Goodbye(node=3), c.now))
    assert len(c.sent(CopyState)) == 1
    assert ("i", GoodbyeSeen()) in c.orders


def test_an_attempt_that_comes_after_the_work_is_done_is_not_waited_for() -> None:
    c = Cluster()
    c.take(c.core.on_report("i", register(0, "ingress", attempt=5), c.now))
    c.take(c.core.on_report("i", Goodbye(node=3), c.now))
    c.mute = {"speculative"}
    c.take(c.core.on_report("speculative", register(0, "ingress", attempt=6), c.now))
    c.lose(0)
    assert len(c.sent(CopyState)) == 1


def test_a_task_of_the_next_micro_batch_has_to_confirm_though_the_last_has_done_its_work() -> None:
    """Such a task has other rows in its log, which a new replica may need."""
    c = Cluster(streams=True)
    c.take(c.core.on_report("batch 0", register(0, "ingress", attempt=5), c.now))
    c.take(c.core.on_report("batch 0", Goodbye(node=3), c.now))
    c.mute = {"batch 1"}
    c.take(c.core.on_report("batch 1", register(0, "ingress", attempt=6), c.now))
    c.lose(0)
    assert c.sent(CopyState) == []
    c.take(c.core.on_report("batch 1", Goodbye(node=4), c.now))
    assert len(c.sent(CopyState)) == 1


def test_a_task_of_a_micro_batch_that_is_silent_is_forgotten_and_does_not_end_well() -> None:
    """Spark may have killed it with its streaming query, and repairs would wait for ever."""
    c = Cluster(streams=True, heartbeat_timeout=2.0)
    c.mute = {"i"}
    c.take(c.core.on_report("i", register(0, "ingress", attempt=5), c.now))
    c.lose(0)
    for _ in range(4):
        for node in (1, 2):
            c.report(node, Heartbeat(node=node, progress=1, stats={}))
        assert c.sent(CopyState) == []
        c.tick(0.6)
    c.tick(0.6)
    assert len(c.sent(CopyState)) == 1
    c.take(c.core.on_report("i", Goodbye(node=3), c.now))
    assert c.orders[-1] == ("i", RegisterAgain())
    c.take(c.core.on_report("i", register(0, "ingress", attempt=5, node=3), c.now))
    assert isinstance(c.orders[-1][1], Rejected)


def test_a_goodbye_of_an_attempt_that_was_replaced_is_not_accepted() -> None:
    """Meanwhile the newer attempt may have been told of a replica that the older one does not know."""
    c = Cluster()
    c.take(c.core.on_report("old", register(0, "ingress", attempt=5), c.now))
    c.take(c.core.on_report("new", register(0, "ingress", attempt=6), c.now))
    c.take(c.core.on_report("old", Goodbye(node=3), c.now))
    assert c.orders[-1] == ("old", RegisterAgain())
    c.take(c.core.on_report("old", register(0, "ingress", attempt=5, node=3), c.now))
    assert isinstance(c.orders[-1][1], Rejected)


def test_the_end_of_the_job_is_the_end_of_all_its_attempts() -> None:
    c = Cluster()
    c.mute = {"dead"}
    c.take(c.core.on_report("dead", register(0, "ingress", attempt=6), c.now))
    c.lose(0)
    assert c.sent(CopyState) == []
    c.take(c.core.driver.on_edge_complete(0, [0]))
    c.tick(0.01)
    assert len(c.sent(CopyState)) == 1


# ---- suspicion


def test_a_silent_worker_is_given_up_if_others_have_what_it_has() -> None:
    c = Cluster(heartbeat_timeout=0.5, heartbeat_last_timeout=60.0)
    for node in (1, 2):
        c.report(node, Heartbeat(node=node, progress=1, stats={}))
    c.now += 0.6
    for node in (1, 2):
        c.report(node, Heartbeat(node=node, progress=1, stats={}))
    c.tick(0.0)
    assert next(r.worker for r in c.replicas()) == 1
    assert 0 not in c.core.members.workers
    fenced = [order.table for connection, order in c.orders if connection == "w0.0" and isinstance(order, NewTable)]
    assert 0 not in fenced[-1].endpoints, "it is told, in case it lives"


def test_a_silent_worker_is_given_up_also_while_output_is_fetched_and_tasks_are_shown_the_newest_table() -> None:
    c = Cluster(collect=1, replicas=2, heartbeat_timeout=0.5, heartbeat_last_timeout=60.0)
    primary, copy = c.holders(0, 1)
    c.report(primary, PartitionFinished(node=primary, stage=1, partition=0))
    assert c.core.phase == "finished"
    for _ in range(6):
        c.now += 0.1
        for node in {0, 1, 2} - {primary}:
            c.report(node, Heartbeat(node=node, progress=1, stats={}))
        c.tick(0.0)
    assert c.holders(0, 1) == [copy]
    c.take(c.core.on_report("task", register(0, "egress", attempt=9, edges=[]), c.now))
    welcome, table = c.told("task")
    assert (welcome.node, table.table.epoch) == (-1, c.table.epoch)
    assert c.core.members.ingress == {}, "it takes no part"
    c.take(c.core.driver.on_stop())
    c.take(c.core.on_report("task", register(0, "egress", attempt=9, edges=[]), c.now))
    assert c.told("task")[-1] == Stop(reason="the query has ended")


def test_when_the_query_is_through_replicas_that_wait_for_copies_are_dropped_and_copies_on_their_way_are_ordered_again() -> (
    None
):
    """Producers would keep rows for a replica that waits for a copy that is never ordered any more."""
    c = Cluster(slots=4, partitions=2, collect=1, repairs_at_once=1)
    lost = (set(c.holders(0)) & set(c.holders(1))).pop()
    c.lose(lost)
    copied, waiting = c.core.repairs.under_way.values()
    assert (copied.phase, waiting.phase) == (Phase.COPY, Phase.READY)
    for stage, partition in sorted(c.core.unfinished):
        node = c.holders(partition, stage)[0]
        c.report(node, PartitionFinished(node=node, stage=stage, partition=partition))
    assert c.core.phase == "finished"
    assert list(c.core.repairs.under_way.values()) == [copied]
    assert len(c.replicas(waiting.partition, waiting.stage)) == 1
    ordered = len(c.sent(CopyState))
    for _ in range(40):
        c.tick(0.1)
    assert len(c.sent(CopyState)) > ordered, "the first order may be lost"
    for _ in range(4000):
        c.tick(0.1)
    assert not c.core.repairs.under_way, "nobody waits for a copy for ever"


def test_workers_are_not_taken_for_silent_because_the_controller_stood_still() -> None:
    c = Cluster(heartbeat_timeout=0.5, heartbeat_last_timeout=10.0)
    c.tick(0.1)
    c.tick(200.0)  # the driver was stopped; reports of that time wait in its queue
    assert len(c.core.members.workers) == 3
    for _ in range(7):
        c.tick(0.1)
    assert len(c.core.members.workers) == 1, "now they are"


def test_the_last_safe_copy_is_not_given_up_for_silence_alone_or_only_after_a_longer_limit() -> None:
    c = Cluster(heartbeat_timeout=0.5, heartbeat_last_timeout=10.0)
    for _ in range(10):
        c.tick(0.1)  # all are silent together: as many are given up as can be spared
    assert len(c.core.members.workers) == 1
    (last,) = c.core.members.workers
    assert c.core.error is None
    for _ in range(100):
        c.tick(0.1)
    assert f"worker {last}" in str(c.core.error)
    assert "no heartbeat for" in str(c.core.error)


# ---- connections


def test_a_worker_whose_connection_broke_registers_again_and_stays_who_it_is() -> None:
    c = Cluster()
    c.take(c.core.on_report("new", Heartbeat(node=1, progress=3, stats={}), c.now))
    assert c.orders[-1] == ("new", RegisterAgain())
    c.take(c.core.on_report("new", register(1, node=1), c.now))
    assert ("new", Welcome(node=1, incarnation=0, workers=3)) in c.orders
    assert len(c.core.members.workers) == 3
    c.lose(0)
    assert any(connection == "new" and isinstance(order, TableChanged) for connection, order in c.orders[-4:])


def test_a_worker_that_was_given_up_and_comes_again_is_shown_the_table_without_it() -> None:
    c = Cluster()
    c.lose(0)
    c.take(c.core.on_report("back", register(0, node=0), c.now))
    connection, order = c.orders[-1]
    assert connection == "back"
    assert 0 not in order.table.endpoints
    assert len(c.core.members.workers) == 2


def test_whoever_reports_after_the_end_is_told_so() -> None:
    c = Cluster()
    c.take(c.core.driver.on_stop())
    c.take(c.core.on_report("somebody", Heartbeat(node=1, progress=3, stats={}), c.now))
    assert isinstance(c.orders[-1][1], Stop)


# ---- divergence


def diverged(c: Cluster, worker: int) -> None:
    meant = next(r for r in c.replicas() if r.worker == worker)
    primary = c.replicas()[0].worker
    c.report(
        primary,
        ReplicaDiverged(node=primary, stage=0, partition=0, worker=worker, incarnation=meant.incarnation, step=7),
    )


def test_a_secondary_with_other_output_is_dropped_and_built_anew() -> None:
    c = Cluster(slots=2)
    diverged(c, 1)
    assert c.replicas() == (ReplicaAt(0, 0), ReplicaAt(1, c.replicas()[1].incarnation, False))
    assert [event.kind for event in c.core.repairs.news()] == ["divergence"]


def test_the_divergence_of_one_replica_does_not_end_the_addition_of_another() -> None:
    c = Cluster(slots=4, replicas=3)
    c.lose(2)
    under_way = dict(c.core.repairs.under_way)
    assert list(under_way) == [(0, 0)]
    diverged(c, 1)
    assert c.core.repairs.under_way == under_way


def test_an_operator_that_is_not_deterministic_ends_the_query() -> None:
    c = Cluster(slots=2)
    for _ in range(DIVERGENCES_MAX + 1):
        diverged(c, 1)
        if c.core.error is None:
            c.caught_up(safe=False)
            c.caught_up(safe=True)
    assert "its operator is not deterministic" in str(c.core.error)


def test_divergences_that_are_far_apart_do_not_add_up() -> None:
    c = Cluster(slots=2)
    for _ in range(3 * DIVERGENCES_MAX):
        diverged(c, 1)
        c.tick(2 * DIVERGENCE_CALM_S)  # without a second copy nothing is compared: this is no calm
        c.caught_up(safe=False)
        c.caught_up(safe=True)
        c.tick(DIVERGENCE_CALM_S + 1)
    assert c.core.error is None
    for _ in range(DIVERGENCES_MAX + 1):
        assert c.core.error is None
        diverged(c, 1)
        c.tick(2 * DIVERGENCE_CALM_S)
        if c.core.error is None:
            c.caught_up(safe=False)
            c.caught_up(safe=True)
    assert "its operator is not deterministic" in str(c.core.error)


# ---- the end


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_end_may_be_reported_by_any_replica_and_counts_once(replicas: int) -> None:
    c = Cluster(replicas=replicas)
    for replica in c.replicas():
        if c.core.phase == "running":
            c.report(replica.worker, PartitionFinished(node=replica.worker, stage=0, partition=0))
    assert (c.core.phase, c.core.error) == ("ended", None)
