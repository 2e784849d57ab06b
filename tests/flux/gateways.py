"""A gateway in this process. Each answer is held to the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.testclient import TestClient

from flux.gateway import answers
from flux.gateway.app import application
from flux.gateway.bodies import BodyLimits
from flux.gateway.gateway import Gateway
from flux.gateway.openapi import document
from flux.gateway.problems import KINDS
from flux.gateway.routes import METHODS
from flux.gateway.tokens import Right, TokenRegister
from flux.gateway.webhooks.actions import WebhookActions
from flux.gateway.webhooks.pusher import ReceiverNet
from flux.vault.location import Folder
from tests.flux.json_schemas import mismatches

SCHEMAS = document()["components"]["schemas"]


def template_of(path: str) -> str | None:
    """Return the path of the document that a path belongs to."""
    parts = path.partition("?")[0].split("/")
    for template in METHODS:
        wanted = template.split("/")
        if len(wanted) == len(parts) and all(a == b or a[:1] == "{" for a, b in zip(wanted, parts, strict=True)):
            return template
    return None


def hold_to_document(method: str, path: str, answer: httpx.Response) -> None:
    """Assert that the document has this answer, and that the content has the form that it says."""
    template = template_of(path)
    operation = document()["paths"].get(template, {}).get(method.lower()) if template else None
    if operation is None:
        assert answer.status_code in (404, 405), answer.text
        msgspec.json.decode(answer.content, type=answers.ErrorAnswer, strict=True)
        return
    responses = operation["responses"]
    assert str(answer.status_code) in responses, f"{method} {template} has no {answer.status_code}: {answer.text}"
    said = responses[str(answer.status_code)].get("content")
    if said is None:
        assert not answer.content or template == "/v1/openapi.json"
        return
    kind = answer.headers["content-type"]
    assert kind in said, f"{method} {template} has no answer of {kind}"
    if kind != "application/json":
        return
    found = answer.json()
    wrong = list(mismatches(found, said["application/json"]["schema"], SCHEMAS))
    assert not wrong, f"{method} {template}, {answer.status_code}: {'; '.join(wrong)}"
    if answer.status_code >= 400:
        assert KINDS[found["error"]["code"]].status == answer.status_code
        assert found["error"]["code"] in responses[str(answer.status_code)]["description"].split(", ")


class HeldClient:
    """A client of a gateway in this process."""

    def __init__(
        self, folder: Path, limits: BodyLimits | None = None, address: str = "http://127.0.0.1:1",
        net: ReceiverNet | None = None, host: str | None = None,
    ) -> None:  # fmt: skip
        folder.chmod(0o700)
        self.place = Folder(folder)
        webhooks = WebhookActions(self.place, net.allowed if net is not None else ())
        self.gateway = Gateway(self.place, address, limits, document, host, webhooks)
        self.token = self.token_for("admin")
        self._http = TestClient(application(self.gateway, net=net), raise_server_exceptions=False)
        self._http.__enter__()

    def token_for(self, *rights: Right, streams: tuple[str, ...] = ("*",)) -> str:
        return TokenRegister(self.place).make(list(rights), list(streams))

    def call(
        self,
        method: str,
        path: str,
        content: Any = b"",
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> httpx.Response:
        sent = {"Authorization": f"Bearer {self.token if token is None else token}", **(headers or {})}
        answer = self._http.request(method, path, content=content, headers=sent)
        hold_to_document(method, path, answer)
        return answer

    def register(self, **definition: Any) -> httpx.Response:
        made = {"name": "clicks", "schema": "user BIGINT, page STRING", **definition}
        return self.call("POST", "/v1/streams", msgspec.json.encode(made))

    def push(self, content: Any, kind: str = "application/x-ndjson", stream: str = "clicks", token: str | None = None,
             **headers: str) -> httpx.Response:  # fmt: skip
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.call("POST", f"/v1/streams/{stream}/events", content, {"Content-Type": kind, **named}, token)

    def close(self) -> None:
        self._http.__exit__(None, None, None)


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]
