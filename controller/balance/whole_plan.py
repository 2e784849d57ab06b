"""Whole plans: all moves that a policy would make for the loads of a moment, for people who ask (design: balance)."""

from __future__ import annotations

from dataclasses import replace

from controller.balance.load import Holding, Loads, Move, Suggestion
from controller.balance.policies import PolicySettings, make
from flux.settings import Settings


def whole_plan(policy: str, loads: Loads, settings: Settings, now: float) -> Suggestion:
    """Return all moves that a policy would make for these loads, in order, no replica twice.

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
    return Loads(loads.workers, replicas, loads.seconds)
