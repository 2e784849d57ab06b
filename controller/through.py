"""Whether all rows that the sources had to give are through: what ``query.processAllAvailable()`` waits for (DESIGN 3).

1. Every source has nothing more just now: a DataFrame is read to its end, a source in the workers has said so (``yield
   None``) or has ended. It must have said so after the question: pauses are counted from a report that was made after it.
2. What is in any log now leaves it, and with that is in the logs of the next stage at the latest. As often as there are
   stages one behind the other, and it has left the last one.

Rows that come meanwhile do not hold this up. Where all sources have ended, the end of the query is what is waited for.
"""

from __future__ import annotations

from typing import Any

from controller.publishing import Publishing
from controller.wording import count, named
from flux.plan import Plan

#: Reports of a worker until one was certainly made after the question: there is one, and the next may have been on its way.
REPORTS = 3
#: So often must a worker's logs be emptied: the first time may have begun, and another report been on its way.
TIMES = 3

Pauses = dict[tuple[int, int, int], int]  # worker, source, partition -> how often it had nothing


class Through:
    """One question. ``look`` at the controller's state, in its thread, again and again until nothing is left."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._levels = _levels(plan)
        self._owners: Any = None
        self._ask()

    def _ask(self) -> None:
        """Begin anew: another worker reads a source now, and makes again what was not through."""
        self._newest: dict[int, Any] = {}  # worker -> its newest report
        self._reports: dict[int, int] = {}
        self._before: Pauses = {}
        self._paused: set[tuple[int, int]] = set()
        self._ended: set[tuple[int, int]] = set()
        self._round = 0
        self._times: dict[int, int] | None = None

    def look(self, core: Publishing) -> str:
        """What is still to come, empty if nothing is."""
        if core.phase == "starting":
            return "workers have not joined yet"
        if core.phase != "running" or core.table is None:
            return ""
        if core.table.sources != self._owners:
            self._owners = core.table.sources
            self._ask()
        reports = {node: member.stats for node, member in core.members.workers.items()}
        return self._sources(core, reports) or self._logs(reports)

    # ---- 1. sources

    def _sources(self, core: Publishing, reports: dict[int, dict[str, Any]]) -> str:
        for node, stats in reports.items():
            if stats is not self._newest.get(node):
                self._newest[node] = stats
                self._reports[node] = self._reports.get(node, 0) + 1
                self._heard(node, stats)
        missing = [
            *(
                f"all of {source.name} is read"
                for source in self._plan.sources
                if source.partitions is None
                and not all(edge.id in core.complete for edge in self._plan.edges_of_source(source.id))
            ),
            *(self._unread(source.id) for source in self._plan.sources),
        ]
        missing = [what for what in missing if what]
        if missing:
            return " and ".join(missing)
        every = sum(source.partitions or 0 for source in self._plan.sources)
        return "the end of the query" if len(self._ended) == every else ""

    def _heard(self, node: int, stats: dict[str, Any]) -> None:
        for source, partition, pauses, ended in stats.get("pauses", ()):
            if ended:
                self._ended.add((source, partition))
                self._paused.add((source, partition))
            elif self._reports[node] >= REPORTS and pauses > self._before.setdefault((node, source, partition), pauses):
                self._paused.add((source, partition))

    def _unread(self, source: int) -> str:
        about = self._plan.sources[source]
        waited = [p for p in range(about.partitions or 0) if (source, p) not in self._paused]
        return f"{about.name} has nothing more just now in {named('partition', waited)}" if waited else ""

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
    """Stages on the longest way from a source to a sink, which is how many logs a row goes through."""
    depth: dict[int, int] = {}
    for stage in plan.stages:  # in topological order
        above = [plan.edges[edge].stage for edge in stage.edges_in]
        depth[stage.id] = 1 + max((depth[one] for one in above if one is not None), default=0)
    return max(depth.values(), default=0)
