"""When a policy is asked, and for what: once a round while the query runs, or for a whole plan on demand (DESIGN 6)."""

from __future__ import annotations

from dataclasses import replace

from controller.load import Loads, Move, Suggestion
from controller.policies import PolicySettings, make
from flux.settings import Settings


class Balance:
    """Asks the policy of ``spark.flux.balance.*`` when a round is due. Whether a move is made is not decided here."""

    def __init__(self, settings: Settings) -> None:
        self.enabled = settings.balance_enabled
        self._round_s = settings.balance_round
        self._policy = make(settings.balance_policy, PolicySettings.of(settings))
        self._due = 0.0

    def due(self, now: float) -> bool:
        return self.enabled and now >= self._due

    def round(self, loads: Loads, now: float) -> Suggestion:
        self._due = now + self._round_s
        return self._policy.suggest(loads, now)


def whole_plan(policy: str, loads: Loads, settings: Settings, now: float) -> Suggestion:
    """All that a policy would do about these loads, in order, no partition twice: every move supposes those before it.

    No limit of a round holds here; whoever carries it out makes so many moves at once as it sees fit."""
    asked = make(policy, PolicySettings.of(settings).at_once())
    moves: list[Move] = []
    seen: set[tuple[int, int, int]] = set()
    while True:
        found = asked.suggest(loads, now)
        # A policy that suggests the same for ever does not keep us for ever.
        new = [m for m in found.moves if (m.stage, m.partition, m.source) not in seen]
        if not new:
            return Suggestion(moves, found.notes)
        seen |= {(m.stage, m.partition, m.source) for m in new}
        moves += new
        loads = after(loads, new)


def after(loads: Loads, moves: list[Move]) -> Loads:
    """The loads when these moves are made: a copy takes its load with it, whatever the pace of its new worker."""
    targets = {(move.stage, move.partition, move.source): move.target for move in moves}
    replicas = [
        replica
        if (target := targets.get((replica.stage, replica.partition, replica.worker))) is None
        else replace(replica, worker=target)
        for replica in loads.replicas
    ]
    return Loads(loads.workers, replicas, loads.seconds)
