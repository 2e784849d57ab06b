"""Suggested moves that are not done yet. They count as made, because one imbalance would be evened out twice otherwise
(design: under-way)."""

from __future__ import annotations

from typing import NamedTuple

from controller.balance.load import Loads, Move, ReplicaLoad
from partitioning.ids import PartitionKey


class MoveUnderWay(NamedTuple):
    """A move that is not done. ``arrived``: its target has a replica already."""

    move: Move
    arrived: bool


class MovesUnderWay:
    """The moves that a policy has suggested and that are not over.

    A move is over when its source has no replica any more, when its target is lost, or when its replica is still on
    the source and may be moved again: then the controller has refused the move or given it up."""

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
