"""A plain TCP connection from each worker to the controller that says one thing: this process is alive (design: lifeline).

When a process dies its kernel closes its sockets, so the controller learns of it in milliseconds, whatever else is
under way; ZeroMQ hides such closings.

    worker                              controller
    nonce a                     ->
                                <-      nonce b, code over a and b
    name, code over a and b     ->
    pulses                      ->

Both prove the query's secret by codes that are good for these nonces alone (``handshake``): an eavesdropper cannot use the codes
again, and cannot say the name, which only the two ends can read. Pulses tell a process that is busy from one that is stopped
(``flux.shell.liveness_thread``).

A connection that is reset says less than one that is closed: something between the hosts may have done it. The worker
opens another.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import select
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field

from flux.shell.liveness_thread import LivenessThread, parse
from flux.shell.transport import host_and_port
from flux.wire.handshake import MAC_BYTES, NONCE_BYTES, mac, same
from flux.wire.pulse import Pulse

_NAME = struct.Struct("!q")
_PROOF_BYTES = _NAME.size + MAC_BYTES
#: The most connections that have not named themselves yet. One more, and any of them gives way: if it were always the oldest, a
#: stranger that opens connections fast enough would keep all workers out.
STRANGERS_MAX = 128
#: Seconds that a worker may take to name itself. A worker in a long step does not get to it, and its lifeline is not missed so
#: soon.
STRANGER_S = 120.0
#: The most seconds that a worker tries to connect, and waits for its turn to name itself; it does nothing else meanwhile.
CONNECT_S = 2.0
#: The most connections that are accepted at one look.
ACCEPTS_MAX = 64


@dataclass
class _Greeting:
    """A connection in its handshake. ``asked`` is the worker's nonce, ``answered`` the controller's, once it has been sent."""

    since: float
    said: bytes = b""
    asked: bytes = b""
    answered: bytes = field(default=b"", repr=False)


class Lifelines:
    """The controller's end of all lifelines. Call ``poll`` often; it never waits."""

    def __init__(self, host: str, secret: bytes) -> None:
        family = socket.getaddrinfo(host, None)[0][0]
        self.refused = 0
        self._secret = secret
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._named: dict[socket.socket, int] = {}
        self._greetings: dict[socket.socket, _Greeting] = {}
        self._pulses: list[tuple[int, Pulse]] = []
        self._rests: dict[socket.socket, bytes] = {}  # the first bytes of a pulse whose rest has not come
        self._reset: list[int] = []
        bracketed = f"[{host}]" if ":" in host else host
        self.endpoint = f"tcp://{bracketed}:{self._listener.getsockname()[1]}"

    def poll(self) -> list[int]:
        """Return the workers whose connection has closed since the last call."""
        closed = []
        for key, _ in self._selector.select(0):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept()
            elif connection.fileno() >= 0 and (worker := self._read(connection)) is not None:
                closed.append(worker)
        return self._unnamed(closed)

    def pulses(self) -> list[tuple[int, Pulse]]:
        """Return the pulses since the last call, each with its worker, as they came."""
        pulses, self._pulses = self._pulses, []
        return pulses

    def reset(self) -> list[int]:
        """Return the workers whose connection was reset since the last call: they may live."""
        reset, self._reset = self._reset, []
        return self._unnamed(reset)

    def _unnamed(self, workers: list[int]) -> list[int]:
        """Return the workers without a newer connection: the end of an older one says nothing."""
        named = set(self._named.values()) if workers else set()
        return [worker for worker in workers if worker not in named]

    def newly_refused(self) -> int:
        """Return the number of connections refused since the last call."""
        count, self.refused = self.refused, 0
        return count

    def _accept(self) -> None:
        now = time.monotonic()
        with contextlib.suppress(OSError):
            for _ in range(ACCEPTS_MAX):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._greetings[connection] = _Greeting(now)
                self._selector.register(connection, selectors.EVENT_READ)
        for connection in [c for c, greeting in self._greetings.items() if now - greeting.since > STRANGER_S]:
            self._refuse(connection)
        while len(self._greetings) > STRANGERS_MAX:
            self._refuse(random.choice(list(self._greetings)[:-1]))

    def _read(self, connection: socket.socket) -> int | None:
        try:
            data = connection.recv(1024)
        except BlockingIOError:
            return None
        except OSError:
            if (worker := self._forget(connection)) is not None:
                self._reset.append(worker)
            return None
        if not data:
            return self._forget(connection)
        if connection in self._greetings:
            self._greet(connection, data)
        else:
            self._hear_pulses(connection, data)
        return None

    def _forget(self, connection: socket.socket) -> int | None:
        self._selector.unregister(connection)
        connection.close()
        self._greetings.pop(connection, None)
        self._rests.pop(connection, None)
        return self._named.pop(connection, None)

    def _hear_pulses(self, connection: socket.socket, data: bytes) -> None:
        pulses, self._rests[connection] = parse(self._rests.get(connection, b"") + data)
        self._pulses += [(self._named[connection], pulse) for pulse in pulses]

    def _greet(self, connection: socket.socket, data: bytes) -> None:
        greeting = self._greetings[connection]
        greeting.said += data
        wanted = _PROOF_BYTES if greeting.asked else NONCE_BYTES
        if len(greeting.said) < wanted:
            return
        if greeting.asked:
            self._name(connection, greeting)
        elif len(greeting.said) > wanted:
            self._refuse(connection)
        else:
            greeting.asked, greeting.said, greeting.answered = greeting.said, b"", secrets.token_bytes(NONCE_BYTES)
            about = _about(self.endpoint, greeting.asked, greeting.answered)
            try:
                connection.sendall(greeting.answered + mac(self._secret, b"lifeline challenge", *about))
            except OSError:
                self._refuse(connection)

    def _name(self, connection: socket.socket, greeting: _Greeting) -> None:
        about = _about(self.endpoint, greeting.asked, greeting.answered)
        covered, shown = greeting.said[: _NAME.size], greeting.said[_NAME.size : _PROOF_BYTES]
        if not same(shown, mac(self._secret, b"lifeline proof", *about, covered)):
            self._refuse(connection)
            return
        del self._greetings[connection]
        (worker,) = _NAME.unpack(_veil(self._secret, about, covered))
        for older in [other for other, name in self._named.items() if name == worker]:
            self._forget(older)
        self._named[connection] = worker
        self._hear_pulses(connection, greeting.said[_PROOF_BYTES:])  # the first pulse may have come with the name

    def _refuse(self, connection: socket.socket) -> None:
        self.refused += 1
        del self._greetings[connection]
        self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        for connection in [*self._named, *self._greetings, self._listener]:
            connection.close()
        self._selector.close()


