"""Rates of healthy streams while another is silent, from calls of a sink that are written down; the payload of feeds' rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.availability import SIZE_S, SIZE_US, STABLE, TENTATIVE, Noted
from benchmarks.feed_costs import PAYLOAD, WIDE, widened
from benchmarks.healthy import CALM_S, SILENT_S, WARM_UP_S, Spans, ends_of, figures_of

SPANS = Spans(start=1_700_000_000)
ENDS = range(round(SPANS.start * 1e6), round(SPANS.ends * 1e6) + 1, SIZE_US)


def given(calm: int, during: int) -> Counter[int]:
    """Make rows of each window: ``calm`` outside of failures, ``during`` within."""
    return Counter({end: during if SPANS.silent(end / 1e6 - SIZE_S / 2) else calm for end in ENDS})


def test_the_ratio_is_that_of_windows_within_failures_to_those_outside() -> None:
    rows = given(1_000, 900)
    notes = [Noted(end / 1e6, 0, STABLE, {end: count}) for end, count in rows.items()]
    notes.append(Noted(SPANS.begins(0) + 3, 1, TENTATIVE, {ENDS[200]: 1}))
    found = figures_of(notes, SPANS, rows)
    assert (found["calm_rows_per_s"], found["during_rows_per_s"], found["ratio"]) == (10_000, 9_000, 0.9)
    assert (found["tentative"], found["lost"], found["doubled"]) == (1, 0, 0)


def test_rows_that_are_missing_or_too_many_are_told() -> None:
    rows = given(1_000, 1_000)
    notes = [Noted(end / 1e6, 0, STABLE, {end: count}) for end, count in rows.items()]
    lost, doubled = notes.pop(30), notes[50]
    found = figures_of([*notes, doubled], SPANS, rows)
    assert (found["lost"], found["doubled"]) == (sum(lost.counts.values()), sum(doubled.counts.values()))


def test_windows_without_rows_count_as_a_rate_of_nothing() -> None:
    rows = Counter({end: count for end, count in given(1_000, 0).items() if count})
    found = figures_of([Noted(end / 1e6, 0, STABLE, {end: count}) for end, count in rows.items()], SPANS, rows)
    assert found["ratio"] == pytest.approx(0.0, abs=0.01)


def test_a_time_is_calm_or_tentative_or_neither() -> None:
    begins = SPANS.begins(0)
    assert begins == SPANS.start + WARM_UP_S + CALM_S
    assert SPANS.silent(begins)
    assert not SPANS.silent(begins + SILENT_S)
    assert not SPANS.calm(begins + 1)
    assert not SPANS.tentative(begins + 1)  # the bound has not passed yet
    assert SPANS.tentative(begins + SILENT_S - 0.5)
    assert not SPANS.calm(begins + SILENT_S + 0.5)  # the backlog of the silent one
    assert SPANS.calm(begins + SILENT_S + 2)


def test_times_are_counted_by_the_end_of_their_window() -> None:
    assert ends_of(np.array([0, 99_999, 100_000])) == {100_000: 2, 200_000: 1}


def test_equal_keys_get_equal_payloads_in_any_batch() -> None:
    columns = [pa.array([5, 6, 5]), pa.array([1, 2, 3])]
    whole = widened(pa.RecordBatch.from_arrays(columns, names=["key", "due_ns"]))
    part = widened(pa.RecordBatch.from_arrays([column[1:] for column in columns], names=["key", "due_ns"]))
    assert whole.schema == WIDE
    assert whole.slice(1).equals(part)
    payload = whole.column("payload")
    assert payload[0] == payload[2] != payload[1]
    assert len(payload[0].as_py()) == PAYLOAD
