"""Keeping the replicas of one worker in step with those on other workers: the traffic of order logs (DESIGN 4).

Orders for all replicas on the same worker travel in one message. They go out as soon as there is something new, and
again until acked, so that a lost message costs one interval and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flux.messages import PartitionOrder, PartitionSeen
from flux.order import Peer
from flux.replica import Replica

#: Entries in one message at most: a replica that is far behind is not served in one piece.
ENTRIES_MAX = 1024


@dataclass(frozen=True)
class CaughtUp:
    """A replica that is being added follows the order without a gap; ``safe``: it is live and has all that is
    committed."""

    stage: int
    partition: int
    worker: int
    incarnation: int
    safe: bool
    stall_ms: float
    bytes: int = 0


@dataclass(frozen=True)
class Diverged:
    """A secondary gave other output than its primary for the same steps."""

    stage: int
    partition: int
    worker: int
    incarnation: int
    step: int


def outgoing(replicas: Iterable[Replica], now: float, again_s: float) -> dict[int, list[PartitionOrder]]:
    """What the primaries among these have to say, by worker."""
    by_worker: dict[int, list[PartitionOrder]] = {}
    for replica in replicas:
        order = replica.order
        end, committed = order.end, order.committed
        for worker, peer in order.peers.items():
            if peer.acked is None or peer.copying:
                continue
            if peer.overdue(end, committed, now, again_s):
                peer.send_again(now)
            if peer.sent >= end and peer.told >= committed:
                continue
            first = max(peer.sent, order.base)
            entries = order.since(first)[:ENTRIES_MAX]
            peer.sent = first + len(entries)
            peer.told = order.promise(peer, peer.sent) if order.alone(peer) else committed
            item = PartitionOrder(
                replica.stage.id, replica.partition, peer.incarnation, replica.leads_since, first, entries, peer.told
            )  # fmt: skip
            by_worker.setdefault(worker, []).append(item)
    return by_worker


def seen(replica: Replica) -> PartitionSeen:
    """What a secondary answers."""
    return PartitionSeen(
        replica.stage.id, replica.partition, replica.incarnation, replica.order.term, replica.order.verified,
        replica.applied, replica.checked, replica.last_checksum,
    )  # fmt: skip


def on_seen(replica: Replica, worker: int, item: PartitionSeen) -> list[CaughtUp | Diverged]:
    """A secondary's answer at its primary; what the controller is to hear of it."""
    if item.term != replica.leads_since or not replica.order.on_seen(worker, item.incarnation, item.through):
        return []
    peer = replica.order.peers[worker]
    peer.applied = max(peer.applied, item.applied)
    reports: list[CaughtUp | Diverged] = []
    if item.checked > peer.checked and (expected := replica.checksum_at(item.checked)) is not None:
        peer.checked = item.checked
        if expected != item.checksum:
            reports.append(Diverged(replica.stage.id, replica.partition, worker, item.incarnation, item.checked))
    if not peer.safe:
        reports += _arrived(replica, worker, peer)
    return reports


def _arrived(replica: Replica, worker: int, peer: Peer) -> Iterator[CaughtUp]:
    """News of a replica that has not been reported as safe yet."""
    assert peer.acked is not None
    if peer.goal is None:
        peer.goal = replica.order.committed
    # Not all that is committed by now: under a steady load there is always a step that is still on its way.
    if not peer.live and peer.acked >= peer.goal and not peer.reported:
        peer.reported = True
        yield CaughtUp(
            replica.stage.id, replica.partition, worker, peer.incarnation, False, peer.stall_ms, peer.copy_bytes
        )
    reached = peer.acked >= replica.order.committed
    if peer.live and reached and replica.order.settled(peer):
        peer.safe = True
        yield CaughtUp(
            replica.stage.id, replica.partition, worker, peer.incarnation, True, peer.stall_ms, peer.copy_bytes
        )
