"""Limits of strangers, which are connections that have proved nothing yet: their number, time and bytes (design: strangers).

ZeroMQ keeps a message until its last part has come, without a limit, before this project sees any of it. So the bytes of
strangers are limited where they arrive, by the operating system's count: a handshake needs a few hundred.

No I/O: the doorman (transport) reports events and cuts the connections that are named.
"""

from __future__ import annotations

import random
from collections.abc import Callable

#: Strangers at one port at once. All processes of a large query come at the same time. When one more comes, a random one gives
#: way: if the oldest gave way, an attacker that opens connections fast enough would keep every other process out.
STRANGERS_MAX = 1024
#: Each stranger costs two file descriptors. So strangers have at most a quarter of the descriptors of the process.
DESCRIPTORS_PER_STRANGER = 8
#: Greeting and proof, together with ZeroMQ's own handshake and heartbeats, are less than 2 KB.
STRANGER_BYTES_MAX = 64 << 10
#: A stranger is cut after this time. The accepting process may be in a long step of the user's code and not answer meanwhile; an
#: honest stranger then connects again.
STRANGER_S = 30.0


class Strangers:
    """The strangers at one port, by file descriptor.

    ``descriptors`` is the number that the process may have; ``draw(n)`` gives a random number below n."""

    def __init__(self, descriptors: int = 1024, draw: Callable[[int], int] = random.randrange) -> None:
        self.cut = 0
        self.at_most = min(STRANGERS_MAX, max(descriptors // DESCRIPTORS_PER_STRANGER, 1))
        self._draw = draw
        self._since: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def __contains__(self, connection: int) -> bool:
        return connection in self._since

    def came(self, connection: int, now: float) -> list[int]:
        """Add a connection, and return the connections that have to be cut for it."""
        self._since.pop(connection, None)
        full = len(self._since) == self.at_most
        gone = self._gone([list(self._since)[self._draw(self.at_most)]] if full else [])
        self._since[connection] = now
        return gone

    def left(self, connection: int) -> None:
        """Remove a connection that has closed or has proved the secret."""
        self._since.pop(connection, None)

    def too_much(self, received: Callable[[int], int], now: float) -> list[int]:
        """Return the strangers that are here for too long or have sent too much. They remain strangers until ``cut_off``, because
        a proof may arrive before that."""
        return [
            connection
            for connection, since in self._since.items()
            if now - since > STRANGER_S or received(connection) > STRANGER_BYTES_MAX
        ]

    def cut_off(self, connections: list[int]) -> list[int]:
        return self._gone([connection for connection in connections if connection in self._since])

    def _gone(self, connections: list[int]) -> list[int]:
        for connection in connections:
            del self._since[connection]
        self.cut += len(connections)
        return connections
