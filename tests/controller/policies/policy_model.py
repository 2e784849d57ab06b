"""A small model of a cluster for policies: partitions cost time, workers have a pace, load follows the copies.

Every copy of a partition takes ``cost`` seconds per second on a worker of pace 1. A worker does no more than one second
per second; excess work waits. With ``back_pressure`` the slowest worker sets the rate for all, as full logs do, and
its queue stands at its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from controller.balance.load import Loads, Move, ReplicaLoad, Suggestion, WorkerLoad
from controller.balance.policies import Policy, PolicySettings, make

Partition = tuple[int, int]
SLICES_PER_S = 100.0
QUEUE_FULL = 50.0
ROWS_PER_S_OF_A_CORE = 1e6


class Cluster:
    def __init__(self, workers: int, back_pressure: bool = False, executors: dict[int, str] | None = None) -> None:
        self.pace = dict.fromkeys(range(workers), 1.0)
        self.executor = executors or {worker: f"e{worker}" for worker in range(workers)}
        self.leaving: set[int] = set()
        self.cost: dict[Partition, float] = {}
        self.holders: dict[Partition, list[int]] = {}
        self.state_bytes: dict[Partition, int] = {}
        self.queued: dict[tuple[Partition, int], float] = {}
        self.fixed: set[Partition] = set()  # something is under way for them
        self.back_pressure = back_pressure
        self.moves: list[list[Move]] = []  # per round
        self.now = 100.0

    def put(self, costs: Iterable[float], holders: Callable[[int], Sequence[int]], stage: int = 0) -> Cluster:
        for number, cost in enumerate(costs):
            self.cost[stage, number] = cost
            self.holders[stage, number] = list(holders(number))
        return self

    # ---- rounds and moves

    def asked(self) -> dict[int, float]:
        """Compute the seconds per second that the copies on each worker ask for."""
        asked = dict.fromkeys(self.pace, 0.0)
        for partition, cost in self.cost.items():
            for worker in self.holders[partition]:
                asked[worker] += cost * self.pace[worker]
        return asked

    def rates(self) -> dict[int, float]:
        """Compute, for each worker, the part of its demanded work that it gets done."""
        asked = self.asked()
        fullest = max(asked.values())
        return {worker: 1.0 / max(fullest if self.back_pressure else asked[worker], 1.0) for worker in asked}

    def loads(self, seconds: float = 1.0) -> Loads:
        rates = self.rates()
        replicas = []
        for partition, cost in self.cost.items():
            for place, worker in enumerate(self.holders[partition]):
                done = cost * rates[worker]
                replicas.append(
                    ReplicaLoad(
                        *partition,
                        worker=worker,
                        primary=place == 0,
                        busy=done * self.pace[worker],
                        queued=int(self.queued.get((partition, worker), 0)),
                        state_bytes=self.state_bytes.get(partition, 1000),
                        rows_per_s=done * ROWS_PER_S_OF_A_CORE,
                        movable=partition not in self.fixed,
                        slices_per_s=SLICES_PER_S * rates[worker],
                    )
                )
        workers = {w: WorkerLoad(w, self.executor[w], leaving=w in self.leaving) for w in self.pace}
        return Loads(workers, replicas, seconds)

    def pass_time(self, seconds: float = 1.0) -> None:
        self.now += seconds
        asked = self.asked()
        fullest = max(*asked.values(), 1.0)
        for partition in self.cost:
            for worker in self.holders[partition]:
                key = partition, worker
                room = SLICES_PER_S / max(asked[worker], 1e-9)
                if self.back_pressure:
                    self.queued[key] = QUEUE_FULL if asked[worker] == fullest else 0.0
                else:
                    self.queued[key] = max(self.queued.get(key, 0.0) + (SLICES_PER_S - room) * seconds, 0.0)

    def make(self, move: Move) -> None:
        """Move a copy, and its load with it."""
        partition = move.stage, move.partition
        holders = self.holders[partition]
        assert move.from_worker in holders
        assert move.target not in holders, "a worker holds one copy at most"
        assert move.target in self.pace
        assert move.target not in self.leaving
        assert partition not in self.fixed
        place = holders.index(move.from_worker)
        self.queued.pop((partition, move.from_worker), None)
        if place:
            holders[place] = move.target
        else:
            holders[:] = [*holders[1:], move.target]  # the next in the list takes over
        executors = [self.executor[worker] for worker in holders]
        assert len(set(executors)) == len(executors), f"copies of {partition} share an executor"

    def round(self, policy: Policy, seconds: float = 1.0) -> Suggestion:
        suggestion = policy.suggest(self.loads(), self.now)
        for move in suggestion.moves:
            self.make(move)
        self.moves.append(suggestion.moves)
        self.pass_time(seconds)
        return suggestion

    def run(self, policy: Policy, rounds: int) -> list[Move]:
        """Run this many rounds; list the moves that were made in them."""
        return [move for _ in range(rounds) for move in self.round(policy).moves]

    # ---- results

    def counts(self) -> dict[int, int]:
        counts = dict.fromkeys(self.pace, 0)
        for holders in self.holders.values():
            for worker in holders:
                counts[worker] += 1
        return counts

    def imbalance(self) -> float:
        """Compute the highest load over the mean."""
        asked = self.asked()
        return max(asked.values()) / (sum(asked.values()) / len(asked))


def policy(name: str = "pairing", **settings: float) -> Policy:
    return make(name, PolicySettings(**settings))  # type: ignore[arg-type]


def zipf(exponent: float, partitions: int, total: float) -> list[float]:
    weights = [1 / (rank + 1) ** exponent for rank in range(partitions)]
    return [total * weight / sum(weights) for weight in weights]
