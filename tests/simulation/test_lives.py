"""Queries that lose everything at once and go on from their directory: shown output stays true, no row is lost or doubled."""

from __future__ import annotations

import pytest

from tests.simulation.mixes import LIVES, LIVES_FETCHED, LIVES_OF_ONE, LIVES_WITHOUT_WORKERS
from tests.simulation.runs import Runs, runs_of

#: Beyond the first thousand there are sinks. The first of these show all events in a second.
SEEDS = (1004, 1006, 1001, 1003, 1002, 1000, 1005, *range(1007, 1020))


@pytest.fixture(scope="module")
def results() -> Runs:
    return runs_of((LIVES, LIVES_OF_ONE), SEEDS, few=6)


@pytest.mark.timeout(3600)  # a minute on a free core
def test_what_was_shown_before_a_loss_of_everything_is_the_same_after_it(results: Runs) -> None:
    broken = results.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "lives that went on",
        "losses of everything",
        "losses in the middle of a flush",
        "queries that were stopped",
        "take-overs",
        "take-overs by standbys",
        "steps repeated by standbys",
        "checkpoints that waited for their commits",
        "checkpoints of what has changed",
        "take-overs with changes to apply",
        "sources read again from the middle",
        "batches evicted that a checkpoint has",
        "workers that crashed during a take-over",
        "repairs",
        "primaries that went on outside",
        "ends of what a location knows",
        "runs that came to rest",
    ],
)
def test_it_happens_in_these_lives(results: Runs, event: str) -> None:
    assert results.happens(event, 4)


def test_a_query_goes_on_where_all_workers_are_lost_and_the_vault_is_not() -> None:
    runs = runs_of((LIVES_WITHOUT_WORKERS,), range(1000, 1012), few=3)
    assert runs.happens("queries that waited for new workers", 4)
    assert sum(result.counts["runs that lost all workers"] for result in runs.results) == 0


def test_output_that_is_fetched_outlives_the_workers_that_have_it() -> None:
    """Fetch the output also if stages before the last one have lost their last replica when all output was there."""
    runs = runs_of((LIVES_FETCHED,), range(1, 16), few=4)
    assert runs.happens("take-overs", 11)
    assert sum(result.counts["fetches that the end of the query broke off"] for result in runs.results) == 0
