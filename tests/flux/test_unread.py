"""Data that sources have got since the start: asked for now and then, told once, and no reason to end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from one_worker import SCHEMA

import flux
from controller.planning.compiler import compile_plan
from controller.report.progress import unread_files as unread_files_shown
from flux.connectors.files.errors import FileGone
from flux.connectors.files.source import FilesReader
from flux.settings import Settings
from spark_integration.query.source_setup import UnreadRows


class Topic:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def __call__(self, partition: int, start: Any) -> Iterator[Any]:
        yield from ()

    def unread(self) -> list[str]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)


def asking(*reads: Any) -> tuple[UnreadRows, list[Any]]:
    sources = [flux.source(read, SCHEMA, 2, f"source-{i}", positions=True) for i, read in enumerate(reads)]
    flow = flux.stage(partitions=1, name="passed")(lambda batch: batch)(*sources)
    told: list[Any] = []
    plan = compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"")
    return UnreadRows(plan, "clicks", told.append), told


def test_what_has_come_is_told_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    unread, told = asking(lambda partition, start: iter(()), Topic([], ["a-2"], ["a-2"], ["a-2", "a-3"], []))
    for _ in range(5):
        unread.look()
    assert told == [{1: ["a-2"]}, {1: ["a-2", "a-3"]}, {}]
    assert ["a-2, which" in each.getMessage() for each in caplog.records] == [True, False]
    assert "query clicks: source source-1 does not read a-3, which has come" in caplog.records[1].getMessage()


def test_a_reader_that_cannot_say_it_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    wrong = ValueError("no broker")
    unread, told = asking(Topic(wrong, wrong, ["a-2"], wrong), Topic([], [], ["b-1"], []))
    with caplog.at_level(logging.WARNING, "flux"):
        for _ in range(4):
            unread.look()
    assert told == [{0: ["a-2"], 1: ["b-1"]}, {0: ["a-2"]}], "what was known stands"
    assert sum("cannot see what source source-0" in each.getMessage() for each in caplog.records) == 2


def test_nothing_runs_where_nobody_can_be_asked() -> None:
    unread, _ = asking(lambda partition, start: iter(()))
    unread.start()
    assert not unread._thread.is_alive()
    unread.end()


def test_files_are_looked_at_when_that_is_asked_for(tmp_path: Path) -> None:
    read = flux.files(tmp_path, schema="n BIGINT").reader  # type: ignore[attr-defined]
    looks = iter([{"corrupt": {"a": "why"}}, {"corrupt": {"a": "why", "b": "why"}}])
    read.unread_files = lambda: next(looks)
    source = flux.source(read, SCHEMA, 2, "f", positions=True)
    flow = flux.stage(partitions=1, name="passed")(lambda batch: batch)(source)
    plan = compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"")
    told: list[Any] = []
    unread = UnreadRows(plan, "clicks", lambda names: None, told.append)
    unread.look_now(30)  # nothing has begun
    unread.start()
    try:
        for names in ({"a"}, {"a", "b"}):
            unread.look_now(30)
            assert told[-1][0]["corrupt"].keys() == names
    finally:
        unread.end()
    assert not unread._thread.is_alive()


def test_files_that_are_not_read_are_told_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = flux.files(tmp_path, schema="n BIGINT").reader  # type: ignore[attr-defined]
    answers = iter(
        [
            {"incomplete": {}, "corrupt": {}, "missing": {}},
            {"incomplete": {"a": "no footer"}, "corrupt": {}, "missing": {}},
            FileGone("the folder"),
            {"incomplete": {"a": "no footer"}, "corrupt": {}, "missing": {}},
            {"incomplete": {}, "corrupt": {"a": "no footer"}, "missing": {}},
        ]
    )

    def unread_files() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert isinstance(read, FilesReader)
    read.unread_files = unread_files  # type: ignore[method-assign]
    sources = flux.stage(partitions=1, name="passed")(lambda batch: batch)(
        flux.source(read, SCHEMA, 2, "f", positions=True)
    )
    plan = compile_plan([sources], Settings.of(), lambda schema: schema, "q", b"")
    told: list[Any] = []
    unread = UnreadRows(plan, "clicks", lambda names: None, told.append)
    for _ in range(5):
        unread.look_at_files()
    assert [unread_files_shown(each[0]) for each in told] == [
        {},
        {"incomplete": {"count": 1, "files": {"a": "no footer"}}},
        {"corrupt": {"count": 1, "files": {"a": "no footer"}}},
    ]
    assert [each.getMessage() for each in caplog.records] == [
        "query clicks: source f: incomplete file a: no footer",
        "query clicks: source f: corrupt file a: no footer",
    ]
