"""Figures of ``flux bench paths``: the ages of rows that were due while links stood still, whenever they arrived."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.arrivals import Seen
from benchmarks.paths import figures, told


def test_only_rows_that_were_due_meanwhile_count() -> None:
    due = np.array([9.0, 10.0, 11.0, 12.0, 20.0])
    seen = Seen(due + np.array([5.0, 0.01, 0.02, 0.3, 5.0]), np.zeros(5), due, np.ones(5), np.zeros(1))
    assert figures(seen, 10.0, 20.0) == pytest.approx({"p50_ms": 20.0, "p99_ms": 294.4, "max_ms": 300.0}, abs=0.1)


def test_the_figures_of_a_way_are_told_in_one_line() -> None:
    found = {"p50_ms": 3.5, "p99_ms": 30, "bytes": 2_500_000, "second_feeds": 4, "won": 3, "lost": 0, "doubled": 0}
    assert told(found) == (
        "age p50 3.5 ms, p99 30 ms; 2.5 MB over links; 4 second feeds, 3 won; 0 lost, 0 counted twice"
    )
