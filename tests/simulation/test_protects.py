"""Changes of the recovery technique while rows flow and workers die: every law is kept, and the wishes come true."""

from __future__ import annotations

import pytest

from tests.simulation.mixes import PROTECTED, PROTECTED_UNEVEN
from tests.simulation.runs import Runs, runs_of

SEEDS = range(25)


@pytest.fixture(scope="module")
def results() -> Runs:
    return runs_of((PROTECTED, PROTECTED_UNEVEN), SEEDS, few=5)


@pytest.mark.timeout(3600)
def test_changes_of_protection_keep_every_law(results: Runs) -> None:
    broken = results.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "changes of protection asked for",
        "changes of protection: protected",
        "changes of protection: protect given up",
        "changes of protection refused",
        "changes to standbys",
        "changes from standbys",
        "changes to fewer replicas",
        "runs at rest after changes of protection",
        "take-overs by standbys",
        "take-overs",
        "workers that crashed during a repair",
        "repairs",
    ],
)
def test_it_happens_among_changes(results: Runs, event: str) -> None:
    assert results.happens(event, 4)
