"""Requests that are made to harm a gateway: each is refused, and nothing is used up or left behind."""

from __future__ import annotations

import asyncio
import decimal
import errno
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flux.gateway.app import application
from flux.gateway.bodies import text_bytes
from flux.gateway.openapi import document
from flux.gateway.problems import Problem
from flux.gateway.routes import METHODS, PARAMETERS, check_unambiguous
from flux.json_rows import has_null_row
from flux.vault.directory_store import Directory
from tests.flux.gateways import HeldClient, problem


@pytest.fixture
def client(tmp_path: Path) -> Iterator[HeldClient]:
    made = HeldClient(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("method", "target", "answered"),
    [
        ("GET", "http://x/v1/health", (200, "ok")),
        ("GET", "HTTPS://x:8080/v1/health", (200, "ok")),
        ("DELETE", "http://x/v1/health", (405, "wrong_method")),
        ("CONNECT", "x:443", (404, "no_such_path")),
        ("OPTIONS", "*", (404, "no_such_path")),
    ],
)
def test_a_target_of_any_form_is_answered_in_the_one_form(
    client: HeldClient, method: str, target: str, answered: tuple[int, str]
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": method, "path": target, "raw_path": target.encode(), "query_string": b"", "root_path": "",
        "headers": [], "scheme": "http", "server": ("x", 80), "http_version": "1.1",
    }  # fmt: skip
    asyncio.run(application(client.gateway)(scope, receive, send))
    content = json.loads(sent[1]["body"])
    assert (sent[0]["status"], content.get("status") or content["error"]["code"]) == answered


def arrow(batch: pa.RecordBatch) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue().to_pybytes()  # type: ignore[no-any-return]


ARROW = "application/vnd.apache.arrow.stream"
_NEGATIVE_SCALE = pa.record_batch({"a": pa.array([decimal.Decimal(100)], pa.decimal128(5, -2))})


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"{}", "application/x-ndjson"), (b'{"":1}', "application/x-ndjson"), (arrow(_NEGATIVE_SCALE), ARROW)],
)
def test_first_events_whose_columns_no_ddl_has_leave_the_stream_as_it_was(
    client: HeldClient, body: bytes, kind: str
) -> None:
    client.register(schema="infer")
    assert client.push(body, kind).status_code == 422
    assert client.push(b'{"user": 1}').status_code == 200, "the refused events gave the stream their columns"


def peak_of(client: HeldClient, body: bytes, kind: str) -> tuple[tuple[int, str], int]:
    """Return the problem of a push and the bytes that Arrow has used for it at most beyond those before it."""
    before = pa.total_allocated_bytes()
    answer = client.push(body, kind)
    return problem(answer), pa.default_memory_pool().max_memory() - before


_TEXT = "x" * (1 << 20)
_OFTEN = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array([_TEXT]))
_LISTS = pa.ListArray.from_arrays(pa.array([0, 1000], pa.int32()), _OFTEN)


@pytest.mark.parametrize(
    ("column", "schema"),
    [(_OFTEN, "a STRING"), (_LISTS, "a ARRAY<STRING>")],
    ids=["dictionary", "lists of a dictionary"],
)
def test_one_text_that_is_named_often_takes_its_memory_once(client: HeldClient, column: pa.Array, schema: str) -> None:
    client.register(schema=schema)
    answered, peak = peak_of(client, arrow(pa.record_batch({"a": column})), ARROW)
    assert answered == (413, "too_large")
    assert peak < 200 << 20, "the texts were copied"


def test_views_that_share_a_text_are_counted_as_often_as_they_are() -> None:
    one = pa.array([_TEXT], pa.string_view())
    _, view, text = one.buffers()
    views = pa.Array.from_buffers(pa.string_view(), 1000, [None, pa.py_buffer(view.to_pybytes()[:16] * 1000), text])
    assert text_bytes(views) == 1000 << 20
    assert text_bytes(views[10:20]) == 10 << 20
    assert text_bytes(pa.array([None, "ab", "c"], pa.string_view())) == 3


