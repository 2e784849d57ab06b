"""Running queries, found by their connection files, and requests to their controllers (design: stale-files).

Nothing waits without a limit: a query that does not answer is ``Unreachable``, and the message tells which ways were tried.
"""

from __future__ import annotations

import itertools
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from controller.operate import connection_file
from controller.operate.connection_file import FoundConnection, QueryConnection
from controller.operate.requests import (
    ANSWER_BYTES_MAX,
    AnyAnswer,
    GetStatus,
    Partitions,
    Refusal,
    Request,
    RequestAnswer,
    Status,
    all_partitions,
    decode_answer,
    encode_request,
)
from flux.errors import FluxError, ProtocolError, Unreachable, UsageError

#: A controller answers within milliseconds; one that is paused or swapped out is given a chance.
ANSWER_S = 10.0
#: Longest wait when all queries are asked for their names.
SURVEY_S = 2.0
CONNECT_S = 2.0

A = TypeVar("A", bound=RequestAnswer)


class RequestRefused(FluxError):
    """The controller refused the request, and nothing has changed. ``kind`` is that of ``requests.Refusal``, or "secret": one
    of the two ends did not prove the secret."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class QueryClient:
    """A connection to one query, for a with statement, and for one thread."""

    def __init__(self, connection: QueryConnection) -> None:
        self.connection = connection
        from flux.shell.transport import (  # ZeroMQ takes longer to load than a command that needs none
            Keys,
            Sockets,
        )

        keys = Keys.make(connection.public_key.encode()) if connection.public_key else None
        self._numbers = itertools.count(1)
        self._sockets = Sockets(keys, connection.secret, ANSWER_BYTES_MAX)
        self._link = self._sockets.link(connection.endpoint, sealed=True)

    def ask(self, request: Request, expected: type[A], timeout_s: float = ANSWER_S) -> A:
        """Send a request and return its answer. Unreachable: none comes in time; RequestRefused: the controller says no."""
        self._must_listen()
        number = next(self._numbers)
        numbered = msgspec.structs.replace(request, number=number)
        self._link.send(encode_request(numbered))
        answer = self._wait(number, timeout_s)
        if isinstance(answer, Refusal):
            raise RequestRefused(answer.kind, answer.reason)
        if not isinstance(answer, expected):
            raise ProtocolError(f"expected {expected.__name__} from query {self._name}, {type(answer).__name__} came")
        return answer

    def partitions(self, stage: str | None = None) -> Partitions:
        """Ask for placement and load of all replicas, of one stage or of all."""
        return all_partitions(lambda page: self.ask(page, Partitions), stage)

    def _wait(self, number: int, timeout_s: float) -> AnyAnswer:
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if self._link in self._sockets.wait(left):
                for frames in self._link.receive():
                    answer = decode_answer(frames)
                    # A request that cannot be read is refused without its number. Other answers are late ones to
                    # earlier requests.
                    if answer.number == number or (isinstance(answer, Refusal) and answer.number == 0):
                        return answer
            if self._link.problem:
                raise RequestRefused(
                    "secret",
                    f"query {self._name}: {self._link.problem}: the connection file is another's or an old one",
                )
        self._must_listen()  # it may have ended meanwhile
        raise Unreachable(
            f"query {self._name} (process {self.connection.pid}) does not answer within {timeout_s:g} s at "
            f"{self.connection.endpoint}: is its driver paused or overloaded?"
        )

    def _must_listen(self) -> None:
        if not listening(self.connection.endpoint):
            raise Unreachable(f"query {self._name} has ended: no process listens at {self.connection.endpoint}")

    @property
    def _name(self) -> str:
        return self.connection.name or self.connection.id

    def close(self) -> None:
        self._sockets.close()

    def __enter__(self) -> QueryClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def listening(endpoint: str) -> bool:
    """Tell whether a process listens there. ZeroMQ would silently go on trying to connect."""
    try:
        from flux.shell.transport import host_and_port  # as above

        socket.create_connection(host_and_port(endpoint), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # not known here: an answer will tell
    return True


# ---- which queries there are


@dataclass(frozen=True)
class Sighting:
    """A connection file and the status of its query. ``stale`` is the reason why the query does not exist any more or does not
    answer."""

    found: FoundConnection
    status: Status | None
    stale: str = ""


def survey(where: Path | None = None) -> list[Sighting]:
    """Return every connection file, after asking its query. Files of queries that are certainly over are removed."""
    sightings = [_sight(found) for found in connection_file.find_all(where)]
    for sighting in sightings:
        if sighting.found.gone:
            connection_file.remove(sighting.found.path)
    return sightings


def _sight(found: FoundConnection) -> Sighting:
    found = _checked(found)
    if found.problem or found.connection is None:
        return Sighting(found, None, found.problem)
    try:
        with QueryClient(found.connection) as client:
            return Sighting(found, client.ask(GetStatus(), Status, SURVEY_S))
    except FluxError as error:
        return Sighting(found, None, str(error))


def _checked(found: FoundConnection) -> FoundConnection:
    """Check that the port of a file is open: the file of a query that has ended may be left behind although its process lives
    on."""
    if found.problem or found.connection is None or listening(found.connection.endpoint):
        return found
    return FoundConnection(
        found.path, found.connection, f"no process listens at {found.connection.endpoint}", gone=True
    )


def choose(query: str | None, where: Path | None = None) -> QueryConnection:
    """Choose a query by name, id or unique beginning of its id; None: the only one there is. Unreachable: there is none;
    UsageError: several match."""
    where = connection_file.folder() if where is None else where
    found = [_checked(file) for file in connection_file.find_all(where)]
    live = [file.connection for file in found if file.connection and not file.problem]
    unusable = "; ".join(f"{file.path.name}: {file.problem}" for file in found if file.problem and not file.gone)
    if not live and unusable:
        raise Unreachable(f"no query can be asked. Of the connection files in {where}, {unusable}")
    if not live:
        raise Unreachable(
            f"no query is running: none has a connection file in {where}. Queries of another user, of another host, or with "
            "spark.flux.operate=false cannot be seen"
        )
    meant = live if query is None else _matching(query, live)
    if len(meant) == 1:
        return meant[0]
    names = ", ".join(_called(connection) for connection in (meant or live))
    if not meant:
        besides = f". Not asked: {unusable}" if unusable else ""
        raise Unreachable(f"no running query is called {query!r}; running are {names}{besides}")
    if query is None:
        raise UsageError(f"several queries are running, say which: {names}")
    raise UsageError(f"{query!r} may be any of {names}; give more of the id")


def _matching(query: str, live: list[QueryConnection]) -> list[QueryConnection]:
    exactly = [connection for connection in live if connection.id == query]
    named = [connection for connection in live if connection.name == query]
    return exactly or named or [connection for connection in live if query and connection.id.startswith(query)]


def _called(connection: QueryConnection) -> str:
    return f"{connection.name} ({connection.id[:8]})" if connection.name else connection.id[:8]
