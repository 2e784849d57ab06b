"""Percentiles of the latency of a stage, which each heartbeat has."""

from __future__ import annotations

from flux.worker.report import StepAges


def test_percentiles_are_found_anew_when_one_age_in_eight_is_new() -> None:
    ages = StepAges()
    assert ages.percentiles_ms() is None
    for number in range(1, 101):
        ages.add(number / 1000)
    assert ages.percentiles_ms() == [50.0, 99.0]
    for _ in range(14):
        ages.add(1.0)
    assert ages.percentiles_ms() == [50.0, 99.0], "14 of 114 are new"
    ages.add(1.0)
    assert ages.percentiles_ms() == [58.0, 1000.0]


def test_the_first_ages_are_told_at_once() -> None:
    ages = StepAges()
    for number in range(1, 4):
        ages.add(number / 1000)
        assert ages.percentiles_ms() == [-(-number // 2), number]


def test_only_the_last_ages_count() -> None:
    ages = StepAges()
    for seconds in (5.0, 0.001):
        for _ in range(ages.COUNT_MAX):
            ages.add(seconds)
    assert ages.percentiles_ms() == [1.0, 1.0]
    assert len(ages) == ages.COUNT_MAX
