"""A thread that looks after connections to ports until they have proved the query's secret (design: strangers).

It answers ZeroMQ's question who may connect (ZAP, RFC 27): nobody gets so far as to send a message, or to choose the name
of his connection, without a ticket or, where connections are encrypted, the query's key. And it cuts those that
send too much before that (``strangers``). A thread of its own, because the others are busy in steps of the user's.

The port reads a proof perhaps much later, when its connection has closed and another has the same descriptor. So the
answer to ZeroMQ counts the connections that have come so far, and every message of the one that it admits bears that
count: the holder of the descriptor has sent it only if it was among them.
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

from flux.wire.handshake import Tickets
from flux.wire.strangers import Strangers

log = logging.getLogger("flux")

#: How often it is looked what strangers have sent, while there are any.
LOOK_S = 0.02
ZAP = "inproc://zeromq.zap.01"
_WAKE = "inproc://flux.shell.doorman"
#: What it hears of the connections of a port.
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
#: Where Linux keeps the number of bytes received in what it says about a TCP connection.
_RECEIVED_AT, _TCP_INFO_BYTES = 128, 192


def _descriptors() -> int:
    """As many files as this process may have open."""
    try:
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:
        return 1024


class Door:
    """What the doorman knows of one port. ``trust`` and ``closed`` are called by the port's thread."""

    def __init__(self, domain: bytes, number: int, monitor: zmq.Socket[bytes], tickets: Tickets, member: bytes) -> None:
        """``number`` of the TCP port; ``member``: z85 of the only key that may connect, empty where any may."""
        self.domain = domain
        self.monitor = monitor
        self.refused = 0
        self._number = number
        self._tickets = tickets
        self._member = z85.decode(member) if member else b""
        self._strangers = Strangers(_descriptors())
        self._own: dict[int, socket.socket] = {}  # of strangers: keeps the descriptor from being another's
        self._came = 0  # connections so far
        self._numbers: dict[int, int] = {}  # of strangers: which of them
        self._trusted: dict[int, bytes] = {}
        self._look_at = 0.0
        self._unknown: list[tuple[int, bytes, int]] = []  # proved, but not seen to come
        self._proved: queue.SimpleQueue[tuple[int, bytes, int]] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def trust(self, descriptor: int, connection: bytes, came: int) -> None:
        """This connection has proved the secret. To be called before it is told so. ``came``: when it was admitted."""
        self._proved.put((descriptor, connection, came))

    def closed(self) -> list[bytes]:
        """Trusted connections that have closed since the last call."""
        found = []
        while not self._gone.empty():
            found.append(self._gone.get())
        return found

    # ---- the doorman's thread

    @property
    def busy(self) -> bool:
        return bool(self._strangers)

    @property
    def came(self) -> int:
        """Connections that have come, as far as it has been heard."""
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
        """Events of the port's connections."""
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
        """Events of the port's connections, then what strangers have sent."""
        self.hear(now)
        # Those that are not known even now, though all that has happened before is: closed before their proof was noted.
        closed, self._unknown = self._unknown, []
        self._note_proofs()
        for proof in closed:
            self._proof(*proof, last=True)
        if now < self._look_at:
            return  # a look at all of them for each that comes would be too much
        self._look_at = now + LOOK_S
        much = self._strangers.too_much(self._received, now)
        if much:
            self._note_proofs()  # what a connection sent after its proof does not count
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
            return  # closed meanwhile, and perhaps a file by now
        internet = own.family in (socket.AF_INET, socket.AF_INET6)  # others have addresses of another kind
        if not internet or own.getsockname()[1] != self._number:
            own.close()
            return
        self._own[descriptor], self._numbers[descriptor] = own, self._came
        self._cut(self._strangers.came(descriptor, now))

    def _disconnected(self, descriptor: int) -> None:
        self._note_proofs()  # also of this one, which is gone then
        self._strangers.left(descriptor)
        self._let_go(descriptor)
        if descriptor in self._trusted:
            self._gone.put(self._trusted.pop(descriptor))

    def _note_proofs(self) -> None:
        while not self._proved.empty():
            self._proof(*self._proved.get())

    def _proof(self, descriptor: int, connection: bytes, came: int, last: bool = False) -> None:
        if descriptor in self._strangers and self._numbers[descriptor] > came:
            self._gone.put(connection)  # and another has its descriptor
        elif descriptor in self._strangers:
            self._strangers.left(descriptor)
            self._let_go(descriptor)
            self._trusted[descriptor] = connection
        elif last:
            self._gone.put(connection)
        else:
            self._unknown.append((descriptor, connection, came))  # the news that it came may be right behind

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


class Doorman:
    """Begins before the first port is bound, ends when the context does."""

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
        self._thread = threading.Thread(target=self._run, name="flux-doorman", daemon=True)
        self._thread.start()

    def watch(self, door: Door) -> None:
        self._new.put(door)
        self._wake_end.send(b"")

    def leave(self) -> None:
        """To be called before the context ends."""
        self._wake_end.close(0)

    def join(self) -> None:
        """After the context has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._turn()
                except zmq.ContextTerminated:
                    return
                except Exception:
                    log.exception("looking after new connections failed")  # and goes on: without it nobody can connect
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
            door.hear(time.monotonic())  # ZeroMQ's one thread has told of this connection before it asked
            came = str(door.came).encode()
        status = [b"200", b"OK"] if good else [b"400", b"this port belongs to another query, or the ticket is used"]
        self._zap.send_multipart([version, request, *status, came if good else b"", b""])
