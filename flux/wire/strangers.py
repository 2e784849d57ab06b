"""Connections that have proved nothing yet: how many there may be, for how long, and what they may send (design: strangers).

ZeroMQ keeps a message until its last part has come, without a limit, before anybody here sees it. So what strangers
send is limited where it arrives, by the operating system's count of bytes: a handshake needs a few hundred.

No I/O: the doorman (transport) brings what happens and cuts the connections that are named.
"""

from __future__ import annotations

import random
from collections.abc import Callable

#: At once, at one port: all processes of a large query come at the same time. One more, and any of those that are there gives
#: way: were it the oldest, who opens connections fast enough would keep everybody out.
STRANGERS_MAX = 1024
#: Each costs two file descriptors; so a quarter of those that a process may have is theirs at most.
DESCRIPTORS_PER_STRANGER = 8
#: Greeting and proof, with ZeroMQ's own handshake and heartbeats, are less than 2 KB.
STRANGER_BYTES_MAX = 64 << 10
#: Who is here for so long without a proof is cut; a process in a long step of the user's does not answer meanwhile, and who
#: waits for it comes again.
STRANGER_S = 30.0


class Strangers:
    """By file descriptor. ``descriptors`` that the process may have; ``draw(n)``: a number below n."""

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
        """Those that have to go for it."""
        self._since.pop(connection, None)
        full = len(self._since) == self.at_most
        gone = self._gone([list(self._since)[self._draw(self.at_most)]] if full else [])
        self._since[connection] = now
        return gone

    def left(self, connection: int) -> None:
        """It has closed, or has proved the secret."""
        self._since.pop(connection, None)

    def too_much(self, received: Callable[[int], int], now: float) -> list[int]:
        """Those that have been here for too long or have sent more than strangers need. They are still strangers until
        ``cut_off``: a proof may have come meanwhile."""
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
