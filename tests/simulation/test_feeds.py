"""Streams that are read over several feeds: any link brings the same rows (design: feeds, hedged)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation.mixes import (
    FAULTLESS,
    FEEDS,
    FEEDS_IN_EVENT_TIME,
    FEEDS_OF_THREE,
    FEEDS_REPAIRS,
    FEEDS_UNEVEN,
    Mix,
)
from tests.simulation.run import FEEDS_FROM, Result, run
from tests.simulation.runs import LONG

#: By mix: seeds in which second feeds are opened, or streams have several feeds, and which take little time.
EVENTFUL: dict[Mix, tuple[int, ...]] = {
    FEEDS: (10, 22),
    FEEDS_OF_THREE: (3, 10),
    FEEDS_UNEVEN: (3,),
    FEEDS_REPAIRS: (10,),
    FEEDS_IN_EVENT_TIME: (0,),
}
#: Seeds whose feeds are drawn with everything else; some hundred of these seeds show each event.
AMONG = range(FEEDS_FROM, FEEDS_FROM + (300 if LONG else 0))


@pytest.fixture(scope="module")
def results() -> list[Result]:
    each = [(seed, mix) for mix, seeds in EVENTFUL.items() for seed in (range(60) if LONG else seeds)]
    return [*(run(seed, mix) for seed, mix in each), *map(run, AMONG)]


def test_every_law_is_kept(results: list[Result]) -> None:
    assert [str(result) for result in results if not result.ok] == []


def test_streams_have_several_feeds(results: list[Result]) -> None:
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    assert counts["looks at streams with several feeds"] > 100
    assert counts["bytes that came over several feeds"] > 1000
    assert counts["second feeds"] > 5
    assert counts["races that second feeds won"] > 2


def test_without_a_fault_a_hedged_stream_keeps_its_feed() -> None:
    results = [run(seed, replace(FAULTLESS, copies=2, slots=4, feeds=True)) for seed in range(3)]
    assert [str(result) for result in results if not result.ok] == []
