"""The workers to which a worker needs a link, and the links that it needs no more (design: links).

A worker greets every worker that hosts consumers of its streams, sends orders and copies of state to the other replicas of
its primaries, and answers all other workers on their own connections. Moves and repairs change these workers: if links were
never closed, a worker of a large cluster would have one to every other worker after a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flux.worker.core import WorkerCore

#: Seconds for which an unneeded link stays open: a move that comes back, or the next of several repairs, finds it open, and the
#: last answers have come by then.
GRACE_S = 5.0


def needed_workers(core: WorkerCore) -> set[int]:
    """Return the workers with consumers of this worker's streams, those with other replicas of its primaries, and the vault if
    it is asked for a state."""
    found: set[int] = set()
    for producer in core.producers.values():
        found |= producer.readers
    for replica in core.replicas.values():
        found |= replica.order.peers.keys()
    return found | core.reaches


class UnneededLinks:
    """The unneeded links of a worker, with the time since which each has had nothing to do."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._since: dict[int, float] = {}

    def look(self, linked: Iterable[int], needed: set[int], now: float) -> list[int]:
        """List the workers whose link has not been needed for the grace time."""
        self._since = {worker: self._since.get(worker, now) for worker in linked if worker not in needed}
        return [worker for worker, since in self._since.items() if now - since >= self._grace_s]
