"""What other threads ring to end a wait: something to poll beside sockets."""

from __future__ import annotations

import socket


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
