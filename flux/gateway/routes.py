"""Requests of HTTP as actions, without I/O: a request in, an action or a problem out (design: gateway)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from flux.eventlog.records import PushName
from flux.gateway.problems import Problem

#: The content type of a stream of Arrow IPC.
ARROW = "application/vnd.apache.arrow.stream"
#: Kinds of bodies by content type.
CONTENT = {
    "application/x-ndjson": "lines",
    "application/jsonl": "lines",
    "application/json": "array",
    "text/csv": "csv",
    ARROW: "arrow",
}
ENCODINGS = ("identity", "gzip", "zstd")
KEY_HEADER, CLIENT_HEADER, NUMBER_HEADER = "idempotency-key", "flux-client", "flux-number"
#: With the value "true": another gateway's log is answered with 421, and the request is not passed on to that gateway.
DIRECT_HEADER = "flux-direct"
#: Characters of a key, and of the name of a client: the log keeps them.
NAME_MAX = 200
_NUMBER_MAX = 1 << 62
_NUMBER = re.compile(r"[0-9]{1,19}")
_UNNAMED = PushName()
#: Rows of one answer, unless the request says so, and at most; seconds that a request may wait for the first one.
ROWS, ROWS_MAX, WAIT_MAX_S = 1000, 100_000, 60.0
_WAIT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(ms|s)?", re.ASCII)


#: Headers that are refused if they come twice: of two values, a proxy may believe the first and the gateway the last.
_ONCE = frozenset((
    "authorization", "content-encoding", "content-length", "content-type", "last-event-id", "transfer-encoding", KEY_HEADER,
    CLIENT_HEADER, NUMBER_HEADER, DIRECT_HEADER,
))  # fmt: skip
_CLOSE = {"Connection": "close"}


@dataclass(frozen=True)
class HttpRequest:
    """The head of a request. Names of headers are in lower case."""

    method: str
    #: Without %-escapes.
    path: str
    headers: Mapping[str, str]
    query: Mapping[str, str]


@dataclass(frozen=True)
class Action:
    """A request as the gateway carries it out. The docstring of a subclass is its summary in the OpenAPI document."""

    #: The stream, or the query whose result is a stream, that it is about; "": none.
    stream: str = ""
    #: The right that its token needs, on the stream if there is one; "": it needs no token.
    right: ClassVar[str] = ""


class Health(Action):
    """Tell that the gateway answers."""


class Describe(Action):
    """Give the OpenAPI document."""


class ListStreams(Action):
    """List the streams that the token may see."""

    right = "read"


class ShowStream(Action):
    """Describe a stream."""

    right = "read"


class RegisterStream(Action):
    """Register a stream, as the body says."""

    right = "admin"


@dataclass(frozen=True)
class RemoveStream(Action):
    """Remove a stream, with queries that read it if ``cascade``."""

    cascade: bool = False
    right = "admin"


@dataclass(frozen=True)
class PushEvents(Action):
    """Store the events of the body."""

    #: Kind of the body ("lines", "array", "csv" or "arrow"), and its encoding.
    kind: str = "lines"
    encoding: str = "identity"
    name: PushName = _UNNAMED
    right = "push"


@dataclass(frozen=True)
class ForgetReader(Action):
    """Forget a query outside of the service that reads a stream and does not come back: events are kept for it no longer."""

    reader: str = ""
    right = "admin"


class ListQueries(Action):
    """List the registered queries that the token may see."""

    right = "read"


class ShowQuery(Action):
    """Describe a registered query."""

    right = "read"


class RegisterQuery(Action):
    """Register a query, as the body says. It runs when this is answered."""

    right = "query"


@dataclass(frozen=True)
class RemoveQuery(Action):
    """Remove a query with its state and its result, and all queries that read it if ``cascade``."""

    cascade: bool = False
    right = "query"


class RestartQuery(Action):
    """Start a query that has failed again, with empty state. It runs when this is answered, and its result goes on."""

    right = "query"


@dataclass(frozen=True)
class Reading(Action):
    """A request for results, answered in the loop, because it may wait. ``stream`` is the name of the query."""

    #: The cursor behind which they are, "oldest" or "newest".
    after: str = "oldest"
    #: With tentative rows, too.
    tentative: bool = False
    right = "read"


@dataclass(frozen=True)
class ReadRows(Reading):
    """Give results of a query."""

    #: The most rows, and the seconds to wait for the first one.
    limit: int = ROWS
    wait_s: float = 0.0
    #: As a stream of Arrow IPC; otherwise as JSON.
    arrow: bool = False


class FollowRows(Reading):
    """Give results of a query as they come, as server-sent events."""


@dataclass(frozen=True)
class OutputAction(Action):
    """A request about webhooks. Its query is known when the webhook is found, so the right is looked at again then."""

    #: The name of the webhook; "": none.
    name: str = ""


class ListOutputs(OutputAction):
    """List the webhooks that the token may see."""

    right = "read"


class ShowOutput(OutputAction):
    """Describe a webhook and its state."""

    right = "read"


class RegisterOutput(OutputAction):
    """Register a webhook: results of a query are posted to a receiver, as the body says."""

    right = "query"


class RemoveOutput(OutputAction):
    """Remove a webhook."""

    right = "query"


class ResumeOutput(OutputAction):
    """Go on with the deliveries of a webhook that is paused."""

    right = "query"


#: Methods of each path, as in the OpenAPI document.
METHODS: dict[str, dict[str, type[Action]]] = {
    "/v1/health": {"GET": Health},
    "/v1/openapi.json": {"GET": Describe},
    "/v1/streams": {"GET": ListStreams, "POST": RegisterStream},
    "/v1/streams/{name}": {"GET": ShowStream, "DELETE": RemoveStream},
    "/v1/streams/{name}/events": {"POST": PushEvents},
    "/v1/streams/{name}/readers/{reader}": {"DELETE": ForgetReader},
    "/v1/queries": {"GET": ListQueries, "POST": RegisterQuery},
    "/v1/queries/{name}": {"GET": ShowQuery, "DELETE": RemoveQuery},
    "/v1/queries/{name}/restart": {"POST": RestartQuery},
    "/v1/queries/{name}/rows": {"GET": ReadRows},
    "/v1/queries/{name}/events": {"GET": FollowRows},
    "/v1/outputs": {"GET": ListOutputs, "POST": RegisterOutput},
    "/v1/outputs/{name}": {"GET": ShowOutput, "DELETE": RemoveOutput},
    "/v1/outputs/{name}/resume": {"POST": ResumeOutput},
}
#: By action, the parameters of its query.
PARAMETERS: dict[type[Action], tuple[str, ...]] = {
    RemoveStream: ("cascade",),
    RemoveQuery: ("cascade",),
    ReadRows: ("after", "tentative", "limit", "wait"),
    FollowRows: ("after", "tentative"),
}
_TEMPLATES = [(template, template.split("/")) for template in METHODS]


def action_of(request: HttpRequest) -> Action:
    """Return the action that a request asks for. Problem: there is none."""
    template, (stream, *others) = _template(request.path)
    kinds = METHODS.get(template)
    if kinds is None:
        raise Problem("no_such_path", f"there is no path {request.path[:200]!r}")
    kind = kinds.get(request.method)
    if kind is None:
        allowed = ", ".join(kinds)
        raise Problem(
            "wrong_method", f"{template} has {allowed}, and not {request.method[:20]}", headers={"Allow": allowed}
        )
    known = PARAMETERS.get(kind, ())
    if unknown := [name for name in request.query if name not in known]:
        there = f"there are {', '.join(known)}" if known else "there are none"
        raise Problem("malformed", f"{template} has no query parameter {unknown[0][:100]!r}; {there}")
    if kind is PushEvents:
        return PushEvents(stream, _content(request.headers), _encoding(request.headers), push_name(request.headers))
    if kind is RemoveStream or kind is RemoveQuery:
        return kind(stream, _switch(request.query, "cascade"))
    if kind is ReadRows:
        return _rows(stream, request)
    if kind is FollowRows:
        after = request.headers.get("last-event-id") or request.query.get("after", "oldest")
        return FollowRows(stream, after, _switch(request.query, "tentative"))
    return kind(name=stream) if issubclass(kind, OutputAction) else kind(stream, *others)


def check_unambiguous(headers: Iterable[str], parameters: Iterable[str]) -> None:
    """Refuse a head that two programs may read in two ways. ``headers``: their names in lower case, and ``parameters``: those of
    the query, each as often as it came. Problem: one came twice, or there are two lengths of the body."""
    seen: set[str] = set()
    for name in headers:
        if name in seen and name in _ONCE:
            raise Problem("malformed", f"header {name.title()}: expected one, and got several", headers=_CLOSE)
        seen.add(name)
    if {"content-length", "transfer-encoding"} <= seen:
        raise Problem(
            "malformed", "expected Content-Length or Transfer-Encoding, and got both: the body would have two ends",
            headers=_CLOSE,
        )  # fmt: skip
    asked: set[str] = set()
    for name in parameters:
        if name in asked:
            raise Problem("malformed", f"query parameter {name[:100]!r}: expected one, and got several")
        asked.add(name)


def _template(path: str) -> tuple[str, list[str]]:
    """Return the template of a path, and the names in it, or one empty one."""
    parts = path.split("/")
    for template, wanted in _TEMPLATES:
        if len(wanted) == len(parts) and all(
            a == b or (a[:1] == "{" and b) for a, b in zip(wanted, parts, strict=True)
        ):
            return template, [b for a, b in zip(wanted, parts, strict=True) if a[:1] == "{"] or [""]
    return path, [""]


def _rows(query: str, request: HttpRequest) -> ReadRows:
    given = request.query
    limit, wait = given.get("limit", str(ROWS)), _WAIT.fullmatch(given.get("wait", "0s"))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= ROWS_MAX):
        raise Problem("malformed", f"limit: expected a number of rows from 1 to {ROWS_MAX:,}, got {limit[:100]!r}")
    wait_s = 2 * WAIT_MAX_S if wait is None else float(wait[1]) / (1000 if wait[2] == "ms" else 1)
    if wait_s > WAIT_MAX_S:
        raise Problem(
            "malformed", f"wait: expected 0s to {WAIT_MAX_S:g}s, as in 10s or 500ms; got {given['wait'][:100]!r}"
        )
    arrow = ARROW in request.headers.get("accept", "")
    tentative = _switch(given, "tentative")
    if arrow and tentative:
        raise Problem(
            "malformed", "tentative: tentative rows come as JSON, and Accept asks for Arrow; leave one of them out"
        )
    return ReadRows(query, given.get("after", "oldest"), tentative, int(limit), wait_s, arrow)


def _content(headers: Mapping[str, str]) -> str:
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in CONTENT:
        raise Problem("unknown_content", f"Content-Type: expected {', '.join(CONTENT)}; got {given[:100]!r}")
    return CONTENT[given]


def _encoding(headers: Mapping[str, str]) -> str:
    given = headers.get("content-encoding", "").strip().lower() or "identity"
    if given not in ENCODINGS:
        raise Problem("unknown_content", f"Content-Encoding: expected {', '.join(ENCODINGS)}; got {given[:100]!r}")
    return given


def _switch(query: Mapping[str, str], name: str) -> bool:
    given = query.get(name, "false")
    if given not in ("true", "false"):
        raise Problem("malformed", f"{name}: expected true or false, got {given[:100]!r}")
    return given == "true"


def push_name(headers: Mapping[str, str]) -> PushName:
    """Return the name of a push: its key, or its client and number. Problem: there are both, or one that cannot be kept."""
    key, client, number = (headers.get(each) for each in (KEY_HEADER, CLIENT_HEADER, NUMBER_HEADER))
    if key is not None and (client is not None or number is not None):
        raise Problem("malformed", "expected Idempotency-Key, or Flux-Client with Flux-Number, and got both")
    if (client is None) != (number is None):
        raise Problem("malformed", "Flux-Client and Flux-Number belong together, and one of them is missing")
    for what, text in (("Idempotency-Key", key), ("Flux-Client", client)):
        if text is not None and not (0 < len(text) <= NAME_MAX and text.isprintable()):
            raise Problem("malformed", f"{what}: expected 1 to {NAME_MAX} printable characters, got {len(text)}")
    if number is None or client is None:
        return PushName(key=key or "")
    if not _NUMBER.fullmatch(number) or int(number) > _NUMBER_MAX:
        raise Problem(
            "malformed", f"Flux-Number: expected a whole number from 0 to {_NUMBER_MAX}, got {number[:100]!r}"
        )
    return PushName(client=client, number=int(number))
