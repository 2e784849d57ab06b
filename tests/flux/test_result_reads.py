"""Results of queries over HTTP: pages by cursor, and server-sent events."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flux.gateway.problems import Problem
from flux.gateway.reads import event_stream
from flux.gateway.reads.endpoint import ResultsEndpoint
from flux.gateway.reads.event_stream import EventStream
from flux.gateway.reads.follower import ResultFollower
from flux.gateway.reads.ring import ENTRY_ROWS, ResultRing
from flux.gateway.reads.tails import OutputTails
from flux.gateway.routes import ARROW, FollowRows
from flux.outputs.catalogue import OutputCatalogue
from flux.outputs.cursor import OutputCursor
from flux.outputs.reader import MissedRows, OutputPiece, OutputRows, OutputScan
from flux.vault.location import Folder
from tests.flux.gateways import HeldClient, problem
from tests.flux.results import opened_sink, results, written


@pytest.fixture(autouse=True)
def no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[HeldClient]:
    made = HeldClient(tmp_path)
    yield made
    made.close()


# ---- the ring


def rows_behind(start: tuple[int, ...], *pieces: tuple[int, list[int]]) -> OutputRows:
    """Return rows that follow a place, as a scan gives them: values are positions."""
    place, found = list(start), []
    for partition, values in pieces:
        found.append(OutputPiece(partition, place[partition], results(*values)))
        place[partition] += len(values)
    return OutputRows(found, OutputCursor("a" * 32, tuple(place)), [])


def values_after(ring: ResultRing, *positions: int) -> list[int] | None:
    found = ring.after(positions)
    return None if found is None else [row for entry in found for row in entry.piece.rows.column(0).to_pylist()]


def test_readers_on_the_way_of_the_ring_go_on_from_memory_and_others_are_sent_to_the_disk() -> None:
    ring = ResultRing((5, 0), 1 << 20)
    ring.add(rows_behind((5, 0), (0, [5, 6, 7]), (1, [100, 101])))
    ring.add(rows_behind((8, 2), (0, [8])))
    assert values_after(ring, 5, 0) == [5, 6, 7, 100, 101, 8]
    assert values_after(ring, 6, 0) == [6, 7, 100, 101, 8]
    assert values_after(ring, 8, 1) == [101, 8]
    assert values_after(ring, 9, 2) == []
    assert values_after(ring, 4, 0) is None  # before its beginning
    assert values_after(ring, 6, 1) is None  # beside its way
    assert values_after(ring, 10, 2) is None  # ahead


def test_the_ring_keeps_its_bytes_and_begins_anew_behind_a_gap() -> None:
    ring = ResultRing((0,), 8 * 2500)
    for start in range(0, 4000, 500):
        ring.add(rows_behind((start,), (0, list(range(start, start + 500)))))
    assert values_after(ring, 0) is None
    assert values_after(ring, 1500) == list(range(1500, 4000))
    gap = rows_behind((5000,), (0, [5000]))
    ring.add(gap._replace(missed=[MissedRows(0, 4000, 5000)]))
    assert values_after(ring, 3999) is None
    assert values_after(ring, 5000) == [5000]


def test_entries_are_small_and_their_json_is_shared() -> None:
    ring = ResultRing((0,), 1 << 20)
    ring.add(rows_behind((0,), (0, list(range(2 * ENTRY_ROWS + 1)))))
    first, second = ring.after((0,)), ring.after((0,))
    assert first is not None
    assert second is not None
    assert [each.piece.rows.num_rows for each in first] == [ENTRY_ROWS, ENTRY_ROWS, 1]
    assert first[0].json is second[0].json


# ---- pages


def test_results_come_page_by_page_as_json_and_as_arrow(client: HeldClient, tmp_path: Path) -> None:
    sink = opened_sink(tmp_path)
    written(sink, 0, results(*range(5)))
    first = client.call("GET", "/v1/queries/delays/rows?limit=3").json()
    assert first["rows"] == [{"value": 0}, {"value": 1}, {"value": 2}]
    assert (first["query"], first["mode"], first["missed"]) == ("delays", "append", [])
    rest = client.call("GET", f"/v1/queries/delays/rows?after={first['cursor']}").json()
    assert rest["rows"] == [{"value": 3}, {"value": 4}]
    arrow = client.call("GET", f"/v1/queries/delays/rows?after={first['cursor']}", headers={"Accept": ARROW})
    assert pa.ipc.open_stream(arrow.content).read_all().column("value").to_pylist() == [3, 4]
    assert arrow.headers["flux-cursor"] == rest["cursor"]
    assert client.call("GET", f"/v1/queries/delays/rows?after={rest['cursor']}").json()["rows"] == []
    assert client.call("GET", "/v1/queries/delays/rows?after=newest").json()["cursor"] == rest["cursor"]


def test_a_request_waits_for_the_first_row(client: HeldClient, tmp_path: Path) -> None:
    sink = opened_sink(tmp_path)
    cursor = client.call("GET", "/v1/queries/delays/rows?after=newest").json()["cursor"]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.call, "GET", f"/v1/queries/delays/rows?after={cursor}&wait=60s")
        written(sink, 0, results(7))
        assert waits.result(timeout=50).json()["rows"] == [{"value": 7}]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("limit=0", (400, "malformed")), ("limit=1000000000000", (400, "malformed")), ("limit=²", (400, "malformed")),
        ("wait=1h", (400, "malformed")), ("wait=61s", (400, "malformed")), ("wait=-1s", (400, "malformed")),
        ("after=", (400, "malformed")), ("after=x", (400, "malformed")), (f"after={'b' * 32}-0", (410, "cursor_gone")),
        (f"after={'b' * 40_000}", (400, "malformed")),
    ],
)  # fmt: skip
def test_mistakes_of_readers_are_named(client: HeldClient, tmp_path: Path, query: str, said: tuple[int, str]) -> None:
    opened_sink(tmp_path)
    assert problem(client.call("GET", f"/v1/queries/delays/rows?{query}")) == said


def test_a_reader_needs_the_right_to_read_that_query(client: HeldClient, tmp_path: Path) -> None:
    opened_sink(tmp_path)
    other, own = client.token_for("read", streams=("clicks",)), client.token_for("read", streams=("delays",))
    assert problem(client.call("GET", "/v1/queries/delays/rows", token="")) == (401, "no_token")
    assert problem(client.call("GET", "/v1/queries/delays/rows", token=other)) == (403, "no_right")
    assert problem(client.call("GET", "/v1/queries/others/rows")) == (404, "no_such_query")
    assert client.call("GET", "/v1/queries/delays/rows", token=own).status_code == 200


def test_a_cursor_ahead_of_the_output_waits(client: HeldClient, tmp_path: Path) -> None:
    opened_sink(tmp_path)
    ahead = f"{OutputCatalogue(Folder(tmp_path)).get('delays').id}-1000"
    found = client.call("GET", f"/v1/queries/delays/rows?after={ahead}&wait=20ms").json()
    assert (found["rows"], found["cursor"]) == ([], ahead)


# ---- server-sent events


def in_loop(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine, with a loop of its own."""

    @functools.wraps(story)
    def test(*given: Any, **named: Any) -> None:
        asyncio.run(story(*given, **named))

    return test


