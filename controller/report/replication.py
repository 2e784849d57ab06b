"""How well each stage is replicated: for reports and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controller.replicas.kinds import incomplete
from flux.dataflow.plan import Plan
from partitioning.table import ReplicaAt, Table


@dataclass(frozen=True, slots=True)
class Level:
    """The replication of one stage. ``wanted``: replicas of each partition; ``safe``: safe replicas of the partition
    that has the fewest; ``short``: partitions with fewer replicas than wanted."""

    wanted: int
    safe: int
    short: int


def levels(plan: Plan, table: Table | None, is_safe: Callable[[int, int, ReplicaAt], bool]) -> list[Level]:
    if table is None:
        return [Level(stage.replicas, 0, stage.partitions) for stage in plan.stages]
    found = []
    for stage in plan.stages:
        rows = table.stages[stage.id]
        safe = min(
            (sum(is_safe(stage.id, number, r) for r in replicas) for number, replicas in enumerate(rows)), default=0
        )
        short = len(incomplete(stage, rows))
        found.append(Level(stage.replicas, safe, short))
    return found
