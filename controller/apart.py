"""How far apart copies of a partition are: in different domains (racks, zones), on different hosts and executors (DESIGN 4).

One rule for all who place copies: of the workers that may hold one, those come first that share least with the other
copies. That is a preference. What may be forbidden, to share an executor, is ``Membership.obstacle``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from flux.plan import Plan
from partitioning.table import ReplicaAt, Table


class Place(NamedTuple):
    """Where a worker is. ``domain``: its label; a host without one is a domain of its own."""

    domain: str
    host: str
    executor: str

    @classmethod
    def of(cls, domain: str, host: str, executor: str) -> Place:
        domain = domain or f"host {host}"
        return cls(domain, f"{domain}, {host}", f"{domain}, {host}, {executor}")  # a part of one thing is in no other


class Shared(IntEnum):
    """What two workers lose together, at most."""

    NOTHING = 0
    DOMAIN = 1
    HOST = 2
    EXECUTOR = 3


#: What the copies of every partition are on, if this is what they share at most.
APART = {
    Shared.NOTHING: "different domains",
    Shared.DOMAIN: "different hosts",
    Shared.HOST: "different executors",
    Shared.EXECUTOR: "different workers",
}


def shared(one: Place, other: Place) -> Shared:
    if one.executor == other.executor:
        return Shared.EXECUTOR
    if one.host == other.host:
        return Shared.HOST
    return Shared.DOMAIN if one.domain == other.domain else Shared.NOTHING


class Spread:
    """The workers of a moment. ``open_to``: those that may be given copies."""

    def __init__(self, places: Mapping[int, Place], open_to: Iterable[int]) -> None:
        self._places = places
        self.open_to = list(open_to)
        found = [places[worker] for worker in self.open_to]
        self._domains, self._hosts, self._executors = (set(names) for names in zip(*found, strict=True)) if found else (
            set(), set(), set(),
        )  # fmt: skip

    @property
    def alike(self) -> bool:
        """Whether any two workers share the same."""
        workers, domains = len(self.open_to), len(self._domains)
        hosts, executors = len(self._hosts), len(self._executors)
        return domains == workers or (domains == 1 and (hosts in (1, workers)) and executors in (1, workers))

    def shared(self, worker: int, others: Iterable[int]) -> Shared:
        """The most that a worker shares with one of the others."""
        place = self._places.get(worker)
        beside = [self._places[other] for other in others if other in self._places]
        if place is None or not beside:
            return Shared.NOTHING
        return max(shared(place, other) for other in beside)

    def least(self, others: Iterable[int]) -> Shared:
        """The least that any worker would share with these."""
        beside = [self._places[other] for other in others if other in self._places]
        if self._domains - {place.domain for place in beside}:
            return Shared.NOTHING
        if self._hosts - {place.host for place in beside}:
            return Shared.DOMAIN
        return Shared.HOST if self._executors - {place.executor for place in beside} else Shared.EXECUTOR

    def too_close(self, replicas: Sequence[ReplicaAt]) -> tuple[int, Shared] | None:
        """The copy that could be farther from the others, a secondary before the primary, and what it would share then.
        None: they are as far apart as they can be."""
        workers = [replica.worker for replica in replicas]
        for worker in reversed(workers):
            others = [other for other in workers if other != worker]
            least = self.least(others)
            if others and least < self.shared(worker, others):
                return worker, least
        return None


def closest(plan: Plan, table: Table, spread: Spread) -> Shared | None:
    """The most that two copies of any partition share; None: nothing has two."""
    found = [
        max(
            spread.shared(replica.worker, [r.worker for r in replicas[:number]])
            for number, replica in enumerate(replicas)
        )
        for stage in plan.stages
        if stage.replicas > 1
        for replicas in table.stages[stage.id]
        if len(replicas) > 1
    ]
    return max(found, default=None)
