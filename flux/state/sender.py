"""Copies of state on their way from one worker to another, as a state machine without I/O (design: copy, copy-in-parts).

The primary stands still while its state is copied to separate memory, and then goes on. From that memory the copy travels in
parts, a few at a time, so that rows on the same connection need not wait behind it. The new worker puts the parts together and
makes a replica of them (``receiver``), or keeps them if the replica is a standby. A standby gets further copies while it lives:
changes since a copy that it has, if the operator knows its changes and they are smaller (``DeltaTracker``). Long jobs are given
away as ``Aside``, so that other partitions of the worker go on meanwhile.

The order of the phases is in ``phases``.

A copy ends with a code (HMAC) over all of it under the query's secret, and is not read without a valid code, because reading it
creates the objects that it names. The code is computed aside while the parts travel, and sent last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound
from flux.exchange.producer import ToWorker
from flux.replica.kinds import keeps_checkpoints
from flux.replica.order_log import Peer
from flux.replica.replica import Replica
from flux.state import receiver
from flux.state.jobs import JobFailed
from flux.state.phases import OutEvent, OutPhase, after_out
from flux.state.receiver import StateReceiver, sign
from flux.state.replay_points import ReplayPoint, ReplayPoints
from flux.state.state_copy import Photograph, StreamPosition, photograph, room_for
from flux.wire.control import CopyState
from flux.wire.messages import Install, Installed
from flux.wire.parts import PartLimits, StateParts
from partitioning.ids import PartitionKey


@dataclass(frozen=True, slots=True)
class Aside:
    """Effect: run this job in another thread, and return the result by ``on_done``."""

    #: Number by which ``on_done`` names the job.
    token: int
    #: "room", "copy" or "checkpoint", "sign", "decode" or "restore".
    what: str
    #: The partition whose replica the job is for.
    key: PartitionKey
    job: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ToSender:
    """Effect: answer on the connection by which a part arrived."""

    connection: Hashable
    message: Installed


Effect = Aside | ToWorker | ToSender


class SenderHost(receiver.ReceiverHost, Protocol):
    """The worker, as its ``StateSender`` sees it."""

    def inbounds_of(self, replica: Replica) -> Iterable[Inbound]: ...

    def note_copy(self, replica: Replica, worker: int, incarnation: int, positions: Iterable[StreamPosition]) -> None:
        """Note that a copy for a new replica on a worker was taken, and that it has these positions."""

    def goes_on(self, key: PartitionKey) -> None:
        """Wake a replica that stood still and may take steps again, or that has orders to send."""


class CopyName(NamedTuple):
    """The name of a replica that is to be made."""

    stage: int
    partition: int
    worker: int
    incarnation: int


@dataclass
class OutgoingCopy:
    """A copy that leaves this worker."""

    command: CopyState
    replica: Replica
    #: Number of the copy, unique on this worker.
    number: int
    phase: OutPhase
    #: It is for a live standby, which gets the order meanwhile.
    checkpoint: bool = False
    #: It is for a standby, and the operator knows its changes: further copies may be these alone (``Replica.deltas``).
    by_deltas: bool = False
    #: It is a replay point.
    replays: bool = False
    #: It has the changes since the copy of this number; -1: it is whole.
    base: int = -1
    #: It is small enough to be made in the thread of the worker.
    inline: bool = False
    #: Memory prepared for a large copy.
    room: np.ndarray | None = None
    #: Time, by the sender's clock, at which the partition stopped.
    began: float = 0.0
    #: The replay point, once it is known.
    point: ReplayPoint | None = None
    parts: StateParts = field(default_factory=StateParts)

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.command.stage, self.command.partition)

    @property
    def name(self) -> CopyName:
        return CopyName(*self.key, self.command.worker, self.command.incarnation)

    def on(self, event: OutEvent) -> None:
        self.phase = after_out(self.phase, event)


class StateSender:
    """The copies of state that leave one worker, and (``incoming``) those that arrive there. ``clock`` (seconds) only measures
    how long a partition stands still."""

    def __init__(
        self,
        host: SenderHost,
        secret: bytes,
        again_s: float,
        clock: Callable[[], float],
        limits: PartLimits | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._host = host
        self._secret = secret
        self._again_s = again_s
        self._clock = clock
        self._limits = limits or PartLimits()
        self._outgoing: dict[CopyName, OutgoingCopy] = {}
        #: Commands for primaries that have not come to life yet.
        self._early: dict[CopyName, CopyState] = {}
        self._points: WeakKeyDictionary[Replica, ReplayPoints] = WeakKeyDictionary()
        #: Callbacks for the results of jobs, by token.
        self._waiting: dict[int, Callable[[Any, float], None]] = {}
        self._effects: deque[Effect] = deque()
        self._number = 0
        self._token = 0
        self.incoming = StateReceiver(
            host, secret, self._limits.inline_bytes, self._aside, self._answer, counters or Counters()
        )  # fmt: skip

    # ---- the primary's side

    def on_copy_state(self, command: CopyState) -> None:
        """Copy a state at the next step boundary; safe to repeat. A primary that is still being restored copies its state once it
        has come to life."""
        key = PartitionKey(command.stage, command.partition)
        name = CopyName(*key, command.worker, command.incarnation)
        replica = self._host.replicas.get(key)
        if replica is None and self._comes_to_life(key):
            self._early[name] = command
            return
        peer = None if replica is None else self._peer(replica, command)
        if name in self._outgoing or replica is None or peer is None:
            return  # the copy is under way, or no longer wanted
        if peer.acked is not None and not peer.copying:
            return  # the copy has arrived, which the controller does not know yet
        self._begin(name, command, replica, checkpoint=False)

    def _comes_to_life(self, key: PartitionKey) -> bool:
        """Tell whether a replica of the partition is placed here that has no operator yet."""
        return key in self._host.awaited or key in self._host.followers

    def _begin_early(self) -> None:
        for name, command in list(self._early.items()):
            key = PartitionKey(command.stage, command.partition)
            if key in self._host.replicas or not self._comes_to_life(key):
                del self._early[name]
                self.on_copy_state(command)

    def checkpoint(self, key: PartitionKey, worker: int, whole: bool = True) -> None:
        """Copy the state of a primary here to its standby on a worker, at the next step boundary. ``whole``: a replay point is
        not enough, and one that is under way is given up."""
        replica = self._host.replicas[key]
        peer = replica.order.peers[worker]
        name = CopyName(*key, worker, peer.incarnation)
        if name in self._outgoing:
            self._outgoing[name].on(OutEvent.DROPPED)
            self._over(self._outgoing[name])
        replays = peer.kind.replays and not whole
        self._begin(name, CopyState(*key, worker, peer.incarnation), replica, checkpoint=True, replays=replays)

    def under_way(self, key: PartitionKey, worker: int) -> OutPhase | None:
        """Return the phase of the copy from a primary here to a worker; None: there is no copy."""
        return next((out.phase for name, out in self._outgoing.items() if name[:3] == (*key, worker)), None)

    @property
    def checkpoints(self) -> int:
        """The number of checkpoints that are on their way. A checkpoint that waits for the end of a step, or for acks, does not
        count, because the step or the acks may in turn wait for other partitions."""
        waiting = (OutPhase.ROOM, OutPhase.BOUNDARY, OutPhase.UNACKED)
        return sum(out.checkpoint and out.phase not in waiting for out in self._outgoing.values())

    def _begin(
        self, name: CopyName, command: CopyState, replica: Replica, checkpoint: bool, replays: bool = False
    ) -> None:  # fmt: skip
        """Begin a copy; it is made at the next step boundary.

        For a large whole copy memory is prepared aside first, because the partition stands still while the copy is made. A
        standby with a base most likely gets changes alone, which are small. If it gets a whole copy after all, memory for it is
        made while the partition stands still (``Photograph.encode``)."""
        key = replica.key
        self._number += 1
        if replays:
            self._outgoing[name] = OutgoingCopy(
                command, replica, self._number, OutPhase.BOUNDARY, checkpoint, replays=True, inline=True
            )  # fmt: skip
            return
        size = replica.state_bytes + (0 if replica.output.exit is None else replica.output.exit.bytes)
        large = size > self._limits.inline_bytes
        by_deltas = replica.gives_changes and keeps_checkpoints(replica.order.peers[command.worker].kind)
        if by_deltas:
            self._follow(replica)
        makes_room = large and replica.deltas.base(command.worker) is None
        phase = OutPhase.ROOM if makes_room else OutPhase.BOUNDARY
        inline = size > 0 and not large
        out = self._outgoing[name] = OutgoingCopy(
            command, replica, self._number, phase, checkpoint, by_deltas, inline=inline
        )
        if makes_room:
            self._aside("room", key, partial(room_for, size), partial(self._on_room, out))

    def _follow(self, replica: Replica) -> None:
        """Restrict the knowledge about standbys to the present term, and to their present incarnations."""
        peers = replica.order.peers
        lives = {worker: peer.incarnation for worker, peer in peers.items()}
        replica.deltas.follow(replica.leads_since, lives, self._limits)

    def _on_room(self, out: OutgoingCopy, room: np.ndarray, _now: float) -> None:
        out.room = room
        if out.phase is not OutPhase.OVER:
            out.on(OutEvent.READY)

    @staticmethod
    def _peer(replica: Replica, command: CopyState) -> Peer | None:
        """Return the replica that is to be made, as its primary sees it."""
        peer = replica.order.peers.get(command.worker)
        if peer is None or peer.incarnation != command.incarnation or not peer.kind.copies:
            return None
        return peer if not peer.live or keeps_checkpoints(peer.kind) else None

    def _wanted(self, out: OutgoingCopy) -> bool:
        return self._host.replicas.get(out.key) is out.replica and self._peer(out.replica, out.command) is not None

    @property
    def active(self) -> bool:
        """True if ``poll`` may have something to do."""
        return bool(self._outgoing or self._effects or self._early)

    def poll(self, now: float) -> Iterator[Effect]:
        if self._early:
            self._begin_early()
        for out in list(self._outgoing.values()):
            if out.phase is OutPhase.COPYING:
                continue  # even if the copy is no longer wanted: the state is being read
            if not self._wanted(out):
                out.on(OutEvent.DROPPED)
                self._over(out)
                continue
            # One cut after the other: the changes of the next cut come behind those of this one.
            if (
                out.phase is OutPhase.BOUNDARY
                and out.replica.between_steps
                and not (out.by_deltas and out.replica.frozen)
            ):
                self._note_point(out) if out.replays else self._copy(out, now)
            if out.point is not None and out.phase is OutPhase.UNACKED and out.point.acked(out.replica):
                self._send(out, out.point.picture.encode(), now)
            if out.phase is OutPhase.SENDING:
                yield from self._parts(out, now)
        while self._effects:
            yield self._effects.popleft()

    def _over(self, out: OutgoingCopy) -> None:
        """End a copy: the other replica has its state, or is gone. The other replica may be live already, with a copy from
        another primary. Either way it must get the order from now on."""
        del self._outgoing[out.name]
        peer = out.replica.order.peers.get(out.command.worker)
        if peer is not None and peer.incarnation == out.command.incarnation and peer.copying:
            out.replica.order.note_copy_arrived(out.command.worker)
            self._host.goes_on(out.key)

    def _note_point(self, out: OutgoingCopy) -> None:
        """Note a replay point. If the standby would learn nothing from it, nothing is sent."""
        out.began = self._clock()
        replica = out.replica
        replica.output.compare(replica.applied)
        points = self._points.setdefault(replica, ReplayPoints())
        known = replica.order.peers[out.command.worker].applied
        out.point = points.make(replica, self._host.inbounds_of(replica), known)
        out.on(OutEvent.DROPPED if out.point is None else OutEvent.POINT)
        if out.point is None:
            self._over(out)

    def _copy(self, out: OutgoingCopy, now: float) -> None:
        """Photograph a replica between two steps, freeze it, and encode the photograph, in one of three ways. A standby with a
        base gets the changes since then. Without a base it gets a whole copy; the changes of this cut are encoded beside it if
        other standbys can use them. An operator that gives no changes is copied whole.

        If it is no checkpoint, the copy is noted first, so that no ack from here on lets a producer forget rows that the new
        replica will want."""
        out.on(OutEvent.BETWEEN_STEPS)
        out.began = self._clock()
        replica = out.replica
        replica.output.compare(replica.applied)
        held = None
        changes = self._changes(out) if out.by_deltas else None
        if changes is not None:
            held = replica.deltas.base(out.command.worker)
        picture = photograph(replica, self._host.inbounds_of(replica), changes, whole=held is None)
        if not out.checkpoint:
            replica.order.note_copy(out.command.worker, replica.applied)
            self._host.note_copy(replica, out.command.worker, out.command.incarnation, picture.positions)
        replica.frozen += 1
        if held is not None:
            out.base = held.number
            since = replica.deltas.since(held)
            self._encode(out, lambda: _of_changes(picture, since), partial(self._changed, out), now)
        elif changes is not None and replica.deltas.wanted:
            self._encode(
                out, lambda: (picture.encode_changes(), picture.encode(out.room)), partial(self._changed, out), now
            )
        else:
            if changes is not None:
                replica.deltas.add(memoryview(b""))  # no standby can use these changes
            self._encode(out, partial(Photograph.encode, picture, out.room), partial(self._copied, out), now)

    def _changes(self, out: OutgoingCopy) -> Any:
        """Return the changes since the last cut; None: they are not known."""
        self._follow(out.replica)
        changes = out.replica.guard.changes()
        if changes is None:
            out.replica.deltas.add(None)
        return changes

    def _encode(
        self, out: OutgoingCopy, job: Callable[[], Any], then: Callable[[Any, float], None], now: float
    ) -> None:
        if out.inline:
            then(job(), now)
        else:
            self._aside("checkpoint" if out.checkpoint else "copy", out.key, job, then)

    def _changed(self, out: OutgoingCopy, made: tuple[memoryview, bytes | memoryview], now: float) -> None:
        """Send changes, or make a whole copy if the changes are too large. The partition still stands where it was cut."""
        changes, data = made
        replica, worker = out.replica, out.command.worker
        replica.deltas.add(changes)
        held = replica.deltas.base(worker)
        here = self._host.replicas.get(out.key) is replica  # else it has been closed meanwhile
        if here and out.base >= 0 and (held is None or len(data) > held.room):
            out.base = -1  # a whole copy is better than changes of this size
            picture = photograph(replica, self._host.inbounds_of(replica))
            self._encode(out, partial(Photograph.encode, picture, out.room), partial(self._copied, out), now)
            return
        self._copied(out, data, now)

    def _copied(self, out: OutgoingCopy, data: bytes | memoryview, now: float) -> None:
        replica = out.replica
        replica.frozen -= 1
        if out.base < 0:
            replica.copy_bytes = len(data)
        if out.by_deltas and self._host.replicas.get(out.key) is replica:
            self._note_sent(out, len(data))
        self._send(out, data, now)

    def _send(self, out: OutgoingCopy, data: bytes | memoryview, now: float) -> None:
        out.on(OutEvent.COPIED)
        parts = out.parts = StateParts(memoryview(data).cast("B"), heard=now)
        out.room = None
        about = *out.key, out.command.incarnation, out.number, out.base
        if out.inline:
            parts.signature = sign(self._secret, about, parts.data)
        else:
            self._aside("sign", out.key, partial(sign, self._secret, about, parts.data), partial(self._signed, parts))
        peer = self._peer(out.replica, out.command)
        if peer is not None and not out.replays:
            peer.stall_ms, peer.copy_bytes = (self._clock() - out.began) * 1e3, len(data)
        self._host.goes_on(out.key)

    @staticmethod
    def _note_sent(out: OutgoingCopy, nbytes: int) -> None:
        deltas, worker = out.replica.deltas, out.command.worker
        if out.base >= 0:
            deltas.sent_changes(worker, out.number, nbytes)
        else:
            deltas.sent_whole(worker, out.command.incarnation, out.number, nbytes)

    @staticmethod
    def _signed(parts: StateParts, signature: bytes, now: float) -> None:
        parts.signature, parts.heard = signature, now

    def _parts(self, out: OutgoingCopy, now: float) -> Iterator[ToWorker]:
        stage, partition, worker, incarnation = out.name
        for offset, payload in out.parts.due(now, self._again_s, self._limits):
            message = Install(
                stage, partition, incarnation, out.number, offset, out.parts.total, out.replica.leads_since, out.base
            )  # fmt: skip
            yield ToWorker(worker, message, payload=payload)

    def on_installed(self, worker: int, answer: Installed, now: float) -> None:
        name = CopyName(answer.stage, answer.partition, worker, answer.incarnation)
        out = self._outgoing.get(name)
        if out is None or out.number != answer.copy or out.phase is not OutPhase.SENDING:
            return
        out.parts.on_received(answer.received_bytes, now)
        if answer.lacks:
            out.replica.deltas.forget(worker)
            out.on(OutEvent.LACKING)
            self._over(out)
            if self._wanted(out):
                self._begin(out.name, out.command, out.replica, out.checkpoint)  # a whole copy
        elif answer.done:
            if out.by_deltas:
                out.replica.deltas.confirm(worker, out.number)
            out.on(OutEvent.ALIVE)
            self._over(out)

    # ---- both

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        copying = [id(out.replica) for out in self._outgoing.values() if out.phase is OutPhase.COPYING]
        for key, replica in self._host.replicas.items():
            frozen = copying.count(id(replica)) if copying else 0
            assert replica.frozen == frozen, (
                f"{replica.where} is frozen for {replica.frozen} copies, {frozen} are taken"
            )
            for worker, peer in replica.order.peers.items():
                if peer.copying:
                    name = CopyName(*key, worker, peer.incarnation)
                    assert name in self._outgoing, (
                        f"{replica.where}: worker {worker} waits for a copy that nobody sends"
                    )
        for out in self._outgoing.values():
            out.parts.validate()

    def _aside(self, what: str, key: PartitionKey, job: Callable[[], Any], then: Callable[[Any, float], None]) -> None:
        self._token += 1
        self._waiting[self._token] = then
        self._effects.append(Aside(self._token, what, key, job))

    def on_done(self, token: int, result: Any, now: float) -> None:
        """Take the result of a job that was given away. A job's exception is raised again: it is user code that failed."""
        then = self._waiting.pop(token)
        if isinstance(result, JobFailed):
            raise result.error
        then(result, now)

    def _answer(self, connection: Hashable, message: Install, through: int, done: bool, lacks: bool = False) -> None:
        answer = Installed(message.stage, message.partition, message.incarnation, message.copy, through, done, lacks)
        self._effects.append(ToSender(connection, answer))


def _of_changes(picture: Photograph, since: list[memoryview]) -> tuple[memoryview, memoryview]:
    """Return the changes of this cut, and the copy made of them and of all changes ``since`` the checkpoint of a standby."""
    newest = picture.encode_changes()
    return newest, picture.encode_since([*since, newest])
