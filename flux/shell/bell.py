"""A bell by which other threads end a wait: something to poll beside sockets."""

from __future__ import annotations

import socket


class Bell:
    """A signal between threads. Any thread rings it, and the waiting thread hears it again and again until it is cleared."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)
        self.raw = self._hears.fileno()

    def ring(self) -> None:
        try:
            self._rings.send(b"!")
        except OSError:
            pass  # full: it is ringing already; or closed: no thread listens

    def clear(self) -> None:
        try:
            while self._hears.recv(4096):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._hears.close()
        self._rings.close()
