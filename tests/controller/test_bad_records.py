"""How many records did not fit, as the readers of a source say it, who come and go."""

from __future__ import annotations

from typing import Any

from controller.report.progress import SourceCounts
from flux.wire.statistics import BadRecords


def said(*told: tuple[int, int, int]) -> dict[str, Any]:
    return {"bad_records": [BadRecords(*each) for each in told]}


def test_what_all_readers_have_met_comes_together() -> None:
    counts = SourceCounts(range(2))
    counts.note({0: said((0, 0, 5), (1, 0, 1)), 1: said((0, 1, 2)), 2: {}})
    assert (counts.of(0), counts.of(1)) == (7, 1)


def test_a_reader_that_is_over_has_met_what_it_has_met() -> None:
    """Such a reader was lost with its worker, closed, or began again in the same worker."""
    counts = SourceCounts(range(1))
    counts.note({0: said((0, 0, 5)), 1: said((0, 1, 2))})
    counts.note({1: said((0, 0, 1), (0, 1, 2))})
    assert counts.of(0) == 8
    counts.note({1: said((0, 0, 1))})
    assert counts.of(0) == 8
    counts.note({1: said((0, 0, 1), (0, 1, 1))})
    assert counts.of(0) == 9
    counts.note({1: said((0, 0, 3), (0, 1, 1))})
    assert counts.of(0) == 11


def test_what_no_source_has_is_left_out() -> None:
    counts = SourceCounts(range(1))
    counts.note({0: said((1, 0, 5), (-1, 0, 5))})
    assert counts.of(0) == counts.of(1) == 0
