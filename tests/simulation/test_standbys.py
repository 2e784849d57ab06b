"""Standbys in place of secondaries: checkpoints and the order instead of state, and every law is kept."""

from __future__ import annotations

import pytest

from tests.simulation.mixes import CHANGES, STANDBY_REPAIRS, STANDBYS
from tests.simulation.runs import Runs, runs_of

SEEDS = range(195)
#: Cheap runs in which all events happen.
FEW = [
    *((seed, STANDBYS) for seed in (11, 9, 2, 3, 4)),
    *((seed, STANDBY_REPAIRS) for seed in (11, 9, 0, 2)),
]


@pytest.fixture(scope="module")
def results() -> Runs:
    return runs_of((STANDBYS, STANDBY_REPAIRS), SEEDS, FEW)


@pytest.mark.timeout(3600)  # a minute and a half on a free core
def test_standbys_keep_every_law(results: Runs) -> None:
    broken = results.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "take-overs",
        "take-overs by standbys",
        "steps repeated by standbys",
        "standbys that took over without a checkpoint",
        "checkpoints that waited for their commits",
        "checkpoints that producers asked for",
        "batches evicted that a checkpoint has",
        "workers that crashed during a take-over",
        "repairs",
        "runs that came to rest",
        "runs that were repaired before their end",
    ],
)
def test_it_happens_among_standbys(results: Runs, event: str) -> None:
    assert results.happens(event, 2)


@pytest.mark.parametrize(
    "seldom",
    [
        # The standby must hear the next primary before the checkpoint's last step is committed.
        "checkpoints of deposed primaries",
        # Only the source has the rows: each replica of its stage has left, and no log keeps the rows for a standby.
        "sources read again for a standby",
    ],
)
def test_it_happens_once_among_more_of_them(results: Runs, seldom: str) -> None:
    assert results.happens(seldom)


@pytest.fixture(scope="module")
def with_changes() -> Runs:
    return runs_of((CHANGES,), range(45), few=5)


@pytest.mark.timeout(3600)
def test_checkpoints_of_what_has_changed_keep_every_law(with_changes: Runs) -> None:
    broken = with_changes.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "checkpoints of what has changed",
        "changes of what was not committed",
        "changes of several cuts",
        "take-overs with changes to apply",
    ],
)
def test_it_happens_among_changes(with_changes: Runs, event: str) -> None:
    assert with_changes.happens(event, 11)
