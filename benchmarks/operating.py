"""Requests of the benchmarks to a running query: its progress, and the requests of the flux command."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from controller.operate.client import QueryClient, choose
from controller.operate.requests import Accepted, StartMoves, WantedMove
from controller.report.events import Event
from flux.errors import QueryFailed
from spark_integration.query.query import Query

LOOK_S = 0.01


def until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    """Wait for a condition. QueryFailed, with ``what`` as the reason: it did not come true in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise QueryFailed(f"the benchmark has waited {limit_s:g} s in vain until {what}")
        time.sleep(LOOK_S)


def await_any_progress(query: Query, after: dict[str, Any] | None, timeout: float) -> dict[str, Any] | None:
    """Return the next progress report after the given one; None: none came in time, or the query has ended."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and query.isActive:
        newest = query.lastProgress
        if newest is not None and newest is not after:
            return newest
        time.sleep(0.05)
    return None


def furthest(query: Query) -> int:
    """Return the number of the batch that the fastest source has come to."""
    sources = [each for member in query.members().values() for each in member.stats.get("sources", ())]
    return int(max(start + batches for _, _, start, batches, _ in sources))


class Operator:
    """A conversation with the controller of a query, for a with statement, and for one thread."""

    def __init__(self, query: Query, stage: str) -> None:
        self.query = query
        self.stage = stage
        self._client = QueryClient(choose(query.id))

    def placement(self) -> dict[int, list[int]]:
        """Map each partition of the stage to the workers with its replicas, the primary's first."""
        found: dict[int, list[int]] = {}
        for replica in self._client.partitions(self.stage).replicas:
            found.setdefault(replica.partition, []).append(replica.worker)
        return found

    def targets(self) -> dict[int, int]:
        """Map each partition to the next worker without a replica of it."""
        workers = sorted(self.query.members())
        return {partition: next_worker(workers, held) for partition, held in self.placement().items()}

    def move(self, targets: dict[int, int], limit_s: float) -> None:
        """Move the primaries of these partitions, one after the other, and wait until all have moved."""
        before = len(self.moves())
        wanted = [WantedMove(stage=self.stage, partition=p, target=target) for p, target in targets.items()]
        self._client.ask(StartMoves(moves=wanted, why="flux bench"), Accepted)
        until(lambda: len(self.moves()) >= before + len(wanted), limit_s, f"partitions {sorted(targets)} have moved")

    def moves(self) -> list[Event]:
        """Return the events of the stage's completed moves, the oldest first."""
        return [event for event in self.query.events() if event.kind == "move" and event.stage == self.stage]

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def next_worker(workers: Sequence[int], held: Sequence[int]) -> int:
    """Return the first worker without a replica, counted in a ring from the primary's worker on."""
    ring = [worker for worker in workers if worker > held[0]] + [worker for worker in workers if worker < held[0]]
    free = [worker for worker in ring if worker not in held]
    if not free:
        raise QueryFailed(
            f"no worker of {list(workers)} is free of the replicas on {list(held)}: there must be more workers"
        )
    return free[0]
