"""The sweep: carries out additions of replicas stage by stage in topological order, a few partitions at a time (DESIGN 5).

An addition goes retain -> copy -> live -> safe, each step entered when the one before is confirmed. Every order is safe
to repeat. What a loss made impossible is dropped, and the next look at the table plans it anew. The first half of a
move is an addition like any other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from controller.apart import Shared, Spread
from flux.plan import Plan
from partitioning.table import ReplicaAt, Table

Replicas = tuple[ReplicaAt, ...]
Rows = tuple[Replicas, ...]
MayHold = Callable[[int, Replicas], bool]


@dataclass
class Addition:
    """One AddReplica under way. ``phase``: "retain" until all go by the table that introduced it, which gave it its
    ``incarnation``; "copy" until it follows the order; "live" until it is safe; ``since``: when the phase began.
    ``ask_at``: when the copy is ordered (again), ``patience_s`` after that; ``asked``: how often it has been.
    ``source``: of a move, the worker whose copy this one replaces; None: a repair."""

    stage: int
    partition: int
    worker: int
    incarnation: int
    started: float
    patience_s: float
    phase: str = "retain"
    ask_at: float = -1.0
    why: str = "too few replicas"
    stall_ms: float = 0.0
    source: int | None = None
    since: float = 0.0
    asked: int = 0
    bytes: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.stage, self.partition

    def enter(self, phase: str, now: float) -> None:
        self.phase, self.since = phase, now


@dataclass(frozen=True)
class Wanted:
    """An addition to begin. ``source``: as in Addition."""

    stage: int
    partition: int
    worker: int
    source: int | None = None
    why: str = "too few replicas"


class Census:
    """How many replicas workers hold, and which partitions have too few: counted for a whole table once, and then only
    for the stages that differ from the table before. With many partitions the sweep looks far more often than that."""

    def __init__(self, plan: Plan) -> None:
        self._wanted = [stage.replicas for stage in plan.stages]
        self._counted: list[Rows] = [()] * len(plan.stages)
        self._low: list[list[int]] = [[] for _ in plan.stages]
        self._held: list[dict[int, int]] = [{} for _ in plan.stages]
        self._total: Counter[int] = Counter()

    def look(self, table: Table) -> None:
        for stage, rows in enumerate(table.stages):
            if rows is not self._counted[stage]:
                self._counted[stage] = rows
                self._low[stage] = [p for p, replicas in enumerate(rows) if len(replicas) < self._wanted[stage]]
                held = Counter([replica.worker for replicas in rows for replica in replicas])
                self._total.subtract(self._held[stage])
                self._total.update(held)
                self._held[stage] = held

    def low(self) -> Iterator[tuple[int, int]]:
        """Partitions with fewer replicas than their stage asks for, in topological order."""
        return ((stage, partition) for stage, partitions in enumerate(self._low) for partition in partitions)

    def held(self) -> dict[int, int]:
        """Replicas on each worker that has any."""
        return {worker: count for worker, count in self._total.items() if count}


def under_replicated(plan: Plan, table: Table) -> list[tuple[int, int]]:
    """Partitions with fewer replicas than their stage asks for, in topological order."""
    return [
        (stage.id, partition)
        for stage in plan.stages
        for partition, replicas in enumerate(table.stages[stage.id])
        if len(replicas) < stage.replicas
    ]


def next_additions(
    plan: Plan,
    table: Table,
    under_way: Iterable[Addition],
    at_once: int,
    may_hold: MayHold,
    census: Census | None = None,
    resting: AbstractSet[tuple[int, int]] = frozenset(),
    spread: Spread | None = None,
) -> list[Wanted]:
    """What to begin now. Stages are taken in order: none begins while another has something under way.
    ``may_hold(worker, replicas)``: whether the worker may hold another copy beside those. ``census``: one that is kept
    from call to call saves counting. ``resting``: partitions that are passed over for now. ``spread``: how far apart the
    workers are; None: all alike."""
    busy = list(under_way)
    if len(busy) >= at_once:
        return []
    stage = min((addition.stage for addition in busy), default=None)
    wanted: list[Wanted] = []
    for each in _additions(plan, table, busy, may_hold, census or Census(plan), stage, resting, spread):
        # One that no worker can hold is passed over, and so is its stage if it has nothing else.
        if wanted and each.stage != wanted[0].stage:
            break
        wanted.append(each)
        if len(busy) + len(wanted) >= at_once:
            break
    return wanted


def all_additions(plan: Plan, table: Table, may_hold: MayHold) -> list[Wanted]:
    """All that the sweep will do, in order, if nothing else happens meanwhile."""
    return list(_additions(plan, table, [], may_hold, Census(plan), None, frozenset()))


def _additions(
    plan: Plan,
    table: Table,
    busy: list[Addition],
    may_hold: MayHold,
    census: Census,
    stage: int | None,
    resting: AbstractSet[tuple[int, int]],
    spread: Spread | None = None,
) -> Iterator[Wanted]:
    """One after the other, each on the worker that then has the fewest replicas of those that may hold it, and share least
    with the others that do. ``stage``: what comes before it is not begun, nor what comes after."""
    census.look(table)
    held = census.held()
    emptiest = [(held.get(worker, 0), worker) for worker in {**table.endpoints, **held}]
    heapq.heapify(emptiest)
    taken = {(addition.stage, addition.partition) for addition in busy} | resting
    hopeless: set[tuple[int, ...]] = set()
    for at, partition in census.low():
        if stage is not None and at != stage:
            return
        if (at, partition) in taken:
            continue
        replicas = table.stages[at][partition]
        holders = tuple(replica.worker for replica in replicas)
        if holders in hopeless:
            continue  # nobody could stand beside these: there are few workers, and many partitions like this one
        worker = _emptiest(emptiest, replicas, may_hold, spread)
        if worker is None:
            hopeless.add(holders)
        else:
            yield Wanted(at, partition, worker)


def _emptiest(
    emptiest: list[tuple[int, int]], replicas: Replicas, may_hold: MayHold, spread: Spread | None
) -> int | None:
    """The worker nearest to the top of the heap of those that may hold it and share least with its other replicas; there
    it then counts one more."""
    others = [replica.worker for replica in replicas]
    least = spread.least(others) if spread else Shared.NOTHING
    seen: list[tuple[int, int]] = []
    chosen: int | None = None  # its place among those seen
    best = Shared.EXECUTOR
    while emptiest and (chosen is None or best > least):
        seen.append(heapq.heappop(emptiest))
        worker = seen[-1][1]
        if may_hold(worker, replicas):
            shares = spread.shared(worker, others) if spread else Shared.NOTHING
            if chosen is None or shares < best:
                chosen, best = len(seen) - 1, shares
    for at, (held, worker) in enumerate(seen):
        heapq.heappush(emptiest, (held + (at == chosen), worker))
    return None if chosen is None else seen[chosen][1]
