"""Figures of the benchmark of faults, computed from arrivals: one stream that stands still must show, although others flow."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.arrivals import Seen
from benchmarks.failover import Fault, _too_old, note_oldest


def seen(late: tuple[float, float] | None = None) -> Seen:
    """Make rows of two partitions every 10 ms, 5 ms old; those of partition 1 that are due in ``late`` come at its end."""
    due = np.repeat(np.arange(1000.0, 1060.0, 0.01), 2)
    partition = np.tile([0, 1], len(due) // 2)
    at = due + 0.005
    if late is not None:
        at = np.where((partition == 1) & (due > late[0]) & (due < late[1]), late[1], at)
    order = np.argsort(at, kind="stable")
    return Seen(at[order], partition[order], due[order], np.ones(len(due)), np.zeros(4, np.int64))


def test_a_stream_that_stands_still_until_the_next_fault_is_as_old_as_that() -> None:
    faults = [Fault(1010.0, 1), Fault(1020.0, 2), Fault(1040.0, 3)]
    note_oldest(seen(late=(1020.0, 1040.0)), faults)
    assert [fault.oldest_ms for fault in faults] == [pytest.approx(5), pytest.approx(5), pytest.approx(20_000, abs=20)]


def test_a_row_that_is_too_old_fails_the_benchmark_and_says_how_often() -> None:
    result = {"oldest_ms_max": 20_000.0, "oldest_ms": [5.0, 20_000.0], "oldest_ms_bound": 400.0}
    assert _too_old(result) == "rows were up to 20000 ms old after 1 of 2 faults, 400 ms are allowed"
    assert _too_old(result | {"oldest_ms_bound": 30_000.0}) is None
