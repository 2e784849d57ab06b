"""``flux.testing.check_policy`` passes for the policies of the project, and tells the mistakes planted in others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from policy_model import Cluster, zipf

from controller.balance.load import Loads, Move, ReplicaLoad, Suggestion, WorkerLoad
from controller.balance.policies import REGISTRY, Policy, PolicySettings
from controller.balance.policies.planned_moves import Budget, MovesUnderWay, PlannedPlacement
from flux.errors import ContractBroken, UsageError
from flux.testing import check_policy


def leaving(cluster: Cluster, *workers: int) -> Cluster:
    cluster.leaving |= set(workers)
    return cluster


SITUATIONS = {
    "one full worker": Cluster(4).put([0.1] * 12, lambda p: [0] if p < 9 else [1 + p % 3]),
    "two replicas": Cluster(5).put([0.1] * 12, lambda p: [p % 2, 2 + p % 3]),
    "an empty worker that leaves": leaving(Cluster(3).put([0.1] * 6, lambda p: [p % 2]), 2),
    "two executors": Cluster(4, executors={0: "a", 1: "a", 2: "b", 3: "b"}).put([0.1] * 8, lambda p: [0, 2]),
    "skew": Cluster(4).put(zipf(1.2, 16, 2.0), lambda p: [p % 4]),
    "a worker that leaves": leaving(Cluster(4).put([0.1] * 12, lambda p: [p % 4, (p + 1) % 4]), 3),
    "one too many": Cluster(4).put([0.1] * 9, lambda p: [p % 4]),
    "even": Cluster(4).put([0.1] * 8, lambda p: [p % 4]),
}
LOADS = [cluster.loads() for cluster in SITUATIONS.values()]


@pytest.mark.parametrize("name", ["pairing", "even", "drain"])
@pytest.mark.parametrize(
    "settings",
    [PolicySettings(), PolicySettings(max_moves=4, max_bytes_per_s=1500, cool_down_s=2.0)],
    ids=["usual", "few bytes"],
)
def test_the_policies_of_the_project_pass(name: str, settings: PolicySettings) -> None:
    check_policy(name, LOADS, settings)


class Right(Policy, name="right"):
    """A policy that gives from the worker with the most replicas to the one with the fewest."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._budget, self._under_way = Budget(settings), MovesUnderWay()

    def suggest(self, loads: Loads, now: float) -> Suggestion:
        self._under_way.follow(loads)
        moves = self._budget.take(self.moves(loads), now)
        for move in moves:
            self._under_way.begin(move)
        return Suggestion(moves)

    def moves(self, loads: Loads) -> Iterator[Move]:
        held = {worker: 0 for worker, about in loads.workers.items() if self.may_take(about)}
        for replica in loads.replicas:
            worker = self.worker_of(replica)
            if worker in held:
                held[worker] += 1
        fullest, emptiest = max(held, key=held.__getitem__), min(held, key=held.__getitem__)
        places = PlannedPlacement.of(loads)
        if held[fullest] - held[emptiest] > self.least():
            for replica in loads.replicas:
                if replica.worker == fullest and self.may_move(replica) and self.fits(places, replica, emptiest):
                    yield Move(
                        replica.stage, replica.partition, fullest, self.target(emptiest), cost=self.cost(replica)
                    )
                    return

    def least(self) -> int:
        return 1

    def worker_of(self, replica: ReplicaLoad) -> int | None:
        return self._under_way.destination(replica)

    def may_take(self, worker: WorkerLoad) -> bool:
        return not worker.leaving

    def may_move(self, replica: ReplicaLoad) -> bool:
        return replica.movable

    def fits(self, places: PlannedPlacement, replica: ReplicaLoad, target: int) -> bool:
        return places.keeps_apart(replica.stage, replica.partition, replica.worker, target)

    def target(self, worker: int) -> int:
        return worker

    def cost(self, replica: ReplicaLoad) -> int:
        return replica.state_bytes


class MovesWhatIsUnderWay(Right, name="under way"):
    def may_move(self, replica: ReplicaLoad) -> bool:
        return True


class NeverRests(Right, name="never rests"):
    """A policy that moves the one replica too many from worker to worker."""

    def least(self) -> int:
        return 0


class KeepsLostWorkers(Right, name="lost"):
    known: dict[int, WorkerLoad]

    def suggest(self, loads: Loads, now: float) -> Suggestion:
        self.known = getattr(self, "known", {}) | loads.workers
        return super().suggest(Loads(self.known, loads.replicas, loads.seconds), now)


class FillsLeaving(Right, name="leaving"):
    def may_take(self, worker: WorkerLoad) -> bool:
        return True

    def fits(self, places: PlannedPlacement, replica: ReplicaLoad, target: int) -> bool:
        return True


