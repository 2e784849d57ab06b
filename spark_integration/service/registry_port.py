"""The port on which gateways reach the service of their location (design: service-calls).

It listens on loopback alone, and takes only calls with the secret of the location.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flux.errors import QueryFailed
from flux.gateway.answers import error_answer
from flux.gateway.problems import Problem, busy
from flux.registry.service_calls import BODY_MAX, PATH, ServiceCall
from spark_integration.service.registrar import ServiceAnswer

log = logging.getLogger("flux")

#: Calls that may wait for those in front of them: each change of the plan takes some tenths of a second.
WAITING_MAX = 64
#: Seconds until the port is open, and until it is closed.
OPENS_S, CLOSES_S = 30.0, 5
#: Bytes of a call: a definition, in which each character may be escaped, and the rights of a token.
_CALL_MAX = 8 * BODY_MAX
_calls = msgspec.json.Decoder(ServiceCall)
_encoder = msgspec.json.Encoder()


class RegistryPort:
    """A port of loopback. Calls are carried out one after the other, in the thread of ``alone``."""

    def __init__(self, answer: Callable[[ServiceCall], ServiceAnswer], alone: ThreadPoolExecutor) -> None:
        self._answer, self._alone = answer, alone
        self._secret = ""
        self._waiting = 0
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        app = Starlette(routes=[Route(PATH, self._called, methods=["POST"])])
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=CLOSES_S, server_header=False)
        )
        self._thread = threading.Thread(target=self._run, name="flux-registry-port", daemon=True)

    def open(self, secret: str) -> None:
        """Take calls with this secret. QueryFailed: the port does not open."""
        self._secret = secret
        self._thread.start()
        end = time.monotonic() + OPENS_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise QueryFailed(f"the port {self.url} of the service has not opened within {OPENS_S:g} s")
            time.sleep(0.01)

    def close(self) -> None:
        """End the calls that wait, and close the port."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(2 * CLOSES_S)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    async def _called(self, request: Request) -> Response:
        try:
            return await self._response(request)
        except Problem as problem:
            return Response(
                _encoder.encode(error_answer(problem)), problem.kind.status, problem.headers, "application/json"
            )
        except Exception:
            log.exception("a call of a gateway failed")
            failed = Problem("internal", "the service has failed; its log says why")
            return Response(_encoder.encode(error_answer(failed)), 500, media_type="application/json")

    async def _response(self, request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._secret}".encode()):
            raise Problem(
                "unknown_token", "the secret is not that of this service: its gateways read it at the location"
            )
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _CALL_MAX:
                raise Problem("too_large", f"the definition has more than {BODY_MAX:,} bytes")
        try:
            call = _calls.decode(body)
        except msgspec.MsgspecError as error:
            raise Problem(
                "malformed", f"the call of the gateway cannot be read: {error}. Run one release of both"
            ) from error
        if self._waiting >= WAITING_MAX:
            raise busy(f"{self._waiting} registrations wait already", 5)
        self._waiting += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._alone, self._answer, call)
        finally:
            self._waiting -= 1
        if found.content is None:
            return Response(status_code=found.status)
        return Response(_encoder.encode(found.content), found.status, media_type="application/json")
