"""The limits on moves: a number of moves in a round, and bytes a second on average, as a token bucket (design:
budget)."""

from __future__ import annotations

from collections.abc import Iterable

from controller.balance.load import Move
from controller.balance.policies.base import PolicySettings

#: The most that the bucket holds, in seconds of its rate: after a quiet hour not everything may move at once.
BURST_S = 1.0


class Budget:
    """A state larger than the bucket could never move otherwise, so it may overdraw the bucket if the bucket is not
    empty. The next moves wait until the overdraft is paid back."""

    def __init__(self, settings: PolicySettings) -> None:
        self._moves_max = settings.max_moves
        self._rate = settings.max_bytes_per_s
        self._tokens = self._rate * BURST_S
        self._at: float | None = None

    def take(self, moves: Iterable[Move], now: float) -> list[Move]:
        """The first of these moves that the limits allow now. No more moves are drawn from the iterable than are
        needed."""
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
