"""The API of a gateway, each answer held to the OpenAPI document: streams, pushes, names, tokens, bounds and refusals."""

from __future__ import annotations

import errno
import gzip
import io
import json
import shutil
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import open_log
from flux.eventlog.records import rows_of
from flux.eventlog.streams import StreamCatalogue
from flux.gateway import app, gateway
from flux.gateway.bodies import BodyLimits, unpacked
from flux.gateway.openapi import GOOD, PROBLEMS, document
from flux.gateway.problems import KINDS, Problem
from flux.gateway.routes import METHODS
from flux.gateway.tokens import TokenRegister
from flux.vault.directory_store import Directory
from tests.flux.gateways import HeldClient, problem

TWO = b'{"user": 1, "page": "a"}\n{"user": 2}\n'


@pytest.fixture
def client(tmp_path: Path) -> Iterator[HeldClient]:
    made = HeldClient(tmp_path, BodyLimits(body_bytes=100_000, unpacked_bytes=400_000, rows=1000))
    yield made
    made.close()


def stored(client: HeldClient, stream: str = "clicks") -> list[dict[str, Any]]:
    """Return all events of a stream, as a reader finds them."""
    catalogue = StreamCatalogue(client.place)
    of = catalogue.get(stream)
    found: list[dict[str, Any]] = []
    for log in range(of.partitions):
        reader = LogReader(open_log(catalogue.log_place(of, log)), "the log")
        while records := reader.read():
            for record in records:
                found += rows_of(record, of.columns()).to_pylist()
    return found


def test_events_are_stored_when_they_are_answered(client: HeldClient) -> None:
    assert client.register().status_code == 201
    assert client.register().status_code == 200
    answer = client.push(TWO)
    assert (answer.status_code, answer.json()["first"], answer.json()["rows"]) == (200, 0, 2)
    assert stored(client) == [{"user": 1, "page": "a"}, {"user": 2, "page": None}]
    assert client.push(TWO).json()["first"] == 2
    assert [each["name"] for each in client.call("GET", "/v1/streams").json()["streams"]] == ["clicks"]
    assert client.call("GET", "/v1/streams/clicks").json()["schema"] == "`user` BIGINT, `page` STRING"


def arrow(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "body", "encoding"),
    [
        ("application/x-ndjson", TWO, "identity"),
        ("application/json", b'[{"user": 1, "page": "a"},\n {"user": 2}]', "identity"),
        ("text/csv; charset=utf-8", b"page,user\na,1\n,2\n", "identity"),
        ("application/vnd.apache.arrow.stream", arrow(pa.table({"page": ["a", None], "user": [1, 2]})), "identity"),
        ("application/x-ndjson", gzip.compress(TWO), "gzip"),
        ("application/x-ndjson", pa.Codec("zstd").compress(TWO, asbytes=True), "zstd"),
    ],
)
def test_every_kind_of_body_has_the_same_events(client: HeldClient, kind: str, body: bytes, encoding: str) -> None:
    client.register()
    assert client.push(body, kind, content_encoding=encoding).status_code == 200
    assert stored(client) == [{"user": 1, "page": "a"}, {"user": 2, "page": None}]


def test_the_first_events_tell_the_columns_of_a_stream_without_any(client: HeldClient) -> None:
    client.register(schema="infer")
    body = b'{"user": 1, "at": "2020-01-01T00:00:00Z", "tags": ["a"], "none": null}'
    assert client.push(body).status_code == 200
    assert client.call("GET", "/v1/streams/clicks").json()["schema"] == (
        "`user` BIGINT, `at` TIMESTAMP, `tags` ARRAY<STRING>, `none` STRING"
    )
    assert problem(client.push(b'{"user": "x"}')) == (422, "unfit_row")
    assert len(stored(client)) == 1


