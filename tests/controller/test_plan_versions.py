"""Reports and counts go on over another version of the plan: knowledge of the stages that stay is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from controller.balance.load_reports import LoadBook
from controller.replicas.additions import Census
from controller.replicas.protection_wishes import ProtectionWishes, wished
from controller.replicas.table_index import TableIndex
from controller.report.metrics import Metrics
from controller.report.progress import Level, Progress
from partitioning.ids import STANDBY
from partitioning.table import ReplicaAt, Table
from tests.controller.cluster import Cluster
from tests.controller.growing import grown, without


def cluster(**options: int) -> Cluster:
    return Cluster(stages=2, partitions=2, **options)


def with_rows(c: Cluster, **rows: int) -> Table:
    """Add stages behind the last one to the table, by their number of partitions (0: a stage that is gone), all on worker 0."""
    more = tuple(((ReplicaAt(0, 0),),) * partitions for partitions in rows.values())
    return Table(c.table.epoch + 1, (*c.table.stages, *more), c.table.sources, c.table.endpoints)


def test_arrays_have_no_rows_of_a_stage_that_is_gone_and_rows_of_one_that_has_come() -> None:
    c = cluster()
    plan = without(grown(c.core.plan, "A", "B"), 2)
    index = TableIndex(plan, version=7).look(with_rows(c, A=0, B=2))
    assert index.version > 7
    assert index.sizes.tolist() == [2, 2, 0, 2]
    assert index.by_stage(np.add, index.count(index.listed)) == {0: 4, 1: 4, 3: 2}
    last = TableIndex(without(plan, 3)).look(with_rows(c, A=0, B=0))
    assert last.sizes.tolist() == [2, 2, 0, 0], "the table keeps the places"
    assert last.by_stage(np.add, last.count(last.listed)) == {0: 4, 1: 4}


def test_loads_of_stages_that_stay_are_kept_over_a_change_of_the_plan() -> None:
    c = cluster()
    book, before = LoadBook(c.core.plan), grown(c.core.plan, "A", "B")
    book.follow(before)
    work = [(0, 0, 0), (1, 1, 0), (2, 1, 5), (3, 0, 6)]

    def said(at: float) -> dict[str, object]:
        return {"load": {"at": at, "replicas": [(*each, at * (1 + each[0]), 0, 0, 9, 100 + each[0]) for each in work]}}

    for at in (1.0, 3.0):
        book.take(0, said(at))
    book.follow(without(before, 2))
    index = TableIndex(book.plan)
    newest = book._newest[0]
    stages = np.searchsorted(index.starts, newest.rows, side="right") - 1
    assert stages.tolist() == [0, 1, 3]
    assert newest.counts[4].tolist() == [100, 101, 103], "bytes of state, each with its stage"
    assert newest.rates[0].tolist() == [1.0, 2.0, 4.0]
    book.take(0, said(5.0))
    assert book._newest[0].rows.tolist() == newest.rows.tolist(), "of the stage that is gone"


def test_counts_of_replicas_follow_stages_that_come_and_go_in_one_change() -> None:
    c = cluster()
    wishes = ProtectionWishes(c.core.plan)
    census = Census(wishes)
    census.look(c.table)
    before = census.held()
    wishes.follow(grown(c.core.plan, "A"))
    census.look(with_rows(c, A=2))
    assert census.held()[0] == before[0] + 2
    assert census.low_of_stages()[2] == [0, 1]
    wishes.follow(grown(without(wishes.plan, 2), "B"))
    census.look(with_rows(c, A=0, B=1))
    assert census.held()[0] == before[0] + 1
    assert sorted(census.low_of_stages()) == [0, 1, 3]


def test_wishes_for_stages_that_stay_are_kept_and_changes_of_others_end() -> None:
    c = cluster()
    wishes = ProtectionWishes(grown(c.core.plan, "A"))
    for stage in (0, 2):
        wishes.ask(wished(wishes.plan.stages[stage], 2, STANDBY), c.table.stages[0], 0.0, 1)
    ended = wishes.follow(without(wishes.plan, 2))
    assert [change.stage for change in ended] == [2]
    assert ended[0].ended == "the stage was removed"
    assert list(wishes.open) == [0]
    assert [stage.recovery for stage in wishes.plan.stages] == [STANDBY, "active"]
    assert wishes.plan.version == 2


def test_progress_goes_by_the_plan_that_it_is_given() -> None:
    c = cluster()
    plan, report = grown(c.core.plan, "A"), Progress(c.core.plan, "q", None)
    first = report.make(c.core.members, 0, 0, 1.0, wished=c.core.plan)
    assert [stage["name"] for stage in first["stages"]] == ["s0", "Sums"]
    mine = {"stages": [{"stage": 2, "primaries": [(0, 5, 0, 0), (1, 7, 0, 0)]}]}
    c.core.members.workers[0].stats.update(mine)
    assert report.make(c.core.members, 0, 0, 2.0, wished=plan)["stages"][2]["rowsIn"] == 12
    last = report.make(c.core.members, 0, 0, 3.0, wished=without(plan, 1))
    assert [(stage["name"], stage["rowsIn"]) for stage in last["stages"]] == [("s0", 0), ("A", 12)]


def test_metrics_of_an_older_report_leave_out_a_stage_that_is_gone() -> None:
    c = cluster()
    plan = grown(c.core.plan, "A")
    report = Progress(plan, "q", None).make(c.core.members, 0, 0, 1.0, wished=plan) | c.core.report()
    metrics = Metrics(plan, "q", None)
    metrics.follow(without(plan, 1))
    metrics.observe("running", report, [Level(2, 2, 0), Level(3, 3, 0)], {}, 0, 0)
    assert 'flux_replicas_wanted{id="q",query="q",stage="A"} 3.0' in metrics.text()
    assert "Sums" not in metrics.text()


def test_a_plan_with_another_number_of_replicas_is_no_other_version() -> None:
    c = cluster()
    report = Progress(c.core.plan, "q", None)
    report.follow(replace(c.core.plan, secret=b"other"))
    assert report.plan is c.core.plan
