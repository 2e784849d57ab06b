"""The first table (design: first-table): partitions are dealt to workers evenly, and each stage starts at the worker after
the last one of the stage before.

The replicas of a partition are placed as far apart as the workers are (``apart``). So the loss of one executor takes
only one of them, and with several hosts or racks, so does the loss of a host or rack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from controller.replicas.apart import Shared, Spread, WorkerPlace
from controller.replicas.kinds import wanted
from flux.dataflow.plan import Plan
from flux.errors import QueryFailed
from partitioning.table import FIRST_EPOCH, ReplicaAt, Table
from partitioning.table import spread as _dealt

#: The worker with the fewest replicas is chosen among this many suitable ones. More would take too long with many
#: workers.
FIT_MAX = 8


def first_table(
    plan: Plan, places: Mapping[int, WorkerPlace], endpoints: Mapping[int, str], same_executor: bool
) -> Table:
    """Make the table of epoch 0. ``endpoints`` are those of the workers, in slot order.

    QueryFailed: replicas cannot be kept apart and may not share an executor."""
    workers = list(endpoints)
    start = 0
    stages = []
    spread = Spread(places, workers)
    for stage in plan.stages:
        held: Counter[int] = Counter()
        turns = range(start, start + stage.partitions)
        kinds = wanted(stage)
        chosen = [_choose(len(kinds), workers, turn, spread, held, same_executor) for turn in turns]
        if any(len(replicas) < len(kinds) for replicas in chosen):
            executors = len({places[worker].executor for worker in workers})
            raise QueryFailed(
                f"stage {stage.name} wants replicas={stage.replicas} on different executors, and the {len(workers)} workers are "
                f"on {executors}: use more executors, fewer replicas, or set spark.flux.replicas.allowSameExecutor to true"
            )
        stages.append(tuple(tuple(map(_at_first, replicas, kinds)) for replicas in chosen))
        start = (start + stage.partitions) % len(workers)
    sources = tuple(tuple(_dealt(source.worker_partitions, workers)) for source in plan.sources)
    return Table(FIRST_EPOCH, tuple(stages), sources, dict(endpoints))


def _at_first(worker: int, kind: str) -> ReplicaAt:
    return ReplicaAt(worker, FIRST_EPOCH, kind=kind)


def _choose(
    copies: int, workers: Sequence[int], turn: int, spread: Spread, held: Counter[int], same_executor: bool
) -> list[int]:
    """Choose the workers for the replicas of a partition, the primary's first, which follows from the ``turn``, round robin.

    Each further replica goes to a worker that shares least with the ones before, and among these to one with few replicas.
    ``held`` counts replicas of this stage by worker. The result is shorter than ``copies`` if no other worker may hold one."""
    chosen = [workers[turn % len(workers)]]
    while len(chosen) < copies:
        least = spread.least(chosen)
        fitting = (w for w in _ring(workers, turn) if w not in chosen and spread.shared(w, chosen) == least)
        fit = list(islice(fitting, 1 if spread.alike else FIT_MAX))
        if not fit or (least is Shared.EXECUTOR and not same_executor):
            return chosen
        # If some workers may not hold the replica, the ring alone would favour the workers that come after these.
        chosen.append(min(fit, key=lambda worker: held[worker]))
    held.update(chosen)
    return chosen


def _ring(workers: Sequence[int], turn: int) -> Iterator[int]:
    """Yield the other workers, not always beginning with the neighbour, so that all of them share the partitions of a lost
    worker."""
    others = len(workers) - 1
    for step in range(others):
        yield workers[(turn + 1 + (turn // len(workers) + step) % others) % len(workers)]
