"""Sockets: the only importer of zmq, with the authentication of connections to its ports.

A ``Port`` is bound and answers many connections (ROUTER); a ``Link`` is connected to one port (DEALER). Both carry frames and do
not know their meaning. ZeroMQ contexts do not survive a fork, so a ``Sockets`` is made in the process that uses
it, and by the thread that uses it. Every socket has LINGER set: nothing hangs at exit.
"""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from flux.errors import ProtocolError
from flux.shell.authentication import EVENTS, Authenticator, Door
from flux.shell.threads import Bell
from flux.wire.bundle import BUNDLE_BYTES, bundled, unbundled
from flux.wire.handshake import ACCEPTED, UNKNOWN, Caller, Gate, Session, Tickets


class LinkPhase(StrEnum):
    """Phase of a connection to a port, as its connecting end sees it (design: mutual-proof).

        WAITING --dialled--> MEETING --accepted--> READY
        MEETING, READY --ended--> ENDED --hung up--> WAITING

    Messages that came before the end are still read in ENDED, also the last message of a handshake, and the end may be told
    twice. An event that is not among the steps cannot happen: it is a mistake of the caller."""

    #: There is no connection, until it is time to dial.
    WAITING = "waiting"
    #: Both ends prove the secret to each other.
    MEETING = "meeting"
    READY = "ready"
    #: The connection has ended, and its socket is still to be closed.
    ENDED = "ended"


class LinkEvent(Enum):
    """Event that may change the phase of a connection. Its value describes the event for people."""

    DIALLED = "there is a new connection"
    ACCEPTED = "the other end has proved the secret, and accepted the proof of this one"
    ENDED = "the connection has closed, or the other end is not to be talked to"
    HUNG_UP = "its socket is closed"


STEPS: dict[tuple[LinkPhase, LinkEvent], LinkPhase] = {
    (LinkPhase.WAITING, LinkEvent.DIALLED): LinkPhase.MEETING,
    (LinkPhase.MEETING, LinkEvent.ACCEPTED): LinkPhase.READY,
    (LinkPhase.MEETING, LinkEvent.ENDED): LinkPhase.ENDED,
    (LinkPhase.READY, LinkEvent.ENDED): LinkPhase.ENDED,
    (LinkPhase.ENDED, LinkEvent.ENDED): LinkPhase.ENDED,
    (LinkPhase.ENDED, LinkEvent.ACCEPTED): LinkPhase.ENDED,
    (LinkPhase.ENDED, LinkEvent.HUNG_UP): LinkPhase.WAITING,
}


def after(phase: LinkPhase, event: LinkEvent) -> LinkPhase:
    """Return the phase that follows."""
    assert (phase, event) in STEPS, f"{event.name} of a connection in phase {phase}"
    return STEPS[phase, event]


#: Milliseconds that closing may wait for queued frames: the last acks and reports of a worker that ends.
LINGER_MS = 500
#: Messages taken from one socket before the others get their turn.
BURST = 64
#: Seconds without any traffic after which a connection is probed, and given up when the probe is not answered.
PROBE_S = 2
#: A link with its monitor is three sockets, and ZeroMQ's own limit would end a process at 340 workers.
SOCKETS_MAX = 8192
#: Milliseconds that ZeroMQ's own part of a handshake may take.
OPENING_MS = 10_000
#: Milliseconds without an answer after which a dialled connection is given up. The kernel dials twice in this time. Later it
#: waits twice as long each time: a link that is up again after 30 s would be found out up to 16 s later.
CONNECT_MS = 2_000
#: Seconds after which a link that has lost its connection dials again, at first and at most.
DIAL_AGAIN_S, DIAL_AGAIN_MAX_S = 0.02, 0.5
#: ZeroMQ must not connect again by itself: frames still to be sent would go to any process that listens there now.
NOT_BY_ITSELF_MS = 3_600_000
#: The most messages that wait for a link's handshake; the oldest give way, and are lost like those of a broken connection.
HELD_MAX = 256
#: Seconds during which the last messages of a closed connection are still read.
LAST_WORDS_S = 5.0

