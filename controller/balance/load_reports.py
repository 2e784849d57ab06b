"""Loads made from the workers' reports: counts since the start become rates (design: load, rates)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from controller.balance.load import LoadTable, WorkerLoad
from controller.replicas.membership import Member, Membership
from controller.replicas.replica_safety import Life
from controller.replicas.table_index import NOBODY, TableIndex, sizes_of
from flux.dataflow.plan import Plan
from partitioning.ids import PartitionKey

#: Rates are averages over at least this time, because busy seconds are counted in whole steps.
INTERVAL_MIN_S = 1.0
#: Columns of a worker's report on a replica (``ReplicaWork``), after its partition and its incarnation. The first
#: three are counts since the replica came to life.
RATED, QUEUED, STATE_BYTES = range(3), 3, 4
#: Rates: busy seconds, rows and slices per second.
BUSY, ROWS, SLICES = range(3)


@dataclass(frozen=True)
class Report:
    """A worker's report on its replicas, which are ordered by partition."""

    #: By the worker's own clock, as the counts are.
    at: float
    #: Seconds for which the worker's thread had nothing to do; None: not reported.
    rested_s: float | None
    cpu_s: float
    rss_bytes: int
    #: The partition of each replica, as a row of ``TableIndex``.
    rows: np.ndarray
    #: The incarnation of each replica.
    incarnations: np.ndarray
    #: Counts by replicas, see ``RATED``.
    counts: np.ndarray
    #: Rates by replicas, since an older report; NaN: not known.
    rates: np.ndarray

    def since(self, older: Report | None) -> np.ndarray:
        """Compute the rates since ``older`` of the replicas in both reports. A worker has at most one replica of a partition."""
        rates = np.full((3, len(self.rows)), np.nan)
        if older is None or self.at <= older.at or not len(older.rows):
            return rates
        at = np.minimum(np.searchsorted(older.rows, self.rows), len(older.rows) - 1)
        both = (older.rows[at] == self.rows) & (older.incarnations[at] == self.incarnations)
        seconds = self.at - older.at
        for which in RATED:
            np.divide(self.counts[which] - older.counts[which][at], seconds, out=rates[which], where=both)
        return rates

    def at_rows(self, rows: np.ndarray) -> Report:
        """Return the report by the rows of another version of the plan, given for each row of this one; -1: it is gone."""
        now = rows[self.rows]
        kept = now != NOBODY
        rates = self.rates[:, kept] if self.rates.size else self.rates
        return replace(
            self, rows=now[kept], incarnations=self.incarnations[kept], counts=self.counts[:, kept], rates=rates
        )


@dataclass(frozen=True)
class ReportPlaces:
    """Places in the table of the replicas of a report."""

    #: The version of the columns to which the places belong.
    version: int
    #: The rows of the report.
    rows: np.ndarray
    #: Indices of the report's replicas that the table has.
    which: np.ndarray
    #: The place of each of them, counted row by row.
    at: np.ndarray


