"""Who reads a partition of a topic, as the thread that fetches for it sees it (see ``fetcher``)."""

from __future__ import annotations

from typing import Protocol

from flux.kafka.client import Fetched
from flux.kafka.errors import CorruptRecords


class Paused(Exception):
    """Of a reader: it goes on with what it has, after a pause. ``until``: None until it has room, which it says itself."""

    def __init__(self, until: float | None) -> None:
        super().__init__()
        self.until = until


class TakesTime(Exception):
    """Of a reader: this is to be done beside, because it may wait for somebody."""


class NothingWhole(CorruptRecords):
    """Of what has come, no record batch is whole that has the wanted offset or a later one."""


class Owner(Protocol):
    """Who reads a partition. ``next_offset``: what is to be asked for; ``topic_id``: the topic that it belongs to, UNKNOWN until
    a broker has told the first one. ``takes_time``: to work off what has come takes long, or waits for somebody. ``full``: it
    was Paused because it had no room, and has none yet."""

    topic: str
    partition: int
    next_offset: int
    topic_id: str

    @property
    def takes_time(self) -> bool: ...

    @property
    def full(self) -> bool: ...

    def came(self, answer: Fetched) -> None:
        """Rows have come. ``work_off`` is called next."""

    def work_off(self, beside: bool) -> bool:
        """Hand out what has come. Whether the log has more. Paused: it is called again; TakesTime, only if not ``beside``: it is
        called beside; Passing and OSError: what is left is asked for again; NothingWhole."""

    def nothing(self, end: int) -> None:
        """Nothing has come, and the log ends there."""

    def go_on_in_range(self) -> None:
        """Records that come next are not there. Called beside."""

    def go_on_in(self, topic_id: str) -> None:
        """Brokers have another topic of the same name now, with this id. Called beside."""

    def fail(self, error: BaseException) -> None:
        """The end: for whoever takes."""

    def over(self) -> None:
        """It was removed, and nobody calls it any more."""
