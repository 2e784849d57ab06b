"""A primary that is out of reach for a producer or a consumer leaves the lead to a safe replica (design: unreached)."""

from __future__ import annotations

from typing import Any

import pytest

from controller.balance.load import Move
from controller.balance.rounds import RoundMoves, Rounds
from controller.replicas.addition_limits import UNREACHED_REST_S
from flux.wire.control import Unreached
from flux.wire.statistics import Lag
from tests.controller.cluster import Cluster


def told(c: Cluster, worker: int = 1, **other: Any) -> None:
    """Report that the secondary on a worker has rows that do not come to the primary."""
    leader, *others = c.replicas()
    heir = next((replica for replica in others if replica.worker == worker), leader)
    about: dict[str, Any] = {
        "node": 0, "stage": 0, "partition": 0, "primary": leader.worker, "leader": leader.incarnation, "worker": worker,
        "incarnation": heir.incarnation, "edge": 0, "producer": 2, "acks": False, **other,
    }  # fmt: skip
    c.report(about["node"], Unreached(**about))


def test_the_replica_that_has_the_rows_leads_and_another_one_is_added_elsewhere() -> None:
    c = Cluster(slots=4)
    told(c)
    assert c.holders()[0] == 1
    assert 0 not in c.holders()
    c.settle()
    assert c.holders()[0] == 1
    assert set(c.holders()) <= {1, 2, 3}
    assert len(c.holders()) == 2


def test_the_history_says_what_did_not_come_to_whom_and_who_has_it() -> None:
    c = Cluster()
    told(c)
    (event,) = c.events("take-over")
    assert (event.stage, event.partition, event.worker, event.source) == ("Sums", 0, 1, 0)
    assert event.why == (
        "rows of stream 0.2 (from partition 2 of rows) have not come to worker 0 for 5 s (spark.flux.link.unreached), and "
        "worker 1 has them"
    )
    assert c.core.repairs.take_overs == 1


def test_a_secondary_reports_acks_that_it_has() -> None:
    c = Cluster(stages=2)
    told(c, node=1, acks=True, edge=1, producer=0)
    assert c.holders()[0] == 1
    assert c.events("take-over")[0].why.startswith("acks of stream 1.0 (from s0/0) have not come to worker 0")


def test_the_worker_gets_no_replica_of_the_partition_for_a_while_though_no_other_could() -> None:
    c = Cluster(slots=2)
    told(c)
    assert c.holders() == [1]
    c.tick(UNREACHED_REST_S - 0.5)
    assert c.holders() == [1]
    c.tick(1.0)
    assert c.holders() == [1, 0]
    c.settle()
    assert c.holders() == [1, 0]


def test_another_partition_may_be_repaired_there_meanwhile() -> None:
    c = Cluster(slots=3, partitions=2)
    before = c.holders(1)
    told(c)
    c.lose(2)
    c.settle()
    assert c.holders(0) == [1]
    assert set(c.holders(1)) == {0, 1}, before


@pytest.mark.parametrize(
    "other",
    [{"primary": 1}, {"leader": 7}, {"incarnation": 7}, {"worker": 2}, {"worker": 0}],
    ids=["leads no more", "another life of it", "another life of the heir", "no replica", "itself"],
)
def test_a_report_about_other_replicas_changes_nothing(other: dict[str, Any]) -> None:
    c = Cluster()
    told(c, **other)
    assert c.holders() == [0, 1]
    assert c.events("take-over") == []


def test_no_replica_leads_that_is_far_behind() -> None:
    c = Cluster()
    heir = c.replicas()[1]
    c.core.repairs.note_behind(0, [Lag(0, 0, 1, heir.incarnation, 5000, 9.0, 3, False)], c.table, c.now)
    told(c)
    assert c.holders() == [0, 1]


def test_no_replica_leads_that_is_not_safe_and_none_is_dropped_that_is_being_added() -> None:
    c = Cluster(slots=3)
    c.lose(1)
    assert c.holders() == [0, 2]
    told(c, worker=2)
    assert c.holders() == [0, 2]
    c.complete()
    told(c, worker=2)
    assert c.holders() == [2]


def test_a_standby_does_not_lead_before_it_must() -> None:
    c = Cluster(recovery="standby")
    assert c.has() == "a s"
    told(c)
    assert c.holders() == [0, 1]


def test_the_change_waits_for_the_end_of_an_addition_that_needs_the_primary() -> None:
    c = Cluster(slots=4, replicas=3)
    c.lose(2)
    assert c.holders() == [0, 1, 3]
    told(c)
    assert c.holders() == [0, 1, 3]
    c.complete()
    told(c)
    assert c.holders() == [1, 3]


def test_no_policy_brings_a_replica_back_to_a_worker_that_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Cluster(slots=3)
    told(c)
    c.settle()
    assert c.holders() == [1, 2]
    monkeypatch.setattr(Rounds, "due", lambda *given: True)
    monkeypatch.setattr(Rounds, "ask", lambda *given: RoundMoves("pairing", [Move(0, 0, 1, 0)]))
    c.tick(UNREACHED_REST_S - 1.0)
    c.settle()
    assert c.holders() == [1, 2]
    c.tick(2.0)
    c.settle()
    assert c.holders() == [0, 2]


def test_a_move_that_waits_for_its_copy_does_not_hold_back_the_repair() -> None:
    c = Cluster(slots=4, partitions=2)
    source, target = c.holders(1)[0], next(worker for worker in range(4) if worker not in c.holders(1))
    c.move(source, target, partition=1)
    assert target in c.holders(1)
    told(c)
    assert len(c.holders(0)) == 2, "the repair has begun"
    assert target not in c.holders(1)
    c.settle()
    assert c.holders(1)[0] == target, "the move has begun again"
    assert c.events("failed attempt") == []
