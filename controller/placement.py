"""The first table: partitions dealt to workers evenly, each stage starting where the one before stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flux.plan import Plan
from partitioning.table import ReplicaAt, Table, spread


def first_table(plan: Plan, workers: Sequence[int], endpoints: Mapping[int, str]) -> Table:
    """Epoch 0. ``workers``: ids in slot order."""
    start = 0
    stages = []
    for stage in plan.stages:
        owners = spread(stage.partitions, workers, start)
        start = (start + stage.partitions) % len(workers)
        stages.append(tuple((ReplicaAt(owner, 0),) for owner in owners))
    sources = tuple(tuple(spread(source.partitions or 0, workers)) for source in plan.sources)
    return Table(0, tuple(stages), sources, dict(endpoints))
