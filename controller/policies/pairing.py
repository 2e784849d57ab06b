"""The policy of Flux (Shah, Hellerstein, Chandrasekaran, Franklin, ICDE 2003, section 4): pair the busiest worker with
the idlest, the second with the second, and move one partition per pair if the pair has enough to gain.

The gain is by how much the higher of the two loads falls; the rest of the cluster has no part in it, or one overloaded
worker of a hundred would look like nothing. The threshold is held against what the pair can gain by and by, because
one of a hundred partitions alone gains next to nothing. Where the idlest worker can take nothing that the busiest has, the next
ones are tried. Against oscillation: loads are smoothed, a difference must last for some rounds, moves under way count
as made, and what has moved cools down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np

from controller.load import Loads, Move, Suggestion
from controller.policies.base import Policy, PolicySettings
from controller.policies.budget import Budget
from controller.policies.cooling import Cooling
from controller.policies.demand import Demand, Meter, replica_key
from controller.policies.places import Places
from controller.policies.under_way import UnderWay

#: A thread has no more to give: whoever would be beyond this is not a helper.
FULL = 1.0
#: Below this load gains are judged as if it were this high: idle workers differ by much that matters to no one.
LIGHT = 0.25
#: How many of the idlest workers a busy one tries where its partner can take nothing. More would be slow with many
#: workers, and to be refused by more than a few (they hold another copy, or share an executor with one) is rare.
PARTNERS_TRIED = 8
#: Pairs looked at closely in one round: a limit on the time that it takes if hardly anything may move.
PAIRS_TRIED = 1000
#: Moves this close to the best gain are as good, and the one with the least state to copy is taken.
AS_GOOD = 0.8
#: A partition that takes less than this of a worker is not worth a note.
HEAVY = 0.5
#: Rounding is no gain.
NOTHING = 1e-9


class Pairing(Policy, name="pairing"):
    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._meter = Meter(settings.smooth_s)
        self._budget = Budget(settings)
        self._cooling = Cooling(settings.cool_down_s)
        self._under_way = UnderWay()
        self._expected: dict[tuple[int, int], float] = {}  # partition under way -> its load on the target
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
            self._expected[move.stage, move.partition] = look.expected[move.stage, move.partition]
        return Suggestion(moves, look.notes())

    def _count_in(self, loads: Loads, demand: Demand) -> None:
        """Change the demand to what it will be when the moves under way are done."""
        done = self._under_way.follow(loads)
        moving = self._under_way.all()
        if done or moving:
            places = {key: place for place, key in enumerate(demand.key.tolist())}
        for move, arrived in [*((move, True) for move in done), *moving]:
            load = self._expected[move.stage, move.partition]
            source = places.get(replica_key(move.stage, move.partition, move.source))
            target = places.get(replica_key(move.stage, move.partition, move.target))
            if target is not None:
                # What it has done so far was to catch up.
                demand.load[target] = max(demand.load[target], load)
                demand.steady[target] = max(demand.steady[target], load)
            if source is not None:
                # While the target has no copy, the one on the source stands for it.
                demand.load[source] = 0.0 if arrived else load
                demand.worker[source] = demand.place_of(move.target)
        self._expected = {key: self._expected[key] for key in ((m.stage, m.partition) for m, _ in moving)}


class _Round:
    """One look at the loads. Workers go by their place in ``demand.workers``, replicas by theirs in the loads."""

    def __init__(
        self, loads: Loads, demand: Demand, settings: PolicySettings, cooling: Cooling, rounds: list[dict[int, float]]
    ) -> None:
        self.expected: dict[tuple[int, int], float] = {}  # load on the target of each move
        self._loads, self._demand, self._settings = loads, demand, settings
        self._cooling, self._rounds = cooling, rounds
        self._load = demand.per_worker(demand.load)
        known = np.flatnonzero(demand.worker >= 0)
        self._by_worker = known[np.argsort(demand.worker[known], kind="stable")]
        self._starts = np.searchsorted(demand.worker[self._by_worker], np.arange(len(demand.workers) + 1))
        self._hot = self._find_hot(known)
        self._places: Places | None = None

    def _find_hot(self, known: np.ndarray) -> np.ndarray:
        """Replicas that alone take more than a worker's fair share, on a worker of average pace."""
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
        """Of partitions that make up most of their worker's load and cannot be helped. Without figures, so that the same
        note is the same text in every round."""
        load = self._demand.steady
        hot = [p for p in np.flatnonzero(self._hot).tolist() if load[p] > self._load[self._demand.worker[p]] / 2]
        replicas = [self._loads.replicas[place] for place in hot]
        return [
            f"partition {stage}/{partition} alone takes more than a worker's fair share: no move helps, and more "
            "partitions do only if it is not one key"
            for stage, partition in sorted({(replica.stage, replica.partition) for replica in replicas})
        ]

    # ---- pairs

    def moves(self) -> Iterator[Move]:
        """One for each pair at most, from the busiest down; no worker and no partition is in two of them."""
        used: set[int] = set()
        moving: set[tuple[int, int]] = set()
        for high, low in islice(self._pairs(used), PAIRS_TRIED):
            place = self._best(high, low, moving)
            if place is not None:
                used |= {high, low}
                move = self._move(place, high, low)
                moving.add((move.stage, move.partition))
                yield move

    def _pairs(self, used: set[int]) -> Iterator[tuple[int, int]]:
        """The busiest that may give with the idlest, then the next two. A pair that is not to be keeps no one from the
        others: the idlest worker is there for the second busiest, if the busiest has nothing for it."""
        order = self._order()
        for high in reversed(order):
            if not self._cooling.may_give(int(self._demand.workers[high])):
                continue
            for low in islice((place for place in order if place not in used), PARTNERS_TRIED):
                if high in used or self._load[low] >= self._load[high]:
                    break
                if self._comparable(high, low):
                    yield high, low

    def _order(self) -> list[int]:
        """The idlest first. Of those that are equally busy, as all are who are saturated, the longer queue is worse."""
        demand = self._demand
        queued = demand.per_worker(demand.queued)
        order = np.lexsort((demand.workers, queued, self._load)).tolist()
        return [place for place in order if not self._loads.workers[int(demand.workers[place])].leaving]

    def _comparable(self, high: int, low: int) -> bool:
        """Whether there may be a gain, and has been for some rounds."""
        least = self._least_gain(high)
        if self._load[high] - self._load[low] <= least:
            return False
        busy, idle = int(self._demand.workers[high]), int(self._demand.workers[low])
        # As large in each of them: what one odd round has left in the average would go on for several.
        lasted = all(r[busy] - r[idle] > least for r in self._rounds if busy in r and idle in r)
        return lasted and self._cooling.may_take(idle)

    def _least_gain(self, high: int) -> float:
        return max(self._settings.threshold * min(max(self._load[high], LIGHT), FULL), NOTHING)

    # ---- the partition of a pair

    def _best(self, high: int, low: int, moving: set[tuple[int, int]]) -> int | None:
        """The replica to move from ``high`` to ``low`` now, None: the pair has too little to gain."""
        demand = self._demand
        here = self._by_worker[self._starts[high] : self._starts[high + 1]]
        there = demand.steady[here] * demand.pace[low] / demand.pace[high]
        gain = self._load[high] - np.maximum(self._load[high] - demand.load[here], self._load[low] + there)
        good = (gain > NOTHING) & (self._load[low] + there <= FULL)
        # A hot one would be much the same trouble there: the others leave it, rather.
        hot = self._hot[here] & (demand.pace[low] >= demand.pace[high])
        best_first = np.argsort(-gain, kind="stable")
        here, gain, good, hot = here[best_first], gain[best_first], good[best_first], hot[best_first]
        fit = self._fit_together(here[good & ~hot], gain[good & ~hot], high, low, moving)
        if not fit:
            hot &= good & (gain > self._least_gain(high))
            fit = self._fit(here[hot], gain[hot], high, low, moving)
        return min((place for place, gained in fit if gained >= AS_GOOD * fit[0][1]), key=self._costs, default=None)

    def _fit_together(
        self, places: np.ndarray, gain: np.ndarray, high: int, low: int, moving: set[tuple[int, int]]
    ) -> list[tuple[int, float]]:
        """Those that may go, if all of them together gain enough. Whether each may go is asked last: it takes longest."""
        least = self._least_gain(high)
        if self._gain_of_all(places.tolist(), high, low) <= least:
            return []
        fit = self._fit(places, gain, high, low, moving)
        return fit if self._gain_of_all([place for place, _ in fit], high, low) > least else []

    def _fit(
        self, places: np.ndarray, gain: np.ndarray, high: int, low: int, moving: set[tuple[int, int]]
    ) -> list[tuple[int, float]]:
        """Those that may go, with their gains."""
        useful = zip(places.tolist(), gain.tolist(), strict=True)
        return [(place, gained) for place, gained in useful if self._may_go(place, high, low, moving)]

    def _gain_of_all(self, places: list[int], high: int, low: int) -> float:
        """By how much the higher load falls if all of these moved that help, one after the other: one of many small
        partitions gains next to nothing, and yet the pair may have much to gain."""
        higher, lower = self._load[high], self._load[low]
        ratio = self._demand.pace[low] / self._demand.pace[high]
        loads = zip(self._demand.load[places].tolist(), self._demand.steady[places].tolist(), strict=True)
        for here, there in loads:
            if max(higher - here, lower + there * ratio) < max(higher, lower):
                higher, lower = higher - here, lower + there * ratio
        return float(self._load[high] - max(higher, lower))

    def _may_go(self, place: int, high: int, low: int, moving: set[tuple[int, int]]) -> bool:
        replica = self._loads.replicas[place]
        key = replica.stage, replica.partition
        # A copy that stands for one to come on this worker is not there yet.
        settled = replica.movable and replica.worker == self._demand.workers[high]
        if not settled or key in moving or self._cooling.stays(*key):
            return False
        if self._places is None:
            self._places = Places.of(self._loads)
        return self._places.keeps_apart(*key, replica.worker, int(self._demand.workers[low]))

    def _costs(self, place: int) -> tuple[int, bool]:
        """A secondary goes before a primary that costs the same: nobody has to take over."""
        replica = self._loads.replicas[place]
        return replica.state_bytes, replica.primary

    def _move(self, place: int, high: int, low: int) -> Move:
        replica, demand = self._loads.replicas[place], self._demand
        here = float(demand.load[place])
        there = float(demand.steady[place] * demand.pace[low] / demand.pace[high])
        self.expected[replica.stage, replica.partition] = there
        gain = float(self._load[high] - max(self._load[high] - here, self._load[low] + there))
        target = int(demand.workers[low])
        return Move(replica.stage, replica.partition, replica.worker, target, gain, replica.state_bytes)
