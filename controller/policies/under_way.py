"""Suggestions that were not yet seen to be done: they count as made, or one imbalance would be mended twice."""

from __future__ import annotations

from controller.load import Loads, Move, ReplicaLoad


class UnderWay:
    """A move is over when its source has no copy any more, when its target is gone, or when the copy may be moved again
    without having gone anywhere: the controller refused it or gave it up."""

    def __init__(self) -> None:
        self._moves: dict[tuple[int, int], Move] = {}
        self._arrived: set[tuple[int, int]] = set()  # the target has a copy beside the source's

    def begin(self, move: Move) -> None:
        self._moves[move.stage, move.partition] = move

    def follow(self, loads: Loads) -> list[Move]:
        """Forget what is over. Given are the moves that have just succeeded."""
        at: dict[tuple[int, int], dict[int, ReplicaLoad]] = {key: {} for key in self._moves}
        if at:
            for replica in loads.replicas:
                copies = at.get((replica.stage, replica.partition))
                if copies is not None:
                    copies[replica.worker] = replica
        done = []
        for key, copies in at.items():
            move = self._moves[key]
            here, there = copies.get(move.source), copies.get(move.target)
            if here is None and there is not None:
                done.append(move)
            if here is None or move.target not in loads.workers or (there is None and here.movable):
                del self._moves[key]
        self._arrived = {key for key in self._moves if self._moves[key].target in at[key]}
        return done

    def all(self) -> list[tuple[Move, bool]]:
        """Every move under way, and whether its target has a copy already."""
        return [(move, key in self._arrived) for key, move in self._moves.items()]

    def destination(self, replica: ReplicaLoad) -> int | None:
        """Where this copy will be, None: nowhere, because another takes its place."""
        key = replica.stage, replica.partition
        move = self._moves.get(key)
        if move is None or move.source != replica.worker:
            return replica.worker
        return None if key in self._arrived else move.target
