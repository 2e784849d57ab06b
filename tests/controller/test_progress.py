"""Rows are counted once in a query's progress, on any worker of a partition and with any order of reports."""

from __future__ import annotations

import json
import uuid
from typing import Any

from controller.report.progress import Progress, QueryProgress
from flux.wire.control import Heartbeat, PartitionFinished
from tests.controller.cluster import Cluster
from tests.controller.operated import FakeCore


def at_work(*of_workers: list[tuple[int, int, int, int]]) -> FakeCore:
    """Make a query with these primaries of the first stage on each worker: partition, rows in, rows out, finished."""
    core = FakeCore()
    for member, primaries in zip(core.members.workers.values(), of_workers, strict=False):
        idle = {"queued": 0, "busy_s": 0.0}
        member.stats = {"stages": [idle | {"stage": 0, "primaries": primaries}, idle | {"stage": 1, "primaries": []}]}
    for member in list(core.members.workers.values())[len(of_workers) :]:
        del core.members.workers[member.node]
    return core


def first_stage(progress: Progress, *of_workers: list[tuple[int, int, int, int]], now: float) -> dict[str, Any]:
    core = at_work(*of_workers)
    return progress.make(core.members, 0, 1, now)["stages"][0]


def a_progress() -> Progress:
    return Progress(FakeCore().plan, "id", None)


def counted(stage: dict[str, Any]) -> tuple[int, int, int]:
    return stage["rowsIn"], stage["rowsOut"], stage["finished"]


def test_a_partition_that_moves_is_counted_once_while_the_reports_of_both_workers_have_it() -> None:
    progress = a_progress()
    assert counted(first_stage(progress, [(0, 100, 10, 0)], [(1, 50, 5, 0)], now=1.0)) == (150, 15, 0)
    both = first_stage(progress, [(0, 100, 10, 0)], [(0, 120, 12, 1), (1, 50, 5, 0)], now=2.0)
    assert counted(both) == (170, 17, 1)


def test_the_count_does_not_fall_while_nobody_has_reported_a_partition() -> None:
    """Without reports are partitions whose worker is lost, or whose new primary has not yet reported. The rate has no share of a
    lost worker."""
    progress = a_progress()
    first_stage(progress, [(0, 100, 10, 0)], [(1, 50, 5, 0)], now=1.0)
    assert counted(first_stage(progress, [(1, 60, 6, 0)], now=2.0)) == (160, 16, 0)
    after = first_stage(progress, [(0, 90, 9, 0), (1, 60, 6, 0)], now=3.0)
    assert counted(after) == (160, 16, 0)
    assert after["rowsPerSecond"] == 0.0


def test_a_report_has_the_properties_of_pysparks() -> None:
    core = at_work([(0, 100, 10, 0)])
    identity = "94f46fdd-2c1d-4c7e-9a58-7a4d8f0f3a11"
    report = QueryProgress(Progress(core.plan, identity, "clicks", identity).make(core.members, 7, 1, 1.0))
    assert (report.id, report["id"]) == (uuid.UUID(identity), identity)
    assert (report.runId, report.name, report.timestamp) == (uuid.UUID(identity), "clicks", report["timestamp"])
    assert (report.numInputRows, report.inputRowsPerSecond, report.processedRowsPerSecond) == (7, 0.0, 0.0)
    assert report.sources == report["sources"]
    assert "\n" not in report.json
    assert json.loads(report.json) == json.loads(report.prettyJson) == report
    assert str(report) == report.prettyJson != report.json
    assert isinstance(report, dict)


def test_rows_that_readers_have_not_counted_are_those_that_their_stage_has() -> None:
    """After a take-over, a reader knows earlier rows only by the last report of the reader before it."""
    c = Cluster(readers=2)
    progress = Progress(c.core.plan, "id", None)
    idle = {"queued": 0, "busy_s": 0.0}
    for member, rows in zip(c.core.members.workers.values(), [600, 420], strict=False):
        member.stats = {"stages": [idle | {"stage": 0, "primaries": [(0, rows, 0, 0)]}]}
    assert progress.make(c.core.members, 550, 0, 1.0, read={0: 550})["totalInputRows"] == 600
    assert progress.make(c.core.members, 700, 0, 2.0, read={0: 700})["totalInputRows"] == 700, "they are ahead of it"
    assert progress.make(c.core.members, 550, 0, 3.0)["totalInputRows"] == 550, "the stage has counts of earlier lives"


def test_a_worker_that_goes_after_the_end_leaves_its_counts_for_the_last_report() -> None:
    """Connections of such workers may close before the report is made: then the rows of their partitions were missing."""
    c = Cluster()
    progress = Progress(c.core.plan, "id", None)
    worker = c.holders()[0]
    counted = [{"stage": 0, "queued": 0, "busy_s": 0.0, "primaries": [(0, 600, 10, 1)]}]
    assert not progress.ends_are_told(c.core.members)
    c.report(worker, Heartbeat(node=worker, progress=1, stats={"stages": counted}))
    c.report(worker, PartitionFinished(node=worker, stage=0, partition=0))
    assert c.core.phase == "ended"
    c.lose(worker)
    assert progress.ends_are_told(c.core.members)
    assert progress.make(c.core.members, 600, 0, 1.0)["stages"][0]["rowsIn"] == 600


def test_sources_have_ended_when_workers_have_said_so_of_each_partition() -> None:
    c = Cluster(readers=2)
    for worker, ended in ((0, False), (1, True), (0, True)):
        assert not c.core.inputs.have_ended(c.core.plan.sources)
        c.report(worker, Heartbeat(node=worker, progress=1, stats={"pauses": [(0, worker, 3, ended)]}))
    assert c.core.inputs.have_ended(c.core.plan.sources)


def test_nothing_waits_when_all_output_is_there() -> None:
    core = at_work([(0, 100, 10, 1)])
    for member in core.members.workers.values():
        member.stats |= {"queued": 3, "log_bytes": 1 << 20}
        member.stats["stages"] = [dict(stage, queued=3, kept_bytes=99) for stage in member.stats["stages"]]
    progress = Progress(core.plan, "id", None)
    assert progress.make(core.members, 100, 1, 1.0)["backlog"] == {"slices": 3, "bytes": 1 << 20}
    last = progress.make(core.members, 100, 1, 2.0, over=True)
    assert last["backlog"] == {"slices": 0, "bytes": 0}
    assert [(stage["queued"], stage["keptBytes"]) for stage in last["stages"]] == [(0, 0)] * 2


def test_figures_of_stages_that_a_heartbeat_lacks_are_those_that_were_told_last() -> None:
    member = next(iter(FakeCore().members.workers.values()))
    member.stats = {}
    for told in (
        [{"stage": 0, "queued": 1}, {"stage": 1, "queued": 2}, {"stage": 2, "queued": 3}],
        [{"stage": 1, "queued": 5}],
    ):
        member.take(Heartbeat(node=member.node, progress=1, stats={"rows_in": 7, "stages": told}), 1.0, {0, 1})
    assert member.stats == {"rows_in": 7, "stages": [{"stage": 0, "queued": 1}, {"stage": 1, "queued": 5}]}
    member.take(Heartbeat(node=member.node, progress=2, stats={"rows_in": 8, "stages": []}), 1.0, {1})
    assert member.stats["stages"] == [{"stage": 1, "queued": 5}]
