"""How far the readers in this process are behind the ends of their partitions, as they know it from their last answer."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Lag(NamedTuple):
    """``position``: the offset that is read next. ``end``: behind the last record of the partition."""

    position: int
    end: int

    @property
    def records(self) -> int:
        return max(self.end - self.position, 0)


_lock = threading.Lock()
_lags: dict[tuple[str, int], Lag] = {}


def lags() -> dict[tuple[str, int], Lag]:
    """By topic and partition, of those that are read in this process now."""
    with _lock:
        return dict(_lags)


def note(topic: str, partition: int, lag: Lag) -> None:
    with _lock:
        _lags[topic, partition] = lag


def forget(topic: str, partition: int) -> None:
    with _lock:
        _lags.pop((topic, partition), None)
