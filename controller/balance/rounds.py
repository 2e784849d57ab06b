"""Rounds of load balance: which policy is asked, and the handling of its suggestions (design: even-first).

Each round asks the configured policy. After a worker has joined a running query, the policy ``even`` is asked instead
until the numbers of partitions are evened out: a worker without partitions has no load to compare. A policy suggests;
the controller accepts or refuses. ``whole_plan`` asks a policy without rounds, for a person.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from controller.balance.load import Holding, Loads, Move, Suggestion
from controller.balance.policies import Policy, PolicySettings, make
from flux.settings import Settings


def whole_plan(policy: str, loads: Loads, settings: Settings, now: float) -> Suggestion:
    """Return all moves that a policy would make for these loads, in order, no replica twice. A person has asked (design:
    balance).

    Each move supposes the moves before it. The limits of a round do not apply: the caller decides how many moves are made at
    once."""
    asked = make(policy, PolicySettings.of(settings).at_once())
    moves: list[Move] = []
    seen: set[Holding] = set()
    while True:
        found = asked.suggest(loads, now)
        # A policy may suggest the same moves again and again. The loop ends when no move is new.
        new = [m for m in found.moves if m.moved not in seen]
        if not new:
            return Suggestion(moves, found.notes)
        seen |= {m.moved for m in new}
        moves += new
        loads = after(loads, new)


def after(loads: Loads, moves: list[Move]) -> Loads:
    """Return the loads after these moves. A replica takes its load with it, at whatever pace its new worker has."""
    targets = {move.moved: move.target for move in moves}
    replicas = [
        replica
        if (target := targets.get(Holding(replica.stage, replica.partition, replica.worker))) is None
        else replace(replica, worker=target)
        for replica in loads.replicas
    ]
    return replace(loads, replicas=replicas)


#: Evening out begins when no worker has joined for this time, because workers often join several at a time.
SETTLED_S = 1.0
#: A round takes no more than one part in 20 of the time of the controller's thread, which has to be free for losses: it looks at
#: all replicas, for 3 µs each. So the time between two rounds is at least this for each replica.
PER_REPLICA_S = 60e-6


class RoundMoves(NamedTuple):
    """The moves of one round, and the name of the policy that suggested them."""

    policy: str
    moves: list[Move]


class Rounds:
    """The rounds of a query. ``notes`` are those of the last round."""

    def __init__(self, settings: Settings) -> None:
        """Make the configured policy. UsageError: there is no policy of this name."""
        self.settings = settings
        self.on: bool = settings.balance_enabled and settings.ordered
        self.name: str = settings.balance_policy
        self.round_s: float = settings.balance_round
        self._least_s = 0.0
        self.notes: list[str] = []
        self.refused: list[str] = []
        self._policy = self._make(self.name) if self.on else None
        self._even: Policy | None = None
        self._joined_at = math.inf
        self._asked_at = -math.inf

    def joined(self, now: float) -> None:
        self._joined_at = now
        self._even = None

    @property
    def evening_out(self) -> bool:
        """Workers have joined that do not have their share of the partitions yet."""
        return self.on and math.isfinite(self._joined_at)

    def evened_out(self) -> None:
        """Compare loads again from now on.

        The policy is a new one, because earlier rounds had other workers."""
        self._joined_at = math.inf
        self._policy = self._make(self.name)

    def due(self, now: float) -> bool:
        return self.on and now >= self._asked_at + max(self.round_s, self._least_s)

    def ask(self, loads: Loads, now: float, calm: bool) -> RoundMoves:
        """Ask the policy of this round. ``calm``: no move or repair is under way."""
        self._asked_at = now
        self._least_s = PER_REPLICA_S * len(loads.replicas)
        if not self.evening_out:
            return RoundMoves(self.name, self._heed(self._policy.suggest(loads, now)) if self._policy else [])
        if not calm or now < self._joined_at + SETTLED_S:
            # Loads are not compared meanwhile: by its low load the new worker would be given one partition after the other,
            # without regard to their number.
            return RoundMoves("even", [])
        self._even = self._even or self._make("even")
        moves = self._heed(self._even.suggest(loads, now))
        # No moves within the limits of a round do not mean that the numbers are even. A plan without these limits shows it.
        if not moves and not self.plan("even", loads, now).moves:
            self.evened_out()
        return RoundMoves("even", moves)

    def plan(self, name: str, loads: Loads, now: float) -> Suggestion:
        """Return all moves that a policy would make for these loads. UsageError: there is no policy of this name."""
        return whole_plan(name, loads, self.settings, now)

    def _heed(self, suggestion: Suggestion) -> list[Move]:
        self.notes = list(suggestion.notes)
        return list(suggestion.moves)

    def _make(self, name: str) -> Policy:
        return make(name, PolicySettings.of(self.settings))
