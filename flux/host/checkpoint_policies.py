"""Choice of the next checkpoint, when those that are due cannot all leave at once.

Two policies of Hwang, Xing, Çetintemel and Zdonik, "A Cooperative, Self-Configuring High-Availability Solution for Stream
Processing" (ICDE 2007), which compares them: round-robin, or the checkpoint that shortens the longest recovery most for its size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Due(NamedTuple):
    """A checkpoint that is due."""

    #: Time at which the last checkpoint of this partition began.
    since: float
    #: Seconds that it would take to repeat the steps since then.
    replay_s: float
    #: Bytes to copy: of the state, or of its changes.
    nbytes: int


#: A policy returns a rank. The lowest rank is first.
Policy = Callable[[Due], float]


def round_robin(due: Due) -> float:
    """Rank first the partition with the oldest last checkpoint."""
    return due.since


def min_max(due: Due) -> float:
    """Rank first the partition with the longest recovery for each byte to copy. A partition with little new work waits while
    others are in need; its producers ask for its checkpoint when they run out of room."""
    return -due.replay_s / max(due.nbytes, 1)


POLICIES: dict[str, Policy] = {"round-robin": round_robin, "min-max": min_max}