@pytest.mark.parametrize(
    ("kind", "body", "row", "column", "said"),
    [
        ("application/x-ndjson", TWO + b'{"user": "x"}\n', 3, "user", "row 3, column 'user': expected int64, got 'x'"),
        ("application/x-ndjson", TWO + b'{"usr": 3}\n', 3, "usr", "no column 'usr', did you mean 'user'"),
        ("application/json", b'[{"user": 1}, {"user": 99999999999999999999}]', 2, "user", "row 2, column 'user'"),
        ("text/csv", b"user,page\n1,a\nzz,b\n", 2, "user", "expected int64, got 'zz'"),
        (
            "application/vnd.apache.arrow.stream",
            arrow(pa.table({"user": ["1", "x"]})),
            2,
            "user",
            "expected int64, got 'x'",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_named_and_nothing_of_the_request_is_kept(
    client: HeldClient, kind: str, body: bytes, row: int, column: str, said: str
) -> None:
    client.register()
    answer = client.push(body, kind)
    assert problem(answer) == (422, "unfit_row")
    error = answer.json()["error"]
    assert (error["row"], error["column"]) == (row, column)
    assert said in error["message"]
    assert stored(client) == []


@pytest.mark.parametrize("type_", ["TIMESTAMP", "TIMESTAMP_NTZ"])
def test_a_time_far_ahead_of_the_clock_is_refused(client: HeldClient, type_: str) -> None:
    """Refuse such a time: it would bring the watermark there, and all other events would be late."""
    client.register(schema=f"user BIGINT, at {type_}", time="at")
    zone = "Z" if type_ == "TIMESTAMP" else ""
    soon = (datetime.now(UTC) + timedelta(hours=23)).strftime(f"%Y-%m-%dT%H:%M:%S{zone}")
    good = json.dumps({"at": soon}).encode() + b"\n" + json.dumps({"at": f"1970-01-01T00:00:00{zone}"}).encode()
    assert client.push(good + b'\n{"user": 3}').status_code == 200
    answer = client.push(good + b"\n" + json.dumps({"at": f"2200-01-01T00:00:00{zone}"}).encode())
    assert problem(answer) == (422, "unfit_row")
    error = answer.json()["error"]
    assert (error["row"], error["column"]) == (3, "at")
    assert "got 2200-01-01 00:00:00" in error["message"]
    assert len(stored(client)) == 3


def test_a_missing_value_is_told_where_one_is_needed(client: HeldClient) -> None:
    client.register(schema="user BIGINT NOT NULL, page STRING")
    answer = client.push(b'{"user": 1}\n{"page": "a"}')
    assert answer.json()["error"]["message"] == "row 2, column 'user': a value is missing"


@pytest.mark.parametrize(
    ("kind", "body", "headers", "wanted"),
    [
        ("text/plain", TWO, {}, (415, "unknown_content")),
        ("application/x-ndjson", TWO, {"content_encoding": "br"}, (415, "unknown_content")),
        ("application/x-ndjson", b"", {}, (400, "malformed")),
        ("application/json", b"[" * 90_000, {}, (400, "malformed")),
        ("application/x-ndjson", b'{"user":' * 10_000, {}, (413, "too_large")),
        ("application/x-ndjson", b'{"user":' + b"[" * 90_000, {}, (400, "malformed")),
        ("application/x-ndjson", b'{"page": "\xff"}', {}, (400, "malformed")),
        ("application/x-ndjson", gzip.compress(TWO)[:-4], {"content_encoding": "gzip"}, (400, "malformed")),
        ("application/x-ndjson", TWO, {"content_encoding": "zstd"}, (400, "malformed")),
        ("application/x-ndjson", gzip.compress(bytes(10 << 20)), {"content_encoding": "gzip"}, (413, "too_large")),
        ("application/x-ndjson", bytes(100_001), {}, (413, "too_large")),
        ("application/x-ndjson", b"{}\n" * 1001, {}, (413, "too_large")),
        ("application/json", b"[" + b"1," * 40_000 + b"1]", {}, (413, "too_large")),
        ("text/csv", b"user\n" + b"1\n" * 1500, {}, (413, "too_large")),
        ("application/vnd.apache.arrow.stream", arrow(pa.table({"user": range(1001)})), {}, (413, "too_large")),
        ("application/vnd.apache.arrow.stream", arrow(pa.table({"user": [1]}), compression="zstd"), {}, (415, "unknown_content")),
        ("application/vnd.apache.arrow.stream", arrow(pa.table({"user": [1]}))[:-30], {}, (400, "malformed")),
        ("application/x-ndjson", TWO, {"idempotency_key": "k", "flux_client": "c", "flux_number": "1"}, (400, "malformed")),
        ("application/x-ndjson", TWO, {"flux_client": "c"}, (400, "malformed")),
        ("application/x-ndjson", TWO, {"flux_client": "c", "flux_number": "-1"}, (400, "malformed")),
        ("application/x-ndjson", TWO, {"idempotency_key": "k" * 201}, (400, "malformed")),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_read_is_refused(
    client: HeldClient, kind: str, body: bytes, headers: dict[str, str], wanted: tuple[int, str]
) -> None:
    client.register()
    assert problem(client.push(body, kind, **headers)) == wanted
    assert stored(client) == []


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_is_unpacked_no_further_than_its_bound(encoding: str) -> None:
    zeros = bytes(50 << 20)
    bomb = gzip.compress(zeros, 1) if encoding == "gzip" else pa.Codec("zstd").compress(zeros, asbytes=True)
    del zeros
    tracemalloc.start()
    try:
        with pytest.raises(Problem, match="more than 1,048,576 bytes when it is unpacked"):
            unpacked(bomb, encoding, BodyLimits(unpacked_bytes=1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


def test_a_body_that_does_not_say_its_length_is_bounded_too(client: HeldClient) -> None:
    client.register()
    assert problem(client.push(bytes(1000) for _ in range(200))) == (413, "too_large")


def test_too_many_bytes_at_once_are_put_off(client: HeldClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MEMORY_BYTES", 10)
    client.register()
    answer = client.register(name="other")
    assert problem(answer) == (429, "busy")
    assert answer.headers["retry-after"] == "1"


def test_a_repeat_is_answered_with_its_place_and_changes_nothing(client: HeldClient) -> None:
    client.register(partitions=3)
    for name in ({"idempotency_key": "k"}, {"flux_client": "ann", "flux_number": "7"}):
        first, again = client.push(TWO, **name).json(), client.push(TWO, **name).json()
        assert again == {**first, "repeated": True}
        assert problem(client.push(b'{"user": 5}', **name)) == (409, "name_reused")
    assert client.push(b'{"user": 9}', flux_client="ann", flux_number="6").json()["repeated"]
    assert len(stored(client)) == 4


def test_a_stream_that_another_gateway_has_removed_is_not_there(client: HeldClient) -> None:
    client.register()
    assert client.call("GET", "/v1/streams/clicks").status_code == 200
    StreamCatalogue(client.place).remove("clicks")
    assert problem(client.call("GET", "/v1/streams/clicks")) == (404, "no_such_stream")


def test_streams_are_refused_and_removed_by_name(client: HeldClient, tmp_path: Path) -> None:
    client.register()
    assert problem(client.register(schema="other INT")) == (409, "stream_exists")
    assert problem(client.register(name="a/b")) == (422, "unfit_definition")
    assert problem(client.register(partitions="x")) == (422, "unfit_definition")
    assert problem(client.register(unknown=1)) == (422, "unfit_definition")
    assert problem(client.call("POST", "/v1/streams", b"{")) == (422, "unfit_definition")
    assert problem(client.push(TWO, stream="cliks")) == (404, "no_such_stream")
    client.push(TWO)
    catalogue = StreamCatalogue(client.place)
    of = catalogue.get("clicks")
    readers = catalogue.readers_place(of)
    readers.write("query-1-0", b"0")
    answer = client.call("DELETE", "/v1/streams/clicks")
    assert problem(answer) == (409, "has_readers")
    assert "query-1" in answer.json()["error"]["message"]
    assert problem(client.call("DELETE", "/v1/streams/clicks?cascade=maybe")) == (400, "malformed")
    assert client.call("DELETE", "/v1/streams/clicks?cascade=true").status_code == 204
    assert problem(client.call("DELETE", "/v1/streams/clicks")) == (404, "no_such_stream")
    assert problem(client.push(TWO)) == (404, "no_such_stream")
    assert not list((tmp_path / "streams" / of.id).glob("**/*journal*"))
    client.register()
    assert client.push(TWO).json()["first"] == 0


def test_a_location_has_room_for_so_many_streams(client: HeldClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flux.eventlog.streams.STREAMS_MAX", 1)
    client.register()
    assert problem(client.register(name="other")) == (507, "no_room")


def test_a_token_has_its_rights_on_its_streams(
    client: HeldClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "BELIEVED_S", 0.0)
    client.register()
    client.register(name="other")
    push, read = client.token_for("push", streams=("clicks",)), client.token_for("read", streams=("clicks",))
    assert client.push(TWO, token=push).status_code == 200
    assert problem(client.push(TWO, stream="other", token=push)) == (403, "no_right")
    assert problem(client.push(TWO, token=read)) == (403, "no_right")
    assert problem(client.call("GET", "/v1/streams/clicks", token=push)) == (403, "no_right")
    assert problem(client.call("POST", "/v1/streams", b"{}", token=push)) == (403, "no_right")
    seen = client.call("GET", "/v1/streams", token=read).json()["streams"]
    assert [each["name"] for each in seen] == ["clicks"]
    assert problem(client.push(TWO, token="")) == (401, "no_token")
    assert problem(client.push(TWO, token=push + "x")) == (401, "unknown_token")
    TokenRegister(client.place).revoke(push.split("_")[1])
    assert problem(client.push(TWO, token=push)) == (401, "unknown_token")
    assert read.split("_", 2)[2] not in (tmp_path / "tokens.json").read_text()
    assert client.call("GET", "/v1/health", token="").status_code == 200


def test_a_token_for_one_stream_registers_no_other(client: HeldClient) -> None:
    token = client.token_for("admin", streams=("mine",))
    made = b'{"name": "%s", "schema": "a INT"}'
    assert client.call("POST", "/v1/streams", made % b"mine", token=token).status_code == 201
    assert problem(client.call("POST", "/v1/streams", made % b"other", token=token)) == (403, "no_right")


def test_a_stranger_is_refused_before_the_body_is_read(client: HeldClient) -> None:
    def body() -> Iterator[bytes]:
        raise AssertionError("it was read")
        yield b""

    assert problem(client.push(body(), token="nobody")) == (401, "unknown_token")


def test_a_path_and_a_method_that_are_not_there_are_told(client: HeldClient) -> None:
    assert problem(client.call("GET", "/")) == (404, "no_such_path")
    answer = client.call("DELETE", "/v1/streams")
    assert problem(answer) == (405, "wrong_method")
    assert answer.headers["allow"] == "GET, POST"
    assert problem(client.call("BREW", "/v1/streams")) == (405, "wrong_method")


def test_a_location_that_is_gone_promises_nothing(client: HeldClient, tmp_path: Path) -> None:
    client.register()
    client.push(TWO)
    shutil.rmtree(tmp_path / "streams")
    assert problem(client.push(TWO)) == (503, "not_stored")
    assert problem(client.push(TWO)) == (503, "not_stored")


def test_a_disk_that_fails_promises_nothing_and_the_same_key_is_safe(
    client: HeldClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.register()
    client.push(TWO)

    def full(_: Directory) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "sync", full)
        answer = client.push(b'{"user": 3}', idempotency_key="k")
        assert problem(answer) == (503, "not_stored")
        assert "the disk of the location is full" in answer.json()["error"]["message"]
    again = client.push(b'{"user": 3}', idempotency_key="k").json()
    assert (again["first"], again["repeated"]) == (2, True), "its bytes were written, though not flushed then"
    assert [each["user"] for each in stored(client)] == [1, 2, 3]


def test_a_log_belongs_to_one_gateway_until_that_ends(client: HeldClient, tmp_path: Path) -> None:
    other = HeldClient(tmp_path, address="http://127.0.0.1:2")
    other.token = client.token  # names belong to the token
    client.register()
    first = client.push(TWO, flux_client="ann", flux_number="1").json()
    answer = other.push(TWO, flux_client="ann", flux_number="1", flux_direct="true")
    assert problem(answer) == (421, "other_gateway")
    assert answer.json()["error"]["gateway"] == "http://127.0.0.1:1"
    answer = other.push(TWO, flux_client="ann", flux_number="1")
    assert problem(answer) == (503, "not_stored")
    assert "belongs to gateway http://127.0.0.1:1, which does not answer" in answer.json()["error"]["message"]
    client.gateway.close()
    assert other.push(TWO, flux_client="ann", flux_number="1").json() == {**first, "repeated": True}
    assert other.push(TWO).json()["first"] == 2
    other.close()


def test_the_document_has_every_path_and_every_reason(client: HeldClient) -> None:
    made = client.call("GET", "/v1/openapi.json").json()
    assert made == document()
    assert {
        (path, method.upper()) for path, each in made["paths"].items() for method in each if method != "parameters"
    } == {(path, method) for path, methods in METHODS.items() for method in methods}
    told = {code for path in made["paths"].values() for operation in path.values() if isinstance(operation, dict)
            for response in operation["responses"].values() for code in response["description"].split(", ")}  # fmt: skip
    assert set(KINDS) - told == {"no_such_path"}
    assert set(GOOD) == set(PROBLEMS) == {action for methods in METHODS.values() for action in methods.values()}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["application/x-ndjson", "application/json", "text/csv", "application/vnd.apache.arrow.stream"]),
    st.sampled_from(["identity", "gzip", "zstd"]),
    st.one_of(st.binary(max_size=300), st.tuples(st.integers(0, 600), st.integers(1, 255))),
)
def test_nothing_that_a_body_says_fails_the_gateway(
    client: HeldClient, kind: str, encoding: str, body: bytes | tuple[int, int]
) -> None:
    client.register()
    if not isinstance(body, bytes):  # a good body with one byte changed
        good = bytearray(TWO if "json" in kind else arrow(pa.table({"user": [1, 2], "page": ["a", None]})))
        good[body[0] % len(good)] ^= body[1]
        body = bytes(good)
        if encoding != "identity":
            body = gzip.compress(body) if encoding == "gzip" else pa.Codec("zstd").compress(body, asbytes=True)
    assert client.push(body, kind, content_encoding=encoding).status_code in (200, 400, 413, 415, 422)
