"""Whose checkpoint is next, where not all that are due can leave at once.

Two policies of Hwang, Xing, Çetintemel and Zdonik, "A Cooperative, Self-Configuring High-Availability Solution for Stream
Processing" (ICDE 2007), which compares them: each in its turn, or the one that shortens the longest recovery most for its size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Due(NamedTuple):
    """A checkpoint that is due. ``since``: when the last one of this partition began; ``replay_s``: seconds that the repetition
    of what has come since then would take; ``nbytes`` that are to be copied: of the state, or of what has changed."""

    since: float
    replay_s: float
    nbytes: int


#: The lowest rank is first.
Policy = Callable[[Due], float]


def round_robin(due: Due) -> float:
    """The partition first whose last checkpoint is oldest."""
    return due.since


def min_max(due: Due) -> float:
    """The partition first whose recovery would take longest for each byte to copy. One that changes little waits while others
    are in need; its producers ask for it when they run out of room."""
    return -due.replay_s / max(due.nbytes, 1)


POLICIES: dict[str, Policy] = {"round-robin": round_robin, "min-max": min_max}
