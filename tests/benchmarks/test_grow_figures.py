"""``flux bench grow``: the notes of its stages, and the figures that are computed from these notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from benchmarks import grow
from benchmarks.arrivals import Seen, Span
from benchmarks.grow import KEYS, NEVER, PARTITIONS, Added, Addition, Counts, Numbered

CALM, GROWING = Span(1000.0, 1010.0), Span(1010.0, 1020.0)


def rows(*keys: int) -> pa.RecordBatch:
    columns = [pa.array(keys, pa.int64()), pa.array([7] * len(keys)), pa.array([0] * len(keys))]
    return pa.RecordBatch.from_arrays(columns, names=["key", "due_ns", "value"])


def opened(operator: Any, stage: str = "Added1", partition: int = 0) -> Any:
    operator.open(flux.Context(stage, partition))
    return operator


def test_rows_have_their_number_among_those_of_their_key() -> None:
    stage = opened(Numbered())
    assert stage.process(rows(5, 3, 5, 5, 0)).column("n").to_pylist() == [1, 1, 2, 3, 1]
    assert stage.process(rows(3, 5)).column("n").to_pylist() == [2, 4]
    assert grow.ranks(np.array([], np.int64)).tolist() == []


def test_an_added_stage_that_has_each_row_from_its_first_on_has_lost_and_doubled_nothing(tmp_path: Path) -> None:
    numbered, added = opened(Numbered()), opened(Added(str(tmp_path)))
    numbered.process(rows(1, 2, 2))
    added.process(numbered.process(rows(2, 9, 2)))
    assert grow.firsts(str(tmp_path)).keys() == {"Added1"}
    begun = grow.firsts(str(tmp_path))
    added.process(numbered.process(rows(2)))
    assert grow.firsts(str(tmp_path)) == begun, "the first row alone is noted"
    assert grow._without_counts(str(tmp_path), ["Added1"]) == ["Added1"]
    added.close()
    assert grow._without_counts(str(tmp_path), ["Added0", "Added1"]) == ["Added0"]
    (counts,) = grow.counts_in(str(tmp_path))
    assert counts[:, 2].tolist() == [3, 5, 3]
    assert counts[:, 1].tolist() == [NEVER, 0, 0]
    assert grow.counted([counts]) == Counts(0, 0)


@pytest.mark.parametrize(
    ("numbers", "expected"), [([1, 2, 4], Counts(1, 0)), ([1, 2, 2], Counts(0, 1)), ([3], Counts(0, 0))]
)
def test_a_number_that_is_missing_was_lost_and_one_too_many_doubled(
    numbers: list[int], expected: Counts, tmp_path: Path
) -> None:
    added = opened(Added(str(tmp_path)))
    added.process(pa.RecordBatch.from_arrays([pa.array([8] * len(numbers)), pa.array(numbers)], names=["key", "n"]))
    added.close()
    assert grow.counted(grow.counts_in(str(tmp_path))) == expected


def steady(hole: tuple[int, float, float] | None = None, slow: float = 0.0) -> Seen:
    """Make a row of each partition every 10 ms, 5 ms old, and ``slow`` seconds older in the growing time. Rows due in the hole
    come at its end."""
    due = np.repeat(np.arange(CALM.start, GROWING.end, 0.01), PARTITIONS)
    partition = np.tile(np.arange(PARTITIONS), len(due) // PARTITIONS)
    at = due + 0.005 + np.where(due >= GROWING.start, slow, 0.0)
    if hole is not None:
        number, start, until = hole
        at = np.where((partition == number) & (at > start) & (at < until), until, at)
    order = np.argsort(at, kind="stable")
    return Seen(at[order], partition[order], due[order], np.ones(len(due)), np.zeros(KEYS))


def figures(seen: Seen) -> dict[str, Any]:
    additions = [Addition(f"Added{n}", 1010.0 + n, 1010.05 + n + n / 1000, 1010.1 + n) for n in range(1, 9)]
    firsts = {each.name: each.asked + 0.02 for each in additions}
    return grow.summary(seen, additions, firsts, CALM, GROWING)


def test_additions_that_disturb_nothing_have_no_stall_and_the_ratio_one() -> None:
    found = figures(steady())
    assert found["stall_ms_max"] == pytest.approx(0, abs=1)
    assert found["calm_stall_ms_max"] == pytest.approx(0, abs=1)
    assert found["ratio"] == pytest.approx(1, abs=0.01)
    assert found["additions"] == 8
    assert found["add_p50_ms"] == pytest.approx(54.5, abs=0.1)
    assert found["add_p99_ms"] == pytest.approx(58, abs=0.1)
    assert found["first_row_ms"] == pytest.approx(20, abs=0.1)
    assert found["remove_p50_ms"] == pytest.approx(45.5, abs=0.1)


def test_a_stage_that_stands_still_for_an_addition_is_a_stall_of_that_length() -> None:
    assert figures(steady((2, 1013.1, 1013.2)))["stall_ms_max"] == pytest.approx(90, abs=12)
    calm = figures(steady((2, 1003.1, 1003.2)))
    assert calm["stall_ms_max"] == pytest.approx(0, abs=1), "that of the calm time is noise"
    assert calm["calm_stall_ms_max"] == pytest.approx(90, abs=12)


def test_rows_that_get_older_while_stages_come_are_in_the_ratio() -> None:
    found = figures(steady(slow=0.005))
    assert (found["p99_calm_ms"], found["p99_growing_ms"]) == pytest.approx((5, 10), abs=0.1)
    assert found["ratio"] == pytest.approx(2, abs=0.05)


def test_a_stage_that_got_no_row_is_no_figure() -> None:
    additions = [Addition("Added1", 1010.0, 1010.1, 1010.2)]
    assert grow.summary(steady(), additions, {}, CALM, GROWING)["first_row_ms"] is None
