"""Rows and figures of the table of recovery techniques."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import techniques
from benchmarks.failover import rate_between
from flux.errors import QueryTimeout


def report(seconds: int, rows: int) -> dict[str, Any]:
    stages = [{"name": "pass_on", "rowsIn": 1}, {"name": "Counts", "rowsIn": rows}]
    return {"timestamp": f"2026-11-23T07:00:{seconds:02}+00:00", "stages": stages}


def test_a_rate_is_what_the_count_took_between_two_reports() -> None:
    assert rate_between(report(10, 1000), report(14, 9000)) == 2000.0
    with pytest.raises(QueryTimeout, match="no progress report"):
        rate_between(report(10, 1000), None)


def test_who_survives_a_loss_is_killed_at_a_part_of_its_own_highest_rate() -> None:
    chosen = {each.name: each for each in techniques.techniques([1.0])}
    assert [name for name, each in chosen.items() if not each.survives] == ["none", "stateless: none"]
    assert chosen["standby, 1 s"].protects == {"counts": (2, "standby")}
    assert chosen["stateless: upstream"].protects == {"passed": (2, "upstream")}


def test_a_row_tells_lost_rows_of_all_its_runs() -> None:
    fast = dict.fromkeys(
        ("rows_per_s", "bytes_per_row_sent", "bytes_per_row_written", "order_bytes_per_slice", "memory_mib"), 100.0
    )
    steady = dict.fromkeys(
        ("p50_before_ms", "p99_before_ms", "gap_ms_max", "oldest_ms_max", "caught_up_s", "lost", "duplicated"), 1
    )
    loaded = {"saturated_rows_per_s": 1000.0, "caught_up_s": 2.5, "lost": 3, "duplicated": 4}
    [none, active, *_] = techniques.techniques([])
    row = techniques._row(active, fast, fast, steady, loaded)
    assert (row["lost"], row["duplicated"]) == (4, 5)
    assert (row["loaded_rows_per_s"], row["loaded_caught_up_s"]) == (600, 2.5)
    assert techniques.why_failed([row]) == "active: 4 rows lost, 5 duplicated, 0 are allowed"
    alone = techniques._row(none, fast, fast, dict.fromkeys(steady, 0), None)
    assert (alone["loaded_rows_per_s"], alone["loaded_caught_up_s"]) == (None, None)
    assert techniques.why_failed([alone]) is None


def test_a_flush_of_the_disk_takes_some_time() -> None:
    assert techniques.fdatasync_ms() > 0
