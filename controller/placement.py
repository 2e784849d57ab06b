"""The first table: partitions dealt to workers evenly, each stage starting where the one before stopped.

The replicas of a partition go to different executors, so that the loss of one executor takes one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flux.errors import QueryFailed
from flux.plan import Plan, StagePlan
from partitioning.table import FIRST_EPOCH, ReplicaAt, Table, spread


@dataclass(frozen=True)
class Seat:
    """A worker and where it is."""

    worker: int
    executor: str
    endpoint: str


def first_table(plan: Plan, seats: Sequence[Seat]) -> Table:
    """Epoch 0. ``seats`` in slot order. QueryFailed where replicas cannot be kept apart and may not share."""
    start = 0
    stages = []
    for stage in plan.stages:
        stages.append(tuple(_replicas(plan, stage, seats, start + number) for number in range(stage.partitions)))
        start = (start + stage.partitions) % len(seats)
    sources = tuple(tuple(spread(source.partitions or 0, [s.worker for s in seats])) for source in plan.sources)
    return Table(FIRST_EPOCH, tuple(stages), sources, {seat.worker: seat.endpoint for seat in seats})


def _replicas(plan: Plan, stage: StagePlan, seats: Sequence[Seat], turn: int) -> tuple[ReplicaAt, ...]:
    """The owner's turn comes round robin; its copies go to the next workers that are on other executors."""
    chosen = [seats[turn % len(seats)]]
    for apart in (True, False):
        for step in range(1, len(seats)):
            # Not always the neighbour: a lost worker's partitions shall be taken over by all others alike.
            seat = seats[(turn + 1 + (turn // len(seats) + step - 1) % (len(seats) - 1)) % len(seats)]
            if len(chosen) == stage.replicas:
                break
            shares = seat.executor in {other.executor for other in chosen}
            if seat not in chosen and not (apart and shares):
                chosen.append(seat)
        if len(chosen) == stage.replicas:
            break
        if not plan.settings.same_executor:
            executors = len({seat.executor for seat in seats})
            raise QueryFailed(
                f"stage {stage.name} wants replicas={stage.replicas} on different executors, and the {len(seats)} workers are on "
                f"{executors}: use more executors, fewer replicas, or set spark.flux.replicas.allowSameExecutor to true"
            )
    return tuple(ReplicaAt(seat.worker, FIRST_EPOCH) for seat in chosen)
