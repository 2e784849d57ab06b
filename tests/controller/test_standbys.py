"""Standbys in the controller: their take-overs, the workers that may be given up because they exist, and their return."""

from __future__ import annotations

from typing import Any

import pytest

import flux
from controller.operate.request_handler import About, RequestHandler
from controller.operate.requests import GetPartitions
from controller.planning.explain import explain
from controller.report.metrics import Metrics
from controller.report.progress import Progress
from flux.errors import UsageError
from flux.wire.control import CopyState, Heartbeat
from flux.wire.statistics import Lag
from partitioning.ids import ACTIVE, STANDBY, UPSTREAM
from partitioning.table import ReplicaAt
from tests.controller.cluster import Cluster, register


def cluster(slots: int = 4, replicas: int = 2, **more: Any) -> Cluster:
    return Cluster(slots=slots, replicas=replicas, recovery=STANDBY, **more)


def kinds(c: Cluster, partition: int = 0) -> list[str]:
    return [replica.kind for replica in c.replicas(partition)]


def test_the_first_of_a_partition_is_active_and_the_others_are_standbys() -> None:
    c = cluster(replicas=3)
    assert kinds(c) == [ACTIVE, STANDBY, STANDBY]


def test_a_standby_takes_over_as_an_active_replica_and_another_standby_is_added() -> None:
    c = cluster()
    primary, kept = c.replicas()
    c.lose(primary.worker)
    assert c.replicas()[0] == ReplicaAt(kept.worker, kept.incarnation, True, ACTIVE)
    assert kinds(c) == [ACTIVE, STANDBY], "in the same life: it keeps its checkpoint"
    (ordered,) = c.sent(CopyState)
    assert ordered.worker == c.replicas()[1].worker
    c.complete()
    assert c.core.repairs.safety.is_safe(0, 0, c.replicas()[1])


def test_an_active_replica_takes_over_before_a_standby() -> None:
    """Such an active replica is, for example, the target of a move that has just become safe."""
    c = cluster(slots=5, replicas=3)
    primary, first, second = c.replicas()
    target = next(worker for worker in range(5) if worker not in c.holders())
    c.move(primary.worker, target)
    c.caught_up(safe=False)
    c.let_list()
    c.core.repairs.safety.unsafe.clear()  # it is safe, and its source is about to go
    c.core.repairs.under_way.clear()
    c.core.moving.under_way.clear()
    c.lose(primary.worker)
    assert c.replicas()[0].worker == target
    assert {replica.worker for replica in c.replicas() if replica.kind == STANDBY} == {first.worker, second.worker}


def beat(c: Cluster, seconds: float, *silent: int) -> None:
    for _ in range(round(seconds / 0.25)):
        c.now += 0.25
        for node in set(c.core.members.workers) - {*silent}:
            c.report(node, Heartbeat(node=node, progress=1, stats={}))
        c.tick(0.0)


def test_a_silent_worker_is_given_up_after_the_short_limit_where_standbys_can_take_over() -> None:
    """Before, its partitions stood still for a minute, as if the worker had the last safe replica of each."""
    c = cluster(heartbeat_timeout=0.5, heartbeat_last_timeout=60.0)
    silent, heir = c.holders()
    beat(c, 0.5, silent)
    assert silent in c.core.members.workers
    beat(c, 0.5, silent)
    assert silent not in c.core.members.workers
    assert c.holders()[0] == heir
    assert c.core.error is None


@pytest.mark.parametrize("kind", [STANDBY, UPSTREAM])
def test_a_replica_that_restores_is_an_heir_of_a_silent_primary_once_it_has_arrived(kind: str) -> None:
    c = cluster()
    heir = c.core.repairs.safety.is_heir_of_silent(c.now)
    assert heir(0, 0, ReplicaAt(3, 0, True, kind))
    assert not heir(0, 0, ReplicaAt(3, 0, False, kind)), "it is not live yet"


def test_one_silent_worker_after_the_other_keeps_the_partition_until_another_standby_is_there() -> None:
    """After a take-over the heir has the last safe replica, so a second suspicion must not cost the partition."""
    c = cluster(heartbeat_timeout=0.5, heartbeat_last_timeout=5.0)
    first, second = c.holders()
    beat(c, 1.0, first)
    beat(c, 2.0, second)
    assert second in c.core.members.workers, "the standby that is being added is not safe yet"
    beat(c, 0.25)
    c.complete()
    beat(c, 1.0, second)
    assert second not in c.core.members.workers
    assert c.core.error is None


def test_a_lost_standby_is_replaced_by_a_standby() -> None:
    c = cluster()
    primary, kept = c.holders()
    c.lose(kept)
    assert c.holders()[0] == primary
    assert kinds(c) == [ACTIVE, STANDBY]


def test_a_worker_that_leaves_gives_away_its_standbys_as_standbys() -> None:
    c = cluster()
    leaves = c.holders()[1]
    c.drain(leaves)
    c.complete()
    c.settle()
    assert leaves not in c.all_holders()
    assert kinds(c) == [ACTIVE, STANDBY]


