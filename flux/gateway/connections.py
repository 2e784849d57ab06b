"""Connections of a gateway, within bounds: their number, the size of a head and the time for it (design: gateway-connections).

A connection waits for the head of a request, or a request is under way on it. One that waits too long is closed. When there is no
room for a new connection, the one that has waited longest makes room: a client sends its head at once, so connections that
a stranger opens and leaves idle are the ones that are closed.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Protocol

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from flux.gateway.answers import error_answer
from flux.gateway.problems import Problem, busy

#: Seconds for the head of a request, from the begin of the connection or the answer before it. A connection on which nothing
#: comes after an answer ends earlier, by uvicorn's own limit of five seconds.
HEAD_S = 10.0
#: Bytes of the head of a request: h11 refuses more.
HEAD_BYTES = 32 << 10
#: The most connections: readers of results stay connected.
CONNECTIONS_MAX = 8192
#: Connections that the system may hold until they are accepted: all of them may be accepted before one is closed.
BACKLOG = 512
#: Files of a process that are not noted as connections: logs, documents, libraries, and connections that are being accepted.
OTHER_FILES = 512 + BACKLOG


class Closable(Protocol):
    """A connection that can be closed."""

    def close_for_room(self) -> None: ...


class ConnectionBook:
    """The connections of a gateway, and the order in which they began to wait for a head. It decides and closes nothing."""

    def __init__(self, most: int) -> None:
        self.most = most
        #: All connections that wait for a head, the longest wait first.
        self._waiting: dict[Closable, None] = {}
        self._under_way: set[Closable] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def opened(self, connection: Closable) -> Closable | None:
        """Note a new connection. Return the one that has to be closed for it, which may be itself; None: there is room."""
        self._waiting[connection] = None
        if len(self) <= self.most:
            return None
        leaving = next(iter(self._waiting))
        del self._waiting[leaving]  # at once: more may be opened before it is closed
        return leaving

    def began(self, connection: Closable) -> None:
        """Note that a head is whole: a request is under way."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._under_way.add(connection)

    def ended(self, connection: Closable) -> None:
        """Note that a request was answered: the connection waits for the next one."""
        if connection in self._under_way:
            self._under_way.discard(connection)
            self._waiting[connection] = None

    def closed(self, connection: Closable) -> None:
        """Forget a connection."""
        self._waiting.pop(connection, None)
        self._under_way.discard(connection)


class BoundedConnection(H11Protocol):
    """A connection on a socket. Refusals of the parser have the one form of all errors."""

    book: ConnectionBook
    head_s: float
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        leaving = self.book.opened(self)
        if leaving is not None:
            leaving.close_for_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.book.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and look whether a head has become whole by them, or has begun."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Note the end of a request. The parser may hold the next one already."""
        self._stop_timer()
        self.book.ended(self)
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request of HTTP, or too large a head, and close."""
        self._refuse(Problem("malformed", f"{msg} Its head may have {HEAD_BYTES:,} bytes"))

    def close_for_room(self) -> None:
        """Close the connection because another one needs its place."""
        self._refuse(busy(f"the gateway has {self.book.most:,} connections, all that it may have"))

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
            self.book.began(self)
        elif self._head_timer is None and not self.transport.is_closing():
            self._await_head()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        self._refuse(Problem("slow_head", f"the head of the request was not whole after {self.head_s:g} s"))

    def _refuse(self, problem: Problem) -> None:
        if self.transport.is_closing():
            return
        content = msgspec.json.encode(error_answer(problem))
        head = (
            f"HTTP/1.1 {problem.kind.status} \r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        )
        more = "".join(f"{name}: {value}\r\n" for name, value in problem.headers.items())
        self.transport.write(f"{head}{more}Connection: close\r\n\r\n".encode() + content)
        self.transport.close()


def room_for_connections() -> int:
    """Return the number of connections that the files of this process leave room for, after raising its limit as far as it may
    be raised without rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + OTHER_FILES
    if hard == resource.RLIM_INFINITY or hard > soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(max(wanted, soft), hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(CONNECTIONS_MAX, max(soft - OTHER_FILES, soft // 2))


def bounds(most: int | None = None, head_s: float = HEAD_S) -> dict[str, Any]:
    """Return the options of uvicorn that bound the connections of one gateway. ``most``: the most connections; None: as many as
    the files of its process leave room for."""
    book = ConnectionBook(room_for_connections() if most is None else most)
    made = type("OneGatewaysConnection", (BoundedConnection,), {"book": book, "head_s": head_s})
    return {"http": made, "ws": "none", "backlog": BACKLOG, "h11_max_incomplete_event_size": HEAD_BYTES}
