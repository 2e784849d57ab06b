"""Webhooks: registered over HTTP, delivered to a receiver that fails in many ways."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from flux.errors import UsageError
from flux.gateway.reads.tails import OutputTails
from flux.gateway.webhooks import deliveries, pusher, runner
from flux.gateway.webhooks.catalogue import WebhookRequest, checked_webhook
from flux.gateway.webhooks.pusher import ReceiverNet
from flux.gateway.webhooks.target import TargetRefused, chosen_address, networks_of, target_of
from flux.vault.location import Folder
from tests.flux.gateways import HeldClient, problem
from tests.flux.results import opened_sink, results, written

SECRET = "sixteen or more characters"


class Receiver:
    """A receiver that answers as it is told, and keeps the deliveries that it has taken."""

    def __init__(self) -> None:
        #: Statuses of the answers to the next attempts; 0: no answer. Later attempts get 200.
        self.answers: list[int] = []
        self.attempts: list[tuple[dict[str, str], bytes]] = []
        self.taken: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.attempts.append(({name.lower(): value for name, value in self.headers.items()}, body))
                status = receiver.answers.pop(0) if receiver.answers else 200
                if not status:
                    time.sleep(1.0)
                    return
                if status == 200:
                    receiver.taken.append(json.loads(body))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", receiver.url + "elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *given: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook?a=b"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def values(self) -> list[int]:
        return [row["value"] for each in self.taken for row in each["rows"]]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldClient]:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    monkeypatch.setattr(deliveries, "PAUSE_MAX_S", 0.02)
    monkeypatch.setattr(deliveries.DeliveryCourse, "_pause_s", 0.01)
    monkeypatch.setattr(runner, "LOOK_S", 0.02)
    monkeypatch.setattr(pusher, "_LOOK_S", 0.05)
    made = HeldClient(tmp_path, net=ReceiverNet(networks_of(["127.0.0.0/8"])))
    yield made
    made.close()


def registered(client: HeldClient, url: str, **more: Any) -> Any:
    made = {
        "name": "alarm",
        "query": "delays",
        "url": url,
        "secret": SECRET,
        "batch": {"rows": 3, "time": "0 seconds"},
        **more,
    }
    return client.call("POST", "/v1/outputs", json.dumps(made))


def until(done: Any, what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, f"{what} has not happened in {limit_s:g} s"
        time.sleep(0.01)


def test_each_result_is_delivered_in_signed_and_numbered_batches(
    client: HeldClient, tmp_path: Path, receiver: Receiver
) -> None:
    sink = opened_sink(tmp_path)
    written(sink, 0, results(*range(7)))
    made = registered(client, receiver.url)
    assert (made.status_code, made.json()["status"], "secret" in made.json()) == (201, "RUNNING", False)
    assert registered(client, receiver.url).status_code == 200
    until(lambda: len(receiver.values()) >= 7, "the delivery of seven results")
    written(sink, 1, results(7))
    until(lambda: len(receiver.values()) >= 8, "the delivery of one more")
    assert receiver.values() == list(range(8))
    assert [each["delivery"] for each in receiver.taken] == list(range(1, len(receiver.taken) + 1))
    headers, body = receiver.attempts[0]
    signed = f"{headers['flux-timestamp']}.".encode() + body
    assert headers["flux-signature"] == f"v1={hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()}"
    assert headers["flux-delivery"] == "1"
    assert abs(time.time() - int(headers["flux-timestamp"])) < 600
    last = receiver.taken[-1]["delivery"]
    until(lambda: _shown(client)["delivery"] == last, "the note of the last confirmation")
    assert _shown(client)["cursor"] == receiver.taken[-1]["cursor"]


def test_a_delivery_goes_out_when_its_rows_take_too_many_bytes(
    client: HeldClient, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher, "BYTES_MAX", 100)
    written(opened_sink(tmp_path), 0, results(*range(20)))
    assert registered(client, receiver.url, batch={"rows": 10_000, "time": "60 seconds"}).status_code == 201
    until(lambda: receiver.values() == list(range(20)), "the delivery of 160 bytes", limit_s=30.0)


def test_the_end_of_a_webhook_leaves_no_error_of_its_thread_behind(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """End a gateway while it opens webhooks that belong to another one, as happens if its port is taken."""
    begun, ended = threading.Event(), threading.Event()

    def opened(*given: Any) -> None:
        begun.set()
        assert ended.wait(60.0), "the gateway has not ended in a minute"
        raise pusher.OwnedElsewhere("webhook 'alarm'", "http://127.0.0.1:1")

    monkeypatch.setattr(pusher.WebhookPusher, "_opened", opened)
    client = HeldClient(tmp_path, net=ReceiverNet(networks_of(["127.0.0.0/8"])))
    written(opened_sink(tmp_path), 0, results(1))
    assert registered(client, receiver.url).status_code == 201
    assert begun.wait(60.0), "no gateway has opened the webhook in a minute"
    threading.Timer(0.1, ended.set).start()
    client.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_delivery_that_fails_is_sent_again_as_it_was(client: HeldClient, tmp_path: Path, receiver: Receiver) -> None:
    sink = opened_sink(tmp_path)
    receiver.answers = [500, 302, 404, 429]
    written(sink, 0, results(1, 2))
    registered(client, receiver.url)
    until(lambda: len(receiver.attempts) >= 2, "two attempts")
    written(sink, 1, results(3))
    until(lambda: receiver.values() == [1, 2, 3], "the delivery of all results")
    assert len({body for _, body in receiver.attempts[:5]}) == 1
    assert "/elsewhere" not in str(receiver.attempts)


def test_a_webhook_is_paused_after_its_time_and_goes_on_where_it_was(
    client: HeldClient, tmp_path: Path, receiver: Receiver
) -> None:
    written(opened_sink(tmp_path), 0, results(1))
    receiver.answers = [503] * 3
    registered(client, receiver.url, retry="0 seconds")
    until(lambda: _shown(client)["status"] == "PAUSED", "the pause")
    assert "no success for 0 seconds: the receiver answered 503" in _shown(client)["error"]
    assert receiver.taken == []
    receiver.answers = []
    assert client.call("POST", "/v1/outputs/alarm/resume").json()["status"] in ("RUNNING", "FAILING")
    until(lambda: receiver.values() == [1], "the delivery")
    assert receiver.taken[0]["delivery"] == 1


def test_a_receiver_that_never_answers_is_left_after_a_while(
    client: HeldClient, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher, "ATTEMPT_S", 0.3)
    written(opened_sink(tmp_path), 0, results(1))
    receiver.answers = [0]
    registered(client, receiver.url)
    until(lambda: receiver.values() == [1], "the delivery at a later attempt")


def test_a_receiver_that_is_gone_pauses_its_webhook_at_once(
    client: HeldClient, tmp_path: Path, receiver: Receiver
) -> None:
    written(opened_sink(tmp_path), 0, results(1))
    receiver.answers = [410]
    registered(client, receiver.url)
    until(lambda: _shown(client)["status"] == "PAUSED", "the pause")
    assert "it wants no more" in _shown(client)["error"]


def test_a_webhook_that_is_removed_or_registered_at_the_newest_row_gets_no_older_ones(
    client: HeldClient, tmp_path: Path, receiver: Receiver
) -> None:
    sink = opened_sink(tmp_path)
    written(sink, 0, results(1))
    registered(client, receiver.url, after="newest")
    written(sink, 1, results(2))
    until(lambda: receiver.values() == [2], "the delivery")
    assert client.call("DELETE", "/v1/outputs/alarm").status_code == 204
    assert client.call("GET", "/v1/outputs").json() == {"outputs": []}
    assert not list(tmp_path.glob("webhooks/*"))


def test_a_webhook_that_is_removed_while_it_opens_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "REST_S", 0.0)
    tmp_path.chmod(0o700)
    place = Folder(tmp_path)
    tails = OutputTails(place)
    held = runner.WebhookRunner(place, tails, "http://127.0.0.1:1", ReceiverNet())
    removed = checked_webhook(WebhookRequest(name="alarm", query="delays", url="https://x/"), "b" * 32, (0,), ())
    try:
        asyncio.run_coroutine_threadsafe(held._pushed(removed), held._loop).result(60.0)
    finally:
        held.close()
        tails.close()
    assert "rests" not in caplog.text
    assert not list(tmp_path.glob("webhooks/*"))


def test_private_receivers_are_refused_unless_they_are_allowed(tmp_path: Path, receiver: Receiver) -> None:
    """Refuse a name at the delivery, and an address, below, when it is registered."""
    client = HeldClient(tmp_path)
    try:
        written(opened_sink(tmp_path), 0, results(1))
        assert registered(client, receiver.url.replace("127.0.0.1", "localhost")).status_code == 201
        until(lambda: _shown(client)["status"] == "FAILING", "the refusal")
        assert "has no public address, and webhooks to others are refused" in _shown(client)["error"]
        assert receiver.attempts == []
    finally:
        client.close()


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "127.0.0.1",
        "[::1]",
        "10.0.0.1:8080",
        "[::ffff:127.0.0.1]",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
    ],
)
def test_a_literal_private_address_is_refused_when_it_is_registered(tmp_path: Path, host: str) -> None:
    opened_sink(tmp_path)
    client, allowed = (
        HeldClient(tmp_path), HeldClient(tmp_path, net=ReceiverNet(networks_of(["0.0.0.0/0", "::/0"]))),
    )  # fmt: skip
    try:
        refused = registered(client, f"http://{host}/hook")
        assert problem(refused) == (422, "unfit_definition")
        assert "has no public address" in refused.json()["error"]["message"]
        assert "--webhooks-to NETWORK allows one" in refused.json()["error"]["message"]
        assert client.call("GET", "/v1/outputs").json() == {"outputs": []}
        assert registered(allowed, f"http://{host}/hook").status_code == 201
    finally:
        client.close()
        allowed.close()


def test_rights_are_those_of_the_query(client: HeldClient, tmp_path: Path, receiver: Receiver) -> None:
    opened_sink(tmp_path)
    reads, other = client.token_for("read", streams=("delays",)), client.token_for("query", streams=("clicks",))
    registered(client, receiver.url)
    assert len(client.call("GET", "/v1/outputs", token=reads).json()["outputs"]) == 1
    assert problem(client.call("DELETE", "/v1/outputs/alarm", token=reads)) == (403, "no_right")
    assert problem(client.call("DELETE", "/v1/outputs/alarm", token=other)) == (403, "no_right")
    assert client.call("GET", "/v1/outputs/alarm", token=reads).json()["url"] == receiver.url


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "ftp://example.org/"}, (422, "unfit_definition")),
        ({"url": "http://a:b@example.org/"}, (422, "unfit_definition")),
        ({"url": "http://[::1"}, (422, "unfit_definition")), ({"url": "https://example.org:99999/"}, (422, "unfit_definition")),
        ({"secret": "short"}, (422, "unfit_definition")), ({"batch": {"rows": 0}}, (422, "unfit_definition")),
        ({"batch": {"time": "1 hour"}}, (422, "unfit_definition")), ({"retry": "1 year"}, (422, "unfit_definition")),
        ({"name": "../x"}, (422, "unfit_definition")), ({"query": "others"}, (404, "no_such_query")),
        ({"after": "x"}, (422, "unfit_definition")), ({"after": f"{'b' * 32}-0"}, (410, "cursor_gone")),
        ({"more": 1}, (422, "unfit_definition")),
    ],
)  # fmt: skip
def test_definitions_that_do_not_fit_are_refused(
    client: HeldClient, tmp_path: Path, change: dict[str, Any], said: tuple[int, str]
) -> None:
    opened_sink(tmp_path)
    assert problem(registered(client, **{"url": "https://example.org/hook", **change})) == said


def test_names_of_outputs_are_taken_once(client: HeldClient, tmp_path: Path) -> None:
    opened_sink(tmp_path)
    made = registered(client, "https://example.org/hook", secret="").json()
    assert len(made["secret"]) > 30
    again = registered(client, "https://example.org/hook", secret="")
    assert (again.status_code, "secret" in again.json()) == (200, False)
    assert problem(registered(client, "https://example.org/other")) == (409, "output_exists")
    assert problem(client.call("DELETE", "/v1/outputs/others")) == (404, "no_such_output")
    assert problem(client.call("POST", "/v1/outputs/others/resume")) == (404, "no_such_output")


# ---- targets


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
     "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "::10.0.0.1"],
)  # fmt: skip
def test_a_private_address_in_any_form_is_refused(address: str) -> None:
    with pytest.raises(TargetRefused, match="no public address"):
        chosen_address("name", [address], [])


def test_the_first_address_that_may_be_reached_is_chosen() -> None:
    assert chosen_address("name", ["10.0.0.1", "8.8.8.8"], []) == ip_address("8.8.8.8")
    assert chosen_address("name", ["10.0.0.1", "8.8.8.8"], [ip_network("10.0.0.0/8")]) == ip_address("10.0.0.1")
    assert chosen_address("name", ["2606:4700::1111"], []) == ip_address("2606:4700::1111")
    with pytest.raises(UsageError, match="--webhooks-to: expected a network"):
        networks_of(["10.0.0.1/8"])


def test_a_target_keeps_its_name_for_the_receiver_and_its_address_for_the_connection() -> None:
    target = target_of("https://hooks.example.org:8443/a/b?c=d")
    assert target.authority == "hooks.example.org:8443"
    assert target.url_of(ip_address("8.8.8.8")) == "https://8.8.8.8:8443/a/b?c=d"
    assert target_of("http://[2606:4700::1111]").authority == "[2606:4700::1111]"
    assert target_of("http://example.org").url_of(ip_address("2606:4700::1111")) == "http://[2606:4700::1111]:80/"


def _shown(client: HeldClient) -> Any:
    return client.call("GET", "/v1/outputs/alarm").json()
