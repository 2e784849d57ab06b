"""Commands of a client of ``flux serve``, against a scripted gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_client import events, scripted
from typer.testing import CliRunner

from controller.operate.cli import app, gateways, queries

HOT = {
    "name": "hot", "status": "FAILED", "error": "a stage has failed", "reads": ["clicks"], "schema": "`n` BIGINT",
    "sql": "SELECT n FROM clicks", "operator": "",
}  # fmt: skip
HOOK = {
    "name": "hook", "query": "hot", "url": "https://there/", "status": "PAUSED", "error": "500 for a day", "delivery": 7,
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """Collect method, path and content of all requests that commands make."""
    made: list[tuple[str, str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        made.append((request.method, request.url.path, json.loads(request.content or b"null")))
        if request.url.path.endswith("/events"):
            return httpx.Response(200, content=events(("1", [1, 2]), ("2", [3, 4])))
        if request.url.path.endswith("/lost"):
            error = {
                "code": "no_such_query",
                "message": "there is no query 'lost'",
                "remedy": "GET /v1/queries lists them.",
            }
            return httpx.Response(404, json={"error": error})
        return httpx.Response(200, json={"queries": [HOT], "outputs": [HOOK], "secret": "s3"})

    monkeypatch.setattr(queries, "client_of", lambda *_: scripted(answer))
    return made


Asked = list[tuple[str, str, Any]]
Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    return lambda *words, **given: CliRunner().invoke(app, list(words), **given)


def test_queries_are_listed_registered_and_removed(asked: Asked, run: Run, tmp_path: Path) -> None:
    listed = run("queries").stdout
    assert "FAILED: a stage has failed" in listed
    assert "SELECT n FROM clicks" in listed
    assert json.loads(run("queries", "--json").stdout) == [HOT]
    file = tmp_path / "hot.sql"
    file.write_text("SELECT n FROM clicks")
    asked.clear()
    run("queries", "--register", "hot", "--sql", "SELECT n FROM clicks", "--partitions", "2")
    run("queries", "--register", "hot", "--sql", str(file))
    run("queries", "--register", "hot", "--sql", "-", input="SELECT n FROM clicks")
    run("queries", "--remove", "hot", "--cascade")
    changes = [each for each in asked if each[0] != "GET"]
    one = {"name": "hot", "sql": "SELECT n FROM clicks", "partitions": 1}
    assert changes == [
        ("POST", "/v1/queries", {**one, "partitions": 2}),
        ("POST", "/v1/queries", one),
        ("POST", "/v1/queries", one),
        ("DELETE", "/v1/queries/hot", None),
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("queries", "--register", "hot"), 2, "its text is missing"),
        (("queries", "--sql", "SELECT 1"), 2, "--sql belongs to --register NAME"),
        (("queries", "--register", "hot", "--sql", "/no/such/file"), 2, "expected a SELECT or a file with one"),
        (("queries", "--remove", "lost"), 1, "there is no query 'lost'. GET /v1/queries lists them."),
        (("outputs", "--register", "hook", "--query", "hot"), 2, "one of them is missing"),
    ],
)
def test_commands_that_do_not_fit_are_refused(
    asked: Asked, run: Run, words: tuple[str, ...], code: int, said: str
) -> None:
    done = run(*words)
    assert (done.exit_code, said in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("lines", "said"), [("{}\n", "1 event in 1 request on disk"), ("{}\n{}\n", "2 events in 1 request on disk")]
)
def test_a_push_says_how_much_is_on_disk(run: Run, monkeypatch: pytest.MonkeyPatch, lines: str, said: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"rows": request.content.count(b"\n")})

    monkeypatch.setattr(gateways, "client_of", lambda *_: scripted(answer))
    assert run("push", "clicks", input=lines).stdout.strip() == said


def test_a_result_is_followed_row_by_row(asked: Asked, run: Run) -> None:
    done = run("tail", "hot", "--rows", "3", "--cursors")
    assert done.stdout.splitlines() == ["1", "2", "3"]
    assert done.stderr.splitlines() == ["1", "2"]
    assert done.exit_code == 0


def test_outputs_are_listed_registered_resumed_and_removed(asked: Asked, run: Run) -> None:
    assert "PAUSED: 500 for a day" in run("outputs").stdout
    asked.clear()
    made = run("outputs", "--register", "hook", "--query", "hot", "--to", "https://there/")
    assert "its secret, which is not shown again: s3" in made.stdout
    run("outputs", "--resume", "hook", "--remove", "hook")
    assert [each for each in asked if each[0] != "GET"] == [
        ("POST", "/v1/outputs", {"name": "hook", "query": "hot", "url": "https://there/"}),
        ("POST", "/v1/outputs/hook/resume", None),
        ("DELETE", "/v1/outputs/hook", None),
    ]