def test_a_partition_whose_last_replicas_are_lost_at_once_ends_the_query() -> None:
    c = cluster()
    primary, kept = c.holders()
    c.lose(primary)
    c.lose(kept)
    assert "the only safe replica of Sums/0" in str(c.core.error)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recovery": "warm", "replicas": 2}, "recovery must be one of active, standby, upstream; got 'warm'"),
        ({"recovery": "standby", "replicas": 1}, "says what further replicas do: give replicas=2 or more"),
    ],
)
def test_the_decorator_says_what_is_wanted(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        flux.stage(**given)


def test_replicas_that_are_not_kept_in_order_have_nothing_to_repeat() -> None:
    with pytest.raises(UsageError, match=r"needs spark\.flux\.replicas\.ordered=true"):
        cluster(ordered=False)


def test_the_plan_says_what_protects_a_stage() -> None:
    assert "3 replicas, of which 2 standbys: survives the loss of 2 executors" in explain(cluster(replicas=3).core.plan)


def test_reports_say_what_a_loss_would_cost() -> None:
    c = cluster()
    stage = {
        "stage": 0,
        "primaries": [],
        "queued": 0,
        "busy_s": 0.0,
        "latency_ms": None,
        "sink_bytes": 0,
        "sink_full": 0,
    }
    said = [{"standbys": 0, "checkpoint_bytes": 0, "checkpoint_behind_s": 0.0, "replay_s": 0.25},
            {"standbys": 1, "checkpoint_bytes": 1 << 20, "checkpoint_behind_s": 1.5, "replay_s": 0.0}]  # fmt: skip
    for node, more in enumerate(said):
        c.report(node, Heartbeat(node=node, progress=1, stats={"stages": [stage | more]}))
    (shown,) = Progress(c.core.plan, "id", None).make(c.core.members, 0, 1, c.now)["stages"]
    assert {key: shown[key] for key in ("recovery", "checkpointBytes", "checkpointBehindSeconds", "replaySeconds")} == {
        "recovery": STANDBY, "checkpointBytes": 1 << 20, "checkpointBehindSeconds": 1.5, "replaySeconds": 0.25,
    }  # fmt: skip
    assert shown["lossSeconds"] == 0.25


def shown_of(replicas: int, recovery: str = ACTIVE, **stats: Any) -> Any:
    c = Cluster(replicas=replicas, recovery=recovery)
    stage = {"stage": 0, "primaries": [], "queued": 0, "busy_s": 0.0, "latency_ms": None}
    c.report(0, Heartbeat(node=0, progress=1, stats={"stages": [stage | stats.pop("stage", {})], **stats}))
    return Progress(c.core.plan, "id", None).make(c.core.members, 0, 1, c.now, wished=c.core.wished)["stages"][0]


def test_a_loss_costs_the_query_where_there_is_no_other_replica() -> None:
    assert shown_of(1)["lossSeconds"] is None


def test_a_loss_costs_what_the_secondary_that_is_far_behind_has_still_to_apply() -> None:
    assert shown_of(2)["lossSeconds"] == 0.0
    assert shown_of(2, behind=[Lag(0, 0, 1, 0, 100, 0.75, 5, False)])["lossSeconds"] == 0.75


def test_rows_in_the_logs_of_workers_and_of_ingress_tasks_count_for_the_stage_that_is_to_get_them() -> None:
    c = Cluster()
    c.take(c.core.on_report("ingress", register(0, "ingress"), c.now))
    node = next(iter(c.core.members.ingress.values())).node
    c.take(c.core.on_report("ingress", Heartbeat(node=node, progress=1, stats={"log_bytes": 1000}), c.now))
    stage = {"stage": 0, "primaries": [], "queued": 0, "busy_s": 0.0, "latency_ms": None, "kept_bytes": 234}
    c.report(0, Heartbeat(node=0, progress=1, stats={"stages": [stage]}))
    assert Progress(c.core.plan, "id", None).make(c.core.members, 0, 1, c.now)["stages"][0]["keptBytes"] == 1234


def test_reports_go_by_what_is_wished_now() -> None:
    c = Cluster(slots=4)
    c.protect(recovery=STANDBY)
    (stage,) = Progress(c.core.plan, "id", None).make(c.core.members, 0, 1, c.now, wished=c.core.wished)["stages"]
    assert (stage["replicas"], stage["recovery"]) == (2, STANDBY)


def test_partitions_show_the_age_and_size_of_each_checkpoint() -> None:
    c = cluster()
    worker = c.holders()[1]
    stage = {
        "stage": 0,
        "primaries": [],
        "queued": 0,
        "busy_s": 0.0,
        "latency_ms": None,
        "checkpoints": [(0, 77, 1.25)],
    }
    c.report(worker, Heartbeat(node=worker, progress=1, stats={"stages": [stage]}))
    desk = RequestHandler(
        c.core, About("q", None, "a", 1, 0.0), lambda: None, Metrics(c.core.plan, "q", None), lambda: None
    )
    answer, _ = desk.answer(GetPartitions(), c.now)
    said = [(row.role, row.kind, row.checkpoint_behind_s) for row in answer.replicas]
    assert said == [("primary", ACTIVE, None), ("standby", STANDBY, 1.25)]
