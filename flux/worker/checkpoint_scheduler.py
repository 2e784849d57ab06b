"""The schedule by which primaries send checkpoints to their standbys (design: standby).

Checkpoints are sent at intervals, in the order of a policy. They are sent at once if producers or the order log run out of room,
and when a partition has come to its end. Only a few are sent at a time, because each stops its partition while the state is
copied. A policy (``POLICIES``) chooses among those that are due and cannot all leave at once.

``LastCheckpointWatch`` waits for the last checkpoints of a query that is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from flux.replica.kinds import keeps_checkpoints
from flux.replica.order_log import Peer
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.state.phases import OutPhase
from flux.state.sender import StateSender
from flux.wire.control import Checkpointed
from flux.worker.hosted_replicas import HostedReplicas
from flux.worker.source_scheduler import SourceScheduler
from partitioning.ids import PartitionKey


class Due(NamedTuple):
    """A checkpoint that is due."""

    #: Time at which the last checkpoint of this partition began.
    since: float
    #: Seconds that it would take to repeat the steps since then.
    replay_s: float
    #: Bytes to copy: of the state, or of its changes.
    nbytes: int


#: A policy returns a rank. The lowest rank is first. Both policies are compared by Hwang, Xing, Çetintemel and Zdonik, "A
#: Cooperative, Self-Configuring High-Availability Solution for Stream Processing" (ICDE 2007).
Policy = Callable[[Due], float]


def round_robin(due: Due) -> float:
    """Rank first the partition with the oldest last checkpoint."""
    return due.since


def min_max(due: Due) -> float:
    """Rank first the checkpoint that shortens the longest recovery most for its size: the longest time of replay for each byte. A
    partition with little new work waits while others are in need; its producers ask for its checkpoint when they run out of
    room."""
    return -due.replay_s / max(due.nbytes, 1)


POLICIES: dict[str, Policy] = {"round-robin": round_robin, "min-max": min_max}


#: Limit of checkpoints that leave a worker at the same time.
AT_ONCE = 2
#: An order log that is fuller than this part of its bound asks for a checkpoint.
PRESSED_SHARE = 1 / 2
#: Looks in each interval between two checkpoints, and the longest time from one look to the next, because an order log may fill
#: meanwhile, however long the interval is. Without any standby, looks may be rarer.
LOOKS, LOOK_MAX_S, IDLE_LOOK_MAX_S = 8, 0.25, 1.0
#: For a query that is stopped: the longest time for which a reader waits until one more row that it has read is in all
#: checkpoints; the longest time until all of them are, which is less than the controller waits; and the time between two looks
#: at the last checkpoints. On a busy machine, one checkpoint of each of 30 partitions takes more than the first of these.
SETTLES_S, SETTLES_MOST_S, KEEP_LOOK_S = 2.0, 7.0, 0.02


class CheckpointTarget(NamedTuple):
    """A partition with a primary here, and the worker of one of its standbys."""

    key: PartitionKey
    worker: int


class Begin(NamedTuple):
    """A checkpoint to begin."""

    key: PartitionKey
    worker: int
    #: A replay point is not enough.
    whole: bool


@dataclass
class SentCheckpoint:
    """The last checkpoint that was sent to a standby."""

    #: Incarnation of the standby.
    incarnation: int
    #: Steps in the checkpoint.
    step: int
    #: Time at which it began.
    at: float
    #: Steps in the standby's own checkpoint, by its last answer.
    known: int
    #: Time at which ``known`` grew.
    moved: float


class CheckpointScheduler:
    """The checkpoints that the primaries of one worker send."""

    def __init__(
        self,
        replicas: Mapping[PartitionKey, Replica],
        settings: Settings,
        sender: StateSender,
    ) -> None:
        self._replicas = replicas
        self._sender = sender
        self._interval_s = settings.checkpoint_interval
        self._again_s = settings.resend_timeout
        self._rate = settings.checkpoint_max_bytes_per_second
        self._rank = POLICIES[settings.checkpoint_policy]
        self._pressed_steps = int(settings.order_max_steps * PRESSED_SHARE)
        self._sent: dict[CheckpointTarget, SentCheckpoint] = {}
        self._pressed: set[PartitionKey] = set()
        self._anew: set[PartitionKey] = set()
        self._look_at = 0.0
        self._rests_until = 0.0
        #: Number of checkpoints that were asked for.
        self.pressed = 0
        #: Steps that are to be in the last checkpoints of a query that is stopped; None: not decided yet.
        self._last: dict[CheckpointTarget, int] | None = None

    def press(self, key: PartitionKey, anew: bool = False) -> None:
        """Ask for a checkpoint, because producers keep rows that only the checkpoints of this partition lack. ``anew``: even if
        no step was applied since the last one."""
        replica = self._replicas.get(key)
        if replica is not None and replica.primary:
            self._pressed.add(key)
            self._look_at = 0.0
            if anew:
                self._anew.add(key)

    def last(self) -> None:
        """Ask for checkpoints of all that is applied by now, because the query is stopped.

        Called again and again until the query ends: rows may still be on their way here from a worker that has read them."""
        standbys = self._standbys()
        lacking = {to.key for to, replica, peer in standbys if not peer.kind.replays and peer.applied < replica.applied}
        if lacking:
            self._pressed |= lacking
            self._look_at = 0.0

    def last_again(self) -> None:
        """Note that the last checkpoints are to have all that is applied by the next call of ``all_kept``."""
        self._last = None

    def all_kept(self) -> bool:
        """Tell whether every standby has the steps that its primary had applied at the first call since ``last_again``."""
        standbys = self._standbys()
        if self._last is None:
            self._last = {to: replica.applied for to, replica, peer in standbys if not peer.kind.replays}
        known = {to: peer.applied for to, _, peer in standbys}
        return all(known.get(to, step) >= step for to, step in self._last.items())

    def due(self) -> float:
        return self._look_at

    def _standbys(self) -> list[tuple[CheckpointTarget, Replica, Peer]]:
        """List the standbys of the primaries here."""
        return [
            (CheckpointTarget(key, worker), replica, peer)
            for key, replica in self._replicas.items()
            if replica.primary
            for worker, peer in replica.order.peers.items()
            if peer.live and keeps_checkpoints(peer.kind)
        ]

    def next(self, now: float) -> list[Begin]:
        """Return the checkpoints to begin now."""
        if now < self._look_at:
            return []
        self._look_at = now + min(self._interval_s / LOOKS, LOOK_MAX_S)
        standbys = self._standbys()
        if not standbys:
            self._pressed.clear()
            self._sent.clear()
            self._anew.clear()
            self._look_at = now + min(self._interval_s, IDLE_LOOK_MAX_S)
            return []
        busy = self._sender.checkpoints
        wanted: list[tuple[bool, float, Begin, Replica, Peer]] = []
        later: set[PartitionKey] = set()
        for to, replica, peer in standbys:
            sent = self._sent.get(to)
            if sent is None or sent.incarnation != peer.incarnation:
                sent = self._sent[to] = SentCheckpoint(
                    peer.incarnation, peer.applied, now - self._again_s, peer.applied, now
                )
            if peer.applied > sent.known:
                sent.known, sent.moved = peer.applied, now
            anew = to.key in self._anew and not peer.kind.replays
            if peer.applied >= replica.applied and not anew:
                sent.moved = now
                continue
            # The standby may have all steps, and not know yet that they are committed.
            waits = sent.step >= replica.applied and now < sent.at + self._again_s and not anew
            phase = self._sender.under_way(*to)
            pressed = (
                to.key in self._pressed or replica.finished or replica.order.end - peer.applied >= self._pressed_steps
            )
            whole = pressed and now >= sent.moved + max(self._interval_s, self._again_s)
            if waits or (phase is not None and not (whole and phase is OutPhase.UNACKED)):
                if peer.kind.replays and pressed:
                    later.add(to.key)  # a replay point may help no producer, and this is the reason for a checkpoint
                continue
            if not replica.between_steps:
                later.add(to.key)
                continue
            if pressed or (now >= sent.at + self._interval_s and now >= self._rests_until):
                replay_s = (replica.applied - peer.applied) * replica.step_s
                nbytes = replica.deltas.expected(to.worker, replica.state_bytes)
                rank = self._rank(Due(sent.at, replay_s, nbytes))
                wanted.append((not pressed, rank, Begin(*to, whole or not peer.kind.replays), replica, peer))
        wanted.sort(key=lambda each: each[:2])
        begun = wanted[: max(AT_ONCE - busy, 0)]
        if len(wanted) > len(begun):
            self._look_at = now + min(self._interval_s / LOOKS, LOOK_MAX_S) / LOOKS
        later |= {begin.key for _, _, begin, _, _ in wanted[len(begun) :]}
        self._pressed &= later  # a producer that still needs room asks again
        for calm, _, (key, worker, whole), replica, _ in begun:
            sent = self._sent[CheckpointTarget(key, worker)]
            self._anew.discard(key)
            sent.step, sent.at, sent.moved = replica.applied, now, now if whole else sent.moved
            self.pressed += not calm
            if whole:
                nbytes = replica.deltas.expected(worker, replica.state_bytes)
                self._rests_until = max(self._rests_until, now) + nbytes / self._rate
        return [begin for _, _, begin, _, _ in begun]


class LastCheckpointWatch:
    """The wait of one worker for its last checkpoints, once the query is stopped. ``due_at``: the time of the next look;
    ``tell_done`` tells readers and consumers which rows all have applied."""

    def __init__(
        self,
        hosted: HostedReplicas,
        reading: SourceScheduler,
        checkpoints: CheckpointScheduler,
        tell_done: Callable[[], None],
    ) -> None:
        self._hosted = hosted
        self._reading = reading
        self._checkpoints = checkpoints
        self._tell_done = tell_done
        #: The end of the wait unless there is progress, and in any case.
        self.due_at = self._settles_until = self._settles_at_most = inf
        #: The number of elements that checkpoints lacked at the last look.
        self._lacking = 0.0
        #: The epoch of the table whose primaries here are to give the vault their last checkpoints.
        self._epoch = -1
        #: It is reported that the vault has the last checkpoints.
        self._reported = False

    def begin(self, now: float, epoch: int) -> None:
        """Begin to wait. Nothing more is read, and the vault gets all rows that were read, unless there is no progress for a
        moment, or the whole takes too long: rows that the vault has need not be in the source any more when the query goes on."""
        self.due_at, self._epoch = now, epoch
        self._settles_until, self._settles_at_most = now + SETTLES_S, now + SETTLES_MOST_S
        self._reading.stopped, self._reported = True, False
        self._checkpoints.last_again()

    def report_again(self) -> None:
        """Repeat the report, because it may be lost."""
        self._reported = False

    def look(self, now: float) -> Iterator[Checkpointed]:
        """Ask for checkpoints of all that is applied here, until the query ends. Yield the report, once, that the vault has them.

        A worker that reads nothing can report at once, and still gets rows from the readers of other workers. A reader
        reports when all that it has read is in checkpoints everywhere, and the query ends when all have reported."""
        if now < self.due_at:
            return
        self.due_at = now + KEEP_LOOK_S
        self._tell_done()
        self._checkpoints.last()
        if self._reading.lacking != self._lacking:
            self._lacking = self._reading.lacking
            self._settles_until = min(now + SETTLES_S, self._settles_at_most)
        settled, hosted = self._reading.settled, self._hosted
        comes = hosted.epoch < self._epoch or bool(hosted.begin_on_disk())  # primaries that are not here yet
        if self._reported or comes or (now < self._settles_until and not settled):
            return
        if self._checkpoints.all_kept():
            self._reported = True
            yield Checkpointed(node=hosted.worker, epoch=self._epoch, settled=settled)
