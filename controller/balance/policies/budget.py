"""Limits on moves: a number of moves in a round, and bytes per second on average, as a token bucket (design: budget)."""

from __future__ import annotations

from collections.abc import Iterable

from controller.balance.load import Move
from controller.balance.policies.base import PolicySettings

#: Capacity of the bucket, in seconds of its rate. It is small, so that after a quiet hour not all moves are made at once.
BURST_S = 1.0


class Budget:
    """A token bucket for bytes of state. Moves may overdraw it while it is not empty, because a state larger than the bucket
    could never move otherwise. Later moves wait until the overdraft is paid back."""

    def __init__(self, settings: PolicySettings) -> None:
        self._moves_max = settings.max_moves
        self._rate = settings.max_bytes_per_s
        self._tokens = self._rate * BURST_S
        self._at: float | None = None

    def take(self, moves: Iterable[Move], now: float) -> list[Move]:
        """Return the first of these moves, as many as the limits allow now. No further moves are drawn from the iterable."""
        if self._at is not None and now > self._at:
            self._tokens = min(self._tokens + self._rate * (now - self._at), self._rate * BURST_S)
        self._at = now
        taken: list[Move] = []
        for move in moves if self._tokens > 0 else ():
            taken.append(move)
            self._tokens -= move.cost
            if len(taken) >= self._moves_max or self._tokens <= 0:
                break
        return taken
