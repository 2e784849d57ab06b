"""How much may move: so many moves in a round, and so many bytes a second on average (a token bucket)."""

from __future__ import annotations

from collections.abc import Iterable

from controller.load import Move
from controller.policies.base import PolicySettings

#: What the bucket holds at most, in seconds of its rate: after a quiet hour not everything may move at once.
BURST_S = 1.0


class Budget:
    """A state that is larger than the bucket moves when the bucket is not empty, and its debt is waited for: else it
    could never move."""

    def __init__(self, settings: PolicySettings) -> None:
        self._moves_max = settings.max_moves
        self._rate = settings.max_bytes_per_s
        self._tokens = self._rate * BURST_S
        self._at: float | None = None

    def take(self, moves: Iterable[Move], now: float) -> list[Move]:
        """The first of these that may be made now. ``moves`` is drawn from no further than needed."""
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
