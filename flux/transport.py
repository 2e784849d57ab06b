"""Sockets: the only importer of zmq.

A ``Port`` is bound and answers many (ROUTER); a ``Link`` is connected to one port (DEALER). Both carry frames and know
nothing of what they mean. ZeroMQ contexts do not survive a fork, so a ``Sockets`` is made in the process that uses
it, and by the thread that uses it. Every socket has LINGER set: nothing hangs at exit.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

#: How long closing may wait for queued frames: the last acks and reports of a worker that ends.
LINGER_MS = 500
#: Messages taken from one socket before the others get their turn.
BURST = 64
#: Seconds without any traffic after which a connection is probed, and given up when the probe is not answered.
PROBE_S = 2

Frames = Sequence[Any]


@dataclass(frozen=True)
class Keys:
    """CURVE keys of one query. Both sides of every connection share them: to know them is to belong to the query. Only
    who operates a query from outside has keys of his own, and knows no more than the query's public one: ``server``."""

    public: bytes
    private: bytes
    server: bytes = b""

    @classmethod
    def make(cls, server: bytes = b"") -> Keys:
        public, private = zmq.curve_keypair()
        return cls(public, private, server)


class Sockets:
    """The sockets of one thread, and one place to wait for all of them."""

    def __init__(self, keys: Keys | None = None, message_max_bytes: int = -1) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._keys = keys
        self._message_max_bytes = message_max_bytes
        self._open: list[Port | Link | Bell] = []

    def port(self, host: str, message_max_bytes: int | None = None, waiting_max: int = 0) -> Port:
        """Bind to a free port of ``host``'s address. ``waiting_max``: messages that may wait in each direction of a
        connection, further answers to one that does not listen are dropped; 0: no limit, credit has to see to it."""
        raw = self._socket(zmq.ROUTER)
        if message_max_bytes is not None:
            raw.setsockopt(zmq.MAXMSGSIZE, message_max_bytes)
        raw.sndhwm = raw.rcvhwm = waiting_max
        if self._keys is not None:
            raw.curve_server = True
            raw.curve_publickey, raw.curve_secretkey = self._keys.public, self._keys.private
        family = socket.getaddrinfo(host, None)[0]
        if family[0] == socket.AF_INET6:
            raw.ipv6 = True
        number = raw.bind_to_random_port(f"tcp://{_bracketed(family[4][0])}")
        return self._register(Port(raw, f"tcp://{_bracketed(host)}:{number}"))

    def link(self, endpoint: str) -> Link:
        """Connect to a port; connects again by itself when the connection breaks."""
        raw = self._socket(zmq.DEALER)
        if self._keys is not None:
            raw.curve_serverkey = self._keys.server or self._keys.public
            raw.curve_publickey, raw.curve_secretkey = self._keys.public, self._keys.private
        raw.setsockopt(zmq.RECONNECT_IVL, 20)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        raw.connect(endpoint)
        return self._register(Link(raw, endpoint))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        raw: zmq.Socket[bytes] = self._context.socket(kind)
        raw.linger = LINGER_MS
        # Credit bounds what is under way; a high-water mark would only turn a full pipe into a lost message.
        raw.sndhwm = raw.rcvhwm = 0
        raw.setsockopt(zmq.MAXMSGSIZE, self._message_max_bytes)
        raw.setsockopt(zmq.HEARTBEAT_IVL, PROBE_S * 1000)
        raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, PROBE_S * 5000)
        return raw

    def _register(self, opened: Any) -> Any:
        self._open.append(opened)
        self._poller.register(opened.raw, zmq.POLLIN)
        return opened

    def bell(self) -> Bell:
        """Something that other threads can ring to end a ``wait``."""
        return self._register(Bell())

    def wait(self, seconds: float) -> set[Port | Link | Bell]:
        """Those that have something to receive, after at most so many seconds."""
        ready = dict(self._poller.poll(math.ceil(max(seconds, 0) * 1000)))
        return {opened for opened in self._open if opened.raw in ready}

    def close_link(self, link: Link) -> None:
        self._poller.unregister(link.raw)
        self._open.remove(link)
        link.raw.close()

    def close(self) -> None:
        for opened in self._open:
            (opened if isinstance(opened, Bell) else opened.raw).close()
        self._open.clear()
        self._context.term()


class Port:
    """Receives from many connections and answers each. A connection is an opaque bytes value."""

    def __init__(self, raw: zmq.Socket[bytes], endpoint: str) -> None:
        self.raw = raw
        self.endpoint = endpoint

    def receive(self) -> Iterator[tuple[bytes, Frames]]:
        for _ in range(BURST):
            try:
                identity, *frames = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield identity.bytes, [frame.buffer for frame in frames]

    def send(self, connection: bytes, frames: Frames) -> None:
        """To a connection that is gone: dropped, the protocol repairs it."""
        try:
            self.raw.send_multipart([connection, *frames], zmq.NOBLOCK, copy=False)
        except (zmq.Again, zmq.ZMQError):
            pass


class Link:
    """A connection to one port."""

    def __init__(self, raw: zmq.Socket[bytes], endpoint: str) -> None:
        self.raw = raw
        self.endpoint = endpoint

    def receive(self) -> Iterator[Frames]:
        for _ in range(BURST):
            try:
                frames = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield [frame.buffer for frame in frames]

    def send(self, frames: Frames) -> None:
        try:
            self.raw.send_multipart(list(frames), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass


class Bell:
    """Rung by any thread, heard by the one that waits; heard again and again until cleared."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)
        self.raw = self._hears.fileno()

    def ring(self) -> None:
        try:
            self._rings.send(b"!")
        except OSError:
            pass  # full: it is ringing already; or closed: nobody listens

    def clear(self) -> None:
        try:
            while self._hears.recv(4096):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._hears.close()
        self._rings.close()


def own_address(towards: str) -> str:
    """The address by which this machine is seen from ``towards`` (host or tcp://host:port). Nothing is sent."""
    host = host_and_port(towards)[0] if "://" in towards else towards
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _bracketed(host: Any) -> str:
    return f"[{host}]" if ":" in str(host) else str(host)
