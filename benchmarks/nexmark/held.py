"""A source of events that keeps its last ones back until all faults of a run have happened: they fall among rows, on a slow
machine too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flux


class HeldEvents(flux.SourceReader):
    """The events of a generator. The last fifth of each partition waits until there is a file at ``gate``."""

    def __init__(self, generator: Any, gate: Path) -> None:
        self._generator, self._gate = generator, str(gate)
        self.schema, self.partitions, self.events = generator.schema, generator.partitions, generator.events

    def read(self, partition: int, start: int | None) -> Iterator[flux.Positioned | None]:
        most, is_open = self.events.count(partition) * 4 // 5, False
        for each in self._generator.read(partition, start):
            while each is not None and each.position > most and not is_open:
                is_open = os.path.exists(self._gate)
                if not is_open:
                    yield None
            yield each
