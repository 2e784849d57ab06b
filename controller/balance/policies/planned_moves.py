"""The common parts of policies that plan moves: a budget, the placement after planned moves, and suggested moves under way."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from controller.balance.load import Loads, Move, ReplicaLoad
from controller.balance.policies.base import PolicySettings
from controller.replicas.placement import Placement, placement_of
from partitioning.ids import PartitionKey

#: Capacity of the bucket, in seconds of its rate. It is small, so that after a quiet hour not all moves are made at once.
BURST_S = 1.0


class Budget:
    """Limits on the moves of a policy: their number in a round, and bytes of state per second on average (design: budget).

    The bytes are a token bucket. Moves may overdraw it while it is not empty, because a state larger than the bucket could never
    move otherwise. Later moves wait until the overdraft is paid back."""

    def __init__(self, settings: PolicySettings) -> None:
        self._moves_max = settings.max_moves
        self._rate = settings.max_bytes_per_s
        self._tokens = self._rate * BURST_S
        self._at: float | None = None

    def take(self, moves: Iterable[Move], now: float) -> list[Move]:
        """Return the first of these moves, as many as the limits allow now. No further moves are drawn from the iterable."""
        if self._at is not None and now > self._at:
            self._tokens = min(self._tokens + self._rate * (now - self._at), self._rate * BURST_S)
        self._at = now
        taken: list[Move] = []
        for move in moves if self._tokens > 0 else ():
            taken.append(move)
            self._tokens -= move.cost
            if len(taken) >= self._moves_max or self._tokens <= 0:
                break
        return taken


class PlannedPlacement:
    """The holders of each partition after the moves that are planned already, and the workers that may hold it (design: places).

    It limits every policy, and makes the moves of one suggestion fit together."""

    def __init__(self, placement: Placement, replicas: Iterable[ReplicaLoad]) -> None:
        self._placement = placement
        self._holders: dict[PartitionKey, list[int]] = {}
        # Replicas of a partition mostly come one after the other, and a key for each of many replicas would take longer.
        for (stage, partition), group in groupby(replicas, attrgetter("stage", "partition")):
            key = PartitionKey(stage, partition)
            self._holders.setdefault(key, []).extend(replica.worker for replica in group)

    @classmethod
    def of(cls, loads: Loads, same_executor: bool = False) -> PlannedPlacement:
        leaving = [worker for worker, about in loads.workers.items() if about.leaving]
        places = {worker: about.place for worker, about in loads.workers.items()}
        return cls(placement_of(places, leaving, same_executor), loads.replicas)

    def is_free(self, stage: int, partition: int, target: int) -> bool:
        """Tell whether ``target`` is neither leaving nor a holder of the partition."""
        return target not in self._placement.leaving and target not in self._holders[PartitionKey(stage, partition)]

    def may_take(self, stage: int, partition: int, source: int, target: int) -> bool:
        """Tell whether ``target`` may hold the replica that is on ``source``, well placed or not."""
        others = self._others(stage, partition, source)
        return self.is_free(stage, partition, target) and self._placement.may_hold(target, others)

    def keeps_apart(self, stage: int, partition: int, source: int, target: int) -> bool:
        """Tell whether ``target`` is free, and no worse a place for the replica than ``source``."""
        if not self.is_free(stage, partition, target):
            return False
        others = self._others(stage, partition, source)
        rank, key = self._placement.rank, PartitionKey(stage, partition)
        return not others or rank(key, target, others) <= rank(key, source, others)

    def rank(self, stage: int, partition: int, source: int, target: int) -> int:
        """Rate ``target`` as a place for the replica on ``source``. The lowest rank is best."""
        return self._placement.rank(PartitionKey(stage, partition), target, self._others(stage, partition, source))

    def _others(self, stage: int, partition: int, source: int) -> list[int]:
        return [worker for worker in self._holders[PartitionKey(stage, partition)] if worker != source]

    def move(self, stage: int, partition: int, source: int, target: int) -> None:
        holders = self._holders[PartitionKey(stage, partition)]
        holders[holders.index(source)] = target


class MoveUnderWay(NamedTuple):
    """A move that is not done. ``arrived``: its target has a replica already."""

    move: Move
    arrived: bool


class MovesUnderWay:
    """The moves that a policy has suggested and that are not over (design: under-way).

    They count as made, because one imbalance would be evened out twice otherwise. A move is over when its source has no replica
    any more, when its target is lost, or when its replica is still on the source and may be moved again: then the controller has
    refused the move or given it up."""

    def __init__(self) -> None:
        self._moves: dict[PartitionKey, Move] = {}
        self._arrived: set[PartitionKey] = set()  # the target has a replica beside the source's

    def begin(self, move: Move) -> None:
        self._moves[move.key] = move

    def follow(self, loads: Loads) -> list[Move]:
        """Forget the moves that are over. Return those that have just succeeded."""
        at: dict[PartitionKey, dict[int, ReplicaLoad]] = {key: {} for key in self._moves}
        if at:
            for replica in loads.replicas:
                # A plain pair finds the key, and making one for each of many replicas takes less time.
                if (replica.stage, replica.partition) in at:
                    at[PartitionKey(replica.stage, replica.partition)][replica.worker] = replica
        done = []
        for key, replicas in at.items():
            move = self._moves[key]
            here, there = replicas.get(move.from_worker), replicas.get(move.target)
            if here is None and there is not None:
                done.append(move)
            if here is None or move.target not in loads.workers or (there is None and here.movable):
                del self._moves[key]
        self._arrived = {key for key in self._moves if self._moves[key].target in at[key]}
        return done

    def all(self) -> list[MoveUnderWay]:
        return [MoveUnderWay(move, key in self._arrived) for key, move in self._moves.items()]

    def destination(self, replica: ReplicaLoad) -> int | None:
        """Return the future worker of this replica; None: another replica takes its place."""
        if (replica.stage, replica.partition) not in self._moves:
            return replica.worker
        key = PartitionKey(replica.stage, replica.partition)
        move = self._moves[key]
        if move.from_worker != replica.worker:
            return replica.worker
        return None if key in self._arrived else move.target
