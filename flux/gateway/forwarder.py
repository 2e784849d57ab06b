"""Requests that another process carries out: pushes to logs of other gateways, and calls of the service (design: log-owner,
service-calls)."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import msgspec
from starlette.requests import Request

from flux.gateway.problems import Problem
from flux.gateway.routes import DIRECT_HEADER
from flux.registry.service_calls import ANSWER_S, PATH, ServiceCall
from flux.registry.service_hold import ServiceAddress

#: Headers of a push that concern its owner, and of an answer that concern its client.
_PASSED_ON = (
    "authorization", "content-type", "content-encoding", "idempotency-key", "flux-client", "flux-number",
)  # fmt: skip
_PASSED_BACK = ("content-type", "retry-after")


class PassedBack(NamedTuple):
    """The answer of another gateway, as it came."""

    status: int
    content: bytes
    headers: dict[str, str]


class Forwarder:
    """Connections to other gateways of the location, and to its service. ``verify``: certificates to trust, as httpx takes
    them."""

    def __init__(self, timeout_s: float, verify: Any = True) -> None:
        self._client = httpx.AsyncClient(timeout=timeout_s, verify=verify)

    async def pass_on(self, gateway: str, request: Request, body: bytes, is_push: bool) -> PassedBack:
        """Send a request to another gateway, which does not pass it on again. Problem: it does not answer."""
        # Pass headers on as bytes, as they came: httpx takes texts of ASCII alone.
        sent: list[Any] = [
            (name, request.headers[name].encode("latin-1")) for name in _PASSED_ON if name in request.headers
        ]
        target = gateway + quote(request.scope["path"]) + (f"?{request.url.query}" if request.url.query else "")
        try:
            answer = await self._client.request(
                request.method, target, content=body, headers=[*sent, (DIRECT_HEADER, b"true")],
                timeout=httpx.USE_CLIENT_DEFAULT if is_push else ANSWER_S,
            )  # fmt: skip
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            code, whose = ("not_stored", "the log") if is_push else ("no_service", "the service")
            raise Problem(
                code,
                f"{whose} belongs to gateway {gateway}, which does not answer: {error}",
                headers={"Retry-After": "1"},
            ) from error
        return _passed_back(answer)

    async def call(self, service: ServiceAddress, call: ServiceCall) -> PassedBack:
        """Have the service carry out a call. Problem: it does not answer."""
        headers = {"Authorization": f"Bearer {service.secret}", "Content-Type": "application/json"}
        try:
            answer = await self._client.post(
                service.url + PATH, content=msgspec.json.encode(call), headers=headers, timeout=ANSWER_S
            )
        except httpx.TimeoutException as error:
            raise Problem(
                "not_changed", f"the service has not answered for {ANSWER_S:g} s; it may still carry the request out",
                headers={"Retry-After": "10"},
            ) from error  # fmt: skip
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Problem(
                "no_service", "the service of the location does not answer", headers={"Retry-After": "1"}
            ) from error
        if (
            answer.status_code == httpx.codes.UNAUTHORIZED
        ):  # the secret of an earlier service: another one begins just now
            raise Problem("no_service", "the service of the location begins just now", headers={"Retry-After": "1"})
        return _passed_back(answer)

    async def close(self) -> None:
        await self._client.aclose()


def _passed_back(answer: httpx.Response) -> PassedBack:
    headers = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
    return PassedBack(answer.status_code, answer.content, headers)
