"""Reports that are made from arrays say the same as a count one by one, and take the controller's thread no time to speak
of. Each limit is ten times the measured time; the command ``pytest benchmarks/test_driver.py`` makes the figures."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter

import pytest

from benchmarks.test_driver import LargeQuery
from controller.operate.requests import GetHistory, GetMetrics, GetPartitions, GetStatus
from controller.replicas.kinds import missing
from controller.replicas.spread import APART, Shared, shared
from controller.report.progress import Level
from flux.errors import UsageError
from flux.replica.kinds import replicated
from partitioning.ids import STANDBY
from tests.controller.cluster import Cluster
from tests.controller.test_loads import reports


def one_by_one(c: Cluster) -> list[Level]:
    found = []
    for stage, rows in zip(c.core.plan.stages, c.table.stages, strict=True):
        safe = [
            sum(c.core.repairs.safety.keeps_up(stage.id, p, r) for r in replicas) for p, replicas in enumerate(rows)
        ]
        short = sum(missing(stage, replicas) is not None for replicas in rows)
        standbys = sum(replica.kind == STANDBY for replicas in rows for replica in replicas)
        found.append(Level(stage.replicas, min(safe), short, sum(map(len, rows)) - standbys, standbys))
    return found


def closest_one_by_one(c: Cluster) -> str:
    places = c.core.members.places
    pairs = [
        shared(places[one.worker], places[other.worker])
        for stage, rows in zip(c.core.plan.stages, c.table.stages, strict=True)
        if replicated(stage)
        for replicas in rows
        for number, one in enumerate(replicas)
        for other in replicas[:number]
    ]
    return APART[max(*pairs, Shared.DOMAIN)] if pairs else ""


def settle(c: Cluster) -> None:
    """Let all replicas catch up, and everything that is under way end."""
    for worker in c.core.members.workers:
        c.core.repairs.note_behind(worker, [], c.table, c.now)
    c.settle()


def check(c: Cluster) -> None:
    table = c.core.load_table()
    assert table is not None
    assert c.core.levels() == one_by_one(c)
    assert c.core.report()["copiesOn"] == closest_one_by_one(c)
    rows = [replicas for stage in c.table.stages for replicas in stage]
    primaries, replicas = table.columns.placed()
    assert Counter(primaries) == Counter(row[0].worker for row in rows)
    assert Counter(replicas) == Counter(replica.worker for row in rows for replica in row)
    loads = table.loads()
    listed = [
        (stage, partition, replica.worker, place == 0)
        for stage, partitions in enumerate(c.table.stages)
        for partition, row in enumerate(partitions)
        for place, replica in enumerate(row)
    ]
    assert [(load.stage, load.partition, load.worker, load.primary) for load in loads.replicas] == listed
    primaries = [load for load in loads.replicas if load.primary]
    assert table.state_of_stages() == {
        stage.id: sum(load.state_bytes for load in primaries if load.stage == stage.id) for stage in c.core.plan.stages
    }
    assert table.of_workers() == pytest.approx(loads.of_workers())
    for load in loads.replicas:
        row = c.table.replicas(load.stage, load.partition)
        here = (load.stage, load.partition)
        whole = missing(c.core.plan.stages[load.stage], row) is None
        still = here not in c.core.repairs.under_way and all(job.key != here for job in c.core.moving.jobs())
        assert load.movable == (whole and still and all(c.core.repairs.safety.has_arrived(*here, r) for r in row))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_said_of_all_replicas_is_what_each_of_them_is(seed: int) -> None:
    """Workers are lost, partitions are repaired and moved, replicas lag and are reported."""
    chance = random.Random(seed)
    hosts = {slot: f"h{slot % 3}" for slot in range(7)}
    c = Cluster(slots=7, partitions=5, stages=3, replicas=chance.choice((1, 2, 3)), hosts=hosts, balance_enabled=False)
    for turn in range(20):
        check(c)
        workers = sorted(c.core.members.workers)
        stage, partition = chance.randrange(3), chance.randrange(5)
        row = c.replicas(partition, stage)
        match chance.randrange(6):
            case 0 if len(workers) > 4 and all(len(r) > 1 for s in c.table.stages for r in s):
                c.lose(chance.choice(workers))
            case 1:
                others = [worker for worker in workers if worker not in c.holders(partition, stage)]
                with contextlib.suppress(UsageError, IndexError):  # it moves already, or no other worker is left
                    c.move(row[0].worker, chance.choice(others), partition, stage)
            case 2:
                settle(c)
            case 3 if len(row) > 1:
                lag = (stage, partition, row[1].worker, row[1].incarnation, 10**6, 9.0, turn, True)
                c.core.repairs.note_behind(row[0].worker, [lag], c.table, c.now)
            case _:
                worker = chance.choice(workers)
                reports(c, worker, float(turn), p0=(turn / 3, turn, turn, 1, 9), p3=(turn / 2, turn, turn, 2, 8))
        c.tick(0.1)
    settle(c)
    check(c)


def test_a_hundred_thousand_partitions_do_not_hold_up_the_controller() -> None:
    query = LargeQuery()
    query.report()

    def seconds() -> float:
        started = time.thread_time()
        query.report()
        for request in (GetStatus(), GetHistory(), GetMetrics(), GetPartitions()):
            assert time.thread_time() - started < 1.0, request
            query.ask(request)
        return time.thread_time() - started

    assert seconds() < 1.0
    answer = query.desk.answer(GetStatus(), query.now)[0]
    assert sum(worker.replicas for worker in answer.workers) == 2 * 25 * 4096
    assert sum(worker.load for worker in answer.workers) == pytest.approx(2 * 25 * 4096 * 1e-3, rel=0.01)
