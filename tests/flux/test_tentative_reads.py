"""Tentative results for readers over HTTP: events and pages, beside stable rows that stay unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_client import scripted
from typer.testing import CliRunner

from controller.operate.cli import app, queries
from flux.client import CorrectedResults, ResultRows, ResultView, TentativeResults, UndoneResults
from flux.dataflow.sink import Position, SinkContext
from flux.errors import QueryFailed, UsageError
from flux.gateway.reads import tentative_tail
from flux.gateway.reads.endpoint import ResultsEndpoint
from flux.gateway.reads.event_stream import EventStream
from flux.gateway.reads.tails import OutputTails
from flux.gateway.reads.tentative_tail import instant
from flux.gateway.routes import ARROW, FollowRows
from flux.outputs import tentative_channel
from flux.outputs.catalogue import OutputCatalogue, OutputExists
from flux.outputs.tentative_sink import TentativeOutputSink
from flux.vault.location import Folder
from tests.flux.gateways import HeldClient, problem
from tests.flux.results import COLUMNS, opened_sink, results, written
from tests.flux.test_result_reads import EventReader, in_loop

SECOND = 1_000_000
LAST = (1 << 63) - 1


@pytest.fixture(autouse=True)
def no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[HeldClient]:
    made = HeldClient(tmp_path)
    yield made
    made.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[ResultsEndpoint]:
    tails = OutputTails(Folder(tmp_path))
    made = ResultsEndpoint(tails)
    yield made
    tails.close()
    made.close()


def showing_sink(folder: Path, partition: int = 0, partitions: int = 1) -> TentativeOutputSink:
    """Open the sink of a partition of a query with availability."""
    folder.chmod(0o700)
    sink = TentativeOutputSink(str(folder), "delays")
    sink.check(COLUMNS)
    sink.prepare(partitions, None)
    sink.open(SinkContext("query-1", 3, "delays", partition, partitions))
    return sink


async def followed(endpoint: ResultsEndpoint, after: str = "oldest", asked: bool = True) -> EventReader:
    response = await endpoint.response(FollowRows("delays", after, asked), lambda: None)
    assert isinstance(response, EventStream)
    return EventReader(response)


async def told(reader: EventReader) -> tuple[str, Any]:
    """Return kind and content of the next event, where ``rows`` are their values."""
    event = await reader.next()
    kind, content = event.get("event", "row"), json.loads(event["data"])
    assert ("id" in event) == (kind == "row"), f"a cursor counts stable rows alone: {event}"
    if kind == "row":
        return kind, [row["value"] for row in content]
    if kind == "tentative":
        return kind, (content["through"], [row["value"] for row in content["rows"]])
    return kind, tuple(content[name] for name in ("start", "end", "through") if name in content)


def at(seconds: int) -> str:
    return f"1970-01-01T00:00:{seconds:02}.000000Z"


EVERYTHING = ("undo", (None, None))


# ---- server-sent events


@in_loop
async def test_a_reader_that_asks_gets_tentative_rows_their_end_and_the_stable_rows_in_order(
    endpoint: ResultsEndpoint, tmp_path: Path
) -> None:
    sink = showing_sink(tmp_path)
    written(sink, 0, results(1))
    reader = await followed(endpoint)
    found = [await told(reader) for _ in range(2)]
    assert sorted(found, key=str) == sorted([EVERYTHING, ("row", [1])], key=str)
    sink.tentative(results(2), 2 * SECOND)
    assert await told(reader) == ("tentative", (at(2), [2]))
    sink.undo(1 * SECOND, 2 * SECOND)
    written(sink, 1, results(20))
    sink.corrected(2 * SECOND)
    assert [await told(reader) for _ in range(3)] == [
        ("undo", (at(1), at(2))), ("row", [20]), ("corrected", (at(2),))
    ]  # fmt: skip
    await reader.leave()


@in_loop
async def test_a_reader_that_does_not_ask_gets_stable_rows_with_the_same_cursors_and_nothing_else(
    endpoint: ResultsEndpoint, tmp_path: Path
) -> None:
    sink = showing_sink(tmp_path)
    plain, asking = await followed(endpoint, asked=False), await followed(endpoint)
    sink.tentative(results(1), SECOND)
    sink.undo(None, SECOND)
    written(sink, 0, results(10))
    sink.tentative(results(2), 2 * SECOND)
    written(sink, 1, results(11))
    stable = [await plain.next() for _ in range(2)]
    assert [json.loads(each["data"]) for each in stable] == [[{"value": 10}], [{"value": 11}]]
    assert not any("event" in each for each in stable)
    ids = []
    while len(ids) < 2:
        event = await asking.next()
        ids += [event["id"]] if "id" in event else []
    assert ids == [each["id"] for each in stable]
    for each in (plain, asking):
        await each.leave()


@in_loop
async def test_a_reader_that_comes_back_gets_the_rows_that_stand_now(endpoint: ResultsEndpoint, tmp_path: Path) -> None:
    sink = showing_sink(tmp_path)
    written(sink, 0, results(1))
    for time in (2, 3, 4):
        sink.tentative(results(time), time * SECOND)
    sink.undo(1 * SECOND, 2 * SECOND)
    written(sink, 1, results(20))
    reader = await followed(endpoint, "newest")
    assert [await told(reader) for _ in range(3)] == [
        EVERYTHING, ("tentative", (at(3), [3])), ("tentative", (at(4), [4]))
    ]  # fmt: skip
    await reader.leave()


@in_loop
async def test_another_primary_voids_what_earlier_ones_have_shown_and_takes_the_channel_back(
    endpoint: ResultsEndpoint, tmp_path: Path
) -> None:
    first = showing_sink(tmp_path)
    first.tentative(results(1), SECOND)
    reader = await followed(endpoint)
    assert [await told(reader), await told(reader)] == [EVERYTHING, ("tentative", (at(1), [1]))]
    second = showing_sink(tmp_path)
    assert await told(reader) == EVERYTHING
    first.tentative(results(2), 2 * SECOND)  # it does not know yet that it was given up
    assert [await told(reader) for _ in range(3)] == [
        EVERYTHING, ("tentative", (at(1), [1])), ("tentative", (at(2), [2]))
    ]  # fmt: skip
    first.close()
    written(second, 0, results(10))
    found = [await told(reader), await told(reader)]
    assert sorted(found, key=str) == sorted([EVERYTHING, ("row", [10])], key=str)
    await reader.leave()


@in_loop
async def test_a_reader_that_is_far_behind_gets_the_rows_that_stand(
    endpoint: ResultsEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tentative_tail, "CHANGES_BYTES", 2000)
    sink = showing_sink(tmp_path)
    lazy, eager = await followed(endpoint), await followed(endpoint)
    assert await told(lazy) == EVERYTHING
    seen = 0
    for time in range(1, 41):
        sink.undo(None, None)
        sink.tentative(results(time), time * SECOND)
    while seen < 40:  # one that does not read holds up no other
        kind, content = await told(eager)
        seen = content[1][0] if kind == "tentative" else seen
    shown: list[int] = []
    events = 0
    while shown != [40]:
        kind, content = await told(lazy)
        shown = [] if kind == "undo" else [*shown, *content[1]]
        events += 1
    assert events < 40
    for each in (lazy, eager):
        await each.leave()


@in_loop
async def test_tentative_rows_that_cannot_be_read_are_void_and_stable_rows_go_on(
    endpoint: ResultsEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = showing_sink(tmp_path)
    reader = await followed(endpoint)
    sink.tentative(results(1), SECOND)
    assert [await told(reader), await told(reader)] == [EVERYTHING, ("tentative", (at(1), [1]))]
    read, broken = tentative_channel.ChannelReader.read, threading.Event()
    broken.set()

    def fails(channel: tentative_channel.ChannelReader) -> Any:
        if broken.is_set():
            raise OSError("the disk")
        return read(channel)

    monkeypatch.setattr(tentative_channel.ChannelReader, "read", fails)
    assert await told(reader) == EVERYTHING
    written(sink, 0, results(10))
    assert await told(reader) == ("row", [10])
    broken.clear()
    assert [await told(reader), await told(reader)] == [EVERYTHING, ("tentative", (at(1), [1]))]
    assert caplog.text.count("cannot be read") == 1
    await reader.leave()


# ---- pages


def page(client: HeldClient, asked: str = "tentative=true") -> dict[str, Any]:
    found: dict[str, Any] = client.call("GET", f"/v1/queries/delays/rows?{asked}").json()
    return found


def test_a_page_has_the_rows_that_stand_beside_the_stable_ones(client: HeldClient, tmp_path: Path) -> None:
    sink = showing_sink(tmp_path)
    written(sink, 0, results(1))
    assert page(client)["tentative"] == []
    sink.tentative(results(2, 3), 2 * SECOND)
    sink.tentative(results(4), LAST)
    found = page(client)
    assert found["rows"] == [{"value": 1}]
    assert found["tentative"] == [
        {"partition": 0, "through": at(2), "rows": [{"value": 2}, {"value": 3}]},
        {"partition": 0, "through": None, "rows": [{"value": 4}]},
    ]
    assert "tentative" not in page(client, "after=oldest")
    assert page(client, "tentative=false")["cursor"] == found["cursor"]
    sink.undo(None, 2 * SECOND)
    written(sink, 1, results(20))
    later = page(client, f"tentative=true&wait=10s&after={found['cursor']}")
    assert (later["rows"], [each["through"] for each in later["tentative"]]) == ([{"value": 20}], [None])


def test_the_wait_of_a_page_ends_with_a_tentative_row(client: HeldClient, tmp_path: Path) -> None:
    sink = showing_sink(tmp_path)

    async def story() -> dict[str, Any]:
        waits = asyncio.create_task(asyncio.to_thread(page, client, "tentative=true&wait=60s"))
        while not waits.done():
            await asyncio.to_thread(sink.tentative, results(7), SECOND)
            await asyncio.wait([waits], timeout=0.05)
        return waits.result()

    found = asyncio.run(asyncio.wait_for(story(), 50))
    assert found["rows"] == []
    assert found["tentative"][0]["rows"] == [{"value": 7}]


def test_partitions_are_told_apart(client: HeldClient, tmp_path: Path) -> None:
    sinks = [showing_sink(tmp_path, partition, 2) for partition in range(2)]
    for at_, sink in enumerate(sinks):
        sink.tentative(results(at_), SECOND)
    sinks[0].undo(None, None)
    assert [(each["partition"], each["rows"]) for each in page(client)["tentative"]] == [(1, [{"value": 1}])]


@pytest.mark.parametrize(
    ("asked", "headers", "said"),
    [
        ("tentative=yes", {}, (400, "malformed")), ("tentative=", {}, (400, "malformed")),
        ("tentative=true", {"Accept": ARROW}, (400, "malformed")),
    ],
)  # fmt: skip
def test_mistakes_of_readers_are_named(
    client: HeldClient, tmp_path: Path, asked: str, headers: dict[str, str], said: tuple[int, str]
) -> None:
    showing_sink(tmp_path)
    assert problem(client.call("GET", f"/v1/queries/delays/rows?{asked}", headers=headers)) == said


def test_a_query_without_availability_has_no_tentative_rows(client: HeldClient, tmp_path: Path) -> None:
    opened_sink(tmp_path)
    for path in ("rows", "events"):
        answer = client.call("GET", f"/v1/queries/delays/{path}?tentative=true")
        assert problem(answer) == (400, "no_tentative")
        assert "'availability'" in answer.json()["error"]["remedy"]
    with pytest.raises(OutputExists, match="with tentative rows"):
        showing_sink(tmp_path)


# ---- the sink


def test_rows_are_bounded_by_bytes_and_the_oldest_go(
    client: HeldClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flux.outputs.tentative_sink.SHOWN_BYTES", 2000)
    sink = showing_sink(tmp_path)
    for time in range(100):
        sink.tentative(results(time), time * SECOND)
    values = [row["value"] for each in page(client)["tentative"] for row in each["rows"]]
    assert values == list(range(100 - len(values), 100))
    assert 1 <= len(values) < 20
    sink.tentative(results(*range(1000)), 100 * SECOND)  # more than all that may be shown
    assert len(page(client)["tentative"]) == len(values)


def test_the_channel_is_a_fixed_number_of_bytes_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tentative_channel, "SEGMENT_BYTES", 1000)
    sink = showing_sink(tmp_path)
    place = OutputCatalogue(Folder(tmp_path)).channel_place(sink._output, 0)  # type: ignore[arg-type]
    for time in range(200):
        sink.undo(None, None)
        sink.tentative(results(time), time * SECOND)
    segments = list(Path(str(place)).glob("journal-*"))
    assert len(segments) == 1
    assert segments[0].stat().st_size < 5000


def test_an_output_that_was_removed_ends_its_writer(tmp_path: Path) -> None:
    sink = showing_sink(tmp_path)
    OutputCatalogue(Folder(tmp_path)).remove("delays")
    with pytest.raises(QueryFailed):
        sink.tentative(results(1), SECOND)
    with pytest.raises(QueryFailed):
        sink.write(results(1), Position(0, 0))


def test_times_that_no_calendar_has_are_the_end_of_time() -> None:
    assert [instant(each) for each in (0, -1, LAST, -LAST, None)] == [
        "1970-01-01T00:00:00.000000Z", "1969-12-31T23:59:59.999999Z", None, None, None,
    ]  # fmt: skip


# ---- the client


EVENTS = [
    ("", '[{"at": 1, "n": 5}]'), ("tentative", f'{{"partition": 0, "through": "{at(2)}", "rows": [{{"at": 2, "n": 1}}]}}'),
    ("tentative", '{"partition": 0, "through": null, "rows": [{"at": 1, "n": 6}]}'),
    ("undo", f'{{"partition": 0, "start": "{at(1)}", "end": "{at(2)}"}}'), ("", '[{"at": 2, "n": 3}]'),
    ("corrected", f'{{"partition": 0, "through": "{at(2)}"}}'),
]  # fmt: skip


def streamed(request: httpx.Request) -> httpx.Response:
    if request.url.path.endswith("/rows"):
        rows = {"query": "q", "mode": "append", "rows": [], "cursor": "c", "missed": []}
        shown = json.loads(EVENTS[1][1])
        return httpx.Response(200, json=rows | ({"tentative": [shown]} if "tentative" in request.url.params else {}))
    assert request.url.params.get("tentative") == "true"
    lines = (f"event: {kind}\ndata: {data}\n\n" if kind else f"id: c1\ndata: {data}\n\n" for kind, data in EVENTS)
    return httpx.Response(200, content="".join(lines).encode())


def test_the_client_follows_tentative_rows_and_a_view_makes_a_table_of_them() -> None:
    view, tables = ResultView("at"), []
    news = scripted(streamed).follow("q", tentative=True)
    found = [next(news) for _ in EVENTS]
    time = datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
    assert found[0] == ResultRows([{"at": 1, "n": 5}], "c1")
    assert found[1] == TentativeResults([{"at": 2, "n": 1}], 0, time)
    assert found[3] == UndoneResults(0, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), time)
    assert found[5] == CorrectedResults(0, time)
    for each in found:
        view.take(each)
        tables.append([(row["at"], row["n"], row["tentative"]) for row in view.rows()])
    assert tables == [
        [(1, 5, False)],
        [(1, 5, False), (2, 1, True)],
        [(1, 6, True), (2, 1, True)],
        [(1, 6, True)],
        [(1, 6, True), (2, 3, False)],
        [(1, 6, True), (2, 3, False)],
    ]
    client = scripted(streamed)
    assert client.rows("q").tentative == []
    assert client.rows("q", tentative=True).tentative == [found[1]]


def test_a_view_forgets_the_oldest_stable_rows_and_names_a_column_that_is_missing() -> None:
    view = ResultView(["at"], max_rows=2)
    view.take(ResultRows([{"at": each} for each in (1, 2, 3, 2)], "c"))
    assert [row["at"] for row in view.rows()] == [3, 2]
    with pytest.raises(UsageError, match="no column 'at' in n"):
        view.take(TentativeResults([{"n": 1}], 0, None))
    for key in ([], None, 5, ["at", 1]):
        with pytest.raises(UsageError, match="key columns"):
            ResultView(key)  # type: ignore[arg-type]


def test_tail_prints_tentative_rows_and_their_end_as_lines_with_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "client_of", lambda *_: scripted(streamed))
    done = CliRunner().invoke(app, ["tail", "q", "--tentative", "--rows", "2"])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["row", "tentative", "tentative", "undo", "row"]
    assert lines[1] == {"kind": "tentative", "partition": 0, "through": at(2), "row": {"at": 2, "n": 1}}
    assert lines[3] == {"kind": "undo", "partition": 0, "start": at(1), "end": at(2)}
