"""Replicas of several kinds in the controller: kinds that are placed, added, moved, and counted on (design: kinds)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from controller.replicas.kinds import incomplete, missing, surplus, wanted
from controller.replicas.table_changes import make_live, retain
from flux.errors import QueryFailed
from flux.replica.kinds import register, registered, unregister
from flux.wire.control import CopyState
from partitioning.ids import ACTIVE, DISK
from partitioning.table import ReplicaAt
from tests.controller.cluster import Cluster
from tests.controller.test_loads import load_of, reports
from tests.simulation.witness import KIND, WITNESS, witnesses


@pytest.fixture(autouse=True)
def one_witness() -> Iterator[None]:
    with witnesses(1):
        yield


def kinds(c: Cluster) -> list[str]:
    return [replica.kind for replica in c.replicas()]


def test_each_partition_begins_with_enough_of_each_kind_and_an_active_replica_leads() -> None:
    c = Cluster(slots=4)
    assert kinds(c) == [ACTIVE, ACTIVE, WITNESS]
    assert wanted(c.core.plan.stages[0]) == kinds(c)
    assert [c.core.repairs.safety.is_safe(0, 0, replica) for replica in c.replicas()] == [True, True, False]
    assert all(c.core.repairs.safety.has_arrived(0, 0, replica) for replica in c.replicas())


def test_too_few_workers_for_all_kinds_end_the_query_before_it_begins() -> None:
    assert isinstance(Cluster(slots=2).core.error, QueryFailed)


def test_a_surplus_of_one_kind_does_not_stand_for_another() -> None:
    stage = Cluster(slots=4).core.plan.stages[0]
    three = tuple(ReplicaAt(worker, 0) for worker in range(3))
    assert missing(stage, three) == WITNESS
    enough = Cluster(slots=4).replicas()
    assert incomplete(stage, [enough, three, enough[:2]]) == [1, 2]
    assert missing(stage, (*three[:1], ReplicaAt(5, 0, kind=WITNESS))) == ACTIVE


def test_the_kind_of_a_new_replica_stays_with_it() -> None:
    table = Cluster(slots=4).table
    added = make_live(retain(table, 0, 0, 3, WITNESS), 0, 0, 3)
    assert added.replicas(0, 0)[-1] == ReplicaAt(3, table.epoch + 1, True, WITNESS)


def test_a_lost_witness_is_replaced_without_a_copy_of_state() -> None:
    c = Cluster(slots=4)
    c.lose(c.holders()[2])
    assert kinds(c) == [ACTIVE, ACTIVE, WITNESS]
    assert not c.replicas()[2].live
    c.tick(1.0)
    assert c.sent(CopyState) == [], "it follows by itself"
    c.complete()
    assert c.core.repairs.safety.has_arrived(0, 0, c.replicas()[2])
    assert not c.core.repairs.safety.is_safe(0, 0, c.replicas()[2])


def test_nobody_need_confirm_the_table_for_a_replica_that_reads_no_streams() -> None:
    c = Cluster(slots=4)
    c.mute = {f"w{slot}.0" for slot in range(4)}
    c.lose(c.holders()[2])
    c.caught_up(safe=False)
    assert c.replicas()[2].live


def test_where_the_primary_is_lost_a_witness_stays_and_an_active_replica_leads() -> None:
    c = Cluster(slots=4)
    primary, secondary, witness = c.holders()
    c.lose(secondary)
    c.complete()
    assert c.holders()[:2] == [primary, witness]
    c.lose(primary)
    assert kinds(c)[:2] == [ACTIVE, WITNESS]
    assert c.holders()[1] == witness


def test_a_partition_of_which_only_a_witness_is_left_is_lost() -> None:
    c = Cluster(slots=2, replicas=1)
    assert kinds(c) == [ACTIVE, WITNESS]
    c.lose(c.holders()[0])
    assert isinstance(c.core.error, QueryFailed)
    assert "the only safe replica of Sums/0" in str(c.core.error)


def test_a_moved_witness_stays_a_witness() -> None:
    c = Cluster(slots=4)
    witness = c.holders()[2]
    target = next(worker for worker in range(4) if worker not in c.holders())
    c.move(witness, target)
    c.complete()
    assert (c.holders()[2], kinds(c)) == (target, [ACTIVE, ACTIVE, WITNESS])


def test_a_move_of_an_active_replica_does_not_wait_for_a_witness_to_be_safe() -> None:
    c = Cluster(slots=4)
    secondary = c.holders()[1]
    target = next(worker for worker in range(4) if worker not in c.holders())
    c.move(secondary, target)
    c.complete()
    assert (c.holders()[1], kinds(c)) == (target, [ACTIVE, ACTIVE, WITNESS])


def test_a_witness_is_no_load_and_does_not_keep_a_partition_from_moving() -> None:
    c = Cluster(slots=4)
    for worker in c.holders()[:2]:
        reports(c, worker, 0.0, p0=(0.0, 0, 0, 0, 64))
        reports(c, worker, 2.0, p0=(1.0, 4000, 20, 0, 64))
    witness = load_of(c, 0, c.holders()[2])
    assert (witness.busy, witness.rows_per_s, witness.state_bytes) == (0.0, 0.0, 0)
    assert load_of(c, 0, c.holders()[0]).busy == 0.5
    assert all(load.movable for load in c.core.loads().replicas)


#: A witness in each partition, for which nothing waits.
LOOSE = replace(KIND, name="loose", commits=False, wanted=lambda stage: 1)


@pytest.mark.parametrize("answer", [{"safe": True}, {"leads_as": ACTIVE}])
def test_a_kind_that_may_lack_what_is_committed_may_neither_lead_nor_be_safe(answer: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="loose: a kind without commits may lack committed steps"):
        register(replace(LOOSE, **answer))
    assert "loose" not in [kind.name for kind in registered()]


def test_a_replica_that_does_not_count_for_commits_goes_with_its_primary() -> None:
    register(LOOSE)
    try:
        c = Cluster(slots=5)
        assert kinds(c) == [ACTIVE, ACTIVE, WITNESS, "loose"]
        loose_one = c.replicas()[3]
        assert c.core.repairs.safety.has_arrived(0, 0, loose_one)
        c.lose(c.holders()[0])
        assert loose_one not in c.replicas()
        assert WITNESS in kinds(c), "it has acked whatever is committed"
    finally:
        unregister("loose")


def test_a_kind_that_the_controller_does_not_place_is_neither_missing_nor_surplus() -> None:
    c = Cluster(slots=4)
    stage, row = c.core.plan.stages[0], c.replicas()
    assert DISK not in wanted(stage)
    with_vault = (*row, ReplicaAt(9, 0, kind=DISK))
    assert surplus(stage, with_vault) == []
    assert missing(stage, with_vault) is None
    assert surplus(stage, (*row, ReplicaAt(9, 0, kind=WITNESS))) == [row[2], ReplicaAt(9, 0, kind=WITNESS)]
