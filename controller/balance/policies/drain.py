"""Drain policy: replicas of leaving workers go to the least loaded of the workers that stay (design: drain)."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from typing import NamedTuple

from controller.balance.load import Loads, Move, ReplicaLoad, Suggestion
from controller.balance.policies.base import Policy, PolicySettings
from controller.balance.policies.planned_moves import Budget, PlannedPlacement
from partitioning.ids import PartitionKey


class TargetLoad(NamedTuple):
    """Load and number of replicas of a worker that stays. The idlest sorts first."""

    busy: float
    replicas: int
    worker: int


class DrainPolicy(Policy, name="drain"):
    """Policy for the replicas of workers that leave: each goes to another worker, within the budget of the other policies."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._budget = Budget(settings)

    def suggest(self, loads: Loads, now: float) -> Suggestion:
        leaving = [replica for replica in loads.replicas if self._is_leaving(loads, replica.worker)]
        if not leaving:
            return Suggestion()
        plan = _Plan(loads, self.settings.same_executor)
        moves = []
        # The heaviest replicas first, so that the light ones even out the rest. Replicas of one partition go one after the
        # other.
        for replica in sorted(leaving, key=lambda r: (-r.busy, r.stage, r.partition, r.worker)):
            move = plan.place(replica)
            if move is not None:
                moves.append(move)
        return Suggestion(self._budget.take(moves, now), plan.notes)

    @staticmethod
    def _is_leaving(loads: Loads, worker: int) -> bool:
        return worker in loads.workers and loads.workers[worker].leaving


class _Plan:
    """A plan of one round: the place of each replica that leaves. Each chosen move counts for the next ones, in the loads of
    the targets and in the places of the replicas."""

    def __init__(self, loads: Loads, same_executor: bool) -> None:
        self.notes: list[str] = []
        self._places = PlannedPlacement.of(loads, same_executor)
        self._moved: set[PartitionKey] = set()
        busy = loads.of_workers()
        held = Counter(replica.worker for replica in loads.replicas)
        # While no loads are known, the numbers of replicas decide.
        self._idlest = [TargetLoad(busy[w], held[w], w) for w, about in loads.workers.items() if not about.leaving]
        heapq.heapify(self._idlest)

    def place(self, replica: ReplicaLoad) -> Move | None:
        key = PartitionKey(replica.stage, replica.partition)
        if not replica.movable or key in self._moved:
            return None  # its turn comes when no other change of its partition is under way
        tried: list[TargetLoad] = []
        chosen: int | None = None
        best_rank = math.inf
        closer: int | None = None  # the best-ranked of the workers that are too close to the other replicas
        while self._idlest and chosen is None:
            tried.append(heapq.heappop(self._idlest))
            target = tried[-1].worker
            if self._places.keeps_apart(*key, replica.worker, target):
                chosen = target
            elif self._places.may_take(*key, replica.worker, target):
                rank = self._places.rank(*key, replica.worker, target)
                if rank < best_rank:
                    best_rank, closer = rank, target
        chosen = closer if chosen is None else chosen
        for busy, held, worker in tried:
            took = worker == chosen
            heapq.heappush(self._idlest, TargetLoad(busy + replica.busy * took, held + took, worker))
        if chosen is None:
            self.notes.append(self._why_not(replica))
            return None
        self._moved.add(key)
        self._places.move(*key, replica.worker, chosen)
        return Move(*key, replica.worker, chosen, gain=replica.busy, cost=replica.state_bytes)

    def _why_not(self, replica: ReplicaLoad) -> str:
        what = f"partition {replica.stage}/{replica.partition} cannot leave worker {replica.worker}: "
        if not self._idlest:
            return what + "no worker stays"
        if not any(self._places.is_free(replica.stage, replica.partition, worker) for *_, worker in self._idlest):
            return what + "every worker that stays holds a replica of it; add a worker or ask for fewer replicas"
        return what + (
            "every worker that could take it shares an executor with another of its replicas; add an executor, or set "
            "spark.flux.replicas.allowSameExecutor to true"
        )
