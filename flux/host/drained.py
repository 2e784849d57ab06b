"""How often everything has left a worker's logs that was in them at one time.

Rows leave the log of a stream when every replica of their consumer has applied them. So a worker whose count has grown by
two since some moment has nothing left in its logs of what was there at that moment: the first of the two may have been
marked before. Whoever wants to know that rows are through asks this of all workers, once for each stage on the way
(``controller.operate.all_available``). Looked at with each heartbeat; nothing is done where rows flow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Kept(Protocol):
    """A log, or what is kept for a sink: numbers from ``base`` to ``end``."""

    @property
    def base(self) -> int: ...
    @property
    def end(self) -> int: ...
    def __len__(self) -> int: ...


class Drained:
    def __init__(self) -> None:
        self.times = 0
        self._marks: dict[int, tuple[Kept, int]] = {}  # what is still to leave: logs, each up to a sequence number

    def look(self, logs: Iterable[Kept]) -> int:
        """``logs``: all that there are now; what was in one that is gone is not ours to hand on any more."""
        mine = {id(log): log for log in logs}
        self._marks = {key: (log, end) for key, (log, end) in self._marks.items() if key in mine and log.base < end}
        if not self._marks:
            self.times += 1
            self._marks = {key: (log, log.end) for key, log in mine.items() if len(log)}
        return self.times
