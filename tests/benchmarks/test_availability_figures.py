"""Figures of ``flux bench availability``, from calls of a sink that are written down."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.availability import (
    BEFORE_S,
    SIZE_S,
    SIZE_US,
    STABLE,
    TENTATIVE,
    UNDO,
    Failure,
    Noted,
    figures_of,
    formula,
    unwanted,
)

FAILURE = Failure(start=1_700_000_000, seconds=10)
ENDS = sorted(FAILURE.truth())


def calls(first_s: float, later_s: float) -> list[Noted]:
    """Make calls of a sink. Results are there 20 ms after their windows, and corrections 50 ms after the return; tentative ones
    come ``first_s`` after the first window that lacks rows, and ``later_s`` after the others."""
    made = []
    for end in ENDS:
        at = end / 1e6
        stable = at + 0.02
        if FAILURE.begins < at and stable < FAILURE.heals + 0.05:
            late = at + (first_s if at < FAILURE.begins + 1.5 * SIZE_S else later_s)
            late = max(late, FAILURE.begins + SIZE_S + first_s)
            if late < FAILURE.heals:
                made.append(Noted(late, 0, TENTATIVE, {end: 1}))
            stable = FAILURE.heals + 0.05
        made.append(Noted(stable, 0, STABLE, {end: FAILURE.truth()[end]}))
    return sorted(made, key=lambda note: note.at)


def test_a_failure_is_told_by_its_windows() -> None:
    found = figures_of(calls(2.7, 0.35), FAILURE)
    assert found["first_tentative_s"] == pytest.approx(2.7, abs=0.01)
    assert found["delay_max_s"] == pytest.approx(2.8, abs=0.01)
    assert (found["corrected_first_s"], found["corrected_last_s"]) == (0.05, 0.05)
    assert found["tentative"] == pytest.approx(formula("process", 10), rel=0.05)
    assert (found["revised"], found["never_corrected"], found["lost"], found["doubled"]) == (0, 0, 0, 0)


def test_results_that_are_wrong_in_the_end_are_told() -> None:
    notes: list[Any] = calls(2.7, 0.35)
    stable = [number for number, note in enumerate(notes) if note.kind == STABLE]
    lost, doubled = notes.pop(stable[20]), notes[stable[40]]
    notes += [doubled, Noted(FAILURE.heals, 0, TENTATIVE, {ENDS[-1] + SIZE_US: 1}), Noted(FAILURE.heals, 0, UNDO, {})]
    found = figures_of(notes, FAILURE)
    assert found["lost"] == sum(lost.counts.values()) > 0
    assert found["doubled"] == sum(doubled.counts.values()) > 0
    assert (found["windows_wrong"], found["never_corrected"]) == (2, 1)


def test_a_run_without_tentative_results_has_no_figures_of_them() -> None:
    found = figures_of([note for note in calls(2.7, 0.35) if note.kind == STABLE], FAILURE)
    assert (found["first_tentative_s"], found["corrected_last_s"], found["tentative"]) == (None, None, 0)
    assert found["delay_max_s"] == pytest.approx(10.05, abs=0.01)


@pytest.mark.parametrize(
    ("policy", "seconds", "windows"),
    [("process", 10, 96), ("delay", 10, 73), ("delay", 2, 0), ("process", 60, 596), ("delay", 60, 573), ("suspend", 10, 1)],
)  # fmt: skip
def test_the_formulas_count_windows_whose_wait_is_over(policy: str, seconds: float, windows: int) -> None:
    assert formula(policy, seconds) == windows
    assert FAILURE.begins == FAILURE.start + BEFORE_S


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"tentative": 3}, "3 tentative results"),
        ({"lost": 1}, "not that of the source"),
        ({"doubled": 1}, "not that of the source"),
        ({"windows_wrong": 1}, "not that of the source"),
    ],
)
def test_a_soak_fails_by_a_tentative_result_and_by_a_wrong_row(changed: dict[str, int], said: str | None) -> None:
    reason = unwanted({"tentative": 0, "lost": 0, "doubled": 0, "windows_wrong": 0} | changed)
    assert reason is None if said is None else said in str(reason)


def test_a_soak_has_rows_behind_a_failure_of_no_time() -> None:
    soaked = Failure(start=1_700_000_000, seconds=0.0, behind=120.0)
    assert soaked.begins == soaked.heals
    assert soaked.ends - soaked.start == BEFORE_S + 120.0
    assert sum(soaked.truth().values()) == 3 * 1_500 * 124
