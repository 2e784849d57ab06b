"""Schemas of values by their ids, to read (``Registry``) and to write (``Subject``), and requests to a schema registry."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from flux.connectors.kafka.client.cluster import Passing
from flux.connectors.kafka.errors import KafkaError, NotPermitted
from flux.errors import UsageError

#: Limits of a request with its answer, redirects included, in seconds, and of the answer in bytes.
LIMIT_S, BYTES_MAX = 5.0, 4 << 20
_KIND = "application/vnd.schemaregistry.v1+json"


class RegistryUnavailable(Exception):
    """Failure of a request: there was no answer that could be used. A later attempt may succeed."""


class Refused(Exception):
    """Refusal by the registry: an answer with a status from 400 to 499, but for 408 and 429, which are a
    ``RegistryUnavailable``."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


def ask(url: str, body: bytes | None = None, limit_s: float = LIMIT_S) -> bytes:
    """Send a GET, or a POST if there is a ``body`` (in JSON), and return the body of the answer. Raises RegistryUnavailable or
    Refused.

    The request is bounded in time and bytes even if the registry sends slowly or without end. Redirects lead to http and
    https and nowhere else."""
    request = urllib.request.Request(url, body, {"Accept": f"{_KIND}, application/json", "Content-Type": _KIND})
    with _Clock(limit_s) as clock:
        try:
            with _opener(clock).open(request, timeout=limit_s) as answer:
                status, found = answer.status, answer.read(BYTES_MAX + 1)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RegistryUnavailable(clock.why or str(error) or type(error).__name__) from error
        if clock.why:  # the part that had come by then looks like a complete answer
            raise RegistryUnavailable(clock.why)
    if len(found) > BYTES_MAX:
        raise RegistryUnavailable(f"the answer has more than {BYTES_MAX:,} bytes")
    if 400 <= status < 500 and status not in (408, 429):
        raise Refused(status, found)
    if not 200 <= status < 300:
        raise RegistryUnavailable(f"{status} {http.client.responses.get(status, '')}".rstrip())
    return bytes(found)


class _Clock:
    """Timer of one request that shuts its connections when the time is over. The timer holds duplicates of the descriptors,
    because TLS moves a connection into another socket object.

    The time-out of a socket counts from each read, so an answer that comes byte by byte could take for ever."""

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


#: Most ids that are remembered, with a schema and without, and the time for which the latter are.
_KEPT_MAX, _AGAIN_S = 4096, 60.0


