"""Demand: the share of its worker's time that a replica needs. The policy ``pairing`` compares demands (design:
saturation, pace).

Busy time alone does not show how badly a worker is overloaded: its thread has one second per second, and the excess
waits in its queues. So on a saturated worker the demand of a replica is its busy time, multiplied by slices arriving
over slices applied. A backlog adds the busy time at most once more, so that it is worked off before long. Back-pressure
soon ends such a state: then the queue no longer grows, the other replicas get less, and busy times alone show the
demand.

Workers differ in speed. ``pace`` is the time that a worker takes for a row over the time that others take. To judge a
replica on another worker, its demand is multiplied by the ratio of the paces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from controller.balance.load import Loads

#: A worker is saturated if it is busy for more than this share of the time. On other workers, queues wait for another
#: worker, or only for a moment.
SATURATED = 0.8
#: A backlog should be worked off in this time. With a short time, a queue at its limit would look like additional load.
DRAINED_IN_S = 30.0
#: Growing queues change a demand by no more than these factors, because they are counted in slices, and slices differ.
GROWTH_FACTOR = 0.1, 8.0
#: Paces are estimates from the cost of a row, which differs with the keys too. So only the part beyond this factor
#: counts.
PACE_MARGIN = 1.5
PACE_MOST = 16.0
#: A worker with fewer replicas than this to judge by counts as a worker of average pace.
PACE_SAMPLES = 3


@dataclass
class Demand:
    """The demands of one round, as arrays over the replicas in the order of the loads, or over the workers.

    The next round smooths from these values, including the changes that a policy makes to them."""

    #: Worker ids, ascending.
    workers: np.ndarray
    #: ``replica_key`` of each replica.
    key: np.ndarray
    #: Index of the replica's worker in ``workers``; -1: not there.
    worker: np.ndarray
    #: Demand on this worker, smoothed.
    load: np.ndarray
    #: Demand without the backlog, smoothed: the demand on another worker.
    steady: np.ndarray
    #: ``load`` of this round alone.
    latest: np.ndarray
    queued: np.ndarray
    #: By worker.
    pace: np.ndarray

    def per_worker(self, values: np.ndarray) -> np.ndarray:
        known = self.worker >= 0
        return np.bincount(self.worker[known], values[known], len(self.workers))

    def place_of(self, worker: int) -> int:
        return int(np.searchsorted(self.workers, worker))


def replica_key(stage: int, partition: int, worker: int) -> int:
    return stage << 44 | partition << 24 | worker


class DemandMeter:
    """Averages demand over ``smooth_s`` and counts how queues grow from round to round."""

    def __init__(self, smooth_s: float) -> None:
        self._smooth_s = smooth_s
        self._at = -math.inf
        self._last: Demand | None = None

    def look(self, loads: Loads, now: float) -> Demand:
        """Return the demands of this round. In this order: demands from busy times and queues, paces from these demands, and both
        smoothed with the last round. The next round smooths from the result."""
        replicas = loads.replicas
        count = len(replicas)
        keys = (replica_key(replica.stage, replica.partition, replica.worker) for replica in replicas)
        key = np.fromiter(keys, np.int64, count)
        busy = np.fromiter((replica.busy for replica in replicas), np.float64, count)
        queued = np.fromiter((replica.queued for replica in replicas), np.float64, count)
        applied = np.fromiter((replica.slices_per_s for replica in replicas), np.float64, count)
        rows = np.fromiter((replica.rows_per_s for replica in replicas), np.float64, count)
        primary = np.fromiter((replica.primary for replica in replicas), np.int64, count)

        workers = np.array(sorted(loads.workers), np.int64)
        worker = _positions(workers, key & 0xFFFFFF)
        demand = Demand(
            workers=workers, key=key, worker=worker, load=busy, steady=busy, latest=busy, queued=queued,
            pace=np.ones(len(workers)),
        )  # fmt: skip
        whole = (max(loads.workers[number].busy, loads.workers[number].cpu) for number in workers.tolist())
        spent = np.maximum(demand.per_worker(busy), np.fromiter(whole, np.float64, len(workers)))
        saturated = spent >= SATURATED

        elapsed = now - self._at
        known, before, last = self._before(key)
        growth = np.zeros(count)
        if elapsed > 0 and last is not None:
            growth[known] = (queued[known] - last.queued[before]) / elapsed
        counts = (applied > 0) & (worker >= 0) & saturated[worker]
        arriving = np.divide(applied + growth, applied, out=np.ones(count), where=counts)
        backlog = np.divide(queued / DRAINED_IN_S, applied, out=np.zeros(count), where=counts)
        demand.steady = busy * np.clip(arriving, *GROWTH_FACTOR)
        demand.latest = demand.steady + busy * np.minimum(backlog, 1.0)
        demand.load = demand.latest.copy()
        # A stage's primaries do more for a row than its secondaries.
        demand.pace = _paces(key >> 44 << 1 | primary, demand, rows, busy)
        if last is not None:
            weight = -math.expm1(-elapsed / self._smooth_s) if self._smooth_s > 0 else 1.0
            for now_, then in ((demand.load, last.load), (demand.steady, last.steady)):
                now_[known] = then[before] + weight * (now_[known] - then[before])
            both, there = _found(last.workers, workers)
            demand.pace[both] = last.pace[there] + weight * (demand.pace[both] - last.pace[there])
        self._at, self._last = now, demand
        return demand

    def _before(self, key: np.ndarray) -> tuple[np.ndarray, np.ndarray, Demand | None]:
        """Find the replicas that the last round had, too. Return their indices now, their indices then, and that round."""
        if self._last is None:
            return np.empty(0, np.int64), np.empty(0, np.int64), None
        by_key = np.argsort(self._last.key)
        known, places = _found(self._last.key[by_key], key)
        return known, by_key[places], self._last


def _found(sorted_: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the wanted values that an ascending array has, and the indices of these values in that array."""
    places = _positions(sorted_, wanted)
    found = np.flatnonzero(places >= 0)
    return found, places[found]


