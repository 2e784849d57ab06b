"""Distance between the replicas of a partition: different domains (racks, zones), different hosts and executors
(design: apart).

One rule for all placements: of the workers that may hold a replica, the first choice is the one that shares least with the
other replicas. This is a preference. Only sharing an executor can be forbidden, by ``Placement.obstacle``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from controller.replicas.table_index import NOBODY, TableIndex
from flux.dataflow.plan import Plan
from flux.replica.kinds import replicated


class WorkerPlace(NamedTuple):
    """The place of a worker: its domain, host and executor. A host without a domain's label is a domain of its own."""

    domain: str
    host: str
    executor: str

    @classmethod
    def of(cls, domain: str, host: str, executor: str) -> WorkerPlace:
        domain = domain or f"host {host}"
        # Names are qualified, because hosts in two domains may have equal names, and so may executors on two hosts.
        return cls(domain, f"{domain}, {host}", f"{domain}, {host}, {executor}")


class Shared(IntEnum):
    """The largest unit that two workers share, and lose together."""

    NOTHING = 0
    DOMAIN = 1
    HOST = 2
    EXECUTOR = 3


#: The places of the replicas of every partition, by the most that two of them share.
APART = {
    Shared.NOTHING: "different domains",
    Shared.DOMAIN: "different hosts",
    Shared.HOST: "different executors",
    Shared.EXECUTOR: "different workers",
}


def shared(one: WorkerPlace, other: WorkerPlace) -> Shared:
    if one.executor == other.executor:
        return Shared.EXECUTOR
    if one.host == other.host:
        return Shared.HOST
    return Shared.DOMAIN if one.domain == other.domain else Shared.NOTHING


class Spread:
    """The workers of a moment and their places. ``open_to`` are workers that may be given replicas."""

    def __init__(self, places: Mapping[int, WorkerPlace], open_to: Iterable[int]) -> None:
        self._places = places
        self.open_to = list(open_to)
        found = [places[worker] for worker in self.open_to]
        self._domains, self._hosts, self._executors = (set(names) for names in zip(*found, strict=True)) if found else (
            set(), set(), set(),
        )  # fmt: skip

    @property
    def alike(self) -> bool:
        """All pairs of workers share the same unit."""
        workers, domains = len(self.open_to), len(self._domains)
        hosts, executors = len(self._hosts), len(self._executors)
        return domains == workers or (domains == 1 and (hosts in (1, workers)) and executors in (1, workers))

    def shared(self, worker: int, others: Iterable[int]) -> Shared:
        """Return the most that a worker shares with one of the others."""
        place = self._places.get(worker)
        beside = [self._places[other] for other in others if other in self._places]
        if place is None or not beside:
            return Shared.NOTHING
        return max(shared(place, other) for other in beside)

    def least(self, others: Iterable[int]) -> Shared:
        """Return the least that the best worker would share with these."""
        beside = [self._places[other] for other in others if other in self._places]
        if _has_others(self._domains, {place.domain for place in beside}):
            return Shared.NOTHING
        if _has_others(self._hosts, {place.host for place in beside}):
            return Shared.DOMAIN
        others_left = _has_others(self._executors, {place.executor for place in beside})
        return Shared.HOST if others_left else Shared.EXECUTOR


def _has_others(names: AbstractSet[str], known: AbstractSet[str]) -> bool:
    """Tell whether there are names beside the known ones. A difference of sets would copy all names, for every partition."""
    return any(name not in known for name in names)


def closest(plan: Plan, columns: TableIndex, places: Mapping[int, WorkerPlace]) -> Shared | None:
    """Return the most that two replicas of any partition share; None: no partition has two."""
    wanted = np.repeat(np.array([replicated(stage) for stage in plan.stages], bool), columns.sizes[columns.stages])
    workers = columns.workers[wanted & (columns.count(columns.listed) > 1)]
    if not len(workers):
        return None
    size = int(workers.max()) + 1
    for level, names in (
        (Shared.EXECUTOR, {worker: place.executor for worker, place in places.items()}),
        (Shared.HOST, {worker: place.host for worker, place in places.items()}),
        (Shared.DOMAIN, {worker: place.domain for worker, place in places.items()}),
    ):
        if _shared_by_any(workers, names, size):
            return level
    return Shared.NOTHING


def _shared_by_any(workers: np.ndarray, names: Mapping[int, str], size: int) -> bool:
    """Tell whether two workers of one row have the same name. Workers without a name share nothing."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
    of_worker = np.full(size + 1, NOBODY)  # the last one is for places without a worker, which have -1
    for worker, name in names.items():
        if worker < size:
            of_worker[worker] = numbers[name]
    found = of_worker[workers]
    places = range(found.shape[1])
    return any(
        bool(((found[:, one] == found[:, other]) & (found[:, one] != NOBODY)).any())
        for one in places
        for other in range(one)
    )
