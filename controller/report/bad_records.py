"""How many records of each source did not fit their format, by what the workers that read it say (design: bad-records).

A reader counts from its beginning. So what a partition has had in all is the sum over its readers; one that begins again says
less than before, or is on another worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flux.wire.statistics import BadRecords


class BadRecordCounts:
    def __init__(self, sources: int) -> None:
        self._sources = sources
        self._before: dict[int, int] = {}  # by source: of readers that are over
        self._said: dict[tuple[int, int, int], int] = {}  # by worker, source and partition

    def note(self, workers: Mapping[int, Mapping[str, Any]]) -> None:
        """``workers``: the newest statistics of each, by its number."""
        now: dict[tuple[int, int, int], int] = {}
        for worker, stats in workers.items():
            for said in stats.get("bad_records", ()):
                told = BadRecords(*said)
                if 0 <= told.source < self._sources:
                    now[worker, told.source, told.partition] = told.records
        for key, records in self._said.items():
            if now.get(key, -1) < records:
                self._before[key[1]] = self._before.get(key[1], 0) + records
        self._said = now

    def of(self, source: int) -> int:
        return self._before.get(source, 0) + sum(records for key, records in self._said.items() if key[1] == source)
