"""A count of the times at which everything has left a worker's logs that was in them at one moment.

Rows leave the log of a stream when every replica of their consumer has applied them. Once the count of a worker has grown by two
since some moment, its logs have nothing left of their content at that moment; one is not enough, because the first of the two may
have been marked before. To know that rows are through, ``controller.operate.all_available`` asks all workers for this count, once
for each stage on the way. Logs are looked at with each heartbeat; nothing is done on the data path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Kept(Protocol):
    """A log, or the kept output for a sink: numbers from ``base`` to ``end``."""

    @property
    def base(self) -> int: ...
    @property
    def end(self) -> int: ...
    def __len__(self) -> int: ...


class Drained:
    """The count of one worker."""

    def __init__(self) -> None:
        self.times = 0
        #: Logs that have to be emptied up to a sequence number.
        self._marks: dict[int, tuple[Kept, int]] = {}

    def look(self, logs: Iterable[Kept]) -> int:
        """Return the count. ``logs``: all present logs. The content of a log that is gone is no longer this worker's to hand
        on."""
        mine = {id(log): log for log in logs}
        self._marks = {key: (log, end) for key, (log, end) in self._marks.items() if key in mine and log.base < end}
        if not self._marks:
            self.times += 1
            self._marks = {key: (log, log.end) for key, log in mine.items() if len(log)}
        return self.times
