"""Even policy: equal numbers of replicas on the workers, regardless of their load, for workers that have joined (design:
even-first).

It makes no more moves than needed: a worker gives only its surplus, beginning with the stage of which the target has fewest
replicas.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from controller.balance.load import Loads, Move, ReplicaLoad, Suggestion
from controller.balance.policies.base import Policy, PolicySettings
from controller.balance.policies.planned_moves import Budget, MovesUnderWay, PlannedPlacement
from controller.replicas.additions import HolderCount
from partitioning.ids import PartitionKey


class EvenPolicy(Policy, name="even"):
    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._budget = Budget(settings)
        self._under_way = MovesUnderWay()

    def suggest(self, loads: Loads, now: float) -> Suggestion:
        self._under_way.follow(loads)
        moves = self._budget.take(_Counts(loads, self._under_way).moves(), now)
        for move in moves:
            self._under_way.begin(move)
        return Suggestion(moves)


class _Counts:
    """Replicas on the workers that stay, by stage. Moves under way count as made."""

    def __init__(self, loads: Loads, under_way: MovesUnderWay) -> None:
        self._places = PlannedPlacement.of(loads)
        staying = [worker for worker, about in loads.workers.items() if not about.leaving]
        self._total = dict.fromkeys(staying, 0)
        self._of_stage: dict[int, Counter[int]] = {worker: Counter() for worker in staying}
        self._movable: dict[int, dict[int, list[ReplicaLoad]]] = {worker: {} for worker in staying}
        self._moved: set[PartitionKey] = set()
        for replica in loads.replicas:
            worker = under_way.destination(replica)
            if worker in self._total:
                self._total[worker] += 1
                self._of_stage[worker][replica.stage] += 1
                if replica.movable and worker == replica.worker:
                    self._movable[worker].setdefault(replica.stage, []).append(replica)
        for stages in self._movable.values():
            for replicas in stages.values():
                replicas.sort(key=lambda replica: (replica.state_bytes, replica.primary, replica.partition))

    def moves(self) -> Iterator[Move]:
        """Yield moves from the fullest worker to the emptiest one that can take one of its replicas, until no two workers
        differ by two."""
        # Heaps give the least first, so the counts of the fullest are negative.
        fullest = [HolderCount(-count, worker) for worker, count in self._total.items()]
        emptiest = [HolderCount(count, worker) for worker, count in self._total.items()]
        heapq.heapify(fullest)
        heapq.heapify(emptiest)
        while fullest:
            count, source = heapq.heappop(fullest)
            move = self._from(source, emptiest) if -count == self._total[source] else None
            if move is not None:
                self._apply(move)
                # New counts for both. Entries with old counts stay in the heaps and are skipped.
                heapq.heappush(fullest, HolderCount(-self._total[source], source))
                heapq.heappush(emptiest, HolderCount(self._total[move.target], move.target))
                yield move

    def _from(self, source: int, emptiest: list[HolderCount]) -> Move | None:
        refused = []
        move = None
        while emptiest and move is None:
            count, target = heapq.heappop(emptiest)
            if count != self._total[target]:
                continue
            if count > self._total[source] - 2:
                refused.append(HolderCount(count, target))
                break
            move = self._between(source, target)
            if move is None:
                refused.append(HolderCount(count, target))
        for entry in refused:
            heapq.heappush(emptiest, entry)
        return move

    def _between(self, source: int, target: int) -> Move | None:
        def lack(stage: int) -> int:
            return self._of_stage[target][stage] - self._of_stage[source][stage]

        for stage in sorted(sorted(self._movable[source]), key=lack):
            for replica in self._movable[source][stage]:
                key = PartitionKey(replica.stage, replica.partition)
                if key not in self._moved and self._places.keeps_apart(*key, source, target):
                    return Move(*key, source, target, cost=replica.state_bytes)
        return None

    def _apply(self, move: Move) -> None:
        self._moved.add(move.key)
        self._places.move(move.stage, move.partition, move.from_worker, move.target)
        left = self._movable[move.from_worker][move.stage]
        left.remove(next(replica for replica in left if replica.partition == move.partition))
        for worker, change in ((move.from_worker, -1), (move.target, 1)):
            self._total[worker] += change
            self._of_stage[worker][move.stage] += change
