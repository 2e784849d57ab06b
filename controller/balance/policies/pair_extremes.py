"""Pairing, the policy of Flux (design: pairing; ICDE 2003, section 4), and the cool-down of partitions that have moved
(design: cool-down)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from controller.balance.load import Loads, Move, Suggestion
from controller.balance.policies.base import Policy, PolicySettings
from controller.balance.policies.demand import Demand, DemandMeter, replica_key
from controller.balance.policies.planned_moves import Budget, MovesUnderWay, MoveUnderWay, PlannedPlacement
from partitioning.ids import PartitionKey


class Cooling:
    """The partitions and workers that cool down: a partition that has moved stays for a while, and no worker takes and gives
    in turn.

    A worker that has given a partition away may give another one at once, because an overloaded worker has to shed load
    quickly."""

    def __init__(self, cool_down_s: float) -> None:
        self._cool_down_s = cool_down_s
        self._until: dict[Hashable, float] = {}

    def moved(self, move: Move, now: float) -> None:
        until = now + self._cool_down_s
        for what in (("partition", move.stage, move.partition), ("gave", move.from_worker), ("took", move.target)):
            self._until[what] = until

    def forget(self, now: float) -> None:
        """Forget the moves whose cool-down is over."""
        self._until = {what: until for what, until in self._until.items() if until > now}

    def stays(self, stage: int, partition: int) -> bool:
        return ("partition", stage, partition) in self._until

    def may_give(self, worker: int) -> bool:
        return ("took", worker) not in self._until

    def may_take(self, worker: int) -> bool:
        return ("gave", worker) not in self._until


#: The most that a thread can do. No worker is loaded beyond this.
FULL = 1.0
#: A lower load is judged as if it were this high, because large differences between idle workers do not matter.
LIGHT = 0.25
#: Idle workers that a busy one tries if its partner may take nothing. More would be slow with many workers,
#: and more than a few refusals (a worker holds another replica, or shares an executor with one) are rare.
PARTNERS_TRIED = 8
#: Pairs examined in one round: a limit on its time if hardly any partition may move.
PAIRS_TRIED = 1000
#: Moves whose gain is at least this share of the best are equally good. The one with the least state is
#: chosen.
AS_GOOD = 0.8
#: A partition that takes less than this share of a worker is not worth a note.
HEAVY = 0.5
#: A smaller gain is a rounding error.
NOTHING = 1e-9


class Pair(NamedTuple):
    """Two workers, by their indices in ``Demand.workers``: the busier one and the idler one."""

    high: int
    low: int


class Candidate(NamedTuple):
    """A replica that may move, by its index in the loads, and the gain of its move."""

    place: int
    gain: float


class Cost(NamedTuple):
    """The cost of a move. The cheapest sorts first."""

    state_bytes: int
    primary: bool


class PairingPolicy(Policy, name="pairing"):
    """Policy that pairs the busiest worker with the idlest, the second busiest with the second idlest, and moves one partition
    per pair if the pair has enough to gain.

    The gain is the fall of the higher of the two loads. The rest of the cluster does not count: averaged over a hundred
    workers, one overloaded worker would look like nothing. The threshold is compared with the gain of all moves that the
    pair could make in the end, because one of a hundred partitions alone gains next to nothing. If the idlest worker may
    take no partition of the busiest, the next idlest ones are tried. Against oscillation: loads are smoothed, a difference
    must last for some rounds, moves under way count as made, and a partition that has moved cools down."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._meter = DemandMeter(settings.smooth_s)
        self._budget = Budget(settings)
        self._cooling = Cooling(settings.cool_down_s)
        self._under_way = MovesUnderWay()
        self._expected: dict[PartitionKey, float] = {}  # load on the target, for each partition under way
        self._rounds: deque[dict[int, float]] = deque(maxlen=settings.steady_rounds)

    def suggest(self, loads: Loads, now: float) -> Suggestion:
        if loads.seconds <= 0:
            return Suggestion()
        demand = self._meter.look(loads, now)
        latest = demand.per_worker(demand.latest)
        self._rounds.append(dict(zip(demand.workers.tolist(), latest.tolist(), strict=True)))
        self._count_in(loads, demand)
        self._cooling.forget(now)
        look = _Round(loads, demand, self.settings, self._cooling, list(self._rounds))
        moves: list[Move] = []
        if len(self._rounds) == self.settings.steady_rounds:
            moves = self._budget.take(look.moves(), now)
        for move in moves:
            self._cooling.moved(move, now)
            self._under_way.begin(move)
            self._expected[move.key] = look.expected[move.key]
        return Suggestion(moves, look.notes())

    def _count_in(self, loads: Loads, demand: Demand) -> None:
        """Change the demand to the demand after the moves under way."""
        done = self._under_way.follow(loads)
        moving = self._under_way.all()
        if done or moving:
            places = {key: place for place, key in enumerate(demand.key.tolist())}
        for move, arrived in [*(MoveUnderWay(move, True) for move in done), *moving]:
            load = self._expected[move.key]
            source = places.get(replica_key(move.stage, move.partition, move.from_worker))
            target = places.get(replica_key(move.stage, move.partition, move.target))
            if target is not None:
                # The new replica has only caught up until now, which says nothing about its load.
                demand.load[target] = max(demand.load[target], load)
                demand.steady[target] = max(demand.steady[target], load)
            if source is not None:
                # Until the target has a replica, the replica on the source stands for it.
                demand.load[source] = 0.0 if arrived else load
                demand.worker[source] = demand.place_of(move.target)
        self._expected = {move.key: self._expected[move.key] for move, _ in moving}


