"""A plain TCP connection from each worker to the controller that says one thing: this process is alive.

When a process dies its kernel closes its sockets, so the controller learns of it in milliseconds, whatever else is
under way; ZeroMQ hides such closings. The worker proves the query's secret and names itself, then nothing is said.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct

from flux.transport import host_and_port

_NAME = struct.Struct("!q")
#: Connections that have not named themselves yet; more are refused.
STRANGERS_MAX = 1024


class Lifelines:
    """The controller's end. ``poll`` often; it never waits."""

    def __init__(self, host: str, secret: bytes) -> None:
        family = socket.getaddrinfo(host, None)[0][0]
        self._secret = secret
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._named: dict[socket.socket, int] = {}
        self._greetings: dict[socket.socket, bytes] = {}
        bracketed = f"[{host}]" if ":" in host else host
        self.endpoint = f"tcp://{bracketed}:{self._listener.getsockname()[1]}"

    def poll(self) -> list[int]:
        """Workers whose connection has closed since the last call."""
        closed = []
        for key, _ in self._selector.select(0):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept()
            elif (worker := self._read(connection)) is not None:
                closed.append(worker)
        return closed

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if len(self._greetings) >= STRANGERS_MAX:
                connection.close()
                return
            connection.setblocking(False)
            self._greetings[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> int | None:
        try:
            data = connection.recv(1024)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if data and connection in self._greetings:
            self._greet(connection, self._greetings[connection] + data)
            return None
        if data:
            return None  # nothing is ever said after the name
        self._selector.unregister(connection)
        connection.close()
        self._greetings.pop(connection, None)
        return self._named.pop(connection, None)

    def _greet(self, connection: socket.socket, said: bytes) -> None:
        wanted = len(self._secret) + _NAME.size
        if len(said) < wanted:
            self._greetings[connection] = said
            return
        del self._greetings[connection]
        if len(said) == wanted and hmac.compare_digest(said[: len(self._secret)], self._secret):
            (self._named[connection],) = _NAME.unpack(said[len(self._secret) :])
        else:
            self._selector.unregister(connection)
            connection.close()

    def close(self) -> None:
        for connection in [*self._named, *self._greetings, self._listener]:
            connection.close()
        self._selector.close()


def hold(endpoint: str, secret: bytes, worker: int) -> socket.socket:
    """The worker's end: keep it open as long as the worker lives."""
    connection = socket.create_connection(host_and_port(endpoint), timeout=10)
    connection.sendall(secret + _NAME.pack(worker))
    return connection
