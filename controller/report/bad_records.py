"""Counts of the records of each source that did not fit their format, and the like, from the reports of the workers (design:
bad-records).

A reader counts from its beginning. So the count of a partition is the sum over its readers; a reader that begins again reports
less than before, or is on another worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flux.wire.statistics import BadRecords


class BadRecordCounts:
    """The counts of all sources of a query. ``name``: theirs in the statistics."""

    def __init__(self, sources: int, name: str = "bad_records") -> None:
        self._sources, self._name = sources, name
        self._before: dict[int, int] = {}  # by source: counts of readers that have ended
        self._said: dict[tuple[int, int, int], int] = {}  # by worker, source and partition

    def note(self, workers: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the newest statistics of each worker, by its number."""
        now: dict[tuple[int, int, int], int] = {}
        for worker, stats in workers.items():
            for said in stats.get(self._name, ()):
                told = BadRecords(*said)
                if 0 <= told.source < self._sources:
                    now[worker, told.source, told.partition] = told.records
        for key, records in self._said.items():
            if now.get(key, -1) < records:
                self._before[key[1]] = self._before.get(key[1], 0) + records
        self._said = now

    def of(self, source: int) -> int:
        return self._before.get(source, 0) + sum(records for key, records in self._said.items() if key[1] == source)