@pytest.mark.parametrize(
    ("schema", "kind", "body"),
    [
        ("a INT", "text/csv", b"," * 5000 + b"\n"),
        ("infer", "text/csv", b",".join(b"c%d" % each for each in range(2000)) + b"\n" + b"," * 1999 + b"\n"),
        ("infer", "application/x-ndjson", b"\n".join(b'{"c%d": 1}' % each for each in range(3000))),
        ("a INT", "application/x-ndjson", b"11\n" * 500_000),
    ],
)
def test_a_small_body_with_much_to_keep_is_too_large(client: HeldClient, schema: str, kind: str, body: bytes) -> None:
    client.register(schema=schema)
    assert problem(client.push(body, kind)) == (413, "too_large")


_NAMED = json.dumps({f"c{each}": each for each in range(900)}).encode()


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (", ".join(f"c{each} BIGINT" for each in range(900)), b"{}\n" * 200_000),
        (", ".join(f"c{each} BOOLEAN" for each in range(900)), b"{}\n" * 200_000),
        ("infer", _NAMED + b"\n{}" * 100_000),
    ],
)
def test_rows_of_missing_values_are_counted_before_they_are_read(client: HeldClient, schema: str, body: bytes) -> None:
    client.register(schema=schema)
    assert problem(client.push(body)) == (413, "too_large")


def test_braces_in_a_text_are_no_rows(client: HeldClient) -> None:
    client.register(schema=", ".join(f"c{each} STRING" for each in range(900)))
    assert client.push(b'{"c0": "' + b"{" * 100_000 + b'"}').status_code == 200


def test_a_name_as_long_as_a_body_is_answered_in_short(client: HeldClient) -> None:
    client.register(schema="a INT")
    answer = client.push(b'{"' + b"a" * (4 << 20) + b'": 1}')
    assert problem(answer) == (422, "unfit_row")
    assert len(answer.content) < 2000


@pytest.mark.parametrize("form", [b'{"a": {"c%d": 1}}', b'{"a": [[{"c%d": 1}]]}'])
def test_names_inside_each_other_make_no_columns(client: HeldClient, form: bytes) -> None:
    client.register(schema="infer")
    assert problem(client.push(b"\n".join(form % each for each in range(3000)))) == (422, "unfit_row")


def test_arrays_without_bytes_count_as_values() -> None:
    nothing = pa.ListArray.from_arrays(pa.array([0, 1 << 30], pa.int32()), pa.nulls(1 << 30))
    assert text_bytes(nothing) == 8 << 30
    shared = pa.ListViewArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array([2, 2], pa.int32()), pa.array([1, 2]))
    with pytest.raises(Problem, match="send plain columns"):
        text_bytes(shared)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"flux_client": "ann", "flux_number": "1"}, {"flux_client": "ann", "flux_number": str(1 << 62)}),
        ({"idempotency_key": "k"}, {"idempotency_key": "k"}),
    ],
)
def test_a_token_cannot_use_up_the_names_of_another(
    client: HeldClient, one: dict[str, str], other: dict[str, str]
) -> None:
    client.register()
    stranger = client.token_for("push")
    client.gateway._read_at = float("-inf")
    assert not client.push(b'{"user": 2}', token=stranger, **other).json()["repeated"]
    answer = client.push(b'{"user": 1}', **one).json()
    assert (answer["first"], answer["repeated"]) == (1, False)
    assert client.push(b'{"user": 1}', **one).json() == {**answer, "repeated": True}


def test_an_unreadable_document_is_answered_without_its_path(client: HeldClient, tmp_path: Path) -> None:
    client.register()
    client.gateway._read_at = float("-inf")
    (tmp_path / "tokens.json").write_bytes(b"{")
    answer = client.push(b'{"user": 1}')
    assert problem(answer) == (503, "not_stored")
    assert answer.headers["retry-after"] == "1"
    assert str(tmp_path) not in answer.text


