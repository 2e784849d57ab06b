"""The client of gateways against scripted ones: requests, going over to another gateway, and streams of events."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flux.client import Client, GatewayRefused, ResultRows
from flux.client import client as module
from flux.client.event_stream import EventStreamParser, ServerEvent
from flux.errors import FluxError, Unreachable

ONE, OTHER = "http://one", "http://other"


def scripted(answer: Callable[[httpx.Request], httpx.Response], timeout: float = 5.0) -> Client:
    """Return a client of two gateways, both of which answer by a function."""
    made = Client([ONE, OTHER], "flux_token", timeout=timeout)
    made._http = httpx.Client(transport=httpx.MockTransport(answer), headers={"Authorization": "Bearer flux_token"})
    return made


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(module, "_AGAIN_MAX_S", 0.0)


def test_each_call_is_one_request() -> None:
    made: list[tuple[str, str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        made.append((request.method, str(request.url).removeprefix(ONE), json.loads(request.content or b"null")))
        assert request.headers["authorization"] == "Bearer flux_token"
        if request.method == "DELETE":
            return httpx.Response(204)
        return httpx.Response(
            200, json={"queries": [], "outputs": [], "rows": [{"n": 1}], "cursor": "c/1", "missed": []}
        )

    with scripted(answer) as client:
        client.register_query("hot", "SELECT n FROM clicks", partitions=2)
        client.register_query("alarm", operator="stages:Alarm", inputs=["clicks"])
        assert client.queries() == []
        client.query("a/b")
        client.remove_query("hot", cascade=True)
        client.register_output("hook", "hot", "https://there/", secret="s")
        assert client.outputs() == []
        client.resume_output("hook")
        client.remove_output("hook")
        assert client.rows("hot") == ResultRows([{"n": 1}], "c/1", [])
        client.rows("hot", "c/1", wait="10s", limit=5)
    assert made == [
        ("POST", "/v1/queries", {"name": "hot", "sql": "SELECT n FROM clicks", "partitions": 2}),
        ("POST", "/v1/queries", {"name": "alarm", "operator": "stages:Alarm", "inputs": ["clicks"]}),
        ("GET", "/v1/queries", None),
        ("GET", "/v1/queries/a%2Fb", None),
        ("DELETE", "/v1/queries/hot?cascade=true", None),
        ("POST", "/v1/outputs", {"name": "hook", "query": "hot", "url": "https://there/", "secret": "s"}),
        ("GET", "/v1/outputs", None),
        ("POST", "/v1/outputs/hook/resume", None),
        ("DELETE", "/v1/outputs/hook", None),
        ("GET", "/v1/queries/hot/rows?wait=0s", None),
        ("GET", "/v1/queries/hot/rows?after=c%2F1&wait=10s&limit=5", None),
    ]


def events(*rows: tuple[str, list[int]]) -> bytes:
    return b"".join(f"id: {cursor}\ndata: {json.dumps(values)}\n\n".encode() for cursor, values in rows)


def test_a_reader_goes_on_from_its_cursor_at_another_gateway() -> None:
    """Break each connection in the middle of an event: the event is read again, whole, at the other gateway."""
    asked: list[tuple[str, str | None]] = []
    streams = [events(("1", [1])) + events(("2", [2]))[:-3], b": alive\n\n" + events(("2", [2]), ("3", [3]))[:-1], b""]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, request.headers.get("last-event-id")))
        if len(asked) > len(streams):
            return httpx.Response(404, json={"error": {"code": "no_such_query", "message": "gone", "remedy": "None."}})

        def broken(parts: bytes = streams[len(asked) - 1]) -> Iterator[bytes]:
            yield parts
            raise httpx.ReadError("the gateway was killed")

        return httpx.Response(200, content=broken())

    found: list[ResultRows] = []
    with scripted(answer) as client, pytest.raises(GatewayRefused, match="gone") as refused:
        found.extend(client.follow("hot"))
    assert refused.value.code == "no_such_query"
    assert [rows.cursor for rows in found] == ["1", "2"]
    assert [rows.rows for rows in found] == [[1], [2]]
    assert asked == [("one", None), ("other", "1"), ("one", "2"), ("other", "2")]


def test_a_reader_is_told_of_rows_that_are_gone_and_of_the_end() -> None:
    """Go on elsewhere when a gateway stops, and end only when the query is removed."""
    missed = {"partition": 0, "first": 3, "next": 9}
    ends = [{"code": "not_readable", "message": "the gateway stops"}, {"code": "no_such_query", "message": "removed"}]
    asked: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("last-event-id"))
        end = json.dumps({"error": ends[len(asked) - 1]}).encode()
        content = b"event: missed\nid: c9\ndata: " + json.dumps(missed).encode() + b"\n\n" if len(asked) == 1 else b""
        return httpx.Response(200, content=content + b"event: end\ndata: " + end + b"\n\n")

    found: list[ResultRows] = []
    with scripted(answer) as client, pytest.raises(GatewayRefused, match="removed"):
        found.extend(client.follow("hot", "c3"))
    assert found == [ResultRows([], "c9", [missed])]
    assert asked == ["c3", "c9"]


def test_a_reader_without_any_gateway_ends() -> None:
    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with scripted(refused, timeout=0.0) as client, pytest.raises(Unreachable, match="no gateway has answered for 0 s"):
        next(client.follow("hot"))


def test_an_answer_that_promises_nothing_is_asked_for_again_elsewhere() -> None:
    hosts: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        if len(hosts) < 4:
            return httpx.Response(
                503, json={"error": {"code": "no_service", "message": "starting", "remedy": "Again."}}
            )
        return httpx.Response(200, json={"queries": []})

    with scripted(answer) as client:
        assert client.queries() == []
    assert hosts == ["one", "other", "one", "other"]


@pytest.mark.parametrize("kind", ["push", "follow"])
def test_a_client_waits_when_all_gateways_have_been_asked_and_not_before(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give two gateways: the first one was killed, and the other one is busy at first."""
    told: list[str] = []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: told.append("wait"))

    def answer(request: httpx.Request) -> httpx.Response:
        told.append(request.url.host)
        if request.url.host == "one":
            raise httpx.ConnectError("refused")
        if told.count("other") < 2:
            return httpx.Response(503, json={"error": {"code": "not_stored", "message": "busy", "remedy": "Again."}})
        if kind == "push":
            return httpx.Response(200, json={"log": 0, "first": 0, "rows": 1, "arrival": "", "repeated": False})
        return httpx.Response(200, content=b"id: 1\ndata: []\n\n", headers={"Content-Type": "text/event-stream"})

    with scripted(answer) as client:
        if kind == "push":
            client.push_events("clicks", [{"n": 1}])
        else:
            next(client.follow("early"))
    assert told == ["one", "other", "wait", "one", "other"]


