"""Keeping the replicas of one worker in step with those on other workers: the traffic of order logs (design: order-log, commit).

Orders for all replicas on the same worker travel in one message. They go out as soon as there is something new, and
again until acked, so that a lost message costs one interval and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from flux.replicas.kinds import Follower
from flux.replicas.order import NO_CLAIM, Claim, Peer
from flux.replicas.replica import Replica
from flux.settings import Settings
from flux.stream.producer import ToWorker
from flux.stream.receiver import Counters
from flux.wire.messages import Orders, OrdersSeen, PartitionOrder, PartitionSeen
from partitioning.ids import PartitionKey

#: Entries in one message at most: a replica that is far behind is not served in one piece.
ENTRIES_MAX = 1024
#: Times the ack interval: how long orders wait for each other while there is other work, at least. Each message has its answer.
PATIENCE = 2
#: How soon a replica that is catching up, or that holds back its primary, is asked again how far it is.
PROBE_S = 0.005
#: A replica becomes live when it has applied what came while its state was copied: a partition that moves stands still
#: for the rest. Not for longer: a worker that has as much to do as it can is long about it, and two copies apply the same
#: rows meanwhile; the order alone is enough for safety.
CATCH_UP_MAX_S = 0.05


@dataclass(frozen=True)
class CaughtUp:
    """A replica that is being added follows the order without a gap and close behind; ``safe``: it is live and has all
    that is committed. ``steps_behind``: what it has still to apply, ``replay_s``: seconds that this takes by estimate."""

    stage: int
    partition: int
    worker: int
    incarnation: int
    safe: bool
    stall_ms: float
    bytes: int = 0
    steps_behind: int = 0
    replay_s: float = 0.0


@dataclass(frozen=True)
class Diverged:
    """A secondary gave other output than its primary for the same steps."""

    stage: int
    partition: int
    worker: int
    incarnation: int
    step: int


class Pairing:
    """Of one worker: what its primaries tell, and what its secondaries are told. ``patience_s``: how long orders wait for each
    other while there is other work, at least ``least_patience_s``; the shell of a busy worker makes it longer."""

    def __init__(
        self,
        replicas: Mapping[PartitionKey, Replica],
        followers: Mapping[PartitionKey, Follower],
        settings: Settings,
        counters: Counters,
        wake: Callable[[PartitionKey], None],
        report_complete: Callable[[Replica], None],
    ) -> None:
        """``wake`` a replica that may have a step to apply by now; ``report_complete`` one whose end may have been
        committed."""
        self._replicas = replicas
        self._followers = followers
        self._counters = counters
        self._wake = wake
        self._report_complete = report_complete
        self.patience_s = self.least_patience_s = PATIENCE * settings.ack_interval
        self._again_s = settings.heartbeat_interval
        self._untold: dict[PartitionKey, None] = {}  # primaries that have something to say, oldest first
        self._tell_at = 0.0
        self._again_at = 0.0

    def tell(self, key: PartitionKey) -> None:
        """A primary has something to say."""
        self._untold[key] = None

    def due(self) -> float:
        """When ``poll`` must be called again at the latest."""
        return min(self._tell_at if self._untold else math.inf, self._again_at)

    def poll(self, now: float, busy: bool, wall_ahead: float = 0.0) -> Iterator[ToWorker]:
        """At once if there is nothing else to do; while there is, a few steps travel together. Steps are ordered at the
        wall clock's time, which is ``wall_ahead`` of ``now``."""
        if now >= self._again_at:
            self._again_at = now + self._again_s / 2
            self._untold |= dict.fromkeys(key for key, replica in self._replicas.items() if replica.order.peers)
        if not self._untold or (busy and now < self._tell_at):
            return
        self._tell_at = now + self.patience_s
        leaders = [self._replicas[key] for key in self._untold if key in self._replicas]
        self._untold.clear()
        for replica in leaders:
            if replica.order.peers:
                replica.decide_ahead(now + wall_ahead)
                if replica.held_back:
                    self._again_at = min(self._again_at, now + PROBE_S)
        for worker, items in outgoing(leaders, now, self._again_s).items():
            yield ToWorker(worker, Orders(items))

    def on_orders(self, message: Orders) -> list[PartitionSeen]:
        """What the secondaries here answer."""
        answers = []
        for item in message.items:
            replica = self._replicas.get(PartitionKey(item.stage, item.partition))
            if replica is None:
                answers += self._kept(item)
            elif replica.incarnation != item.incarnation:
                self._counters.stale += 1
            elif replica.primary:
                self._counters.stale += 1  # from one that was deposed and does not know yet
            elif self._follow(replica, item):
                answers.append(seen(replica))
            else:
                self._counters.stale += 1
        return answers

    def _kept(self, item: PartitionOrder) -> list[PartitionSeen]:
        """What a replica without operator answers."""
        follower = self._followers.get(PartitionKey(item.stage, item.partition))
        answer = follower.on_orders(item) if follower is not None and follower.incarnation == item.incarnation else None
        self._counters.stale += answer is None
        return [] if answer is None else [answer]

    def _follow(self, replica: Replica, item: PartitionOrder) -> bool:
        """False: the sender is deposed."""
        committed = replica.order.committed
        if not replica.order.on_orders(item.term, item.first, item.entries, item.committed, replica.applied):
            return False
        if replica.exit is not None:
            replica.exit.forget(item.left)
        if replica.order.committed != committed:
            self._release(replica)
            self._wake(replica.key)
        return True

    def _release(self, replica: Replica) -> None:
        """Let go what has become committed: output, and the news that the partition is through."""
        replica.release()
        self._report_complete(replica)

    def on_orders_seen(self, worker: int, message: OrdersSeen, now: float) -> Iterator[CaughtUp | Diverged]:
        """What the secondaries on a worker answer; what the controller is to hear of it."""
        for item in message.items:
            replica = self._replicas.get(PartitionKey(item.stage, item.partition))
            if replica is None or not replica.primary or item.term != replica.leads_since:
                self._counters.stale += 1
                continue
            committed, held_back = replica.order.committed, replica.held_back
            yield from on_seen(replica, worker, item, now)
            peer = replica.order.peers.get(worker)
            if peer is not None and peer.catching_up:
                self._again_at = min(self._again_at, now + PROBE_S)
            if replica.order.committed != committed:
                self._release(replica)
            else:
                replica.order.trim(replica.applied)
            goes_on = held_back and not replica.held_back
            if goes_on or replica.timer_at < math.inf:
                self._wake(replica.key)  # ticks wait where much is not committed, or not applied
            if goes_on or replica.order.untold:
                self._untold[replica.key] = None