def test_a_failure_of_the_disk_is_answered_with_an_id_and_the_log_has_its_path(
    client: HeldClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.register()

    def broken(_: Directory) -> None:
        raise OSError(errno.EIO, "broken", str(tmp_path / "log"))

    monkeypatch.setattr(Directory, "sync", broken)
    with caplog.at_level(logging.WARNING, "flux.gateway"):
        found = [client.push(b'{"user": 1}') for _ in range(2)]
    assert [problem(answer) for answer in found] == [(503, "not_stored")] * 2
    assert not any(str(tmp_path) in answer.text for answer in found)
    logged = [record.getMessage() for record in caplog.records]
    for id_ in {answer.json()["error"]["failure"] for answer in found}:
        (line,) = [line for line in logged if line.startswith(f"failure {id_}: ")]
        assert str(tmp_path) in line


@pytest.mark.parametrize(
    "part", [{"schema": "a DECIMAL(50,3)"}, {"schema": "t TIMESTAMP", "time": "t", "delay": "9" * 5000 + " days"}]
)
def test_numbers_that_no_definition_can_have_are_named(client: HeldClient, part: dict[str, str]) -> None:
    assert problem(client.register(**part)) == (422, "unfit_definition")


@pytest.mark.parametrize("schema", ["user BIGINT, page STRING", "infer"])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"null", "application/x-ndjson"),
        (b" \nnull\n", "application/x-ndjson"),
        (b"\xef\xbb\xbfnull", "application/x-ndjson"),
        (b'{"user": 1}\nnull', "application/x-ndjson"),
        (b'{"user": 1}\n\n \tnull\n{"user": 2}', "application/x-ndjson"),
        (b'{"user": 1}null', "application/x-ndjson"),
        (b"3\nnull", "application/x-ndjson"),
        (b"null", "application/json"),
        (b"[null]", "application/json"),
        (b'[{"user": 1}, null]', "application/json"),
    ],
)
def test_a_row_that_is_null_is_refused_before_arrow_dies_of_it(
    client: HeldClient, schema: str, body: bytes, kind: str
) -> None:
    client.register(schema=schema)
    assert problem(client.push(body, kind)) == (400, "malformed")
    assert client.push(b'{"user": 1}').json()["first"] == 0, "a row of the refused body is there"


def test_the_row_that_is_null_is_named(client: HeldClient) -> None:
    client.register()
    assert client.push(b'{"user": 1}\nnull').json()["error"]["message"] == "row 2: expected an object, got null"


@pytest.mark.parametrize("page", ["}null", "} null", '"}\nnull', "\\\\}null", '\\"} null', "null"])
def test_texts_that_look_like_a_row_of_null_are_texts(client: HeldClient, page: str) -> None:
    client.register()
    body = json.dumps({"page": page}) + "\n" + json.dumps({"page": None})
    assert client.push(body.encode()).json()["rows"] == 2


@pytest.mark.parametrize(
    "text", [b'{"page":"}null' + b"}null" * 500_000 + b'"}', b'"' * 4_000_000 + b"}null", b"} " * 2_000_000 + b"null"]
)
def test_many_signs_of_a_row_of_null_take_one_look(text: bytes) -> None:
    began = time.process_time()
    has_null_row(text)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/v1/queries/early/rows?afer=oldest", "'afer'; there are after, tentative, limit, wait"),
        ("GET", "/v1/queries/early/events?limit=1", "'limit'; there are after"),
        ("DELETE", "/v1/streams/clicks?cascades=true", "'cascades'; there are cascade"),
        ("GET", "/v1/streams?limit=1", "'limit'; there are none"),
        ("GET", "/v1/queries/early/rows?limit=1&limit=2", "'limit': expected one, and got several"),
    ],
)
def test_parameters_that_no_request_has_are_named(client: HeldClient, method: str, path: str, said: str) -> None:
    answer = client.call(method, path)
    assert problem(answer) == (400, "malformed")
    assert said in answer.json()["error"]["message"]


def test_the_document_has_the_parameters_that_are_known() -> None:
    for path, methods in METHODS.items():
        for method, action in methods.items():
            listed = document()["paths"][path][method.lower()].get("parameters", [])
            assert PARAMETERS.get(action, ()) == tuple(each["name"] for each in listed if each["in"] == "query")


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (["idempotency-key", "content-type", "idempotency-key"], "Idempotency-Key: expected one"),
        (["flux-number", "flux-number"], "Flux-Number: expected one"),
        (["content-length", "transfer-encoding"], "the body would have two ends"),
    ],
)
def test_heads_with_two_meanings_are_refused(headers: list[str], said: str) -> None:
    check_unambiguous(["accept", "accept", "content-length", "idempotency-key"], ["after", "limit"])
    with pytest.raises(Problem, match=said) as refused:
        check_unambiguous(headers, [])
    assert refused.value.code == "malformed"
    assert refused.value.headers == {"Connection": "close"}, "what follows may be the body of another program's request"
