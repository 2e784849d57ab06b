"""The gateway on Starlette: bodies come in within bounds, answers go out in one form (design: gateway-bodies).

Work that parses, reads or writes goes to threads; the loop waits for sockets and for tickets.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flux.gateway.answers import error_answer
from flux.gateway.forwarder import Forwarder, PassedBack
from flux.gateway.gateway import Gateway, HttpAnswer, PendingCall
from flux.gateway.problems import Problem, busy, failure_of
from flux.gateway.reads.endpoint import ResultsEndpoint
from flux.gateway.reads.event_stream import EventStream
from flux.gateway.reads.tails import OutputTails
from flux.gateway.routes import DIRECT_HEADER, HttpRequest, PushEvents, Reading, action_of, check_unambiguous
from flux.gateway.webhooks.pusher import ReceiverNet
from flux.gateway.webhooks.runner import WebhookRunner

#: Bytes of bodies that may be in memory at the same time; unpacked and parsed ones of the threads come on top.
MEMORY_BYTES = 256 << 20
#: Seconds for a whole body, and for its place on disk.
BODY_S, STORED_S = 60.0, 30.0
#: Threads that parse.
THREADS = 4
_encoder = msgspec.json.Encoder()
#: The part of a target in absolute form, "http://host:80/v1/streams", before its path.
_ORIGIN = re.compile(r"https?://[^/]*", re.IGNORECASE)
#: Seconds for which an answer of another gateway is awaited beyond that.
_FORWARD_S = 5.0


class GatewayEndpoint:
    """The only endpoint: every path and method comes here, so that every answer has the one form."""

    def __init__(self, gateway: Gateway, verify: Any = True, net: ReceiverNet | None = None) -> None:
        self._gateway = gateway
        self._forwarder = Forwarder(STORED_S + _FORWARD_S, verify)
        self._tails = OutputTails(gateway.place)
        self._results = ResultsEndpoint(self._tails)
        self._net = net or ReceiverNet()
        self._webhooks: WebhookRunner | None = None
        self._pool = ThreadPoolExecutor(THREADS, "flux-gateway")
        self._held = 0

    def start(self) -> None:
        """Begin with the deliveries of webhooks."""
        self._webhooks = WebhookRunner(self._gateway.place, self._tails, self._gateway.address, self._net)

    async def close(self) -> None:
        """End the threads, which have no work any more."""
        if self._webhooks is not None:
            await asyncio.to_thread(self._webhooks.close)
        await asyncio.to_thread(self._tails.close)
        await asyncio.to_thread(self._results.close)
        await self._forwarder.close()
        await asyncio.to_thread(self._pool.shutdown)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        origin = _ORIGIN.match(scope["path"])
        if origin is not None:  # of a client that takes the gateway for a proxy
            path = scope["path"][origin.end() :] or "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        response = await self._response(Request(scope, receive))
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response | EventStream:
        try:
            answered = await self._answered(request)
            return answered if isinstance(answered, Response | EventStream) else _response(answered)
        except Problem as problem:
            return _refusal(problem)
        except ClientDisconnect:
            return Response(status_code=400)  # which is read by no client any more
        except Exception as error:
            failure = failure_of(error, f"{request.method} {request.url.path[:200]}")
            return _refusal(Problem("internal", "the gateway has failed; its log says why", failure=failure))

    async def _answered(self, request: Request) -> HttpAnswer | PassedBack | Response | EventStream:
        loop = asyncio.get_running_loop()
        check_unambiguous(
            (name.decode("latin-1") for name, _ in request.scope["headers"]),
            (name for name, _ in request.query_params.multi_items()),
        )
        head = HttpRequest(request.method, request.scope["path"], request.headers, request.query_params)
        action = action_of(head)
        if not action.right:
            return cast(HttpAnswer, self._gateway.answer(action, b"", None))  # here: it waits for no disk and no thread
        # The token first: a stranger's body is not read.
        allow = partial(self._gateway.allow, action, request.headers.get("authorization"))
        grant = await loop.run_in_executor(self._pool, allow)
        if isinstance(action, Reading):
            return await self._results.response(action, allow)
        async with self._body(request) as body:
            try:
                found = await loop.run_in_executor(self._pool, self._gateway.answer, action, body, grant)
            except Problem as problem:
                if problem.gateway is None or request.headers.get(DIRECT_HEADER) == "true":
                    raise
                return await self._forwarder.pass_on(problem.gateway, request, body, isinstance(action, PushEvents))
        if isinstance(found, HttpAnswer):
            return found
        if isinstance(found, PendingCall):
            return await self._forwarder.call(found.service, found.call)
        try:
            async with asyncio.timeout(STORED_S):
                await asyncio.shield(asyncio.wrap_future(found.ticket))
        except TimeoutError:
            raise Problem(
                "not_stored", f"the disk has not answered for {STORED_S:g} s", headers={"Retry-After": "1"}
            ) from None
        except Exception:
            pass
        return self._gateway.pushed(found)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Give the body of a request. Problem: it is too large, too slow, or there are too many at once."""
        most = self._gateway.limits.body_bytes
        said = request.headers.get("content-length", "0")
        if said.isdigit() and int(said) > most:
            raise Problem("too_large", f"the body has {int(said):,} bytes, more than {most:,}")
        parts: list[bytes] = []
        taken = 0
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    async for part in request.stream():
                        taken, self._held = taken + len(part), self._held + len(part)
                        if taken > most:
                            raise Problem("too_large", f"the body has more than {most:,} bytes")
                        if self._held > MEMORY_BYTES:
                            raise busy(f"{self._held:,} bytes of requests are in memory already")
                        parts.append(part)
            except TimeoutError:
                raise Problem("slow_body", f"the body was not whole after {BODY_S:g} s") from None
            yield b"".join(parts)
        finally:
            self._held -= taken


def _refusal(problem: Problem) -> Response:
    return Response(_encoder.encode(error_answer(problem)), problem.kind.status, problem.headers, "application/json")


def _response(answer: HttpAnswer | PassedBack) -> Response:
    if isinstance(answer, PassedBack):
        return Response(answer.content, answer.status, answer.headers)
    if answer.content is None:
        return Response(status_code=answer.status)
    return Response(_encoder.encode(answer.content), answer.status, media_type="application/json")


def application(gateway: Gateway, verify: Any = True, net: ReceiverNet | None = None) -> Starlette:
    """Return the application that uvicorn runs. The gateway is closed with it. ``verify``: certificates of other gateways to
    trust, as httpx takes them; ``net``: the way to receivers of webhooks."""
    endpoint = GatewayEndpoint(gateway, verify, net)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        endpoint.start()
        yield
        await asyncio.to_thread(gateway.close)
        await endpoint.close()

    made = Starlette(lifespan=lifespan)
    made.router.default = endpoint  # and not a route, which needs a target that begins with /
    return made
