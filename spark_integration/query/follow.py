"""A running query on the screen: rows in, rows per second, backlog, and the same per worker, until it has ended."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flux.dataflow.flow import Flow
from flux.errors import UsageError
from spark_integration.query.query import Query

#: Time between two looks for a new report, in seconds.
LOOK_S = 0.05


def follow(query: Query, console: Console | None = None) -> None:
    """Show progress until all output is there or the query has failed. On a terminal the view is renewed in place, elsewhere
    each report is one line. The query's errors are not raised: the query has them."""
    if isinstance(query, Flow):
        raise UsageError(
            f"{query} is a flow that has not been started: flux.follow takes the query that start() returns"
        )
    if not isinstance(query, Query):
        raise UsageError(f"flux.follow takes the query that start() returns, got {type(query).__name__}")
    console = console or Console(stderr=True, highlight=False)
    if console.is_terminal:
        with Live(console=console, transient=False, refresh_per_second=10) as live:
            for report in _reports(query):
                live.update(view(report))
    else:
        for report in _reports(query):
            if report["numInputRows"] or report["processedRowsPerSecond"]:
                console.print(line(report), soft_wrap=True)


def _reports(query: Query) -> Any:
    """Yield each report once, the last one included."""
    seen = None
    while True:
        over = query.phase in ("finished", "ended")
        newest = query.lastProgress
        if newest is not None and newest is not seen:
            seen = newest
            yield newest
        if over:
            return
        time.sleep(LOOK_S)


def line(report: dict[str, Any]) -> str:
    workers = ", ".join(f"worker {w['id']}: {w['rowsPerSecond']:,.0f} rows/s" for w in report["workers"])
    return (
        f"{report['totalInputRows']:,} rows in, {report['inputRowsPerSecond']:,.0f} input rows/s, "
        f"backlog {report['backlog']['slices']} slices and {_mib(report['backlog']['bytes'])} ({workers}){replication(report)}"
    )


def replication(report: dict[str, Any]) -> str:
    """Describe replication; "" while all is well and nothing has happened."""
    missing, under_way = report.get("underReplicated", ()), report.get("repairsUnderWay", ())
    if not (missing or under_way or report.get("takeOvers")):
        return ""
    return (
        f", epoch {report['epoch']}, {report['takeOvers']} take-overs, {report['repairsDone']} repairs done, "
        f"{len(under_way)} under way, {len(missing)} partitions short of replicas"
    )


def view(report: dict[str, Any]) -> Group:
    head = Text(
        f"rows in {report['totalInputRows']:,}   input rows/s {report['inputRowsPerSecond']:,.0f}   "
        f"backlog {report['backlog']['slices']:,} slices, {_mib(report['backlog']['bytes'])}{replication(report)}"
    )
    stages = Table("stage", "partitions done", "rows in", "rows out", "rows/s", "queued")
    for stage in report["stages"]:
        stages.add_row(
            stage["name"],
            f"{stage['finished']} of {stage['partitions']}",
            f"{stage['rowsIn']:,}",
            f"{stage['rowsOut']:,}",
            f"{stage['rowsPerSecond']:,.0f}",
            f"{stage['queued']:,}",
        )
    workers = Table("worker", "host", "rows in", "rows/s", "queued", "log", "memory")
    for worker in report["workers"]:
        workers.add_row(
            str(worker["id"]),
            worker["host"],
            f"{worker['rowsIn']:,}",
            f"{worker['rowsPerSecond']:,.0f}",
            f"{worker['queued']:,}",
            _mib(worker["logBytes"]),
            _mib(worker["rssBytes"]),
        )
    return Group(head, stages, workers)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
