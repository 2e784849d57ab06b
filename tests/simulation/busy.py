"""How busy workers say that they are, for the policies of load balance: made up, so that it costs no time to simulate."""

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
    """What one worker has counted since it began."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._busy: dict[tuple[int, int, int], float] = defaultdict(float)  # stage, partition, incarnation
        self._at: float | None = None

    def report(self, core: WorkerCore, now: float) -> dict[str, Any]:
        """As ``worker_stats.load`` gives it."""
        replicas = []
        for (stage, partition), replica in core.replicas.items():
            life = stage, partition, replica.incarnation
            if self._at is not None:
                self._busy[life] += self._demand(stage, partition, core.worker, now) * (now - self._at)
            done = round(self._busy[life] * PER_BUSY_S)
            replicas.append((*life, self._busy[life], done, done, 0, 100))
        self._at = now
        return {"at": now, "replicas": replicas}
