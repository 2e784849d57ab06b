"""A client of gateways: streams are registered and events pushed, each once (design: gateway-client).

client = flux.client.Client("http://127.0.0.1:8080", token)
client.register_stream("clicks", "user BIGINT, page STRING")
client.push_events("clicks", [{"user": 1, "page": "/"}])
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flux.errors import FluxError, Unreachable, UsageError

if TYPE_CHECKING:
    import httpx
    import pyarrow as pa

#: Seconds between two tries, at first and at most.
_AGAIN_S, _AGAIN_MAX_S = 0.05, 2.0
#: Answers that promise nothing: the request may be sent again.
_AGAIN = (408, 429, 500, 502, 503, 504)
_ARROW = "application/vnd.apache.arrow.stream"


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
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=35.0, verify=verify)
        self._failed: tuple[type[Exception], ...] = (httpx.TransportError,)

    def register_stream(self, name: str, schema: str = "infer", **options: Any) -> dict[str, Any]:
        """Register a stream, or find it registered with the same definition. ``options``: ``time``, ``delay``, ``idle``,
        ``partitions``, and ``retain`` as {"time": "1 day", "bytes": 2**30}. GatewayRefused: another definition has the name."""
        body = json.dumps({"name": name, "schema": schema, **options}).encode()
        return self._call("POST", "/v1/streams", body, {"Content-Type": "application/json"})

    def streams(self) -> list[dict[str, Any]]:
        """Return the registered streams."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/streams")["streams"]
        return found

    def remove_stream(self, name: str, cascade: bool = False) -> None:
        """Remove a stream and its events. ``cascade``: also if queries read it."""
        self._call("DELETE", f"/v1/streams/{name}{'?cascade=true' if cascade else ''}")

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
                answer = self._call("POST", f"/v1/streams/{stream}/events", body, headers, stream)
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
        direct = bool(stream)  # the owner of the log is told, and later pushes go there at once
        while True:
            url = self._owners.get(stream) or self._urls[tried % len(self._urls)]
            tried += 1
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
            if time.monotonic() + wait > end:
                raise Unreachable(f"no gateway has answered for {self._timeout:g} s; the last one said: {said}")
            time.sleep(wait)
            wait = min(2 * wait, _AGAIN_MAX_S)

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
