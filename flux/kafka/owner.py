"""The reader of a partition of a topic, as the thread that fetches for it sees it (see ``fetcher``)."""

from __future__ import annotations

from typing import Protocol

from flux.kafka.client import Fetched
from flux.kafka.errors import CorruptRecords


class Paused(Exception):
    """Signal of a reader that goes on with the rows it has after a pause. ``until`` is the end of the pause; None: the reader
    announces when it has room."""

    def __init__(self, until: float | None) -> None:
        super().__init__()
        self.until = until


class TakesTime(Exception):
    """Signal of a reader that this work belongs into another thread, because it may wait for another process."""


class NothingWhole(CorruptRecords):
    """Answer without any whole record batch that has the wanted offset or a later one."""


class Owner(Protocol):
    """Reader of a partition."""

    #: Name of the topic.
    topic: str
    #: Number of the partition in its topic.
    partition: int
    #: Offset to ask for next.
    next_offset: int
    #: Id of the topic that ``next_offset`` belongs to; UNKNOWN until a broker has given the first one.
    topic_id: str
    #: The reader has no room for more rows.
    full: bool

    @property
    def takes_time(self) -> bool: ...

    def came(self, answer: Fetched) -> None:
        """Take over rows that have come. ``work_off`` is called next."""

    def work_off(self, beside: bool) -> bool:
        """Decode the rows that have come and put them out. Returns whether the log has more.

        Paused: it is called again; TakesTime, only if not ``beside``: it is called in another thread, with ``beside``;
        Passing and OSError: the rest is asked for again; NothingWhole."""

    def nothing(self, end: int) -> None:
        """Note that nothing has come, and that the log ends at ``end``."""

    def go_on_in_range(self) -> None:
        """Find a new place: the records that come next are not in the log. Called in another thread."""

    def go_on_in(self, topic_id: str) -> None:
        """Go on in another topic of the same name, which brokers have now and whose id this is. Called in another thread."""

    def fail(self, error: BaseException) -> None:
        """End the reading with an error, which the worker gets."""

    def over(self) -> None:
        """Release everything: the reader was removed, and is not called any more."""
