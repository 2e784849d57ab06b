"""Empties the workers that are leaving: what they hold goes to the least loaded of those that stay."""

from __future__ import annotations

import heapq
from collections import Counter

from controller.apart import Shared
from controller.load import Loads, Move, ReplicaLoad, Suggestion
from controller.policies.base import Policy, PolicySettings
from controller.policies.budget import Budget
from controller.policies.places import Places


class Drain(Policy, name="drain"):
    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._budget = Budget(settings)

    def suggest(self, loads: Loads, now: float) -> Suggestion:
        leaving = [replica for replica in loads.replicas if self._is_leaving(loads, replica.worker)]
        if not leaving:
            return Suggestion()
        plan = _Plan(loads, self.settings.same_executor)
        moves = []
        # The heaviest first: the light ones even out what they leave. One copy of a partition after the other.
        for replica in sorted(leaving, key=lambda r: (-r.busy, r.stage, r.partition, r.worker)):
            move = plan.place(replica)
            if move is not None:
                moves.append(move)
        return Suggestion(self._budget.take(moves, now), plan.notes)

    @staticmethod
    def _is_leaving(loads: Loads, worker: int) -> bool:
        return worker in loads.workers and loads.workers[worker].leaving


class _Plan:
    def __init__(self, loads: Loads, same_executor: bool) -> None:
        self.notes: list[str] = []
        self._same_executor = same_executor
        self._places = Places.of(loads)
        self._moved: set[tuple[int, int]] = set()
        busy = loads.of_workers()
        held = Counter(replica.worker for replica in loads.replicas)
        # Before anything is known of loads, counts say who has least.
        self._idlest = [(busy[w], held[w], w) for w, about in loads.workers.items() if not about.leaving]
        heapq.heapify(self._idlest)

    def place(self, replica: ReplicaLoad) -> Move | None:
        key = replica.stage, replica.partition
        if not replica.movable or key in self._moved:
            return None  # its turn comes when what is under way for it is through
        tried = []
        chosen: int | None = None
        closer: list[tuple[int, int]] = []  # what they share with the other copies, number among those tried
        while self._idlest and chosen is None:
            tried.append(heapq.heappop(self._idlest))
            target = tried[-1][2]
            if self._places.keeps_apart(*key, replica.worker, target):
                chosen = target
            elif self._places.may_hold(*key, target):
                shares = self._places.shared(*key, replica.worker, target)
                if self._same_executor or shares < Shared.EXECUTOR:
                    closer.append((shares, len(tried) - 1))
        if chosen is None and closer:
            chosen = tried[min(closer)[1]][2]
        for busy, held, worker in tried:
            took = worker == chosen
            heapq.heappush(self._idlest, (busy + replica.busy * took, held + took, worker))
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
        if not any(self._places.may_hold(replica.stage, replica.partition, worker) for *_, worker in self._idlest):
            return what + "every worker that stays holds a copy of it; add a worker or ask for fewer replicas"
        return what + (
            "every worker that could take it shares an executor with another of its copies; add an executor, or set "
            "spark.flux.replicas.allowSameExecutor to true"
        )
