"""Makes the loads that policies read from the workers' reports: counts since the start become rates (design: load,
rates)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from controller.balance.load import Loads, ReplicaLoad, WorkerLoad
from controller.replicas.kinds import incomplete
from controller.replicas.membership import Member, Membership
from controller.replicas.next_additions import Addition
from flux.dataflow.plan import Plan
from flux.replicas.kinds import kind_of
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table

#: Rates are averages over at least this time, because busy seconds are counted in whole steps.
INTERVAL_MIN_S = 1.0


class Rates(NamedTuple):
    """Busy seconds, rows and slices per second."""

    busy: float = 0.0
    rows: float = 0.0
    slices: float = 0.0


#: Of a replica that applies nothing, or of which nothing is known.
IDLE = Rates()


class Counts(NamedTuple):
    """The work of a replica since it came to life, and the slices that wait for it."""

    incarnation: int
    busy_s: float
    rows: int
    slices: int
    queued: int
    state_bytes: int


@dataclass(frozen=True)
class Report:
    """``at``: time by the worker's own clock, as for the counts. ``rested_s``: seconds in which its thread had nothing
    to do."""

    at: float
    rested_s: float | None
    cpu_s: float
    rss_bytes: int
    replicas: dict[PartitionKey, Counts]  # a worker has one replica of a partition at most

    def of(self, key: PartitionKey, incarnation: int) -> Counts | None:
        counts = self.replicas.get(key)
        return counts if counts is not None and counts.incarnation == incarnation else None


class LoadBook:
    """The newest report of each worker and an older one, at least ``INTERVAL_MIN_S`` apart where there is one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._newest: dict[int, Report] = {}
        self._older: dict[int, Report] = {}
        self._last: dict[PartitionKey, Rates] = {}  # partition -> rates of its last known replica

    def take(self, worker: int, stats: Mapping[str, Any]) -> None:
        """From a heartbeat; not every one has a report of load."""
        given = stats.get("load")
        if given is None:
            return
        replicas = {PartitionKey(stage, partition): Counts(*counts) for stage, partition, *counts in given["replicas"]}
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
        has_arrived: Callable[[int, int, ReplicaAt], bool],
        additions: Mapping[PartitionKey, Addition],
        asked_for: set[PartitionKey],
    ) -> Loads:
        """``asked_for``: partitions with moves that have not begun or not ended."""
        workers = {node: self._worker(member) for node, member in members.workers.items() if node in table.endpoints}
        replicas = []
        for stage in self.plan.stages:
            rows = table.stages[stage.id]
            low = set(incomplete(stage, rows))
            for partition, listed in enumerate(rows):
                key = PartitionKey(stage.id, partition)
                free = key not in additions and key not in asked_for and partition not in low
                movable = free and all(has_arrived(*key, replica) for replica in listed)
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

    def _replicas(self, key: PartitionKey, listed: tuple[ReplicaAt, ...], movable: bool) -> list[ReplicaLoad]:
        found = [self._counts(key, replica) for replica in listed]
        known = [self._rates(key, replica, counts) for replica, counts in zip(listed, found, strict=True)]
        rates = [each for each in known if each is not None]
        if rates:
            self._last[key] = max(rates)
        # A new replica has no rates yet. It is taken to do as much as the others, or as the last one of its partition.
        guess = self._last.get(key, IDLE)
        size_guess = max((counts.state_bytes for counts in found if counts is not None), default=0)
        made = []
        for number, (replica, counts, own) in enumerate(zip(listed, found, known, strict=True)):
            idle = not kind_of(replica).applies
            busy, rows, slices = IDLE if idle else own or guess
            made.append(
                ReplicaLoad(
                    *key,
                    replica.worker,
                    primary=number == 0,
                    busy=round(busy, 6),
                    queued=counts.queued if counts else 0,
                    state_bytes=0 if idle else (counts.state_bytes if counts else 0) or size_guess,
                    rows_per_s=round(rows, 3),
                    movable=movable,
                    slices_per_s=round(slices, 3),
                )  # fmt: skip
            )
        return made

    def _counts(self, key: PartitionKey, replica: ReplicaAt) -> Counts | None:
        report = self._newest.get(replica.worker)
        return None if report is None else report.of(key, replica.incarnation)

    def _rates(self, key: PartitionKey, replica: ReplicaAt, now: Counts | None) -> Rates | None:
        """None: this life of the replica is not in two reports yet."""
        newest, older = self._newest.get(replica.worker), self._older.get(replica.worker)
        if now is None or newest is None or older is None or newest.at <= older.at:
            return None
        then = older.of(key, replica.incarnation)
        if then is None:
            return None
        seconds = newest.at - older.at
        return Rates(
            (now.busy_s - then.busy_s) / seconds,
            (now.rows - then.rows) / seconds,
            (now.slices - then.slices) / seconds,
        )
