"""How much of a worker each replica asks for: what pairing compares (DESIGN 6).

Busy time alone does not tell how badly a worker is overloaded: one thread has one second per second, and what is too
much waits in its queue. So the demand of a replica on a saturated worker is its busy time, times what arrives for it over
what it does apply; and to be rid of the backlog before long it asks its worker for more, but for no more than that again.
Back-pressure ends this state soon: then the queue stands still, the others get less, and busy times alone say it all.

Workers differ in speed. ``pace`` says how much longer one takes for a row than the others; a replica's demand is
multiplied by the ratio of paces when it is thought to be elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from controller.load import Loads

#: A worker that is busy for more than this is saturated. Queues of others wait for somebody else, or for an instant.
SATURATED = 0.8
#: A backlog should be gone in this time. If it were short, a queue at its limit would look like load of its own.
DRAINED_IN_S = 30.0
#: How far growing queues may change a demand: they are counted in slices, which are not all alike.
GROWTH_FACTOR = 0.1, 8.0
#: Paces are guesses from the cost of a row, and keys differ too. So only the part that goes beyond this counts.
PACE_MARGIN = 1.5
PACE_MOST = 16.0
#: A worker with fewer replicas to judge by counts as one of average pace.
PACE_SAMPLES = 3


@dataclass
class Demand:
    """One round, as arrays over the replicas, in the order of the loads. ``worker``: where in ``workers`` it is, -1: none
    of them; ``load``: what the replica asks of this worker, smoothed; ``steady``: the same without its backlog, which is what
    it would ask of another; ``latest``: ``load`` of this round alone. The next round goes on from these, also where they were
    changed meanwhile. ``workers`` (ascending) and ``pace`` are over the workers."""

    workers: np.ndarray
    key: np.ndarray
    worker: np.ndarray
    load: np.ndarray
    steady: np.ndarray
    latest: np.ndarray
    queued: np.ndarray
    pace: np.ndarray

    def per_worker(self, values: np.ndarray) -> np.ndarray:
        known = self.worker >= 0
        return np.bincount(self.worker[known], values[known], len(self.workers))

    def place_of(self, worker: int) -> int:
        return int(np.searchsorted(self.workers, worker))


def replica_key(stage: int, partition: int, worker: int) -> int:
    return stage << 44 | partition << 24 | worker


class Meter:
    """Averages demand over ``smooth_s`` and counts how queues grow from round to round."""

    def __init__(self, smooth_s: float) -> None:
        self._smooth_s = smooth_s
        self._at = -math.inf
        self._last: Demand | None = None

    def look(self, loads: Loads, now: float) -> Demand:
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
        demand = Demand(workers, key, worker, busy, busy, busy, queued, np.ones(len(workers)))
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
        """Which replicas were there in the last round, and where."""
        if self._last is None:
            return np.empty(0, np.int64), np.empty(0, np.int64), None
        order = np.argsort(self._last.key)
        known, places = _found(self._last.key[order], key)
        return known, order[places], self._last


def _found(sorted_: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of those wanted are in an ascending array, and where."""
    places = _positions(sorted_, wanted)
    found = np.flatnonzero(places >= 0)
    return found, places[found]


def _positions(sorted_: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each is in an ascending array, -1: nowhere."""
    if not len(sorted_):
        return np.full(len(wanted), -1)
    places = np.minimum(np.searchsorted(sorted_, wanted), len(sorted_) - 1)
    return np.where(sorted_[places] == wanted, places, -1)


def _paces(group: np.ndarray, demand: Demand, rows: np.ndarray, busy: np.ndarray) -> np.ndarray:
    """Time for a row on each worker against what is usual. Medians all over: one partition with costly keys makes its
    worker no slower."""
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
    """Of each group, and how many there are of it."""
    counts = np.bincount(group, minlength=groups)
    ordered = values[np.lexsort((values, group))]
    starts = np.cumsum(counts) - counts
    last = max(len(values) - 1, 0)
    low, high = starts + np.maximum(counts - 1, 0) // 2, starts + counts // 2
    return (ordered[np.minimum(low, last)] + ordered[np.minimum(high, last)]) / 2, counts
