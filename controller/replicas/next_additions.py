"""Which replicas to add next: in topological order of the stages, a few partitions at a time (design: sweep,
add-replica).

An addition goes through phases (``addition_phases``), each entered when the one before is confirmed. Every command is
safe to repeat. An addition that a loss has made impossible is dropped, and the next look at the table plans another.
The first half of a move is an addition like any other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from controller.replicas.addition_phases import Heard, Phase, after
from controller.replicas.kinds import incomplete, missing
from controller.replicas.lags import Life
from controller.replicas.placement import Placement
from controller.replicas.wishes import Wishes
from flux.dataflow.plan import Plan, StagePlan
from flux.replicas.kinds import Acks, kind_named
from partitioning.ids import ACTIVE, PartitionKey
from partitioning.table import ReplicaAt, Table

Replicas = tuple[ReplicaAt, ...]
Rows = tuple[Replicas, ...]


@dataclass
class Addition:
    """One AddReplica under way. ``incarnation``: epoch of the table that introduced the replica; ``since``: when its
    ``phase`` began. ``ask_at``: when the copy is ordered next, and again ``patience_s`` later; ``asked``: how often it
    was ordered. ``from_worker``: in a move, the worker whose replica this one replaces; None: a repair.
    ``arrived_at``: when the replica had all that is committed; None: it has not. The move then waits only for the next
    table, and for replicas that are far behind. ``request``: number of the request that changes the stage, 0: none."""

    stage: int
    partition: int
    worker: int
    incarnation: int
    started: float
    patience_s: float
    phase: Phase = Phase.RETAIN
    ask_at: float = -1.0
    why: str = "too few replicas"
    stall_ms: float = 0.0
    from_worker: int | None = None
    since: float = 0.0
    asked: int = 0
    arrived_at: float | None = None
    bytes: int = 0
    kind: str = ACTIVE
    request: int = 0

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.stage, self.partition)

    @property
    def life(self) -> Life:
        return Life(self.stage, self.partition, self.worker, self.incarnation)

    @property
    def moves(self) -> bool:
        return self.from_worker is not None

    @property
    def arrived(self) -> bool:
        return self.arrived_at is not None

    def on(self, heard: Heard, now: float) -> None:
        self.phase, self.since = after(self.phase, heard), now


@dataclass(frozen=True)
class Wanted:
    """An addition to begin. ``from_worker``, ``request``: as in Addition."""

    stage: int
    partition: int
    worker: int
    from_worker: int | None = None
    why: str = "too few replicas"
    kind: str = ACTIVE
    request: int = 0

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.stage, self.partition)


class HolderCount(NamedTuple):
    """A number of replicas on a worker. Sorts by the number."""

    replicas: int
    worker: int


def first_phase(kind: str) -> Phase:
    """RETAIN, or READY for a kind for which producers keep nothing: then nobody has to confirm the table first."""
    return Phase.READY if kind_named(kind).acks is Acks.NOTHING else Phase.RETAIN


class Census:
    """The numbers of replicas on workers, and the partitions with too few of some kind. The first table is counted as a
    whole, later ones only in the stages that have changed: the sweep looks far more often than a stage changes."""

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        stages = wishes.plan.stages
        self._counted: list[Rows] = [()] * len(stages)
        self._wished: list[StagePlan | None] = [None] * len(stages)
        self._low: list[list[int]] = [[] for _ in stages]
        self._held: list[dict[int, int]] = [{} for _ in stages]
        self._total: Counter[int] = Counter()

    def look(self, table: Table) -> None:
        for stage, rows in enumerate(table.stages):
            wish = self.wishes.plan.stages[stage]
            if rows is not self._counted[stage] or wish is not self._wished[stage]:
                self._counted[stage], self._wished[stage] = rows, wish
                self._low[stage] = incomplete(wish, rows, mixed=stage in self.wishes.open)
                held = Counter([replica.worker for replicas in rows for replica in replicas])
                self._total.subtract(self._held[stage])
                self._total.update(held)
                self._held[stage] = held

    def low_of_stages(self) -> list[list[int]]:
        """For each stage, its partitions with fewer replicas than it wants."""
        return self._low

    def low(self) -> Iterator[PartitionKey]:
        """Partitions with fewer replicas than their stage wants, in topological order. Where the stage changes, those that
        have as many as are kept safe come after all others, and those that have to drop one first are left out."""
        later: list[PartitionKey] = []
        for stage, partitions in enumerate(self._low):
            change = self.wishes.open.get(stage)
            rows = self._counted[stage]
            for partition in partitions:
                if change is None or len(rows[partition]) < change.least:
                    yield PartitionKey(stage, partition)
                elif len(rows[partition]) < change.most:
                    later.append(PartitionKey(stage, partition))
        yield from later

    def held(self) -> dict[int, int]:
        """Replicas on each worker that has any."""
        return {worker: count for worker, count in self._total.items() if count}


def under_replicated(plan: Plan, table: Table) -> list[PartitionKey]:
    """Partitions with fewer replicas than their stage wants, in topological order."""
    return [
        PartitionKey(stage.id, partition)
        for stage in plan.stages
        for partition in incomplete(stage, table.stages[stage.id])
    ]


def next_additions(
    plan: Plan,
    table: Table,
    under_way: Iterable[Addition],
    at_once: int,
    placement: Placement,
    census: Census | None = None,
    resting: AbstractSet[PartitionKey] = frozenset(),
) -> list[Wanted]:
    """The additions to begin now. Stages go in order: none begins while another has an addition under way. ``census``:
    keep one from call to call to save counting; it knows what is wished now, ``plan`` only what was at first. ``resting``:
    partitions that are skipped for now."""
    busy = list(under_way)
    if len(busy) >= at_once:
        return []
    stage = min((addition.stage for addition in busy), default=None)
    wanted: list[Wanted] = []
    for each in _additions(table, busy, placement, census or Census(Wishes(plan)), stage, resting):
        # Partitions that no worker can take are skipped, and so is a stage that has no others.
        if wanted and each.stage != wanted[0].stage:
            break
        wanted.append(each)
        if len(busy) + len(wanted) >= at_once:
            break
    return wanted


def all_additions(plan: Plan, table: Table, placement: Placement) -> list[Wanted]:
    """All additions that the sweep will make, in order, if nothing else happens meanwhile."""
    return list(_additions(table, [], placement, Census(Wishes(plan)), None, frozenset()))


def _additions(
    table: Table,
    busy: Sequence[Addition],
    placement: Placement,
    census: Census,
    stage: int | None,
    resting: AbstractSet[PartitionKey],
) -> Iterator[Wanted]:
    """The additions in order, each on the worker with the fewest replicas at that time, among those that may hold it
    and have the best rank. ``stage``: the only stage to look at; None: all."""
    census.look(table)
    held = census.held()
    emptiest = [HolderCount(held.get(worker, 0), worker) for worker in {**table.endpoints, **held}]
    heapq.heapify(emptiest)
    taken = {addition.key for addition in busy} | resting
    wishes = census.wishes
    hopeless: set[tuple[int, ...]] = set()
    for key in census.low():
        if stage is not None and key.stage != stage:
            return
        if key in taken:
            continue
        replicas = table.replicas(*key)
        holders = tuple(replica.worker for replica in replicas)
        if holders in hopeless:
            continue  # no worker may hold a replica beside these: with few workers, many partitions are like this one
        worker = _emptiest(emptiest, key, holders, placement)
        if worker is None:
            hopeless.add(holders)
        else:
            kind = missing(wishes.plan.stages[key.stage], replicas) or ACTIVE
            change = wishes.open.get(key.stage)
            if change is None:
                yield Wanted(*key, worker, kind=kind)
            else:
                yield Wanted(*key, worker, why=f"change {change}", kind=kind, request=change.request)


def _emptiest(
    emptiest: list[HolderCount], key: PartitionKey, holders: tuple[int, ...], placement: Placement
) -> int | None:
    """Of the workers that may hold it and have the best rank, the one with the fewest replicas. Its entry in the heap
    then counts one more. With the heap, not all workers are looked at for each of many partitions."""
    wanted = placement.best(key, holders)
    seen: list[HolderCount] = []
    chosen: int | None = None  # its place among those seen
    best = wanted
    while emptiest and (chosen is None or best > wanted):
        seen.append(heapq.heappop(emptiest))
        worker = seen[-1].worker
        if placement.may_hold(worker, holders):
            rank = placement.rank(key, worker, holders)
            if chosen is None or rank < best:
                chosen, best = len(seen) - 1, rank
    for at, (replicas, worker) in enumerate(seen):
        heapq.heappush(emptiest, HolderCount(replicas + (at == chosen), worker))
    return None if chosen is None else seen[chosen].worker
