"""The progress of each partition of a worker in one stream (design: consumers-at).

Nearly all partitions are equally far: the rows of a message come to all of them at once. So the progress is one number, and a
number for each partition ahead of it, not one for each partition of the stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Received:
    """The next sequence that each joined partition needs: ``received[p]``."""

    def __init__(self) -> None:
        self.least = 0
        self._ahead: dict[int, int] = {}  # partitions ahead of it

    def __getitem__(self, partition: int) -> int:
        return self._ahead.get(partition, self.least)

    def join(self, partition: int, at: int, others: Collection[int]) -> None:
        """Add a partition that needs ``at``. ``others`` have joined before."""
        self._ahead.pop(partition, None)
        if not others:
            self.least, self._ahead = at, {}
        elif at < self.least:
            self._ahead = {other: self[other] for other in others}
            self.least = at
        elif at > self.least:
            self._ahead[partition] = at
            if len(self._ahead) > len(others):  # the partition was the last that needed the least
                self._rise(min(self._ahead.values()))

    def leave(self, partition: int, others: Collection[int]) -> None:
        """Remove a partition. ``others`` stay."""
        self._ahead.pop(partition, None)
        if not others:
            self.least, self._ahead = 0, {}
        elif len(self._ahead) >= len(others):
            self._rise(min(self._ahead.values()))

    def reach(self, end: int) -> None:
        """Note that all partitions have everything below ``end``."""
        if end > self.least:
            self._rise(end)

    def _rise(self, least: int) -> None:
        self.least = least
        if self._ahead:
            self._ahead = {partition: at for partition, at in self._ahead.items() if at > least}

    @property
    def most(self) -> int:
        return max(self._ahead.values(), default=self.least)

    def behind(self, end: int, members: Iterable[int]) -> list[int]:
        """Return the ``members`` that need something below ``end``."""
        if end <= self.least:
            return []
        return [partition for partition in members if self[partition] < end]
