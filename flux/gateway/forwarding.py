"""Pushes to logs of other gateways, passed on to these (design: log-owner)."""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx

from flux.gateway.problems import Problem
from flux.gateway.routes import DIRECT_HEADER

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
    """Connections to other gateways of the location. ``verify``: certificates to trust, as httpx takes them."""

    def __init__(self, timeout_s: float, verify: Any = True) -> None:
        self._client = httpx.AsyncClient(timeout=timeout_s, verify=verify)

    async def push(self, gateway: str, path: str, headers: Any, body: bytes) -> PassedBack:
        """Push to another gateway, which does not pass it on again. Problem: it does not answer."""
        # As the bytes that came: httpx takes texts of ASCII alone.
        sent = [(name, headers[name].encode("latin-1")) for name in _PASSED_ON if name in headers]
        try:
            answer = await self._client.post(gateway + path, content=body, headers=[*sent, (DIRECT_HEADER, b"true")])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Problem(
                "not_stored", f"the log belongs to gateway {gateway}, which does not answer: {error}",
                headers={"Retry-After": "1"},
            ) from error  # fmt: skip
        back = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
        return PassedBack(answer.status_code, answer.content, back)

    async def close(self) -> None:
        await self._client.aclose()
