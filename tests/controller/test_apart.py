"""Copies of a partition go as far apart as workers are: other domains, other hosts, other executors; also after kills."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from controller.balance.load import Loads, ReplicaLoad, WorkerLoad
from controller.balance.policies.planned_moves import PlannedPlacement
from controller.replicas.spread import Shared, Spread, WorkerPlace, shared
from flux.errors import UsageError
from flux.failure_domain import label, parse
from flux.settings import Settings
from tests.controller.cluster import Cluster

#: Slot -> host: two hosts of two executors each.
TWO_BY_TWO = {0: "a", 1: "a", 2: "b", 3: "b"}


def cluster(hosts: dict[int, str] | None = None, domains: dict[int, str] | None = None, **given: Any) -> Cluster:
    hosts = hosts or TWO_BY_TWO
    return Cluster(slots=len(hosts), hosts=hosts, domains=domains, **given)


def hosts_of(c: Cluster, partition: int) -> list[str]:
    return [c.core.members.workers[worker].about.host for worker in c.holders(partition)]


def together(c: Cluster) -> list[int]:
    """List the partitions with two copies on one host."""
    found = [hosts_of(c, partition) for partition in range(len(c.table.stages[0]))]
    return [partition for partition, hosts in enumerate(found) if len(set(hosts)) < len(hosts)]


def test_what_two_workers_share_is_the_smallest_thing_that_both_are_in() -> None:
    here = WorkerPlace("rack", "host", "executor")
    assert shared(here, here) is Shared.EXECUTOR
    assert shared(here, here._replace(executor="other")) is Shared.HOST
    assert shared(here, WorkerPlace("rack", "other", "other")) is Shared.DOMAIN
    assert shared(here, WorkerPlace("another", "other", "other")) is Shared.NOTHING


def test_a_host_without_a_label_is_a_domain_of_its_own() -> None:
    hosts = {0: "a", 1: "b", 2: "a"}
    spread = Spread({worker: WorkerPlace.of("", host, f"e{worker}") for worker, host in hosts.items()}, [0, 1, 2])
    assert spread.shared(0, [1]) is Shared.NOTHING
    assert spread.shared(0, [2]) is Shared.HOST
    assert spread.least([0]) is Shared.NOTHING
    assert spread.least([0, 1]) is Shared.HOST


# ---- the first table


@pytest.mark.parametrize("partitions", [4, 8, 32])
def test_the_first_copies_are_on_different_hosts_and_workers_hold_about_as_many(partitions: int) -> None:
    c = cluster(partitions=partitions)
    assert together(c) == []
    held = Counter(worker for partition in range(partitions) for worker in c.holders(partition))
    assert max(held.values()) - min(held.values()) <= 1


def test_where_there_are_fewer_hosts_than_copies_executors_do() -> None:
    c = cluster(replicas=3, partitions=4)
    for partition in range(4):
        assert len(set(c.holders(partition))) == 3
        assert len(set(hosts_of(c, partition))) == 2
    assert c.core.report()["copiesOn"] == "different executors"


def test_copies_are_in_different_racks_where_workers_have_labels() -> None:
    hosts = dict(enumerate("abcd"))
    c = cluster(hosts, domains={0: "r", 1: "r", 2: "s", 3: "s"}, partitions=8)
    for partition in range(8):
        assert {worker // 2 for worker in c.holders(partition)} == {0, 1}
    assert c.core.report()["copiesOn"] == "different domains"


# ---- repairs and moves


def test_a_repair_goes_to_the_host_that_has_no_copy() -> None:
    c = cluster(partitions=8)
    c.lose(0)
    c.settle()
    assert together(c) == []


def test_a_repair_falls_back_to_another_executor_of_the_host_and_is_mended_when_another_host_comes() -> None:
    c = cluster(partitions=4)
    c.lose(2)
    c.lose(3)
    c.settle()
    assert together(c) == [0, 1, 2, 3]
    assert c.core.report()["copiesOn"] == "different executors"
    c.join(2, attempt=1)
    c.settle()
    assert together(c) == []
    assert {event.why for event in c.events("move")} == {"its replicas were closer to each other than they need to be"}


@pytest.mark.parametrize("seed", range(20))
def test_no_two_copies_are_on_one_host_after_kills_and_repairs(seed: int) -> None:
    """Here one executor after the other is killed, each when all is repaired; now and then a whole host."""
    rng = random.Random(seed)
    c = cluster(partitions=8)
    for attempt in range(1, 12):
        slots = [rng.randrange(4)] if rng.random() < 0.8 else rng.choice([[0, 1], [2, 3]])
        for slot in slots:
            member = c.core.members.in_slot(slot)
            assert member is not None
            c.lose(member.node)
        if rng.random() < 0.5:
            c.settle()  # before they come back
        for slot in slots:
            c.join(slot, attempt=attempt)
        c.settle()
        assert c.core.error is None
        assert together(c) == []
        assert not c.core.moving


def test_a_worker_that_leaves_gives_its_copies_to_its_own_host_rather_than_beside_the_others() -> None:
    c = cluster(partitions=8)
    c.take(c.core.drain(0, c.now))
    c.settle()
    assert 0 not in c.table.endpoints
    assert together(c) == []


def test_the_target_of_a_move_does_not_stay_beside_its_source_on_one_host() -> None:
    """Targets may share the host of their source, because they take its place. If another copy is lost meanwhile, source and
    target would both stay."""
    c = cluster(partitions=1)
    source, other = c.holders()
    neighbour = next(slot for slot, host in TWO_BY_TWO.items() if host == hosts_of(c, 0)[0] and slot != source)
    c.move(source, neighbour)
    assert neighbour in c.holders()
    c.lose(other)
    c.settle()
    assert together(c) == []


def test_a_move_that_would_be_undone_at_once_is_refused() -> None:
    """Sweeps move replicas apart when nothing else is to be done. So the move was reported as done, and its source was in the
    table again, as the target of the move back."""
    c = cluster(partitions=1)
    primary, secondary = c.holders()
    beside = next(slot for slot, host in TWO_BY_TWO.items() if host == hosts_of(c, 0)[0] and slot != primary)
    text = rf"worker {beside} shares its host with worker {primary}, .* moved apart again"
    with pytest.raises(UsageError, match=text):
        c.move(secondary, beside)
    assert c.holders() == [primary, secondary]


def test_a_move_beside_a_replica_on_the_same_executor_is_refused_though_they_may_share_it() -> None:
    c = Cluster(slots=3, executors={0: "a", 1: "b", 2: "a"}, same_executor=True)
    assert c.holders() == [0, 1]
    with pytest.raises(UsageError, match="worker 2 shares its executor with worker 0"):
        c.move(1, 2)
    c.move(0, 2)
    c.settle()
    assert c.holders() == [2, 1], "it comes no closer to the other"


def test_a_move_that_comes_no_closer_than_it_was_is_made_though_there_is_a_better_place() -> None:
    c = Cluster(slots=3, executors={0: "a", 1: "a", 2: "a"}, same_executor=True)
    c.move(1, 2)
    c.settle()
    assert c.holders() == [0, 2]


def test_a_move_is_done_when_its_source_is_out_of_the_table_and_nothing_brings_it_back() -> None:
    c = cluster(partitions=1)
    primary, secondary = c.holders()
    (other,) = [slot for slot in range(4) if slot not in (primary, secondary) and hosts_of(c, 0)[1] == TWO_BY_TWO[slot]]
    c.move(secondary, other)
    c.settle()
    c.tick(1.0)
    assert c.holders() == [primary, other]
    assert [event.kind for event in c.core.repairs.history if "move" in event.kind] == ["move"]


def test_policies_do_not_bring_copies_closer_together() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    workers = {w: WorkerLoad(w, f"e{w}", host=host) for w, host in hosts.items()}
    places = PlannedPlacement.of(Loads(workers, [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 0, 2)]))
    assert places.keeps_apart(0, 0, 2, 3)
    assert not places.keeps_apart(0, 0, 2, 1)


# ---- labels


def test_a_label_comes_from_the_environment_of_the_executor_or_from_a_list_of_hosts() -> None:
    assert label("", "a", {"RACK": "r1"}) == ""
    assert label("RACK", "a", {"RACK": "r1"}) == "r1"
    assert label("RACK", "a", {}) == ""
    assert label("a=r1, b=r2", "b", {}) == "r2"
    assert label("a=r1,b=r2", "b.example.org", {}) == "r2"
    assert label("a=r1", "c", {}) == ""


@pytest.mark.parametrize("wrong", ["a=", "=r", "a=r,a=s", "a=r,b", "not a name"])
def test_a_list_of_labels_that_cannot_be_read_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse(wrong)
    with pytest.raises(UsageError, match=r"spark\.flux\.domain"):
        Settings.of({"spark.flux.domain": wrong})
