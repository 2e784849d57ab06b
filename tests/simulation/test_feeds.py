"""Streams that are read over several feeds give the same rows, whatever link brings them (design: feeds, hedged)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation.mixes import FAULTLESS, FEEDS, FEEDS_IN_EVENT_TIME, FEEDS_OF_THREE, FEEDS_REPAIRS, FEEDS_UNEVEN
from tests.simulation.run import FEEDS_FROM, Result, run
from tests.simulation.runs import LONG

MIXES = (FEEDS, FEEDS_OF_THREE, FEEDS_UNEVEN, FEEDS_REPAIRS, FEEDS_IN_EVENT_TIME)
EACH, AMONG = range(60 if LONG else 4), range(FEEDS_FROM, FEEDS_FROM + (300 if LONG else 4))


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [*(run(seed, mix) for mix in MIXES for seed in EACH), *map(run, AMONG)]


def test_every_law_is_kept(results: list[Result]) -> None:
    assert [str(result) for result in results if not result.ok] == []


def test_streams_have_several_feeds(results: list[Result]) -> None:
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    assert counts["looks at streams with several feeds"] > 100
    assert counts["bytes that came over several feeds"] > 1000
    assert counts["second feeds"] > 0


def test_without_a_fault_a_hedged_stream_keeps_its_feed() -> None:
    results = [run(seed, replace(FAULTLESS, copies=2, slots=4, feeds=True)) for seed in range(3)]
    assert [str(result) for result in results if not result.ok] == []
