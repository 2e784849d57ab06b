"""A thread that looks after connections to ports until they have proved the query's secret (design: strangers).

``Authenticator`` answers ZeroMQ's question whether a peer may connect (ZAP, RFC 27): no peer can send a message, or choose
the name of its connection, without a ticket or, if connections are encrypted, the query's key. It also cuts connections that
send too much before that (``flux.wire.handshake.Strangers``). It has a thread of its own, because other threads are busy in
steps of the user's code.

The port may read a proof much later, when its connection has closed and another has the same descriptor. So the
answer to ZeroMQ counts the connections that have come until then, and every message of the admitted connection bears that
count: the present holder of the descriptor has sent the message only if it was among the connections counted.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from flux.wire.handshake import Strangers, Tickets

log = logging.getLogger("flux")

#: Seconds between two looks at the bytes that strangers have sent, while there are any strangers.
LOOK_S = 0.02
ZAP = "inproc://zeromq.zap.01"
_WAKE = "inproc://flux.shell.authenticator"
#: The events of a port's connections that the authenticator hears.
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
#: Offset of the number of bytes received in Linux's information about a TCP connection, and the bytes that are asked for.
_RECEIVED_AT, _TCP_INFO_BYTES = 128, 192


def _descriptors() -> int:
    """Return the number of files that this process may have open."""
    try:
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:
        return 1024


class Door:
    """The authenticator's knowledge of one port. ``trust`` and ``closed`` are called by the port's thread."""

    def __init__(self, domain: bytes, number: int, monitor: zmq.Socket[bytes], tickets: Tickets, member: bytes) -> None:
        """``number`` is the TCP port; ``member``: z85 of the only key that may connect, empty if any key may."""
        self.domain = domain
        self.monitor = monitor
        self.refused = 0
        self._number = number
        self._tickets = tickets
        self._member = z85.decode(member) if member else b""
        self._strangers = Strangers(_descriptors())
        self._own: dict[int, socket.socket] = {}  # duplicates of strangers' sockets, which no other connection gets
        self._came = 0  # connections until now
        self._numbers: dict[int, int] = {}  # by a stranger's descriptor: the number of its connection
        self._trusted: dict[int, bytes] = {}
        self._look_at = 0.0
        self._unknown: list[tuple[int, bytes, int]] = []  # proofs of connections that were not seen to come
        self._proved: queue.SimpleQueue[tuple[int, bytes, int]] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def trust(self, descriptor: int, connection: bytes, came: int) -> None:
        """Trust a connection that has proved the secret. To be called before the connection is told so. ``came``: the count of
        connections when it was admitted."""
        self._proved.put((descriptor, connection, came))

    def closed(self) -> list[bytes]:
        """Return the trusted connections that have closed since the last call."""
        found = []
        while not self._gone.empty():
            found.append(self._gone.get())
        return found

    # ---- the authenticator's thread

    @property
    def busy(self) -> bool:
        return bool(self._strangers)

    @property
    def came(self) -> int:
        """Return the number of connections that have come, as far as it has been heard."""
        return self._came

    def admits(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        try:
            if mechanism == b"PLAIN":
                good = self._tickets.take(bytes.fromhex(credentials[1].decode()))
            else:
                good = mechanism == b"CURVE" and self._member in (b"", credentials[0])
        except (ValueError, IndexError):
            good = False
        self.refused += not good
        return good

    def hear(self, now: float) -> None:
        """Take in the events of the port's connections."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            kind, descriptor = event["event"], int(event["value"])
            if kind == zmq.EVENT_ACCEPTED:
                self._accepted(descriptor, now)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._disconnected(descriptor)
            else:
                self.refused += 1

    def look(self, now: float) -> None:
        """Take in the events of the port's connections, then look at the bytes that strangers have sent."""
        self.hear(now)
        # Proofs of connections that are unknown even now, with all earlier events taken in: closed before the proof was noted.
        closed, self._unknown = self._unknown, []
        self._note_proofs()
        for proof in closed:
            self._proof(*proof, last=True)
        if now < self._look_at:
            return  # a look at all strangers for each new connection would be too much
        self._look_at = now + LOOK_S
        much = self._strangers.too_much(self._received, now)
        if much:
            self._note_proofs()  # bytes that a connection sent after its proof do not count
            self._cut(self._strangers.cut_off(much))

    def _accepted(self, descriptor: int, now: float) -> None:
        self._disconnected(descriptor)
        self._came += 1
        copy = -1
        try:
            copy = os.dup(descriptor)
            own = socket.socket(fileno=copy)
        except OSError:
            if copy >= 0:
                os.close(copy)
            return  # closed meanwhile, and the descriptor may be a file's by now
        internet = own.family in (socket.AF_INET, socket.AF_INET6)  # other families have addresses of another kind
        if not internet or own.getsockname()[1] != self._number:
            own.close()
            return
        self._own[descriptor], self._numbers[descriptor] = own, self._came
        self._cut(self._strangers.came(descriptor, now))

    def _disconnected(self, descriptor: int) -> None:
        self._note_proofs()  # also a proof of this connection, which is gone then
        self._strangers.left(descriptor)
        self._let_go(descriptor)
        if descriptor in self._trusted:
            self._gone.put(self._trusted.pop(descriptor))

    def _note_proofs(self) -> None:
        while not self._proved.empty():
            self._proof(*self._proved.get())

    def _proof(self, descriptor: int, connection: bytes, came: int, last: bool = False) -> None:
        """Note that a connection has proved the secret. Its port knows it by the descriptor that it had, and by the number of
        connections that had come when it was admitted. ``last``: all events until now were read before this call."""
        if descriptor in self._strangers and self._numbers[descriptor] > came:
            self._gone.put(connection)  # a later connection has its descriptor
        elif descriptor in self._strangers:
            self._strangers.left(descriptor)
            self._let_go(descriptor)
            self._trusted[descriptor] = connection
        elif last:
            self._gone.put(connection)
        else:
            self._unknown.append((descriptor, connection, came))  # the event of its coming may be right behind

    def _received(self, descriptor: int) -> int:
        if sys.platform != "linux":
            return 0
        try:
            about = self._own[descriptor].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return int(struct.unpack_from("=Q", about, _RECEIVED_AT)[0])
        except (OSError, struct.error):
            return 0

    def _cut(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            self.refused += 1
            try:
                self._own[descriptor].shutdown(socket.SHUT_RDWR)  # ZeroMQ sees its end and closes it
            except OSError:
                pass
            self._let_go(descriptor)

    def _let_go(self, descriptor: int) -> None:
        own = self._own.pop(descriptor, None)
        self._numbers.pop(descriptor, None)
        if own is not None:
            own.close()

    def close(self) -> None:
        self.monitor.close(0)
        for descriptor in list(self._own):
            self._let_go(descriptor)


class Authenticator:
    """The thread that watches the doors of all ports. It begins before the first port is bound, and ends with the context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._wake_end, self._hears = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._hears.bind(_WAKE)
        self._wake_end.connect(_WAKE)
        self._poller = zmq.Poller()
        for raw in (self._zap, self._hears):
            self._poller.register(raw, zmq.POLLIN)
        self._doors: dict[bytes, Door] = {}
        self._new: queue.SimpleQueue[Door] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flux-authenticator", daemon=True)
        self._thread.start()

    def watch(self, door: Door) -> None:
        self._new.put(door)
        self._wake_end.send(b"")

    def leave(self) -> None:
        """Let go of the context. To be called before the context ends."""
        self._wake_end.close(0)

    def join(self) -> None:
        """Wait for the thread, after the context has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._turn()
                except zmq.ContextTerminated:
                    return
                except Exception:
                    log.exception("looking after new connections failed")  # and goes on: without it no peer can connect
                    time.sleep(LOOK_S)
        finally:
            self._take_new()
            for door in self._doors.values():
                door.close()
            for raw in (self._zap, self._hears):
                raw.close(0)

    def _turn(self) -> None:
        busy = any(door.busy for door in self._doors.values())
        ready = dict(self._poller.poll(round(LOOK_S * 1000) if busy else None))
        if self._hears in ready:
            self._hears.recv()
        for door in self._take_new():
            self._poller.register(door.monitor, zmq.POLLIN)
        if self._zap in ready:
            self._answer()
        for door in self._doors.values():
            door.look(time.monotonic())

    def _take_new(self) -> list[Door]:
        found = []
        while not self._new.empty():
            found.append(self._new.get())
        self._doors |= {door.domain: door for door in found}
        return found

    def _answer(self) -> None:
        version, request, domain, _, _, mechanism, *credentials = self._zap.recv_multipart()
        door = self._doors.get(domain)
        came = b""
        good = door is not None and door.admits(mechanism, credentials)
        if door is not None:
            door.hear(time.monotonic())  # ZeroMQ's one thread has sent the event of this connection before it asked
            came = str(door.came).encode()
        status = [b"200", b"OK"] if good else [b"400", b"this port belongs to another query, or the ticket is used"]
        self._zap.send_multipart([version, request, *status, came if good else b"", b""])
