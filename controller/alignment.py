"""Alignment of sources: the watermark of the partition that is farthest behind (design: alignment).

Workers report the watermark of each partition that they read. The answer to a report has the least watermark of the partitions
that other workers read. So a lost answer is repeated, and no further message is needed. The driver alone hears
of all partitions.

``StateStop`` lets all readers stand still that are ahead, while an input is missing and the state of some worker is beyond its
limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.statistics import ReaderState, SourceTime, holds_back


class Alignment:
    """The watermarks of partitions that hold others back, by the newest reports."""

    def __init__(self, on: bool) -> None:
        """Begin without reports. ``on``: readers wait for others."""
        self._on = on
        #: By source and partition: the worker that has reported it last, and its watermark; None: it holds no other back. While
        #: no worker reads a partition, because its worker was lost, its last report stands.
        self._known: dict[tuple[int, int], tuple[int, int | None]] = {}
        #: The two least watermarks of different workers, each with its worker, the least first.
        self._least: list[tuple[int, int]] = []

    def note(self, worker: int, told: Iterable[Any]) -> None:
        """Take the event times of the partitions that a worker reads."""
        for each in told if self._on else ():
            time = SourceTime(*each)
            self._known[time.source, time.partition] = worker, time.watermark if holds_back(time) else None

    def look(self) -> None:
        """Find the least watermarks anew."""
        least: dict[int, int] = {}
        for worker, watermark in self._known.values():
            if watermark is not None:
                least[worker] = min(watermark, least.get(worker, watermark))
        self._least = sorted(((watermark, worker) for worker, watermark in least.items()))[:2]

    def of_others(self, worker: int) -> int:
        """Return the least watermark of the partitions that other workers read; ``NEVER``: none of these holds another back."""
        return next((watermark for watermark, of in self._least if of != worker), NEVER)


class StateStop:
    """The event time at which readers stand still, while an input is missing and the state of a worker is beyond
    ``spark.flux.availability.maxState`` (design: state-stop). It is that of the foremost partition when the limit was reached, so
    that the missing ones, when they are back, may come up to it without a stop.

    Law: it begins only while a partition does not answer, and ends when none is behind it. A state that is too large by itself
    stops nothing, because no window would close then, and the state would never fall."""

    def __init__(self) -> None:
        #: ``END_OF_TIME``: all go on.
        self.at = END_OF_TIME

    def look(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Take the newest statistics of all workers."""
        times = [SourceTime(*told) for stats in workers for told in stats.get("times", ())]
        if not any(stats.get("state_full") for stats in workers) or not any(map(self._is_behind, times)):
            self.at = END_OF_TIME
        elif self.at == END_OF_TIME:
            known = [time.watermark for time in times if NEVER < time.watermark < END_OF_TIME]
            self.at = max(known, default=END_OF_TIME)

    def _is_behind(self, time: SourceTime) -> bool:
        """Tell whether others wait for a partition: it does not answer, or has answered again and comes up to them."""
        return time.state == ReaderState.SILENT or (holds_back(time) and time.watermark < self.at < END_OF_TIME)
