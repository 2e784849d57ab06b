"""Which policy is asked in a round, and what became of its suggestions (design: even-first).

Each round asks the configured policy. After a worker has joined a running query, the policy ``even`` is asked instead
until the numbers of partitions are evened out: a worker without partitions has no load to compare. A policy suggests;
the controller accepts or refuses.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from controller.balance.load import Loads, Move, Suggestion
from controller.balance.policies import Policy, PolicySettings, make
from controller.balance.whole_plan import whole_plan
from flux.settings import Settings

#: Evening out begins when no worker has joined for this time, because workers often join several at a time.
SETTLED_S = 1.0
#: Rounds are so far apart at least, for each replica: a round looks at all of them, which takes the controller's thread
#: 3 µs each. It is to be free for losses 19 parts of 20.
PER_REPLICA_S = 60e-6


class Answer(NamedTuple):
    """The policy that was asked, and its moves."""

    policy: str
    moves: list[Move]


class Rounds:
    def __init__(self, settings: Settings) -> None:
        """UsageError if there is no policy of the configured name."""
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
        """Whether workers have joined that do not have their share of the partitions yet."""
        return self.on and math.isfinite(self._joined_at)

    def evened_out(self) -> None:
        """Loads are compared again from now on, by a policy that knows nothing of earlier rounds, which had other
        workers."""
        self._joined_at = math.inf
        self._policy = self._make(self.name)

    def due(self, now: float) -> bool:
        return self.on and now >= self._asked_at + max(self.round_s, self._least_s)

    def ask(self, loads: Loads, now: float, calm: bool) -> Answer:
        """The policy that was asked, and its moves. Once a round. ``calm``: no move or repair is under way."""
        self._asked_at = now
        self._least_s = PER_REPLICA_S * len(loads.replicas)
        if not self.evening_out:
            return Answer(self.name, self._heed(self._policy.suggest(loads, now)) if self._policy else [])
        if not calm or now < self._joined_at + SETTLED_S:
            # Meanwhile loads are not compared: the new worker would be given one partition after the other, regardless
            # of how many.
            return Answer("even", [])
        self._even = self._even or self._make("even")
        moves = self._heed(self._even.suggest(loads, now))
        # No moves within the limits of a round do not mean that all is even. A plan without these limits tells.
        if not moves and not self.plan("even", loads, now).moves:
            self.evened_out()
        return Answer("even", moves)

    def plan(self, name: str, loads: Loads, now: float) -> Suggestion:
        """All that a policy would do about these loads. UsageError if there is none of that name."""
        return whole_plan(name, loads, self.settings, now)

    def _heed(self, suggestion: Suggestion) -> list[Move]:
        self.notes = list(suggestion.notes)
        return list(suggestion.moves)

    def _make(self, name: str) -> Policy:
        return make(name, PolicySettings.of(self.settings))
