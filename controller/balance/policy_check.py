"""A trial of a policy of load balance, in a small model of a cluster (``flux.testing.check_policy``).

Every replica keeps its load, wherever it goes. A move takes some rounds, like a real one: the replica stays where it is, then
its target has one beside it, then the first is gone. The new one is listed with the load and the state of the first, as the
controller lists a replica that has reported none (``LoadBook.make``). In one trial the controller refuses every third move, in
another a worker is lost. Each suggestion is judged by the loads that the policy has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from controller.balance.load import Loads, Move, ReplicaLoad, Suggestion
from controller.balance.policies import REGISTRY, Policy, PolicySettings
from controller.balance.policies.planned_moves import BURST_S, PlannedPlacement
from flux.errors import ContractBroken, UsageError
from partitioning.ids import PartitionKey

#: Seconds between two rounds, and the time of the first one.
ROUND_S, BEGIN_S = 1.0, 100.0
#: Rounds after its suggestion in which the target of a move has a replica, and in which the source has none any more.
ARRIVES, LEAVES = 1, 2
#: A policy is at rest when it has suggested nothing for this time beyond its cool-down.
REST_S = 15.0
#: Rounds for a policy to come to rest: some for each replica, and some more.
ROUNDS_PER_REPLICA, ROUNDS = 4, 60
#: In the trial with a loss, a worker is lost in this round.
LOSS = 4
#: In the trial with refusals, the controller refuses each move of this number.
REFUSED = 3


def check_policy(
    policy: str | type[Policy], loads: Loads | Sequence[Loads], settings: PolicySettings | None = None
) -> None:
    """Ask a policy round by round, carry out its moves in a model, and raise ContractBroken with the first mistake, in words.

    policy    the class, or the name that was given to it
    loads     loads to begin with: one situation, or several; each is tried by itself
    settings  limits of a round and of bytes; by default those of a query

    Found are moves of replicas that are not there, or under way; moves to workers that are lost, leaving, holders already, or too
    close to other replicas; more moves or bytes than the limits allow; a wrong ``cost``; loads that are changed; suggestions that
    differ for the same loads; and a policy that never comes to rest though the loads stay as they are."""
    kind = REGISTRY.get(policy) if isinstance(policy, str) else policy
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise UsageError(
            f"check_policy wants a subclass of Policy, or one of {', '.join(sorted(REGISTRY))}; got {policy!r}"
        )
    situations = [loads] if isinstance(loads, Loads) else list(loads)
    if not situations or not all(isinstance(each, Loads) and each.workers for each in situations):
        raise UsageError("check_policy wants Loads with at least one worker, or several of them")
    limits = settings or PolicySettings()
    for number, situation in enumerate(situations):
        of = "" if len(situations) == 1 else f" of loads {number}"
        _ClusterModel(kind, situation, limits, f"round {{}}{of}").run()
        _ClusterModel(kind, situation, limits, f"round {{}}{of}, where some moves are refused", refuses=True).run()
        if len(situation.workers) > 1:
            _ClusterModel(kind, situation, limits, f"round {{}}{of}, where a worker is lost", loses=True).run()
        _whole_plan(kind, situation, limits, f"call {{}} for a whole plan{of}")


@dataclass
class _MoveTransit:
    """A move that is carried out, and the rounds since it was suggested."""

    move: Move
    rounds: int = 0


class _ClusterModel:
    """Rounds of one policy in one model, until it is at rest."""

    def __init__(
        self,
        kind: type[Policy],
        loads: Loads,
        settings: PolicySettings,
        when: str,
        refuses: bool = False,
        loses: bool = False,
    ) -> None:
        self._settings, self._refuses, self._loses, self._when = settings, refuses, loses, when
        self._policy = _JudgedPolicy(kind, settings)
        self._workers = dict(loads.workers)
        self._replicas = list(loads.replicas)
        self._other = {w: about.busy - loads.of_workers()[w] for w, about in loads.workers.items()}
        self._seconds = loads.seconds
        self._transits: dict[PartitionKey, _MoveTransit] = {}
        self._lacking: set[PartitionKey] = set()
        self._suggested = 0

    def run(self) -> None:
        rest = REST_S + (self._settings.cool_down_s if math.isfinite(self._settings.cool_down_s) else 0.0)
        quiet_s, last = 0.0, None
        for number in range(ROUNDS + ROUNDS_PER_REPLICA * len(self._replicas)):
            if self._loses and number == LOSS:
                self._lose()
            moves = self._policy.ask(self._loads(), BEGIN_S + ROUND_S * number, self._when.format(number))
            self._pass_round()
            for move in moves:
                self._begin(move)
                last = move
            quiet_s = 0.0 if moves else quiet_s + ROUND_S
            if quiet_s > rest:
                return
        assert last is not None
        raise self._policy.broken(
            self._when.format(number),
            f"it never comes to rest, though loads stay as they are; its last move of {self._suggested} was {_said(last)}",
        )

    def _loads(self) -> Loads:
        busy = dict.fromkeys(self._workers, 0.0)
        for replica in self._replicas:
            busy[replica.worker] += replica.busy
        workers = {w: replace(about, busy=max(self._other[w] + busy[w], 0.0)) for w, about in self._workers.items()}
        changing = self._transits.keys() | self._lacking
        replicas = [
            replace(each, movable=False) if PartitionKey(each.stage, each.partition) in changing else each
            for each in self._replicas
        ]
        return Loads(workers, replicas, self._seconds)

    def _begin(self, move: Move) -> None:
        self._suggested += 1
        if not (self._refuses and self._suggested % REFUSED == 0):
            self._transits[move.key] = _MoveTransit(move)

    def _pass_round(self) -> None:
        """Let moves go on."""
        for key, transit in list(self._transits.items()):
            move, transit.rounds = transit.move, transit.rounds + 1
            here = next(each for each in self._replicas if (each.stage, each.partition, each.worker) == move.moved)
            if transit.rounds == ARRIVES:
                self._replicas.append(replace(here, worker=move.target, primary=False, queued=0))
            elif transit.rounds == LEAVES:
                there = next(
                    each for each in self._replicas if (*key, move.target) == (each.stage, each.partition, each.worker)
                )
                self._replicas.remove(here)
                self._replicas[self._replicas.index(there)] = replace(here, worker=move.target)
                del self._transits[key]

    def _lose(self) -> None:
        """Lose the worker that policies like best as a target: the one with the least load."""
        busy = self._loads().of_workers()
        lost = min(busy, key=lambda worker: (busy[worker], worker))
        del self._workers[lost]
        gone = [each for each in self._replicas if each.worker == lost]
        self._replicas = [each for each in self._replicas if each.worker != lost]
        #: Partitions with fewer replicas than before are not movable: a repair that this model never makes is due.
        self._lacking = {PartitionKey(each.stage, each.partition) for each in gone}
        for key, transit in list(self._transits.items()):
            if lost in (transit.move.from_worker, transit.move.target):
                self._lacking.add(key)
                del self._transits[key]


class _JudgedPolicy:
    """A policy, and another one of its class that must suggest the same. Judges every suggestion."""

    def __init__(self, kind: type[Policy], settings: PolicySettings) -> None:
        self._name, self._settings = kind.name, settings
        self._policy, self._twin = kind(settings), kind(settings)
        self._tokens = settings.max_bytes_per_s * BURST_S
        self._at: float | None = None

    def broken(self, when: str, text: str) -> ContractBroken:
        return ContractBroken(f"policy {self._name}, {when}: {text}")

    def ask(self, loads: Loads, now: float, when: str) -> list[Move]:
        before, other = (Loads(dict(loads.workers), list(loads.replicas), loads.seconds) for _ in range(2))
        found, again = self._suggested(self._policy, loads, now, when), self._suggested(self._twin, other, now, when)
        if loads != before:
            raise self.broken(when, "it has changed the loads, which others read, too")
        if found.moves != again.moves:
            raise self.broken(
                when,
                "another one of its class suggests other moves for the same loads: "
                f"[{', '.join(map(_said, found.moves))}] and [{', '.join(map(_said, again.moves))}]",
            )
        for text in self._mistakes(found.moves, loads, now):
            raise self.broken(when, text)
        return found.moves

    def _suggested(self, policy: Policy, loads: Loads, now: float, when: str) -> Suggestion:
        try:
            found: Any = policy.suggest(loads, now)
        except Exception as error:
            raise self.broken(when, f"suggest() raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Suggestion) or not all(isinstance(move, Move) for move in found.moves):
            raise self.broken(when, f"suggest() must return a Suggestion of Moves, got {found!r:.200}")
        return found

    def _mistakes(self, moves: list[Move], loads: Loads, now: float) -> Iterator[str]:
        """Yield the mistakes of a suggestion."""
        if len(moves) > self._settings.max_moves:
            yield f"it suggests {len(moves)} moves, more than maxMoves of a round, {self._settings.max_moves}"
        at = {(each.stage, each.partition, each.worker): each for each in loads.replicas}
        places = PlannedPlacement.of(loads, self._settings.same_executor)
        seen: set[PartitionKey] = set()
        for move in moves:
            replica, of = at.get(move.moved), f"partition {move.stage}/{move.partition}"
            if replica is None:
                yield f"{_said(move)}: worker {move.from_worker} has no replica of {of}"
                return
            yield from self._mistakes_of_target(move, replica, loads, places)
            if move.key in seen:
                yield f"{_said(move)}: {of} has another move in the same suggestion"
            seen.add(move.key)
            places.move(*move.key, move.from_worker, move.target)
        yield from self._overdraft(moves, now)

    def _mistakes_of_target(
        self, move: Move, replica: ReplicaLoad, loads: Loads, places: PlannedPlacement
    ) -> Iterator[str]:
        target, said, of = loads.workers.get(move.target), _said(move), f"partition {move.stage}/{move.partition}"
        if not replica.movable:
            yield f"{said}: {of} is not movable, something is under way for it or it lacks replicas"
        if target is None:
            yield f"{said}: worker {move.target} is not there; it may have been lost"
            return
        if target.leaving:
            yield f"{said}: worker {move.target} is leaving and gets no more replicas"
        if not places.is_free(*move.key, move.target):
            yield f"{said}: worker {move.target} holds a replica of {of} already"
        if not places.may_take(*move.key, move.from_worker, move.target):
            yield f"{said}: worker {move.target} is on one executor with another replica of {of}"
        source = loads.workers.get(move.from_worker)
        if not (source and source.leaving) and not places.keeps_apart(*move.key, move.from_worker, move.target):
            yield f"{said}: worker {move.target} is closer to other replicas of {of} than worker {move.from_worker}"
        if move.cost != replica.state_bytes:
            yield f"{said}: its cost is {move.cost} bytes, and the state of the replica has {replica.state_bytes}"

    def _overdraft(self, moves: list[Move], now: float) -> Iterator[str]:
        """Judge bytes as ``Budget`` does: a move may begin while the bucket is not empty, however large it is."""
        rate = self._settings.max_bytes_per_s
        if self._at is not None:
            self._tokens = min(self._tokens + rate * (now - self._at), rate * BURST_S)
        self._at = now
        for move in moves:
            if self._tokens <= 0:
                yield f"{_said(move)}: more bytes of state than maxBytesPerSecond, {rate:g}, allows by now"
                return
            self._tokens -= move.cost


def _whole_plan(kind: type[Policy], loads: Loads, settings: PolicySettings, when: str) -> None:
    """Ask as ``flux rebalance`` does: without limits, again and again, with all moves made in between."""
    policy = _JudgedPolicy(kind, settings.at_once())
    moved: set[Any] = set()
    for number in range(len(loads.replicas) + 2):
        new = [move for move in policy.ask(loads, BEGIN_S, when.format(number)) if move.moved not in moved]
        if not new:
            return
        moved |= {move.moved for move in new}
        targets = {move.moved: move.target for move in new}
        replicas = [
            replace(each, worker=targets.get((each.stage, each.partition, each.worker), each.worker))  # type: ignore[call-overload]
            for each in loads.replicas
        ]
        loads = replace(loads, replicas=replicas)
    raise policy.broken(when.format(number), "the plan never ends")


def _said(move: Move) -> str:
    return f"{move.stage}/{move.partition} from worker {move.from_worker} to {move.target}"
