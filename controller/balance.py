"""Whole plans: all that a policy would do about the loads of a moment, for people who ask (DESIGN 6)."""

from __future__ import annotations

from dataclasses import replace

from controller.load import Loads, Move, Suggestion
from controller.policies import PolicySettings, make
from flux.settings import Settings


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
