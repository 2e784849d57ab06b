"""How well each stage is replicated: for reports and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from controller.replicas.columns import TableColumns
from controller.replicas.lags import Life
from flux.dataflow.plan import Plan


@dataclass(frozen=True, slots=True)
class Level:
    """The replication of one stage. ``wanted``: replicas of each partition; ``safe``: safe replicas of the partition
    that has the fewest; ``short``: partitions with fewer replicas than wanted; ``active``, ``standbys``: replicas of these
    kinds that there are, in all partitions."""

    wanted: int
    safe: int
    short: int
    active: int = 0
    standbys: int = 0


def levels(
    plan: Plan, columns: TableColumns | None, doubtful: Iterable[Life], low: Sequence[Sequence[int]]
) -> list[Level]:
    """``columns`` of the table, None before the first; ``doubtful``: replicas that are not safe yet or do not keep up;
    ``low``: for each stage, the partitions with too few replicas."""
    if columns is None:
        return [Level(stage.replicas, 0, stage.partitions) for stage in plan.stages]
    safe = columns.count(columns.without(columns.live & columns.safe, doubtful))
    fewest = np.minimum.reduceat(safe, columns.starts[:-1])
    listed = np.add.reduceat(columns.count(columns.listed), columns.starts[:-1])
    active = np.add.reduceat(columns.count(columns.applies), columns.starts[:-1])
    return [
        Level(
            stage.replicas, int(fewest[stage.id]), len(low[stage.id]), int(active[stage.id]),
            int(listed[stage.id] - active[stage.id]),
        )
        for stage in plan.stages
    ]  # fmt: skip