class Lifeline:
    """The worker's end, open as long as the worker lives. ``raw`` is to be polled; when it is readable, call ``hear``.
    ``heart`` beats over the connection as soon as the worker has named itself. ``connect_s`` are the seconds to wait for a
    connection; an OSError says that there is none."""

    def __init__(
        self,
        endpoint: str,
        secret: bytes,
        worker: int,
        heart: LivenessThread | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._worker = worker
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._said = b""
        self._heart = heart
        self._connection = socket.create_connection(host_and_port(endpoint), timeout=connect_s)
        self._connection.setblocking(False)
        self._connection.sendall(self._nonce)
        self.raw = self._connection.fileno()

    def hear_soon(self) -> None:
        """Wait for the turn to name itself, but not for long. Called before a first long step, in which nothing is heard."""
        poll = select.poll()  # select() takes no descriptor above 1023, and an executor may have more files open
        poll.register(self.raw, select.POLLIN)
        if poll.poll(CONNECT_S * 1000):
            self.hear()

    def hear(self) -> bool:
        """Take in received bytes. False: nothing more will be heard. It means nothing here that the other end has closed, or is a
        stranger: a worker that hears nothing from the controller for long ends because of that, and it may open another
        lifeline."""
        try:
            data = self._connection.recv(1024)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._said += data
        if not data or len(self._said) > NONCE_BYTES + MAC_BYTES:
            return False
        if len(self._said) == NONCE_BYTES + MAC_BYTES:
            nonce, shown = self._said[:NONCE_BYTES], self._said[NONCE_BYTES:]
            about = _about(self._endpoint, self._nonce, nonce)
            if not same(shown, mac(self._secret, b"lifeline challenge", *about)):
                return False
            covered = _veil(self._secret, about, _NAME.pack(self._worker))
            with contextlib.suppress(OSError):
                self._connection.sendall(covered + mac(self._secret, b"lifeline proof", *about, covered))
                if self._heart is not None:
                    self._heart.start(self._connection)
        return True

    def close(self) -> None:
        if self._heart is not None:
            self._heart.stop()
        self._connection.close()


def _about(endpoint: str, asked: bytes, answered: bytes) -> tuple[bytes, bytes, bytes]:
    return endpoint.encode(), asked, answered


def _veil(secret: bytes, about: tuple[bytes, bytes, bytes], name: bytes) -> bytes:
    """Encrypt the name so that only the two ends can read it, or decrypt it."""
    key = mac(secret, b"lifeline name", *about)
    return bytes(one ^ other for one, other in zip(name, key, strict=False))