class EventReader:
    """A reader of server-sent events, on the application itself."""

    def __init__(self, response: Any) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(response({"type": "http"}, self._receive, self.messages.put))

    async def _receive(self) -> Any:
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def next(self) -> dict[str, str]:
        """Return the fields of the next event."""
        while True:
            message = await asyncio.wait_for(self.messages.get(), 20)
            text = message.get("body", b"").decode()
            if "data: " in text:
                return dict(line.split(": ", 1) for line in text.splitlines() if line)

    async def leave(self) -> None:
        self._leave.set()
        await asyncio.wait_for(self.task, 20)


async def followed(endpoint: ResultsEndpoint, after: str = "oldest", name: str = "delays") -> EventReader:
    response = await endpoint.response(FollowRows(name, after), lambda: None)
    assert isinstance(response, EventStream)
    return EventReader(response)


@pytest.fixture
def endpoints(tmp_path: Path) -> Iterator[list[ResultsEndpoint]]:
    """Give two gateways' readers of one location."""
    tails = [OutputTails(Folder(tmp_path)) for _ in range(2)]
    made = [ResultsEndpoint(each) for each in tails]
    yield made
    for each in [*tails, *made]:
        each.close()


@in_loop
async def test_a_reader_goes_on_from_its_last_event_at_another_gateway(
    endpoints: list[ResultsEndpoint], tmp_path: Path
) -> None:
    sink = opened_sink(tmp_path)
    written(sink, 0, results(1, 2))
    reader = await followed(endpoints[0])
    first = await reader.next()
    assert json.loads(first["data"]) == [{"value": 1}, {"value": 2}]
    await reader.leave()
    written(sink, 1, results(3))
    other = await followed(endpoints[1], first["id"])
    assert json.loads((await other.next())["data"]) == [{"value": 3}]
    written(sink, 2, results(4))
    assert json.loads((await other.next())["data"]) == [{"value": 4}]
    await other.leave()


