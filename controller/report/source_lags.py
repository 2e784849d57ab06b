"""Distances of the partitions of sources from their ends, by the last reports of the workers that read them (design:
lag-of-sources).

Only readers with a ``lag`` report one (see ``flux.source``). While a partition has no reader, because its worker was lost, its
last report stands: the records that wait there have not gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flux.dataflow.plan import SourcePlan, WorkerSourcePlan
from flux.wire.statistics import SourceLag


class SourceLags:
    """The lags of all sources of a query."""

    def __init__(self, sources: Sequence[SourcePlan]) -> None:
        self._sources = sources
        self._names = [_names(source) for source in sources]
        self._units = [source.reader.lag_unit if isinstance(source, WorkerSourcePlan) else "" for source in sources]
        self._said: list[dict[int, SourceLag]] = [{} for _ in sources]

    def report(self, workers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Take the newest statistics of each worker, and make one entry for each source."""
        self._note(SourceLag(*lag) for stats in workers for lag in stats.get("lags", ()))
        return [{"name": source.name} | self._lag(number) for number, source in enumerate(self._sources)]

    def _note(self, lags: Iterable[SourceLag]) -> None:
        """Keep one lag of each partition. While it passes to another worker, both may report it; the farther one reads it now."""
        new: dict[tuple[int, int], SourceLag] = {}
        for lag in lags:
            if 0 <= lag.source < len(self._said) and 0 <= lag.partition < len(self._names[lag.source]):
                known = new.setdefault((lag.source, lag.partition), lag)
                if lag.position > known.position:
                    new[lag.source, lag.partition] = lag
        for (source, partition), lag in new.items():
            self._said[source][partition] = lag

    def _lag(self, number: int) -> dict[str, Any]:
        said, names = self._said[number], self._names[number]
        if not said:
            return {}
        partitions = {names[partition]: max(lag.end - lag.position, 0) for partition, lag in sorted(said.items())}
        unit = self._units[number]
        return {
            "lag": {"records": sum(partitions.values()), "partitions": partitions} | ({"unit": unit} if unit else {})
        }


def _names(source: SourcePlan) -> list[str]:
    if not isinstance(source, WorkerSourcePlan):
        return []
    return [str(source.reader.partition_name(partition)) for partition in range(source.partitions)]
