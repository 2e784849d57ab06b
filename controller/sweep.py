"""The sweep: carries out additions of replicas stage by stage in topological order, a few partitions at a time (DESIGN 5).

An addition goes retain -> copy -> live -> safe, each step entered when the one before is confirmed. Every order is safe
to repeat. What a loss made impossible is dropped, and the next look at the table plans it anew. The first half of a
move is an addition like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from flux.plan import Plan
from partitioning.table import ReplicaAt, Table


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
    may_hold: Callable[[int, tuple[ReplicaAt, ...]], bool],
    resting: AbstractSet[tuple[int, int]] = frozenset(),
) -> list[Wanted]:
    """What to begin now. Stages are taken in order: none begins while another has something under way.
    ``may_hold(worker, replicas)``: whether the worker may hold another copy beside those. ``resting``: partitions that
    are passed over for now."""
    busy = list(under_way)
    load = dict.fromkeys(table.endpoints, 0)
    for partitions in table.stages:
        for replicas in partitions:
            for replica in replicas:
                load[replica.worker] = load.get(replica.worker, 0) + 1
    wanted: list[Wanted] = []
    first = min((addition.stage for addition in busy), default=None)
    for stage, partition in under_replicated(plan, table):
        if len(busy) + len(wanted) >= at_once or first not in (None, stage):
            break
        if any((addition.stage, addition.partition) == (stage, partition) for addition in busy):
            continue
        if (stage, partition) in resting:
            continue
        replicas = table.stages[stage][partition]
        fit = [worker for worker in load if may_hold(worker, replicas)]
        if fit:
            chosen = min(fit, key=lambda worker: (load[worker], worker))
            load[chosen] += 1
            first = stage  # one that no worker can hold is passed over, and so is its stage if it has nothing else
            wanted.append(Wanted(stage, partition, chosen))
    return wanted
