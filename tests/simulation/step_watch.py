"""Watches over the steps of a replica, taken alone or in one call with others, and over its orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.worker.core import WorkerCore
from tests.simulation.violation import Key, Violation


def watch_steps(
    replica: Replica, begins: Callable[[float], None], ends: Callable[[ReplicaStep, bool | None], None]
) -> None:
    """Watch the steps of a replica. ``begins`` gets the worker's time before the replica orders or takes anything. ``ends``
    gets the step, and whether it is applied: False while it waits for room in the logs, and None if it raised."""
    begin, conclude = replica._begin, replica.conclude

    def watched_begin(now: float) -> Any:
        begins(now)
        return begin(now)

    def watched_conclude(step: ReplicaStep, output: Any) -> bool:
        applied = None
        try:
            applied = conclude(step, output)
        finally:
            ends(step, applied)
        return applied

    replica._begin, replica.conclude = watched_begin, watched_conclude  # type: ignore[method-assign]


def watch_order(
    replica: Replica, bound: int, alive: Callable[[int], WorkerCore | None], unheard: dict[Key, int]
) -> None:
    """Check that a primary orders a step only if its own log and those of all other replicas have room for it. ``unheard`` notes
    the end of the orders of a partition while some live replica had not been heard of."""
    key, order = (replica.stage.id, replica.partition), replica.order
    append = order.append

    def watched_append(entry: Any) -> int:
        kept = [len(order.since(0))]
        for worker, peer in order.peers.items():
            core = alive(worker)
            other = core.replicas.get(key) if core is not None else None  # type: ignore[call-overload]
            if other is not None and other.incarnation == peer.incarnation and peer.greeted:
                kept.append(order.end - other.applied)
        if max(kept) >= bound:
            raise Violation("order logs stay within their bound", f"{replica.where}: {kept} steps, bound {bound}")
        if any(peer.live and not peer.greeted for peer in order.peers.values()):
            unheard[key] = max(unheard.get(key, 0), order.end + 1)
        return append(entry)

    order.append = watched_append  # type: ignore[method-assign]