class LoadBook:
    """The newest report of each worker and an older one, which is at least ``INTERVAL_MIN_S`` older once there are two that
    are."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._starts = np.cumsum([0, *sizes_of(plan)])
        self._newest: dict[int, Report] = {}
        self._older: dict[int, Report] = {}
        self._found: dict[int, ReportPlaces] = {}
        #: The highest rates of each partition when they were last known.
        self._last = np.zeros((3, int(self._starts[-1])))

    def follow(self, plan: Plan) -> None:
        """Go by another version of the plan. Reports and rates of stages that stay are kept."""
        before, self.plan = sizes_of(self.plan), plan
        after = sizes_of(plan)
        starts = np.cumsum([0, *after])
        # By row of the plan before: the row now; -1: its stage is gone.
        stages = np.repeat(np.arange(len(before)), before)
        rows = np.arange(len(stages)) - self._starts[stages] + starts[stages]
        rows[after[stages] == 0] = NOBODY
        kept = rows != NOBODY
        last = np.zeros((3, int(starts[-1])))
        last[:, rows[kept]] = self._last[:, kept]
        self._starts, self._last = starts, last
        for reports in (self._newest, self._older):
            for worker, report in reports.items():
                reports[worker] = report.at_rows(rows)
        self._found.clear()

    def take(self, worker: int, stats: Mapping[str, Any]) -> None:
        """Take the load report out of a heartbeat, if it has one."""
        given = stats.get("load")
        if given is None:
            return
        rows, incarnations, counts = self._columns(given["replicas"])
        newest, older = self._newest.get(worker), self._older.get(worker)
        if newest and np.array_equal(newest.rows, rows) and np.array_equal(newest.incarnations, incarnations):
            rows, incarnations = newest.rows, newest.incarnations  # the same objects, so that known places stay valid
        if newest is not None and (older is None or newest.at - older.at >= INTERVAL_MIN_S):
            older = self._older[worker] = newest
        about = (given["at"], given.get("rested_s"), stats.get("cpu_s", 0.0), stats.get("rss_bytes", 0))
        report = Report(*about, rows, incarnations, counts, np.empty(0))
        self._newest[worker] = Report(*about, rows, incarnations, counts, report.since(older))

    def _columns(self, given: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return partitions, incarnations and counts of the reported replicas that the plan has, ordered by partition."""
        said = np.array(given, np.float64).reshape(-1, 8)
        stages, partitions = said[:, 0].astype(np.int64), said[:, 1].astype(np.int64)
        known = stages < len(self._starts) - 1
        said, stages, partitions = said[known], stages[known], partitions[known]
        known = partitions < self._starts[stages + 1] - self._starts[stages]
        rows = self._starts[stages[known]] + partitions[known]
        order = np.argsort(rows, kind="stable")
        said = said[known][order]
        return rows[order], said[:, 2].astype(np.int64), np.ascontiguousarray(said[:, 3:].T)

    def forget(self, worker: int) -> None:
        self._newest.pop(worker, None)
        self._older.pop(worker, None)
        self._found.pop(worker, None)

    # ---- loads

    def make(
        self,
        columns: TableIndex,
        members: Membership,
        unsafe: Iterable[Life],
        low: Mapping[int, Sequence[int]],
        busy_with: Iterable[PartitionKey],
    ) -> LoadTable:
        """Make the loads of all replicas in the table of ``columns``.

        ``unsafe`` are replicas that have not arrived; ``low`` has, by id of each stage, the partitions with too few replicas;
        ``busy_with`` are partitions with additions, or with moves that have not begun or not ended."""
        assert columns.table is not None
        there = columns.table.endpoints
        workers = {node: self._worker(member) for node, member in members.workers.items() if node in there}
        queued, state_bytes, rates = self._spread(columns)
        known = ~np.isnan(rates[BUSY])
        self._note_last(rates, known)
        # A new replica has no rates yet. Its rates are taken to be those of its busiest peer, now or when they were last known.
        idle, new = ~columns.applies, ~known
        for which in range(3):
            np.copyto(rates[which], self._last[which][:, None], where=new)
            np.copyto(rates[which], 0.0, where=idle)
        largest = functools.reduce(np.maximum, state_bytes.T)
        np.copyto(state_bytes, largest[:, None], where=state_bytes == 0)
        np.copyto(state_bytes, 0, where=idle)
        seconds = [self._seconds(worker) for worker in workers]
        return LoadTable(
            columns,
            workers,
            min(seconds, default=0.0),
            busy=np.round(rates[BUSY], 6),
            rows_per_s=np.round(rates[ROWS], 3),
            slices_per_s=np.round(rates[SLICES], 3),
            queued=queued,
            state_bytes=state_bytes,
            movable=self._movable(columns, unsafe, low, busy_with),
        )

    def _spread(self, columns: TableIndex) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return queues, bytes of state (0: not known) and rates (NaN: not known), of partitions by places."""
        shape = columns.workers.shape
        queued, state_bytes, rates = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full((3, *shape), np.nan)
        places = [array.reshape(-1) for array in (queued, state_bytes, *rates)]
        for worker, report in self._newest.items():
            found = self._find(worker, report, columns)
            said = (report.counts[QUEUED], report.counts[STATE_BYTES], *report.rates)
            for of_places, of_report in zip(places, said, strict=True):
                of_places[found.at] = of_report[found.which]
        return queued, state_bytes, rates

    def _find(self, worker: int, report: Report, columns: TableIndex) -> ReportPlaces:
        known = self._found.get(worker)
        if known is None or known.version != columns.version or known.rows is not report.rows:
            holds = (columns.workers[report.rows] == worker) & (
                columns.incarnations[report.rows] == report.incarnations[:, None]
            )
            which, place = np.nonzero(holds)
            at = report.rows[which] * holds.shape[1] + place
            known = self._found[worker] = ReportPlaces(columns.version, report.rows, which, at)
        return known

    def _note_last(self, rates: np.ndarray, known: np.ndarray) -> None:
        """Note the rates of the busiest replica of each partition."""
        best = np.full(len(known), -np.inf)
        for place in range(known.shape[1]):
            busy = rates[BUSY, :, place]
            better = known[:, place] & (busy > best)
            np.copyto(best, busy, where=better)
            for last, of_place in zip(self._last, rates[:, :, place], strict=True):
                np.copyto(last, of_place, where=better)

    @staticmethod
    def _movable(
        columns: TableIndex,
        unsafe: Iterable[Life],
        low: Mapping[int, Sequence[int]],
        busy_with: Iterable[PartitionKey],
    ) -> np.ndarray:
        arrived = columns.without(columns.live, unsafe) | ~columns.listed
        movable: np.ndarray = functools.reduce(np.logical_and, arrived.T)
        for stage, partitions in low.items():
            movable[columns.starts[stage] + np.array(partitions, np.int64)] = False
        movable[[columns.row(key) for key in busy_with]] = False
        return movable

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