Frames = Sequence[Any]


@dataclass(frozen=True)
class Keys:
    """CURVE keys of one query. Both sides of every connection share them: a process that has them belongs to the query. Only a
    user who operates a query from outside has other keys, and knows no more than the query's public one: ``server``."""

    public: bytes
    private: bytes = field(repr=False)
    server: bytes = b""

    @classmethod
    def make(cls, server: bytes = b"") -> Keys:
        public, private = zmq.curve_keypair()
        return cls(public, private, server)


class Sockets:
    """The sockets of one thread, and one place to wait for all of them. Both ends of every connection prove ``secret``
    to each other before anything else is said or heard (``handshake``)."""

    def __init__(self, keys: Keys | None, secret: bytes, message_max_bytes: int = -1) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._poller = zmq.Poller()
        self._keys = keys
        self._secret = secret
        self._message_max_bytes = message_max_bytes
        self._bundle_max = message_max_bytes if message_max_bytes >= 0 else BUNDLE_BYTES
        self._open: dict[Any, Any] = {}  # by the polled socket or descriptor
        self._monitors: dict[zmq.Socket[bytes], Link] = {}
        self._lost: list[Link] = []
        self._authenticator: Authenticator | None = None
        self._numbers = itertools.count()

    def port(
        self,
        host: str,
        message_max_bytes: int | None = None,
        waiting_max: int = 0,
        sealed: bool = False,
        secret: bytes | None = None,
    ) -> Port:
        """Bind to a free port of ``host``'s address. ``waiting_max``: messages that may wait in each direction of a connection;
        further answers to a peer that does not read are dropped; 0: no limit, credit must ensure one. ``sealed``: see
        ``handshake``. ``secret``: another secret than that of the query, for people with keys of their own."""
        family = socket.getaddrinfo(host, None)[0]
        if self._authenticator is None:
            self._authenticator = Authenticator(self._context)
        with ExitStack() as undo:
            raw = self._socket(zmq.ROUTER, undo)
            if message_max_bytes is not None:
                raw.setsockopt(zmq.MAXMSGSIZE, message_max_bytes)
            raw.sndhwm = raw.rcvhwm = waiting_max
            if waiting_max:
                # ZeroMQ stops reading a connection at the limit. If the other end closes it then, the next probe would
                # end the process by an assertion (libzmq 4.3.5, out_event).
                raw.setsockopt(zmq.HEARTBEAT_IVL, 0)
            raw.setsockopt(zmq.HANDSHAKE_IVL, OPENING_MS)
            domain = f"port {next(self._numbers)}".encode()
            raw.zap_domain = domain
            if self._keys is not None:
                raw.curve_server = True
                raw.curve_publickey, raw.curve_secretkey = self._keys.public, self._keys.private
            else:
                raw.plain_server = True
            raw.ipv6 = family[0] == socket.AF_INET6
            monitor = self._monitor(raw, EVENTS, undo)
            number = raw.bind_to_random_port(f"tcp://{_bracketed(family[4][0])}")
            undo.pop_all()
        endpoint = f"tcp://{_bracketed(host)}:{number}"
        member = self._keys.public if self._keys is not None and secret is None else b""
        proved = self._secret if secret is None else secret
        door = Door(domain, number, monitor, Tickets(proved, endpoint), member)
        self._authenticator.watch(door)
        port = Port(raw, endpoint, Gate(proved, endpoint), door, sealed, self._bundle_max)
        self.add(port)
        return port

    def link(self, endpoint: str, sealed: bool = False) -> Link:
        """Connect to a port; connects again by itself when the connection breaks."""
        link = Link(endpoint, sealed, self._lose, self._bundle_max)
        self.dial(link)
        return link

    def dial(self, link: Link) -> None:
        """Make a new connection for a link."""
        caller = Caller(self._secret, link.endpoint)
        with ExitStack() as undo:
            raw = self._socket(zmq.DEALER, undo)
            if self._keys is not None:
                raw.curve_serverkey = self._keys.server or self._keys.public
                raw.curve_publickey, raw.curve_secretkey = self._keys.public, self._keys.private
            else:
                raw.plain_username, raw.plain_password = b"flux", caller.ticket.hex().encode()
            raw.setsockopt(zmq.RECONNECT_IVL, NOT_BY_ITSELF_MS)
            raw.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            monitor = self._monitor(raw, events, undo)
            raw.connect(link.endpoint)
            undo.pop_all()
        self._poller.register(monitor, zmq.POLLIN)
        self._monitors[monitor] = link
        link.connected(raw, monitor, caller)
        self.add(link)

    def _socket(self, kind: int, undo: ExitStack) -> zmq.Socket[bytes]:
        """Make a socket. ``undo`` closes it if it cannot be bound or connected: the context does not end before all are
        closed."""
        raw: zmq.Socket[bytes] = self._context.socket(kind)
        undo.callback(raw.close, 0)
        raw.linger = LINGER_MS
        # Credit bounds the data under way; a high-water mark would only turn a full pipe into a lost message.
        raw.sndhwm = raw.rcvhwm = 0
        raw.setsockopt(zmq.MAXMSGSIZE, self._message_max_bytes)
        raw.setsockopt(zmq.HEARTBEAT_IVL, PROBE_S * 1000)
        raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, PROBE_S * 5000)
        return raw

    def _monitor(self, raw: zmq.Socket[bytes], events: int, undo: ExitStack) -> zmq.Socket[bytes]:
        """Make a socket that receives the events of another socket's connections."""
        address = f"inproc://monitor {next(self._numbers)}"
        raw.monitor(address, events)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        undo.callback(monitor.close, 0)
        monitor.linger = 0
        monitor.connect(address)
        return monitor

    def add(self, opened: Any) -> None:
        """Add something else to wait for: ``raw`` is its file descriptor. Its owner closes it."""
        self._open[opened.raw] = opened
        self._poller.register(opened.raw, zmq.POLLIN)

    def remove(self, opened: Any) -> None:
        del self._open[opened.raw]
        self._poller.unregister(opened.raw)

    def bell(self) -> Bell:
        """Make a bell that other threads can ring to end a ``wait``."""
        bell = Bell()
        self.add(bell)
        return bell

    def wait(self, seconds: float) -> set[Any]:
        """Return the sockets and bells that have something to receive, after at most ``seconds``."""
        if self._lost:
            seconds = min(seconds, self._dial_again())
        ready: set[Any] = set()
        if not self._open:
            time.sleep(max(seconds, 0))  # all links are lost: a poll of nothing returns at once
            return ready
        for raw, _ in self._poller.poll(math.ceil(max(seconds, 0) * 1000)):
            if raw in self._monitors:
                link = self._monitors[raw]
                if link.look():
                    self._lose(link)
                    ready.add(link)  # messages that came before the end are still to be read
            else:
                ready.add(self._open[raw])
        return ready

    def _lose(self, link: Link) -> None:
        if link not in self._lost:
            self._lost.append(link)

    def _dial_again(self) -> float:
        """Make new connections for the links whose time has come; return the seconds until the next link's time."""
        now = time.monotonic()
        for link in self._lost:
            if link.phase is LinkPhase.ENDED:
                self._hang_up(link, 0)
                link.hung_up(now)
        for link in [link for link in self._lost if link.dial_at <= now]:
            self._lost.remove(link)
            self.dial(link)
        return max(min((link.dial_at for link in self._lost), default=math.inf) - now, 0.0)

    def _hang_up(self, link: Link, linger_ms: int) -> None:
        self._poller.unregister(link.raw)
        self._poller.unregister(link.monitor)
        del self._open[link.raw], self._monitors[link.monitor]
        link.raw.disable_monitor()
        link.raw.close(linger_ms)
        link.monitor.close(0)

    def close_link(self, link: Link) -> None:
        if link.raw in self._open:
            self._hang_up(link, LINGER_MS)
        if link in self._lost:
            self._lost.remove(link)

    def close(self) -> None:
        for opened in list(self._open.values()):
            if isinstance(opened, Link):
                self._hang_up(opened, LINGER_MS)
            elif isinstance(opened, Port):
                opened.raw.close()
            elif isinstance(opened, Bell):
                opened.close()
        self._open.clear()
        self._lost.clear()
        if self._authenticator is not None:
            self._authenticator.leave()
        self._context.term()
        if self._authenticator is not None:
            self._authenticator.join()


