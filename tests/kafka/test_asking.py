"""Schema registries that stand still, drip, lie, or lead elsewhere, and the client that asks them. Sockets on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flux.connectors.kafka.client.cluster import Passing
from flux.connectors.kafka.errors import KafkaError, NotPermitted
from flux.connectors.kafka.formats import schema_registry as asking
from flux.connectors.kafka.formats.avro_encode import AvroValues
from flux.connectors.kafka.formats.base import format_of
from flux.connectors.kafka.formats.schema_registry import Refused, Registry, RegistryUnavailable, Subject, ask
from flux.errors import UsageError
from tests.kafka.test_avro import CLICK, framed, written

LIMIT_S = 0.3
#: Much more than the limit, and much less than an answer that drips would take.
PATIENCE_S = 20.0
Talk = Callable[[socket.socket], None]
COLUMNS = pa.schema([("user", pa.int64()), ("page", pa.string())])


@contextmanager
def serving(talk: Talk) -> Iterator[str]:
    """Serve each connection by ``talk``; yield the URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()
    threads: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(PATIENCE_S)
            talk(connection)

    def accept() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=one, args=(connection,), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(PATIENCE_S)
        for thread in threads:
            thread.join(PATIENCE_S)


def request_of(connection: socket.socket) -> tuple[str, bytes]:
    """Read a request: its first line, and its body."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(4096)
    head, _, body = got.partition(b"\r\n\r\n")
    size = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while len(body) < size:
        body += connection.recv(4096)
    return head.split(b"\r\n")[0].decode(), body


def answering(status: int, body: bytes, *headers: str, seen: list[tuple[str, bytes]] | None = None) -> Talk:
    def talk(connection: socket.socket) -> None:
        asked = request_of(connection)
        if seen is not None:
            seen.append(asked)
        lines = [f"HTTP/1.1 {status} Whatever", *headers, f"Content-Length: {len(body)}", "", ""]
        connection.sendall("\r\n".join(lines).encode() + body)

    return talk


def dripping(first: bytes) -> Talk:
    """Make a server that sends one byte after the other, each sooner than any time-out of a socket."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(b"x")
            time.sleep(LIMIT_S / 10)

    return talk