def outgoing(replicas: Iterable[Replica], now: float, again_s: float) -> dict[int, list[PartitionOrder]]:
    """What the primaries among these have to say, by worker."""
    by_worker: dict[int, list[PartitionOrder]] = {}
    for replica in replicas:
        order = replica.order
        end, committed = order.end, order.committed
        left = 0 if replica.exit is None else replica.exit.left
        for worker, peer in order.peers.items():
            if peer.acked is None or peer.copying:
                continue
            probe = peer.catching_up or replica.held_back
            if peer.overdue(end, committed, now, PROBE_S if probe else again_s):
                peer.send_again(now)
            if peer.sent >= end and peer.told >= committed and not peer.wants_left(left, now):
                continue
            peer.left_at = now + again_s
            first = max(peer.sent, order.base)
            entries = order.since(first)[:ENTRIES_MAX]
            peer.sent = first + len(entries)
            peer.told = order.promise(peer, peer.sent) if order.alone(peer) else committed
            claim = NO_CLAIM if peer.kind.applies else replica.claim()
            item = PartitionOrder(
                replica.stage.id, replica.partition, peer.incarnation, replica.leads_since, first, entries, peer.told,
                left, claim.steps, claim.checksum,
            )  # fmt: skip
            by_worker.setdefault(worker, []).append(item)
    return by_worker


def seen(replica: Replica) -> PartitionSeen:
    """What a secondary answers."""
    return PartitionSeen(
        replica.stage.id, replica.partition, replica.incarnation, replica.order.term, replica.order.verified,
        replica.applied, replica.checked, replica.last_checksum,
        0 if replica.exit is None else replica.exit.left,
    )  # fmt: skip


def on_seen(replica: Replica, worker: int, item: PartitionSeen, now: float) -> list[CaughtUp | Diverged]:
    """A secondary's answer at its primary; what the controller is to hear of it."""
    if item.term != replica.leads_since:
        return []
    if not replica.order.on_seen(worker, item.incarnation, item.received_below, item.applied):
        return []
    peer = replica.order.peers[worker]
    peer.left = max(peer.left, item.left)
    reports: list[CaughtUp | Diverged] = []
    if (step := _differs(replica, peer, item)) is not None:
        reports.append(Diverged(replica.stage.id, replica.partition, worker, item.incarnation, step))
    if not peer.safe:
        reports += _arrived(replica, worker, peer, now)
    return reports


def _differs(replica: Replica, peer: Peer, item: PartitionSeen) -> int | None:
    """Compare the output of a secondary with that of its primary, where both have been by now; None: it is the same. What the
    secondary says of a step that the primary has still to come to, is compared then: it may be ahead all the time. What
    differs is compared and reported with every answer until the secondary is dropped: a report may be lost."""
    said = Claim(item.checked, item.checksum)
    claims = [said] if peer.claim is None else [peer.claim, said]
    peer.claim = None
    for claim in claims:
        if claim.steps > replica.checked:
            peer.claim = claim
            return None
        expected = replica.checksum_at(claim.steps) if claim.steps > peer.checked else None
        if expected is not None:
            if expected != claim.checksum:
                return claim.steps
            peer.checked = claim.steps
    return None


def _arrived(replica: Replica, worker: int, peer: Peer, now: float) -> Iterator[CaughtUp]:
    """News of a replica that has not been reported as safe yet."""
    assert peer.acked is not None
    if peer.live_at_step is None:
        peer.live_at_step, peer.live_at_since = replica.order.committed, now
    # Not all that is committed by now: under a steady load there is always a step that is still on its way.
    applied = not peer.kind.applies or peer.applied >= peer.live_at_step or now - peer.live_at_since >= CATCH_UP_MAX_S
    if not peer.live and peer.acked >= peer.live_at_step and applied and not peer.caught_up_reported:
        peer.caught_up_reported = True
        yield CaughtUp(
            replica.stage.id, replica.partition, worker, peer.incarnation, False, peer.stall_ms, peer.copy_bytes
        )
    reached = peer.acked >= replica.order.committed
    if peer.live and reached and replica.order.settled(peer):
        peer.safe = True
        steps = max(replica.applied - peer.applied, 0) if peer.kind.applies else 0  # a standby is always behind
        yield CaughtUp(
            replica.stage.id, replica.partition, worker, peer.incarnation, True, peer.stall_ms, peer.copy_bytes, steps,
            steps * replica.step_s,
        )  # fmt: skip
