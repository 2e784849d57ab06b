"""How far each partition of a worker has come in one stream (design: consumers-at).

Nearly all have come as far as each other: what a message brings, it brings to all. So this is one number, and those that
are ahead of it, not a number for each partition of the stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Received:
    """``received[p]``: next sequence that partition p needs, of the partitions that have joined."""

    def __init__(self) -> None:
        self.least = 0
        self._ahead: dict[int, int] = {}  # partitions beyond that

    def __getitem__(self, partition: int) -> int:
        return self._ahead.get(partition, self.least)

    def join(self, partition: int, at: int, others: Collection[int]) -> None:
        """``others`` have joined before."""
        self._ahead.pop(partition, None)
        if not others:
            self.least, self._ahead = at, {}
        elif at < self.least:
            self._ahead = {other: self[other] for other in others}
            self.least = at
        elif at > self.least:
            self._ahead[partition] = at
            if len(self._ahead) > len(others):  # it was the last that needed the least
                self._rise(min(self._ahead.values()))

    def leave(self, partition: int, others: Collection[int]) -> None:
        """``others`` stay."""
        self._ahead.pop(partition, None)
        if not others:
            self.least, self._ahead = 0, {}
        elif len(self._ahead) >= len(others):
            self._rise(min(self._ahead.values()))

    def reach(self, end: int) -> None:
        """All have what is below ``end``."""
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
        """Those of ``members`` that need something below ``end``."""
        if end <= self.least:
            return []
        return [partition for partition in members if self[partition] < end]
