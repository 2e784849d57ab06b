"""Levels of replication of the stages, for reports and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from controller.replicas.columns import TableColumns
from controller.replicas.lags import Life
from flux.dataflow.plan import Plan


@dataclass(frozen=True, slots=True)
class Level:
    """The replication of one stage."""

    #: Replicas of each partition.
    wanted: int
    #: Safe replicas of the partition that has the fewest.
    safe: int
    #: Partitions with fewer replicas than wanted.
    short: int
    #: Active replicas of all partitions.
    active: int = 0
    #: Standbys of all partitions.
    standbys: int = 0


def levels(
    plan: Plan, columns: TableColumns | None, doubtful: Iterable[Life], low: Sequence[Sequence[int]]
) -> list[Level]:
    """Compute the level of each stage.

    ``columns`` are those of the table, None before the first; ``doubtful`` are replicas that are not safe yet or do not keep up;
    ``low`` has, for each stage, the partitions with too few replicas."""
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
