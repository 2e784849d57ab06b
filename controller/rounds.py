"""Whose turn it is to suggest moves, and what has been made of the last suggestions (DESIGN 6).

Each round the configured policy is asked. After a worker has joined a running query, counts of partitions are evened out
first, and nobody else is asked meanwhile: a worker without partitions has no load that could be compared. A policy
suggests; the controller accepts or refuses.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from controller.load import Loads, Move, Suggestion
from flux.settings import Settings

#: Joining workers are counted in when none has come for so long: several come at a time.
SETTLED_S = 1.0


class Rounds:
    def __init__(self, settings: Settings) -> None:
        """UsageError if there is no policy of the configured name."""
        self.settings = settings
        self.on: bool = getattr(settings, "balance_enabled", False) and settings.ordered
        self.name: str = getattr(settings, "balance_policy", "pairing")
        self.round_s: float = getattr(settings, "balance_round", 1.0)
        self.notes: list[str] = []
        self.refused: list[str] = []
        self._policy = self._make(self.name) if self.on else None
        self._even: Any = None
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
        # Late: a query without load balance needs none of this.
        suggestion: Suggestion = importlib.import_module("controller.balance").whole_plan(
            name, loads, self.settings, now
        )
        return suggestion

    def _heed(self, suggestion: Suggestion) -> list[Move]:
        self.notes = list(suggestion.notes)
        return list(suggestion.moves)

    def _make(self, name: str) -> Any:
        policies = importlib.import_module("controller.policies")
        return policies.make(name, policies.PolicySettings.of(self.settings))