class Port:
    """A bound socket that receives from many connections, if they have proved the secret, and answers each. A connection is an
    opaque bytes value. Messages of other connections are counted in ``refused``."""

    def __init__(
        self,
        raw: zmq.Socket[bytes],
        endpoint: str,
        gate: Gate,
        door: Door,
        sealed: bool,
        bundle_max: int = BUNDLE_BYTES,
    ) -> None:
        """``bundle_max`` are the bytes of a message that the other ends accept."""
        self.raw = raw
        self.endpoint = endpoint
        self._gate = gate
        self._door = door
        self._sealed = sealed
        self._bundle_max = bundle_max
        self._refused = 0
        self._told = 0
        self._closed: deque[tuple[float, bytes]] = deque()

    @property
    def refused(self) -> int:
        return self._refused + self._door.refused

    def newly_refused(self) -> int:
        """Return the number of messages refused since the last call."""
        before, self._told = self._told, self.refused
        return self._told - before

    def receive(self) -> Iterator[tuple[bytes, Frames]]:
        """Yield the messages that have come. Iterate to the end, because messages that came together are taken together."""
        burst = 0
        while burst < BURST:
            try:
                identity, *frames = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._forget_closed()
                return
            burst += 1
            connection = identity.bytes
            session = self._gate.sessions.get(connection)
            buffers = [frame.buffer for frame in frames]
            try:
                if session is None:
                    self._meet(connection, buffers, frames)
                    continue
                for more, heard in enumerate([[session.open(buffers)]] if self._sealed else unbundled(buffers)):
                    burst += more > 0
                    yield connection, heard
            except ProtocolError:
                self._refused += 1
                if session is None:
                    self._send([connection, UNKNOWN])

    def _meet(self, connection: bytes, buffers: Frames, frames: Sequence[zmq.Frame]) -> None:
        """Take the next step of a handshake."""
        answer = self._gate.hear(connection, buffers)
        if answer == ACCEPTED:
            came = int(frames[0].get("User-Id"))  # the authenticator's count when it admitted the connection
            self._door.trust(frames[0].get(zmq.SRCFD), connection, came)  # before the connection begins to send more
        self._send([connection, answer])

    def _forget_closed(self) -> None:
        now = time.monotonic()
        self._closed.extend((now, connection) for connection in self._door.closed())
        while self._closed and now - self._closed[0][0] > LAST_WORDS_S:
            self._gate.forget(self._closed.popleft()[1])

    def send_all(self, connection: bytes, messages: Sequence[Frames]) -> None:
        """Send several messages; small ones travel together."""
        for frames in messages if self._sealed else bundled(messages, self._bundle_max):
            self.send(connection, frames)

    def send(self, connection: bytes, frames: Frames) -> None:
        """Send a message. If the connection is gone, the message is dropped, and the protocol repairs that."""
        if self._sealed:
            session = self._gate.sessions.get(connection)
            if session is None:
                return
            (message,) = frames
            frames = [session.seal(message)]
        self._send([connection, *frames])

    def _send(self, frames: Frames) -> None:
        try:
            self.raw.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except (zmq.Again, zmq.ZMQError):
            pass