class _Round:
    """One look at the loads. Workers are named by their index in ``demand.workers``, replicas by their index in the loads."""

    def __init__(
        self, loads: Loads, demand: Demand, settings: PolicySettings, cooling: Cooling, rounds: list[dict[int, float]]
    ) -> None:
        self.expected: dict[PartitionKey, float] = {}  # load on the target of each move
        self._loads, self._demand, self._settings = loads, demand, settings
        self._cooling, self._rounds = cooling, rounds
        self._load = demand.per_worker(demand.load)
        known = np.flatnonzero(demand.worker >= 0)
        self._by_worker = known[np.argsort(demand.worker[known], kind="stable")]
        self._starts = np.searchsorted(demand.worker[self._by_worker], np.arange(len(demand.workers) + 1))
        self._hot = self._find_hot(known)
        self._places: PlannedPlacement | None = None

    def _find_hot(self, known: np.ndarray) -> np.ndarray:
        """Find the replicas that alone take more than a worker's fair share, on a worker of average pace."""
        demand = self._demand
        fair = (
            (demand.per_worker(demand.steady) / demand.pace).sum() / (1 / demand.pace).sum()
            if len(demand.workers)
            else 0.0
        )
        alone = np.zeros(len(demand.steady))
        alone[known] = demand.steady[known] / demand.pace[demand.worker[known]]
        return (alone > fair * (1 + self._settings.threshold)) & (alone >= HEAVY)

    def notes(self) -> list[str]:
        """Describe partitions that make up most of their worker's load, which no move can change. The notes have no
        figures, so that their text is the same in every round."""
        load = self._demand.steady
        hot = [p for p in np.flatnonzero(self._hot).tolist() if load[p] > self._load[self._demand.worker[p]] / 2]
        replicas = [self._loads.replicas[place] for place in hot]
        return [
            f"partition {self._loads.called(*key)} alone takes more than a worker's fair share: no move helps, and more "
            "partitions do only if it is not one key"
            for key in sorted({PartitionKey(replica.stage, replica.partition) for replica in replicas})
        ]

    # ---- pairs

    def moves(self) -> Iterator[Move]:
        """Yield at most one move for each pair, the busiest pair first. No worker and no partition is in two moves."""
        used: set[int] = set()
        moving: set[PartitionKey] = set()
        for high, low in islice(self._pairs(used), PAIRS_TRIED):
            place = self._best(high, low, moving)
            if place is not None:
                used |= {high, low}
                move = self._move(place, high, low)
                moving.add(move.key)
                yield move

    def _pairs(self, used: set[int]) -> Iterator[Pair]:
        """Pair the busiest worker that may give with the idlest, then the next two. If a pair finds no move, both stay
        available: the idlest worker is then tried with the second busiest."""
        ranked = self._ranked()
        for high in reversed(ranked):
            if not self._cooling.may_give(int(self._demand.workers[high])):
                continue
            for low in islice((place for place in ranked if place not in used), PARTNERS_TRIED):
                if high in used or self._load[low] >= self._load[high]:
                    break
                if self._comparable(high, low):
                    yield Pair(high, low)

    def _ranked(self) -> list[int]:
        """Return the workers that stay, the idlest first. Equally busy workers, as all saturated ones are, are sorted by their
        queues, the longest last."""
        demand = self._demand
        queued = demand.per_worker(demand.queued)
        ranked = np.lexsort((demand.workers, queued, self._load)).tolist()
        return [place for place in ranked if not self._loads.workers[int(demand.workers[place])].leaving]

    def _comparable(self, high: int, low: int) -> bool:
        """Tell whether the pair may have a gain, and has had one for some rounds."""
        least = self._least_gain(high)
        if self._load[high] - self._load[low] <= least:
            return False
        busy, idle = int(self._demand.workers[high]), int(self._demand.workers[low])
        # Every round must show the difference: in the average, one odd round would last for several.
        lasted = all(r[busy] - r[idle] > least for r in self._rounds if busy in r and idle in r)
        return lasted and self._cooling.may_take(idle)

    def _least_gain(self, high: int) -> float:
        gain: float = max(self._settings.threshold * min(max(self._load[high], LIGHT), FULL), NOTHING)
        return gain

    # ---- the partition of a pair

    def _best(self, high: int, low: int, moving: set[PartitionKey]) -> int | None:
        """Choose the replica to move from ``high`` to ``low`` now; None: the pair has too little to gain."""
        demand = self._demand
        here = self._by_worker[self._starts[high] : self._starts[high + 1]]
        there = self._steady_on(low, high, here)
        gain = self._load[high] - np.maximum(self._load[high] - demand.load[here], self._load[low] + there)
        good = (gain > NOTHING) & (self._load[low] + there <= FULL)
        # A hot replica would overload the other worker as much, so the other replicas move away from it if they can.
        hot = self._hot[here] & (demand.pace[low] >= demand.pace[high])
        best_first = np.argsort(-gain, kind="stable")
        here, gain, good, hot = here[best_first], gain[best_first], good[best_first], hot[best_first]
        fit = self._fit_together(here[good & ~hot], gain[good & ~hot], high, low, moving)
        if not fit:
            hot &= good & (gain > self._least_gain(high))
            fit = self._fit(here[hot], gain[hot], high, low, moving)
        good_enough = AS_GOOD * fit[0].gain if fit else 0.0
        return min((place for place, gained in fit if gained >= good_enough), key=self._cost, default=None)

    def _fit_together(
        self, places: np.ndarray, gain: np.ndarray, high: int, low: int, moving: set[PartitionKey]
    ) -> list[Candidate]:
        """Return the replicas that may go, if all of them together gain enough. Whether each may go is checked last, because it
        takes longest."""
        least = self._least_gain(high)
        if self._gain_of_all(places.tolist(), high, low) <= least:
            return []
        fit = self._fit(places, gain, high, low, moving)
        return fit if self._gain_of_all([place for place, _ in fit], high, low) > least else []

    def _fit(
        self, places: np.ndarray, gain: np.ndarray, high: int, low: int, moving: set[PartitionKey]
    ) -> list[Candidate]:
        """Return the replicas that may go, with their gains."""
        useful = zip(places.tolist(), gain.tolist(), strict=True)
        return [Candidate(place, gained) for place, gained in useful if self._may_go(place, high, low, moving)]

    def _gain_of_all(self, places: list[int], high: int, low: int) -> float:
        """Compute the fall of the higher load if all useful ones of these replicas moved, one after the other. One of many small
        partitions gains next to nothing alone, although the pair may have much to gain."""
        higher, lower = self._load[high], self._load[low]
        ratio = self._demand.pace[low] / self._demand.pace[high]  # as in ``_steady_on``
        loads = zip(self._demand.load[places].tolist(), self._demand.steady[places].tolist(), strict=True)
        for here, there in loads:
            if max(higher - here, lower + there * ratio) < max(higher, lower):
                higher, lower = higher - here, lower + there * ratio
        return float(self._load[high] - max(higher, lower))

    def _may_go(self, place: int, high: int, low: int, moving: set[PartitionKey]) -> bool:
        replica = self._loads.replicas[place]
        key = PartitionKey(replica.stage, replica.partition)
        # The replica that stands for a move under way to this worker is not here yet.
        settled = replica.movable and replica.worker == self._demand.workers[high]
        if not settled or key in moving or self._cooling.stays(*key):
            return False
        if self._places is None:
            self._places = PlannedPlacement.of(self._loads)
        return self._places.keeps_apart(*key, replica.worker, int(self._demand.workers[low]))

    def _cost(self, place: int) -> Cost:
        """Rank by the size of the state; of equal states a secondary before a primary, because it needs no take-over."""
        replica = self._loads.replicas[place]
        return Cost(replica.state_bytes, replica.primary)

    def _steady_on(self, low: int, high: int, places: Any) -> Any:
        """Compute the demand that replicas of worker ``high`` would have on ``low``, at its pace. The backlog does not count
        there, though it does in the demand on ``high`` (``Demand.load``)."""
        demand = self._demand
        return demand.steady[places] * demand.pace[low] / demand.pace[high]

    def _move(self, place: int, high: int, low: int) -> Move:
        """Return the move of a replica, with the gain that ``_best`` has seen, and note the demand expected on ``low``."""
        replica, demand = self._loads.replicas[place], self._demand
        here = float(demand.load[place])
        there = float(self._steady_on(low, high, place))
        self.expected[PartitionKey(replica.stage, replica.partition)] = there
        gain = float(self._load[high] - max(self._load[high] - here, self._load[low] + there))
        target = int(demand.workers[low])
        return Move(replica.stage, replica.partition, replica.worker, target, gain, replica.state_bytes)
