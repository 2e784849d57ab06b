"""Figures of the benchmarks of moves and of uneven load, computed from arrivals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import move, skew
from benchmarks.arrivals import Seen, Span
from benchmarks.move import Times, Window
from benchmarks.operating import next_worker
from benchmarks.timeline import Mark, Report, of_arrivals, write
from controller.report.events import Event
from flux.errors import QueryFailed


def steady(end: float, partitions: int = 2, hole: tuple[int, float, float] | None = None, every: float = 0.01) -> Seen:
    """Ten rows of every partition every 10 ms from 1000.0 on, 5 ms old; those due in the hole come at its end."""
    due = np.repeat(np.arange(1000.0, 1000.0 + end, every), partitions)
    partition = np.tile(np.arange(partitions), len(due) // partitions)
    at = due + 0.005
    if hole is not None:
        number, start, until = hole
        at = np.where((partition == number) & (at > start) & (at < until), until, at)
    order = np.argsort(at, kind="stable")
    rows = np.full(len(due), 10)
    return Seen(at[order], partition[order], due[order], rows, np.zeros(4, np.int64))


def moved(partition: int, at: float, stall_ms: float = 3.0) -> Event:
    return Event("move", at, "Totals", partition, 1, "", 0.1, stall_ms, 0, 1000)


def times() -> Times:
    return Times(1000.0, 1008.0, [Window(0, 1010.0, 1010.2)], 1012.0, Span(1014.0, 1016.0))


def test_a_partition_that_stands_still_for_a_move_has_that_gap_as_its_stall() -> None:
    seen = steady(20, hole=(0, 1010.05, 1010.15))
    found = move.summary(seen, times(), [moved(0, 1010.2)], 2)
    assert found["gap_ms_max"] == pytest.approx(110, abs=10)
    assert found["usual_gap_ms_p50"] == pytest.approx(10, abs=1)
    assert found["stall_ms_p50"] == pytest.approx(100, abs=11)
    assert found["controller_stall_ms_p50"] == 3.0
    assert (found["moved"], found["moved_bytes"]) == (1, 1000)


def test_latency_during_a_move_is_that_of_the_other_partitions() -> None:
    calm = move.summary(steady(20, hole=(0, 1010.05, 1010.15)), times(), [moved(0, 1010.2)], 2)
    assert calm["p99_during_ms"] == pytest.approx(5, abs=0.1)
    assert calm["latency_ratio"] == pytest.approx(1, abs=0.01)
    disturbed = move.summary(steady(20, hole=(1, 1010.05, 1010.15)), times(), [moved(0, 1010.2)], 2)
    assert disturbed["p99_during_ms"] > 90
    assert disturbed["stall_ms_p50"] < 1


def test_throughput_during_the_moves_is_held_against_that_before() -> None:
    seen = steady(20)
    kept = (seen.at < 1014) | (np.arange(len(seen.at)) % 2 == 0)
    half = Seen(seen.at[kept], seen.partition[kept], seen.due[kept], seen.rows[kept], seen.counts)
    found = move.summary(half, times(), [moved(0, 1010.2)], 2)
    assert found["throughput_before"] == pytest.approx(2000, rel=0.02)
    assert found["throughput_ratio"] == pytest.approx(0.5, abs=0.02)


def test_no_row_of_a_partition_at_all_is_a_gap_as_long_as_the_look() -> None:
    assert steady(20).longest_gap_ms(7, 1003.0, 1004.0) == pytest.approx(1000)


def test_missing_rows_are_lost_and_surplus_ones_duplicated() -> None:
    empty = np.zeros(0)
    seen = Seen(empty, empty, empty, empty, np.array([3, 1, 2]))
    assert seen.exactness(np.array([2, 2, 2])) == {"rows": 6, "lost": 1, "duplicated": 1}


def test_a_partition_goes_to_the_next_worker_that_has_no_copy() -> None:
    assert next_worker([0, 1, 2], [0]) == 1
    assert next_worker([0, 1, 2], [2]) == 0
    assert next_worker([0, 1, 2], [0, 1]) == 2
    with pytest.raises(QueryFailed, match="more workers"):
        next_worker([0, 1], [0, 1])


def test_the_placement_has_settled_when_no_move_follows_for_a_while() -> None:
    assert skew.settled_s([102.0, 104.0], 100.0, 130.0) == 4.0
    assert skew.settled_s([102.0, 104.0, 120.0], 100.0, 130.0) == 4.0
    assert skew.settled_s([], 100.0, 130.0) == 0.0
    assert skew.settled_s([102.0, 128.0], 100.0, 104.0) is None


def test_load_over_mean_is_that_of_the_worker_with_most_rows() -> None:
    assert skew.load_over_mean(np.array([10.0, 10.0, 40.0]), {0: 0, 1: 1, 2: 2}) == 2.0
    assert skew.load_over_mean(np.array([20.0, 20.0, 40.0]), {0: 1, 1: 1, 2: 2}) == 1.0


def test_the_best_placement_puts_the_heaviest_first_where_there_is_least() -> None:
    assert skew.attainable(np.array([40.0, 20.0, 10.0, 10.0]), 2) == 1.0
    assert skew.attainable(np.array([60.0, 20.0, 10.0, 10.0]), 2) == 1.2, "one partition cannot be divided"


def test_rows_count_by_when_they_were_due_and_not_by_when_they_arrived() -> None:
    """Rows that wait until the time is over are the latest of all."""
    early = steady(20)
    held = np.where(early.due > 1017, 1030.0, early.at)
    late = Seen(held, early.partition, early.due, early.rows, early.counts)
    found = skew.slow_summary(ran(late, []), ran(steady(20), []))
    # Counted from 1010 to 1020: the last three of ten seconds are 10 to 13 s late.
    assert found["static_latency_ms"] == pytest.approx(0.3 * 11_500, rel=0.01)
    assert found["static_rows_per_s"] == pytest.approx(0.7 * found["adaptive_rows_per_s"], rel=0.01)


def ran(seen: Seen, moves: list[Event]) -> skew.Ran:
    return skew.Ran(1000.0, 1000.0, 1020.0, seen, moves, {0: 0, 1: 1}, seen.counts)


def test_adaptive_placement_is_held_against_static_in_the_same_seconds() -> None:
    late = steady(20, every=0.04)
    late = Seen(late.at + 5, late.partition, late.due, late.rows, late.counts)
    found = skew.slow_summary(ran(late, []), ran(steady(21), [moved(0, 1003.0), moved(1, 1004.0)]))
    assert found["throughput_ratio"] == pytest.approx(4, rel=0.05)
    assert found["static_latency_ms"] == pytest.approx(5005, abs=1)
    assert found["adaptive_latency_ms"] == pytest.approx(5, abs=0.1)
    assert (found["moves"], found["settled_s"], found["lost"], found["duplicated"]) == (2, 4.0, 0, 0)


def test_moves_after_settling_are_counted() -> None:
    calm = [moved(0, 1003.0), moved(1, 1015.0)]
    found = skew.zipf_summary(ran(steady(21), []), ran(steady(21), calm))
    assert (found["moves"], found["settled_s"], found["moves_after_settling"]) == (2, 3.0, 1)
    assert found["heaviest_partition_share"] == pytest.approx(0.5, abs=0.01)
    assert found["load_over_mean"] == pytest.approx(1, abs=0.01)


def test_a_report_is_written_as_json_with_a_picture_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seen = steady(5)
    line = of_arrivals("rows", seen, [Mark(1002.0, 1002.5, "move"), Mark(1003.0, 1003.0, "fault")], 1000.0, 1005.0)
    assert line.rows_per_s[5:45] == pytest.approx(2000, rel=0.11)
    assert np.nanmax(line.latency_ms) == pytest.approx(5, abs=0.1)
    paths = write(Report({"benchmark": "move", "moved": 3}, [line]), tmp_path / "new")
    assert [path.name for path in paths] == ["move.json", "move.png"]
    assert '"moved": 3' in paths[0].read_text()
    assert paths[1].read_bytes().startswith(b"\x89PNG")
