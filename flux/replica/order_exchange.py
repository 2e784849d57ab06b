"""The traffic of order logs between the replicas of one worker and those on other workers (design: order-log, commit).

Orders for all replicas on the same worker travel in one message. They are sent as soon as there is something new, and sent
again until acked, so that a lost message costs one interval and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from flux.exchange.feed import Counters
from flux.exchange.producer import ToWorker
from flux.replica.kinds import Follower
from flux.replica.order_log import NO_CLAIM, OrderClaim, Peer
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.wire.messages import Orders, OrdersSeen, PartitionOrder, PartitionSeen
from partitioning.ids import PartitionKey

#: Limit of entries in one message: a replica that is far behind gets its entries in several pieces.
ENTRIES_MAX = 1024
#: Least time, in ack intervals, for which orders wait for each other while there is other work. Each message has its answer.
PATIENCE = 2
#: Seconds after which a replica that is catching up, or that holds back its primary, is asked for its progress again.
PROBE_S = 0.005
#: A replica becomes live once it has applied the steps that arrived while its state was copied, because a partition that moves
#: stands still for the rest. This is the limit for that wait, in seconds: a worker that is fully busy takes long to catch up, two
#: replicas apply the same rows meanwhile, and having the order alone is enough for safety.
CATCH_UP_MAX_S = 0.05


@dataclass(frozen=True)
class CaughtUp:
    """Report to the controller: a replica that is being added follows the order without a gap and close behind."""

    stage: int
    partition: int
    worker: int
    incarnation: int
    #: It is live and has all that is committed.
    safe: bool
    #: Milliseconds for which the partition stood still while its state was copied.
    stall_ms: float
    #: Size of the copy.
    bytes: int = 0
    #: Steps that it has still to apply.
    steps_behind: int = 0
    #: Estimated seconds that these steps will take.
    replay_s: float = 0.0


@dataclass(frozen=True)
class Diverged:
    """Report to the controller: a secondary gave other output than its primary for the same steps."""

    stage: int
    partition: int
    worker: int
    incarnation: int
    step: int


class OrderExchange:
    """The order traffic of one worker: orders from its primaries, and answers from its secondaries.

    ``patience_s`` is the time for which orders wait for each other while there is other work. It is at least
    ``least_patience_s``; the shell of a busy worker makes it longer."""

    def __init__(
        self,
        replicas: Mapping[PartitionKey, Replica],
        followers: Mapping[PartitionKey, Follower],
        settings: Settings,
        counters: Counters,
        wake: Callable[[PartitionKey], None],
        report_complete: Callable[[Replica], None],
    ) -> None:
        """Begin without traffic. ``wake`` is called for a replica that may have a step to apply by now, ``report_complete`` for
        one whose end may have been committed."""
        self._replicas = replicas
        self._followers = followers
        self._counters = counters
        self._wake = wake
        self._report_complete = report_complete
        self.patience_s = self.least_patience_s = PATIENCE * settings.ack_interval
        self._again_s = settings.heartbeat_interval
        #: Primaries that have something to send, the oldest first.
        self._untold: dict[PartitionKey, None] = {}
        self._tell_at = 0.0
        self._again_at = 0.0

    def tell(self, key: PartitionKey, at_once: bool = False) -> None:
        """Note that a primary has something to send. ``at_once``: other work does not hold it back."""
        self._untold[key] = None
        if at_once:
            self._tell_at = 0.0

    def due(self) -> float:
        """Return the time at which ``poll`` must be called again at the latest."""
        return min(self._tell_at if self._untold else math.inf, self._again_at)

    def poll(self, now: float, busy: bool, wall_ahead: float = 0.0) -> Iterator[ToWorker]:
        """Yield due orders: at once if there is nothing else to do; while there is, a few steps travel together. Steps are
        ordered at the time of the wall clock, which is ``wall_ahead`` of ``now``."""
        if now >= self._again_at:
            self._again_at = now + self._again_s / 2
            self._untold |= dict.fromkeys(key for key, replica in self._replicas.items() if replica.order.peers)
        if not self._untold or (busy and now < self._tell_at):
            return
        self._tell_at = now + self.patience_s
        leaders = [self._replicas[key] for key in self._untold if key in self._replicas]
        self._untold.clear()
        for replica in leaders:
            if replica.order.peers and not replica.orders_itself:
                replica.decide_ahead(now + wall_ahead)
                if replica.held_back:
                    self._again_at = min(self._again_at, now + PROBE_S)
        items = outgoing([each for each in leaders if not each.orders_itself], now, self._again_s)
        for worker, item in questions([each for each in leaders if each.orders_itself], now, self._again_s):
            items.setdefault(worker, []).append(item)
        for worker, mine in items.items():
            yield ToWorker(worker, Orders(mine))

    def on_orders(self, message: Orders) -> list[PartitionSeen]:
        """Follow the orders of primaries, and return the answers of the secondaries here."""
        answers = []
        for item in message.items:
            replica = self._replicas.get(PartitionKey(item.stage, item.partition))
            if replica is None:
                answers += self._kept(item)
            elif replica.incarnation != item.incarnation:
                self._counters.stale += 1
            elif replica.leads:
                self._counters.stale += 1  # from a primary that was deposed and does not know it yet
            elif replica.orders_itself and item.term >= replica.order.term:
                replica.order.term = item.term
                answers.append(seen(replica))
            elif not replica.orders_itself and self._follow(replica, item):
                answers.append(seen(replica))
            else:
                self._counters.stale += 1
        return answers

    def _kept(self, item: PartitionOrder) -> list[PartitionSeen]:
        """Return the answer of a replica without an operator."""
        follower = self._followers.get(PartitionKey(item.stage, item.partition))
        answer = follower.on_orders(item) if follower is not None and follower.incarnation == item.incarnation else None
        self._counters.stale += answer is None
        return [] if answer is None else [answer]

    def _follow(self, replica: Replica, item: PartitionOrder) -> bool:
        """Follow the orders of a primary. Return False if the sender is deposed."""
        committed = replica.order.committed
        if not replica.order.on_orders(item.term, item.first, item.entries, item.committed, replica.applied):
            return False
        if replica.output.exit is not None:
            replica.output.exit.forget(item.left)
        if replica.order.committed != committed:
            self._release(replica)
            self._wake(replica.key)
        return True

    def _release(self, replica: Replica) -> None:
        """Release committed output, and the report that the partition is complete."""
        replica.release()
        self._report_complete(replica)

    def on_orders_seen(self, worker: int, message: OrdersSeen, now: float) -> Iterator[CaughtUp | Diverged]:
        """Take the answers of the secondaries on a worker, and yield reports for the controller."""
        for item in message.items:
            replica = self._replicas.get(PartitionKey(item.stage, item.partition))
            if replica is None or not replica.leads or item.term != replica.leads_since:
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
                # Nothing new is released, which trims, too. But the ack alone may have freed entries that all others have now.
                replica.order.trim(replica.applied)
            goes_on = held_back and not replica.held_back
            if goes_on or replica.timer_at < math.inf or replica.watermark_offered:
                # A tick, or a watermark, waits while too many steps are not committed, or not applied.
                self._wake(replica.key)
            if goes_on or replica.order.untold:
                self._untold[replica.key] = None


def outgoing(replicas: Iterable[Replica], now: float, again_s: float) -> dict[int, list[PartitionOrder]]:
    """Collect the pending orders of the primaries among these replicas, by worker."""
    by_worker: dict[int, list[PartitionOrder]] = {}
    for replica in replicas:
        order = replica.order
        end, committed = order.end, order.committed
        left = 0 if replica.output.exit is None else replica.output.exit.left
        for worker, peer in order.peers.items():
            if peer.acked is None or peer.copying:
                continue
            peer.look(now)
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
            claim = NO_CLAIM if peer.kind.applies else claim_of(replica)
            item = PartitionOrder(
                stage=replica.stage.id, partition=replica.partition, incarnation=peer.incarnation,
                term=replica.leads_since, first=first, entries=entries, committed=peer.told, left=left,
                checked=claim.steps, checksum=claim.checksum, steady=replica.steady,
            )  # fmt: skip
            by_worker.setdefault(worker, []).append(item)
    return by_worker


def questions(replicas: Iterable[Replica], now: float, again_s: float) -> Iterator[tuple[int, PartitionOrder]]:
    """Yield questions to replicas that order their own steps, with their workers: whether those that were added have come to
    life, and the checksums of new output. ``replicas``: those that stand first. A question is an order without a step."""
    for replica in replicas:
        for worker, peer in replica.order.peers.items():
            arrived = peer.safe if peer.live else peer.caught_up_reported
            news = replica.output.compared and replica.output.batches > peer.checked
            if peer.acked is None or peer.copying or now < peer.left_at or (arrived and not news):
                continue
            peer.left_at = now + (again_s if arrived else PROBE_S)
            yield worker, PartitionOrder(
                stage=replica.stage.id, partition=replica.partition, incarnation=peer.incarnation, term=replica.leads_since,
                first=0, entries=[], committed=0, left=0, checked=0, checksum=0, steady=True,
            )  # fmt: skip


def claim_of(replica: Replica) -> OrderClaim:
    """Return the claim about the newest committed output, which replicas that keep checkpoints check if they take over."""
    steps = min(replica.applied, replica.order.committed)
    checksum = replica.output.checksums.at(steps) if replica.output.compared else None
    return NO_CLAIM if checksum is None else OrderClaim(steps, checksum)


def seen(replica: Replica) -> PartitionSeen:
    """Return the answer of a secondary."""
    output = replica.output
    return PartitionSeen(
        stage=replica.stage.id, partition=replica.partition, incarnation=replica.incarnation, term=replica.order.term,
        received_below=replica.order.verified, applied=replica.progress,
        checked=output.checksums.steps, checksum=output.checksums.newest,
        left=0 if output.exit is None else output.exit.left,
        gone=replica.gone_before(replica.applied) if replica.gone else 0,
    )  # fmt: skip


def on_seen(replica: Replica, worker: int, item: PartitionSeen, now: float) -> list[CaughtUp | Diverged]:
    """Take the answer of a secondary at its primary, and return reports for the controller."""
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
    """Compare the output of a secondary with that of its primary, for steps that both have applied by now. Return the step after
    which it differs; None: it is the same.

    A secondary's claim about a step that the primary has not reached yet is kept and compared later, because the secondary may
    be ahead all the time. A difference is found and reported with every answer until the secondary is dropped, because a report
    may be lost."""
    compared = (replica.gone or item.gone) and peer.kind.applies and item.applied <= replica.applied
    if compared and item.gone != replica.gone_before(item.applied):
        return item.applied
    said = OrderClaim(item.checked, item.checksum)
    claims = [said] if peer.claim is None else [peer.claim, said]
    peer.claim = None
    for claim in claims:
        if claim.steps > replica.output.checksums.steps:
            peer.claim = claim
            return None
        expected = replica.output.checksums.at(claim.steps) if claim.steps > peer.checked else None
        if expected is not None:
            if expected != claim.checksum:
                return claim.steps
            peer.checked = claim.steps
    return None


def _arrived(replica: Replica, worker: int, peer: Peer, now: float) -> Iterator[CaughtUp]:
    """Yield the progress of a replica that has not been reported as safe yet."""
    assert peer.acked is not None
    if peer.live_at_step is None:
        goal = replica.progress if peer.kind.orders_itself else replica.order.committed
        peer.live_at_step, peer.live_at_since = goal, now
    # The steps committed by now are not all required: under a steady load there is always a step that is still on its way.
    applied = not peer.kind.applies or peer.applied >= peer.live_at_step or now - peer.live_at_since >= CATCH_UP_MAX_S
    ordered = peer.kind.orders_itself or peer.acked >= peer.live_at_step
    if not peer.live and ordered and applied and not peer.caught_up_reported:
        peer.caught_up_reported = True
        yield CaughtUp(
            replica.stage.id, replica.partition, worker, peer.incarnation, False, peer.stall_ms, peer.copy_bytes
        )
    reached = peer.acked >= replica.order.committed
    if peer.live and reached and replica.order.settled(peer):
        peer.safe = True
        comparable = peer.kind.applies and not peer.kind.orders_itself
        steps = max(replica.applied - peer.applied, 0) if comparable else 0  # a standby is always behind
        yield CaughtUp(
            replica.stage.id, replica.partition, worker, peer.incarnation, True, peer.stall_ms, peer.copy_bytes, steps,
            steps * replica.step_s,
        )  # fmt: skip
