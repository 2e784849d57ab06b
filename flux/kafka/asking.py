"""A request to a schema registry, bounded in time and bytes even if the registry sends slowly or without end.

The time-out of a socket counts from each read, so an answer that comes byte by byte could take for ever. Here a timer shuts
the connection. Redirects lead to http and https and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import socket
import threading
import urllib.request
from typing import Any

#: Limits of a request with its answer, redirects included, in seconds, and of the answer in bytes.
LIMIT_S, BYTES_MAX = 5.0, 4 << 20
_KIND = "application/vnd.schemaregistry.v1+json"


class Failed(Exception):
    """Failure of a request: there was no answer that could be used. A later attempt may succeed."""


class Refused(Exception):
    """Refusal by the registry: an answer with a status from 400 to 499, but for 408 and 429, which are a ``Failed``."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


def ask(url: str, body: bytes | None = None, limit_s: float = LIMIT_S) -> bytes:
    """Send a GET, or a POST if there is a ``body`` (in JSON), and return the body of the answer. Raises Failed or Refused."""
    request = urllib.request.Request(url, body, {"Accept": f"{_KIND}, application/json", "Content-Type": _KIND})
    with _Clock(limit_s) as clock:
        try:
            with _opener(clock).open(request, timeout=limit_s) as answer:
                status, found = answer.status, answer.read(BYTES_MAX + 1)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Failed(clock.why or str(error) or type(error).__name__) from error
        if clock.why:  # the part that had come by then looks like a complete answer
            raise Failed(clock.why)
    if len(found) > BYTES_MAX:
        raise Failed(f"the answer has more than {BYTES_MAX:,} bytes")
    if 400 <= status < 500 and status not in (408, 429):
        raise Refused(status, found)
    if not 200 <= status < 300:
        raise Failed(f"{status} {http.client.responses.get(status, '')}".rstrip())
    return bytes(found)


class _Clock:
    """Timer of one request that shuts its connections when the time is over. The timer holds duplicates of the descriptors,
    because TLS moves a connection into another socket object."""

    def __init__(self, limit_s: float) -> None:
        self.why = ""
        self._limit_s = limit_s
        self._watched: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self) -> _Clock:
        self._timer = threading.Timer(self._limit_s, self._ring)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for each in self._watched:
                each.close()
            self._watched.clear()

    def connect(self, *args: Any, **options: Any) -> socket.socket:
        """Connect as ``socket.create_connection`` does, and shut the connection when the time is over."""
        if self.why:
            raise TimeoutError(self.why)
        made = socket.create_connection(*args, **options)
        with self._lock:
            self._watched.append(socket.socket(fileno=os.dup(made.fileno())))
        if self.why:
            self._shut()
        return made

    def _ring(self) -> None:
        self.why = f"no answer within {self._limit_s:g} s"
        self._shut()

    def _shut(self) -> None:
        with self._lock:
            for each in self._watched:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


def _opener(clock: _Clock) -> urllib.request.OpenerDirector:
    made = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(), urllib.request.UnknownHandler(), _Redirects(), _Answers()):
        made.add_handler(handler)
    made.add_handler(_Http(clock))
    made.add_handler(_Https(clock))
    return made


class _Answers(urllib.request.HTTPErrorProcessor):
    """Handler that takes every status but a redirect as an answer."""

    def http_response(self, request: Any, response: Any) -> Any:
        followed = self.parent.error("http", request, response, response.status, response.reason, response.headers) \
            if 300 <= response.status < 400 else None  # fmt: skip
        return response if followed is None else followed

    https_response = http_response


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request: Any, answer: Any, *args: Any) -> Any:
        answer.close()  # its body is of no use, and could be large
        return super().redirect_request(request, answer, *args)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def http_open(self, request: Any) -> Any:
        return self.do_open(functools.partial(_watched, http.client.HTTPConnection, self._clock), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def https_open(self, request: Any) -> Any:
        return self.do_open(functools.partial(_watched, http.client.HTTPSConnection, self._clock), request)


def _watched(kind: type[http.client.HTTPConnection], clock: _Clock, *args: Any, **options: Any) -> Any:
    made = kind(*args, **options)
    made._create_connection = clock.connect  # type: ignore[attr-defined]  # before a proxy or TLS takes part
    return made
