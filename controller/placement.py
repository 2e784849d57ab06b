"""The first table: partitions dealt to workers evenly, each stage starting where the one before stopped.

The replicas of a partition go as far apart as the workers are (``apart``), so that the loss of one executor, and where there
are several of one host or rack, takes one copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from controller.apart import Place, Shared, Spread
from flux.errors import QueryFailed
from flux.plan import Plan, StagePlan
from partitioning.table import FIRST_EPOCH, ReplicaAt, Table
from partitioning.table import spread as _dealt

#: Of so many workers that may have a copy the one with the fewest gets it: a limit on the time that it takes.
FIT_MAX = 8


@dataclass(frozen=True)
class Seat:
    """A worker and where it is."""

    worker: int
    executor: str
    endpoint: str
    host: str = ""
    domain: str = ""

    @property
    def place(self) -> Place:
        return Place.of(self.domain, self.host, self.executor)


def first_table(plan: Plan, seats: Sequence[Seat]) -> Table:
    """Epoch 0. ``seats`` in slot order. QueryFailed where replicas cannot be kept apart and may not share."""
    start = 0
    stages = []
    spread = Spread({seat.worker: seat.place for seat in seats}, [seat.worker for seat in seats])
    for stage in plan.stages:
        held: Counter[int] = Counter()
        turns = range(start, start + stage.partitions)
        stages.append(tuple(_replicas(plan, stage, seats, turn, spread, held) for turn in turns))
        start = (start + stage.partitions) % len(seats)
    sources = tuple(tuple(_dealt(source.partitions or 0, [s.worker for s in seats])) for source in plan.sources)
    return Table(FIRST_EPOCH, tuple(stages), sources, {seat.worker: seat.endpoint for seat in seats})


def _replicas(
    plan: Plan, stage: StagePlan, seats: Sequence[Seat], turn: int, spread: Spread, held: Counter[int]
) -> tuple[ReplicaAt, ...]:
    """The owner's turn comes round robin; each copy goes to one of those that share least with the copies before it, and
    of these to one that has few. ``held``: copies of this stage by worker."""
    chosen = [seats[turn % len(seats)].worker]
    while len(chosen) < stage.replicas:
        least = spread.least(chosen)
        fitting = (w for w in _ring(seats, turn) if w not in chosen and spread.shared(w, chosen) == least)
        fit = list(islice(fitting, 1 if spread.alike else FIT_MAX))
        if not fit or (least is Shared.EXECUTOR and not plan.settings.same_executor):
            executors = len({seat.executor for seat in seats})
            raise QueryFailed(
                f"stage {stage.name} wants replicas={stage.replicas} on different executors, and the {len(seats)} workers are on "
                f"{executors}: use more executors, fewer replicas, or set spark.flux.replicas.allowSameExecutor to true"
            )
        # Where some may not have it, the ring alone would favour who comes behind these.
        chosen.append(min(fit, key=lambda worker: held[worker]))
    held.update(chosen)
    return tuple(ReplicaAt(worker, FIRST_EPOCH) for worker in chosen)


def _ring(seats: Sequence[Seat], turn: int) -> Iterator[int]:
    """The others, not always beginning with the neighbour: a lost worker's partitions shall be taken over by all alike."""
    others = len(seats) - 1
    for step in range(others):
        yield seats[(turn + 1 + (turn // len(seats) + step) % others) % len(seats)].worker
