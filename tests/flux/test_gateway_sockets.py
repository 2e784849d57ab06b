"""Gateways on real sockets: requests passed on to the owner of a log, TLS, and clients that send halves, slowly, or nonsense."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flux.client import Client
from flux.errors import Unreachable
from flux.eventlog.streams import StreamCatalogue
from flux.gateway import app
from flux.gateway.forwarder import Forwarder
from flux.gateway.log_writer import OwnerLock
from flux.gateway.tokens import TokenRegister
from flux.vault.location import Folder
from tests.flux.gateways import hold_to_document, problem
from tests.flux.live_gateways import LiveGateway, certificate

EVENTS = "/v1/streams/clicks/events"


@pytest.fixture
def token(tmp_path: Path) -> str:
    (tmp_path / "location").mkdir(mode=0o700)
    return TokenRegister(Folder(tmp_path / "location")).make(["admin"], ["*"])


@pytest.fixture
def live(tmp_path: Path, token: str) -> Iterator[LiveGateway]:
    gateway = LiveGateway(tmp_path / "location")
    with Client(gateway.url, token) as client:
        client.register_stream("clicks", "n BIGINT")
    yield gateway
    gateway.close()


def push(url: str, token: str, n: int, key: str, verify: object = True) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/x-ndjson", "Idempotency-Key": key}
    answer = httpx.post(url + EVENTS, content=b'{"n": %d}' % n, headers=headers, verify=verify)  # type: ignore[arg-type]
    hold_to_document("POST", EVENTS, answer)
    return answer


def test_any_gateway_takes_events_of_any_stream(live: LiveGateway, tmp_path: Path, token: str) -> None:
    other = LiveGateway(tmp_path / "location")
    try:
        assert push(live.url, token, 0, "a").json()["first"] == 0
        passed_on = push(other.url, token, 1, "b").json()
        assert (passed_on["first"], passed_on["repeated"]) == (1, False)
        assert push(live.url, token, 1, "b").json() == {**passed_on, "repeated": True}
        refused = push(other.url, token, 2, "b")
        assert problem(refused) == (409, "name_reused")
        live.close()
        assert push(other.url, token, 1, "b").json() == {**passed_on, "repeated": True}, "it has taken the log over"
        assert push(other.url, token, 3, "c").json()["first"] == 2
    finally:
        other.close()


def test_a_request_is_passed_on_once(live: LiveGateway, tmp_path: Path, token: str) -> None:
    """Refuse a request that was passed on before: the address of an owner may be wrong, here that of the gateway
    itself."""
    catalogue = StreamCatalogue(Folder(tmp_path / "location"))
    lock = OwnerLock(catalogue.log_place(catalogue.get("clicks"), 0), "the log", live.url)
    assert problem(push(live.url, token, 0, "a")) == (421, "other_gateway")
    lock.close()
    assert push(live.url, token, 0, "a").status_code == 200


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "ftp://127.0.0.1:1"])
def test_a_client_has_pushes_passed_on_if_it_does_not_reach_the_owner(
    live: LiveGateway, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    other = LiveGateway(tmp_path / "location")
    told: list[str] = []

    async def pass_on_to_live(self: Forwarder, gateway: str, *given: Any) -> Any:
        told.append(gateway)
        return await passes_on(self, live.url, *given)

    passes_on = Forwarder.pass_on
    monkeypatch.setattr(Forwarder, "pass_on", pass_on_to_live)
    try:
        push(live.url, token, 0, "a")
        (owner,) = (tmp_path / "location" / "streams").glob("*/log-0/owner")
        owner.write_text(address)
        with Client(other.url, token) as client:
            assert client.push_events("clicks", [{"n": 1}])["first"] == 1
        assert told == [address]
    finally:
        other.close()


def test_gateways_with_tls_are_trusted_by_their_certificate_alone(tmp_path: Path, token: str) -> None:
    tls = certificate(tmp_path)
    first, second = LiveGateway(tmp_path / "location", tls), LiveGateway(tmp_path / "location", tls)
    try:
        with Client(first.url, token, verify=str(tls[0])) as client:
            client.register_stream("clicks", "n BIGINT")
            assert client.push_events("clicks", [{"n": 0}])["first"] == 0
        trusted = ssl.create_default_context(cafile=str(tls[0]))
        assert push(second.url, token, 1, "b", trusted).json()["first"] == 1
        with (
            Client(first.url, token, timeout=0.1) as client,
            pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            client.streams()
    finally:
        second.close()
        first.close()


def connected(gateway: LiveGateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=10)


def head(token: str, length: int) -> bytes:
    return (
        f"POST {EVENTS} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/x-ndjson\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_half_a_body_is_no_event(live: LiveGateway, token: str) -> None:
    with connected(live) as half:
        half.sendall(head(token, 100) + b'{"n": 1}\n')
    assert push(live.url, token, 2, "a").json()["first"] == 0


def test_a_slow_body_is_given_up(live: LiveGateway, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.2)
    with connected(live) as slow:
        slow.sendall(head(token, 100) + b'{"n": 1}\n')
        answer = b""
        while b"slow_body" not in answer and (part := slow.recv(1000)):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"slow_body"' in answer
    assert push(live.url, token, 2, "a").json()["first"] == 0


def test_nonsense_on_the_port_ends_nothing(live: LiveGateway, token: str) -> None:
    rng = random.Random(7)
    idle = [connected(live) for _ in range(200)]
    for _ in range(50):
        with connected(live) as stranger:
            stranger.sendall(rng.randbytes(rng.randint(1, 500)) + b"\r\n\r\n")
    with connected(live) as upgrading:
        upgrading.sendall(
            b"GET / HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert upgrading.recv(1000).startswith(b"HTTP/1.1 4")
    assert push(live.url, token, 1, "a").json()["first"] == 0
    for each in idle:
        each.close()


def test_a_key_that_is_no_ascii_is_passed_on_as_it_came(live: LiveGateway, tmp_path: Path, token: str) -> None:
    other = LiveGateway(tmp_path / "location")
    try:
        headers = {
            b"Authorization": f"Bearer {token}".encode(),
            b"Content-Type": b"text/csv",
            b"Idempotency-Key": b"\xe9",
        }
        answers = [httpx.post(url + EVENTS, content=b"n\n1\n", headers=headers) for url in (live.url, other.url)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [answer.json()["repeated"] for answer in answers] == [False, True]
    finally:
        other.close()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("Idempotency-Key: a\r\nIdempotency-Key: b\r\nContent-Length: 8\r\n\r\n", "Idempotency-Key: expected one"),
        ("Content-Length: 8\r\nTransfer-Encoding: chunked\r\n\r\n", "two ends"),
    ],
)
def test_a_request_with_two_meanings_is_refused_and_its_connection_closed(
    live: LiveGateway, token: str, more: str, said: str
) -> None:
    at = httpx.URL(live.url)
    head = (
        f"POST {EVENTS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/x-ndjson\r\n"
    )
    with socket.create_connection((at.host, at.port or 80), timeout=10) as connection:
        connection.sendall((head + more).encode() + b'{"n": 1}')
        answered = b""
        while part := connection.recv(1 << 16):
            answered += part
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert said.encode() in answered
    assert answered.count(b"HTTP/1.1") == 1