# ---- events


def parsed(data: bytes, *cuts: int) -> list[ServerEvent]:
    parser, bounds = EventStreamParser(), [0, *sorted(cuts), len(data)]
    parts = (data[start:end] for start, end in itertools.pairwise(bounds))
    return [event for part in parts for event in parser.feed(part)]


STREAM = (
    b"\xef\xbb\xbf: a comment\nretry: 10\nid: 1\nevent: rows\ndata: [1,\ndata:2]\n\n"
    b"data\n\nid: nul\0\r\nid: 2\r\ndata: \xe2\x80\xa8 is no end of a line\r\n\r\n"
    b"event: rows\n\nunknown: x\ndata:  two spaces\r\r"
    b"id: 3\n\ndata: lost"
)


def test_events_are_read_as_the_standard_says() -> None:
    assert parsed(STREAM) == [
        ServerEvent("rows", "[1,\n2]", "1"),
        ServerEvent("message", "", "1"),
        ServerEvent("message", "\u2028 is no end of a line", "2"),
        ServerEvent("message", " two spaces", "2"),
    ]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(st.lists(st.integers(3, len(STREAM)), max_size=20))
def test_events_are_the_same_however_the_bytes_come(cuts: list[int]) -> None:
    assert parsed(STREAM, *cuts) == parsed(STREAM)


def test_an_event_without_an_end_is_no_memory_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flux.client.event_stream.EVENT_BYTES", 100)
    for data in (b"data: " + b"x" * 100, b"data: xxxxxxxxx\n" * 10):
        with pytest.raises(FluxError, match="an event of the stream has more than 100 bytes"):
            parsed(data)
