"""Whose turn it is to suggest moves, and what has been made of the last suggestions (DESIGN 6).

Each round the configured policy is asked. After a worker has joined a running query, counts of partitions are evened out
first, and nobody else is asked meanwhile: a worker without partitions has no load that could be compared. A policy
suggests; the controller accepts or refuses.
"""

from __future__ import annotations

import math

from controller.balance import whole_plan
from controller.load import Loads, Move, Suggestion
from controller.policies import Policy, PolicySettings, make
from flux.settings import Settings

#: Joining workers are counted in when none has come for so long: several come at a time.
SETTLED_S = 1.0


class Rounds:
    def __init__(self, settings: Settings) -> None:
        """UsageError if there is no policy of the configured name."""
        self.settings = settings
        self.on: bool = settings.balance_enabled and settings.ordered
        self.name: str = settings.balance_policy
        self.round_s: float = settings.balance_round
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
        """Workers have joined, and do not have their share yet."""
        return self.on and math.isfinite(self._joined_at)

    def evened_out(self) -> None:
        """Loads are compared again from here on: what was measured before was of other workers."""
        self._joined_at = math.inf
        self._policy = self._make(self.name)

    def due(self, now: float) -> bool:
        return self.on and now >= self._asked_at + self.round_s

    def ask(self, loads: Loads, now: float, calm: bool) -> tuple[str, list[Move]]:
        """Once a round. ``calm``: nothing is moved or repaired just now. Returns the policy that spoke, and its moves."""
        self._asked_at = now
        if not self.evening_out:
            return self.name, self._heed(self._policy.suggest(loads, now)) if self._policy else []
        if not calm or now < self._joined_at + SETTLED_S:
            # By load a worker that has just come would be given one partition after the other, without regard to how many.
            return "even", []
        self._even = self._even or self._make("even")
        moves = self._heed(self._even.suggest(loads, now))
        # Within the limits of a round it may have nothing to say: that is no end.
        if not moves and not self.plan("even", loads, now).moves:
            self.evened_out()
        return "even", moves

    def plan(self, name: str, loads: Loads, now: float) -> Suggestion:
        """All that a policy would do about these loads. UsageError if there is none of that name."""
        return whole_plan(name, loads, self.settings, now)

    def _heed(self, suggestion: Suggestion) -> list[Move]:
        self.notes = list(suggestion.notes)
        return list(suggestion.moves)

    def _make(self, name: str) -> Policy:
        return make(name, PolicySettings.of(self.settings))