def saying(what: bytes) -> Talk:
    def talk(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(what)

    return talk


def silent(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.recv(1)  # until the other side has gone


@pytest.mark.parametrize(
    "talk",
    [silent, dripping(b""), dripping(b"HTTP/1.1 200 OK\r\nA: "), dripping(b"HTTP/1.1 200 OK\r\n\r\n"),
     dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"),
     dripping(b"HTTP/1.1 404 No\r\nContent-Length: 99999\r\n\r\n")],
)  # fmt: skip
def test_who_stands_still_or_drips_is_left_in_time(talk: Talk) -> None:
    with serving(talk) as url:
        began = time.monotonic()
        with pytest.raises(RegistryUnavailable, match=r"no answer within 0.3 s|timed out"):
            ask(url, limit_s=LIMIT_S)
        assert time.monotonic() - began < PATIENCE_S


def test_who_drips_in_the_handshake_of_tls_is_left_in_time() -> None:
    with serving(dripping(b"\x16\x03\x03\x40\x00")) as url:
        began = time.monotonic()
        with pytest.raises(RegistryUnavailable, match="no answer within"):
            ask(url.replace("http:", "https:"), limit_s=LIMIT_S)
        assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize(
    "said",
    [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000,
     b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000, b"HTTP/1.1 500 No\r\n\r\n", b"HTTP/1.1 204 None\r\nContent-Length: x\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_answer_may_be_one_later(said: bytes) -> None:
    """Here are also errors of other classes than those of connections."""
    with serving(saying(said)) as url, pytest.raises(Passing, match=f"the registry at {url}"):
        Registry(url).writer(5)


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://127.0.0.1/schema", "gopher://x", "//[", "data:,x"])
def test_redirects_lead_nowhere_else(to: str) -> None:
    with serving(answering(302, b"", f"Location: {to}")) as url, pytest.raises(RegistryUnavailable):
        ask(url, limit_s=LIMIT_S)


def test_redirects_within_http_are_followed_but_not_for_ever() -> None:
    with serving(answering(200, b"{}")) as there, serving(answering(301, b"", f"Location: {there}/x")) as url:
        assert ask(url) == b"{}"
    with serving(answering(302, b"", "Location: /again")) as url, pytest.raises(RegistryUnavailable, match="redirect"):
        ask(url)


def test_a_large_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "BYTES_MAX", 1000)
    with serving(answering(200, b" " * 1001)) as url, pytest.raises(RegistryUnavailable, match="more than 1,000 bytes"):
        ask(url)
    with serving(answering(200, b" " * 1000)) as url:
        assert len(ask(url)) == 1000


def test_nothing_is_left_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with serving(answering(404, b"no")) as url:
        for _ in range(5):
            with pytest.raises(Refused):
                ask(url)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_an_id_of_html_or_nothing_is_asked_for_again_and_others_are_bad_values() -> None:
    """Beside values with a schema that is there."""
    value = written(CLICK, {"user": 1, "page": "a"})

    def talk(connection: socket.socket) -> None:
        line, _ = request_of(connection)
        number = int(line.split()[1].rpartition("/")[2])
        body = json.dumps({"schema": json.dumps(CLICK)}).encode() if number == 7 else b'{"error_code":40403}'
        connection.sendall(
            b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (200 if number == 7 else 404, len(body)) + body
        )

    with serving(talk) as url:
        made = format_of("avro", CLICK, url)
        assert made is not None
        numbers = (7, 2**32 - 1, 7, 0)
        parsed = made.parse(pa.array([framed(number, value)[0] for number in numbers], pa.binary()), find_all=True)
    assert parsed.rows.num_rows == 2
    assert [each.row for each in parsed.bad] == [1, 3]
    assert all("has no schema" in each.why for each in parsed.bad)
    with serving(answering(200, b"<html>")) as url:
        made = format_of("avro", CLICK, url)
        assert made is not None
        with pytest.raises(Passing, match="is no schema"):
            made.parse(pa.array(framed(7, value), pa.binary()), find_all=True)


# ---- the subject of a writer


def settled(url: str, schema: Any = CLICK, register: bool = False, limit_s: float = PATIENCE_S) -> AvroValues:
    return AvroValues("clicks/ü", schema, url, register).settled(COLUMNS, limit_s)


@pytest.mark.parametrize(("register", "path"), [(False, ""), (True, "/versions")])
def test_a_schema_is_looked_up_or_registered_as_is_said(register: bool, path: str) -> None:
    seen: list[tuple[str, bytes]] = []
    with serving(answering(200, b'{"id": 9, "version": 1}', seen=seen)) as url:
        assert settled(url + "/base/", register=register).id == 9
    ((line, body),) = seen
    assert line == f"POST /base/subjects/clicks%2F%C3%BC-value{path} HTTP/1.1"
    assert json.loads(json.loads(body)["schema"]) == CLICK


def test_without_a_schema_the_newest_of_the_subject_counts_or_that_of_the_columns_is_registered() -> None:
    seen: list[tuple[str, bytes]] = []
    newest = {"subject": "clicks-value", "id": 5, "version": 3, "schema": json.dumps(CLICK)}
    with serving(answering(200, json.dumps(newest).encode(), seen=seen)) as url:
        made = settled(url, None)
        assert settled(url, None, register=True).id == 5
    assert (made.id, json.loads(made.schema)) == (5, CLICK)
    assert [line.split()[:2] for line, _ in seen] == [
        ["GET", "/subjects/clicks%2F%C3%BC-value/versions/latest"], ["POST", "/subjects/clicks%2F%C3%BC-value/versions"]
    ]  # fmt: skip
    assert json.loads(json.loads(seen[1][1])["schema"])["name"] == "Value"


@pytest.mark.parametrize(
    ("status", "body", "options", "error", "why"),
    [
        (404, b'{"error_code": 40403, "message": "Schema not found"}', {}, UsageError, "Schema not found.*register_schemas=True"),
        (404, b"<html>", {"schema": None}, UsageError, "subject 'clicks/ü-value' .* is not there"),
        (409, b'{"message": "incompatible"}', {"register": True}, UsageError, "incompatible"),
        (422, b'{"message": 5}', {"register": True}, UsageError, "refuses the schema"),
        (401, b"", {}, NotPermitted, "a function that logs in"),
        (500, b"", {}, KafkaError, "could not be asked within 0.3 s: 500"),
        (200, b"<html>", {}, KafkaError, "no object of JSON"),
        (200, b"[" * 100_000, {}, KafkaError, "no object of JSON"),
        (200, b"{}", {}, UsageError, "gave None for the id"),
        (200, b'{"id": true}', {}, UsageError, "gave True for the id"),
        (200, b'{"id": 1}', {"schema": None}, KafkaError, "has no schema"),
        (200, b'{"id": 1, "schema": "{"}', {"schema": None}, UsageError, "schema 1 of .* cannot be used"),
        (200, b'{"id": 1, "schema": "x", "schemaType": "JSON"}', {"schema": None}, UsageError, "'JSON', not AVRO"),
        (200, b'{"id": 1, "schema": "x", "references": [{}]}', {"schema": None}, UsageError, "refers to others"),
        (200, json.dumps({"id": 1, "schema": json.dumps({**CLICK, "fields": CLICK["fields"][:1]})}).encode(), {"schema": None},
         UsageError, "no field for column 'page'"),
    ],
)  # fmt: skip
def test_what_a_registry_refuses_or_gets_wrong_is_said_before_the_query_starts(
    status: int, body: bytes, options: dict[str, Any], error: type[Exception], why: str
) -> None:
    with serving(answering(status, body)) as url, pytest.raises(error, match=why):
        settled(url, **{"limit_s": LIMIT_S, **options})


def test_a_registry_that_starts_slowly_is_asked_again() -> None:
    answers: Sequence[Talk] = (answering(503, b""), saying(b""), answering(200, b'{"id": 3}'))
    left = list(answers)

    def talk(connection: socket.socket) -> None:
        left.pop(0)(connection)

    with serving(talk) as url:
        assert Subject("s", url).id_of("{}", register=False, limit_s=PATIENCE_S) == 3
    assert left == []


def test_a_function_that_knows_no_schema_is_named() -> None:
    def schemas(subject: str, schema: str) -> int:
        raise KeyError(subject)

    with pytest.raises(UsageError, match="knows no such schema: KeyError 'clicks-value'"):
        AvroValues("clicks", CLICK, schemas).settled(COLUMNS, 1.0)