class Registry:
    """Writers' schemas by id. ``schemas`` is the URL of a registry (http or https), or a function from an id to a schema, as
    text or a dict, that raises LookupError for ids that it does not know. For several threads.

    Law: an id is looked up once in a process. An id without a schema makes a value bad, and is looked up again a minute
    later at the earliest, so that a topic full of nonsense is no burden. A registry that does not answer is an error that
    may pass."""

    def __init__(self, schemas: str | Callable[[int], Any]) -> None:
        check_schemas(schemas, "an id to a schema")
        self._schemas = schemas
        self._known: dict[int, Any] = {}
        self._unknown: dict[int, tuple[str, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": {}, "_unknown": {}}

    def writer(self, number: int) -> Any:
        """Return the schema as the library takes it, checked; or the reason why there is none, as text."""
        found = self._known.get(number)
        if found is not None:
            return found
        why, until = self._unknown.get(number, ("", 0.0))
        if time.monotonic() < until:
            return why
        try:
            found = self._parsed(number)
        except _NoSchema as error:
            if len(self._unknown) >= _KEPT_MAX:
                self._unknown.clear()
            self._unknown[number] = str(error), time.monotonic() + _AGAIN_S
            return str(error)
        if len(self._known) >= _KEPT_MAX:
            self._known.clear()
        self._known[number] = found
        return found

    def _parsed(self, number: int) -> Any:
        from flux.connectors.kafka.formats.avro_decode import check_writer, parsed_schema

        given = self._fetched(number) if isinstance(self._schemas, str) else self._told(number)
        try:
            schema = json.loads(given) if isinstance(given, str | bytes) else given
            made = parsed_schema(schema)
            check_writer(made)
        except (ValueError, RecursionError) as error:
            raise _NoSchema(f"its schema {number} cannot be used: {error}") from None
        if isinstance(made, str):
            raise _NoSchema(f"its schema {number} is {made!r}, and no record")
        return made

    def _told(self, number: int) -> Any:
        assert callable(self._schemas)
        try:
            given = self._schemas(number)
        except LookupError as error:
            raise _NoSchema(f"schemas({number}) knows no such schema: {type(error).__name__} {error}") from None
        if given is None:
            raise _NoSchema(f"schemas({number}) knows no such schema")
        return given

    def _fetched(self, number: int) -> Any:
        assert isinstance(self._schemas, str)
        url = f"{self._schemas.rstrip('/')}/schemas/ids/{number}"
        try:
            text = ask(url)
        except Refused as error:
            if error.status == 404:
                raise _NoSchema(f"the registry at {self._schemas} has no schema {number}") from None
            if error.status in (401, 403):
                raise NotPermitted(
                    f"the registry at {self._schemas} does not permit reading schema {number} ({error.status}). Give schemas= "
                    "a function that logs in"
                ) from None
            raise Passing(f"the registry at {url}: {error.status}") from None
        except RegistryUnavailable as error:
            raise Passing(f"the registry at {url}: {error}") from error
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("schema"), str):
            raise Passing(f"the registry at {url}: the answer is no schema")
        if found.get("schemaType", "AVRO") != "AVRO":
            raise _NoSchema(f"schema {number} of the registry is of type {found['schemaType']!r:.40}, not AVRO")
        if found.get("references"):
            raise _NoSchema(
                f"schema {number} of the registry refers to others; give schemas= a function that puts them together"
            )
        return found["schema"]


class _NoSchema(Exception):
    """Reason why an id has no schema: the registry does not know it, or it cannot be used."""


def check_schemas(schemas: Any, of: str) -> None:
    """Raise UsageError unless ``schemas`` is the URL of a registry, or a function from ``of``."""
    if isinstance(schemas, str):
        try:
            parts = urllib.parse.urlsplit(schemas)
            good = (
                parts.scheme in ("http", "https")
                and parts.hostname
                and not (parts.username or parts.query or parts.fragment)
            )
            _ = parts.port
        except ValueError:
            parts, good = None, None
        if not good:
            raise UsageError(
                "schemas must be the URL of a registry, as in schemas='http://host:8081', without a user; for a registry "
                f"with a login give a function from {of}. Got a URL for {(parts and parts.hostname) or schemas[:40]!r}"
            )
    elif not callable(schemas):
        raise UsageError(
            f"schemas must be the URL of a registry, or a function from {of}; got {type(schemas).__name__}"
        )


_ID_MAX = (1 << 32) - 1
_PAUSE_S = 0.2
#: Longest text of a registry in a message, in characters.
_SAID_MAX = 300


class Subject:
    """Subject of a registry, which gives the ids of the schemas by which values are written. ``schemas`` is the URL of a
    registry (http or https), or a function from subject and schema to an id.

    A registry is asked once, where a query starts. Nothing is registered unless the user asks for it: a schema that others
    read by is theirs to change."""

    def __init__(self, name: str, schemas: str | Callable[[str, str], int]) -> None:
        check_schemas(schemas, "subject and schema to an id")
        self._name, self._schemas = name, schemas

    def __repr__(self) -> str:
        return f"subject {self._name!r}" + (
            f" of the registry at {self._schemas}" if isinstance(self._schemas, str) else ""
        )

    def id_of(self, schema: str, register: bool, limit_s: float) -> int:
        """Return the id of a schema. UsageError: the subject has no such schema, or refuses it."""
        if not isinstance(self._schemas, str):
            return self._checked(self._told(schema), f"schemas({self._name!r}, ...)")
        found = self._asked("/versions" if register else "", {"schema": schema}, limit_s)
        return self._checked(found.get("id"), repr(self))

    def newest(self, limit_s: float) -> tuple[int, str]:
        """Return id and text of the newest schema."""
        found = self._asked("/versions/latest", None, limit_s)
        if found.get("schemaType", "AVRO") != "AVRO":
            raise UsageError(f"the newest schema of {self!r} is of type {found['schemaType']!r:.40}, not AVRO")
        if found.get("references"):
            raise UsageError(
                f"the newest schema of {self!r} refers to others: give schema= with them put together, and schemas= a function "
                "that tells the id"
            )
        if not isinstance(found.get("schema"), str):
            raise KafkaError(f"{self!r}: the answer has no schema")
        return self._checked(found.get("id"), repr(self)), found["schema"]

    def _told(self, schema: str) -> Any:
        assert callable(self._schemas)
        try:
            return self._schemas(self._name, schema)
        except LookupError as error:
            raise UsageError(
                f"schemas({self._name!r}, ...) knows no such schema: {type(error).__name__} {error}"
            ) from None

    def _checked(self, found: Any, whose: str) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= _ID_MAX:
            raise UsageError(f"{whose} gave {found!r:.60} for the id of a schema, which must be 0 to {_ID_MAX:,}")
        return found

    def _asked(self, what: str, body: dict[str, str] | None, limit_s: float) -> dict[str, Any]:
        """Ask the registry, again and again for at most ``limit_s`` seconds."""
        assert isinstance(self._schemas, str)
        url = f"{self._schemas.rstrip('/')}/subjects/{urllib.parse.quote(self._name, safe='')}{what}"
        end = time.monotonic() + limit_s
        while True:
            try:
                left = max(end - time.monotonic(), _PAUSE_S)
                return self._object(ask(url, None if body is None else json.dumps(body).encode(), min(LIMIT_S, left)))
            except Refused as error:
                raise self._refused(error, what) from None
            except RegistryUnavailable as error:
                if time.monotonic() + _PAUSE_S >= end:
                    raise KafkaError(f"{self!r} could not be asked within {limit_s:g} s: {error}") from error
            time.sleep(_PAUSE_S)

    def _object(self, answer: bytes) -> dict[str, Any]:
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise RegistryUnavailable("the answer is no object of JSON")
        return found

    def _refused(self, error: Refused, what: str) -> Exception:
        try:
            said = json.loads(error.body)
            why = str(said.get("message", "")) if isinstance(said, dict) else ""
        except (ValueError, RecursionError):
            why = ""
        why = f" ({error.status}{f': {why[:_SAID_MAX]}' if why else ''})"
        if error.status in (401, 403):
            return NotPermitted(
                f"{self!r} does not permit it{why}. Give schemas= a function that logs in and returns the id"
            )
        if error.status == 404 and what == "":
            return UsageError(
                f"{self!r} has no such schema{why}. Give one that it has, or none for its newest; "
                "register_schemas=True registers it"
            )
        if error.status == 404:
            return UsageError(f"{self!r} is not there{why}. Give schema=, and register_schemas=True registers it")
        if error.status == 409:
            return UsageError(f"{self!r} refuses the schema, which does not go with those before{why}")
        return UsageError(f"{self!r} refuses the schema{why}")
