"""Waiting until all available rows have passed all stages, for ``query.processAllAvailable()`` (design: all-available).

    1. First every source has to pause. A DataFrame must be read to its end; a source in the workers must pause (``yield
       None``) or end. Only pauses after the question count, so pauses are counted from a report that was certainly made
       after it.
    2. Then the rows in the logs have to leave them. Rows that leave the log of a stage are in the logs of the next stage at
       the latest. So after as many rounds as there are stages in a chain, they have left the last log.

Rows that come meanwhile do not hold this up. If all sources have ended, the end of the query is awaited instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from controller.course.query_phases import QueryPhase
from controller.decide.board import Board
from controller.text import count, named
from flux.dataflow.plan import DataFrameSourcePlan, FromMicroBatches, FromStage, Plan
from partitioning.ids import SourcePartition

#: The third report of a worker was certainly made after the question: the first was here already, and the second may
#: have been on its way.
REPORTS = 3
#: A worker's logs must become empty this number of times: the first time may have begun before the question, and the second may
#: be in a report that was on its way.
TIMES = 3


class ReadBy(NamedTuple):
    """A partition of a source at one of its readers."""

    worker: int
    source: int
    partition: int


class AllAvailable:
    """One question. Call ``look`` with the controller's state, in its thread, until nothing is left."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._owners: Any = None
        self._ask()

    def _ask(self) -> None:
        """Begin anew: the readers of sources have changed, and the new ones read some rows again, or the plan has changed."""
        self._levels = _levels(self._plan)
        self._newest: dict[int, Any] = {}  # worker -> its newest report
        self._reports: dict[int, int] = {}
        self._before: dict[ReadBy, int] = {}  # pauses before the question
        self._paused: set[SourcePartition] = set()
        self._ended: set[SourcePartition] = set()
        self._round = 0
        self._times: dict[int, int] | None = None

    def look(self, board: Board) -> str:
        """Describe the rest of the wait; empty: it is over."""
        if board.phase == QueryPhase.STARTING:
            return "workers have not joined yet"
        if board.phase != QueryPhase.RUNNING or board.table is None:
            return ""
        if board.table.sources != self._owners or board.plan is not self._plan:
            self._owners, self._plan = board.table.sources, board.plan
            self._ask()
        reports = {node: member.stats for node, member in board.members.workers.items()}
        return self._sources(board, reports) or self._logs(reports)

    # ---- 1. sources

    def _sources(self, board: Board, reports: dict[int, dict[str, Any]]) -> str:
        """Describe the input that is still to be read; empty: nothing."""
        for node, stats in reports.items():
            if stats is not self._newest.get(node):
                self._newest[node] = stats
                self._reports[node] = self._reports.get(node, 0) + 1
                self._heard(node, stats)
        missing = [
            *(
                f"all of {source.name} is read"
                for source in self._plan.sources
                if isinstance(source, DataFrameSourcePlan)
                and not all(edge.id in board.complete for edge in self._plan.edges_of_source(source.id))
            ),
            *(self._unread(source.id) for source in self._plan.sources),
        ]
        missing = [what for what in missing if what]
        if missing:
            return " and ".join(missing)
        partitions = sum(source.worker_partitions for source in self._plan.sources)
        reads_streams = any(
            isinstance(edge, FromMicroBatches) and edge.id not in board.complete for edge in self._plan.edges
        )
        return "the end of the query" if len(self._ended) == partitions and not reads_streams else ""

    def _heard(self, node: int, stats: dict[str, Any]) -> None:
        for source, partition, pauses, ended in stats.get("pauses", ()):
            key = SourcePartition(source, partition)
            if source not in self._plan.sources:
                continue  # it is removed, and this worker does not know yet
            if ended:
                self._ended.add(key)
                self._paused.add(key)
            elif self._reports[node] >= REPORTS and pauses > self._before.setdefault(ReadBy(node, *key), pauses):
                self._paused.add(key)

    def _unread(self, source: int) -> str:
        about = self._plan.sources[source]
        waited = [p for p in range(about.worker_partitions) if SourcePartition(source, p) not in self._paused]
        return f"{about.name} has not paused in {named('partition', waited)}" if waited else ""

    # ---- 2. logs

    def _logs(self, reports: dict[int, dict[str, Any]]) -> str:
        times = {node: int(stats.get("drained", 0)) for node, stats in reports.items()}
        while self._round < self._levels:
            if self._times is None:
                self._times = times
            late = [node for node, before in self._times.items() if node in times and times[node] < before + TIMES]
            if late:
                stages = count(self._levels - self._round, "stage")
                return f"rows have {stages} to pass, in the logs of {named('worker', late)}"
            self._round, self._times = self._round + 1, None
        return ""


def _levels(plan: Plan) -> int:
    """Count the stages on the longest way from a source to a sink: the most logs that a row passes."""
    depth: dict[int, int] = {}
    for stage in plan.stages:  # in topological order
        edges = [plan.edges[edge] for edge in stage.edges_in]
        depth[stage.id] = 1 + max((depth[edge.stage] for edge in edges if isinstance(edge, FromStage)), default=0)
    return max(depth.values(), default=0)
