"""Tentative results for readers of a service: within the bound while a stream is silent, and corrected when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from striking import until

import flux
from benchmarks.ports import free_port
from benchmarks.serve import STARTS_S
from flux.client import Client, CorrectedResults, GatewayRefused, ResultRows, ResultView, TentativeResults
from flux.eventlog.streams import ReaderPositions, StreamCatalogue
from flux.vault.location import Folder

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

#: The bound, in seconds, and windows of half a second by the time of events.
BOUND_S, WINDOWS = 2.0, 12
TEXT = (
    "WITH both AS (SELECT site, at FROM east UNION ALL SELECT site, at FROM west) "
    "SELECT window.start AS since, site, count(*) AS n FROM both GROUP BY window(at, '500 milliseconds'), site"
)
SILENT = range(3, 9)


class Board:
    """A reader that shows all results, and notes when each window was shown first."""

    def __init__(self, client: Client) -> None:
        self.view = ResultView(["since", "site"])
        self.stable: list[dict[str, Any]] = []
        self.first: dict[str, float] = {}
        self.corrected = 0
        self._client = client
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            for news in self._client.follow("counts", tentative=True):
                self.view.take(news)
                self.corrected += isinstance(news, CorrectedResults)
                if isinstance(news, ResultRows | TentativeResults):
                    for row in news.rows:
                        self.first.setdefault(f"{row['since']} {row['site']}", time.monotonic())
                if isinstance(news, ResultRows):
                    self.stable += news.rows
        except (
            GatewayRefused,
            RuntimeError,
        ):  # the query was removed, or the client closed because the test has failed
            return

    def tentative(self) -> set[tuple[str, str, int]]:
        return values(row for row in self.view.rows() if row["tentative"])


def values(rows: Iterable[dict[str, Any]]) -> set[tuple[str, str, int]]:
    return {(row["since"], row["site"], row["n"]) for row in rows}


def start_of(window: int) -> str:
    return f"2026-01-01T00:00:{window / 2:09.6f}Z"


def rows_of(stream: str, windows: range) -> list[dict[str, str]]:
    """Return two events of each window."""
    return [{"site": stream, "at": start_of(window)} for window in windows for _ in range(2)]


def test_results_go_on_within_the_bound_while_a_stream_is_silent_and_are_corrected(spark: Any, tmp_path: Path) -> None:
    location = tmp_path / "location"
    location.mkdir(mode=0o700)
    with (
        flux.serve(location, f"127.0.0.1:{free_port()}", spark=spark, workers=2) as service,
        Client(service.urls, service.token, timeout=STARTS_S) as client,
    ):
        for stream in ("east", "west"):
            client.register_stream(stream, "site STRING, at TIMESTAMP", time="at", delay="0 seconds")
        client.register_stream("plain", "site STRING")
        check_refusals(client)
        client.register_query("beside", "SELECT site, at FROM east")  # a stage of the stream that runs and has no bound
        made = client.register_query("counts", TEXT, availability=f"{BOUND_S:g}s")
        assert (made["availability"], made["reads"]) == (f"{BOUND_S:g}s", ["east", "west"])
        board = Board(client)
        pushed: dict[int, float] = {}
        for window in range(SILENT.start):
            for stream in ("east", "west"):
                client.push_events(stream, rows_of(stream, range(window, window + 1)))
        until(lambda: len(board.stable) >= 2 * (SILENT.start - 1), "stable windows before the silence")
        for window in (*SILENT, SILENT.stop):
            pushed[window] = time.monotonic()
            client.push_events("east", rows_of("east", range(window, window + 1)))
        wanted = {(start_of(window), "east", 2) for window in range(SILENT.start - 1, SILENT.stop)}
        wanted |= {(start_of(SILENT.start - 1), "west", 2)}  # its rows are there, and the next ones are missing
        until(lambda: board.tentative() == wanted, "tentative windows of all rows that are there")
        waits = [board.first[f"{start_of(window)} east"] - pushed[window + 1] for window in SILENT]
        assert max(waits) < 5 * BOUND_S, f"a machine under load takes a part of {waits}"
        page = client.rows("counts", tentative=True)
        assert page.rows == board.stable
        assert values(row for shown in page.tentative for row in shown.rows) == wanted
        assert client.rows("counts") == page._replace(tentative=[])
        with pytest.raises(GatewayRefused, match="has no availability"):
            client.rows("beside", tentative=True)
        client.push_events("west", rows_of("west", range(SILENT.start, WINDOWS)))
        client.push_events("east", rows_of("east", range(SILENT.stop + 1, WINDOWS)))
        until(lambda: len(board.stable) == 2 * (WINDOWS - 1) and board.corrected, "all windows are stable")
        model = {(start_of(window), site, 2) for window in range(WINDOWS - 1) for site in ("east", "west")}
        assert values(board.stable) == model
        assert len(board.stable) == len(model)
        until(lambda: not board.tentative(), "nothing is tentative any more")
        assert client.rows("counts", tentative=True).tentative == []
        streams = StreamCatalogue(Folder(location))
        readers = ReaderPositions(streams.readers_place(streams.get("east")))
        assert readers.names() == ["service", "service.counts"]
        with pytest.raises(GatewayRefused, match="for counts"):
            client._call("DELETE", "/v1/streams/east/readers/service.counts")
        client.register_query("behind", "SELECT site, n FROM counts WHERE n > 1")
        client.remove_query("counts", cascade=True)
        assert readers.names() == ["service"]
        client.remove_query("beside")
        assert {stage.name for stage in service.plan.query.plan.stages} == {"/idle"}


def check_refusals(client: Client) -> None:
    """Assert that bounds which cannot hold are refused with the thing to do, and leave nothing."""
    grouped = "SELECT window.start AS since, count(*) AS n FROM east GROUP BY window(at, '500 milliseconds')"
    for text, options, said in (
        ("SELECT site FROM plain", {}, "'plain' has the time of arrival.*Register a stream with 'time' and 'delay'"),
        ("SELECT site FROM other", {}, "reads streams alone.*WITH name AS"),
        (grouped, {"availability": "1ms"}, "say 1100 milliseconds or more"),
        ("SELECT site, count(*) AS n FROM east GROUP BY site", {"mode": "update"}, "waits for none.*window"),
    ):
        with pytest.raises(GatewayRefused, match=said):
            client.register_query("wrong", text, **{"availability": "2s", **options})
    assert client.queries() == []
    assert [each["readers"] for each in client.streams()] == [[], [], []]
