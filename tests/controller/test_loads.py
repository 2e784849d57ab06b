"""Load as policies see it, from the workers' reports; and rows that are counted once."""

from __future__ import annotations

from typing import Any

import pytest

from controller.balance.load import Move
from controller.report.progress import MARKS_KEPT, InputRows
from flux.wire.control import Heartbeat
from tests.controller.cluster import Cluster, register


def reports(
    c: Cluster, worker: int, at: float, cpu_s: float = 0.0, rested_s: float | None = None, **counts: Any
) -> None:
    """Report a heartbeat with load: ``p0=(busy_s, rows, slices, queued, state_bytes)`` of Sums/0, and so on."""
    lives = {(0, p): r.incarnation for p in range(len(c.table.stages[0])) for r in c.replicas(p) if r.worker == worker}
    replicas = [[0, int(name[1:]), lives.get((0, int(name[1:])), 0), *values] for name, values in counts.items()]
    load = {"at": at, "replicas": replicas} | ({} if rested_s is None else {"rested_s": rested_s})
    stats = {"cpu_s": cpu_s, "rss_bytes": 1 << 20, "load": load}
    c.report(worker, Heartbeat(node=worker, progress=1, stats=stats))


def load_of(c: Cluster, partition: int, worker: int) -> Any:
    return next(r for r in c.core.loads().replicas if (r.partition, r.worker) == (partition, worker))


# ---- rates


def test_nothing_is_known_before_two_reports_but_who_holds_what() -> None:
    c = Cluster(slots=3)
    loads = c.core.loads()
    assert loads.seconds == 0
    assert [(r.partition, r.worker, r.primary, r.busy) for r in loads.replicas] == [
        (0, 0, True, 0.0),
        (0, 1, False, 0.0),
    ]
    assert sorted(loads.workers) == [0, 1, 2]


def test_rates_are_differences_over_the_time_of_the_worker_itself() -> None:
    c = Cluster(slots=3)
    for worker, start in ((0, 100.0), (1, 7.0), (2, 0.0)):
        reports(c, worker, start, cpu_s=1.0, p0=(5.0, 1000, 10, 3, 64))
        reports(c, worker, start + 2.0, cpu_s=2.0, p0=(6.0, 5000, 30, 4, 128))
    loads = c.core.loads()
    assert loads.seconds == 2.0
    primary = load_of(c, 0, 0)
    assert (primary.busy, primary.rows_per_s, primary.slices_per_s) == (0.5, 2000.0, 10.0)
    assert (primary.queued, primary.state_bytes) == (4, 128)
    assert loads.workers[0].cpu == 0.5
    assert loads.of_workers() == {0: 0.5, 1: 0.5, 2: 0.0}


def test_the_thread_of_a_worker_is_busy_when_it_does_not_rest() -> None:
    c = Cluster(slots=2)
    for worker, rested_s in ((0, 0.5), (1, 0.0)):
        reports(c, worker, 0.0, rested_s=7.0)
        reports(c, worker, 2.0, rested_s=7.0 + rested_s)
    assert [c.core.loads().workers[worker].busy for worker in (0, 1)] == [0.75, 1.0]


def test_rates_are_over_a_second_at_least_however_often_is_reported() -> None:
    c = Cluster(slots=2)
    for tenth in range(31):
        reports(c, 0, tenth / 10, p0=(tenth / 20, 0, 0, 0, 0))
        reports(c, 1, tenth / 10, p0=(0.0, 0, 0, 0, 0))
    assert 1.0 <= c.core.loads().seconds < 2.2
    assert load_of(c, 0, 0).busy == pytest.approx(0.5)


def test_a_copy_that_has_just_come_is_thought_to_do_what_the_others_do() -> None:
    c = Cluster(slots=3)
    for worker in (0, 1):
        reports(c, worker, 0.0, p0=(0.0, 0, 0, 0, 100))
        reports(c, worker, 1.0, p0=(0.25, 10, 1, 0, 100))
    c.take(c.core.move([Move(0, 0, 1, 2)], "by hand", c.now))
    c.complete()
    assert (load_of(c, 0, 2).busy, load_of(c, 0, 2).state_bytes) == (0.25, 100)


def test_the_last_known_load_of_a_partition_stands_for_a_copy_that_is_all_alone() -> None:
    c = Cluster(slots=2, replicas=1)
    reports(c, 0, 0.0, p0=(0.0, 0, 0, 0, 100))
    reports(c, 0, 1.0, p0=(0.75, 10, 1, 0, 100))
    c.core.loads()
    c.take(c.core.move([Move(0, 0, 0, 1)], "by hand", c.now))
    c.complete()
    assert load_of(c, 0, 1).busy == 0.75


def test_counts_of_an_earlier_life_of_a_replica_are_not_mixed_with_those_of_a_later_one() -> None:
    c = Cluster(slots=2, replicas=1)
    reports(c, 0, 0.0, p0=(9.0, 0, 0, 0, 0))
    for source, target in ((0, 1), (1, 0)):
        c.take(c.core.move([Move(0, 0, source, target)], "by hand", c.now))
        c.complete()
    reports(c, 0, 1.0, p0=(0.5, 0, 0, 0, 0))
    assert load_of(c, 0, 0).busy == 0.0, "not minus 8.5"


