"""The board of ``make run-silent``: windows as they came first, and for good. The job itself is run by ``make test-long``."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

import flux
from examples.silent_site import (
    ALL,
    Board,
    Boards,
    Sites,
    Times,
    Values,
    Window,
    draw,
    follow_boards,
    latest,
    stable,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0


def rows(*given: tuple[int, str, int]) -> pa.RecordBatch:
    start, site, count = zip(*given, strict=True)
    times = pa.array([1_000_000 * each for each in start], pa.timestamp("us", "UTC"))
    return pa.record_batch({"start": times, "site": list(site), "readings": list(count), "total": list(count)})


def test_a_window_is_shown_first_tentatively_and_then_for_good(tmp_path: Path) -> None:
    boards, ended = Boards(), threading.Event()
    board = Board(tmp_path, "sites")
    board.open(flux.SinkContext("q", 0, "s", 0, 1))
    board.write(rows((10, "Aden", 40)), flux.Position(0, 0))
    board.tentative(rows((11, "Aden", 30)), 12)
    board.undo(11, 12)
    board.write(rows((11, "Aden", 40)), flux.Position(0, 1))
    board.tentative(rows((12, "Aden", 20)), 13)
    threading.Thread(target=follow_boards, args=(tmp_path, boards, ended), daemon=True).start()
    end = time.monotonic() + WAIT_S
    while len(boards.of("sites")) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    ended.set()
    board.close()
    shown = boards.of("sites")
    corrected = shown[Window(11, "Aden")]
    assert (corrected.tentative, corrected.first, corrected.last) == (True, Values(30, 30), Values(40, 40))
    assert stable(boards, ("sites",), 10, 12) == {
        Window(10, "Aden"): Values(40, 40),
        Window(11, "Aden"): Values(40, 40),
    }
    assert shown[Window(12, "Aden")].last is None
    console = Console(width=160)
    with console.capture() as said:
        console.print(table(boards, "tentative since 12:01:07"))
    assert "~30 40" in said.get()
    assert "~20" in said.get()


def test_two_stable_values_of_a_window_are_a_contradiction_and_the_same_one_twice_is_none() -> None:
    boards = Boards()
    for value in (40, 40):
        boards.note("all", "stable", 1.0, [[10, ALL, value, value]])
    assert boards.contradictions == []
    boards.note("all", "stable", 1.0, [[10, ALL, 41, 41]])
    assert boards.contradictions == [Window(10, ALL)]


def test_the_comparison_begins_when_each_flow_shows_recent_windows() -> None:
    boards = Boards()
    for flow in ("sites", "all", "idle", "micro"):
        assert not boards.has_windows_since(10.0)
        boards.note(flow, "stable", 20.0, [[9 if flow == "micro" else 12, ALL, 1, 1]])
    assert not boards.has_windows_since(10.0)  # Structured Streaming still works off earlier rows
    boards.note("micro", "stable", 21.0, [[10, ALL, 1, 1]])
    assert boards.has_windows_since(10.0)


def test_the_longest_wait_counts_from_the_reading_behind_which_a_window_is_complete(tmp_path: Path) -> None:
    sites, boards = Sites(tmp_path, ""), Boards()
    sites.brought = {Window(10, ALL): 11.5, Window(11, ALL): 11.0}
    boards.note("all", "tentative", 14.0, [[10, ALL, 1, 1]])
    boards.note("all", "stable", 20.0, [[10, ALL, 2, 2]])
    boards.note("all", "stable", 13.0, [[11, ALL, 2, 2]])
    assert latest(boards, sites, 10, 12) == 1.0
    draw(tmp_path / "picture.png", boards, {Window(10, ALL): Values(2, 2)}, Times(8.0, 9.0, 10.0, 11.0))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.starts_spark
def test_windows_go_on_within_the_bound_while_a_site_is_silent_and_are_sparks_in_the_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.silent_site", "--picture", str(tmp_path / "silent.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "Spark's batch answer: equal" in " ".join(done.stdout.split())
