"""A schema registry over HTTP on loopback: its answers, and the values that depend on them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.ports import free_ports
from flux.connectors.kafka.client.cluster import Passing
from flux.connectors.kafka.errors import BadRecord, NotPermitted
from flux.connectors.kafka.formats.schema_registry import Registry
from tests.kafka.broker import Broker
from tests.kafka.test_avro import CLICK, framed, written
from tests.kafka.topics import reader, reading, received, rows, send, until

OLDER = {"type": "record", "name": "Click", "namespace": "shop", "fields": [{"name": "user", "type": "int"}]}
GOOD = json.dumps({"schema": json.dumps(CLICK)}).encode()


@contextmanager
def registry(answers: dict[int, tuple[int, bytes]]) -> Iterator[tuple[str, Counter[int]]]:
    """Serve schemas. ``answers``: status and body by id. Yield the URL, and a count of the requests for each id."""
    asked: Counter[int] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            head, _, number = self.path.rpartition("/")
            asked[int(number)] += 1
            status, body = answers.get(int(number), (404, b'{"error_code": 40403}'))
            self.send_response(status if head == "/registry/schemas/ids" else 500)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/registry/", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (404, b"", "has no schema 5"),
        (200, json.dumps({"schema": "message A {}", "schemaType": "PROTOBUF"}).encode(), "'PROTOBUF', not AVRO"),
        (200, json.dumps({"schema": json.dumps(CLICK), "references": [{"name": "a"}]}).encode(), "refers to others"),
        (200, json.dumps({"schema": "{"}).encode(), "cannot be used"),
        (200, json.dumps({"schema": "[" * 100_000}).encode(), "cannot be used"),
    ],
)
def test_an_id_without_a_schema_is_asked_for_once_a_minute(status: int, body: bytes, why: str) -> None:
    with registry({5: (status, body)}) as (url, asked):
        schemas = Registry(url)
        for _ in range(3):
            assert why in schemas.writer(5)
    assert asked == {5: 1}


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b""),
        (200, b"<html>"),
        (200, b"{}"),
        (200, b'{"schema": 5}'),
        (200, b"[" * 100_000),
        (200, b" " * (5 << 20)),
    ],
)
def test_a_registry_that_is_not_well_is_asked_again(status: int, body: bytes) -> None:
    answers = {5: (status, body)}
    with registry(answers) as (url, _):
        schemas = Registry(url)
        with pytest.raises(Passing, match=r"/registry/schemas/ids/5"):
            schemas.writer(5)
        answers[5] = 200, GOOD
        assert schemas.writer(5)["name"] == "shop.Click"


def test_a_registry_that_is_away_may_come_back_and_one_that_refuses_does_not() -> None:
    (port,) = free_ports(1)
    with pytest.raises(Passing, match="refused"):
        Registry(f"http://127.0.0.1:{port}").writer(5)
    with (
        registry({5: (401, b"")}) as (url, _),
        pytest.raises(NotPermitted, match=r"does not permit reading schema 5.*a function that logs in"),
    ):
        Registry(url).writer(5)


def test_what_is_remembered_is_bounded() -> None:
    from flux.connectors.kafka.formats.schema_registry import _KEPT_MAX

    schemas = Registry(dict.fromkeys(range(0, 3 * _KEPT_MAX, 2), CLICK).__getitem__)
    for number in range(3 * _KEPT_MAX):
        schemas.writer(number)
    assert len(schemas._known) <= _KEPT_MAX
    assert len(schemas._unknown) <= _KEPT_MAX


def test_a_topic_with_the_framing_of_a_registry_is_read(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic, bad = new_topic(), new_topic()
    answers = {3: (503, b"starting"), 4: (200, json.dumps({"schema": json.dumps(OLDER)}).encode())}
    values = [
        *framed(3, written(CLICK, {"user": 1, "page": "a"})), *framed(9, [b"?"]), *framed(4, written(OLDER, {"user": 2})),
    ]  # fmt: skip
    send(broker.address, topic, [*values, b"no avro", None])
    with registry(answers) as (url, asked):
        options = {"format": "avro", "schema": CLICK, "schemas": url, "include": ["offset"]}
        read = reader(topic, broker.address, bad_records=f"dead_letter:{bad}", **options)
        with reading(read) as batches:
            while asked[3] < 2:
                assert next(batches) is None, "the registry does not answer yet"
            answers[3] = 200, GOOD
            got = until(batches, 3)
        with (
            reading(reader(topic, broker.address, **options)) as batches,
            pytest.raises(BadRecord, match=r"offset 1 is no avro: the registry at .* has no schema 9"),
        ):
            until(batches, 3)
    assert rows(got).to_pydict() == {"user": [1, 2, None], "page": ["a", None, None], "offset": [0, 2, 4]}
    letters = received(broker.address, bad, 2)
    assert [each.value() for each in letters] == [values[1], b"no avro"]
    assert b"has no schema 9" in dict(letters[0].headers())["flux-error"]