def test_heartbeats_without_load_leave_it_as_it_is() -> None:
    c = Cluster(slots=2)
    reports(c, 0, 0.0, p0=(0.0, 0, 0, 7, 0))
    c.report(0, Heartbeat(node=0, progress=2, stats={"rows_in": 3}))
    assert load_of(c, 0, 0).queued == 7


# ---- partitions that can move


def test_a_partition_can_be_moved_when_it_is_whole_and_nothing_is_asked_for_it() -> None:
    c = Cluster(slots=4, partitions=2)
    assert all(r.movable for r in c.core.loads().replicas)
    c.take(c.core.move([Move(0, 0, 0, 3), Move(0, 1, 1, 3)], "by hand", c.now))
    assert not any(r.movable for r in c.core.loads().replicas), "one is under way, the other waits"
    c.settle()
    assert all(r.movable for r in c.core.loads().replicas)
    c.lose(c.holders(0)[1])
    short = {p for p in (0, 1) if not load_of(c, p, c.holders(p)[0]).movable}
    assert 0 in short


def test_a_partition_with_too_few_copies_cannot_be_moved_even_if_it_cannot_be_repaired() -> None:
    c = Cluster(slots=2)
    c.lose(1)
    assert not load_of(c, 0, 0).movable


def test_workers_that_leave_say_so() -> None:
    c = Cluster(slots=4)
    c.take(c.core.drain(0, c.now))
    assert c.core.loads().workers[0].leaving
    assert not c.core.loads().workers[1].leaving


# ---- input rows


def test_rows_read_again_by_another_worker_count_once() -> None:
    rows = InputRows()
    rows.from_worker(0, [(0, 0, 0, 10, 1000), (0, 1, 0, 5, 500)])
    assert rows.total == 1500
    rows.from_worker(1, [(0, 0, 0, 4, 400)])
    assert rows.total == 1500, "does not fall while it catches up"
    rows.from_worker(1, [(0, 0, 0, 12, 1200)])
    assert rows.total == 1700


def test_a_reader_that_begins_in_the_middle_counts_from_what_was_known_of_the_rows_before() -> None:
    rows = InputRows()
    rows.from_worker(0, [(0, 0, 0, 10, 1000)])
    rows.from_worker(0, [(0, 0, 0, 20, 2000)])
    rows.from_worker(1, [(0, 0, 10, 0, 0)])
    rows.from_worker(1, [(0, 0, 10, 10, 1000)])
    assert rows.total == 2000
    rows.from_worker(1, [(0, 0, 10, 15, 1500)])
    assert rows.total == 2500


@pytest.mark.parametrize("start", [0, 3, 9, 10, 11, 17])
def test_wherever_it_begins_nothing_is_counted_twice_and_the_total_never_falls(start: int) -> None:
    rows, before = InputRows(), 0
    for batches in (4, 10, 16):
        rows.from_worker(0, [(0, 0, 0, batches, 100 * batches)])
    for more in range(30):
        rows.from_worker(1, [(0, 0, start, more, 100 * more)])
        assert before <= rows.total <= max(1600, 100 * (start + more))
        before = rows.total


def test_a_reader_of_the_third_life_counts_from_the_second() -> None:
    rows = InputRows()
    rows.from_worker(0, [(0, 0, 0, 10, 1000)])
    rows.from_worker(1, [(0, 0, 10, 5, 500)])
    rows.from_worker(2, [(0, 0, 15, 5, 500)])
    assert rows.total == 2000


def test_a_retried_spark_task_does_not_count_its_rows_again() -> None:
    rows = InputRows()
    rows.from_ingress([0], 0, 700)
    rows.from_ingress([0], 0, 100)
    rows.from_ingress([0], 1, 50)
    rows.from_ingress([1], 0, 5)
    assert rows.total == 755


def test_what_is_remembered_of_a_partition_is_bounded() -> None:
    rows = InputRows()
    for batches in range(1, 10 * MARKS_KEPT):
        rows.from_worker(0, [(0, 0, 0, batches, batches)])
    (partition,) = rows._partitions.values()
    assert len(partition._batches) == len(partition._rows) == MARKS_KEPT + 1
    assert partition._batches[0] == 0


def test_the_total_outlives_the_worker_and_the_attempt() -> None:
    c = Cluster(slots=3, readers=2)
    c.report(0, Heartbeat(node=0, progress=1, stats={"sources": [[0, 0, 0, 3, 30]]}))
    c.lose(0)
    assert c.core.inputs.total == 30
    c.take(c.core.on_report("i", register(0, "ingress", attempt=5), c.now))
    c.take(c.core.on_report("i", Heartbeat(node=3, progress=1, stats={"source_rows": 8}), c.now))
    c.take(c.core.on_report("j", register(0, "ingress", attempt=6), c.now))
    assert c.core.inputs.total == 38
