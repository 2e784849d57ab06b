"""Placement: this module answers every question about the place of a replica (design: placement).

The first table, repairs, moves, drains and policies all ask a ``Placement``. ``FarApart`` is the only one; another, such as
a ring, would be another class with the same methods, and ``placement_of`` would make it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from controller.replicas.kinds import wanted
from controller.replicas.protection_wishes import ProtectionWishes
from controller.replicas.spread import Shared, Spread, WorkerPlace
from controller.text import count, listed, named
from flux.dataflow.plan import Plan, StagePlan
from flux.errors import QueryFailed
from partitioning.ids import PartitionKey
from partitioning.table import FIRST_EPOCH, ReplicaAt, Table
from partitioning.table import spread as _dealt

#: The worker with the fewest replicas is chosen among this many suitable ones. More would take too long with many
#: workers.
FIT_MAX = 8


def first_table(
    plan: Plan, places: Mapping[int, WorkerPlace], endpoints: Mapping[int, str], same_executor: bool
) -> Table:
    """Make the table of epoch 0 (design: first-table). ``endpoints`` are those of the workers, in slot order. QueryFailed:
    replicas cannot be kept apart and may not share an executor.

    Partitions are dealt to workers evenly, and each stage starts at the worker after the last one of the stage before."""
    workers = list(endpoints)
    start = 0
    sources_end, stages_end, _ = plan.next_ids()
    stages: list[tuple[tuple[ReplicaAt, ...], ...]] = [()] * stages_end
    spread = Spread(places, workers)
    for stage in plan.stages:
        stages[stage.id] = _first_rows(stage, places, workers, start, spread, same_executor, FIRST_EPOCH)
        start = (start + stage.partitions) % len(workers)
    sources: list[tuple[int, ...]] = [()] * sources_end
    for source in plan.sources:
        sources[source.id] = tuple(_dealt(source.worker_partitions, workers))
    return Table(FIRST_EPOCH, tuple(stages), tuple(sources), dict(endpoints), plan.version)


def _first_rows(
    stage: StagePlan,
    places: Mapping[int, WorkerPlace],
    workers: Sequence[int],
    start: int,
    spread: Spread,
    same_executor: bool,
    epoch: int,
) -> tuple[tuple[ReplicaAt, ...], ...]:
    """Choose the first replicas of a stage, which begin empty in this epoch, from ``workers[start]`` on. QueryFailed: replicas
    cannot be kept apart."""
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
    return tuple(
        tuple(ReplicaAt(worker, epoch, kind=kind) for worker, kind in zip(replicas, kinds, strict=False))
        for replicas in chosen
    )


def _choose(
    replicas: int, workers: Sequence[int], turn: int, spread: Spread, held: Counter[int], same_executor: bool
) -> list[int]:
    """Choose the workers for the replicas of a partition, the primary's first, which follows from the ``turn``, round robin.

    Each further replica goes to a worker that shares least with the ones before, and among these to one with few replicas.
    ``held`` counts replicas of this stage by worker. The result is shorter than ``replicas`` if no other worker may hold one."""
    chosen = [workers[turn % len(workers)]]
    while len(chosen) < replicas:
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


class Placement(Protocol):
    """Answers for the workers of a moment. ``others`` are the workers with the other replicas of the same partition;
    ``leaving`` are workers that are being emptied.

    Law: whether a worker *may* hold a replica depends only on the worker and on the holders of the other replicas. Among
    those that may, ``rank`` is a preference and never a refusal: after a loss there may be no other choice."""

    @property
    def leaving(self) -> AbstractSet[int]: ...

    def first_table(self, plan: Plan, endpoints: Mapping[int, str]) -> Table:
        """Make the table of epoch 0. ``endpoints`` are those of the workers, in slot order.

        QueryFailed: there are too few workers for the replicas."""

    def first_rows(
        self, stage: StagePlan, workers: Sequence[int], start: int, epoch: int
    ) -> tuple[tuple[ReplicaAt, ...], ...]:
        """Choose the first replicas of a stage that comes with the table of this epoch, among ``workers`` in turn, from
        ``workers[start]`` on.

        QueryFailed: there are too few workers for the replicas."""

    def obstacle(self, worker: int, others: Iterable[int]) -> str | None:
        """Return the reason why a worker may not hold a replica of a partition; None: it may."""

    def may_hold(self, worker: int, others: Iterable[int]) -> bool:
        """Tell whether there is no obstacle."""

    def rank(self, key: PartitionKey, worker: int, others: Iterable[int]) -> int:
        """Rate a worker as a place for a partition. The lowest rank is best."""

    def best(self, key: PartitionKey, others: Iterable[int]) -> int:
        """Return the lowest rank of all workers that are not leaving."""

    def candidates(
        self,
        key: PartitionKey,
        others: Sequence[int],
        then: Callable[[int], Any],
        first: Callable[[int], int] = lambda worker: 0,
        without: AbstractSet[int] = frozenset(),
    ) -> list[int]:
        """Return the workers that may hold a new replica of the partition, in order of preference, ``without`` the given ones.

        They are sorted by ``first``, then by rank, then by ``then``."""

    def misplaced(self, key: PartitionKey, holders: Sequence[int]) -> int | None:
        """Return a holder whose replica should be elsewhere; None: all places are as good as possible.

        ``holders`` has the primary first. A secondary is preferred."""

    def too_close(self, key: PartitionKey, source: int, target: int, others: Sequence[int]) -> str | None:
        """Return the reason why a move from ``source`` to ``target`` would not last: the replica would be closer to the others
        than it is and than it need be, and be moved apart again at once; None: it would last."""

    def room(self) -> int:
        """Return the largest number of replicas of one partition that the workers that do not leave can hold."""

    def too_few(self, wishes: ProtectionWishes, leaving: AbstractSet[int]) -> str | None:
        """Return the reason why the other workers could not hold all replicas without ``leaving``; None: they could."""


def placement_of(places: Mapping[int, WorkerPlace], leaving: Iterable[int], same_executor: bool) -> Placement:
    """Make the placement of Flux."""
    return FarApart(places, leaving, same_executor)


class FarApart:
    """Placement as far apart as the workers are (``apart``). ``same_executor``: two replicas of a partition may be on one
    executor.

    The replicas of a partition are placed as far apart as the workers are (``apart``). So the loss of one executor takes
    only one of them, and with several hosts or racks, so does the loss of a host or rack."""

    def __init__(
        self, places: Mapping[int, WorkerPlace], leaving: Iterable[int] = (), same_executor: bool = False
    ) -> None:
        self.leaving: AbstractSet[int] = frozenset(leaving)
        self._places = places
        self._same_executor = same_executor
        self._misplaced: dict[tuple[int, ...], int | None] = {}  # by holders, which many partitions share

    @cached_property
    def _spread(self) -> Spread:
        return Spread(self._places, [worker for worker in self._places if worker not in self.leaving])

    def first_table(self, plan: Plan, endpoints: Mapping[int, str]) -> Table:
        return first_table(plan, self._places, endpoints, self._same_executor)

    def first_rows(
        self, stage: StagePlan, workers: Sequence[int], start: int, epoch: int
    ) -> tuple[tuple[ReplicaAt, ...], ...]:
        spread = Spread(self._places, workers)
        return _first_rows(stage, self._places, workers, start, spread, self._same_executor, epoch)

    def obstacle(self, worker: int, others: Iterable[int]) -> str | None:
        place = self._places.get(worker)
        if place is None:
            return f"there is no worker {worker}; there are {listed(sorted(self._places))}"
        if worker in self.leaving:
            return f"worker {worker} is leaving"
        for other in others:
            if other == worker:
                return f"worker {worker} holds a replica already"
            beside = self._places.get(other)
            if not self._same_executor and beside is not None and beside.executor == place.executor:
                return (
                    f"worker {worker} is on the same executor as worker {other}, which holds another replica; "
                    "spark.flux.replicas.allowSameExecutor would allow it"
                )
        return None

    def may_hold(self, worker: int, others: Iterable[int]) -> bool:
        return self.obstacle(worker, others) is None

    def rank(self, key: PartitionKey, worker: int, others: Iterable[int]) -> int:
        return self._spread.shared(worker, others)

    def best(self, key: PartitionKey, others: Iterable[int]) -> int:
        return self._spread.least(others)

    def candidates(
        self,
        key: PartitionKey,
        others: Sequence[int],
        then: Callable[[int], Any],
        first: Callable[[int], int] = lambda worker: 0,
        without: AbstractSet[int] = frozenset(),
    ) -> list[int]:
        fit = [worker for worker in self._places if worker not in without and self.may_hold(worker, others)]
        return sorted(fit, key=lambda worker: (first(worker), self.rank(key, worker, others), then(worker)))

    def misplaced(self, key: PartitionKey, holders: Sequence[int]) -> int | None:
        of = tuple(holders)
        if of not in self._misplaced:
            self._misplaced[of] = self._find_misplaced(key, of)
        return self._misplaced[of]

    def _find_misplaced(self, key: PartitionKey, holders: tuple[int, ...]) -> int | None:
        for worker in reversed(holders):
            others = [other for other in holders if other != worker]
            if others and self.best(key, others) < self.rank(key, worker, others):
                return worker
        return None

    def too_close(self, key: PartitionKey, source: int, target: int, others: Sequence[int]) -> str | None:
        here, there = (self.rank(key, worker, others) for worker in (source, target))
        if there <= max(here, self.best(key, others)):
            return None
        unit = Shared(there).name.lower()
        beside = next(other for other in others if self.rank(key, target, [other]) == there)
        return (
            f"worker {target} shares its {unit} with worker {beside}, which holds another replica, and worker {source} does not: "
            f"the replica would be moved apart again at once; flux drain {source} empties a worker for good"
        )

    def room(self) -> int:
        staying = {worker: place for worker, place in self._places.items() if worker not in self.leaving}
        return len(staying) if self._same_executor else len({place.executor for place in staying.values()})

    def too_few(self, wishes: ProtectionWishes, leaving: AbstractSet[int]) -> str | None:
        staying = [place for worker, place in self._places.items() if worker not in leaving]
        executors = len({place.executor for place in staying})
        room = len(staying) if self._same_executor else executors
        for stage in wishes.plan.stages:
            if room < wishes.places(stage):
                changes = f", and {wishes.places(stage)} while they change" if stage.id in wishes.open else ""
                fewer = ", or fewer replicas (flux protect)" if stage.replicas > 1 else ""
                return (
                    f"stage {stage.name} has replicas={stage.replicas}{changes}, and without "
                    f"{named('worker', sorted(leaving))} there "
                    f"would be {count(len(staying), 'worker')} on {count(executors, 'executor')}: that takes more workers{fewer}"
                )
        return None
