"""Load of workers, for the policies of balance: it is made up, and so costs no time to simulate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from flux.worker.core import WorkerCore

#: Busy seconds per second of a replica: by stage, partition, worker, and time.
Demand = Callable[[int, int, int, float], float]
#: Rows and slices that a second of work is worth.
PER_BUSY_S = 1000


class Busy:
    """Counts of one worker since it began."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._busy: dict[tuple[int, int, int], float] = defaultdict(float)  # stage, partition, incarnation
        self._at: float | None = None

    def report(self, core: WorkerCore, now: float) -> dict[str, Any]:
        """Return the load of a worker in the form of ``worker_stats.load``."""
        replicas = []
        for (stage, partition), replica in core.replicas.items():
            life = stage, partition, replica.incarnation
            if self._at is not None:
                self._busy[life] += self._demand(stage, partition, core.worker, now) * (now - self._at)
            done = round(self._busy[life] * PER_BUSY_S)
            replicas.append((*life, self._busy[life], done, done, 0, 100))
        self._at = now
        return {"at": now, "replicas": replicas}