@in_loop
async def test_a_reader_that_does_not_read_holds_up_no_other_and_is_let_go(
    endpoints: list[ResultsEndpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "SEND_S", 0.2)
    sink = opened_sink(tmp_path)
    lazy = await followed(endpoints[0])
    eager = await followed(endpoints[0])
    for at in range(20):
        written(sink, at, results(at))
    seen: list[int] = []
    while len(seen) < 20:
        seen += [row["value"] for row in json.loads((await eager.next())["data"])]
    assert seen == list(range(20))
    await asyncio.wait_for(lazy.task, 20)  # it has taken one message, and no second one
    await eager.leave()
    assert endpoints[0]._readers == 0


@in_loop
async def test_a_gateway_that_ends_closes_the_answers_of_its_readers(
    endpoints: list[ResultsEndpoint], tmp_path: Path
) -> None:
    """Uvicorn cancels their tasks, and would log an answer that is cut off as an error with a traceback."""
    written(opened_sink(tmp_path), 0, results(1))
    reader = await followed(endpoints[0])
    await reader.next()
    reader.task.cancel()
    last = await asyncio.wait_for(reader.messages.get(), 20)
    assert (last["body"], last["more_body"]) == (b"", False)
    await asyncio.wait_for(reader.task, 20)
    assert endpoints[0]._readers == 0


@in_loop
async def test_readers_are_told_of_missed_rows_and_of_the_end_of_the_output(
    endpoints: list[ResultsEndpoint], tmp_path: Path
) -> None:
    sink = opened_sink(tmp_path)
    written(sink, 0, results(1))
    reader = await followed(endpoints[0])
    await reader.next()
    OutputCatalogue(Folder(tmp_path)).remove("delays")
    last = await reader.next()
    assert last["event"] == "end"
    assert json.loads(last["data"])["error"]["code"] == "no_such_query"
    await asyncio.wait_for(reader.task, 20)


@in_loop
async def test_a_token_that_was_revoked_ends_its_readers(
    endpoints: list[ResultsEndpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.05)

    def revoked() -> None:
        raise Problem("unknown_token", "the token is not known here")

    opened_sink(tmp_path)
    response = await endpoints[0].response(FollowRows("delays", "oldest"), revoked)
    reader = EventReader(response)
    last = await reader.next()
    assert json.loads(last["data"])["error"]["code"] == "unknown_token"
    await asyncio.wait_for(reader.task, 20)


@in_loop
async def test_one_reader_of_the_disk_serves_all_readers_of_an_output(
    endpoints: list[ResultsEndpoint], tmp_path: Path
) -> None:
    sink = opened_sink(tmp_path)
    readers = [await followed(endpoints[0]) for _ in range(20)]
    for at in range(3):
        written(sink, at, results(at))
    for reader in readers:
        seen: list[int] = []
        while len(seen) < 3:
            seen += [row["value"] for row in json.loads((await reader.next())["data"])]
        assert seen == [0, 1, 2]
    assert len(endpoints[0]._tails._tails) == 1
    for reader in readers:
        await reader.leave()


@in_loop
async def test_a_reader_that_leaves_while_the_disk_is_read_leaves_no_way_in_use_behind(
    endpoints: list[ResultsEndpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(opened_sink(tmp_path), 0, results(1, 2, 3))
    reads, goes_on, closed = threading.Event(), threading.Event(), threading.Event()
    rows, close = OutputScan.rows, OutputScan.close

    def slow(scan: OutputScan, most: int, bytes_most: int) -> OutputRows:
        if threading.current_thread().name.startswith("flux-results"):
            reads.set()
            assert goes_on.wait(20)
        return rows(scan, most, bytes_most)

    monkeypatch.setattr(OutputScan, "rows", slow)
    monkeypatch.setattr(OutputScan, "close", lambda scan: (closed.set(), close(scan))[1])
    of = OutputCatalogue(Folder(tmp_path)).get("delays")
    with endpoints[0]._tails.reading(of) as tail:
        follower = ResultFollower(tail, (0,), endpoints[0]._pool)
        monkeypatch.setattr(tail, "after", lambda positions: None)
        task = asyncio.create_task(follower.read(10, 20.0))
        assert await asyncio.to_thread(reads.wait, 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        closed.clear()
        follower.close()
        assert not tail._scans
        goes_on.set()
        assert await asyncio.to_thread(closed.wait, 20)
        assert follower.positions == (0,)


@in_loop
async def test_a_reader_that_leaves_as_a_row_comes_has_left(
    endpoints: list[ResultsEndpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End at once: a wait that swallows the cancellation goes on for a reader that is gone, until nothing was sent for
    ``SEND_S``."""
    opened_sink(tmp_path)
    of = OutputCatalogue(Folder(tmp_path)).get("delays")
    with endpoints[0]._tails.reading(of) as tail:
        follower = ResultFollower(tail, (0,), endpoints[0]._pool)
        monkeypatch.setattr(tail, "after", lambda positions: [])
        task = asyncio.create_task(follower.read(10, 0.2))
        await asyncio.sleep(0.01)
        tail.wake()
        asyncio.get_running_loop().call_soon(task.cancel)  # right behind the event
        await asyncio.wait([task], timeout=20)
        assert task.cancelled()
        follower.close()
