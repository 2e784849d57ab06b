"""Counts of events around standbys: a run in which they happen has put the laws to the test."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flux.exchange.producer import Producer
from flux.replica.replica import Replica
from flux.replica.snapshot import laid_pieces
from flux.state.standby import Checkpoint, Standby
from flux.state.state_copy import _head
from flux.worker.core import WorkerCore


def watch_standbys(core: WorkerCore, counts: Counter[str]) -> None:
    """Count the events around the standbys of one worker, from its beginning on."""
    host = core.lifecycle
    took_over, read_again, press = host.took_over, core._assigned.read_again, core.checkpoints.press
    kept = host.keep_order

    def taken_over(replica: Replica, state: Any, standby: Standby, now: float) -> None:
        counts["take-overs by standbys"] += 1
        counts["standbys that took over without a checkpoint"] += state is None
        counts["take-overs with changes to apply"] += bool(standby.checkpoint.changes)
        counts["take-overs from replay points"] += bool(state is not None and state.state.replica["silent"])
        counts["steps repeated by standbys"] += standby.order.end - standby.checkpoint.step
        took_over(replica, state, standby, now)
        counts["take-overs that throw output away"] += replica.output.silent > replica.applied

    def read(edge: int, partition: int) -> list[Producer]:
        counts["sources read again for a standby"] += 1
        return read_again(edge, partition)

    def pressed(key: Any, anew: bool = False) -> None:
        counts["checkpoints that producers asked for" + (" of partitions without rows" if anew else "")] += 1
        press(key, anew)

    def watched(key: Any, follower: Any) -> None:
        if isinstance(follower, Standby):
            _watch(follower, counts)
        kept(key, follower)

    host.took_over, core._assigned.read_again = taken_over, read  # type: ignore[method-assign]
    core.checkpoints.press = pressed  # type: ignore[method-assign]
    host.keep_order = watched  # type: ignore[method-assign]


def _watch(standby: Standby, counts: Counter[str]) -> None:
    take, settle = standby.take, standby.settle

    def taken(checkpoint: Checkpoint) -> bool:
        used = take(checkpoint)
        counts["checkpoints taken"] += used
        beside = standby.beside is not None and standby.beside.number == checkpoint.number
        counts["checkpoints that waited for their commits"] += beside
        counts["checkpoints of what has changed"] += used and checkpoint.base >= 0
        counts["changes of what was not committed"] += beside and checkpoint.base >= 0
        counts["changes of several cuts"] += used and checkpoint.base >= 0 and _cuts_in(checkpoint) > 1
        counts["changes to what is not there"] += checkpoint.base >= 0 and not used
        return used

    def settled() -> None:
        beside, checkpoint = standby.beside, standby.checkpoint
        settle()
        dropped = beside is not None and standby.beside is None and standby.checkpoint is checkpoint
        counts["checkpoints of deposed primaries"] += dropped

    standby.take, standby.settle = taken, settled  # type: ignore[method-assign]


def _cuts_in(checkpoint: Checkpoint) -> int:
    assert checkpoint.data is not None
    return len(laid_pieces(*_head(checkpoint.data)))
