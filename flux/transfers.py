"""Copies of state on their way from one worker to another, as a state machine without I/O (DESIGN 5, AddReplica 2).

The primary stands still while its state is copied to a memory of its own, and goes on; from there it travels in parts, a
few at a time, so that rows on the same connection need not wait behind it. The new worker puts the parts together and
makes a replica of them. What takes long is given away as ``Aside``: other partitions of the worker go on meanwhile.

    Outgoing   memory is made ready -> next step boundary -> copied -> parts are sent until the other says done
    Incoming   parts are received -> decoded -> the operator restored -> the replica comes to life

A copy ends with a code (HMAC) over all of it under the query's secret, and is not read without: who reads it makes the
objects that it names. It is computed aside while the parts travel, and sent last.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from flux.background import Failed
from flux.control import CopyState
from flux.copy_state import Photograph, StateCopy, decode, joined, photograph, room_for
from flux.errors import ProtocolError
from flux.handshake import MAC_BYTES, mac, same
from flux.messages import Install, Installed
from flux.order import Peer
from flux.producer import ToWorker
from flux.receiver import Inbound
from flux.replica import Replica

Key = tuple[int, int]
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
    key: Key
    job: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ToSender:
    """Effect: answer on the connection by which a part came."""

    connection: Hashable
    message: Installed


Effect = Aside | ToWorker | ToSender


class Host(Protocol):
    """The worker, as its transfers see it. ``awaited``: replicas placed here without a state yet -> incarnation."""

    replicas: dict[Key, Replica]
    awaited: dict[Key, int]

    def snapshot_classes(self, key: Key) -> tuple[type, ...] | None:
        """Of the operator of that stage: see ``Operator``."""

    def inbounds_of(self, replica: Replica) -> Iterable[Inbound]: ...

    def goes_on(self, key: Key) -> None:
        """A replica that stood still may take steps again, or has orders to tell."""

    def build(self, key: Key, incarnation: int, bases: list[int]) -> Replica:
        """A replica that nobody knows of yet."""

    def adopt(self, replica: Replica, state: StateCopy, now: float) -> None:
        """Its operator has been restored: it comes to life."""


@dataclass
class Outgoing:
    """``phase``: "room", "boundary", "copying" or "sending"."""

    order: CopyState
    replica: Replica
    number: int
    phase: str = "boundary"
    inline: bool = False
    room: np.ndarray | None = None
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    signature: bytes | None = None
    began: float = 0.0
    sent: int = 0
    acked: int = 0
    heard: float = 0.0

    @property
    def key(self) -> Key:
        return self.order.stage, self.order.partition

    @property
    def total(self) -> int:
        return len(self.data) + MAC_BYTES


@dataclass
class Incoming:
    """``whole``: all parts are there. ``restored``: an operator gets its state in another thread just now."""

    incarnation: int
    number: int
    total: int
    connection: Hashable
    parts: list[bytes | memoryview] = field(default_factory=list)
    received: int = 0
    whole: bool = False


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
        self._outgoing: dict[tuple[int, int, int, int], Outgoing] = {}
        self._incoming: dict[Key, Incoming] = {}
        self._being_restored: dict[int, Replica] = {}
        self._waiting: dict[int, Callable[[Any, float], None]] = {}
        self._effects: deque[Effect] = deque()
        self._number = 0
        self._token = 0
        self.forged = 0  # copies that did not bear the right signature

    # ---- the primary's side

    def on_copy_state(self, order: CopyState) -> None:
        """Copy at the next step boundary; safe to repeat."""
        name = order.stage, order.partition, order.worker, order.incarnation
        replica = self._host.replicas.get((order.stage, order.partition))
        peer = None if replica is None else self._peer(replica, order)
        if name in self._outgoing or replica is None or peer is None:
            return  # under way, or no longer wanted
        if peer.acked is not None and not peer.copying:
            return  # it has arrived, which the controller does not know yet
        self._number += 1
        out = self._outgoing[name] = Outgoing(order, replica, self._number)
        size = replica.state_bytes
        out.inline = 0 < size <= self._limits.inline_bytes
        if size > self._limits.inline_bytes:
            out.phase = "room"
            self._aside("room", out.key, partial(room_for, size), partial(self._on_room, out))

    def _on_room(self, out: Outgoing, room: np.ndarray, _now: float) -> None:
        out.room, out.phase = room, "boundary"

    @staticmethod
    def _peer(replica: Replica, order: CopyState) -> Peer | None:
        """The replica that is to be made, as its primary knows it."""
        peer = replica.order.peers.get(order.worker)
        return peer if peer is not None and peer.incarnation == order.incarnation and not peer.live else None

    def poll(self, now: float) -> Iterator[Effect]:
        for name, out in list(self._outgoing.items()):
            if out.phase == "copying":
                continue  # also if nobody wants it any more: its state is being read
            if self._host.replicas.get(out.key) is not out.replica or self._peer(out.replica, out.order) is None:
                del self._outgoing[name]
                self._over(out)
                continue
            if out.phase == "boundary" and out.replica.between_steps:
                self._copy(out, now)
            if out.phase == "sending":
                yield from self._parts(out, now)
        while self._effects:
            yield self._effects.popleft()

    def _over(self, out: Outgoing) -> None:
        """The other replica has its state, or is gone. It may be live already, with a copy of another primary: from now on it
        must hear the order in any case."""
        peer = out.replica.order.peers.get(out.order.worker)
        if peer is not None and peer.incarnation == out.order.incarnation and peer.copying:
            out.replica.order.installed(out.order.worker)
            self._host.goes_on(out.key)

    def _copy(self, out: Outgoing, now: float) -> None:
        out.phase, out.began = "copying", self._clock()
        picture = photograph(out.replica, self._host.inbounds_of(out.replica))
        out.replica.order.copied(out.order.worker, out.replica.applied)
        out.replica.frozen += 1
        if out.inline:
            self._copied(out, picture.encode(), now)
        else:
            self._aside("copy", out.key, partial(Photograph.encode, picture, out.room), partial(self._copied, out))

    def _copied(self, out: Outgoing, data: bytes | memoryview, now: float) -> None:
        replica = out.replica
        replica.frozen -= 1
        replica.copy_bytes = len(data)
        out.phase, out.data, out.room, out.heard = "sending", memoryview(data).cast("B"), None, now
        about = *out.key, out.order.incarnation, out.number
        if out.inline:
            out.signature = sign(self._secret, about, out.data)
        else:
            self._aside("sign", out.key, partial(sign, self._secret, about, out.data), partial(self._signed, out))
        peer = self._peer(replica, out.order)
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
        order = out.order
        message = Install(order.stage, order.partition, order.incarnation, out.number, start, out.total)
        signing = start == len(out.data) and end > start
        payload = out.signature if signing else out.data[start:end]
        return ToWorker(order.worker, message, payload=payload)

    def on_installed(self, worker: int, answer: Installed, now: float) -> None:
        name = answer.stage, answer.partition, worker, answer.incarnation
        out = self._outgoing.get(name)
        if out is None or out.number != answer.copy or out.phase != "sending":
            return
        if answer.through > out.acked:
            out.acked, out.heard = answer.through, now
        if answer.done:
            del self._outgoing[name]
            self._over(out)

    # ---- the new replica's side

    def on_install(self, connection: Hashable, message: Install, part: bytes | memoryview, now: float) -> bool:
        """A part of a copy has come. False: of another life of the replica."""
        key = message.stage, message.partition
        if self._host.awaited.get(key) != message.incarnation:
            known = self._host.replicas.get(key)
            if known is None or known.incarnation != message.incarnation:
                return False
            self._answer(connection, message, message.total, True)
            return True
        found = self._incoming.get(key)
        if found is None or found.incarnation != message.incarnation or found.number < message.copy:
            found = self._incoming[key] = Incoming(message.incarnation, message.copy, message.total, connection)
        elif found.number > message.copy:
            return False
        found.connection = connection
        if message.offset == found.received and not found.whole:
            if message.offset + len(part) > found.total or message.total != found.total:
                raise ProtocolError(f"part of a copy of {found.total} bytes goes to {message.offset + len(part)}")
            found.parts.append(part)
            found.received += len(part)
        self._answer(connection, message, found.received, False)
        if found.received == found.total and not found.whole:
            found.whole = True
            self._receive(key, found, message, now)
        return True

    def _receive(self, key: Key, found: Incoming, message: Install, now: float) -> None:
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
                if self._incoming.get(key) is found:
                    del self._incoming[key]
            elif self._wanted(key, found):
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
            if not self._wanted(key, found):
                replica.close()
                return
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

    def _wanted(self, key: Key, found: Incoming) -> bool:
        return self._incoming.get(key) is found and self._host.awaited.get(key) == found.incarnation

    def _answer(self, connection: Hashable, message: Install, through: int, done: bool) -> None:
        answer = Installed(message.stage, message.partition, message.incarnation, message.copy, through, done)
        self._effects.append(ToSender(connection, answer))

    # ---- both

    def on_table(self) -> None:
        """What is received for replicas that are no longer placed here is forgotten."""
        for key in [key for key, found in self._incoming.items() if self._host.awaited.get(key) != found.incarnation]:
            del self._incoming[key]

    def _aside(self, what: str, key: Key, job: Callable[[], Any], then: Callable[[Any, float], None]) -> None:
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