def _positions(sorted_: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of each wanted value in an ascending array; -1: not there."""
    if not len(sorted_):
        return np.full(len(wanted), -1)
    places = np.minimum(np.searchsorted(sorted_, wanted), len(sorted_) - 1)
    return np.where(sorted_[places] == wanted, places, -1)


def _paces(group: np.ndarray, demand: Demand, rows: np.ndarray, busy: np.ndarray) -> np.ndarray:
    """Compute the time per row on each worker over the usual time. All averages are medians, so that one partition with costly
    keys does not make its worker look slow."""
    usable = (rows > 0) & (busy > 0) & (demand.worker >= 0)
    if not usable.any():
        return np.ones(len(demand.workers))
    cost = busy[usable] / rows[usable]
    _, group = np.unique(group[usable], return_inverse=True)
    ratio = cost / _medians(group, cost)[0][group]
    worker = demand.worker[usable]
    median, samples = _medians(worker, ratio, len(demand.workers))
    judged = samples >= PACE_SAMPLES
    if not judged.any():
        return np.ones(len(demand.workers))
    pace = np.where(judged, median / np.median(median[judged]), 1.0)
    pace = np.where(pace > 1, np.maximum(pace / PACE_MARGIN, 1.0), np.minimum(pace * PACE_MARGIN, 1.0))
    return np.clip(pace, 1 / PACE_MOST, PACE_MOST)


def _medians(group: np.ndarray, values: np.ndarray, groups: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the median of each group, and its number of values."""
    counts = np.bincount(group, minlength=groups)
    ordered = values[np.lexsort((values, group))]
    starts = np.cumsum(counts) - counts
    last = max(len(values) - 1, 0)
    low, high = starts + np.maximum(counts - 1, 0) // 2, starts + counts // 2
    return (ordered[np.minimum(low, last)] + ordered[np.minimum(high, last)]) / 2, counts
