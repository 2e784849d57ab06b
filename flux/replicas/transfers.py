"""Copies of state on their way from one worker to another, as a state machine without I/O (design: copy, copy-in-parts).

The primary stands still while its state is copied to a memory of its own, and goes on; from there it travels in parts, a
few at a time, so that rows on the same connection need not wait behind it. The new worker puts the parts together and
makes a replica of them. What takes long is given away as ``Aside``: other partitions of the worker go on meanwhile.

Which phase follows which is in ``copy_phases``.

A copy ends with a code (HMAC) over all of it under the query's secret, and is not read without: who reads it makes the
objects that it names. It is computed aside while the parts travel, and sent last.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from flux.errors import ProtocolError
from flux.replicas.aside import Failed
from flux.replicas.copy_phases import InEvent, InPhase, OutEvent, OutPhase, after_in, after_out
from flux.replicas.copy_state import Photograph, Position, StateCopy, decode, joined, photograph, room_for
from flux.replicas.order import Peer
from flux.replicas.replica import Replica
from flux.stream.producer import ToWorker
from flux.stream.receiver import Inbound
from flux.wire.control import CopyState
from flux.wire.handshake import MAC_BYTES, mac, same
from flux.wire.messages import Install, Installed
from partitioning.ids import PartitionKey

_ABOUT = struct.Struct("!4q")


@dataclass(frozen=True)
class Limits:
    """``part_bytes`` of one message; ``parts`` that may be under way; states of up to ``inline_bytes`` are copied and
    restored at once: to give them away would take longer."""

    part_bytes: int = 1 << 20
    parts: int = 4
    inline_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Aside:
    """Effect: do this in another thread and bring the result back by ``on_done``. ``what``: "room", "copy", "sign", "decode"
    or "restore", of the replica of a partition."""

    token: int
    what: str
    key: PartitionKey
    job: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ToSender:
    """Effect: answer on the connection by which a part came."""

    connection: Hashable
    message: Installed


Effect = Aside | ToWorker | ToSender


class Host(Protocol):
    """The worker, as its transfers see it. ``awaited``: replicas placed here without a state yet -> incarnation."""

    replicas: dict[PartitionKey, Replica]
    awaited: dict[PartitionKey, int]

    def snapshot_classes(self, key: PartitionKey) -> tuple[type, ...] | None:
        """Of the operator of that stage: see ``Operator``."""

    def inbounds_of(self, replica: Replica) -> Iterable[Inbound]: ...

    def copied(self, replica: Replica, worker: int, incarnation: int, positions: Iterable[Position]) -> None:
        """A copy for a new replica on a worker was taken, which has these positions."""

    def goes_on(self, key: PartitionKey) -> None:
        """A replica that stood still may take steps again, or has orders to tell."""

    def build(self, key: PartitionKey, incarnation: int, bases: list[int]) -> Replica:
        """A replica that nobody knows of yet."""

    def adopt(self, replica: Replica, state: StateCopy, now: float) -> None:
        """Its operator has been restored: it comes to life."""


class Name(NamedTuple):
    """Of a replica that is to be made."""

    stage: int
    partition: int
    worker: int
    incarnation: int


@dataclass
class Outgoing:
    """A copy that leaves. ``sent`` and ``acked`` of its bytes; ``heard``: when the other end last said anything new."""

    command: CopyState
    replica: Replica
    number: int
    phase: OutPhase
    inline: bool = False
    room: np.ndarray | None = None
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    signature: bytes | None = None
    began: float = 0.0
    sent: int = 0
    acked: int = 0
    heard: float = 0.0

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.command.stage, self.command.partition)

    @property
    def name(self) -> Name:
        return Name(*self.key, self.command.worker, self.command.incarnation)

    @property
    def total(self) -> int:
        return len(self.data) + MAC_BYTES

    def on(self, event: OutEvent) -> None:
        self.phase = after_out(self.phase, event)


@dataclass
class Incoming:
    """A copy that arrives. ``received`` of ``total`` bytes are here."""

    incarnation: int
    number: int
    total: int
    connection: Hashable
    parts: list[bytes | memoryview] = field(default_factory=list)
    received: int = 0
    phase: InPhase = InPhase.RECEIVING

    def on(self, event: InEvent) -> None:
        self.phase = after_in(self.phase, event)


def sign(secret: bytes, about: tuple[int, int, int, int], data: memoryview) -> bytes:
    """Of the copy of a replica: stage, partition, incarnation and number of the copy."""
    return mac(secret, b"copy of state", _ABOUT.pack(*about), data)


class Transfers:
    """Of one worker. ``clock`` (seconds) only measures how long a partition stands still."""

    def __init__(
        self, host: Host, secret: bytes, again_s: float, clock: Callable[[], float], limits: Limits | None = None
    ) -> None:
        self._host = host
        self._secret = secret
        self._again_s = again_s
        self._clock = clock
        self._limits = limits or Limits()
        self._outgoing: dict[Name, Outgoing] = {}
        self._incoming: dict[PartitionKey, Incoming] = {}
        self._being_restored: dict[int, Replica] = {}
        self._waiting: dict[int, Callable[[Any, float], None]] = {}
        self._effects: deque[Effect] = deque()
        self._number = 0
        self._token = 0
        self.forged = 0  # copies that did not bear the right signature

    # ---- the primary's side

    def on_copy_state(self, command: CopyState) -> None:
        """Copy at the next step boundary; safe to repeat."""
        key = PartitionKey(command.stage, command.partition)
        name = Name(*key, command.worker, command.incarnation)
        replica = self._host.replicas.get(key)
        peer = None if replica is None else self._peer(replica, command)
        if name in self._outgoing or replica is None or peer is None:
            return  # under way, or no longer wanted
        if peer.acked is not None and not peer.copying:
            return  # it has arrived, which the controller does not know yet
        self._number += 1
        size = replica.state_bytes + (0 if replica.exit is None else replica.exit.bytes)
        large = size > self._limits.inline_bytes
        phase = OutPhase.ROOM if large else OutPhase.BOUNDARY
        out = self._outgoing[name] = Outgoing(command, replica, self._number, phase, inline=size > 0 and not large)
        if large:
            self._aside("room", key, partial(room_for, size), partial(self._on_room, out))

    def _on_room(self, out: Outgoing, room: np.ndarray, _now: float) -> None:
        out.room = room
        if out.phase is not OutPhase.OVER:
            out.on(OutEvent.READY)

    @staticmethod
    def _peer(replica: Replica, command: CopyState) -> Peer | None:
        """The replica that is to be made, as its primary knows it."""
        peer = replica.order.peers.get(command.worker)
        meant = peer is not None and peer.incarnation == command.incarnation and not peer.live and peer.kind.copies
        return peer if meant else None

    @property
    def active(self) -> bool:
        """Whether ``poll`` may have something to do."""
        return bool(self._outgoing or self._effects)

    def poll(self, now: float) -> Iterator[Effect]:
        for out in list(self._outgoing.values()):
            if out.phase is OutPhase.COPYING:
                continue  # also if nobody wants it any more: its state is being read
            if self._host.replicas.get(out.key) is not out.replica or self._peer(out.replica, out.command) is None:
                out.on(OutEvent.DROPPED)
                self._over(out)
                continue
            if out.phase is OutPhase.BOUNDARY and out.replica.between_steps:
                self._copy(out, now)
            if out.phase is OutPhase.SENDING:
                yield from self._parts(out, now)
        while self._effects:
            yield self._effects.popleft()

    def _over(self, out: Outgoing) -> None:
        """The other replica has its state, or is gone. It may be live already, with a copy of another primary: from now on it
        must hear the order in any case."""
        del self._outgoing[out.name]
        peer = out.replica.order.peers.get(out.command.worker)
        if peer is not None and peer.incarnation == out.command.incarnation and peer.copying:
            out.replica.order.installed(out.command.worker)
            self._host.goes_on(out.key)

    def _copy(self, out: Outgoing, now: float) -> None:
        out.on(OutEvent.BETWEEN_STEPS)
        out.began = self._clock()
        picture = photograph(out.replica, self._host.inbounds_of(out.replica))
        out.replica.order.copied(out.command.worker, out.replica.applied)
        self._host.copied(out.replica, out.command.worker, out.command.incarnation, picture.positions)
        out.replica.frozen += 1
        if out.inline:
            self._copied(out, picture.encode(), now)
        else:
            self._aside("copy", out.key, partial(Photograph.encode, picture, out.room), partial(self._copied, out))

    def _copied(self, out: Outgoing, data: bytes | memoryview, now: float) -> None:
        replica = out.replica
        replica.frozen -= 1
        replica.copy_bytes = len(data)
        out.on(OutEvent.COPIED)
        out.data, out.room, out.heard = memoryview(data).cast("B"), None, now
        about = *out.key, out.command.incarnation, out.number
        if out.inline:
            out.signature = sign(self._secret, about, out.data)
        else:
            self._aside("sign", out.key, partial(sign, self._secret, about, out.data), partial(self._signed, out))
        peer = self._peer(replica, out.command)
        if peer is not None:
            peer.stall_ms, peer.copy_bytes = (self._clock() - out.began) * 1e3, len(data)
        self._host.goes_on(out.key)

    def _signed(self, out: Outgoing, signature: bytes, now: float) -> None:
        out.signature, out.heard = signature, now

    def _parts(self, out: Outgoing, now: float) -> Iterator[ToWorker]:
        total = out.total
        if out.sent > 0 and now - out.heard >= self._again_s:
            out.sent, out.heard = out.acked, now  # a connection has broken, and what was in it is lost
            if out.acked == total:
                yield self._part(out, total, total)
        ready = total if out.signature is not None else len(out.data)
        while out.sent < ready and out.sent < out.acked + self._limits.parts * self._limits.part_bytes:
            end = min(out.sent + self._limits.part_bytes, len(out.data)) if out.sent < len(out.data) else total
            yield self._part(out, out.sent, end)
            out.sent = end

    def _part(self, out: Outgoing, start: int, end: int) -> ToWorker:
        command = out.command
        message = Install(command.stage, command.partition, command.incarnation, out.number, start, out.total)
        signing = start == len(out.data) and end > start
        payload = out.signature if signing else out.data[start:end]
        return ToWorker(command.worker, message, payload=payload)

    def on_installed(self, worker: int, answer: Installed, now: float) -> None:
        name = Name(answer.stage, answer.partition, worker, answer.incarnation)
        out = self._outgoing.get(name)
        if out is None or out.number != answer.copy or out.phase is not OutPhase.SENDING:
            return
        if out.acked < answer.received_bytes <= out.total:
            out.acked, out.heard = answer.received_bytes, now
        if answer.done:
            out.on(OutEvent.ALIVE)
            self._over(out)

    # ---- the new replica's side

    def on_install(self, connection: Hashable, message: Install, part: bytes | memoryview, now: float) -> bool:
        """A part of a copy has come. False: of another life of the replica."""
        key = PartitionKey(message.stage, message.partition)
        if self._host.awaited.get(key) != message.incarnation:
            known = self._host.replicas.get(key)
            if known is None or known.incarnation != message.incarnation:
                return False
            self._answer(connection, message, message.total, True)
            return True
        found = self._incoming.get(key)
        if found is not None and (found.incarnation != message.incarnation or found.number < message.copy):
            self._forget(key)
            found = None
        if found is None:
            found = self._incoming[key] = Incoming(message.incarnation, message.copy, message.total, connection)
        elif found.number > message.copy:
            return False
        found.connection = connection
        receiving = found.phase is InPhase.RECEIVING
        if message.offset == found.received and receiving:
            if message.offset + len(part) > found.total or message.total != found.total:
                raise ProtocolError(f"part of a copy of {found.total} bytes goes to {message.offset + len(part)}")
            found.parts.append(part)
            found.received += len(part)
        self._answer(connection, message, found.received, False)
        if found.received == found.total and receiving:
            found.on(InEvent.WHOLE)
            self._restore(key, found, message, now)
        return True

    def _forget(self, key: PartitionKey) -> None:
        """A copy that is on its way; what is done aside for it comes to nothing."""
        self._incoming.pop(key).on(InEvent.DROPPED)

    def _restore(self, key: PartitionKey, found: Incoming, message: Install, now: float) -> None:
        classes = self._host.snapshot_classes(key)
        about = *key, found.incarnation, found.number

        def read() -> StateCopy | None:
            whole = joined(found.parts)
            found.parts.clear()  # here, because to free so much takes its time too
            data, signature = whole[:-MAC_BYTES], whole[-MAC_BYTES:]
            return decode(data, classes) if same(signature, sign(self._secret, about, data)) else None

        def build(state: StateCopy | None, now: float) -> None:
            if state is None:
                self.forged += 1
            if found.phase is InPhase.FORGOTTEN:
                return
            if state is None:
                self._forget(key)
            else:
                found.on(InEvent.DECODED)
                replica = self._host.build(key, found.incarnation, [output.base for output in state.outputs])
                restore = partial(replica.restore, state.snapshot)
                self._being_restored[id(replica)] = replica
                if state.snapshot is None:
                    live(replica, state, now)
                elif replica.operator.restores_in_background and not inline:
                    self._aside("restore", key, restore, lambda _, now: live(replica, state, now))
                else:
                    restore()
                    live(replica, state, now)

        def live(replica: Replica, state: StateCopy, now: float) -> None:
            del self._being_restored[id(replica)]
            if found.phase is InPhase.FORGOTTEN:
                replica.close()
                return
            found.on(InEvent.RESTORED)
            del self._incoming[key]
            del self._host.awaited[key]
            replica.copy_bytes = found.total
            self._host.adopt(replica, state, now)
            self._answer(found.connection, message, found.total, True)

        inline = found.total <= self._limits.inline_bytes
        if inline:
            build(read(), now)
        else:
            self._aside("decode", key, read, build)

    def _answer(self, connection: Hashable, message: Install, through: int, done: bool) -> None:
        answer = Installed(message.stage, message.partition, message.incarnation, message.copy, through, done)
        self._effects.append(ToSender(connection, answer))

    # ---- both

    def validate(self) -> None:
        """What holds between any two events. AssertionError says what does not."""
        copying = [id(out.replica) for out in self._outgoing.values() if out.phase is OutPhase.COPYING]
        for key, replica in self._host.replicas.items():
            frozen = copying.count(id(replica)) if copying else 0
            assert replica.frozen == frozen, (
                f"{replica.where} is frozen for {replica.frozen} copies, {frozen} are taken"
            )
            for worker, peer in replica.order.peers.items():
                if peer.copying:
                    name = Name(*key, worker, peer.incarnation)
                    assert name in self._outgoing, (
                        f"{replica.where}: worker {worker} waits for a copy that nobody sends"
                    )
        for out in self._outgoing.values():
            most = max(out.acked, out.sent)
            assert most <= out.total, f"{out.acked} bytes acked, {out.sent} sent of {out.total}"
        for key, found in self._incoming.items():
            assert self._host.awaited.get(key) == found.incarnation, f"a copy comes for {key}, which is not awaited"
            receiving = found.phase is InPhase.RECEIVING
            assert (found.received < found.total) == receiving, f"{found.received} of {found.total}, {found.phase}"

    def on_table(self) -> None:
        """What is received for replicas that are no longer placed here is forgotten."""
        for key in [key for key, found in self._incoming.items() if self._host.awaited.get(key) != found.incarnation]:
            self._forget(key)

    def _aside(self, what: str, key: PartitionKey, job: Callable[[], Any], then: Callable[[Any, float], None]) -> None:
        self._token += 1
        self._waiting[self._token] = then
        self._effects.append(Aside(self._token, what, key, job))

    def on_done(self, token: int, result: Any, now: float) -> None:
        """The result of what was given away. Raises what the job has raised: it is user code that failed."""
        then = self._waiting.pop(token)
        if isinstance(result, Failed):
            raise result.error
        then(result, now)

    def newly_forged(self) -> int:
        """Since the last call."""
        count, self.forged = self.forged, 0
        return count

    def close(self) -> None:
        """End operators that were about to come to life. Nothing runs aside any more."""
        for replica in self._being_restored.values():
            replica.close()
        self._being_restored.clear()