class Link:
    """A connection to one port. Messages sent before both ends have proved the secret wait for the proofs; messages under way
    when a connection breaks are lost. ``problem``: why the other end is not talked to, if that is known."""

    raw: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def __init__(
        self, endpoint: str, sealed: bool, lose: Callable[[Link], None], bundle_max: int = BUNDLE_BYTES
    ) -> None:
        """``bundle_max`` are the bytes of a message that the other end accepts."""
        self.endpoint = endpoint
        self.problem = ""
        self.refused = 0
        self.dial_at = 0.0
        self._sealed = sealed
        self._lose = lose
        self._bundle_max = bundle_max
        self._caller: Caller | None = None
        self._session: Session | None = None
        self._held: deque[Frames] = deque(maxlen=HELD_MAX)
        self._again_s = DIAL_AGAIN_S
        self.phase = LinkPhase.WAITING

    # ---- for Sockets

    def connected(self, raw: zmq.Socket[bytes], monitor: zmq.Socket[bytes], caller: Caller) -> None:
        self.raw, self.monitor = raw, monitor
        self._caller, self._session = caller, None
        self._on(LinkEvent.DIALLED)
        self._send([caller.greeting()])

    def look(self) -> bool:
        """Take in events; return whether the connection has ended."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.problem = f"the process at {self.endpoint} does not accept the secret of this query"
            else:
                self._on(LinkEvent.ENDED)
        return self.phase is LinkPhase.ENDED

    def hung_up(self, now: float) -> None:
        """Note that the socket is closed. The link is dialled anew at ``dial_at``."""
        self._on(LinkEvent.HUNG_UP)
        self._session = None
        self.dial_at = now + self._again_s
        self._again_s = min(2 * self._again_s, DIAL_AGAIN_MAX_S)

    # ---- for its owner

    @property
    def ready(self) -> bool:
        """Return whether both ends have proved the secret; messages sent before wait for that."""
        return self._session is not None

    def receive(self) -> Iterator[Frames]:
        """Yield the messages that have come. Iterate to the end, because messages that came together are taken together."""
        burst = 0
        while burst < BURST or self.phase is LinkPhase.ENDED:
            try:
                frames = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            burst += 1
            buffers = [frame.buffer for frame in frames]
            try:
                if self._session is None:
                    self._meet(buffers)
                    continue
                if len(buffers) == 1 and len(buffers[0]) == len(UNKNOWN) and buffers[0] == UNKNOWN:
                    self._session = None
                    raise ProtocolError(f"the process at {self.endpoint} has forgotten this connection")
                for more, heard in enumerate([[self._session.open(buffers)]] if self._sealed else unbundled(buffers)):
                    burst += more > 0
                    yield heard
            except ProtocolError as error:
                self.refused += 1
                if self._session is None:
                    self.problem = str(error)
                    self._on(LinkEvent.ENDED)
                    self._lose(self)

    def _meet(self, buffers: Frames) -> None:
        """Take the next step of the handshake."""
        assert self._caller is not None
        answer = self._caller.hear(buffers)
        if answer is not None:
            self._send([answer])
        self._session = self._caller.session
        if self._session is not None:
            self._on(LinkEvent.ACCEPTED)
            self.problem, self._again_s = "", DIAL_AGAIN_S
            while self._held:
                self.send(self._held.popleft())

    def _on(self, event: LinkEvent) -> None:
        self.phase = after(self.phase, event)

    def send_all(self, messages: Sequence[Frames]) -> None:
        """Send several messages; small ones travel together."""
        for frames in messages if self._sealed else bundled(messages, self._bundle_max):
            self.send(frames)

    def send(self, frames: Frames) -> None:
        if self._session is None:
            self._held.append(frames)
        elif self._sealed:
            (message,) = frames
            self._send([self._session.seal(message)])
        else:
            self._send(frames)

    def _send(self, frames: Frames) -> None:
        try:
            self.raw.send_multipart(list(frames), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass


def own_address(towards: str) -> str:
    """Return the address by which this machine is seen from ``towards`` (host or tcp://host:port). Nothing is sent."""
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
