"""Readers that cut their rows elsewhere each time: despite all losses, every row comes once, to the same partition."""

from __future__ import annotations

import pytest

from tests.simulation.mixes import (
    ANEW,
    ANEW_FAILING,
    FAILING,
    FAILING_LIVES,
    GOING_ON,
    GOING_ON_LIVES,
    LOSING,
    LOSING_LIVES,
    LOSING_STANDBYS,
    NUMBERED,
    NUMBERED_LIVES,
    NUMBERED_STANDBYS,
)
from tests.simulation.run import run
from tests.simulation.runs import Runs, runs_of

SEEDS = range(32)
#: Cheap runs in which all events happen.
FEW = (
    (0, NUMBERED), (3, NUMBERED), (2, NUMBERED_STANDBYS), (3, NUMBERED_STANDBYS), (9, NUMBERED_STANDBYS),
    (2, NUMBERED_LIVES), (3, NUMBERED_LIVES), (5, NUMBERED_LIVES), (7, NUMBERED_LIVES),
)  # fmt: skip
FEW_LOSING = (
    (0, LOSING), (3, LOSING), (0, LOSING_STANDBYS), (2, LOSING_STANDBYS), (2, LOSING_LIVES), (3, LOSING_LIVES),
)  # fmt: skip
FEW_LOSING_DATA = (
    (0, GOING_ON), (0, FAILING), (1, GOING_ON_LIVES), (1, FAILING_LIVES), (0, ANEW), (1, ANEW_FAILING),
)  # fmt: skip


@pytest.fixture(scope="module")
def results() -> Runs:
    return runs_of((NUMBERED, NUMBERED_STANDBYS, NUMBERED_LIVES), SEEDS, FEW)


@pytest.mark.timeout(3600)
def test_numbered_rows_keep_every_law(results: Runs) -> None:
    broken = results.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "rows made again",
        "sources read by another worker",
        "sources read again from the middle",
        "sources read again for a standby",
        "take-overs",
        "losses of everything",
        "repairs",
    ],
)
def test_it_happens_to_numbered_rows(results: Runs, event: str) -> None:
    assert results.happens(event, 4)


@pytest.fixture(scope="module")
def losing() -> Runs:
    return runs_of((LOSING, LOSING_STANDBYS, LOSING_LIVES), range(8), FEW_LOSING)


@pytest.mark.timeout(1200)
def test_rows_of_logs_that_lose_records_keep_every_law(losing: Runs) -> None:
    broken = losing.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "records that a log has lost",
        "records that a log has lost unread",
        "rows made again",
        "sources read again from the middle",
    ],
)
def test_it_happens_to_rows_of_logs(losing: Runs, event: str) -> None:
    assert losing.happens(event, 4)


@pytest.fixture(scope="module")
def losing_data() -> Runs:
    mixes = GOING_ON, FAILING, GOING_ON_LIVES, FAILING_LIVES, ANEW, ANEW_FAILING
    return runs_of(mixes, range(10), FEW_LOSING_DATA)


@pytest.mark.timeout(1200)
def test_records_that_are_lost_while_they_are_needed_keep_every_law(losing_data: Runs) -> None:
    broken = losing_data.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "records that a log has lost while they were needed",
        "records that a log has lost while nothing ran",
        "topics that were made anew",
        "runs ended by lost data",
        "lives that went on",
    ],
)
def test_it_happens_to_logs_that_lose_data(losing_data: Runs, event: str) -> None:
    assert losing_data.happens(event, 2)


#: Seeds that broke a law once, with the cause.
BROKE_ONCE = {
    113: "a query that was stopped read no row again for which an ordered step waited",
    1019: "the law did not see that a source was told again and again to begin with the start of its log",
    1515: "the law took it for standing still that output keeps the steps back which nobody has committed yet",
}


@pytest.mark.parametrize("seed", BROKE_ONCE)
def test_what_broke_a_law_once_breaks_none_now(seed: int) -> None:
    result = run(seed, NUMBERED_LIVES)
    assert result.ok, f"{BROKE_ONCE[seed]}: {result}"
