"""``flux.client.Client``, a client of one or several gateways (design: gateway-client).

client = flux.client.Client("http://127.0.0.1:8080", token)
client.register_stream("clicks", "user BIGINT, page STRING")
client.register_query("visits", "SELECT user, count(*) AS visits FROM clicks GROUP BY user")
client.push_events("clicks", [{"user": 1, "page": "/"}])
for rows in client.follow("visits"):
    print(rows)
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import quote, urlencode

from flux.client.event_stream import EventStreamParser, ServerEvent
from flux.client.result_news import FollowedNews, ResultRows, TentativeResults, tentative_of
from flux.errors import FluxError, Unreachable, UsageError

if TYPE_CHECKING:
    import httpx
    import pyarrow as pa

#: Seconds between two tries, at first and at most.
_AGAIN_S, _AGAIN_MAX_S = 0.05, 2.0
#: Answers that promise nothing: the request may be sent again.
_AGAIN = (408, 429, 500, 502, 503, 504)
#: Codes of such answers at the end of a stream of events, where there is no status.
_AGAIN_CODES = ("busy", "internal", "not_readable", "not_stored")
_ARROW = "application/vnd.apache.arrow.stream"
_JSON = {"Content-Type": "application/json"}
#: Seconds for an answer, and without any byte on a stream of events: a gateway shows more often that it is there.
_ANSWER_S, _SILENCE_S = 35.0, 45.0


class GatewayRefused(FluxError):
    """A refusal by a gateway. ``code`` is for programs; ``row`` and ``column`` name the value that does not fit."""

    def __init__(self, status: int, content: Mapping[str, Any]) -> None:
        super().__init__(f"{content.get('message', 'no reason was given')}. {content.get('remedy', '')}".strip())
        self.status = status
        self.code = str(content.get("code", ""))
        self.row: int | None = content.get("row")
        self.column: str | None = content.get("column")


class GatewayClient:
    """A client of one or several gateways of a location. It goes over to another one when one is lost.

    urls     the address of a gateway, or several
    token    a token with the needed rights
    timeout  seconds for which a call is tried again before it raises Unreachable
    name     the name under which events are pushed; default: a new one. Pushes of one name are numbered, so that a repeat changes
             nothing, at any gateway and for ever. Two programs must not share a name
    verify   a file with certificates to trust, or False to trust any

    May be used by several threads; pushes go one after the other, because their numbers must."""

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str,
        *,
        timeout: float = 60.0,
        name: str | None = None,
        verify: Any = True,
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise UsageError("flux.client needs another package: pip install 'flux-exchange[serve]'") from error
        self._urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._urls or not all(url.startswith(("http://", "https://")) for url in self._urls):
            raise UsageError(
                f"flux.client.Client: expected addresses such as 'http://127.0.0.1:8080', got {urls!r:.200}"
            )
        self._timeout = timeout
        self._name = name or f"client-{uuid.uuid4().hex}"
        self._number = time.time_ns()  # above all numbers of an earlier life of this name
        self._pushing = threading.Lock()
        #: Stream and body of the last push, if no gateway has told its fate. They keep their number if they come next.
        self._unknown: tuple[str, bytes] | None = None
        #: By stream, the gateway that has taken its events last.
        self._owners: dict[str, str] = {}
        if isinstance(verify, str | os.PathLike):
            verify = ssl.create_default_context(cafile=os.fspath(verify))
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=_ANSWER_S, verify=verify)
        self._failed: tuple[type[Exception], ...] = (httpx.TransportError,)

    # ---- streams

    def register_stream(self, name: str, schema: str = "infer", **options: Any) -> dict[str, Any]:
        """Register a stream, or find it registered with the same definition. ``options``: ``time``, ``delay``, ``idle``,
        ``partitions``, and ``retain`` as {"time": "1 day", "bytes": 2**30}. GatewayRefused: another definition has the name."""
        return self._post("/v1/streams", {"name": name, "schema": schema, **options})

    def streams(self) -> list[dict[str, Any]]:
        """Return the registered streams."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/streams")["streams"]
        return found

    def remove_stream(self, name: str, cascade: bool = False) -> None:
        """Remove a stream and its events. ``cascade``: also if queries read it."""
        self._call("DELETE", f"/v1/streams/{quote(name, safe='')}{'?cascade=true' if cascade else ''}")

    def push_events(
        self, stream: str, events: Sequence[Mapping[str, Any]] | pa.Table | pa.RecordBatch | bytes, *,
        content_type: str = "application/x-ndjson",
    ) -> dict[str, Any]:  # fmt: skip
        """Push events and return when they are on disk: all, or none if an error is raised that is not Unreachable.

        events  dicts, an Arrow table or batch, or bytes of ``content_type``

        It is tried again until ``timeout``, at other gateways too, and counts once. Unreachable: it may be stored or not; the
        same events in the next call of this client count once with it. GatewayRefused: nothing was stored."""
        body, kind = _body(events, content_type)
        with self._pushing:
            if self._unknown != (stream, body):
                self._number += 1
            self._unknown = (stream, body)
            headers = {"Content-Type": kind, "Flux-Client": self._name, "Flux-Number": str(self._number)}
            try:
                path = f"/v1/streams/{quote(stream, safe='')}/events"
                answer = self._call("POST", path, body, headers, stream)
            except GatewayRefused:
                self._unknown = None
                raise
            self._unknown = None
            if answer.get("repeated") and not answer.get("rows", 1):
                # Another program has the name, or the clock was set back: the gateway takes all that comes for old.
                raise FluxError(
                    f"the events were not stored: client name {self._name!r} has a newer number at the gateway already. Give the "
                    "client another name"
                )
            return answer

    # ---- queries

    def register_query(self, name: str, sql: str = "", **options: Any) -> dict[str, Any]:
        """Register a query, or find it registered with the same definition, and return when it runs. Its result is a stream
        again, under its name.

        sql      a SELECT over streams and results of other queries
        options  ``partitions``, ``replicas``, ``retain``, ``availability`` as "3s"; in place of ``sql``: ``operator`` as
                 "MODULE:NAME", ``arguments`` and ``inputs``

        GatewayRefused: the text is not accepted (with its place), or another definition has the name."""
        return self._post("/v1/queries", {"name": name, **({"sql": sql} if sql else {}), **options})

    def queries(self) -> list[dict[str, Any]]:
        """Return the registered queries."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/queries")["queries"]
        return found

    def query(self, name: str) -> dict[str, Any]:
        """Return a registered query: its text, columns and status. GatewayRefused: there is none."""
        return self._call("GET", f"/v1/queries/{quote(name, safe='')}")

    def remove_query(self, name: str, cascade: bool = False) -> None:
        """Remove a query with its state and its result. ``cascade``: with queries and outputs that read it."""
        self._call("DELETE", f"/v1/queries/{quote(name, safe='')}{'?cascade=true' if cascade else ''}")

    def restart_query(self, name: str) -> dict[str, Any]:
        """Start a query that has failed again, and return when it runs: with empty state, and with the events that are pushed
        from then on. Its result goes on, so cursors of readers hold. One that runs stays as it is. GatewayRefused: a query that
        it reads has failed, too; restart that one first."""
        return self._call("POST", f"/v1/queries/{quote(name, safe='')}/restart")

    # ---- outputs

    def register_output(self, name: str, query: str, url: str, **options: Any) -> dict[str, Any]:
        """Register a webhook, or find it registered with the same definition: rows of a query are posted to ``url`` in signed
        deliveries. ``options``: ``secret`` (the answer has one if none is given), ``batch`` as {"rows": 1000, "time": "1 s"},
        ``after`` and ``retry``. GatewayRefused: another definition has the name, or the address is not allowed."""
        return self._post("/v1/outputs", {"name": name, "query": query, "url": url, **options})

    def outputs(self) -> list[dict[str, Any]]:
        """Return the registered outputs."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/outputs")["outputs"]
        return found

    def remove_output(self, name: str) -> None:
        """Remove an output. Its receiver gets nothing more."""
        self._call("DELETE", f"/v1/outputs/{quote(name, safe='')}")

    def resume_output(self, name: str) -> dict[str, Any]:
        """Let an output go on that is paused, because its receiver failed for too long."""
        return self._call("POST", f"/v1/outputs/{quote(name, safe='')}/resume")

    # ---- results

    def rows(
        self,
        query: str,
        after: str | None = None,
        *,
        wait: str = "0s",
        limit: int | None = None,
        tentative: bool = False,
    ) -> ResultRows:
        """Return rows of a result behind a cursor, in the order in which the query gave them.

        after  the cursor of the call before; "newest": rows that come from now on; None: from the first row that is kept
        wait   a duration for which the gateway waits if there are no rows yet, as in "10s"
        limit  the most rows; default: 1000
        tentative  with the rows that may still change, as they stand now, in ``tentative`` of the result. ``wait`` ends when
                   these change, too

        GatewayRefused with status 410: the cursor is of an earlier query of this name."""
        asked = {"after": after, "wait": wait, "limit": limit, "tentative": "true" if tentative else None}
        given = urlencode({name: value for name, value in asked.items() if value is not None})
        answer = self._call("GET", f"/v1/queries/{quote(query, safe='')}/rows?{given}")
        standing = [TentativeResults.of(each) for each in answer.get("tentative", ())]
        return ResultRows(answer["rows"], answer["cursor"], answer["missed"], standing)

    @overload
    def follow(
        self, query: str, after: str | None = None, *, tentative: Literal[False] = False
    ) -> Iterator[ResultRows]: ...

    @overload
    def follow(self, query: str, after: str | None = None, *, tentative: Literal[True]) -> Iterator[FollowedNews]: ...

    def follow(self, query: str, after: str | None = None, *, tentative: bool = False) -> Iterator[FollowedNews]:
        """Yield rows of a result as they come, without an end. ``after``: as for ``rows``.

        ``tentative``: with ``TentativeResults``, ``UndoneResults`` and ``CorrectedResults`` among them; ``ResultView`` makes a
        table of all. A stable row may come a moment before the undo of the tentative one in its place. A cursor counts stable
        rows alone.

        When a gateway is lost, it goes on at another one behind the newest cursor: each row once. Rows that were removed
        meanwhile are told in ``missed``. Unreachable: no gateway has answered for ``timeout`` seconds. GatewayRefused: as
        ``rows`` raises it, or the query was removed."""
        asked = "?tentative=true" if tentative else ""
        for event in self._events(f"/v1/queries/{quote(query, safe='')}/events{asked}", after or ""):
            if event.kind == "message":
                yield ResultRows(json.loads(event.data), event.id)
            elif event.kind == "missed":
                yield ResultRows([], event.id, [json.loads(event.data)])
            elif (found := tentative_of(event)) is not None:
                yield found

    def _events(self, path: str, cursor: str) -> Iterator[ServerEvent]:
        """Yield the events of a path, from one gateway after the other. Each goes on behind the newest id."""
        import httpx

        end, wait, tried, said = time.monotonic() + self._timeout, _AGAIN_S, 0, ""
        asked: set[str] = set()
        limits = httpx.Timeout(_ANSWER_S, read=_SILENCE_S)
        while True:
            url = self._urls[tried % len(self._urls)]
            tried += 1
            wait = self._before(url, asked, wait, end, said)
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": cursor} if cursor else {})}
            try:
                with self._http.stream("GET", url + path, headers=headers, timeout=limits) as answer:
                    if answer.status_code == 200:
                        end, wait = time.monotonic() + self._timeout, _AGAIN_S
                        parser = EventStreamParser()
                        for part in answer.iter_bytes():
                            end = time.monotonic() + self._timeout
                            for event in parser.feed(part):
                                if event.kind == "end":
                                    self._check_end(event)
                                cursor = event.id or cursor
                                yield event
                        said = f"{url}: the stream of events has ended"
                    else:
                        answer.read()
                        said = self._refused(answer, url, "")
            except self._failed as error:
                said = f"{url}: {error}"

    def _check_end(self, event: ServerEvent) -> None:
        """Raise GatewayRefused if a stream of events has ended for a reason that another gateway has, too."""
        content = json.loads(event.data)["error"]
        if content.get("code") not in _AGAIN_CODES:
            raise GatewayRefused(410, content)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, stream: str = ""
    ) -> dict[str, Any]:
        """Make a request until a gateway has answered it, and return the content of the answer."""
        end, wait, tried, said = time.monotonic() + self._timeout, _AGAIN_S, 0, ""
        asked: set[str] = set()
        direct = bool(stream)  # the owner of the log is told, and later pushes go there at once
        while True:
            url = self._owners.get(stream) or self._urls[tried % len(self._urls)]
            tried += 1
            wait = self._before(url, asked, wait, end, said)
            sent = {**(headers or {}), "Flux-Direct": "true"} if direct else headers
            try:
                answer = self._http.request(method, url + path, content=body, headers=sent)
            except self._failed as error:
                said = f"{url}: {error}"
                if self._owners.pop(stream, None) is not None and url not in self._urls:
                    direct = False  # it may be that only the other gateways reach the owner
            else:
                if answer.status_code < 300:
                    if stream and direct:
                        self._owners[stream] = url
                    content: dict[str, Any] = answer.json() if answer.content else {}
                    return content
                said = self._refused(answer, url, stream)
                direct = direct and (answer.status_code != 421 or stream in self._owners)

    def _before(self, url: str, asked: set[str], wait: float, end: float, said: str) -> float:
        """Wait before the next try at a gateway that has been asked since the last wait, and return the seconds of the next wait.
        Another gateway is asked at once: a client goes over to it when its own one is killed. Unreachable: there is no time for a
        try. ``asked``: the gateways since the last wait, which are noted here; ``said``: the failure of the last try."""
        if said:
            pause = wait if url in asked else 0.0
            if time.monotonic() + pause > end:
                raise Unreachable(f"no gateway has answered for {self._timeout:g} s; the last one said: {said}")
            if url in asked:
                asked.clear()
                time.sleep(pause)
                wait = min(2 * wait, _AGAIN_MAX_S)
        asked.add(url)
        return wait

    def _post(self, path: str, definition: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, json.dumps(definition).encode(), _JSON)

    def _refused(self, answer: httpx.Response, url: str, stream: str) -> str:
        """Return the words of an answer after which the request is sent again. GatewayRefused: it is not."""
        try:
            content = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            content = {"message": f"the answer {answer.status_code} is none of a gateway"}
        if answer.status_code == 421:
            owner = str(content.get("gateway", ""))
            self._owners.pop(stream, None)
            if owner.startswith(url.partition("//")[0] + "//"):  # never from https to http: the token goes there
                self._owners[stream] = owner
        elif answer.status_code in _AGAIN:
            self._owners.pop(stream, None)
        else:
            raise GatewayRefused(answer.status_code, content)
        return f"{url}: {content.get('message', '')}"


#: The name that programs use.
Client = GatewayClient


def _body(events: Any, content_type: str) -> tuple[bytes, str]:
    if isinstance(events, bytes):
        return events, content_type
    if hasattr(events, "schema") and hasattr(events, "num_rows"):
        import pyarrow as pa

        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, events.schema) as writer:
            writer.write(events)
        return out.getvalue().to_pybytes(), _ARROW
    if isinstance(events, str | Mapping) or not isinstance(events, Sequence):
        raise UsageError(f"push_events: expected a list of dicts, an Arrow table or bytes, got {type(events).__name__}")
    return b"\n".join(json.dumps(event, default=str).encode() for event in events), "application/x-ndjson"
