"""From the workers' reports of load to what policies look at: counts since the start become rates (DESIGN 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from controller.load import Loads, ReplicaLoad, WorkerLoad
from controller.membership import Member, Membership
from controller.sweep import Addition
from flux.plan import Plan
from partitioning.table import ReplicaAt, Table

#: Rates are averages over at least so long: busy seconds are counted in whole steps.
INTERVAL_MIN_S = 1.0

#: stage, partition, incarnation of a replica
_Life = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Counts:
    """What a replica has done since it came to life, and what waits for it."""

    busy_s: float
    rows: int
    slices: int
    queued: int
    state_bytes: int


@dataclass(frozen=True)
class Report:
    """``at``: by the worker's own clock, which the counts go by. ``rested_s``: its thread waited for something to do."""

    at: float
    rested_s: float | None
    cpu_s: float
    rss_bytes: int
    replicas: dict[_Life, Counts]


class LoadBook:
    """The newest report of each worker and an older one, at least ``INTERVAL_MIN_S`` apart where there is one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._newest: dict[int, Report] = {}
        self._older: dict[int, Report] = {}
        self._last: dict[tuple[int, int], tuple[float, float, float]] = {}  # partition -> rates of its last known copy

    def take(self, worker: int, stats: Mapping[str, Any]) -> None:
        """From a heartbeat; not every one has a report of load."""
        given = stats.get("load")
        if given is None:
            return
        replicas = {
            (stage, partition, incarnation): Counts(*counts)
            for stage, partition, incarnation, *counts in given["replicas"]
        }
        report = Report(
            given["at"], given.get("rested_s"), stats.get("cpu_s", 0.0), stats.get("rss_bytes", 0), replicas
        )
        newest = self._newest.get(worker)
        older = self._older.get(worker)
        if newest is not None and (older is None or newest.at - older.at >= INTERVAL_MIN_S):
            self._older[worker] = newest
        self._newest[worker] = report

    def forget(self, worker: int) -> None:
        self._newest.pop(worker, None)
        self._older.pop(worker, None)

    # ---- loads

    def make(
        self,
        table: Table,
        members: Membership,
        is_safe: Callable[[int, int, ReplicaAt], bool],
        additions: Mapping[tuple[int, int], Addition],
        asked_for: set[tuple[int, int]],
    ) -> Loads:
        """``asked_for``: partitions with moves that have not begun or not ended."""
        workers = {node: self._worker(member) for node, member in members.workers.items() if node in table.endpoints}
        replicas = []
        for stage in self.plan.stages:
            for partition, listed in enumerate(table.stages[stage.id]):
                key = stage.id, partition
                free = key not in additions and key not in asked_for
                movable = free and len(listed) >= stage.replicas and all(is_safe(*key, replica) for replica in listed)
                replicas += self._replicas(key, listed, movable)
        seconds = [self._seconds(worker) for worker in workers]
        return Loads(workers, replicas, min(seconds, default=0.0))

    def _seconds(self, worker: int) -> float:
        newest, older = self._newest.get(worker), self._older.get(worker)
        return 0.0 if newest is None or older is None else max(newest.at - older.at, 0.0)

    def _worker(self, member: Member) -> WorkerLoad:
        newest, older = self._newest.get(member.node), self._older.get(member.node)
        seconds = self._seconds(member.node)
        cpu = busy = 0.0
        if newest and older and seconds:
            cpu = (newest.cpu_s - older.cpu_s) / seconds
            if newest.rested_s is not None and older.rested_s is not None:
                busy = max(1.0 - (newest.rested_s - older.rested_s) / seconds, 0.0)
        rss = newest.rss_bytes if newest else 0
        about = member.about
        return WorkerLoad(
            member.node, about.executor, round(cpu, 6), rss, member.leaving, round(busy, 6), about.host, about.domain
        )  # fmt: skip

    def _replicas(self, key: tuple[int, int], listed: tuple[ReplicaAt, ...], movable: bool) -> list[ReplicaLoad]:
        known = {replica.worker: self._rates(key, replica) for replica in listed}
        rates = [each for each in known.values() if each is not None]
        if rates:
            self._last[key] = max(rates)
        # A copy that has just come has done nothing yet, and will do as much as the others, or as the one before it.
        guess = self._last.get(key, (0.0, 0.0, 0.0))
        sizes = [self._counts(key, replica) for replica in listed]
        size_guess = max((counts.state_bytes for counts in sizes if counts is not None), default=0)
        made = []
        for number, (replica, counts) in enumerate(zip(listed, sizes, strict=True)):
            busy, rows, slices = known[replica.worker] or guess
            made.append(
                ReplicaLoad(
                    *key,
                    replica.worker,
                    primary=number == 0,
                    busy=round(busy, 6),
                    queued=counts.queued if counts else 0,
                    state_bytes=(counts.state_bytes if counts else 0) or size_guess,
                    rows_per_s=round(rows, 3),
                    movable=movable,
                    slices_per_s=round(slices, 3),
                )  # fmt: skip
            )
        return made

    def _counts(self, key: tuple[int, int], replica: ReplicaAt) -> Counts | None:
        report = self._newest.get(replica.worker)
        return None if report is None else report.replicas.get((*key, replica.incarnation))

    def _rates(self, key: tuple[int, int], replica: ReplicaAt) -> tuple[float, float, float] | None:
        """Busy seconds, rows and slices per second; None: this life of the replica has not been seen twice."""
        newest, older = self._newest.get(replica.worker), self._older.get(replica.worker)
        if newest is None or older is None or newest.at <= older.at:
            return None
        life = (*key, replica.incarnation)
        now, then = newest.replicas.get(life), older.replicas.get(life)
        if now is None or then is None:
            return None
        seconds = newest.at - older.at
        return (
            (now.busy_s - then.busy_s) / seconds,
            (now.rows - then.rows) / seconds,
            (now.slices - then.slices) / seconds,
        )