class StacksReplicas(Right, name="stacks"):
    def fits(self, places: PlannedPlacement, replica: ReplicaLoad, target: int) -> bool:
        return places.is_free(replica.stage, replica.partition, target)


class HoldsTwice(Right, name="twice"):
    def fits(self, places: PlannedPlacement, replica: ReplicaLoad, target: int) -> bool:
        return True


class Spends(Right, name="spends"):
    def suggest(self, loads: Loads, now: float) -> Suggestion:
        places = PlannedPlacement.of(loads)
        moves = [
            Move(each.stage, each.partition, each.worker, 1, cost=each.state_bytes)
            for each in loads.replicas
            if each.worker == 0
            and each.movable
            and 1 in loads.workers
            and places.keeps_apart(each.stage, each.partition, 0, 1)
        ]
        return Suggestion(moves[: self.limit()])

    def limit(self) -> int | None:
        return None


class SpendsBytes(Spends, name="bytes"):
    def limit(self) -> int | None:
        return 1


class SaysNothingOfCost(Right, name="cost"):
    def cost(self, replica: ReplicaLoad) -> int:
        return 0


class Dice(Right, name="dice"):
    thrown = itertools.count()

    def target(self, worker: int) -> int:
        return worker + next(self.thrown) % 2


class Invents(Right, name="invents"):
    def suggest(self, loads: Loads, now: float) -> Suggestion:
        return Suggestion([Move(7, 0, 0, 1)])


class Changes(Right, name="changes"):
    def suggest(self, loads: Loads, now: float) -> Suggestion:
        loads.replicas.sort(key=lambda replica: -replica.worker)
        return Suggestion()


class Twice(Right, name="two moves"):
    def moves(self, loads: Loads) -> Iterator[Move]:
        for move in super().moves(loads):
            yield from (move, move)


class Raises(Right, name="raises"):
    def suggest(self, loads: Loads, now: float) -> Suggestion:
        raise KeyError(max(loads.workers))


class GivesAList(Right, name="list"):
    def suggest(self, loads: Loads, now: float) -> Any:
        return list(self.moves(loads))


@pytest.mark.parametrize(
    ("kind", "situation", "said"),
    [
        (MovesWhatIsUnderWay, "one full worker", "partition 0/0 is not movable, something is under way for it"),
        (
            NeverRests,
            "one too many",
            r"it never comes to rest, though loads stay as they are; its last move of \d+ was 0/",
        ),
        (
            KeepsLostWorkers,
            "one full worker",
            r"where a worker is lost: .* worker \d is not there; it may have been lost",
        ),
        (FillsLeaving, "an empty worker that leaves", "worker 2 is leaving and gets no more replicas"),
        (
            StacksReplicas,
            "two executors",
            r"worker \d is on one executor with another replica of partition",
        ),
        (HoldsTwice, "two replicas", r"worker \d holds a replica of partition 0/\d+ already"),
        (Spends, "one full worker", "it suggests 9 moves, more than maxMoves of a round, 1"),
        (SpendsBytes, "one full worker", "more bytes of state than maxBytesPerSecond, 500, allows by now"),
        (SaysNothingOfCost, "one full worker", "its cost is 0 bytes, and the state of the replica has 1000"),
        (Dice, "one full worker", "another one of its class suggests other moves for the same loads"),
        (Invents, "even", "worker 0 has no replica of partition 7/0"),
        (Changes, "even", "it has changed the loads, which others read, too"),
        (Twice, "one full worker", r"worker \d holds a replica of partition 0/0 already"),
        (Raises, "even", r"round 0: suggest\(\) raised KeyError: 3"),
        (GivesAList, "even", r"suggest\(\) must return a Suggestion of Moves, got \[\]"),
    ],
)
def test_a_mistake_is_told(kind: type[Policy], situation: str, said: str) -> None:
    loads = SITUATIONS[situation].loads()
    with pytest.raises(ContractBroken, match=said):
        check_policy(
            kind,
            loads,
            PolicySettings(
                max_moves=2 if kind is Twice else 1, max_bytes_per_s=500 if kind is SpendsBytes else 1 << 20
            ),
        )


def test_a_policy_without_these_mistakes_passes() -> None:
    check_policy(Right, LOADS)


def test_calls_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match=r"a subclass of Policy, or one of .*drain, .*even, .*pairing.*; got 'paring'"):
        check_policy("paring", LOADS)
    with pytest.raises(UsageError, match="Loads with at least one worker"):
        check_policy("even", [])


@pytest.fixture(autouse=True, scope="module")
def _registry() -> Iterator[None]:
    """Forget the policies of this file, as users may not choose them."""
    mine = {name for name, kind in REGISTRY.items() if kind.__module__ == __name__}
    yield
    for name in mine:
        del REGISTRY[name]
